//! Precisions and settings of one clip: the round trip of each, its distance from the first one's, time and memory.

use std::path::Path;
use std::sync::atomic::AtomicU64;

use serde_json::{Value, json};

use super::table;
use crate::commands::demo::{clip as demo_clip, metrics};
use crate::commands::info;
use crate::draft::Draft;
use crate::files::{self, ClipOptions, InputOptions, Source};
use crate::options::{ModelOptions, key_and_value};
use crate::pipeline::{Counting, Pipeline, Stage};
use crate::progress::Progress;
use crate::report::Report;
use crate::spool::Spool;
use crate::tensor::{Dtype, FrameKind, Frames};
use crate::vae::Vae;
use crate::{Result, interrupt, range, units, whole};

/// The clip of `vvae demo`, in place of a file.
const DEMO: &str = "demo";
const DEMO_SHAPE: [usize; 3] = [17, 256, 256];
/// The most exact first.
const BY_EXACTNESS: [&str; 3] = ["fp32", "fp16", "bf16"];
/// A run that takes this many seconds is not repeated: loading the weights is a small part of it.
const LONG_RUN: f64 = 20.0;

/// Settings to compare.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Variant {
    pub settings: Vec<(String, String)>,
}

impl Variant {
    pub fn precision(name: &str) -> Variant {
        Variant { settings: vec![("precision".into(), name.into())] }
    }

    /// KEY=VALUE,KEY=VALUE,... A piece without a key belongs to the value before it, as in memory_limit=4GiB,6GiB.
    pub fn parse(text: &str) -> Result<Variant> {
        let mut pieces: Vec<String> = Vec::new();
        for piece in text.split(',') {
            match pieces.last_mut() {
                Some(last) if !piece.contains('=') => *last += &format!(",{piece}"),
                _ => pieces.push(piece.to_owned()),
            }
        }
        Ok(Variant { settings: pieces.iter().map(|piece| key_and_value(piece)).collect::<Result<_>>()? })
    }

    /// "fp16 cache=u8"
    pub fn name(&self) -> String {
        let word = |(key, value): &(String, String)| match key.as_str() {
            "precision" => value.clone(),
            _ => format!("{key}={value}"),
        };
        self.settings.iter().map(word).collect::<Vec<_>>().join(" ")
    }

    /// A handle of its own, so that nothing of another variant is left in it.
    pub fn open(&self, model: &ModelOptions, weights: &Path) -> Result<Vae> {
        let vae = model.open(weights)?;
        for (key, value) in &self.settings {
            let set = vae.configure(key, value);
            if key == "precision" && set.is_err() {
                let known = available(&model.open(weights)?)?;
                let device = info::device_name(&model.device)?;
                return Err(format!(
                    "precision {value}: this device ({device}) has {}; name one of them",
                    listed(&known)
                ));
            }
            set?;
        }
        Ok(vae)
    }
}

/// The precisions of the handle's device, the most exact first.
pub fn available(vae: &Vae) -> Result<Vec<&'static str>> {
    let mut known = info::choices("precision")?;
    known.retain(|name| *name != "auto" && vae.configure("precision", name).is_ok());
    known.sort_by_key(|name| BY_EXACTNESS.iter().position(|known| known == name).unwrap_or(BY_EXACTNESS.len()));
    Ok(known)
}

/// "a, b and c"
pub fn listed<T: AsRef<str>>(words: &[T]) -> String {
    let words: Vec<&str> = words.iter().map(AsRef::as_ref).collect();
    match words.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} and {last}", rest.join(", ")),
        _ => words.concat(),
    }
}

/// What to compare with what. The first precision is the one that all others are measured against.
pub fn list(precisions: &[String], variants: &[Variant], model: &ModelOptions, weights: &Path) -> Result<Vec<Variant>> {
    let mut all: Vec<Variant> = precisions.iter().map(|name| Variant::precision(name)).collect();
    if all.is_empty() {
        let known = available(&model.open(weights)?)?;
        let count = if variants.is_empty() { known.len() } else { 1 };
        all.extend(known.iter().take(count).map(|name| Variant::precision(name)));
    }
    all.extend_from_slice(variants);
    Ok(all)
}

