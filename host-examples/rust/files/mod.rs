//! Clips in files: what can be read frame by frame, and written so.

mod codec;
pub mod colour;
mod ffmpeg;
mod options;
mod pngs;
mod probe;
mod program;
mod raw;
pub mod safetensors;
mod stdio;
pub mod tags;
pub mod tensors;
mod y4m;

pub use codec::Codec;
pub use colour::Matrix;
pub use options::VideoOptions;
pub use pngs::{encode_rgb, write_animation};
pub use stdio::is_stdio;

use std::path::{Path, PathBuf};

use clap::ValueEnum;

use crate::tensor::{Dtype, FrameKind};
use crate::units::Rate;
use crate::{Result, draft};
use tags::Tags;

/// A clip as far as it is known before it is read.
#[derive(Debug, Clone)]
pub struct Clip {
    pub kind: FrameKind,
    pub rate: Rate,
    /// Its length, where the file says so.
    pub frames: Option<u64>,
    /// About its length, for showing progress.
    pub expected: Option<u64>,
    /// The layout of a y4m file, to write another one like it.
    pub y4m: Option<&'static str>,
    /// Of a sample in the source.
    pub bits: u32,
    pub tags: Tags,
    /// The file that has the sound, and the codecs of it.
    pub sound: Option<(PathBuf, Vec<String>)>,
}

impl Clip {
    /// Of a length that is not known.
    pub fn new(kind: FrameKind, rate: Rate) -> Clip {
        let bits = if kind.dtype == Dtype::U16 { 16 } else { 8 };
        Clip { kind, rate, frames: None, expected: None, y4m: None, bits, tags: Tags::default(), sound: None }
    }

    pub fn with_frames(self, frames: Option<u64>) -> Clip {
        Clip { frames, expected: frames, ..self }
    }
}

/// Formats of standard output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PipeFormat {
    Y4m,
    /// Interleaved, 8 or (--bits 16) 16 bits a channel.
    Rgb,
    Safetensors,
}

pub const ONE_PICTURE: &str = "it holds one picture; for a clip name a folder, with a slash at its end";

/// Gives frames in the kind of its clip, until there are none.
pub trait Source: Send {
    /// `false`: the clip has ended, and `frame` means nothing.
    fn read(&mut self, frame: &mut [u8]) -> Result<bool>;
}

/// Takes frames. What was written counts only once finished; dropped before that, it leaves nothing behind.
pub trait Sink: Send {
    fn write(&mut self, frame: &[u8]) -> Result<()>;
    fn finish(self: Box<Self>) -> Result<()>;
}

/// The formats, as the help lists them.
pub const INPUTS: &str = "\
Inputs, by name:
  clip.y4m            YUV4MPEG: 420, 422, 444 in 8 bits, 420p10, 422p10, 444p10; limited range unless it says full
  frame.png, folder/  one PNG, or all PNGs of a folder in the order of their names; 8 or 16 bits, alpha dropped
  clip.raw, clip.rgb  interleaved RGB of 8 bits a channel, with --size WxH
  video.safetensors   the tensor `video` [1, 3, T, H, W] of floats, as reference implementations write it
  -                   standard input: y4m, or raw with --size
  anything else       through the programs ffprobe and ffmpeg; with all bits, colour tags, exact rate and sound
";
pub const OUTPUTS: &str = "\
Outputs, by name:
  clip.y4m            YUV4MPEG, in the layout of a y4m input, else 444; --y4m chooses
  frame.png, folder/  one picture, or a new folder of frame-000001.png, ...
  clip.raw, clip.rgb  interleaved RGB, 8 or 16 bits a channel
  video.safetensors   the tensor `video` [1, 3, T, H, W] in f32: every digit
  -                   standard output: y4m, or what --format says
  clip.mkv            through ffmpeg, lossless (ffv1)
  clip.mp4, clip.mov  through ffmpeg, H.264; HEVC for more than 8 bits
  clip.webm           through ffmpeg, VP9
  frame.jpg           through ffmpeg
Depth is that of the input; --bits chooses. An output that exists is replaced with -y only, once the new one is whole.
What is no regular file is never replaced; a folder must be new or empty.
";

pub fn open(path: &Path, options: &VideoOptions) -> Result<(Clip, Box<dyn Source>)> {
    if stdio::is_stdio(path) {
        return if options.size.is_some() { raw::open(path, options) } else { y4m::open(path, options) };
    }
    if path.is_dir() {
        return pngs::open_folder(path, options);
    }
    if !path.exists() {
        return Err(format!("{} does not exist; name a video file or a folder of PNGs", path.display()));
    }
    draft::protect(path);
    match extension(path).as_str() {
        "y4m" => y4m::open(path, options),
        "png" => pngs::open_one(path, options),
        "raw" | "rgb" => raw::open(path, options),
        "safetensors" => tensors::open_video(path, options),
        _ => ffmpeg::open(path, options),
    }
}

/// A place for a clip like `clip`, and the kind of frames it wants.
pub fn create(path: &Path, clip: &Clip, options: &VideoOptions) -> Result<(FrameKind, Box<dyn Sink>)> {
    let (width, height) = (clip.kind.width, clip.kind.height);
    let deep = options.bits.unwrap_or(clip.bits) > 8;
    let rgb = FrameKind::pixels(if deep { Dtype::U16 } else { Dtype::U8 }, width, height);
    let as_folder = path.as_os_str().to_string_lossy().ends_with(std::path::is_separator) || path.is_dir();
    let format = match options.format.unwrap_or(PipeFormat::Y4m) {
        _ if !stdio::is_stdio(path) => extension(path),
        PipeFormat::Y4m => "y4m".into(),
        PipeFormat::Rgb => "rgb".into(),
        PipeFormat::Safetensors => "safetensors".into(),
    };
    let sink: Box<dyn Sink> = match format.as_str() {
        "" => Box::new(pngs::Folder::create(path, rgb)?),
        _ if as_folder => Box::new(pngs::Folder::create(path, rgb)?),
        "y4m" => return y4m::create(path, clip, options),
        "png" => Box::new(pngs::One::create(path, rgb, clip.frames)?),
        "raw" | "rgb" => Box::new(raw::Raw::create(path)?),
        "safetensors" => {
            let kind = FrameKind { interleaved: false, ..FrameKind::pixels(Dtype::F32, width, height) };
            return Ok((kind, Box::new(tensors::create_video(path, kind, clip)?)));
        }
        known if codec::is_known(known) => {
            let (kind, encoder) = ffmpeg::Encoder::create(path, clip, options)?;
            return Ok((kind, Box::new(encoder)));
        }
        other => {
            return Err(format!(
                "{}: cannot write .{other}; use .y4m, .png, a folder, .raw, .safetensors, .mkv, .mp4, .mov, .webm or \
                 .jpg",
                path.display()
            ));
        }
    };
    Ok((rgb, sink))
}

pub fn extension(path: &Path) -> String {
    path.extension().map(|e| e.to_string_lossy().to_lowercase()).unwrap_or_default()
}

/// Reads as much as there is, up to the buffer's length.
pub fn read_up_to(from: &mut impl std::io::Read, buffer: &mut [u8]) -> std::io::Result<usize> {
    let mut done = 0;
    while done < buffer.len() {
        match from.read(&mut buffer[done..]) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(why) if why.kind() == std::io::ErrorKind::Interrupted => {}
            Err(why) => return Err(why),
        }
    }
    Ok(done)
}
