//! Copies between host tensors and activations, and blends tiles into frames.

use std::sync::atomic::{AtomicBool, Ordering};

use half::{bf16, f16};

use super::element::{Element, Number};
use super::memory::{CpuMemory, SharedPointer};
use super::noise;
use crate::backend::Stop;
use crate::error::{Error, Result};
use crate::ir::{BlendTile, ChannelMaps, DType, LoadTensor, StoreTensor, TensorDevice, View, patch_pixel};
use crate::thread_pool::Pool;

/// Rows of a task: enough elements to be worth a task.
fn rows_per_task(elements_per_row: usize) -> usize {
    (32_768 / elements_per_row.max(1)).max(1)
}

/// Runs `row` for each of `rows` rows on all threads.
pub(super) fn each_row(
    pool: &Pool,
    rows: usize,
    elements: usize,
    stop: &mut Stop,
    row: &(dyn Fn(usize) + Sync),
) -> Result<()> {
    let share = rows_per_task(elements);
    pool.run(rows.div_ceil(share), stop, &|task, _, _| (task * share..rows.min((task + 1) * share)).for_each(row))
}

fn check(what: &str, view: &View, batch: u64, frame: u64) -> Result<()> {
    let shape = view.shape();
    if view.device() != TensorDevice::Cpu || batch >= shape.batch || frame >= shape.frames {
        let place = view.device();
        return Err(Error::Internal(format!("{what}: frame {frame} of clip {batch} of a tensor {shape} on {place:?}")));
    }
    Ok(())
}

pub(super) fn load<A: Element>(pool: &Pool, memory: &mut CpuMemory, op: &LoadTensor, stop: &mut Stop) -> Result<()> {
    match op.from.dtype() {
        DType::U8 => load_as::<A, u8>(pool, memory, op, stop),
        DType::U16 => load_as::<A, u16>(pool, memory, op, stop),
        DType::F16 => load_as::<A, f16>(pool, memory, op, stop),
        DType::BF16 => load_as::<A, bf16>(pool, memory, op, stop),
        DType::F32 => load_as::<A, f32>(pool, memory, op, stop),
    }
}

fn load_as<A: Element, N: Number>(pool: &Pool, memory: &mut CpuMemory, op: &LoadTensor, stop: &mut Stop) -> Result<()> {
    check("load", op.from, op.batch, op.frame)?;
    let host = op.from.shape();
    let mapped = op.channels.map_or(1, |maps| maps.side * maps.side) * op.shape.channels / (op.patch * op.patch);
    let missing = |maps: ChannelMaps| mapped > host.channels.min(maps.maps.len() as u64);
    if op.channels.is_some_and(missing) {
        return Err(Error::Internal(format!("load: {} channels from a tensor {host}", op.shape.channels)));
    }
    let into =
        SharedPointer::new(memory.block.region("output of a load", op.into.0, op.shape.elements() * A::BYTES)?);
    let (width, channels) = (op.shape.width as usize, op.shape.channels as usize);
    let given = channels.min(host.channels as usize);
    let [_, by_channel, _, by_row, by_column] = op.from.strides().map(|stride| stride as isize);
    // Columns of the host's image. Those beyond repeat the last.
    let first = op.left.min(host.width - 1);
    let there = (host.width - first).min(op.shape.width) as usize;
    let all_finite = AtomicBool::new(true);
    let done = each_row(pool, op.shape.height as usize, width * channels, stop, &|y| {
        let row = (op.top + y as u64).min(host.height - 1) as isize * by_row + first as isize * by_column;
        let from = op.from.frame(op.batch, op.frame).cast::<N>().wrapping_offset(row).cast_const();
        // SAFETY: coordinates are clamped to the host's image, which the maker of the view guarantees. Rows of the
        // output are inside the region checked above, and each belongs to one task.
        unsafe {
            let into = into.get().cast::<A>().add(y * width * channels);
            if let Some(maps) = op.channels {
                let finite = load_mapped_row::<A, N>(op, maps, y as u64, into);
                all_finite.fetch_and(finite, Ordering::Relaxed);
                return;
            }
            if op.patch > 1 {
                let finite = load_patch_row::<A, N>(op, y as u64, into);
                all_finite.fetch_and(finite, Ordering::Relaxed);
                return;
            }
            let mut finite = true;
            for at in 0..if given < channels { there } else { 0 } {
                (given..channels).for_each(|c| *into.add(at * channels + c) = A::of(1.0));
            }
            for c in 0..given {
                let from = from.offset(c as isize * by_channel);
                for x in 0..there {
                    let value = (*from.offset(x as isize * by_column)).value();
                    finite &= value.is_finite();
                    *into.add(x * channels + c) = A::of(value * op.map.mul + op.map.add);
                }
            }
            let last = into.add((there - 1) * channels).cast_const();
            for x in there..width {
                into.add(x * channels).copy_from_nonoverlapping(last, channels);
            }
            all_finite.fetch_and(finite, Ordering::Relaxed);
        }
    });
    memory.nonfinite.loaded |= !all_finite.into_inner();
    done
}