/// Keeps the frames of a clip that are to be compared.
pub fn keep(path: &Path, (options, input): (&ClipOptions, &InputOptions), frames: (u64, Option<u64>)) -> Result<Spool> {
    let (kind, source, expected): (_, Box<dyn Source>, _) = if path.as_os_str() == DEMO {
        let [count, height, width] = DEMO_SHAPE;
        let clip = demo_clip::make(FrameKind::pixels(Dtype::U8, width, height), count as u64)?;
        (clip.kind, Box::new(Made { clip, next: 0 }), Some(count as u64))
    } else {
        let (clip, source) = files::open(path, options, input)?;
        (clip.kind, source, clip.expected)
    };
    let (first, count) = frames;
    let left = expected.map(|all| all.saturating_sub(first));
    let mut progress = Progress::new("read", left.map_or(count, |left| Some(left.min(count.unwrap_or(left)))));
    let (mut source, spool) = (range::part(source, first, count), Spool::new(kind)?);
    let (mut sink, mut frame) = (spool.sink()?, kind.buffer()?);
    while source.read(&mut frame)? {
        interrupt::check()?;
        sink.write(&frame)?;
        progress.show(spool.count());
    }
    interrupt::check()?;
    progress.end();
    if spool.count() == 0 {
        let name = path.display();
        return Err(format!("{name} has no frames from frame {first} on; name another clip, or other --frames"));
    }
    // What cannot be compared is said before anything runs.
    kind.rgb(&spool.frame(0)?)?;
    Ok(spool)
}

/// A clip in memory.
struct Made {
    clip: Frames,
    next: usize,
}

impl Source for Made {
    fn read(&mut self, frame: &mut [u8]) -> Result<bool> {
        let more = self.next < self.clip.count();
        if more {
            frame.copy_from_slice(self.clip.frame(self.next));
            self.next += 1;
        }
        Ok(more)
    }
}

/// One direction of a round trip.
struct Pass {
    seconds: f64,
    device_bytes: u64,
    host_bytes: u64,
    exact: bool,
    tiled: bool,
}

/// A round trip.
pub struct Outcome {
    pub name: String,
    settings: Vec<(String, String)>,
    latent: Spool,
    pub video: Spool,
    passes: [Pass; 2],
}

impl Outcome {
    /// Runs as `vvae encode` and `vvae decode` would. The video has 16 bits, so that it is not rounded to equality.
    pub fn run(variant: &Variant, vae: &Vae, clip: &Spool) -> Result<Outcome> {
        let (name, kind) = (variant.name(), clip.kind);
        let latent = Spool::new(FrameKind::latent(Dtype::F32, vae.latent_size(kind.width, kind.height)))?;
        let video = Spool::new(FrameKind::pixels(Dtype::U16, kind.width, kind.height))?;
        let encode = pass(vae, ("encode", &name), clip, &latent, u64::MAX)?;
        let decode = pass(vae, ("decode", &name), &latent, &video, clip.count())?;
        vae.end_trace()?;
        Ok(Outcome { name, settings: variant.settings.clone(), latent, video, passes: [encode, decode] })
    }

    fn device_bytes(&self) -> u64 {
        self.passes.iter().map(|pass| pass.device_bytes).max().unwrap_or(0)
    }

    fn host_bytes(&self) -> u64 {
        self.passes.iter().map(|pass| pass.host_bytes).max().unwrap_or(0)
    }

    fn is_exact(&self) -> bool {
        self.passes.iter().all(|pass| pass.exact)
    }

    pub fn is_tiled(&self) -> bool {
        self.passes.iter().any(|pass| pass.tiled)
    }
}

/// Writes at most `most` frames. The time is that of the work: weights are loaded before, if that would matter.
fn pass(vae: &Vae, (node, name): (&str, &str), input: &Spool, output: &Spool, most: u64) -> Result<Pass> {
    let read = AtomicU64::new(0);
    let seconds = if whole::plan(vae, node, input.kind, Some(input.count()))?.whole {
        let run = || -> Result<f64> {
            let nodes = [(node, output.kind)];
            whole::run(vae, (input.source()?, input.kind), &nodes, output.sink()?, &read, most)?;
            Ok(vae.last_run()?.seconds)
        };
        let first = run()?;
        if first < LONG_RUN { run()? } else { first }
    } else {
        let stages = vec![Stage::new(vae.stream(node, input.kind.shape(0), 0)?, output.kind)];
        let counting = if node == "encode" { Counting::Read } else { Counting::Written };
        let (source, sink, kind) = (input.source()?, output.sink()?, input.kind);
        let mut progress = Progress::new(format!("{name}: {node}"), Some(input.count().min(most)));
        let pipeline = Pipeline { source, kind, stages, sink, counting, read: &read, drop_padding: false, most };
        pipeline.run(&mut progress)?;
        progress.end()
    };
    let last = vae.last_run()?;
    let (exact, tiled) = (last.exact == 1, last.tile_rows * last.tile_columns > 1);
    Ok(Pass { seconds, device_bytes: last.device_bytes, host_bytes: last.host_bytes, exact, tiled })
}

