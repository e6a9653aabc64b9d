//! Bare pixels: interleaved RGB, one frame after the other.

use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};

use super::stdio::{self, Input, Output};
use super::{Clip, ClipOptions, InputOptions, Sink, Source, read_up_to};
use crate::Result;
use crate::tensor::{Dtype, FrameKind};
use crate::units::Rate;

struct Reader {
    path: PathBuf,
    file: BufReader<Box<dyn Read + Send>>,
}

pub fn open(path: &Path, options: &ClipOptions, input: &InputOptions) -> Result<(Clip, Box<dyn Source>)> {
    let name = path.display();
    let Some([width, height]) = input.size else {
        return Err(format!("{name} is raw and does not say its size; add --size WIDTHxHEIGHT"));
    };
    let dtype = if options.bits.is_some_and(|bits| bits > 8) { Dtype::U16 } else { Dtype::U8 };
    let kind = FrameKind::pixels(dtype, width as usize, height as usize);
    let Input { from: file, length } = stdio::open(path)?;
    let frame = kind.bytes() as u64;
    if let Some(length) = length.filter(|length| *length == 0 || !length.is_multiple_of(frame)) {
        return Err(format!(
            "{name} has {length} bytes, which are no whole frames of {width}x{height} RGB ({frame} bytes each); check \
             --size and --bits"
        ));
    }
    let clip = Clip::new(kind, options.rate.unwrap_or(Rate::DEFAULT)).with_frames(length.map(|length| length / frame));
    Ok((clip, Box::new(Reader { path: path.to_owned(), file })))
}

impl Source for Reader {
    fn read(&mut self, frame: &mut [u8]) -> Result<bool> {
        let got = read_up_to(&mut self.file, frame);
        let got = got.map_err(|why| format!("{} cannot be read: {why}", self.path.display()))?;
        if got > 0 && got < frame.len() {
            return Err(format!("{} ends within a frame; check --size and --bits", self.path.display()));
        }
        Ok(got == frame.len())
    }
}

pub struct Raw(Output);

impl Raw {
    pub fn create(path: &Path) -> Result<Raw> {
        Output::create(path).map(Raw)
    }
}

impl Sink for Raw {
    fn write(&mut self, frame: &[u8]) -> Result<()> {
        self.0.write(frame)
    }

    fn finish(self: Box<Self>) -> Result<()> {
        self.0.finish()
    }
}
