//! The input of an area, normalised, as the kernel wants it: [block of 16 channels][row][column][16 channels], zeros
//! around the image. The step from pixel to pixel is then known when the kernel is compiled, and a tap is an offset.

use super::geometry::{Area, Geometry};
use super::kernel::BLOCK;
use super::simd::{Op, Simd, silu};
use crate::backend::Prologue;

/// A frame to make bands of.
#[derive(Clone, Copy)]
pub(super) struct Source<'a> {
    pub frame: *const f32,
    pub height: usize,
    pub width: usize,
    pub channels: usize,
    pub prologue: Prologue,
    /// Mean, scale and shift of each channel, see [`table`].
    pub table: &'a [f32],
    /// Pixels of the frame from one column (row) of the band to the next, and the first.
    pub spread: usize,
    pub phase: (usize, usize),
}

/// The size of a band in pixels.
#[derive(Clone, Copy)]
pub(super) struct Extent {
    pub rows: usize,
    pub columns: usize,
}

impl Extent {
    /// Floats from one block of channels to the next.
    pub fn block(self) -> usize {
        self.rows * self.columns * BLOCK
    }
}

/// Mean, scale and shift of each channel, one after the other, each padded to whole blocks.
pub(super) fn table(into: &mut [f32], statistics: &[f32], gamma: &[f32], beta: &[f32]) {
    let (channels, padded) = (gamma.len(), into.len() / 3);
    let per_group = channels / (statistics.len() / 2);
    into.fill(0.0);
    for c in 0..channels {
        let group = c / per_group;
        into[c] = statistics[2 * group];
        into[padded + c] = gamma[c] * statistics[2 * group + 1];
        into[2 * padded + c] = beta[c];
    }
}

/// Mean, scale and shift of the channels from `channel` on. Of no meaning without a norm.
///
/// # Safety
/// With a norm, the table has these channels; the processor has `S`.
#[inline(always)]
pub(super) unsafe fn factors<S: Simd, const NORM: bool>(table: &[f32], channel: usize) -> [S::V; 3] {
    if !NORM {
        return [S::splat(0.0); 3];
    }
    let (padded, table) = (table.len() / 3, table.as_ptr().wrapping_add(channel));
    // SAFETY: as the caller vouches.
    unsafe { [S::load(table), S::load(table.add(padded)), S::load(table.add(2 * padded))] }
}

#[inline(always)]
pub(super) fn prologue<S: Simd, const NORM: bool, const SILU: bool>(
    value: S::V,
    [mean, scale, shift]: [S::V; 3],
) -> S::V {
    let value = if NORM { S::fma(S::sub(value, mean), scale, shift) } else { value };
    if SILU { silu::<S>(value) } else { value }
}

/// Work on values that go through a prologue, compiled for each one there is.
pub(super) trait Prepare {
    /// # Safety
    /// As [`Op::run`].
    unsafe fn all<S: Simd, const NORM: bool, const SILU: bool>(&self);
}

/// Chooses the prologue here, outside of all loops.
///
/// # Safety
/// As [`Op::run`].
#[inline(always)]
pub(super) unsafe fn prepare<S: Simd>(work: &impl Prepare, prologue: Prologue) {
    // SAFETY: as the caller vouches.
    unsafe {
        match prologue {
            Prologue::None => work.all::<S, false, false>(),
            Prologue::Norm => work.all::<S, true, false>(),
            Prologue::NormSilu => work.all::<S, true, true>(),
        }
    }
}

/// The band that `area` sees through the window of `geometry`.
///
/// # Safety
/// The frame exists, `into` has room for the band, and the processor has `S`.
pub(super) unsafe fn windowed<S: Simd>(source: &Source, geometry: &Geometry, area: Area, into: *mut f32) -> Extent {
    let extent = Extent { rows: geometry.extent(area.height), columns: geometry.extent(area.width) };
    let top = (area.top * geometry.stride) as isize - geometry.before as isize;
    let left = (area.left * geometry.stride) as isize - geometry.before as isize;
    // SAFETY: as the caller vouches.
    unsafe { fill::<S>(source, top, left, extent, into) }
    extent
}

