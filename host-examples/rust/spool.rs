//! Frames in a temporary file, to be read again in any order. Gone when dropped, and after Ctrl-C.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::Result;
use crate::draft::Draft;
use crate::files::{Sink, Source};
use crate::tensor::FrameKind;

/// Readers and writers share one position in the file, so only one of them is used at a time.
pub struct Spool {
    draft: Draft,
    pub kind: FrameKind,
    frames: Arc<AtomicU64>,
}

impl Spool {
    pub fn new(kind: FrameKind) -> Result<Spool> {
        let draft = Draft::temporary("vvae-frames")?;
        Ok(Spool { draft, kind, frames: Arc::new(AtomicU64::new(0)) })
    }

    pub fn count(&self) -> u64 {
        self.frames.load(Ordering::Acquire)
    }

    pub fn frame(&self, index: u64) -> Result<Vec<u8>> {
        let mut frame = self.kind.buffer()?;
        read(&mut self.draft.create()?, index, &mut frame)?;
        Ok(frame)
    }

    /// All frames, from the first on.
    pub fn source(&self) -> Result<Box<dyn Source>> {
        Ok(Box::new(Reader { file: self.draft.create()?, next: 0, end: self.count() }))
    }

    /// Replaces all frames.
    pub fn sink(&self) -> Result<Box<dyn Sink>> {
        let mut file = self.draft.create()?;
        file.seek(SeekFrom::Start(0)).map_err(failed)?;
        self.frames.store(0, Ordering::Release);
        Ok(Box::new(Writer { file, frames: Arc::clone(&self.frames) }))
    }
}

fn read(file: &mut File, index: u64, frame: &mut [u8]) -> Result<()> {
    let start = SeekFrom::Start(index * frame.len() as u64);
    let done = file.seek(start).and_then(|_| file.read_exact(frame));
    done.map_err(|why| format!("a temporary file cannot be read: {why}; try again"))
}

struct Reader {
    file: File,
    next: u64,
    end: u64,
}

impl Source for Reader {
    fn read(&mut self, frame: &mut [u8]) -> Result<bool> {
        if self.next == self.end {
            return Ok(false);
        }
        read(&mut self.file, self.next, frame)?;
        self.next += 1;
        Ok(true)
    }
}

struct Writer {
    file: File,
    frames: Arc<AtomicU64>,
}

impl Sink for Writer {
    fn write(&mut self, frame: &[u8]) -> Result<()> {
        self.file.write_all(frame).map_err(failed)?;
        self.frames.fetch_add(1, Ordering::Release);
        Ok(())
    }

    fn finish(self: Box<Self>) -> Result<()> {
        Ok(())
    }
}

fn failed(why: std::io::Error) -> String {
    let folder = std::env::temp_dir();
    format!("{} cannot be written: {why}; make room, set TMPDIR, or take fewer --frames", folder.display())
}
