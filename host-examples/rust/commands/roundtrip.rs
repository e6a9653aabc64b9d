//! `vvae roundtrip`: video through the latents and back, to see what the model does to it.

use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};

use crate::draft::Draft;
use crate::files::{self, Clip, InputOptions, Part, VideoOptions};
use crate::options::ModelOptions;
use crate::pipeline::{Counting, Pipeline, Stage};
use crate::progress::Progress;
use crate::report::{self, Report};
use crate::tensor::{Dtype, FrameKind};
use crate::vae::{Stream, Vae, is_untiled};
use crate::{Result, range, units, whole};

const EXAMPLES: &str = "Examples:
  vvae roundtrip holiday.mp4 holiday-through-the-vae.mp4
  vvae roundtrip photo.png photo-back.png --report photo.html
  vvae roundtrip film.mp4 trial.mp4 --frames 10
  vvae roundtrip film.mp4 shot.mov -ss 1:30 -t 5 --codec prores
  vvae roundtrip hdr.mp4 back.mp4 --codec hevc --quality 20
  vvae roundtrip clip.y4m back.y4m --limit 6GiB --device cuda:0
";

/// Video to latents and back to video.
///
/// Encodes and decodes a clip of any length in one go, at constant memory, with no file between. OUT has the size,
/// length and rate of IN, or the time of every frame where the rate varies, and its depth, colour, pixel aspect ratio,
/// HDR metadata, sound, subtitles, title and chapters, where the format has them. A line says what it does not hold.
/// --limit holds for both directions together.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{}\n{}\n{EXAMPLES}", files::INPUTS, files::OUTPUTS))]
pub struct Roundtrip {
    #[arg(value_name = "IN")]
    input: PathBuf,
    #[arg(value_name = "OUT")]
    output: PathBuf,
    /// Only the first N frames of the clip, or these, counted from 0, without END, as a clip of its own.
    #[arg(long, value_name = "N or FIRST:END", value_parser = range::parse, conflicts_with_all = ["ss", "t"])]
    frames: Option<(u64, Option<u64>)>,
    /// Write a page for a browser that compares both: a slider, the difference, PSNR per frame, pictures of the plans.
    #[arg(long, value_name = "FILE.html")]
    report: Option<PathBuf>,
    #[command(flatten)]
    model: ModelOptions,
    #[command(flatten)]
    reading: InputOptions,
    #[command(flatten)]
    video: VideoOptions,
}