/// A row of activations whose channels have maps of their own. Whether its values are finite.
///
/// # Safety
/// `into` must have room for a row.
unsafe fn load_mapped_row<A: Element, N: Number>(op: &LoadTensor, maps: ChannelMaps, y: u64, into: *mut A) -> bool {
    let (host, [_, by_channel, _, by_row, by_column]) = (op.from.shape(), op.from.strides());
    let (side, channels) = (maps.side, op.shape.channels);
    let row = (op.top + y).min(host.height * side - 1);
    let mut finite = true;
    for at in 0..op.shape.width * channels {
        let column = (op.left + at / channels).min(host.width * side - 1);
        let channel = (at % channels * side + row % side) * side + column % side;
        let place = channel as i64 * by_channel + (row / side) as i64 * by_row + (column / side) as i64 * by_column;
        let from = op.from.frame(op.batch, op.frame).cast::<N>().wrapping_offset(place as isize);
        // SAFETY: coordinates are clamped to the host's image, which the maker of the view guarantees, and its channels
        // were checked. The rest is the caller's promise.
        unsafe {
            let value = (*from).value();
            finite &= value.is_finite();
            let map = maps.maps[channel as usize];
            *into.add(at as usize) = A::of(value * map.mul + map.add);
        }
    }
    finite
}

/// A row of activations whose pixels are patches of the host's. Whether its values are finite.
///
/// # Safety
/// `into` must have room for a row.
unsafe fn load_patch_row<A: Element, N: Number>(op: &LoadTensor, y: u64, into: *mut A) -> bool {
    let (host, [_, by_channel, _, by_row, by_column]) = (op.from.shape(), op.from.strides());
    let mut finite = true;
    for at in 0..op.shape.width * op.shape.channels {
        let (channel, [row, column]) = patch_pixel(at % op.shape.channels, op.patch);
        if channel >= host.channels {
            // SAFETY: the caller's promise.
            unsafe { *into.add(at as usize) = A::of(1.0) };
            continue;
        }
        let row = ((op.top + y) * op.patch + row).min(host.height - 1);
        let column = ((op.left + at / op.shape.channels) * op.patch + column).min(host.width - 1);
        let place = channel as i64 * by_channel + row as i64 * by_row + column as i64 * by_column;
        let from = op.from.frame(op.batch, op.frame).cast::<N>().wrapping_offset(place as isize);
        // SAFETY: coordinates are clamped to the host's image, which the maker of the view guarantees, and its channels
        // were checked. The rest is the caller's promise.
        unsafe {
            let value = (*from).value();
            finite &= value.is_finite();
            *into.add(at as usize) = A::of(value * op.map.mul + op.map.add);
        }
    }
    finite
}

pub(super) fn store<A: Element>(pool: &Pool, memory: &mut CpuMemory, op: &StoreTensor, stop: &mut Stop) -> Result<()> {
    match op.into.dtype() {
        DType::U8 => store_as::<A, u8>(pool, memory, op, stop),
        DType::U16 => store_as::<A, u16>(pool, memory, op, stop),
        DType::F16 => store_as::<A, f16>(pool, memory, op, stop),
        DType::BF16 => store_as::<A, bf16>(pool, memory, op, stop),
        DType::F32 => store_as::<A, f32>(pool, memory, op, stop),
    }
}