/// How far a variant is from the reference.
pub struct Distance {
    /// Mean squared error and SSIM of each frame.
    frames: Vec<(f64, f64)>,
    latent_error: f64,
}

impl Distance {
    /// The frame with the largest error, and its error.
    pub fn worst(&self) -> (u64, f64) {
        let squares = self.frames.iter().map(|(square, _)| *square).enumerate();
        let worst = squares.fold((0, -1.0), |worst, frame| if frame.1 > worst.1 { frame } else { worst });
        (worst.0 as u64, worst.1)
    }
}

/// What the table says of a variant.
pub struct Figures {
    pub distance: Option<Distance>,
    clip_psnr: f64,
}

/// Measures all round trips, frame by frame. `per_frame` is told of each: frame, variant, error and SSIM.
pub fn measure(
    clip: &Spool,
    outcomes: &[Outcome],
    mut per_frame: impl FnMut(u64, &str, (f64, f64)) -> Result<()>,
) -> Result<Vec<Figures>> {
    let mut frames = vec![Vec::new(); outcomes.len()];
    let mut from_clip = vec![0.0; outcomes.len()];
    let mut progress = Progress::new("compare", Some(clip.count()));
    for index in 0..clip.count() {
        interrupt::check()?;
        let original = clip.kind.rgb(&clip.frame(index)?)?;
        let rgb = |outcome: &Outcome| outcome.video.kind.rgb(&outcome.video.frame(index)?);
        let reference = rgb(&outcomes[0])?;
        from_clip[0] += metrics::mean_square(&original, &reference);
        for (at, outcome) in outcomes.iter().enumerate().skip(1) {
            let decoded = rgb(outcome)?;
            from_clip[at] += metrics::mean_square(&original, &decoded);
            let found = metrics::of_frame(&reference, &decoded, clip.kind.width);
            per_frame(index, &outcome.name, found)?;
            frames[at].push(found);
        }
        progress.show(index + 1);
    }
    progress.end();
    let count = clip.count() as f64;
    let figures = frames.into_iter().zip(from_clip).enumerate().map(|(at, (frames, squares))| {
        let distance = match at {
            0 => None,
            _ => Some(Distance { frames, latent_error: latent_error(&outcomes[0].latent, &outcomes[at].latent)? }),
        };
        Ok(Figures { distance, clip_psnr: metrics::psnr(squares / count) })
    });
    figures.collect()
}

/// The norm of the difference by the norm of the first.
fn latent_error(a: &Spool, b: &Spool) -> Result<f64> {
    let mut sums = [0.0; 2];
    for index in 0..a.count() {
        interrupt::check()?;
        let part = metrics::energies(&a.frame(index)?, &b.frame(index)?);
        sums.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
    }
    Ok((sums[0] / sums[1]).sqrt())
}

const HEADINGS: [&str; 10] = [
    "variant",
    "PSNR dB",
    "SSIM",
    "worst frame",
    "latent error",
    "to the clip dB",
    "encode s",
    "decode s",
    "device memory",
    "host memory",
];

/// The table, as lines. `first`: the number of the clip's first frame.
pub fn lines(outcomes: &[Outcome], figures: &[Figures], first: u64) -> Vec<String> {
    table::lines(&rows(outcomes, figures, first))
}

/// A page about the clip and what the first variant makes of it, with the figures of all.
pub fn page(
    draft: Draft,
    path: &Path,
    clip: &Spool,
    outcomes: &[Outcome],
    figures: &[Figures],
    first: u64,
) -> Result<()> {
    let reference = &outcomes[0];
    let mut report = Report::new(format!("{} and back in {}", path.display(), reference.name), first);
    for index in 0..clip.count() {
        interrupt::check()?;
        let [before, after] = [clip, &reference.video].map(|spool| spool.kind.rgb(&spool.frame(index)?));
        report.frame(clip.kind.width, &before?, &after?)?;
    }
    for row in rows(outcomes, figures, first).iter().skip(1) {
        let cells = HEADINGS.iter().zip(row).skip(1).filter(|(_, cell)| *cell != "-");
        report.figure(&row[0], cells.map(|(heading, cell)| format!("{heading} {cell}")).collect::<Vec<_>>().join(", "));
    }
    report.write(draft)
}

