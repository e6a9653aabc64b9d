//! How a clip is run: a still or short clip as a whole, if that fits, and any other as a stream. Where a stream does
//! not fit, a clip that memory can hold is run as a whole.

use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::Value;

use crate::files::{Sink, Source};
use crate::tensor::{FrameKind, Frames};
use crate::vae::{Vae, is_untiled};
use crate::{Result, picture};

/// Longer clips are streamed, at constant memory.
const MOST_FRAMES: u64 = 17;
/// Bytes of the frames of a clip that is held in memory because no stream fits.
const MOST_BYTES: u64 = 4 << 30;

pub struct Planned {
    pub whole: bool,
    pub text: String,
}

/// `frames` of input, where that is known.
pub fn plan(vae: &Vae, node: &str, input: FrameKind, frames: Option<u64>) -> Result<Planned> {
    let short = frames.filter(|frames| video_frames(vae, node, *frames) <= MOST_FRAMES);
    match short.map(|frames| vae.plan(node, input.shape(frames))) {
        Some(Ok((info, text))) if is_untiled(&info) => Ok(Planned { whole: true, text }),
        _ => {
            let stream = vae.plan(node, input.shape(0)).map(|(_, text)| Planned { whole: false, text });
            stream.or_else(|refused| {
                // Tiles of a clip may run one after the other, those of a stream only side by side.
                let held =
                    frames.filter(|frames| pixel_bytes(vae, node, input, *frames) <= MOST_BYTES).ok_or(refused)?;
                vae.plan(node, input.shape(held)).map(|(_, text)| Planned { whole: true, text })
            })
        }
    }
}

/// What lies in each device's memory over time. That of a stream ends with the clip, if its frames of video are known.
pub fn timelines(vae: &Vae, node: &str, input: FrameKind, is_whole: bool, video: Option<u64>) -> Result<Vec<Value>> {
    let is_encode = node == "encode";
    let inputs = video.map(|frames| if is_encode { frames } else { vae.latent_frames(frames) });
    let shape = input.shape(inputs.filter(|_| is_whole).unwrap_or(0));
    let mut devices = vae.timeline(node, shape)?["devices"].as_array().cloned().unwrap_or_default();
    if let (false, Some(inputs), Some(frames)) = (is_whole, inputs, video) {
        // The plan of a stream knows no length, and so no time.
        let seconds = vae.plan(node, input.shape(inputs)).map(|(info, _)| info.seconds).ok();
        let outputs = if is_encode { vae.latent_frames(frames) } else { frames };
        devices.iter_mut().for_each(|device| picture::end_with_clip(device, frames, outputs, seconds));
    }
    Ok(devices)
}

/// Bytes of the video frames of a clip, at the most that a pixel takes.
fn pixel_bytes(vae: &Vae, node: &str, input: FrameKind, frames: u64) -> u64 {
    let scale = if node == "encode" { 1 } else { u64::from(vae.model().spatial_scale) };
    let pixels = (input.height as u64 * scale).saturating_mul(input.width as u64 * scale);
    let channels = u64::from(vae.model().pixel_channels.max(vae.model().decoded_channels));
    pixels.saturating_mul(channels * 4).saturating_mul(video_frames(vae, node, frames))
}

fn video_frames(vae: &Vae, node: &str, frames: u64) -> u64 {
    if node == "encode" { frames } else { vae.video_frames(frames) }
}

/// Reads all frames, runs the nodes one after the other, and writes `most` frames of what comes out of the last. The
/// number of frames written.
pub fn run(
    vae: &Vae,
    (mut source, input): (Box<dyn Source>, FrameKind),
    nodes: &[(&str, FrameKind)],
    mut sink: Box<dyn Sink>,
    read: &AtomicU64,
    most: u64,
) -> Result<u64> {
    let mut frames = read_all(&mut *source, input)?;
    read.store(frames.count() as u64, Ordering::Release);
    // From video to video, what comes out beyond the frames that went in is padding.
    let most = if nodes.len() > 1 { most.min(frames.count() as u64) } else { most };
    for (node, kind) in nodes {
        let count = frames.count() as u64;
        frames = if *node == "encode" {
            let mut latents = Frames::new(*kind, vae.latent_frames(count))?;
            vae.encode(&frames, &mut latents)?;
            latents
        } else {
            let all = vae.video_frames(count);
            // The last latent stands for up to so many frames, of which fewer may be wanted.
            let least = (all + 1).saturating_sub(u64::from(vae.model().time_scale)).max(1);
            let mut video = Frames::new(*kind, most.clamp(least, all))?;
            vae.decode(&frames, &mut video)?;
            video
        };
    }
    let written = most.min(frames.count() as u64);
    (0..written as usize).try_for_each(|index| sink.write(frames.frame(index)))?;
    sink.finish()?;
    Ok(written)
}

fn read_all(source: &mut dyn Source, kind: FrameKind) -> Result<Frames> {
    let mut frames = Frames::new(kind, 1)?;
    let mut count = 0;
    while source.read(frames.frame_mut(count))? {
        count += 1;
        if count == frames.count() {
            frames = frames.resized(2 * count as u64)?;
        }
    }
    if count == 0 {
        return Err("the input has no frames; name another one".into());
    }
    frames.resized(count as u64)
}
