//! The input of an area after the prologue: [block of channels][row][column][channel], zeros around the image.
//! The microkernel then knows the stride of pixels at compile time, and a tap is an offset.

use super::grid::{OutputArea, OutputGrid};
use crate::backend::cpu::element::Element;
use crate::backend::cpu::norm::{Normalise, normalise, normalise_with, table_vectors};
use crate::backend::cpu::simd::{Simd, SimdOp};
use crate::ir::Prologue;

/// Channels of the largest block.
const MOST_CHANNELS: usize = 32;

/// The frame that a patch is made of.
#[derive(Clone, Copy)]
pub struct PatchSource<'a, E> {
    pub frame: *const E,
    pub height: usize,
    pub width: usize,
    pub channels: usize,
    pub prologue: Prologue,
    /// Of the norm; empty without one.
    pub table: &'a [f32],
    /// Pixels of the frame from one column or row of the patch to the next.
    pub spread: usize,
    /// Row and column of the first pixel, below `spread`.
    pub phase: (usize, usize),
}

/// The size of a patch in pixels.
#[derive(Clone, Copy)]
pub struct PatchSize {
    pub rows: usize,
    pub columns: usize,
}

impl PatchSize {
    /// Stride of blocks of channels, in elements.
    pub fn block<E: Element>(self) -> usize {
        self.rows * self.columns * E::BLOCK
    }
}

/// The patch that the window of `area` covers.
///
/// # Safety
/// The frame is valid, `into` has room for the patch, and the processor has `S`.
pub unsafe fn windowed<S: Simd, E: Element>(
    source: &PatchSource<E>,
    grid: &OutputGrid,
    area: OutputArea,
    into: *mut E,
) -> PatchSize {
    let size = PatchSize { rows: grid.input_span(area.height), columns: grid.input_span(area.width) };
    let top = (area.top * grid.stride) as isize - grid.before as isize;
    let left = (area.left * grid.stride) as isize - grid.before as isize;
    // SAFETY: by this function's contract.
    unsafe { fill::<S, E>(source, top, left, size, into) }
    size
}

/// The patch of `size` whose first pixel is (`top`, `left`).
///
/// # Safety
/// As [`windowed`].
pub unsafe fn fill<S: Simd, E: Element>(
    source: &PatchSource<E>,
    top: isize,
    left: isize,
    size: PatchSize,
    into: *mut E,
) {
    let blocks = source.channels.div_ceil(E::BLOCK);
    let (height, width) = (source.height as isize, source.width as isize);
    // Columns of the patch inside the image.
    let first = (-left).clamp(0, size.columns as isize) as usize;
    let end = (width - left).clamp(first as isize, size.columns as isize) as usize;
    for row in 0..size.rows {
        let y = top + row as isize;
        let inside = (0..height).contains(&y);
        let (first, end) = if inside { (first, end) } else { (size.columns, size.columns) };
        // SAFETY: writes stay inside the patch, reads inside the image: from `first` to `end`.
        unsafe {
            let line = into.add(row * size.columns * E::BLOCK);
            for block in 0..blocks {
                let line = line.add(block * size.block::<E>());
                line.write_bytes(0, first * E::BLOCK);
                line.add(end * E::BLOCK).write_bytes(0, (size.columns - end) * E::BLOCK);
            }
            if first < end {
                let (y, x) = (y as usize, (left + first as isize) as usize);
                let pixels = source.width * source.spread;
                let pixel = (y * source.spread + source.phase.0) * pixels + x * source.spread + source.phase.1;
                S::enter(DirectRow {
                    from: source.frame.add(pixel * source.channels),
                    from_step: source.spread * source.channels,
                    pixels: end - first,
                    channels: source.channels,
                    into: line.add(first * E::BLOCK),
                    block: size.block::<E>(),
                    prologue: source.prologue,
                    table: source.table,
                });
            }
        }
    }
}

/// A run of pixels, normalised and split into blocks.
struct DirectRow<'a, E> {
    from: *const E,
    from_step: usize,
    pixels: usize,
    channels: usize,
    into: *mut E,
    block: usize,
    prologue: Prologue,
    table: &'a [f32],
}

impl<E: Element> SimdOp for DirectRow<'_, E> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: by this function's contract.
        unsafe { normalise_with::<S>(&self, self.prologue) }
    }
}

impl<E: Element> Normalise for DirectRow<'_, E> {
    #[inline(always)]
    unsafe fn run_with<S: Simd, const NORM: bool, const SILU: bool>(&self) {
        let whole = self.channels / E::BLOCK * E::BLOCK;
        for pixel in 0..self.pixels {
            // SAFETY: inside the run and its channels; a partial last block is padded first.
            unsafe {
                let from = self.from.add(pixel * self.from_step);
                let into = self.into.add(pixel * E::BLOCK);
                for channel in (0..whole).step_by(E::BLOCK) {
                    let into = into.add(channel / E::BLOCK * self.block);
                    self.normalise_block::<S, NORM, SILU>(from.add(channel), channel, into);
                }
                if whole < self.channels {
                    let mut rest = [E::of(0.0); MOST_CHANNELS];
                    for (channel, value) in (whole..self.channels).zip(&mut rest) {
                        *value = *from.add(channel);
                    }
                    let into = into.add(whole / E::BLOCK * self.block);
                    self.normalise_block::<S, NORM, SILU>(rest.as_ptr(), whole, into);
                }
            }
        }
    }
}

impl<E: Element> DirectRow<'_, E> {
    /// One block of one pixel.
    ///
    /// # Safety
    /// As [`SimdOp::run`].
    #[inline(always)]
    unsafe fn normalise_block<S: Simd, const NORM: bool, const SILU: bool>(
        &self,
        from: *const E,
        channel: usize,
        into: *mut E,
    ) {
        for lane in (0..E::BLOCK).step_by(S::LANES) {
            // SAFETY: the table is padded to whole blocks; `from` and `into` have one block each.
            unsafe {
                let table = table_vectors::<S, NORM>(self.table, channel + lane);
                E::store::<S>(into.add(lane), normalise::<S, E, NORM, SILU>(E::load::<S>(from.add(lane)), table));
            }
        }
    }
}