fn store_as<A: Element, N: Number>(
    pool: &Pool,
    memory: &mut CpuMemory,
    op: &StoreTensor,
    stop: &mut Stop,
) -> Result<()> {
    check("store", op.into, op.batch, op.frame)?;
    let host = op.into.shape();
    let side = op.channels.map_or(1, |maps| maps.side);
    // Channels of activations that are stored, and rows and columns of the host's image.
    let channels = host.channels * op.patch * op.patch / (side * side);
    let logvar = op.sample.map_or(0, |sample| sample.logvar_channel + channels);
    let fits = |host: u64, own: u64| host.min(own * op.patch / side);
    let (height, width) = (fits(host.height, op.shape.height), fits(host.width, op.shape.width));
    let (height, width, side, patch) = (height as usize, width as usize, side as usize, op.patch as usize);
    let covers = |fades: &[f32], length: usize| fades.len() >= (length * side).div_ceil(patch);
    let faded = op.divide.is_none_or(|by| covers(by.rows, height) && covers(by.columns, width));
    let mapped = op.channels.is_none_or(|maps| maps.maps.len() as u64 >= host.channels);
    if op.channel + channels > op.shape.channels || logvar > op.shape.channels || !faded || !mapped {
        return Err(Error::Internal(format!("store: {:?} into a tensor {host}, or fades too short", op.shape)));
    }
    let from =
        SharedPointer::new(memory.block.region("input of a store", op.from.0, op.shape.elements() * A::BYTES)?);
    let [_, by_channel, _, by_row, by_column] = op.into.strides().map(|stride| stride as isize);
    let pitch = op.shape.width as usize * op.shape.channels as usize;
    let all_finite = AtomicBool::new(true);
    let done = each_row(pool, height, width * host.channels as usize, stop, &|y| {
        let into = op.into.frame(op.batch, op.frame).cast::<N>().wrapping_offset(y as isize * by_row);
        // SAFETY: rows, columns and channels are inside the region checked above and inside the host's tensor, which
        // the maker of the view guarantees. Its elements do not overlap, so each row belongs to one task.
        unsafe {
            let mut finite = true;
            for channel in 0..host.channels as usize {
                let into = into.offset(channel as isize * by_channel);
                let map = op.channels.map_or(op.map, |maps| maps.maps[channel]);
                // The place in the activations.
                let (c, y) = (channel / (side * side), y * side + channel / side % side);
                let (c, y, row) = (c * patch, y / patch, y % patch);
                let from = from.get().cast::<A>().add(y * pitch).cast_const();
                for host_x in 0..width {
                    let x = host_x * side + channel % side;
                    let (c, x) = (((c + x % patch) * patch + row) as u64, x / patch);
                    let pixel = from.add(x * op.shape.channels as usize);
                    let value = stored_value(op, pixel, c, [y, x]);
                    finite &= value.is_finite();
                    *into.offset(host_x as isize * by_column) = N::of(value * map.mul + map.add);
                }
            }
            all_finite.fetch_and(finite, Ordering::Relaxed);
        }
    });
    memory.nonfinite.stored |= !all_finite.into_inner();
    done
}

/// A value of a pixel at (row, column) as it is stored, before its map.
///
/// # Safety
/// The pixel has all channels of the frame.
#[inline(always)]
unsafe fn stored_value<A: Element>(op: &StoreTensor, pixel: *const A, channel: u64, [y, x]: [usize; 2]) -> f32 {
    /// Bounds of the log-variance in the reference implementation.
    const LOGVAR: (f32, f32) = (-30.0, 20.0);
    /// Lower bound of the fades' sum, which is a divisor.
    const MIN_FADE: f32 = 1e-6;
    let share = op.divide.map_or(1.0, |by| (by.rows[y] * by.columns[x]).max(MIN_FADE));
    // SAFETY: by this function's contract; `store_as` has checked the channels.
    let element = |channel: u64| unsafe { (*pixel.add(channel as usize)).value() / share };
    let mut value = element(op.channel + channel);
    // Not `max` and `min`: they would turn NaN into a bound.
    match op.clamp {
        Some((low, _)) if value < low => value = low,
        Some((_, high)) if value > high => value = high,
        _ => {}
    }
    let Some(sample) = op.sample else { return value };
    let deviation = (0.5 * element(sample.logvar_channel + channel).clamp(LOGVAR.0, LOGVAR.1)).exp();
    let (y, x) = (y as u64, x as u64);
    let at = noise::SamplePosition { batch: op.clip, frame: op.clip_frame, channel, y, x };
    value + deviation * noise::normal(sample.seed, at)
}

pub(super) fn blend<A: Element>(pool: &Pool, memory: &mut CpuMemory, op: &BlendTile, stop: &mut Stop) -> Result<()> {
    let (tile, whole) = (op.from_shape, op.into_shape);
    let inside = op.top + tile.height <= whole.height && op.left + tile.width <= whole.width;
    let faded = op.fades.rows.len() as u64 == tile.height && op.fades.columns.len() as u64 == tile.width;
    if !inside || !faded || tile.channels != whole.channels {
        let (top, left) = (op.top, op.left);
        return Err(Error::Internal(format!(
            "blend: {tile:?} at ({top}, {left}) of {whole:?}, or fades of another size"
        )));
    }
    let from = SharedPointer::new(memory.block.region("input of a blend", op.from.0, tile.elements() * A::BYTES)?);
    let into = SharedPointer::new(memory.block.region("output of a blend", op.into.0, whole.elements() * A::BYTES)?);
    let (channels, top) = (tile.channels as usize, op.top as usize);
    let pitch = whole.width as usize * channels;
    each_row(pool, whole.height as usize, pitch, stop, &|y| {
        // SAFETY: rows are inside the regions checked above, and each belongs to one task.
        unsafe {
            let row = into.get().cast::<A>().add(y * pitch);
            if op.clear {
                row.write_bytes(0, pitch);
            }
            let Some(y) = y.checked_sub(top).filter(|y| *y < tile.height as usize) else { return };
            let from = from.get().cast::<A>().add(y * tile.width as usize * channels).cast_const();
            let row = row.add(op.left as usize * channels);
            for (x, column) in op.fades.columns.iter().enumerate() {
                let weight = op.fades.rows[y] * column;
                for i in x * channels..(x + 1) * channels {
                    *row.add(i) = A::of((*row.add(i)).value() + (*from.add(i)).value() * weight);
                }
            }
        }
    })
}
