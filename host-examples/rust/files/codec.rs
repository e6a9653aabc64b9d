//! How a video file is written: codec, quality, pixel format and tags, as ffmpeg's arguments.

use std::path::Path;

use clap::ValueEnum;

use super::times::Times;
use super::{Clip, ONE_PICTURE, VideoOptions, extension, hdr};
use crate::Result;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Codec {
    H264,
    Hevc,
    Vp9,
    Av1,
    /// Lossless, for .mkv.
    Ffv1,
    /// 10 bits, for .mov.
    Prores,
    #[value(skip)]
    Jpeg,
    #[value(skip)]
    Gif,
    #[value(skip)]
    Webp,
}

pub struct Choice {
    pub container: &'static Container,
    /// Between the inputs and the file's name.
    pub arguments: Vec<String>,
    /// Of the samples that are written.
    pub bits: u32,
}

/// A format that ffmpeg writes.
pub struct Container {
    /// As file names end.
    pub name: &'static str,
    /// The usual codecs, for 8 bits and for more.
    codecs: [Codec; 2],
    /// Sound that it holds as it is (all, if empty), and what all other becomes.
    sound: &'static [&'static str],
    other_sound: &'static str,
    /// What subtitles of text become, unless it holds them as they are.
    subtitles: Option<&'static str>,
}

/// Matroska takes everything. MP4 has FLAC too, but ffmpeg calls that an experiment and refuses.
const MKV: &str = "mkv";
const CONTAINERS: [Container; 8] = [
    Container {
        name: "mp4",
        codecs: [Codec::H264, Codec::Hevc],
        sound: &["aac", "mp3", "ac3", "eac3", "opus", "alac"],
        other_sound: "aac",
        subtitles: Some("mov_text"),
    },
    Container {
        name: "mov",
        codecs: [Codec::H264, Codec::Hevc],
        sound: &["aac", "mp3", "ac3", "eac3", "alac", "pcm_s16le", "pcm_s24le", "pcm_s16be", "pcm_s24be"],
        other_sound: "aac",
        subtitles: Some("mov_text"),
    },
    Container { name: MKV, codecs: [Codec::Hevc; 2], sound: &[], other_sound: "copy", subtitles: Some("subrip") },
    Container {
        name: "webm",
        codecs: [Codec::Vp9; 2],
        sound: &["opus", "vorbis"],
        other_sound: "libopus",
        subtitles: Some("webvtt"),
    },
    Container { name: "jpg", codecs: [Codec::Jpeg; 2], sound: &[], other_sound: "", subtitles: None },
    Container { name: "jpeg", codecs: [Codec::Jpeg; 2], sound: &[], other_sound: "", subtitles: None },
    Container { name: "gif", codecs: [Codec::Gif; 2], sound: &[], other_sound: "", subtitles: None },
    Container { name: "webp", codecs: [Codec::Webp; 2], sound: &[], other_sound: "", subtitles: None },
];

impl Container {
    pub fn known(extension: &str) -> Option<&'static Container> {
        CONTAINERS.iter().find(|container| container.name == extension)
    }

    pub fn is_picture(&self) -> bool {
        self.codecs[0] == Codec::Jpeg
    }

    /// Whether it holds pictures alone.
    pub fn is_silent(&self) -> bool {
        matches!(self.codecs[0], Codec::Jpeg | Codec::Gif | Codec::Webp)
    }

    /// How ffmpeg writes sound of a codec.
    pub fn sound_codec(&self, codec: &str) -> &'static str {
        if self.sound.is_empty() || self.sound.contains(&codec) { "copy" } else { self.other_sound }
    }

    /// How ffmpeg writes subtitles of a codec; `None` if it cannot.
    pub fn subtitle_codec(&self, codec: &str, is_text: bool) -> Option<&'static str> {
        const IN_MKV: [&str; 7] =
            ["subrip", "ass", "ssa", "webvtt", "dvd_subtitle", "hdmv_pgs_subtitle", "dvb_subtitle"];
        let held = if self.name == MKV { IN_MKV.contains(&codec) } else { self.subtitles == Some(codec) };
        if held { Some("copy") } else { self.subtitles.filter(|_| is_text) }
    }

    pub fn holds_attachments(&self) -> bool {
        self.name == MKV
    }
}

