//! How a video file is written: codec, quality, pixel format and tags, as ffmpeg's arguments.

use std::path::Path;

use clap::ValueEnum;

use super::{Clip, ONE_PICTURE, VideoOptions, extension};
use crate::Result;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Codec {
    H264,
    Hevc,
    Vp9,
    Av1,
    /// Lossless, for .mkv.
    Ffv1,
    #[value(skip)]
    Jpeg,
}

pub struct Choice {
    /// Between the inputs and the file's name.
    pub arguments: Vec<String>,
    /// Of the samples that are written.
    pub bits: u32,
    /// "copy" or an encoder, if the clip has sound and the file can hold it.
    pub sound: Option<&'static str>,
}

/// Containers, their usual codecs for 8 bits and more, and the audio codecs that they hold as they are (all, if empty).
type Container = (&'static str, Codec, Codec, &'static [&'static str]);
const CONTAINERS: [Container; 6] = [
    ("mp4", Codec::H264, Codec::Hevc, &["aac", "mp3", "ac3", "eac3", "opus", "flac", "alac"]),
    ("mov", Codec::H264, Codec::Hevc, &["aac", "mp3", "ac3", "eac3", "alac", "pcm_s16le", "pcm_s24le", "pcm_s16be"]),
    ("mkv", Codec::Ffv1, Codec::Ffv1, &[]),
    ("webm", Codec::Vp9, Codec::Vp9, &["opus", "vorbis"]),
    ("jpg", Codec::Jpeg, Codec::Jpeg, &[]),
    ("jpeg", Codec::Jpeg, Codec::Jpeg, &[]),
];

pub fn is_known(extension: &str) -> bool {
    CONTAINERS.iter().any(|(name, ..)| *name == extension)
}

pub fn choose(path: &Path, clip: &Clip, options: &VideoOptions) -> Result<Choice> {
    let name = extension(path);
    let (_, usual, deep, held) =
        CONTAINERS.into_iter().find(|(known, ..)| *known == name).ok_or("no such container")?;
    let wanted = options.bits.unwrap_or(clip.bits);
    let codec = options.codec.unwrap_or(if wanted > 8 { deep } else { usual });
    let refuse = |why: &str| Err(format!("{}: {why}", path.display()));
    match (name.as_str(), codec) {
        ("jpg" | "jpeg", _) if clip.frames.is_some_and(|frames| frames > 1) => return refuse(ONE_PICTURE),
        ("jpg" | "jpeg", Codec::H264 | Codec::Hevc | Codec::Vp9 | Codec::Av1 | Codec::Ffv1) => {
            return refuse("a .jpg has no codec to choose; leave --codec out");
        }
        ("webm", Codec::H264 | Codec::Hevc | Codec::Ffv1) => return refuse("a .webm holds --codec vp9 or av1"),
        ("mp4" | "mov", Codec::Ffv1) => return refuse("--codec ffv1 goes into .mkv"),
        _ => {}
    }
    let bits = depth(codec, wanted, options.bits)?;
    let mut arguments = Vec::new();
    let mut add = |words: &[&str]| arguments.extend(words.iter().map(|word| (*word).to_owned()));
    add(&["-c:v"]);
    let quality = |usual: u32| options.quality.unwrap_or(usual).to_string();
    match codec {
        Codec::H264 => add(&["libx264", "-crf", &quality(16)]),
        Codec::Hevc => add(&["libx265", "-crf", &quality(16), "-x265-params", "log-level=error"]),
        Codec::Vp9 => add(&["libvpx-vp9", "-crf", &quality(20), "-b:v", "0", "-row-mt", "1"]),
        Codec::Av1 => add(&["libaom-av1", "-crf", &quality(20), "-b:v", "0", "-cpu-used", "6", "-row-mt", "1"]),
        Codec::Ffv1 => add(&["ffv1", "-level", "3"]),
        Codec::Jpeg => add(&["mjpeg", "-q:v", &quality(2), "-f", "image2pipe"]),
    }
    if codec == Codec::Hevc && name != "mkv" {
        add(&["-tag:v", "hvc1"]);
    }
    add(&samples(codec, bits, clip).iter().map(String::as_str).collect::<Vec<_>>());
    let sound = clip.sound.as_ref().filter(|_| codec != Codec::Jpeg).map(|(_, codecs)| {
        let copied = held.is_empty() || codecs.iter().all(|codec| held.contains(&codec.as_str()));
        if copied {
            "copy"
        } else if name == "webm" {
            "libopus"
        } else {
            "aac"
        }
    });
    Ok(Choice { arguments, bits, sound })
}

/// The depth nearest to the wanted one that the codec has. One that was asked for is not changed.
fn depth(codec: Codec, wanted: u32, asked: Option<u32>) -> Result<u32> {
    let has: &[u32] = match codec {
        Codec::H264 | Codec::Av1 => &[8, 10],
        Codec::Hevc | Codec::Vp9 => &[8, 10, 12],
        Codec::Ffv1 => &[8, 10, 12, 16],
        Codec::Jpeg => &[8],
    };
    let found = has.iter().copied().find(|bits| *bits >= wanted).unwrap_or(has[has.len() - 1]);
    match asked {
        Some(bits) if bits != found => Err(format!("--bits {bits}: this codec has {found} bits at most; see --codec")),
        _ => Ok(found),
    }
}

/// From RGB of full range to the pixel format of the file, and its tags.
fn samples(codec: Codec, bits: u32, clip: &Clip) -> Vec<String> {
    let suffix = if bits > 8 { format!("{bits}le") } else { String::new() };
    let known = |tag: &str, usual: &str| if tag.is_empty() { usual.to_owned() } else { tag.to_owned() };
    let mut words = vec!["-color_primaries".to_owned(), known(&clip.tags.primaries, "bt709")];
    words.extend(["-color_trc".to_owned(), known(&clip.tags.transfer, "bt709")]);
    if codec == Codec::Ffv1 {
        // RGB itself, so that nothing is lost.
        let format = if bits > 8 { format!("gbrp{suffix}") } else { "bgr0".into() };
        return [words, vec!["-pix_fmt".to_owned(), format]].concat();
    }
    // Halved chroma needs even sizes.
    let even = |size: usize| size.is_multiple_of(2);
    let chroma = match clip.tags.chroma.as_str() {
        "444" => "444",
        "422" if even(clip.kind.width) => "422",
        _ if even(clip.kind.width) && even(clip.kind.height) => "420",
        _ => "444",
    };
    let (matrix, space) = match clip.tags.matrix() {
        // What readers of JPEG assume.
        _ if codec == Codec::Jpeg => ("bt601", "smpte170m".to_owned()),
        Some(matrix) => (matrix, clip.tags.space.clone()),
        None => ("bt709", "bt709".to_owned()),
    };
    let full = clip.tags.range == "pc" || codec == Codec::Jpeg;
    let range = if full { "pc" } else { "tv" };
    let format = if codec == Codec::Jpeg { format!("yuvj{chroma}p") } else { format!("yuv{chroma}p{suffix}") };
    let scale = format!("scale=in_range=pc:out_color_matrix={matrix}:out_range={range},format={format}");
    words.extend(["-vf".to_owned(), scale, "-sws_flags".to_owned(), "bicubic+accurate_rnd+full_chroma_int".to_owned()]);
    words.extend(["-colorspace".to_owned(), space, "-color_range".to_owned(), range.to_owned()]);
    words
}
