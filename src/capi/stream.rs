//! Streams: clips in pieces. This file becomes a part of the header.

use std::ffi::c_char;
use std::time::Instant;

use super::number::{check_place, unsigned};
use super::run::{CallArgs, node_and_shape};
use super::table;
use super::types::*;
use super::{guard, tensor};
use crate::error::Result;
use crate::exec::{Extent, JobShape, Pull};

/// ---- Streams: a clip of any length at constant memory ----
///
/// Push input frames, pull results. Every call moves as many frames as it can, from the front of the tensor, and
/// returns how many. VVAE_AGAIN means: call the other function. VVAE_END means: all frames have been pulled. The result
/// is bit-identical to that of the whole clip at once, whatever the sizes of the pieces. The drain loop:
///
///     do {
///         if (have_frames) {
///             status = vvae_stream_push(s, &frames, &taken);
///             drop_from_front(&frames, taken);
///         } else {
///             status = vvae_stream_push(s, NULL, NULL);  // the clip is complete
///         }
///         while (status >= 0 && (status = vvae_stream_pull(s, &room, NULL, &written)) == VVAE_OK)
///             use(&room, written);
///     } while (status == VVAE_AGAIN);
///     // VVAE_END, or a failure
///
/// Opens a stream. `node` is "encode" or "decode". `shape` is that of the input, five numbers; the number of frames is
/// ignored. The stream keeps the present settings of the handle. [handle]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vvae_stream_open(
    v: *mut vvae,
    node: *const c_char,
    shape: *const i64,
    s: *mut *mut vvae_stream,
) -> i32 {
    // SAFETY: the host vouches for its pointers.
    unsafe { open_at(v, node, shape, 0, s) }
}

/// Opens a stream in the middle of a clip: its output begins with frame `first`, its input with the frame that
/// vvae_range_inputs says for a `count` of 0. A clip that ends before `first` gives no frames. Otherwise as
/// vvae_stream_open. [handle]
///
/// This is how a stream is resumed, in this process or another: `first` is the number of frames that were pulled. With
/// the same checkpoint, device and parameters the bits are those of a stream that was not interrupted. The host keeps
/// its input from the frame on that vvae_range_inputs says; `clip_frames` may be any clip that has frame `first`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vvae_stream_open_at(
    v: *mut vvae,
    node: *const c_char,
    shape: *const i64,
    first: i64,
    s: *mut *mut vvae_stream,
) -> i32 {
    // SAFETY: the host vouches for its pointers.
    unsafe { open_at(v, node, shape, first, s) }
}

/// Writes a new stream to `s`; NULL if there is none.
///
/// # Safety
/// The pointers are as the header asks.
unsafe fn open_at(v: *mut vvae, node: *const c_char, shape: *const i64, first: i64, s: *mut *mut vvae_stream) -> i32 {
    guard::exclusive(v, |handle, open| {
        check_place("s", s, "the stream")?;
        // SAFETY: the caller's promise.
        unsafe { s.write_unaligned(std::ptr::null_mut()) };
        // SAFETY: the caller's promise.
        let (direction, input) = unsafe { node_and_shape(node, shape, true) }?;
        let job = JobShape { direction, input, extent: Extent::Stream { first: unsigned("first", first)? } };
        let stream = open.model.open_stream(&job, &handle.control())?;
        let id = table::insert_stream(handle.clone());
        open.streams.insert(id, stream);
        // SAFETY: as above.
        unsafe { s.write_unaligned(std::ptr::without_provenance_mut(id)) };
        Ok(VVAE_OK)
    })
}

/// Pushes input frames: video for encode, latents for decode. `*taken` is the number of frames taken from the front.
/// VVAE_AGAIN: not all were taken; pull, then push the rest. `frames` NULL ends the clip; `taken` may then be NULL.
/// [handle]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vvae_stream_push(s: *mut vvae_stream, frames: *const vvae_tensor, taken: *mut i64) -> i32 {
    guard::on_stream(s, |_, stream| {
        // SAFETY: the host vouches for a pointer that is not null.
        unsafe { zero("taken", taken, frames.is_null()) }?;
        if frames.is_null() {
            stream.push(None)?;
            return Ok(VVAE_OK);
        }
        // SAFETY: the host vouches for its tensor.
        let frames = unsafe { tensor::view("frames", frames, false) }?;
        let count = stream.push(Some(&frames))?;
        // SAFETY: checked by `zero`.
        unsafe { taken.write_unaligned(count as i64) };
        Ok(if count < frames.shape().frames { VVAE_AGAIN } else { VVAE_OK })
    })
}

/// Computes output frames and writes them to `out`, from the front. `*written` is their number. VVAE_AGAIN: push more
/// first. VVAE_END: all frames have been pulled. After a cancel the frames in `*written` are valid, and the next pull
/// continues after them. With nonfinite=error the first pull after a value that is NaN or infinite fails, and ends the
/// stream; its frames in `*written` have been written. `run` may be NULL. [handle]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vvae_stream_pull(
    s: *mut vvae_stream,
    out: *const vvae_tensor,
    run: *const vvae_run_info,
    written: *mut i64,
) -> i32 {
    guard::on_stream(s, |handle, stream| {
        // SAFETY: the host vouches for a pointer that is not null.
        unsafe { zero("written", written, false) }?;
        // SAFETY: the host vouches for its tensor.
        let out = unsafe { tensor::view("out", out, true) }?;
        // SAFETY: the host vouches for its run info.
        let run = unsafe { CallArgs::read(run) }?;
        let mut count = 0;
        let into = run.outputs(out);
        let started = Instant::now();
        let pulled = run.with_control(handle, |control| stream.pull(&into, control, &mut count));
        // SAFETY: checked by `zero`.
        unsafe { written.write_unaligned(count as i64) };
        Ok(match pulled? {
            Pull::Written => {
                handle.finished(stream.plan(), started.elapsed().as_secs_f64());
                VVAE_OK
            }
            Pull::NeedsInput => VVAE_AGAIN,
            Pull::Ended => VVAE_END,
        })
    })
}

/// Closes a stream and frees its memory. NULL does nothing. [handle]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vvae_stream_close(s: *mut vvae_stream) -> i32 {
    if s.is_null() {
        return VVAE_OK;
    }
    guard::close_stream(s)
}

/// Sets a count to 0, which is right if the call fails.
///
/// # Safety
/// `count` is null or can be written to.
unsafe fn zero(argument: &str, count: *mut i64, optional: bool) -> Result<()> {
    if count.is_null() && optional {
        return Ok(());
    }
    check_place(argument, count, "the number of frames")?;
    // SAFETY: the caller's promise.
    unsafe { count.write_unaligned(0) };
    Ok(())
}
