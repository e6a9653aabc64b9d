//! PNGs: pictures, and the animated kind.

use std::fs::File;
use std::io::{BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};

use super::{Clip, ClipOptions, ONE_PICTURE, Sink, Source};
use crate::draft::{self, Draft};
use crate::tensor::{Dtype, FrameKind};
use crate::units::Rate;
use crate::{Result, memory, say};

struct Reader {
    kind: FrameKind,
    files: std::vec::IntoIter<PathBuf>,
    keep_damaged: bool,
}

/// At least one file.
pub fn open(files: Vec<PathBuf>, options: &ClipOptions, keep_damaged: bool) -> Result<(Clip, Box<dyn Source>)> {
    files.iter().for_each(|path| draft::protect(path));
    let info = decoder(&files[0])?;
    let (width, height) = info.info().size();
    let (colours, depth) = info.output_color_type();
    let dtype = if depth == png::BitDepth::Sixteen { Dtype::U16 } else { Dtype::U8 };
    let has_alpha = matches!(colours, png::ColorType::Rgba | png::ColorType::GrayscaleAlpha);
    let kind = FrameKind::pixels(dtype, width as usize, height as usize).with_channels(if has_alpha { 4 } else { 3 });
    let frames = (!keep_damaged).then_some(files.len() as u64);
    let mut clip = Clip::new(kind, options.rate.unwrap_or(Rate::DEFAULT)).with_frames(frames);
    let dimensions = info.info().pixel_dims.filter(|found| found.unit == png::Unit::Unspecified);
    if let Some(found) = dimensions {
        // Pixels to a length: the more, the narrower each is.
        clip.tags.aspect = format!("{}:{}", found.yppu, found.xppu);
    }
    Ok((clip, Box::new(Reader { kind, files: files.into_iter(), keep_damaged })))
}

fn decoder(path: &Path) -> Result<png::Reader<BufReader<File>>> {
    let file = File::open(path).map_err(|why| format!("{} cannot be opened: {why}", path.display()))?;
    let mut decoder = png::Decoder::new(BufReader::new(file));
    // Palettes and few bits become 8 bits.
    decoder.set_transformations(png::Transformations::EXPAND);
    decoder.read_info().map_err(|why| format!("{} is no PNG that can be read: {why}", path.display()))
}

impl Source for Reader {
    fn read(&mut self, frame: &mut [u8]) -> Result<bool> {
        while let Some(path) = self.files.next() {
            match self.picture(&path, frame) {
                Err(why) if self.keep_damaged => say::warn(format_args!("{why}; it is left out")),
                read => return read.map(|()| true),
            }
        }
        Ok(false)
    }
}

impl Reader {
    fn picture(&self, path: &Path, frame: &mut [u8]) -> Result<()> {
        let mut reader = decoder(path)?;
        let (width, height) = reader.info().size();
        if (width as usize, height as usize) != (self.kind.width, self.kind.height) {
            let (w, h) = (self.kind.width, self.kind.height);
            return Err(format!(
                "{} is {width}x{height}, but the first picture is {w}x{h}; make them the same size",
                path.display()
            ));
        }
        let size = reader.output_buffer_size().ok_or_else(|| format!("{} is too large", path.display()))?;
        let mut pixels = memory::zeroed(size, path.display())?;
        reader.next_frame(&mut pixels).map_err(|why| format!("{} is damaged: {why}", path.display()))?;
        let (colours, depth) = reader.output_color_type();
        let bytes = if depth == png::BitDepth::Sixteen { 2 } else { 1 };
        let channels = colours.samples();
        // Grey pictures have their one channel three times. Alpha is always the last, and 1 where there is none.
        let pick = |c: usize| match c {
            3 if channels.is_multiple_of(2) => Some(channels - 1),
            3 => None,
            _ => Some(if channels >= 3 { c } else { 0 }),
        };
        let wanted = self.kind.dtype.bytes();
        let pixels = pixels.chunks_exact(channels * bytes);
        for (pixel, out) in pixels.zip(frame.chunks_exact_mut(self.kind.channels * wanted)) {
            for (c, out) in out.chunks_exact_mut(wanted).enumerate() {
                let Some(channel) = pick(c) else {
                    out.fill(u8::MAX);
                    continue;
                };
                // PNG has the high byte first.
                let sample = &pixel[channel * bytes..][..bytes];
                match (bytes, wanted) {
                    (_, 1) => out[0] = sample[0],
                    _ => out.copy_from_slice(&[sample[bytes - 1], sample[0]]),
                }
            }
        }
        Ok(())
    }
}

