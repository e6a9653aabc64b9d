//! `vvae demo`: a clip goes through the model and comes back, with figures and pictures, and needs nothing.

pub mod clip;
mod font;
pub mod metrics;
pub mod sheet;

use std::path::{Path, PathBuf};
use std::time::Instant;

use super::plan;
use crate::api::VVAE_DEVICE_CPU;
use crate::draft::Draft;
use crate::files;
use crate::options::ModelOptions;
use crate::report::Report;
use crate::say::say;
use crate::tensor::{Dtype, FrameKind, Frames};
use crate::vae::Vae;
use crate::{Result, models, units, whole};

/// Makes a clip, encodes and decodes it, shows how it looks; needs nothing.
///
/// Makes a small clip, encodes and decodes it, and writes three files into ./vvae-demo: contact-sheet.png with frames
/// of the input, the output and their difference; animation.png, which moves in browsers and most viewers (an animated
/// PNG); and report.html, a page with a slider between input and output, PSNR per frame and pictures of the plans.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  vvae demo\n  vvae demo --weights ema_vae_fp16.safetensors --out /tmp/demo\n")]
pub struct Demo {
    /// Where the files go.
    #[arg(long, value_name = "DIR", default_value = "vvae-demo")]
    out: PathBuf,
    /// Of the clip.
    #[arg(long, value_name = "TxHxW", default_value = "17x256x256", value_parser = size)]
    shape: [u64; 3],
    #[command(flatten)]
    model: ModelOptions,
}

fn size(text: &str) -> Result<[u64; 3]> {
    units::sizes(text, "17x256x256")
}

impl Demo {
    pub fn run(self) -> Result<()> {
        let (folder, is_new) = (self.out.clone(), !self.out.exists());
        std::fs::create_dir_all(&folder).map_err(|why| format!("{} cannot be made: {why}", folder.display()))?;
        let done = self.run_in(&folder);
        if done.is_err() && is_new {
            // Only if it is empty.
            let _ = std::fs::remove_dir(&folder);
        }
        done
    }

    fn run_in(self, folder: &Path) -> Result<()> {
        let Demo { shape: [frames, height, width], model, .. } = self;
        let weights = model.named_weights().unwrap_or_else(models::demo_weights)?;
        let vae = model.open(&weights)?;
        let kind = FrameKind::pixels(Dtype::U8, width as usize, height as usize);
        let input = clip::make(kind, frames)?;
        let mut latent = Frames::new(
            FrameKind::latent(Dtype::F32, vae.latent_size(kind.width, kind.height)),
            vae.latent_frames(frames),
        )?;
        let mut output = Frames::new(kind, frames)?;

        say!("{} of {width}x{height} through {}\n", units::counted(frames, "frame"), weights.display())?;
        let [encode, decode] = roundtrip(&vae, &input, &mut latent, &mut output)?;
        let quality = metrics::compare(&input, &output);
        let ratio = input.bytes().len() as f64 / latent.bytes().len() as f64;
        say!("  quality   PSNR {:.2} dB, SSIM {:.4}", quality.psnr, quality.ssim)?;
        say!("  encode    {encode:.2} s, {:.1} frames/s", frames as f64 / encode)?;
        say!("  decode    {decode:.2} s, {:.1} frames/s", frames as f64 / decode)?;
        say!(
            "  latent    {:?} f32, {ratio:.0} times smaller than the pixels in bytes",
            &latent.kind.shape(latent.count() as u64)[1..]
        )?;
        say!("  memory    {} at most", units::bytes(vae.memory()?.peak))?;
        let fast = in_bf16(&vae, &model, &input, &latent)?;
        fast.iter().try_for_each(|line| say!("  in bf16   {line}"))?;
        say!("")?;
        say!("{}\n", plan::describe(&vae, "decode", [frames, height, width])?)?;
        vae.end_trace()?;
        write_pictures(folder, &input, &output)?;
        let name = weights.file_name().unwrap_or_default().to_string_lossy();
        let mut report = Report::new(format!("{frames} frames of {width} x {height} through {name}"), 0);
        for i in 0..frames as usize {
            report.frame(kind.width, &kind.rgb(input.frame(i))?, &kind.rgb(output.frame(i))?)?;
        }
        report.figure("SSIM", format_args!("{:.4}", quality.ssim));
        report.figure("encode", format_args!("{encode:.2} s, {:.1} frames/s", frames as f64 / encode));
        report.figure("decode", format_args!("{decode:.2} s, {:.1} frames/s", frames as f64 / decode));
        report.figure("latent", format_args!("{ratio:.0} times smaller than the pixels in bytes"));
        if let Some(line) = &fast {
            report.figure("in bf16", format_args!("{line}"));
        }
        report.figure("memory", format_args!("{} at most", units::bytes(vae.memory()?.peak)));
        for (node, input) in [("encode", kind), ("decode", latent.kind)] {
            report.plan(whole::timelines(&vae, node, input, true, Some(frames))?)?;
        }
        report.write(Draft::replacing(&folder.join("report.html"))?)?;
        say!("Look at {}", folder.join("contact-sheet.png").display())?;
        say!("and at  {}  (open it in a browser: it moves)", folder.join("animation.png").display())?;
        say!("and at  {}  (a slider between both, and pictures of the plans)", folder.join("report.html").display())?;
        say!(
            "\nNext: vvae get seedvr2, then vvae roundtrip YOUR.mp4 out.mp4 --weights seedvr2; `vvae --help` has the rest."
        )
    }
}

/// The seconds of an encode and a decode.
fn roundtrip(vae: &Vae, input: &Frames, latent: &mut Frames, output: &mut Frames) -> Result<[f64; 2]> {
    let started = Instant::now();
    vae.encode(input, latent)?;
    let encode = started.elapsed().as_secs_f64();
    let started = Instant::now();
    vae.decode(latent, output)?;
    Ok([encode, started.elapsed().as_secs_f64()])
}

/// The same clip in the CPU's fast precision, unless another one is wanted.
fn in_bf16(vae: &Vae, model: &ModelOptions, input: &Frames, latent: &Frames) -> Result<Option<String>> {
    let on_cpu = vae.devices()?.iter().all(|device| device.device_type == VVAE_DEVICE_CPU);
    if !model.precisions(on_cpu).contains(&Some("bf16")) {
        return Ok(None);
    }
    let frames = input.count();
    let (mut latent, mut output) =
        (Frames::new(latent.kind, latent.count() as u64)?, Frames::new(input.kind, frames as u64)?);
    vae.configure("precision", "bf16")?;
    let [encode, decode] = roundtrip(vae, input, &mut latent, &mut output)?.map(|seconds| frames as f64 / seconds);
    vae.configure("precision", "auto")?;
    let psnr = metrics::compare(input, &output).psnr;
    Ok(Some(format!("PSNR {psnr:.2} dB, encode {encode:.1} frames/s, decode {decode:.1} frames/s")))
}

fn write_pictures(folder: &Path, input: &Frames, output: &Frames) -> Result<()> {
    let (kind, sheet) = sheet::contact_sheet(input, output);
    let draft = Draft::replacing(&folder.join("contact-sheet.png"))?;
    files::encode_rgb(draft.create()?, kind, &sheet)?;
    draft.finish()?;
    let (kind, frames) = sheet::side_by_side(input, output);
    files::write_animation(&folder.join("animation.png"), kind, &frames, clip::RATE)
}
