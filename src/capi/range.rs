//! Ranges: some frames of a clip. This file becomes a part of the header.

use std::ffi::c_char;

use super::number::{check_place, unsigned};
use super::run::{Words, plan_call, run_call};
use super::types::*;
use super::{guard, text};
use crate::error::Result;
use crate::exec::{ClipRange, range_inputs};
use crate::model::Direction;
use crate::node;

/// ---- Ranges: some frames of a clip, with the bits of the whole clip ----
///
/// Frames of a range count the output: video frames for decode, latent frames for encode. Convolutions look back a
/// bounded number of frames, so a range needs its own input and some frames before it. Every layer computes only the
/// frames that the range depends on.
///
///     vvae_range_inputs(v, "decode", latent_frames, 1000, 100, &first, &count);
///     // latent: frames first to first + count - 1 of the clip; video: 100 frames
///     vvae_decode_range(v, &latent, latent_frames, 1000, &video, NULL);
///
/// Says which input frames a range needs: `*input_count` frames from `*input_first` on. `node` is "encode" or "decode",
/// `clip_frames` the number of input frames of the whole clip. The range is `count` output frames from `first` on.
/// With `count` 0 the range has no end, as in a stream: the input goes on to the end of the clip. [any-thread]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vvae_range_inputs(
    v: *mut vvae,
    node: *const c_char,
    clip_frames: i64,
    first: i64,
    count: i64,
    input_first: *mut i64,
    input_count: *mut i64,
) -> i32 {
    guard::intact(v, |handle| {
        // SAFETY: the host vouches for the text.
        let direction = node::find(unsafe { text::read("node", node) }?)?.direction;
        for (argument, to) in [("input_first", input_first), ("input_count", input_count)] {
            check_place(argument, to, "the number")?;
        }
        let range = range(clip_frames, first, Some(count).filter(|count| *count != 0))?;
        let inputs = range_inputs(&handle.model, direction, range)?;
        // SAFETY: the host vouches for pointers that are not null.
        unsafe {
            input_first.write_unaligned(inputs.start as i64);
            input_count.write_unaligned((inputs.end - inputs.start) as i64);
        }
        Ok(VVAE_OK)
    })
}

/// Video to latent, for a range of latent frames. `video` has the frames that vvae_range_inputs says, of a clip of
/// `clip_frames` video frames. `latent` gets as many latent frames as it has room for, from `first` on. `run` may be
/// NULL. [handle]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vvae_encode_range(
    v: *mut vvae,
    video: *const vvae_tensor,
    clip_frames: i64,
    first: i64,
    latent: *const vvae_tensor,
    run: *const vvae_run_info,
) -> i32 {
    let range = |count: u64| range(clip_frames, first, Some(count as i64));
    // SAFETY: the host vouches for its tensors and its run info.
    unsafe { run_call(v, Direction::Encode, ("video", video), ("latent", latent), Some(&range), run) }
}

/// Latent to video, for a range of video frames. `latent` has the frames that vvae_range_inputs says, of a clip of
/// `clip_frames` latent frames. `video` gets as many frames as it has room for, from `first` on. `run` may be NULL.
/// [handle]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vvae_decode_range(
    v: *mut vvae,
    latent: *const vvae_tensor,
    clip_frames: i64,
    first: i64,
    video: *const vvae_tensor,
    run: *const vvae_run_info,
) -> i32 {
    let range = |count: u64| range(clip_frames, first, Some(count as i64));
    // SAFETY: the host vouches for its tensors and its run info.
    unsafe { run_call(v, Direction::Decode, ("latent", latent), ("video", video), Some(&range), run) }
}

/// Plans a range under the present settings: vvae_plan for `count` output frames from `first` on. `shape` is that of
/// the whole clip's input, five numbers. input_shape of `out` is that of the input which the range needs. [handle]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vvae_plan_range(
    v: *mut vvae,
    node: *const c_char,
    shape: *const i64,
    first: i64,
    count: i64,
    out: *mut vvae_plan_info,
    text: *mut c_char,
    capacity: u64,
) -> i32 {
    let range = |frames: u64| range(frames as i64, first, Some(count));
    // SAFETY: the host vouches for its texts, numbers and struct.
    unsafe { plan_call(v, node, shape, Some(&range), out, Words { text, capacity }) }
}

/// A range in the host's numbers; no `count`: without an end.
fn range(clip_frames: i64, first: i64, count: Option<i64>) -> Result<ClipRange> {
    let count = count.map(|count| unsigned("count", count)).transpose()?;
    Ok(ClipRange { clip_frames: unsigned("clip_frames", clip_frames)?, first: unsigned("first", first)?, count })
}
