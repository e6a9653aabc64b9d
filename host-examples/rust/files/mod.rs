//! Clips in files: what can be read frame by frame, and written so.

pub mod colour;
mod ffmpeg;
mod pngs;
mod raw;
pub mod safetensors;
pub mod tensors;
mod y4m;

pub use colour::Matrix;
pub use pngs::{encode_rgb, write_animation};

use std::path::Path;

use crate::Result;
use crate::options::VideoOptions;
use crate::tensor::{Dtype, FrameKind};
use crate::units::Rate;

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
}

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
  anything else       through the program ffmpeg, if it is installed; sound is left out
";
pub const OUTPUTS: &str = "\
Outputs, by name:
  clip.y4m            YUV4MPEG, in the layout of a y4m input, else 444; --y4m chooses
  frame.png, folder/  one picture, or a new folder of frame-000001.png, ...; --bits 16 for deep ones
  clip.raw, clip.rgb  interleaved RGB, 8 or (--bits 16) 16 bits a channel
  video.safetensors   the tensor `video` [1, 3, T, H, W] in f32: every digit
  clip.mkv            through ffmpeg, lossless (ffv1)
  clip.mp4, clip.mov  through ffmpeg, H.264
An output that exists is replaced, once the new one is whole; a folder must be new or empty.
";

pub fn open(path: &Path, options: &VideoOptions) -> Result<(Clip, Box<dyn Source>)> {
    if path.is_dir() {
        return pngs::open_folder(path, options);
    }
    if !path.exists() {
        return Err(format!("{} does not exist; name a video file or a folder of PNGs", path.display()));
    }
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
    let integers = if options.bits() == 16 { Dtype::U16 } else { Dtype::U8 };
    let rgb = FrameKind::pixels(integers, width, height);
    let as_folder = path.as_os_str().to_string_lossy().ends_with(std::path::is_separator) || path.is_dir();
    let sink: Box<dyn Sink> = match extension(path).as_str() {
        "" => Box::new(pngs::Folder::create(path, rgb)?),
        _ if as_folder => Box::new(pngs::Folder::create(path, rgb)?),
        "y4m" => return y4m::create(path, clip, options),
        "png" => Box::new(pngs::One::create(path, rgb, clip.frames)?),
        "raw" | "rgb" => Box::new(raw::Raw::create(path)?),
        "safetensors" => {
            let kind = FrameKind { interleaved: false, ..FrameKind::pixels(Dtype::F32, width, height) };
            return Ok((kind, Box::new(tensors::create_video(path, kind, clip)?)));
        }
        "mkv" | "mp4" | "mov" => Box::new(ffmpeg::Encoder::create(path, rgb, clip.rate)?),
        other => {
            return Err(format!(
                "{}: cannot write .{other}; use .y4m, .png, a folder, .raw, .safetensors, .mkv, .mp4 or .mov",
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