/// Writes one picture.
pub fn encode_rgb(file: impl Write, kind: FrameKind, pixels: &[u8]) -> Result<()> {
    encode(file, kind, pixels, None)
}

/// `ratio`: width to height of a pixel that is not square.
pub fn encode(file: impl Write, kind: FrameKind, pixels: &[u8], ratio: Option<(u32, u32)>) -> Result<()> {
    let failed = |why: &dyn std::fmt::Display| format!("the picture cannot be written: {why}; make room");
    let mut encoder = png::Encoder::new(BufWriter::new(file), kind.width as u32, kind.height as u32);
    encoder.set_color(if kind.channels == 4 { png::ColorType::Rgba } else { png::ColorType::Rgb });
    encoder.set_compression(png::Compression::Fast);
    let unit = png::Unit::Unspecified;
    encoder.set_pixel_dims(ratio.map(|(width, height)| png::PixelDimensions { xppu: height, yppu: width, unit }));
    let deep = kind.dtype == Dtype::U16;
    encoder.set_depth(if deep { png::BitDepth::Sixteen } else { png::BitDepth::Eight });
    let mut writer = encoder.write_header().map_err(|why| failed(&why))?;
    let written = if deep {
        let bytes = pixels.chunks_exact(2).flat_map(|pair| [pair[1], pair[0]]);
        let swapped = memory::collected(pixels.len(), bytes, "the picture")?;
        writer.write_image_data(&swapped)
    } else {
        writer.write_image_data(pixels)
    };
    written.and_then(|()| writer.finish()).map_err(|why| failed(&why))
}

/// Writes an animated PNG of 8-bit RGB frames, which runs for ever.
pub fn write_animation(path: &Path, kind: FrameKind, frames: &[Vec<u8>], rate: u16) -> Result<()> {
    let failed = |why: png::EncodingError| format!("{} cannot be written: {why}", path.display());
    let draft = Draft::replacing(path)?;
    let mut encoder = png::Encoder::new(BufWriter::new(draft.create()?), kind.width as u32, kind.height as u32);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    encoder.set_animated(frames.len() as u32, 0).map_err(failed)?;
    encoder.set_frame_delay(1, rate).map_err(failed)?;
    let mut writer = encoder.write_header().map_err(failed)?;
    for frame in frames {
        writer.write_image_data(frame).map_err(failed)?;
    }
    writer.finish().map_err(failed)?;
    draft.finish()
}

pub struct One {
    draft: Draft,
    kind: FrameKind,
    ratio: Option<(u32, u32)>,
    written: bool,
}

impl One {
    pub fn create(path: &Path, kind: FrameKind, clip: &Clip) -> Result<One> {
        if clip.frames.is_some_and(|frames| frames > 1) {
            return Err(format!("{}: {ONE_PICTURE}", path.display()));
        }
        Ok(One { draft: Draft::new(path)?, kind, ratio: clip.tags.ratio(), written: false })
    }
}

impl Sink for One {
    fn write(&mut self, frame: &[u8]) -> Result<()> {
        if std::mem::replace(&mut self.written, true) {
            return Err(format!("a .png file: {ONE_PICTURE}"));
        }
        encode(self.draft.create()?, self.kind, frame, self.ratio)
    }

    fn finish(self: Box<Self>) -> Result<()> {
        self.draft.finish()
    }
}
