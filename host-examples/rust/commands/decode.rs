//! `vvae decode`: latents in, video out.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;

use crate::files::tensors::{Latents, open_latents};
use crate::files::{self, Clip, TimeOptions, VideoOptions};
use crate::options::ModelOptions;
use crate::pipeline::{Counting, Pipeline, Stage};
use crate::progress::Progress;
use crate::range::{self, RangeOptions};
use crate::tensor::{Dtype, FrameKind};
use crate::units::{Rate, counted};
use crate::vae::Vae;
use crate::{Result, checkpoint, whole};

const EXAMPLES: &str = "Examples:
  vvae decode holiday.safetensors holiday.mp4
  vvae decode clip.safetensors frames/ --bits 16
  vvae decode film.safetensors shot.mp4 --frames 1000:1100
  vvae decode film.safetensors shot.mov -ss 1:30 -t 5 --codec prores
  vvae decode film.safetensors - | ffplay -
  vvae decode clip.safetensors numbers.safetensors --set pixel_range=0..1
";

/// Latents to video.
///
/// Decodes latents of any length, at constant memory. IN is what `vvae encode` wrote, or any safetensors file with a
/// tensor `latent` [1, C, T, h, w] (also found by the names mean, samples and latent_tensor). Size, length, rate or
/// times, and all else that `vvae encode` keeps, are those of the original video where IN tells them. Latents that were
/// made with another checkpoint are refused.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{}\n{EXAMPLES}", files::OUTPUTS))]
pub struct Decode {
    #[arg(value_name = "IN.safetensors")]
    input: PathBuf,
    #[arg(value_name = "OUT")]
    output: PathBuf,
    /// Also if the latents were made with another checkpoint.
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    range: RangeOptions,
    #[command(flatten)]
    times: TimeOptions,
    #[command(flatten)]
    model: ModelOptions,
    #[command(flatten)]
    video: VideoOptions,
}

impl Decode {
    pub fn run(self) -> Result<()> {
        let Decode { input, output, video, model, .. } = &self;
        let latents = open_latents(input)?;
        let weights = model.weights()?;
        self.check_fingerprint(&latents, &weights)?;
        let vae = model.open(&weights)?;
        // The file says these, not the user.
        let configured = self.configure_latents(&latents, &vae);
        configured.map_err(|why| format!("{}: {why}", input.display()))?;
        let mut clip = original(&latents, &vae, video)?;
        let part = self.range.frames.as_deref().map(range::parse).transpose()?;
        let part = part.or(self.times.part().map(|part| part.frames(&clip)));
        let range = part.map(|part| range::read(part, &vae, "decode", Some(latents.frames))).transpose()?;
        if let Some(range) = &range {
            clip.frames = clip.frames.map(|frames| range.within(frames)).transpose()?;
            clip.times = clip.times.map(|times| times.from(range.first as usize));
        }
        let (kind, sink) = files::create(output, &clip, video)?;
        let mut progress = Progress::new("decode", clip.frames);
        let (read, most) = (AtomicU64::new(0), clip.frames.unwrap_or(u64::MAX));
        let whole = range.is_none() && whole::plan(&vae, "decode", latents.kind, Some(latents.frames))?.whole;
        let frames = if whole {
            whole::run(&vae, (latents.source, latents.kind), &[("decode", kind)], sink, &read, most)?
        } else {
            let first = range.as_ref().map_or(0, |range| range.first);
            let stages = vec![Stage::new(vae.stream("decode", latents.kind.shape(0), first)?, kind)];
            let source = match range {
                Some(range) => range.of(latents.source),
                None => latents.source,
            };
            let (kind, read, counting) = (latents.kind, &read, Counting::Written);
            Pipeline { source, kind, stages, sink, counting, read, drop_padding: false, most }.run(&mut progress)?
        };
        let seconds = progress.end();
        let what = format!("{} of {}x{}", counted(frames, "frame"), kind.width, kind.height);
        super::report(output, &what, frames, seconds, &vae)?;
        super::tell(files::notes(output, &clip, video));
        Ok(())
    }

    /// What the file was scaled by, unless the user knows better.
    fn configure_latents(&self, latents: &Latents, vae: &Vae) -> Result<()> {
        let told = |key| latents.metadata.get(key).filter(|_| self.model.setting(key).is_none());
        if let Some(factor) = told("scaling_factor") {
            vae.configure("scaling_factor", factor)?;
        }
        let facts = vae.latents();
        if let Some(format) = told("latent_format").filter(|format| facts.formats.len() > 1 && !format.is_empty()) {
            vae.configure("latent_format", format)?;
        }
        told("latents").map_or(Ok(()), |value| vae.configure("latents", value))
    }

    /// Latents of one checkpoint mean nothing to another.
    fn check_fingerprint(&self, latents: &Latents, weights: &Path) -> Result<()> {
        let Some(made_with) = latents.metadata.get(checkpoint::FINGERPRINT).filter(|_| !self.force) else {
            return Ok(());
        };
        let found = checkpoint::fingerprint(weights)?;
        if found == *made_with {
            return Ok(());
        }
        Err(format!(
            "{} was made with another checkpoint (fingerprint {made_with}, {} has {found}); name that one with --weights, \
             or add --force",
            self.input.display(),
            weights.display()
        ))
    }
}

/// The video that the latents were made from: what the file says, if that fits, else all they stand for.
fn original(latents: &Latents, vae: &Vae, options: &VideoOptions) -> Result<Clip> {
    let scale = u64::from(vae.model().spatial_scale);
    let number = |key: &str| latents.metadata.get(key).and_then(|text| text.parse::<u64>().ok());
    let fitting = |key: &str, whole: u64, step: u64| {
        number(key).filter(|n| *n <= whole && *n > 0 && *n + step > whole).unwrap_or(whole)
    };
    let width = fitting("width", latents.kind.width as u64 * scale, scale);
    let height = fitting("height", latents.kind.height as u64 * scale, scale);
    let whole = vae.video_frames(latents.frames);
    let frames = Some(fitting("frames", whole, u64::from(vae.model().time_scale)));
    let stored = latents.metadata.get("fps").and_then(|text| Rate::parse(text).ok());
    let rate = options.clip.rate.or(stored).unwrap_or(Rate::DEFAULT);
    let channels = vae.model().decoded_channels as usize;
    let kind = FrameKind::pixels(Dtype::U8, width as usize, height as usize).with_channels(channels);
    let mut clip = Clip::new(kind, rate).with_frames(frames);
    clip.bits = number("bits").filter(|bits| (8..=16).contains(bits)).map_or(8, |bits| bits as u32);
    for (key, tag) in clip.tags.fields() {
        *tag = latents.metadata.get(key).cloned().unwrap_or_default();
    }
    clip.extras.title = latents.metadata.get("title").cloned().unwrap_or_default();
    if let Some(times) = latents.times.clone().filter(|_| options.clip.rate.is_none()) {
        let (told, frames) = (times.count() as u64, clip.frames.unwrap_or(0));
        if told != frames {
            return Err(format!("the tensor times has {told} numbers for {frames} frames; encode the clip anew"));
        }
        clip.times = Some(times);
    }
    Ok(clip)
}
