//! `vvae compare`: how alike two clips are, or what precisions and settings do to one.

mod strips;
mod table;
mod variants;

use std::path::{Path, PathBuf};

use serde_json::json;

use super::demo::{metrics, sheet};
use crate::draft::Draft;
use crate::files::{self, Clip, ClipOptions, InputOptions, Part, Source};
use crate::json::JsonOptions;
use crate::options::ModelOptions;
use crate::report::Report;
use crate::say::say;
use crate::tensor::{Dtype, FrameKind, Frames};
use crate::vae::TRACE;
use crate::{Result, interrupt, range, units};
use strips::eight_bits;
use variants::{Outcome, Variant};

const EXAMPLES: &str = "Examples:
  vvae compare holiday.mp4 holiday-through-the-vae.mp4
  vvae compare clip.y4m back.y4m --sheet sheet.png --per-frame
  vvae compare clip.y4m back.y4m --report page.html
  vvae compare demo --weights demo
  vvae compare holiday.mp4 --precisions fp32,fp16,bf16 --weights ema_vae_fp16.safetensors --frames 100 --sheet sheet.png
  vvae compare holiday.mp4 --precisions fp16 --variant precision=fp16,decode_tiled=true --json figures.json
";

/// PSNR and SSIM of two clips, or of one clip through the model in several precisions.
///
/// With A and B: reads any two clips of the same size and length. PSNR is over red, green and blue, SSIM over luma
/// (Wang et al. 2004: Gaussian window of 11 x 11 pixels with a deviation of 1.5, constants 0.01 and 0.03), the mean
/// over frames.
///
/// With one clip: encodes and decodes it for each variant, on one device, and prints a table. Columns: PSNR, SSIM,
/// worst frame and relative error of the latent, all against the first variant; PSNR against the clip; seconds of
/// encode and decode; planned device and host memory, of the direction that takes more. A clip that runs as a whole
/// runs twice, and the second time counts, which loads no weights; if the first takes 20 s or more, it counts, loading
/// included. Weights of a stream are loaded before its time begins. A variant is a precision, or any settings. The
/// clip of `vvae demo` has the name demo.
///
/// One clip may have any length: memory is that of `vvae encode` and `vvae decode`. The temporary folder ($TMPDIR)
/// holds the clip, and its decoded frames in 16 bits and latents for every variant: for three variants about 22 bytes
/// a pixel of an 8-bit clip, 46 MB for each frame of 1920x1080. --frames limits it. The sheet is made in memory, in
/// full size.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{}\n{EXAMPLES}", files::INPUTS))]
pub struct Compare {
    /// A clip; without B, demo is that of `vvae demo`.
    #[arg(value_name = "A")]
    a: PathBuf,
    /// Without it, A goes through the model.
    #[arg(value_name = "B", conflicts_with_all = ["precisions", "variant"])]
    b: Option<PathBuf>,
    /// Precisions to compare, such as fp32,fp16,bf16; all others with the first. Default: all that the device has, the
    /// most exact one first; with --variant, only the most exact one.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    precisions: Vec<String>,
    /// Settings to compare, such as precision=fp16,tiles=never: any parameters that `vvae info` lists, on top of
    /// those of --set; may be given more than once. They follow the precisions.
    #[arg(long, value_name = "KEY=VALUE,...", value_parser = Variant::parse)]
    variant: Vec<Variant>,
    /// Only so many frames of the clip, or a part of it, as a clip of its own.
    #[arg(long, value_name = "N or FIRST:END", value_parser = range::parse, conflicts_with_all = ["ss", "t"])]
    frames: Option<(u64, Option<u64>)>,
    /// Write some frames of both, the worst one among them, and their difference, as a PNG. Of variants: the first,
    /// middle and worst frame; the difference from the first variant is amplified by a factor that the sheet states.
    #[arg(long, value_name = "FILE.png")]
    sheet: Option<PathBuf>,
    #[command(flatten)]
    json: JsonOptions,
    /// Write a page for a browser: a slider between both clips, the difference, PSNR per frame. Of one clip: what the
    /// first variant makes of it, and the figures of all.
    #[arg(long, value_name = "FILE.html")]
    report: Option<PathBuf>,
    /// Print a line for every frame.
    #[arg(long)]
    per_frame: bool,
    #[command(flatten)]
    model: ModelOptions,
    #[command(flatten)]
    input: InputOptions,
    #[command(flatten)]
    video: ClipOptions,
}

/// More than comparing two frames takes for a pixel: floats of both, ten planes of the SSIM, and the frames that are
/// kept.
const BYTES_PER_PIXEL: usize = 256;

/// A frame of both clips, as 8 bits.
type Pair = (u64, Vec<u8>, Vec<u8>);