pub fn choose(path: &Path, clip: &Clip, options: &VideoOptions) -> Result<Choice> {
    let container = Container::known(&extension(path)).ok_or("no such container")?;
    let [usual, deep] = container.codecs;
    let wanted = options.clip.bits.unwrap_or(clip.bits);
    let codec = match options.codec {
        None if options.lossless && container.name == MKV => Codec::Ffv1,
        chosen => chosen.unwrap_or(if wanted > 8 { deep } else { usual }),
    };
    let refuse = |why: &str| Err(format!("{}: {why}", path.display()));
    match (container.name, codec) {
        ("jpg" | "jpeg", _) if clip.frames.is_some_and(|frames| frames > 1) => return refuse(ONE_PICTURE),
        ("jpg" | "jpeg" | "gif" | "webp", _) if options.codec.is_some() => {
            return refuse("it has no codec to choose; leave --codec out");
        }
        ("webm", Codec::H264 | Codec::Hevc | Codec::Ffv1 | Codec::Prores) => {
            return refuse("a .webm holds --codec vp9 or av1");
        }
        ("mp4" | "mov", Codec::Ffv1) => return refuse("--codec ffv1 goes into .mkv"),
        ("mp4", Codec::Prores) => return refuse("--codec prores goes into .mov or .mkv"),
        (_, Codec::Prores | Codec::Gif | Codec::Ffv1) if options.quality.is_some() => {
            return refuse("this codec has no quality to choose; leave --quality out");
        }
        _ => {}
    }
    let bits = depth(codec, wanted, options.clip.bits)?;
    let mut arguments = encoder(codec, clip, options);
    if codec == Codec::Hevc && container.name != MKV {
        arguments.extend(["-tag:v", "hvc1"].map(str::to_owned));
    }
    // Frames that are coded out of order make a file shorter than its last frame, if their times are uneven.
    if matches!(codec, Codec::H264 | Codec::Hevc) && clip.times.as_ref().is_some_and(Times::are_uneven) {
        arguments.extend(["-bf", "0"].map(str::to_owned));
    }
    arguments.extend(samples(codec, bits, clip, options.lossless));
    Ok(Choice { container, arguments, bits })
}

/// The codec's name and settings.
fn encoder(codec: Codec, clip: &Clip, options: &VideoOptions) -> Vec<String> {
    let quality = |usual: u32| options.quality.unwrap_or(usual).to_string();
    let of_webp = (100 - options.quality.unwrap_or(10)).to_string();
    let words: &[&str] = match codec {
        Codec::H264 => &["libx264", "-crf", &quality(16)],
        Codec::Hevc => &["libx265", "-crf", &quality(16), "-x265-params", &x265(clip)],
        Codec::Vp9 => &["libvpx-vp9", "-crf", &quality(20), "-b:v", "0", "-row-mt", "1"],
        Codec::Av1 => &["libaom-av1", "-crf", &quality(20), "-b:v", "0", "-cpu-used", "6", "-row-mt", "1"],
        Codec::Ffv1 => &["ffv1", "-level", "3"],
        Codec::Prores if chroma(codec, clip) == "444" => &["prores_ks", "-profile:v", "4444", "-vendor", "apl0"],
        Codec::Prores => &["prores_ks", "-profile:v", "hq", "-vendor", "apl0"],
        Codec::Jpeg => &["mjpeg", "-q:v", &quality(2), "-f", "image2pipe"],
        Codec::Gif => &["gif", "-loop", "0"],
        Codec::Webp if options.lossless => &["libwebp_anim", "-lossless", "1", "-loop", "0"],
        Codec::Webp => &["libwebp_anim", "-quality", &of_webp, "-loop", "0"],
    };
    ["-c:v"].iter().chain(words).map(|word| (*word).to_owned()).collect()
}

/// In its stream HEVC says too how it was mastered; not all players look at the container.
fn x265(clip: &Clip) -> String {
    let mut settings = "log-level=error".to_owned();
    if let Some(display) = hdr::written(&clip.tags.mastering) {
        settings += &format!(":master-display={display}");
    }
    if let Some([most, mean]) = hdr::brightest(&clip.tags.light) {
        settings += &format!(":max-cll={most},{mean}");
    }
    settings
}

