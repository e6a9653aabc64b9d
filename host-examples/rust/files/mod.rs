//! Clips in files: what can be read frame by frame, and written so.

mod alpha;
mod codec;
pub mod colour;
mod constant;
mod cut;
mod damage;
mod encoder;
mod extras;
mod ffmpeg;
mod hdr;
mod index;
mod matroska;
mod openexr;
mod options;
mod pngs;
mod probe;
mod program;
mod raw;
pub mod safetensors;
mod sequence;
mod stdio;
pub mod tags;
pub mod tensors;
mod times;
mod y4m;

pub use alpha::fit_channels;
pub use codec::Codec;
pub use colour::Matrix;
pub use cut::{Part, TimeOptions, cut};
pub use options::{ClipOptions, InputOptions, VideoOptions};
pub use pngs::{encode_rgb, write_animation};
pub use stdio::is_stdio;
pub use times::Times;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::ValueEnum;

use crate::tensor::{Dtype, FrameKind};
use crate::units::Rate;
use crate::{Result, draft};
use codec::Container;
use extras::Extras;
use tags::Tags;
use times::Changes;

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
    /// When its frames are shown, unless they come at the rate from zero on.
    pub times: Option<Times>,
    /// Frames that were repeated or left out.
    pub changes: Arc<Changes>,
    /// What it has beside pictures.
    pub extras: Extras,
    /// The file that has these.
    pub origin: Option<Origin>,
    /// Frames of the source before the first of this clip, as far as that is known before they are read.
    pub first: u64,
}

/// A video file.
#[derive(Debug, Clone)]
pub struct Origin {
    path: PathBuf,
    /// The user wants what can be read of it.
    keep_damaged: bool,
    /// Where the clip begins in it, and how long it is, in seconds; without it: all.
    part: Option<(f64, Option<f64>)>,
}