impl Compare {
    pub fn run(self) -> Result<()> {
        let inputs: Vec<&Path> = [Some(&self.a), self.b.as_ref()].into_iter().flatten().map(PathBuf::as_path).collect();
        self.input.check(&inputs)?;
        if inputs.iter().filter(|input| files::is_stdio(input)).count() > 1 {
            return Err("- and -: standard input is one clip; name a file for the other".into());
        }
        match &self.b {
            Some(b) if !self.model.are_given() => self.clips(b),
            Some(_) => Err(
                "--weights, --device, --limit, --trace and --set are for one clip through the model; leave out B, or \
                     them"
                    .into(),
            ),
            None => self.variants(),
        }
    }

    /// One clip through the model.
    fn variants(&self) -> Result<()> {
        let (model, weights) = (&self.model, self.model.weights()?);
        if model.setting(TRACE).is_some() {
            return Err("--trace: every variant would write it; add trace=FILE to one --variant".into());
        }
        // What cannot be done is said before anything runs.
        let variants = variants::list(&self.precisions, &self.variant, model, &weights)?;
        let vaes = variants.iter().map(|variant| variant.open(model, &weights)).collect::<Result<Vec<_>>>()?;
        let [sheet, page] = self.pictures()?;
        let json = self.json.open()?;
        let (first, count) = self.frames.unwrap_or((0, None));
        let clip = variants::keep(&self.a, (&self.video, &self.input), (first, count))?;
        let runs = variants.iter().zip(vaes).map(|(variant, vae)| Outcome::run(variant, &vae, &clip));
        let outcomes = runs.collect::<Result<Vec<_>>>()?;
        clip.kind.spare(BYTES_PER_PIXEL)?;
        let figures = variants::measure(&clip, &outcomes, |frame, name, (square, ssim)| {
            if !self.per_frame {
                return Ok(());
            }
            say!("frame {:>6}  PSNR {:6.2} dB  SSIM {ssim:.6}  {name}", first + frame, metrics::psnr(square))
        })?;
        say!(
            "{} of {}x{} through {}, {}; against {}:",
            units::counted(clip.count(), "frame"),
            clip.kind.width,
            clip.kind.height,
            weights.file_name().unwrap_or_default().to_string_lossy(),
            super::info::device_name(&model.device)?,
            outcomes[0].name
        )?;
        variants::lines(&outcomes, &figures, first).iter().try_for_each(|line| say!("{line}"))?;
        for outcome in outcomes.iter().filter(|outcome| outcome.is_tiled()) {
            say!("{}: in tiles, which is not exact", outcome.name)?;
        }
        json.write("compare", variants::json(&clip, &outcomes, &figures, first))?;
        if let Some(draft) = page {
            variants::page(draft, &self.a, &clip, &outcomes, &figures, first)?;
        }
        let (Some(draft), Some(path)) = (sheet, &self.sheet) else { return Ok(()) };
        let shown = strips::write(draft, &clip, &outcomes, &figures, first)?;
        say!("{}: {shown}", path.display())
    }

    /// Sheet and page, where they are asked for. What cannot be written is said before anything runs.
    fn pictures(&self) -> Result<[Option<Draft>; 2]> {
        let draft = |path: &Option<PathBuf>| path.as_deref().map(Draft::new).transpose();
        Ok([draft(&self.sheet)?, draft(&self.report)?])
    }

    /// A clip, or the part of it that --frames names.
    fn part(&self, path: &Path) -> Result<(Clip, Box<dyn Source>)> {
        let (clip, source) = files::open(path, &self.video, &self.input)?;
        Ok(match self.frames {
            Some((first, count)) => files::cut(clip, source, Part::Frames { first, count }),
            None => (clip, source),
        })
    }

