//! Values that are NaN or infinite: finding them in an input, and telling the host about them.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::settings::OnNonFinite;
use super::{Control, check};
use crate::backend::NonFinite;
use crate::error::{Error, Result};
use crate::ir::{DType, TensorDevice, View};
use crate::model::Direction;
use crate::thread_pool;

/// Refuses an input in host memory of which a value is not finite, if such values are errors.
pub fn refuse(policy: OnNonFinite, input: &View, direction: Direction, first: u64, cancel: &AtomicBool) -> Result<()> {
    if policy != OnNonFinite::Fail || input.device() != TensorDevice::Cpu {
        return Ok(());
    }
    match first_in(input, cancel) {
        Some((clip, frame)) => Err(refused(input, direction, clip, first + frame)),
        None => Ok(()),
    }
}

/// `frame` is counted from the start of the clip.
pub fn refused(input: &View, direction: Direction, clip: u64, frame: u64) -> Error {
    let clip = if input.shape().batch > 1 { format!(" of clip {clip}") } else { String::new() };
    let name = check::input_name(direction);
    Error::Tensor(format!(
        "{name}: frame {frame}{clip} has a value that is NaN or infinite, which nonfinite=error refuses; repair the \
         frame, or set nonfinite to propagate"
    ))
}

/// Reports the non-finite values of a finished call to the host.
pub fn report(seen: NonFinite, policy: OnNonFinite, direction: Direction, control: &Control) -> Result<()> {
    let node = direction.name();
    let what = match seen {
        NonFinite { loaded: true, .. } => format!(
            "{node}: the {} has values that are NaN or infinite; the output frames that depend on them are not finite, \
             and 0 in integers",
            check::input_name(direction)
        ),
        NonFinite { stored: true, .. } => format!(
            "{node}: values became NaN or infinite on the way, so output frames are not finite, and 0 in integers; \
             with precision fp16, try bf16 or fp32"
        ),
        NonFinite { loaded: false, stored: false } => return Ok(()),
    };
    match policy {
        OnNonFinite::Fail => Err(Error::Tensor(what)),
        OnNonFinite::Propagate => {
            control.warn(format_args!("{what}"));
            Ok(())
        }
    }
}

/// Clip and frame of the first value in host memory that is not finite: frames first, then clips.
fn first_in(view: &View, cancel: &AtomicBool) -> Option<(u64, u64)> {
    let shape = view.shape();
    if view.dtype().full_scale().is_some() {
        return None;
    }
    let (axes, total) = (frame_axes(view), shape.batch * shape.frames);
    let (next, first) = (AtomicU64::new(0), AtomicU64::new(u64::MAX));
    let elements = usize::try_from(shape.channels * shape.height * shape.width * total).unwrap_or(usize::MAX);
    let threads = thread_pool::threads_for(elements);
    let search = |(): &mut (), ()| loop {
        let index = next.fetch_add(1, Ordering::Relaxed);
        // Indices rise, so the first one found ends the search for all threads once they are past it.
        if index >= total || index > first.load(Ordering::Relaxed) || cancel.load(Ordering::Relaxed) {
            return;
        }
        let frame = view.frame(index % shape.batch, index / shape.batch);
        // SAFETY: a frame of the view, whose maker vouches for its memory; integers were returned above.
        let finite = unsafe {
            match view.dtype() {
                DType::F32 => is_finite::<u32>(frame.cast(), &axes, 0x7f80_0000),
                DType::BF16 => is_finite::<u16>(frame.cast(), &axes, 0x7f80),
                _ => is_finite::<u16>(frame.cast(), &axes, 0x7c00),
            }
        };
        if !finite {
            first.fetch_min(index, Ordering::Relaxed);
        }
    };
    thread_pool::for_each(threads, vec![(); threads], || (), search);
    let first = first.into_inner();
    (first < total).then(|| (first % shape.batch, first / shape.batch))
}

/// Length and stride of the axes of a frame, the densest first. Axes without a gap between them are one.
fn frame_axes(view: &View) -> [(u64, i64); 3] {
    let (shape, [_, by_channel, _, by_row, by_column]) = (view.shape(), view.strides());
    let mut axes = [(shape.channels, by_channel), (shape.height, by_row), (shape.width, by_column)];
    axes.sort_unstable_by_key(|(length, stride)| (*length > 1, stride.unsigned_abs()));
    let mut merged = [(1, 1); 3];
    let mut last = 0;
    for (length, stride) in axes.into_iter().filter(|(length, _)| *length > 1) {
        let (dense, step) = merged[last];
        match dense {
            1 => merged[last] = (length, stride),
            _ if i64::try_from(dense).is_ok_and(|dense| dense.checked_mul(step) == Some(stride)) => {
                merged[last].0 = dense * length;
            }
            _ => {
                last += 1;
                merged[last] = (length, stride);
            }
        }
    }
    merged
}

/// Whether no element has all bits of `exponent`.
///
/// # Safety
/// The elements of these axes can be read from `start` on.
unsafe fn is_finite<E>(start: *const E, axes: &[(u64, i64); 3], exponent: E) -> bool
where
    E: Copy + PartialEq + std::ops::BitAnd<Output = E>,
{
    let [(columns, step), (rows, by_row), (planes, by_plane)] = *axes;
    (0..planes as isize).all(|plane| {
        (0..rows as isize).all(|row| {
            // SAFETY: by this function's contract.
            unsafe {
                let row = start.offset(plane * by_plane as isize + row * by_row as isize);
                match step {
                    1 => {
                        let row = std::slice::from_raw_parts(row, columns as usize);
                        row.iter().fold(true, |finite, value| finite & (*value & exponent != exponent))
                    }
                    _ => (0..columns as isize).fold(true, |finite, column| {
                        finite & (*row.offset(column * step as isize) & exponent != exponent)
                    }),
                }
            }
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first clip and frame found, of a tensor of [2, 3, 4, 5, 7] with `value` at an index.
    fn found(strides: Option<[i64; 5]>, index: [i64; 5], value: f32) -> Option<(u64, u64)> {
        let mut memory = vec![1.0f32; 4096];
        let at = |strides: [i64; 5]| strides.iter().zip(index).map(|(s, i)| s * i).sum::<i64>() as usize;
        memory[at(strides.unwrap_or([420, 140, 35, 7, 1]))] = value;
        let (data, shape) = (memory.as_mut_ptr().cast(), [2, 3, 4, 5, 7].into());
        let view = View::checked("t", data, DType::F32, TensorDevice::Cpu, shape, strides, false).unwrap();
        first_in(&view, &AtomicBool::new(false))
    }

    #[test]
    fn the_first_value_is_found_in_every_layout() {
        let interleaved = [420, 1, 105, 21, 3];
        let padded = [700, 200, 48, 9, 1];
        for strides in [None, Some(interleaved), Some(padded), Some([0, 0, 35, 7, 1])] {
            for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let clip = u64::from(strides.is_none_or(|strides| strides[0] > 0));
                let last = [clip as i64, if clip > 0 { 2 } else { 0 }, 3, 4, 6];
                assert_eq!(found(strides, last, value), Some((clip, 3)), "{strides:?}");
                assert_eq!(found(strides, [0, 0, 1, 0, 0], value), Some((0, 1)), "{strides:?}");
            }
            assert_eq!(found(strides, [0; 5], f32::MAX), None);
        }
    }
}
