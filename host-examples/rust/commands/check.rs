//! `vvae check`: whether a checkpoint gives the same result in a fast precision as in fp32.

use std::path::PathBuf;

use serde_json::json;

use super::demo::{clip, metrics};
use crate::api;
use crate::checkpoint::fingerprint;
use crate::json::JsonOptions;
use crate::options::ModelOptions;
use crate::say::say;
use crate::tensor::{Dtype, FrameKind, Frames};
use crate::vae::Vae;
use crate::{Result, models, units};

const EXAMPLES: &str = "Examples:
  vvae check ema_vae_fp16.safetensors
  vvae check ema_vae_fp16.safetensors --device cuda:0
";

/// A checkpoint in fp32 against fp16 on a fixed clip; one line to paste into a report.
///
/// Encodes and decodes a clip that is the same everywhere, in fp32 and in a faster precision: fp16 on a GPU, bf16 on a
/// CPU. Prints one line: the checkpoint, the machine, whether the faster one holds or overflows, and how far the two
/// are apart.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Check {
    #[arg(value_name = "CHECKPOINT")]
    checkpoint: PathBuf,
    /// Of the clip.
    #[arg(long, value_name = "TxHxW", default_value = "9x128x128", value_parser = size)]
    shape: [u64; 3],
    #[command(flatten)]
    json: JsonOptions,
    #[command(flatten)]
    model: ModelOptions,
}

fn size(text: &str) -> Result<[u64; 3]> {
    units::sizes(text, "9x128x128")
}

struct Results {
    latent: Frames,
    video: Frames,
}

impl Check {
    pub fn run(self) -> Result<()> {
        let ([frames, height, width], json) = (self.shape, self.json.open()?);
        let kind = FrameKind::pixels(Dtype::U8, width as usize, height as usize);
        let input = clip::make(kind, frames)?;
        let model = &self.model;
        if model.weights.is_some() {
            return Err("--weights: the checkpoint is the word after `check`; leave --weights out".into());
        }
        if model.setting("precision").is_some() {
            return Err("--set precision: check takes fp32 and the faster one of the device; leave it out".into());
        }
        let checkpoint = models::resolve(&self.checkpoint)?;
        let vae = self.model.open(&checkpoint)?;
        let exact = results(&vae, &input, "fp32")?;
        let fast = ["fp16", "bf16"].into_iter().find(|precision| vae.configure("precision", precision).is_ok());
        let fast = fast.ok_or("this device has no precision but fp32; name another with --device")?;
        let other = results(&vae, &input, fast)?;
        let [error, norm] = metrics::energies(exact.latent.bytes(), other.latent.bytes());
        let latent = (error / norm).sqrt();
        let finite =
            |bytes: &[u8]| bytes.chunks_exact(4).all(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]).is_finite());
        let is_finite = finite(other.latent.bytes()) && finite(&floats(&vae, &exact, fast)?);
        let holds = if is_finite { "holds" } else { "overflows, use precision=bf16" };
        vae.end_trace()?;
        let apart = metrics::compare(&exact.video, &other.video);
        let through = metrics::compare(&input, &exact.video);
        let name = checkpoint.file_name().unwrap_or_default().to_string_lossy();
        let device = super::info::device_name(&self.model.device)?;
        let ((version, _), fingerprint) = (api::version()?, fingerprint(&checkpoint)?);
        say!(
            "vvae check: {name} {fingerprint}; video-vae {version}; {device}; {frames}x{height}x{width}; {fast} {holds}; \
             {fast} against fp32: latent {latent:.1e}, video {:.1} dB; through fp32: PSNR {:.2} dB, SSIM {:.4}",
            apart.psnr,
            through.psnr,
            through.ssim
        )?;
        let decibels = |psnr: f64| psnr.is_finite().then_some(psnr);
        let result = json!({
            "checkpoint": checkpoint.display().to_string(), "fingerprint": fingerprint, "device": device,
            "frames": frames, "height": height, "width": width, "precision": fast, "finite": is_finite,
            "latent_error": latent, "psnr": decibels(apart.psnr), "clip_psnr": decibels(through.psnr),
            "clip_ssim": through.ssim,
        });
        json.write("check", vec![result])
    }
}

/// The video of the exact latents in another precision, as floats: in 8 bits, values that are not finite are 0.
fn floats(vae: &Vae, exact: &Results, precision: &str) -> Result<Vec<u8>> {
    vae.configure("precision", precision)?;
    let (kind, frames) = (exact.video.kind, exact.video.count() as u64);
    let mut video = Frames::new(FrameKind::pixels(Dtype::F32, kind.width, kind.height), frames)?;
    vae.decode(&exact.latent, &mut video)?;
    Ok(video.bytes().to_vec())
}

fn results(vae: &Vae, input: &Frames, precision: &str) -> Result<Results> {
    vae.configure("precision", precision)?;
    let (kind, frames) = (input.kind, input.count() as u64);
    let latent = FrameKind::latent(Dtype::F32, vae.latent_size(kind.width, kind.height));
    let mut results =
        Results { latent: Frames::new(latent, vae.latent_frames(frames))?, video: Frames::new(kind, frames)? };
    vae.encode(input, &mut results.latent)?;
    vae.decode(&results.latent, &mut results.video)?;
    Ok(results)
}