    /// Two clips.
    fn clips(&self, b: &Path) -> Result<()> {
        let json = self.json.open()?;
        let (first, mut a) = self.part(&self.a)?;
        let (second, mut other) = self.part(b)?;
        let size = |clip: &Clip| (clip.kind.width, clip.kind.height);
        if size(&first) != size(&second) {
            let ((w, h), (v, g)) = (size(&first), size(&second));
            return Err(format!(
                "{} is {w}x{h}, {} is {v}x{g}; compare clips of one size",
                self.a.display(),
                b.display()
            ));
        }
        let [sheet, page] = self.pictures()?;
        first.kind.spare(BYTES_PER_PIXEL + usize::from(sheet.is_some()) * BYTES_PER_PIXEL)?;
        let (mut frames, mut samples) = (Vec::new(), Samples::default());
        let mut worst: Option<(f64, Pair)> = None;
        let mut report = Report::new(format!("{} and {}", self.a.display(), b.display()), first.first);
        while let Some((x, y)) = both((&mut *a, first.kind), (&mut *other, second.kind))? {
            let (square, ssim) = metrics::of_frame(&x, &y, first.kind.width);
            let index = first.first + frames.len() as u64;
            if self.per_frame {
                say!("frame {index:>6}  PSNR {:6.2} dB  SSIM {ssim:.4}", metrics::psnr(square))?;
            }
            let pair = || (index, eight_bits(&x), eight_bits(&y));
            if worst.as_ref().is_none_or(|(known, _)| square > *known) {
                worst = Some((square, pair()));
            }
            samples.offer(index, pair);
            if page.is_some() {
                report.frame(first.kind.width, &x, &y)?;
            }
            frames.push((square, ssim));
        }
        let Some((square, worst)) = worst else { return Err("the clips have no frames; name others".into()) };
        let quality = metrics::mean(&frames);
        say!("{} of {}x{}", units::counted(frames.len() as u64, "frame"), first.kind.width, first.kind.height)?;
        say!("PSNR {:.2} dB, SSIM {:.4}", quality.psnr, quality.ssim)?;
        let worst_ssim = frames[(worst.0 - first.first) as usize].1;
        say!("worst frame {}: PSNR {:.2} dB, SSIM {worst_ssim:.4}", worst.0, metrics::psnr(square))?;
        let finite = |psnr: f64| psnr.is_finite().then_some(psnr);
        let result = json!({
            "variant": null, "settings": {}, "against": self.a.display().to_string(), "frames": frames.len(),
            "width": first.kind.width, "height": first.kind.height, "psnr": finite(quality.psnr), "ssim": quality.ssim,
            "worst_frame": worst.0, "worst_psnr": finite(metrics::psnr(square)), "latent_error": null,
            "clip_psnr": finite(quality.psnr), "encode_seconds": null, "decode_seconds": null, "device_bytes": null,
            "host_bytes": null, "exact": null,
        });
        json.write("compare", vec![result])?;
        if let Some(draft) = page {
            report.figure("SSIM", format_args!("{:.4}", quality.ssim));
            report.write(draft)?;
        }
        match sheet {
            Some(draft) => write_sheet(draft, FrameKind { dtype: Dtype::U8, ..first.kind }, samples.with(worst)),
            None => Ok(()),
        }
    }
}

/// The next frame of both; none at the end of both.
fn both(a: (&mut dyn Source, FrameKind), b: (&mut dyn Source, FrameKind)) -> Result<Option<(Vec<f32>, Vec<f32>)>> {
    interrupt::check()?;
    match (next(a.0, a.1)?, next(b.0, b.1)?) {
        (Some(_), None) => Err("the second clip is shorter than the first; cut them to one length".into()),
        (None, Some(_)) => Err("the first clip is shorter than the second; cut them to one length".into()),
        (a, b) => Ok(a.zip(b)),
    }
}

/// The next frame as interleaved RGB from 0 to 255.
fn next(source: &mut dyn Source, kind: FrameKind) -> Result<Option<Vec<f32>>> {
    let mut frame = kind.buffer()?;
    if !source.read(&mut frame)? {
        return Ok(None);
    }
    kind.rgb(&frame).map(Some)
}

/// Frames at equal distances of a clip whose length is not known: when there are too many, every second one goes.
struct Samples {
    every: u64,
    pairs: Vec<Pair>,
}

impl Default for Samples {
    fn default() -> Samples {
        Samples { every: 1, pairs: Vec::new() }
    }
}

impl Samples {
    const MOST: usize = 8;

    fn offer(&mut self, index: u64, pair: impl Fn() -> Pair) {
        if !index.is_multiple_of(self.every) {
            return;
        }
        if self.pairs.len() == Samples::MOST {
            self.every *= 2;
            self.pairs.retain(|(index, ..)| index.is_multiple_of(self.every));
        }
        if index.is_multiple_of(self.every) {
            self.pairs.push(pair());
        }
    }

    /// At most four of them and the worst frame, in order.
    fn with(mut self, worst: Pair) -> Vec<Pair> {
        while self.pairs.len() > 4 {
            self.every *= 2;
            self.pairs.retain(|(index, ..)| index.is_multiple_of(self.every));
        }
        self.pairs.retain(|(index, ..)| *index != worst.0);
        self.pairs.push(worst);
        self.pairs.sort_by_key(|(index, ..)| *index);
        self.pairs
    }
}

fn write_sheet(draft: Draft, kind: FrameKind, pairs: Vec<Pair>) -> Result<()> {
    let kind = FrameKind { interleaved: true, ..kind };
    let (mut a, mut b) = (Frames::new(kind, pairs.len() as u64)?, Frames::new(kind, pairs.len() as u64)?);
    for (at, (_, x, y)) in pairs.iter().enumerate() {
        a.frame_mut(at).copy_from_slice(x);
        b.frame_mut(at).copy_from_slice(y);
    }
    let (kind, pixels) = sheet::contact_sheet(&a, &b);
    files::encode_rgb(draft.create()?, kind, &pixels)?;
    draft.finish()
}