impl Roundtrip {
    pub fn run(self) -> Result<()> {
        let Roundtrip { input, output, frames, report: page, model, reading, video } = &self;
        reading.check(&[input])?;
        let (mut clip, mut source) = files::open_with_alpha(input, &video.clip, reading)?;
        let video = &video.written(reading.is_raw(input));
        if let Some((first, count)) = *frames {
            (clip, source) = files::cut(clip, source, Part::Frames { first, count });
        }
        let vae = model.open(&model.weights()?)?;
        let channels = vae.model().pixel_channels as usize;
        let (clip, source) = files::fit_channels(clip, source, channels);
        let decoded = Clip { kind: clip.kind.with_channels(vae.model().decoded_channels as usize), ..clip.clone() };
        let (kind, sink) = files::create(output, &decoded, video)?;
        let latent = FrameKind::latent(Dtype::F32, vae.latent_size(kind.width, kind.height));
        let page = page.as_deref().map(Draft::new).transpose()?;
        let report = Arc::new(Mutex::new(Report::new(format!("{} and back", input.display()), clip.first)));
        let (source, sink) = match &page {
            Some(_) => report::watch((clip.kind, source), (kind, sink), &report),
            None => (source, sink),
        };
        let mut limits = [None; 2];
        let mut progress = Progress::new("round trip", clip.expected);
        let read = AtomicU64::new(0);
        // One direction after the other, if both take the clip as a whole.
        let whole = |node, input, frames| whole::plan(&vae, node, input, frames).is_ok_and(|plan| plan.whole);
        let latents = clip.frames.map(|frames| vae.latent_frames(frames));
        let is_whole =
            clip.frames.is_some() && whole("encode", clip.kind, clip.frames) && whole("decode", latent, latents);
        let frames = match clip.frames {
            Some(frames) if is_whole => {
                let nodes = [("encode", latent), ("decode", kind)];
                whole::run(&vae, (source, clip.kind), &nodes, sink, &read, frames)?
            }
            _ => {
                let [encoder, decoder];
                ([encoder, decoder], limits) = open_streams(&vae, model, clip.kind, latent)?;
                let stages = vec![Stage::new(encoder, latent), Stage::new(decoder, kind)];
                let (kind, read, counting, most) = (clip.kind, &read, Counting::Written, u64::MAX);
                Pipeline { source, kind, stages, sink, counting, read, drop_padding: true, most }.run(&mut progress)?
            }
        };
        let seconds = progress.end();
        let what = format!("{} of {}x{}", units::counted(frames, "frame"), kind.width, kind.height);
        super::report(output, &what, frames, seconds, &vae)?;
        super::tell(files::notes(output, &decoded, video));
        let Some(page) = page else { return Ok(()) };
        let mut report = std::mem::replace(&mut *report::locked(&report), Report::new(String::new(), 0));
        report.figure("clip", what);
        report.figure("time", format_args!("{seconds:.1} s, {:.1} frames/s", frames as f64 / seconds));
        report.figure("memory", format_args!("{} at most", units::bytes(vae.memory()?.peak)));
        for ((node, input), limit) in [("encode", clip.kind), ("decode", latent)].into_iter().zip(limits) {
            if let Some(limit) = limit {
                vae.configure("memory_limit", &limit.to_string())?;
            }
            report.plan(whole::timelines(&vae, node, input, is_whole, clip.frames)?)?;
        }
        report.write(page)
    }
}

/// Parts of the limit that the encoder gets, in hundredths; the decoder, which needs more, gets what is left.
const SHARES: [u64; 4] = [35, 45, 25, 60];

/// Both streams are open at once, and a limit holds for each of them, so one that was asked for is shared out. Returns
/// the streams and their limits.
fn open_streams<'a>(
    vae: &'a Vae,
    model: &ModelOptions,
    video: FrameKind,
    latent: FrameKind,
) -> Result<([Stream<'a>; 2], [Option<u64>; 2])> {
    let (video, latent) = (video.shape(0), latent.shape(0));
    let Some(limit) = model.setting("memory_limit").and_then(units::parse_bytes) else {
        return Ok(([vae.stream("encode", video, 0)?, vae.stream("decode", latent, 0)?], [None; 2]));
    };
    let plan = |node, shape, limit: u64| {
        vae.configure("memory_limit", &limit.to_string())?;
        vae.plan(node, shape).map(|(plan, _)| plan)
    };
    let mut best: Option<(bool, [u64; 2])> = None;
    for share in SHARES {
        let part = limit / 100 * share;
        let plans = plan("encode", video, part).and_then(|encoder| {
            let rest = limit - encoder.device_bytes.min(limit);
            plan("decode", latent, rest).map(|decoder| ([encoder, decoder].iter().all(is_untiled), [part, rest]))
        });
        match plans {
            Ok((untiled, parts)) if best.is_none_or(|(known, _)| untiled && !known) => best = Some((untiled, parts)),
            Ok(_) | Err(_) => {}
        }
    }
    let (_, [encoder, decoder]) = best.ok_or_else(|| {
        let limit = units::bytes(limit);
        format!(
            "{limit} are too little for both directions at once; raise --limit, or encode to a file and decode that"
        )
    })?;
    let limits = [encoder, decoder];
    vae.configure("memory_limit", &encoder.to_string())?;
    let encoder = vae.stream("encode", video, 0)?;
    vae.configure("memory_limit", &decoder.to_string())?;
    Ok(([encoder, vae.stream("decode", latent, 0)?], limits.map(Some)))
}
