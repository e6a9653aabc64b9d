//! Bare pixels: interleaved RGB, one frame after the other.

use std::fs::File;
use std::io::{BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};

use super::{Clip, Sink, Source, read_up_to};
use crate::Result;
use crate::draft::Draft;
use crate::options::VideoOptions;
use crate::tensor::{Dtype, FrameKind};
use crate::units::Rate;

struct Reader {
    path: PathBuf,
    file: BufReader<File>,
}

pub fn open(path: &Path, options: &VideoOptions) -> Result<(Clip, Box<dyn Source>)> {
    let name = path.display();
    let Some([width, height]) = options.size else {
        return Err(format!("{name} is raw and does not say its size; add --size WIDTHxHEIGHT"));
    };
    let kind = FrameKind::pixels(Dtype::U8, width as usize, height as usize);
    let file = File::open(path).map_err(|why| format!("{name} cannot be opened: {why}"))?;
    let length = file.metadata().map_err(|why| format!("{name} cannot be read: {why}"))?.len();
    if length == 0 || !length.is_multiple_of(kind.bytes() as u64) {
        return Err(format!(
            "{name} has {length} bytes, which are no whole frames of {width}x{height} RGB ({} bytes each); check --size",
            kind.bytes()
        ));
    }
    let frames = length / kind.bytes() as u64;
    let rate = options.rate.unwrap_or(Rate::DEFAULT);
    let clip = Clip { kind, rate, frames: Some(frames), expected: Some(frames), y4m: None };
    Ok((clip, Box::new(Reader { path: path.to_owned(), file: BufReader::with_capacity(1 << 20, file) })))
}

impl Source for Reader {
    fn read(&mut self, frame: &mut [u8]) -> Result<bool> {
        let got = read_up_to(&mut self.file, frame);
        let got = got.map_err(|why| format!("{} cannot be read: {why}", self.path.display()))?;
        Ok(got == frame.len())
    }
}

pub struct Raw {
    draft: Draft,
    file: BufWriter<File>,
}

impl Raw {
    pub fn create(path: &Path) -> Result<Raw> {
        let draft = Draft::new(path)?;
        let file = BufWriter::with_capacity(1 << 20, draft.create()?);
        Ok(Raw { draft, file })
    }
}

impl Sink for Raw {
    fn write(&mut self, frame: &[u8]) -> Result<()> {
        self.file.write_all(frame).map_err(|why| format!("the raw file cannot be written: {why}; make room"))
    }

    fn finish(mut self: Box<Self>) -> Result<()> {
        self.file.flush().map_err(|why| format!("the raw file cannot be written: {why}; make room"))?;
        self.draft.finish()
    }
}
