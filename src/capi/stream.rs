//! Clips in pieces.

use std::ffi::c_char;
use std::time::Instant;

use super::run::{Run, node_and_shape};
use super::table::{self, FinishedRun, OpenStream};
use super::types::*;
use super::{guard, tensor};
use crate::error::{Error, Result};
use crate::exec::{Outputs, Pull};

/// ---- Streams: a clip of any length at constant memory ----
///
/// Push frames as they come, pull results as they get ready. Every call moves as much as it can, from the front of the
/// tensor, and says how much. VVAE_AGAIN means that it is the other side's turn, VVAE_END that all is done. Whatever the
/// sizes of the pieces, the result is the same to the bit as that of the whole clip at once. The drain loop:
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
/// Opens a stream. `node` is "encode" or "decode"; `shape` is that of what goes in, five numbers, of which the number of
/// frames is ignored. The stream keeps the settings the handle has now. [handle]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vvae_stream_open(
    v: *mut vvae,
    node: *const c_char,
    shape: *const i64,
    s: *mut *mut vvae_stream,
) -> i32 {
    guard::exclusive(v, |handle, open| {
        if s.is_null() {
            return Err(Error::Argument("s is null; it must point to where the stream goes".into()));
        }
        // SAFETY: the host vouches for a pointer that is not null.
        unsafe { s.write_unaligned(std::ptr::null_mut()) };
        // SAFETY: the host vouches for the text and for five numbers.
        let (direction, shape) = unsafe { node_and_shape(node, shape, true) }?;
        let stream = open.session.open_stream(direction, shape, &handle.control())?;
        let id = table::insert_stream(handle.clone());
        open.streams.insert(id, OpenStream { direction, stream });
        // SAFETY: as above.
        unsafe { s.write_unaligned(std::ptr::without_provenance_mut(id)) };
        Ok(VVAE_OK)
    })
}

/// Offers frames to a stream: video for encode, latents for decode. `*taken` says how many were taken from the front;
/// VVAE_AGAIN: not all, pull and then push the rest. With `frames` NULL the clip is complete; `taken` may then be NULL.
/// [handle]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vvae_stream_push(s: *mut vvae_stream, frames: *const vvae_tensor, taken: *mut i64) -> i32 {
    guard::on_stream(s, |_, open| {
        // SAFETY: the host vouches for a pointer that is not null.
        unsafe { zero("taken", taken, frames.is_null()) }?;
        if frames.is_null() {
            open.stream.push(None)?;
            return Ok(VVAE_OK);
        }
        // SAFETY: the host vouches for its tensor.
        let frames = unsafe { tensor::view("frames", frames, false) }?;
        let count = open.stream.push(Some(&frames))?;
        // SAFETY: checked by `zero`.
        unsafe { taken.write_unaligned(count as i64) };
        Ok(if count < frames.shape().frames { VVAE_AGAIN } else { VVAE_OK })
    })
}

/// Computes and writes what is ready into `out`, from the front, and says in `*written` how many frames. VVAE_AGAIN:
/// nothing until more is pushed. VVAE_END: nothing any more. After a cancel, what was written counts, and the next
/// pull goes on from there. `run` may be NULL. [handle]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vvae_stream_pull(
    s: *mut vvae_stream,
    out: *const vvae_tensor,
    run: *const vvae_run_info,
    written: *mut i64,
) -> i32 {
    guard::on_stream(s, |handle, open| {
        // SAFETY: the host vouches for a pointer that is not null.
        unsafe { zero("written", written, false) }?;
        // SAFETY: the host vouches for its tensor.
        let out = unsafe { tensor::view("out", out, true) }?;
        // SAFETY: the host vouches for its run info.
        let run = unsafe { Run::read(run, open.direction) }?;
        let mut count = 0;
        let into = Outputs { output: &out, logvar: run.logvar.as_ref(), stream: run.stream() };
        let started = Instant::now();
        let pulled = run.with_control(handle, |control| open.stream.pull(&into, control, &mut count));
        // SAFETY: checked by `zero`.
        unsafe { written.write_unaligned(count as i64) };
        Ok(match pulled? {
            Pull::Written => {
                let (plan, seconds) = (open.stream.plan(), started.elapsed().as_secs_f64());
                *handle.last_run.lock() = Some(FinishedRun { plan, seconds });
                VVAE_OK
            }
            Pull::NeedsInput => VVAE_AGAIN,
            Pull::Ended => VVAE_END,
        })
    })
}

/// Closes a stream and gives back what it holds. NULL does nothing. [handle]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vvae_stream_close(s: *mut vvae_stream) -> i32 {
    if s.is_null() {
        return VVAE_OK;
    }
    guard::close_stream(s)
}

/// A count is 0 until known better, so that a host that looks at it after a failure is not misled.
///
/// # Safety
/// `count` is null or can be written to.
unsafe fn zero(argument: &str, count: *mut i64, optional: bool) -> Result<()> {
    if !count.is_null() {
        // SAFETY: the caller's promise.
        unsafe { count.write_unaligned(0) };
    } else if !optional {
        return Err(Error::Argument(format!("{argument} is null; it must point to where the number of frames goes")));
    }
    Ok(())
}
