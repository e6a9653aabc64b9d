//! The input of an area after the prologue: [block of 16 channels][row][column][16 channels], zeros around the image.
//! The microkernel then knows the stride of pixels at compile time, and a tap is an offset.

use super::grid::{OutputArea, OutputGrid};
use crate::backend::cpu::norm::{Normalise, normalise, normalise_with, table_vectors};
use crate::backend::cpu::simd::{BLOCK, Simd, SimdOp};
use crate::ir::Prologue;

/// The frame that a band is made of.
#[derive(Clone, Copy)]
pub struct BandSource<'a> {
    pub frame: *const f32,
    pub height: usize,
    pub width: usize,
    pub channels: usize,
    pub prologue: Prologue,
    /// Of the norm; empty without one.
    pub table: &'a [f32],
    /// Pixels of the frame from one column or row of the band to the next.
    pub spread: usize,
    /// Row and column of the first pixel, below `spread`.
    pub phase: (usize, usize),
}

/// The size of a band in pixels.
#[derive(Clone, Copy)]
pub struct BandSize {
    pub rows: usize,
    pub columns: usize,
}

impl BandSize {
    /// Stride of blocks of channels, in floats.
    pub fn block(self) -> usize {
        self.rows * self.columns * BLOCK
    }
}

/// The band that the window of `area` covers.
///
/// # Safety
/// The frame is valid, `into` has room for the band, and the processor has `S`.
pub unsafe fn windowed<S: Simd>(source: &BandSource, grid: &OutputGrid, area: OutputArea, into: *mut f32) -> BandSize {
    let size = BandSize { rows: grid.input_span(area.height), columns: grid.input_span(area.width) };
    let top = (area.top * grid.stride) as isize - grid.before as isize;
    let left = (area.left * grid.stride) as isize - grid.before as isize;
    // SAFETY: by this function's contract.
    unsafe { fill::<S>(source, top, left, size, into) }
    size
}

/// The band of `size` whose first pixel is (`top`, `left`).
///
/// # Safety
/// As [`windowed`].
pub unsafe fn fill<S: Simd>(source: &BandSource, top: isize, left: isize, size: BandSize, into: *mut f32) {
    let blocks = source.channels.div_ceil(BLOCK);
    let (height, width) = (source.height as isize, source.width as isize);
    // Columns of the band inside the image.
    let first = (-left).clamp(0, size.columns as isize) as usize;
    let end = (width - left).clamp(first as isize, size.columns as isize) as usize;
    for row in 0..size.rows {
        let y = top + row as isize;
        let inside = (0..height).contains(&y);
        let (first, end) = if inside { (first, end) } else { (size.columns, size.columns) };
        // SAFETY: writes stay inside the band, reads inside the image: from `first` to `end`.
        unsafe {
            let line = into.add(row * size.columns * BLOCK);
            for block in 0..blocks {
                let line = line.add(block * size.block());
                line.write_bytes(0, first * BLOCK);
                line.add(end * BLOCK).write_bytes(0, (size.columns - end) * BLOCK);
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
                    into: line.add(first * BLOCK),
                    block: size.block(),
                    prologue: source.prologue,
                    table: source.table,
                });
            }
        }
    }
}

/// A run of pixels, normalised and split into blocks.
struct DirectRow<'a> {
    from: *const f32,
    from_step: usize,
    pixels: usize,
    channels: usize,
    into: *mut f32,
    block: usize,
    prologue: Prologue,
    table: &'a [f32],
}

impl SimdOp for DirectRow<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: by this function's contract.
        unsafe { normalise_with::<S>(&self, self.prologue) }
    }
}

impl Normalise for DirectRow<'_> {
    #[inline(always)]
    unsafe fn run_with<S: Simd, const NORM: bool, const SILU: bool>(&self) {
        let whole = self.channels / BLOCK * BLOCK;
        for pixel in 0..self.pixels {
            // SAFETY: inside the run and its channels; a partial last block is padded first.
            unsafe {
                let from = self.from.add(pixel * self.from_step);
                let into = self.into.add(pixel * BLOCK);
                for channel in (0..whole).step_by(BLOCK) {
                    let into = into.add(channel / BLOCK * self.block);
                    self.normalise_block::<S, NORM, SILU>(from.add(channel), channel, into);
                }
                if whole < self.channels {
                    let mut rest = [0.0f32; BLOCK];
                    for (channel, value) in (whole..self.channels).zip(&mut rest) {
                        *value = *from.add(channel);
                    }
                    let into = into.add(whole / BLOCK * self.block);
                    self.normalise_block::<S, NORM, SILU>(rest.as_ptr(), whole, into);
                }
            }
        }
    }
}

impl DirectRow<'_> {
    /// One block of one pixel.
    ///
    /// # Safety
    /// As [`SimdOp::run`].
    #[inline(always)]
    unsafe fn normalise_block<S: Simd, const NORM: bool, const SILU: bool>(
        &self,
        from: *const f32,
        channel: usize,
        into: *mut f32,
    ) {
        for lane in (0..BLOCK).step_by(S::LANES) {
            // SAFETY: the table is padded to whole blocks; `from` and `into` have one block each.
            unsafe {
                let table = table_vectors::<S, NORM>(self.table, channel + lane);
                S::store(into.add(lane), normalise::<S, NORM, SILU>(S::load(from.add(lane)), table));
            }
        }
    }
}
