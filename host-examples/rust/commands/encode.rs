//! `vvae encode`: video in, latents out.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use super::Command;
use crate::Result;
use crate::args::{Args, Takes};
use crate::files::{self, Sink};
use crate::options::{self, VideoOptions};
use crate::pipeline::{Counting, Pipeline, Stage};
use crate::progress::Progress;
use crate::range;
use crate::tensor::{Dtype, FrameKind};

pub const COMMAND: Command = Command {
    name: "encode",
    summary: "video to latents",
    usage: "IN OUT.safetensors [OPTIONS]",
    about: "\
Encodes a clip of any length, at constant memory. OUT gets the tensor `latent` [T, C, h, w], frames first, because the
length of a stream is known only at its end; in Python, latent.permute(1, 0, 2, 3)[None] is the usual [1, C, T, h, w].
Its metadata keeps width, height, frames and fps of the video, so that `vvae decode` gives back exactly that.
",
    help: &[
        "Options:\n  --dtype f32|f16|bf16  of the stored latents; default: f32\n",
        range::HELP,
        options::MODEL_HELP,
        options::VIDEO_HELP,
        files::INPUTS,
    ],
    examples: "  vvae encode holiday.mp4 holiday.safetensors\n  \
               vvae encode frames/ clip.safetensors --fps 30 --limit 4GiB\n  \
               vvae encode film.mp4 shot.safetensors --frames 250:275\n  \
               vvae encode clip.raw clip.safetensors --size 640x480 --set posterior=sample --set seed=7\n",
    takes: Takes {
        required: &["IN", "OUT.safetensors"],
        optional: &[],
        valued: &[&["dtype"], range::OPTION, options::MODEL, options::VIDEO],
        flags: &[],
    },
    run,
};

fn run(args: &Args) -> Result<()> {
    let (input, output) = super::two_paths(args);
    let video = VideoOptions::read(args)?;
    let dtype = args.choice("dtype", &["f32", "f16", "bf16"])?;
    if files::extension(output) != "safetensors" {
        return Err(format!("{}: latents are written as .safetensors; name it so", output.display()));
    }
    let (mut clip, mut source) = files::open(input, &video)?;
    let vae = options::open_vae(args)?;
    let range = range::read(args, &vae, "encode", clip.frames)?;
    if let Some(range) = &range {
        clip.expected = range.input_count.or(clip.expected.map(|frames| frames.saturating_sub(range.input_first)));
        source = range.of(source);
    }
    let (width, height) = (clip.kind.width, clip.kind.height);
    let kind = FrameKind::latent(Dtype::parse(dtype).unwrap_or(Dtype::F32), vae.latent_size(width, height));
    let mut metadata = vec![
        ("layout", "T,C,h,w".to_owned()),
        ("width", width.to_string()),
        ("height", height.to_string()),
        ("fps", clip.rate.to_string()),
    ];
    // Decode has to undo the scaling, so it is told.
    let scaling = options::settings(args)?.into_iter().rev().find(|(key, _)| *key == "scaling_factor");
    metadata.extend(scaling.map(|(_, value)| ("scaling_factor", value.to_owned())));
    metadata.extend(args.option("frames").map(|frames| ("latent_range", frames.to_owned())));
    let read = Arc::new(AtomicU64::new(0));
    let video_frames = range.is_none().then(|| Arc::clone(&read));
    let sink: Box<dyn Sink> = Box::new(files::tensors::create_latents(output, kind, metadata, video_frames)?);
    let first = range.as_ref().map_or(0, |range| range.first);
    let stages = vec![Stage::new(vae.stream("encode", clip.kind.shape(0), first)?, kind)];
    let mut progress = Progress::new("encode", clip.expected);
    let counting = Counting::Read;
    let pipeline =
        Pipeline { source, kind: clip.kind, stages, sink, counting, read: &read, drop_padding: false, most: u64::MAX };
    let latents = pipeline.run(&mut progress)?;
    range.map_or(Ok(()), |range| range.check(latents))?;
    let (seconds, frames) = (progress.end(), read.load(std::sync::atomic::Ordering::Acquire));
    let (c, h, w) = (kind.channels, kind.height, kind.width);
    let what = format!("{frames} frames of {width}x{height} in {latents} latents of {c}x{h}x{w} {dtype}");
    super::report(output, &what, frames, seconds, &vae)
}
