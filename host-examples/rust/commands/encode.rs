//! `vvae encode`: video in, latents out.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use crate::files::{self, Clip, ClipOptions, InputOptions, Sink};
use crate::options::{Float, ModelOptions};
use crate::pipeline::{Counting, Pipeline, Stage};
use crate::progress::Progress;
use crate::range::{self, RangeOptions};
use crate::tensor::FrameKind;
use crate::units::counted;
use crate::vae::Vae;
use crate::{Result, checkpoint, whole};

const EXAMPLES: &str = "Examples:
  vvae encode holiday.mp4 holiday.safetensors
  vvae encode frames/ clip.safetensors --fps 30 --limit 4GiB
  vvae encode film.mp4 shot.safetensors --frames 250:275
  vvae encode film.mp4 shot.safetensors -ss 0:10 -t 2.5
  vvae encode shot/f%04d.exr shot.safetensors
  ffmpeg -i film.mp4 -f yuv4mpegpipe - | vvae encode - film.safetensors
  vvae encode clip.raw clip.safetensors --size 640x480 --set posterior=sample --set seed=7
";

/// Video to latents.
///
/// Encodes a clip of any length, at constant memory. OUT gets the tensor `latent` [T, C, h, w], frames first, because
/// the length of a stream is known only at its end; in Python, latent.permute(1, 0, 2, 3)[None] is the usual [1, C, T,
/// h, w]. Its metadata keeps size, length, rate, depth, colour, HDR metadata, pixel aspect ratio and title of the
/// video, so that `vvae decode` gives back exactly that, and the checkpoint's fingerprint. Where frames do not come at
/// one rate from zero on, the tensor `times` [frames] has their times, in ticks of the metadata's time_base. Stills and
/// clips of up to 17 frames run as a whole if that fits.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{}\n{EXAMPLES}", files::INPUTS))]
pub struct Encode {
    #[arg(value_name = "IN")]
    input: PathBuf,
    #[arg(value_name = "OUT.safetensors")]
    output: PathBuf,
    /// Of the stored latents.
    #[arg(long, default_value = "f32")]
    dtype: Float,
    #[command(flatten)]
    range: RangeOptions,
    #[command(flatten)]
    model: ModelOptions,
    #[command(flatten)]
    reading: InputOptions,
    #[command(flatten)]
    video: ClipOptions,
}

impl Encode {
    pub fn run(self) -> Result<()> {
        let Encode { input, output, dtype, video, model, reading, .. } = &self;
        if files::extension(output) != "safetensors" && !files::is_stdio(output) {
            return Err(format!("{}: latents are written as .safetensors; name it so", output.display()));
        }
        reading.check(&[input])?;
        let (clip, source) = files::open_with_alpha(input, video, reading)?;
        let weights = model.weights()?;
        let vae = model.open(&weights)?;
        let (mut clip, mut source) = files::fit_channels(clip, source, vae.model().pixel_channels as usize);
        let part = self.range.frames.as_deref().map(range::parse).transpose()?;
        let range = part.map(|part| range::read(part, &vae, "encode", clip.frames)).transpose()?;
        if let Some(range) = &range {
            clip.expected = range.input_count.or(clip.expected.map(|frames| frames.saturating_sub(range.input_first)));
            source = range.of(source);
        }
        let (width, height) = (clip.kind.width, clip.kind.height);
        let kind = FrameKind::latent(dtype.dtype(), vae.latent_size(width, height));
        let metadata = self.metadata(&mut clip, &weights, &vae)?;
        let read = Arc::new(AtomicU64::new(0));
        // A range is a clip of its own, which has no frames of this one.
        let times = clip.times.clone().filter(|_| range.is_none());
        let (is_range, frames) = (range.is_some(), range.is_none().then(|| Arc::clone(&read)));
        let sink: Box<dyn Sink> =
            Box::new(files::tensors::create_latents(output, kind, metadata, frames, (times, clip.rate))?);
        let mut progress = Progress::new("encode", clip.expected);
        let whole = range.is_none() && whole::plan(&vae, "encode", clip.kind, clip.frames)?.whole;
        let latents = if whole {
            whole::run(&vae, (source, clip.kind), &[("encode", kind)], sink, &read, u64::MAX)?
        } else {
            let first = range.as_ref().map_or(0, |range| range.first);
            let stages = vec![Stage::new(vae.stream("encode", clip.kind.shape(0), first)?, kind)];
            let counting = Counting::Read;
            let (kind, read, most) = (clip.kind, &*read, u64::MAX);
            Pipeline { source, kind, stages, sink, counting, read, drop_padding: false, most }.run(&mut progress)?
        };
        range.map_or(Ok(()), |range| range.check(latents))?;
        let (seconds, frames) = (progress.end(), read.load(std::sync::atomic::Ordering::Acquire));
        let (c, h, w) = (kind.channels, kind.height, kind.width);
        let what = format!(
            "{} of {width}x{height} in {} of {c}x{h}x{w} {}",
            counted(frames, "frame"),
            counted(latents, "latent"),
            kind.dtype.name()
        );
        super::report(output, &what, frames, seconds, &vae)?;
        super::tell(files::latent_notes(output, &clip, !is_range));
        Ok(())
    }

    /// What decode has to know: the video's size, rate, depth and colour, and how the latents were made.
    fn metadata(&self, clip: &mut Clip, weights: &Path, vae: &Vae) -> Result<Vec<(&'static str, String)>> {
        let mut metadata = vec![
            ("layout", "T,C,h,w".to_owned()),
            ("width", clip.kind.width.to_string()),
            ("height", clip.kind.height.to_string()),
            ("fps", clip.rate.to_string()),
            ("bits", clip.bits.to_string()),
            ("scaling_factor", self.model.setting("scaling_factor").unwrap_or("1").to_owned()),
            (checkpoint::FINGERPRINT, checkpoint::fingerprint(weights)?),
        ];
        if self.model.setting("latents") == Some("model") {
            metadata.push(("latents", "model".to_owned()));
            metadata.push(("latent_format", vae.latents().format));
        }
        let tags = clip.tags.fields().into_iter().filter(|(_, tag)| !tag.is_empty());
        metadata.extend(tags.map(|(key, tag)| (key, tag.clone())));
        metadata.extend(files::kept_title(clip).map(|title| ("title", title)));
        metadata.extend(self.range.frames.clone().map(|frames| ("latent_range", frames)));
        Ok(metadata)
    }
}