/// The depth nearest to the wanted one that the codec has. One that was asked for is not changed.
fn depth(codec: Codec, wanted: u32, asked: Option<u32>) -> Result<u32> {
    let has: &[u32] = match codec {
        Codec::H264 | Codec::Av1 => &[8, 10],
        Codec::Hevc | Codec::Vp9 => &[8, 10, 12],
        Codec::Ffv1 => &[8, 10, 12, 16],
        Codec::Prores => &[10],
        Codec::Jpeg | Codec::Gif | Codec::Webp => &[8],
    };
    let found = has.iter().copied().find(|bits| *bits >= wanted).unwrap_or(has[has.len() - 1]);
    match asked {
        Some(bits) if bits != found => Err(format!("--bits {bits}: this codec has {found} bits; see --codec")),
        _ => Ok(found),
    }
}

/// What becomes of colour in the file: as in the source, where the codec and the size allow it.
fn chroma(codec: Codec, clip: &Clip) -> &'static str {
    // Halved chroma needs even sizes.
    let even = |size: usize| size.is_multiple_of(2);
    let (wide, high) = (even(clip.kind.width), even(clip.kind.height));
    // ProRes has no 4:2:0.
    match clip.tags.chroma.as_str() {
        "444" => "444",
        "422" if wide => "422",
        _ if wide && codec == Codec::Prores => "422",
        _ if wide && high && codec != Codec::Prores => "420",
        _ => "444",
    }
}

/// One palette for each frame, so that memory does not grow with the clip.
const PALETTES: &str = "split[a][b];[a]palettegen=stats_mode=single[p];[b][p]paletteuse=new=1";

/// From RGB of full range to the pixel format of the file, and its tags.
fn samples(codec: Codec, bits: u32, clip: &Clip, lossless: bool) -> Vec<String> {
    let suffix = if bits > 8 { format!("{bits}le") } else { String::new() };
    let known = |tag: &str, usual: &str| if tag.is_empty() { usual.to_owned() } else { tag.to_owned() };
    let mut words = vec!["-color_primaries".to_owned(), known(&clip.tags.primaries, "bt709")];
    words.extend(["-color_trc".to_owned(), known(&clip.tags.transfer, "bt709")]);
    let aspect = clip.tags.ratio().map(|(width, height)| format!(",setsar={width}/{height}")).unwrap_or_default();
    if codec == Codec::Ffv1 {
        // RGB itself, so that nothing is lost.
        let format = if bits > 8 { format!("gbrp{suffix}") } else { "bgr0".into() };
        return [words, vec!["-vf".to_owned(), format!("format={format}{aspect}")]].concat();
    }
    match codec {
        Codec::Gif => return vec!["-vf".to_owned(), PALETTES.to_owned()],
        Codec::Webp if lossless => return vec!["-vf".to_owned(), "format=bgra".to_owned()],
        Codec::Webp => return vec!["-vf".to_owned(), "scale=out_color_matrix=bt601,format=yuv420p".to_owned()],
        _ => {}
    }
    let chroma = chroma(codec, clip);
    let (matrix, space) = match clip.tags.matrix() {
        // What readers of JPEG assume.
        _ if codec == Codec::Jpeg => ("bt601", "smpte170m".to_owned()),
        Some(matrix) => (matrix, clip.tags.space.clone()),
        None => ("bt709", "bt709".to_owned()),
    };
    let full = clip.tags.range == "pc" || codec == Codec::Jpeg;
    let range = if full { "pc" } else { "tv" };
    let format = if codec == Codec::Jpeg { format!("yuvj{chroma}p") } else { format!("yuv{chroma}p{suffix}") };
    let scale = format!("scale=in_range=pc:out_color_matrix={matrix}:out_range={range},format={format}{aspect}");
    words.extend(["-vf".to_owned(), scale, "-sws_flags".to_owned(), "bicubic+accurate_rnd+full_chroma_int".to_owned()]);
    words.extend(["-colorspace".to_owned(), space, "-color_range".to_owned(), range.to_owned()]);
    words
}