impl Clip {
    /// Of a length that is not known.
    pub fn new(kind: FrameKind, rate: Rate) -> Clip {
        let bits = if kind.dtype == Dtype::U16 { 16 } else { 8 };
        Clip {
            kind,
            rate,
            frames: None,
            expected: None,
            y4m: None,
            bits,
            tags: Tags::default(),
            times: None,
            changes: Arc::default(),
            extras: Extras::default(),
            origin: None,
            first: 0,
        }
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

pub const ONE_PICTURE: &str =
    "it holds one picture; for a clip name f%04d.png, f%04d.exr or a folder, with a slash at its end";

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
  frame.png, folder/  one PNG, or all PNGs of a folder in the order of their names; 8 or 16 bits; alpha if the model has it
  f%04d.png           the pictures of these numbers; .png, .exr, or what ffmpeg reads
  frame.exr, folder/  OpenEXR: floats as they are, 1 is white, not clamped; linear light is not converted
  clip.raw, clip.rgb  interleaved RGB of 8 bits a channel, with --size WxH
  video.safetensors   the tensor `video` [1, C, T, H, W] of floats, as reference implementations write it
  -                   standard input: y4m, raw with --size, or any container (kept in the temporary folder meanwhile)
  anything else       through the programs ffprobe and ffmpeg; with all bits, colour tags, times of frames, sound,
                      subtitles, title and chapters. Damage is an error; --keep-damaged reads what can be read
";
pub const OUTPUTS: &str = "\
Outputs, by name:
  clip.y4m            YUV4MPEG, in the layout of a y4m input, else 444; --y4m chooses
  frame.png, folder/  one picture, or a new folder of frame-000001.png, ...; with alpha if the model has it
  clip.raw, clip.rgb  interleaved RGB, 8 or 16 bits a channel
  video.safetensors   the tensor `video` [1, C, T, H, W] in f32: every digit
  -                   standard output: y4m, or what --format says
  f%04d.png, f%04d.exr  pictures beside what is there, numbered from 1
  frame.exr           OpenEXR, 32-bit floats, not clamped
  clip.mkv            through ffmpeg, HEVC with --quality 16; with --lossless ffv1
  clip.mp4, clip.mov  through ffmpeg, H.264 with --quality 16; HEVC for more than 8 bits; ProRes with --codec prores
  clip.webm           through ffmpeg, VP9 with --quality 20
  clip.gif, clip.webp  through ffmpeg, animated; .webp lossless with --lossless
  frame.jpg           through ffmpeg
Times of frames are those of the input, but in y4m, which knows one rate; a line says what an output does not hold.
Depth is that of the input; --bits chooses. An output that exists is replaced with -y only, once the new one is whole.
What is no regular file is never replaced; a folder must be new or empty. Pictures of a pattern beyond the last frame
stay, with -y too.
";

/// A clip without alpha, or the part of it that -ss and -t name.
pub fn open(path: &Path, options: &ClipOptions, input: &InputOptions) -> Result<(Clip, Box<dyn Source>)> {
    open_with_alpha(path, options, input).map(|(clip, source)| fit_channels(clip, source, 3))
}

/// The same with the alpha that pictures have.
pub fn open_with_alpha(path: &Path, options: &ClipOptions, input: &InputOptions) -> Result<(Clip, Box<dyn Source>)> {
    let (clip, source) = open_whole(path, options, input)?;
    Ok(match input.times.part() {
        Some(part) => cut(clip, source, part),
        None => (clip, source),
    })
}

fn open_whole(path: &Path, options: &ClipOptions, input: &InputOptions) -> Result<(Clip, Box<dyn Source>)> {
    if stdio::is_stdio(path) {
        return match input.size {
            Some(_) => raw::open(path, options, input),
            None if stdio::begins_with(y4m::MAGIC.as_bytes()) => y4m::open(path, options, input),
            None => open_spooled(options, input),
        };
    }
    if path.is_dir() {
        return open_pictures(pictures(path)?, options, input);
    }
    if !path.exists() {
        let pattern = sequence::Pattern::parse(path).ok_or_else(|| {
            format!("{} does not exist; name a video file, a folder of pictures or f%04d.png", path.display())
        })?;
        let files = pattern.files()?;
        files.iter().for_each(|path| draft::protect(path));
        return match extension(path).as_str() {
            "png" | "exr" => open_pictures(files, options, input),
            _ => through_ffmpeg(path, options, input),
        };
    }
    draft::protect(path);
    match extension(path).as_str() {
        "y4m" => y4m::open(path, options, input),
        "png" => pngs::open(vec![path.to_owned()], options, false),
        "exr" => openexr::open(vec![path.to_owned()], options),
        "raw" | "rgb" => raw::open(path, options, input),
        "safetensors" => tensors::open_video(path, options),
        _ => through_ffmpeg(path, options, input),
    }
}

fn through_ffmpeg(path: &Path, options: &ClipOptions, input: &InputOptions) -> Result<(Clip, Box<dyn Source>)> {
    ffmpeg::open(path, options, input).map(|(clip, source)| constant::at_rate(clip, source, options.rate))
}

/// All PNGs of a folder in the order of their names; where there are none, all OpenEXR files.
fn pictures(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(folder).map_err(|why| format!("{} cannot be read: {why}", folder.display()))?;
    let mut all: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    all.sort();
    let of = |kind: &str| all.iter().filter(|path| extension(path) == kind).cloned().collect::<Vec<_>>();
    let files = ["png", "exr"].map(of).into_iter().find(|files| !files.is_empty());
    files.ok_or_else(|| format!("{} has no .png or .exr files in it; name a folder of frames", folder.display()))
}

fn open_pictures(files: Vec<PathBuf>, options: &ClipOptions, input: &InputOptions) -> Result<(Clip, Box<dyn Source>)> {
    match extension(&files[0]).as_str() {
        "exr" => openexr::open(files, options),
        _ => pngs::open(files, options, input.keep_damaged),
    }
}

/// Standard input as a file, which containers need: they are not read from front to back.
fn open_spooled(options: &ClipOptions, input: &InputOptions) -> Result<(Clip, Box<dyn Source>)> {
    let draft = stdio::spooled()?;
    let (clip, source) = through_ffmpeg(&draft.path, options, input)
        .map_err(|why| why.replace(&draft.path.display().to_string(), "standard input"))?;
    Ok((clip, Box::new(Spooled { source, _draft: draft })))
}

/// Keeps the file for as long as it is read.
struct Spooled {
    source: Box<dyn Source>,
    _draft: draft::Draft,
}

impl Source for Spooled {
    fn read(&mut self, frame: &mut [u8]) -> Result<bool> {
        self.source.read(frame)
    }
}

/// What an output is, by its name: "y4m", "png", "folder", "raw", "safetensors", or an extension of ffmpeg's.
fn format(path: &Path, options: &VideoOptions) -> String {
    let as_folder = path.as_os_str().to_string_lossy().ends_with(std::path::is_separator) || path.is_dir();
    match options.format.unwrap_or(PipeFormat::Y4m) {
        _ if as_folder && !stdio::is_stdio(path) => FOLDER.into(),
        _ if !stdio::is_stdio(path) => match extension(path).as_str() {
            "" => FOLDER.into(),
            "rgb" => "raw".into(),
            other => other.into(),
        },
        PipeFormat::Y4m => "y4m".into(),
        PipeFormat::Rgb => "raw".into(),
        PipeFormat::Safetensors => "safetensors".into(),
    }
}

const FOLDER: &str = "folder";

/// A place for a clip like `clip`, and the kind of frames it wants.
pub fn create(path: &Path, clip: &Clip, options: &VideoOptions) -> Result<(FrameKind, Box<dyn Sink>)> {
    let (width, height) = (clip.kind.width, clip.kind.height);
    let known = format(path, options);
    options.check(path, &known)?;
    let deep = options.clip.bits.unwrap_or(clip.bits) > 8;
    let rgb = FrameKind::pixels(if deep { Dtype::U16 } else { Dtype::U8 }, width, height);
    let pixels = if keeps_alpha(path, options) { rgb.with_channels(clip.kind.channels) } else { rgb };
    let floats = FrameKind::pixels(Dtype::F32, width, height);
    if let Some(pattern) = sequence::Pattern::parse(path) {
        let kind = if extension(path) == "exr" { floats } else { pixels };
        return Ok((kind, Box::new(sequence::Sequence::beside(path, pattern, kind, &clip.tags)?)));
    }
    let sink: Box<dyn Sink> = match known.as_str() {
        FOLDER => Box::new(sequence::Sequence::folder(path, pixels, &clip.tags)?),
        "exr" => return Ok((floats, Box::new(openexr::One::create(path, floats, clip)?))),
        "y4m" => return y4m::create(path, clip, options),
        "png" => Box::new(pngs::One::create(path, pixels, clip)?),
        "raw" => Box::new(raw::Raw::create(path)?),
        "safetensors" => {
            let kind = FrameKind { interleaved: false, ..floats.with_channels(clip.kind.channels) };
            return Ok((kind, Box::new(tensors::create_video(path, kind, clip)?)));
        }
        known if Container::known(known).is_some() => {
            let (kind, encoder) = encoder::Encoder::create(path, clip, options)?;
            return Ok((kind, Box::new(encoder)));
        }
        other => {
            return Err(format!(
                "{}: cannot write .{other}; use .y4m, .png, .exr, a folder, f%04d.png, .raw, .safetensors, .mkv, .mp4, \
                 .mov, .webm, .gif, .webp or .jpg",
                path.display()
            ));
        }
    };
    Ok((pixels, sink))
}

/// Whether an output holds alpha.
fn keeps_alpha(path: &Path, options: &VideoOptions) -> bool {
    [FOLDER, "png", "safetensors"].contains(&format(path, options).as_str())
}

/// What became of the clip in an output, once that is written: lines about what is lost and what was changed.
pub fn notes(path: &Path, clip: &Clip, options: &VideoOptions) -> Vec<String> {
    let (format, tags) = (format(path, options), &clip.tags);
    let hdr = (!tags.mastering.is_empty() || !tags.light.is_empty()).then(|| "HDR metadata".to_owned());
    let aspect = tags.ratio().map(|(width, height)| format!("the pixel aspect ratio ({width}:{height})"));
    let times = clip.times.as_ref().filter(|times| !times.are_plain(clip.rate));
    let start = times.and_then(|times| times.start()).map(|seconds| format!("the start at {seconds:.3} s"));
    let every = times.map(|_| "the times of frames".to_owned());
    let of_video = match format.as_str() {
        "y4m" => vec![tags.unusual(), hdr, start],
        "png" | FOLDER => vec![tags.unusual(), hdr, every],
        "exr" => vec![aspect, tags.unusual(), hdr, every],
        "gif" | "webp" => vec![aspect, tags.unusual(), hdr],
        "raw" | "safetensors" => vec![aspect, tags.unusual(), hdr, every],
        "jpg" | "jpeg" => vec![tags.unusual(), hdr],
        _ => vec![],
    };
    let container = Container::known(&format).filter(|container| !container.is_silent());
    let kept = container.map(|container| clip.extras.kept(container)).unwrap_or_default();
    let mut lost = if container.is_some() { kept.lost } else { clip.extras.all() };
    lost.extend(of_video.into_iter().flatten());
    let has_alpha = clip.kind.channels == 4 && !lost.iter().any(|what| what == "alpha");
    lost.extend((has_alpha && !keeps_alpha(path, options)).then(|| "alpha".to_owned()));
    let rated = clip.changes.told(clip.rate).map(|told| format!("{}: {told}", path.display()));
    not_held(path, &lost).into_iter().chain(kept.changed).chain(rated).collect()
}

/// The title, if the header of a file of latents has room for it.
pub fn kept_title(clip: &Clip) -> Option<String> {
    const LONGEST: usize = 512;
    let title = &clip.extras.title;
    (!title.is_empty() && format!("{title:?}").len() <= LONGEST).then(|| title.clone())
}

/// The same of a file of latents, which keeps the title and all that is of pictures. `times`: whether it keeps those.
pub fn latent_notes(path: &Path, clip: &Clip, times: bool) -> Vec<String> {
    let title = clip.extras.title.clone();
    let extras =
        Extras { title: if kept_title(clip).is_some() { String::new() } else { title }, ..clip.extras.clone() };
    let uneven = clip.times.as_ref().filter(|list| !times && !list.are_plain(clip.rate));
    let lost: Vec<String> = extras.all().into_iter().chain(uneven.map(|_| "the times of frames".to_owned())).collect();
    let rated = clip.changes.told(clip.rate).map(|told| format!("{}: {told}", path.display()));
    not_held(path, &lost).into_iter().chain(rated).collect()
}

fn not_held(path: &Path, lost: &[String]) -> Option<String> {
    (!lost.is_empty()).then(|| format!("{} does not hold {}", path.display(), lost.join(", ")))
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