/// # Safety
/// As [`windowed`].
pub(super) unsafe fn fill<S: Simd>(source: &Source, top: isize, left: isize, extent: Extent, into: *mut f32) {
    let blocks = source.channels.div_ceil(BLOCK);
    let (height, width) = (source.height as isize, source.width as isize);
    // Columns of the band that lie in the image.
    let first = (-left).clamp(0, extent.columns as isize) as usize;
    let end = (width - left).clamp(first as isize, extent.columns as isize) as usize;
    for row in 0..extent.rows {
        let y = top + row as isize;
        let inside = (0..height).contains(&y);
        let (first, end) = if inside { (first, end) } else { (extent.columns, extent.columns) };
        // SAFETY: rows and columns are those of the band; those read are inside the image, as `first` and `end` say.
        unsafe {
            let line = into.add(row * extent.columns * BLOCK);
            for block in 0..blocks {
                let line = line.add(block * extent.block());
                line.write_bytes(0, first * BLOCK);
                line.add(end * BLOCK).write_bytes(0, (extent.columns - end) * BLOCK);
            }
            if first < end {
                let (y, x) = (y as usize, (left + first as isize) as usize);
                let pixels = source.width * source.spread;
                let pixel = (y * source.spread + source.phase.0) * pixels + x * source.spread + source.phase.1;
                S::enter(Row {
                    from: source.frame.add(pixel * source.channels),
                    from_step: source.spread * source.channels,
                    pixels: end - first,
                    channels: source.channels,
                    into: line.add(first * BLOCK),
                    block: extent.block(),
                    prologue: source.prologue,
                    table: source.table,
                });
            }
        }
    }
}

/// A run of pixels, normalised and sorted into blocks.
struct Row<'a> {
    from: *const f32,
    from_step: usize,
    pixels: usize,
    channels: usize,
    into: *mut f32,
    block: usize,
    prologue: Prologue,
    table: &'a [f32],
}

impl Op for Row<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: whoever made the row vouches for it.
        unsafe { prepare::<S>(&self, self.prologue) }
    }
}

impl Prepare for Row<'_> {
    #[inline(always)]
    unsafe fn all<S: Simd, const NORM: bool, const SILU: bool>(&self) {
        let whole = self.channels / BLOCK * BLOCK;
        for pixel in 0..self.pixels {
            // SAFETY: inside the run and its channels; the last, partial block goes by way of a whole one.
            unsafe {
                let from = self.from.add(pixel * self.from_step);
                let into = self.into.add(pixel * BLOCK);
                for channel in (0..whole).step_by(BLOCK) {
                    let into = into.add(channel / BLOCK * self.block);
                    self.one::<S, NORM, SILU>(from.add(channel), channel, into);
                }
                if whole < self.channels {
                    let mut rest = [0.0f32; BLOCK];
                    for (channel, value) in (whole..self.channels).zip(&mut rest) {
                        *value = *from.add(channel);
                    }
                    let into = into.add(whole / BLOCK * self.block);
                    self.one::<S, NORM, SILU>(rest.as_ptr(), whole, into);
                }
            }
        }
    }
}

impl Row<'_> {
    /// One block of one pixel.
    ///
    /// # Safety
    /// As [`Op::run`].
    #[inline(always)]
    unsafe fn one<S: Simd, const NORM: bool, const SILU: bool>(
        &self,
        from: *const f32,
        channel: usize,
        into: *mut f32,
    ) {
        for lane in (0..BLOCK).step_by(S::LANES) {
            // SAFETY: the table is padded to whole blocks; `from` and `into` are one block each.
            unsafe {
                let factors = factors::<S, NORM>(self.table, channel + lane);
                S::store(into.add(lane), prologue::<S, NORM, SILU>(S::load(from.add(lane)), factors));
            }
        }
    }
}
