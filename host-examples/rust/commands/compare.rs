//! `vvae compare`: how alike two clips are, frame by frame.

use std::path::PathBuf;

use super::demo::{metrics, sheet};
use crate::draft::Draft;
use crate::files::{self, Clip, Source};
use crate::options::VideoOptions;
use crate::report::Report;
use crate::say::say;
use crate::tensor::{Dtype, FrameKind, Frames};
use crate::{Result, interrupt, units};

const EXAMPLES: &str = "Examples:
  vvae compare holiday.mp4 holiday-through-the-vae.mp4
  vvae compare clip.y4m back.y4m --sheet sheet.png --per-frame
  vvae compare clip.y4m back.y4m --report page.html
";

/// PSNR and SSIM of two clips, frame by frame, with a contact sheet.
///
/// Reads any two clips of the same size and length. PSNR is over red, green and blue, SSIM over luma (Wang et al.
/// 2004).
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{}\n{EXAMPLES}", files::INPUTS))]
pub struct Compare {
    #[arg(value_name = "A")]
    a: PathBuf,
    #[arg(value_name = "B")]
    b: PathBuf,
    /// Write some frames of both, the worst one among them, and their difference, as a PNG.
    #[arg(long, value_name = "FILE.png")]
    sheet: Option<PathBuf>,
    /// Write a page for a browser: a slider between both, the difference, PSNR per frame.
    #[arg(long, value_name = "FILE.html")]
    report: Option<PathBuf>,
    /// Print a line for every frame.
    #[arg(long)]
    per_frame: bool,
    #[command(flatten)]
    video: VideoOptions,
}

/// A frame of both clips, as 8 bits.
type Pair = (u64, Vec<u8>, Vec<u8>);

impl Compare {
    pub fn run(self) -> Result<()> {
        let (first, mut a) = files::open(&self.a, &self.video)?;
        let (second, mut b) = files::open(&self.b, &self.video)?;
        let size = |clip: &Clip| (clip.kind.width, clip.kind.height);
        if size(&first) != size(&second) {
            let ((w, h), (v, g)) = (size(&first), size(&second));
            return Err(format!(
                "{} is {w}x{h}, {} is {v}x{g}; compare clips of one size",
                self.a.display(),
                self.b.display()
            ));
        }
        let (mut frames, mut samples) = (Vec::new(), Samples::default());
        let mut worst: Option<(f64, Pair)> = None;
        let mut report = Report::new(format!("{} and {}", self.a.display(), self.b.display()));
        while let Some((x, y)) = both((&mut *a, first.kind), (&mut *b, second.kind))? {
            let (square, ssim) = metrics::of_frame(&x, &y, first.kind.width);
            let index = frames.len() as u64;
            if self.per_frame {
                say!("frame {index:>6}  PSNR {:6.2} dB  SSIM {ssim:.4}", metrics::psnr(square))?;
            }
            let pair = || (index, eight_bits(&x), eight_bits(&y));
            if worst.as_ref().is_none_or(|(known, _)| square > *known) {
                worst = Some((square, pair()));
            }
            samples.offer(index, pair);
            if self.report.is_some() {
                report.frame(first.kind.width, &x, &y)?;
            }
            frames.push((square, ssim));
        }
        let Some((square, worst)) = worst else { return Err("the clips have no frames; name others".into()) };
        let quality = metrics::mean(&frames);
        say!("{} of {}x{}", units::counted(frames.len() as u64, "frame"), first.kind.width, first.kind.height)?;
        say!("PSNR {:.2} dB, SSIM {:.4}", quality.psnr, quality.ssim)?;
        say!("worst frame {}: PSNR {:.2} dB, SSIM {:.4}", worst.0, metrics::psnr(square), frames[worst.0 as usize].1)?;
        if let Some(path) = &self.report {
            report.figure("SSIM", format_args!("{:.4}", quality.ssim));
            report.write(Draft::new(path)?)?;
        }
        match &self.sheet {
            Some(path) => write_sheet(path, FrameKind { dtype: Dtype::U8, ..first.kind }, samples.with(worst)),
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
    let mut frame = vec![0; kind.bytes()];
    if !source.read(&mut frame)? {
        return Ok(None);
    }
    kind.rgb(&frame).map(Some)
}

fn eight_bits(values: &[f32]) -> Vec<u8> {
    values.iter().map(|value| value.round() as u8).collect()
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

fn write_sheet(path: &std::path::Path, kind: FrameKind, pairs: Vec<Pair>) -> Result<()> {
    let kind = FrameKind { interleaved: true, ..kind };
    let (mut a, mut b) = (Frames::new(kind, pairs.len() as u64), Frames::new(kind, pairs.len() as u64));
    for (at, (_, x, y)) in pairs.iter().enumerate() {
        a.frame_mut(at).copy_from_slice(x);
        b.frame_mut(at).copy_from_slice(y);
    }
    let (kind, pixels) = sheet::contact_sheet(&a, &b);
    let draft = Draft::new(path)?;
    files::encode_rgb(draft.create()?, kind, &pixels)?;
    draft.finish()
}
