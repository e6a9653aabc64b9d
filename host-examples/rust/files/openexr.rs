//! OpenEXR pictures: floats, which are neither rounded nor clamped. 0 is black and 1 is white, as the numbers are: linear
//! light is not converted.

use std::fs::File;
use std::io::{BufReader, BufWriter};
use std::path::{Path, PathBuf};

use exr::prelude::{ReadChannels, ReadLayers, SpecificChannels, WritableImage, read};

use super::{Clip, ClipOptions, ONE_PICTURE, Sink, Source};
use crate::draft::{self, Draft};
use crate::tensor::{Dtype, FrameKind};
use crate::units::Rate;
use crate::{Result, memory};

struct Reader {
    kind: FrameKind,
    files: std::vec::IntoIter<PathBuf>,
}

/// Depth of integer outputs that are made from floats.
const BITS: u32 = 16;

/// At least one file.
pub fn open(files: Vec<PathBuf>, options: &ClipOptions) -> Result<(Clip, Box<dyn Source>)> {
    files.iter().for_each(|path| draft::protect(path));
    let (width, height, _) = picture(&files[0])?;
    let kind = FrameKind::pixels(Dtype::F32, width, height);
    let rate = options.rate.unwrap_or(Rate::DEFAULT);
    let clip = Clip { bits: BITS, ..Clip::new(kind, rate).with_frames(Some(files.len() as u64)) };
    Ok((clip, Box::new(Reader { kind, files: files.into_iter() })))
}

/// Width, height and interleaved RGB of a picture, from -1 to 1 as the library has floats.
fn picture(path: &Path) -> Result<(usize, usize, Vec<f32>)> {
    let failed = |why: &dyn std::fmt::Display| {
        format!("{} is no OpenEXR picture of red, green and blue that can be read: {why}", path.display())
    };
    let file = File::open(path).map_err(|why| format!("{} cannot be opened: {why}", path.display()))?;
    let image = read()
        .no_deep_data()
        .largest_resolution_level()
        .rgb_channels(
            |size, _| {
                let room = size.width().saturating_mul(size.height()).saturating_mul(3);
                memory::zeroed::<f32>(room, path.display()).map(|pixels| (size.width(), pixels))
            },
            |room: &mut Result<(usize, Vec<f32>)>, at, (r, g, b): (f32, f32, f32)| {
                let Ok((width, pixels)) = room else { return };
                let first = 3 * (at.y() * *width + at.x());
                pixels[first..first + 3].copy_from_slice(&[r, g, b].map(|value| 2.0 * value - 1.0));
            },
        )
        .first_valid_layer()
        .all_attributes()
        .from_buffered(BufReader::new(file))
        .map_err(|why| failed(&why))?;
    let (width, pixels) = image.layer_data.channel_data.pixels?;
    Ok((width, pixels.len() / 3 / width.max(1), pixels))
}

impl Source for Reader {
    fn read(&mut self, frame: &mut [u8]) -> Result<bool> {
        let Some(path) = self.files.next() else { return Ok(false) };
        let (width, height, pixels) = picture(&path)?;
        let (w, h) = (self.kind.width, self.kind.height);
        if (width, height) != (w, h) {
            let name = path.display();
            return Err(format!(
                "{name} is {width}x{height}, but the first picture is {w}x{h}; make them the same size"
            ));
        }
        for (out, value) in frame.chunks_exact_mut(4).zip(pixels) {
            out.copy_from_slice(&value.to_le_bytes());
        }
        Ok(true)
    }
}

/// Writes one picture of 32-bit floats.
pub fn encode(file: &File, kind: FrameKind, frame: &[u8]) -> Result<()> {
    let value = |at: usize| {
        let bytes = &frame[4 * at..][..4];
        (f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) + 1.0) / 2.0
    };
    let pixel = |at: exr::math::Vec2<usize>| {
        let first = 3 * (at.y() * kind.width + at.x());
        (value(first), value(first + 1), value(first + 2))
    };
    let image = exr::image::Image::from_channels((kind.width, kind.height), SpecificChannels::rgb(pixel));
    let written = image.write().to_buffered(BufWriter::new(file));
    written.map_err(|why| format!("the picture cannot be written: {why}; make room"))
}

pub struct One {
    draft: Draft,
    kind: FrameKind,
    written: bool,
}

impl One {
    pub fn create(path: &Path, kind: FrameKind, clip: &Clip) -> Result<One> {
        if clip.frames.is_some_and(|frames| frames > 1) {
            return Err(format!("{}: {ONE_PICTURE}", path.display()));
        }
        Ok(One { draft: Draft::new(path)?, kind, written: false })
    }
}

impl Sink for One {
    fn write(&mut self, frame: &[u8]) -> Result<()> {
        if std::mem::replace(&mut self.written, true) {
            return Err(format!("an .exr file: {ONE_PICTURE}"));
        }
        encode(&self.draft.create()?, self.kind, frame)
    }

    fn finish(self: Box<Self>) -> Result<()> {
        self.draft.finish()
    }
}
