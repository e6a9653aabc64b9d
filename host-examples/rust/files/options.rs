//! How clips are read and written, as far as the user says.

use std::path::Path;

use super::codec::Container;
use super::{Codec, FOLDER, Matrix, PipeFormat, TimeOptions, extension, is_stdio};
use crate::Result;
use crate::units::{self, Rate};

#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Input")]
pub struct InputOptions {
    /// Size of a raw input.
    #[arg(long, value_name = "WxH", value_parser = |text: &str| units::sizes::<2>(text, "640x480"))]
    pub size: Option<[u64; 2]>,
    /// Read what can be read of a damaged video, y4m or folder of PNGs, with a warning. Without it damage is an error.
    #[arg(long)]
    pub keep_damaged: bool,
    #[command(flatten)]
    pub times: TimeOptions,
}

/// What is said about a clip that is read or written.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Video")]
pub struct ClipOptions {
    /// Frames a second, such as 24 or 24000/1001; default: what the input says, else 24. Frames of a video file are
    /// duplicated or dropped to keep to it.
    #[arg(long = "fps", value_name = "RATE", value_parser = Rate::parse)]
    pub rate: Option<Rate>,
    /// Depth of what is written (of raw input too): 8, 10, 12 or 16; default: that of the input. PNGs and raw files
    /// have 8 or 16, y4m 8 or 10.
    #[arg(long, value_name = "N", value_parser = bits)]
    pub bits: Option<u32>,
    /// Colour matrix of y4m, and of video that does not say; default: 709 from 1280 wide or 577 high on, else 601.
    #[arg(long)]
    pub matrix: Option<Matrix>,
}

/// The same, and how a clip is written.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Video")]
pub struct VideoOptions {
    #[command(flatten)]
    pub clip: ClipOptions,
    /// Codec of .mp4, .mov, .mkv and .webm; default: by the name and the depth. ProRes (422 HQ, or 4444) is for .mov.
    #[arg(long)]
    pub codec: Option<Codec>,
    /// Nothing is lost: ffv1 in .mkv, and lossless .webp. PNG, .exr, raw and .safetensors files lose nothing anyway.
    #[arg(long, conflicts_with_all = ["codec", "quality"])]
    pub lossless: bool,
    /// Of the codec, as its -crf (for .jpg -q:v, for .webp 100 less its -quality): less is better.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=63))]
    pub quality: Option<u32>,
    /// Format of the output `-`; default: y4m.
    #[arg(short = 'f', long)]
    pub format: Option<PipeFormat>,
    /// Layout of a written y4m: 444, 422, 420, 420mpeg2, 444p10, 422p10, 420p10, ...
    #[arg(long, value_name = "LAYOUT")]
    pub y4m: Option<String>,
}

impl InputOptions {
    /// Refuses a size that none of the inputs takes.
    pub fn check(&self, inputs: &[&Path]) -> Result<()> {
        if self.size.is_none() || inputs.iter().any(|input| self.is_raw(input)) {
            return Ok(());
        }
        Err("--size is for .raw, .rgb and standard input, and this input says its own; leave it out".into())
    }

    /// Whether an input is bare pixels.
    pub fn is_raw(&self, input: &Path) -> bool {
        if is_stdio(input) { self.size.is_some() } else { ["raw", "rgb"].contains(&extension(input).as_str()) }
    }
}

impl VideoOptions {
    /// As the output has them. The depth of a raw input is the input's alone; the output has the nearest.
    pub fn written(&self, is_raw: bool) -> VideoOptions {
        let bits = self.clip.bits.filter(|_| !is_raw);
        VideoOptions { clip: ClipOptions { bits, ..self.clip.clone() }, ..self.clone() }
    }

    /// Refuses what an output of this format has no use for.
    pub fn check(&self, output: &Path, format: &str) -> Result<()> {
        let refuse = |why: String| Err(format!("{}: {why}", output.display()));
        if self.format.is_some() && !is_stdio(output) {
            return refuse("--format is for the output -; the name of a file says its format; leave it out".into());
        }
        if Container::known(format).is_none() && (self.codec.is_some() || self.quality.is_some()) {
            return refuse("--codec and --quality are for video files such as .mp4; leave them out".into());
        }
        if self.lossless && !is_lossless(format) {
            return refuse("--lossless is for .mkv, .webp, PNGs, .exr, .raw and .safetensors".into());
        }
        if self.y4m.is_some() && format != "y4m" {
            return refuse("--y4m is for .y4m; leave it out".into());
        }
        match self.clip.bits {
            Some(bits @ (10 | 12)) if [FOLDER, "png", "raw"].contains(&format) => {
                refuse(format!("--bits {bits}: it has 8 or 16"))
            }
            _ => Ok(()),
        }
    }
}

/// Whether an output of this format can hold every bit of its depth.
fn is_lossless(format: &str) -> bool {
    [FOLDER, "png", "exr", "raw", "safetensors", "mkv", "webp"].contains(&format)
}

fn bits(text: &str) -> Result<u32> {
    [8, 10, 12, 16].into_iter().find(|bits| bits.to_string() == text).ok_or_else(|| "it is 8, 10, 12 or 16".into())
}
