//! `vvae decode`: latents in, video out.

use std::path::PathBuf;
use std::sync::atomic::AtomicU64;

use crate::Result;
use crate::files::tensors::{Latents, open_latents};
use crate::files::{self, Clip};
use crate::options::{ModelOptions, VideoOptions};
use crate::pipeline::{Counting, Pipeline, Stage};
use crate::progress::Progress;
use crate::range::{self, RangeOptions};
use crate::tensor::{Dtype, FrameKind};
use crate::units::Rate;
use crate::vae::Vae;

const EXAMPLES: &str = "Examples:
  vvae decode holiday.safetensors holiday.mp4
  vvae decode clip.safetensors frames/ --bits 16
  vvae decode film.safetensors shot.mp4 --frames 1000:1100
  vvae decode clip.safetensors numbers.safetensors --set pixel_range=0..1
";

/// Latents to video.
///
/// Decodes latents of any length, at constant memory. IN is what `vvae encode` wrote, or any safetensors file with a tensor
/// `latent` [1, C, T, h, w] (also found by the names mean, samples and latent_tensor). Size, length and rate are those of
/// the original video where IN tells them.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{}\n{EXAMPLES}", files::OUTPUTS))]
pub struct Decode {
    #[arg(value_name = "IN.safetensors")]
    input: PathBuf,
    #[arg(value_name = "OUT")]
    output: PathBuf,
    #[command(flatten)]
    range: RangeOptions,
    #[command(flatten)]
    model: ModelOptions,
    #[command(flatten)]
    video: VideoOptions,
}

impl Decode {
    pub fn run(self) -> Result<()> {
        let Decode { input, output, video, model, .. } = &self;
        let latents = open_latents(input)?;
        let vae = model.open(&model.weights()?)?;
        if let Some(factor) = latents.metadata.get("scaling_factor") {
            // What the file was scaled by, unless the user knows better.
            if model.setting("scaling_factor").is_none() {
                vae.configure("scaling_factor", factor)?;
            }
        }
        let mut clip = original(&latents, &vae, video)?;
        let (mut source, mut first) = (latents.source, 0);
        if let Some(range) = range::read(&self.range, &vae, "decode", Some(latents.frames))? {
            clip.frames = clip.frames.map(|frames| range.within(frames)).transpose()?;
            first = range.first;
            source = range.of(source);
        }
        let (kind, sink) = files::create(output, &clip, video)?;
        let stages = vec![Stage::new(vae.stream("decode", latents.kind.shape(0), first)?, kind)];
        let mut progress = Progress::new("decode", clip.frames);
        let read = AtomicU64::new(0);
        let pipeline = Pipeline {
            source,
            kind: latents.kind,
            stages,
            sink,
            counting: Counting::Written,
            read: &read,
            drop_padding: false,
            most: clip.frames.unwrap_or(u64::MAX),
        };
        let frames = pipeline.run(&mut progress)?;
        let seconds = progress.end();
        let what = format!("{frames} frames of {}x{}", kind.width, kind.height);
        super::report(output, &what, frames, seconds, &vae)
    }
}

/// The video that the latents were made from: what the file says, if that fits, else all they stand for.
fn original(latents: &Latents, vae: &Vae, options: &VideoOptions) -> Result<Clip> {
    let scale = u64::from(vae.model.spatial_scale);
    let number = |key: &str| latents.metadata.get(key).and_then(|text| text.parse::<u64>().ok());
    let fitting = |key: &str, whole: u64, step: u64| {
        number(key).filter(|n| *n <= whole && *n > 0 && *n + step > whole).unwrap_or(whole)
    };
    let width = fitting("width", latents.kind.width as u64 * scale, scale);
    let height = fitting("height", latents.kind.height as u64 * scale, scale);
    let whole = vae.video_frames(latents.frames);
    let frames = Some(fitting("frames", whole, u64::from(vae.model.time_scale)));
    let stored = latents.metadata.get("fps").and_then(|text| Rate::parse(text).ok());
    let rate = options.rate.or(stored).unwrap_or(Rate::DEFAULT);
    let kind = FrameKind::pixels(Dtype::U8, width as usize, height as usize);
    Ok(Clip { kind, rate, frames, expected: frames, y4m: None })
}
