//! The file of a checkpoint, read by position. It is never mapped: if another process cuts a mapped file short, the
//! next access ends this process.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::path::PathBuf;

use crate::error::Error;
use crate::safetensors::Check;

/// Bytes that a thread reads at a time when it needs no whole tensor. Less than folding takes per thread.
pub(super) const PIECE: usize = 32 << 10;

#[derive(Debug)]
pub(super) struct Source {
    pub path: PathBuf,
    pub file: File,
    /// The file's length when it was opened.
    pub length: u64,
}

impl Source {
    /// An error of this file.
    pub fn fail(&self, why: String) -> Error {
        Error::Checkpoint(format!("{}: {why}", self.path.display()))
    }

    pub fn read(&self, into: &mut [u8], at: u64) -> Check<()> {
        read_exact_at(&self.file, into, at).map_err(|e| match e.kind() {
            ErrorKind::UnexpectedEof => "the file was cut short while it was read".into(),
            _ => format!("cannot be read: {e}"),
        })
    }

    /// Calls `each` with the bytes of `range`, piece by piece, and each piece's place in the file.
    pub fn pieces(&self, buffer: &mut [u8; PIECE], range: Range<u64>, mut each: impl FnMut(u64, &[u8])) -> Check<()> {
        for at in range.clone().step_by(PIECE) {
            let piece = &mut buffer[..(range.end - at).min(PIECE as u64) as usize];
            self.read(piece, at)?;
            each(at, piece);
        }
        Ok(())
    }
}

#[cfg(unix)]
fn read_exact_at(file: &File, into: &mut [u8], at: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, into, at)
}

#[cfg(windows)]
fn read_exact_at(file: &File, mut into: &mut [u8], mut at: u64) -> io::Result<()> {
    while !into.is_empty() {
        match std::os::windows::fs::FileExt::seek_read(file, into, at) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => (into, at) = (&mut into[count..], at + count as u64),
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}
