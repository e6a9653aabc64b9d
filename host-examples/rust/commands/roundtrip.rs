//! `vvae roundtrip`: video through the latents and back, to see what the model does to it.

use std::sync::atomic::AtomicU64;

use super::Command;
use crate::args::{Args, Takes};
use crate::files;
use crate::options::{self, VideoOptions};
use crate::pipeline::{Counting, Pipeline, Stage};
use crate::progress::Progress;
use crate::tensor::{Dtype, FrameKind};
use crate::vae::{Stream, Vae};
use crate::{Result, units};

pub const COMMAND: Command = Command {
    name: "roundtrip",
    summary: "video to latents and back to video",
    usage: "IN OUT [OPTIONS]",
    about: "\
Encodes and decodes a clip of any length in one go, at constant memory, with no file between. OUT has the size, length
and rate of IN. --limit holds for both directions together.
",
    help: &[options::MODEL_HELP, options::VIDEO_HELP, files::INPUTS, files::OUTPUTS],
    examples: "  vvae roundtrip holiday.mp4 holiday-through-the-vae.mp4\n  \
               vvae roundtrip photo.png photo-back.png\n  \
               vvae roundtrip clip.y4m back.y4m --limit 6GiB --device cuda:0\n",
    takes: Takes { required: &["IN", "OUT"], optional: &[], valued: &[options::MODEL, options::VIDEO], flags: &[] },
    run,
};

fn run(args: &Args) -> Result<()> {
    let (input, output) = super::two_paths(args);
    let video = VideoOptions::read(args)?;
    let (clip, source) = files::open(input, &video)?;
    let vae = options::open_vae(args)?;
    let (kind, sink) = files::create(output, &clip, &video)?;
    let latent = FrameKind::latent(Dtype::F32, vae.latent_size(kind.width, kind.height));
    let [encoder, decoder] = open_streams(&vae, args, clip.kind, latent)?;
    let stages = vec![Stage::new(encoder, latent), Stage::new(decoder, kind)];
    let mut progress = Progress::new("round trip", clip.expected);
    let read = AtomicU64::new(0);
    let pipeline = Pipeline {
        source,
        kind: clip.kind,
        stages,
        sink,
        counting: Counting::Written,
        read: &read,
        drop_padding: true,
        most: u64::MAX,
    };
    let frames = pipeline.run(&mut progress)?;
    let seconds = progress.end();
    let what = format!("{frames} frames of {}x{}", kind.width, kind.height);
    super::report(output, &what, frames, seconds, &vae)
}

/// Parts of the limit that the encoder gets, in hundredths; the decoder, which needs more, gets what is left.
const SHARES: [u64; 4] = [35, 45, 25, 60];

/// Both streams are open at once, and a limit holds for each of them, so one that was asked for is shared out.
fn open_streams<'a>(vae: &'a Vae, args: &Args, video: FrameKind, latent: FrameKind) -> Result<[Stream<'a>; 2]> {
    let (video, latent) = (video.shape(0), latent.shape(0));
    let asked = options::settings(args)?.into_iter().rev().find(|(key, _)| *key == "memory_limit");
    let Some(limit) = asked.and_then(|(_, value)| units::parse_bytes(value)) else {
        return Ok([vae.stream("encode", video, 0)?, vae.stream("decode", latent, 0)?]);
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
            plan("decode", latent, rest).map(|decoder| (encoder.exact & decoder.exact == 1, [part, rest]))
        });
        match plans {
            Ok((exact, parts)) if best.is_none_or(|(known, _)| exact && !known) => best = Some((exact, parts)),
            Ok(_) | Err(_) => {}
        }
    }
    let (_, [encoder, decoder]) = best.ok_or_else(|| {
        let limit = units::bytes(limit);
        format!(
            "{limit} are too little for both directions at once; raise --limit, or encode to a file and decode that"
        )
    })?;
    vae.configure("memory_limit", &encoder.to_string())?;
    let encoder = vae.stream("encode", video, 0)?;
    vae.configure("memory_limit", &decoder.to_string())?;
    Ok([encoder, vae.stream("decode", latent, 0)?])
}