fn rows(outcomes: &[Outcome], figures: &[Figures], first: u64) -> Vec<[String; HEADINGS.len()]> {
    let db = |psnr: f64| if psnr.is_finite() { format!("{psnr:.2}") } else { "equal".into() };
    let mut rows = vec![HEADINGS.map(str::to_owned)];
    for (outcome, figures) in outcomes.iter().zip(figures) {
        let [psnr, ssim, worst, latent] = match &figures.distance {
            None => ["-"; 4].map(str::to_owned),
            Some(distance) => {
                let quality = metrics::mean(&distance.frames);
                let (frame, square) = distance.worst();
                let worst = match square {
                    0.0 => "-".to_owned(),
                    _ => format!("{}: {} dB", first + frame, db(metrics::psnr(square))),
                };
                let latent = match distance.latent_error {
                    0.0 => "0".to_owned(),
                    error => format!("{error:.1e}"),
                };
                [db(quality.psnr), format!("{:.6}", quality.ssim), worst, latent]
            }
        };
        let [encode, decode] = &outcome.passes;
        rows.push([
            outcome.name.clone(),
            psnr,
            ssim,
            worst,
            latent,
            db(figures.clip_psnr),
            format!("{:.3}", encode.seconds),
            format!("{:.3}", decode.seconds),
            units::bytes(outcome.device_bytes()),
            units::bytes(outcome.host_bytes()),
        ]);
    }
    rows
}

/// The figures for a file. A PSNR is null where frames are equal, and where there is nothing to compare with.
pub fn json(clip: &Spool, outcomes: &[Outcome], figures: &[Figures], first: u64) -> Vec<Value> {
    let row = |(outcome, figures): (&Outcome, &Figures)| {
        let settings: serde_json::Map<String, Value> =
            outcome.settings.iter().map(|(key, value)| (key.clone(), json!(value))).collect();
        let distance = figures.distance.as_ref();
        let quality = distance.map(|distance| metrics::mean(&distance.frames));
        let worst = distance.map(Distance::worst).filter(|(_, square)| *square > 0.0);
        json!({
            "variant": outcome.name, "settings": settings, "against": distance.map(|_| &outcomes[0].name),
            "frames": clip.count(), "width": clip.kind.width, "height": clip.kind.height,
            "psnr": quality.as_ref().map(|quality| quality.psnr), "ssim": quality.map(|quality| quality.ssim),
            "worst_frame": worst.map(|(frame, _)| first + frame),
            "worst_psnr": worst.map(|(_, square)| metrics::psnr(square)),
            "latent_error": distance.map(|distance| distance.latent_error), "clip_psnr": figures.clip_psnr,
            "encode_seconds": outcome.passes[0].seconds, "decode_seconds": outcome.passes[1].seconds,
            "device_bytes": outcome.device_bytes(), "host_bytes": outcome.host_bytes(), "exact": outcome.is_exact(),
        })
    };
    outcomes.iter().zip(figures).map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variants_are_settings_with_a_name() {
        let variant = Variant::parse("precision=fp16,memory_limit=4GiB,6GiB,tiles=never").unwrap();
        let settings = [("precision", "fp16"), ("memory_limit", "4GiB,6GiB"), ("tiles", "never")];
        assert_eq!(variant.settings, settings.map(|(key, value)| (key.to_owned(), value.to_owned())));
        assert_eq!(variant.name(), "fp16 memory_limit=4GiB,6GiB tiles=never");
        assert_eq!(Variant::parse("precision=bf16").unwrap(), Variant::precision("bf16"));
        assert!(Variant::parse("fp16").is_err() && Variant::parse("").is_err());
    }

    #[test]
    fn lists_read_as_people_write_them() {
        assert_eq!(listed(&["fp32", "fp16", "bf16"]), "fp32, fp16 and bf16");
        assert_eq!((listed(&["fp32"]), listed::<&str>(&[])), ("fp32".into(), String::new()));
    }
}
