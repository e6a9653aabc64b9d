//! The input of an area after the prologue: [block of channels][row][column][channel], zeros around the image.
//! The microkernel then knows the stride of pixels at compile time, and a tap is an offset.

use super::grid::{OutputArea, OutputGrid};
use super::square::Square;
use crate::backend::cpu::element::Element;
use crate::backend::cpu::norm::{Normalise, normalise, normalise_with, reciprocal_lengths, table_vectors};
use crate::backend::cpu::simd::{Simd, SimdOp};
use crate::ir::{Norm, Prologue};

/// Channels of the largest block.
const MOST_CHANNELS: usize = 32;
/// Pixels of a frame whose lengths are known at a time.
const MOST_LENGTHS: usize = 64;

/// The frame that a patch is made of.
#[derive(Clone, Copy)]
pub struct PatchSource<'a, E> {
    pub frame: *const E,
    pub height: usize,
    pub width: usize,
    pub channels: usize,
    pub prologue: Prologue,
    pub norm: Norm,
    /// Of the norm; empty without one.
    pub table: &'a [f32],
    /// Pixels of the frame from one column or row of the patch to the next.
    pub spread: usize,
    /// Row and column of the first pixel, below `spread`.
    pub phase: (usize, usize),
}

impl<E> PatchSource<'_, E> {
    /// Elements of the frame from one row of the patch to the next.
    fn row_stride(&self) -> usize {
        self.spread * self.width * self.spread * self.channels
    }

    /// Whether pixels are divided by their length before the table is applied.
    fn by_length(&self) -> bool {
        self.norm == Norm::Pixel && self.prologue != Prologue::None
    }
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

    /// Rows and columns of squares whose windows the patch covers.
    pub fn squares(self, square: Square) -> (usize, usize) {
        ((self.rows - 2) / square.side(), (self.columns - 2) / square.side())
    }
}

/// A patch that is prepared.
#[derive(Clone, Copy)]
pub struct PreparedPatch<E> {
    pub at: *const E,
    pub size: PatchSize,
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

/// The patches of a pair of frames, of the input frames d0 to d3, those that are there: d0 - d2, d1 + d2, d2 - d1 and
/// d1 - d3. See [`PairSlabs`](crate::ir::PairSlabs).
///
/// # Safety
/// As [`windowed`]. The second and third source are there, and frames and prologues of all are alike. The patches of
/// [`KeptInputs`] are of the same area, and apart from `into`.
pub unsafe fn windowed_pair<S: Simd, E: Element>(
    sources: &[Option<PatchSource<E>>; 4],
    grid: &OutputGrid,
    area: OutputArea,
    kept: KeptInputs<E>,
    into: [*mut E; 4],
) -> PatchSize {
    let size = PatchSize { rows: grid.input_span(area.height), columns: grid.input_span(area.width) };
    let (top, left) = (area.top as isize - grid.before as isize, area.left as isize - grid.before as isize);
    let Some(shared) = &sources[1] else { return size };
    let present = sources.each_ref().map(Option::is_some);
    for line in lines(shared, top, left, size) {
        // SAFETY: as in `fill`.
        unsafe {
            let row = line.row * size.columns * E::BLOCK;
            for (into, _) in into.iter().zip(present).filter(|(_, present)| *present) {
                line.clear(into.add(row), shared.channels, size);
            }
            let most = if shared.by_length() { MOST_LENGTHS } else { size.columns };
            for first in (line.first..line.end).step_by(most) {
                let (at, before) = (row + first * E::BLOCK, (first - line.first) * shared.channels);
                let start = |source: &PatchSource<E>| line.start(source).add(before);
                S::enter(PairRow {
                    from: sources.each_ref().map(|source| source.as_ref().map(start)),
                    pixels: most.min(line.end - first),
                    channels: shared.channels,
                    by_length: shared.by_length(),
                    kept: KeptInputs {
                        from: kept.from.map(|from| from.map(|from| from.add(at))),
                        into: kept.into.map(|into| into.map(|into| into.add(at))),
                    },
                    into: into.map(|into| into.add(at)),
                    block: size.block::<E>(),
                    prologue: shared.prologue,
                    row_stride: shared.row_stride(),
                    tables: sources.each_ref().map(|source| source.as_ref().map_or(&[][..], |source| source.table)),
                });
            }
        }
    }
    size
}

/// Normalised input frames of a pair in patches without borders, so that each is normalised once.
#[derive(Clone, Copy)]
pub struct KeptInputs<E> {
    /// Patches that have d0 and d1.
    pub from: [Option<*const E>; 2],
    /// Patches that are to have d2 and d3, which are the next pair's d0 and d1. They may be those of `from`.
    pub into: [Option<*mut E>; 2],
}

impl<E> KeptInputs<E> {
    pub const NONE: KeptInputs<E> = KeptInputs { from: [None; 2], into: [None; 2] };
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
    for line in lines(source, top, left, size) {
        // SAFETY: writes stay inside the patch, reads inside the image: from `first` to `end`.
        unsafe {
            let into = into.add(line.row * size.columns * E::BLOCK);
            line.clear(into, source.channels, size);
            if line.first < line.end {
                S::enter(DirectRow {
                    from: line.start(source),
                    from_step: source.spread * source.channels,
                    pixels: line.end - line.first,
                    channels: source.channels,
                    into: into.add(line.first * E::BLOCK),
                    block: size.block::<E>(),
                    prologue: source.prologue,
                    by_length: source.by_length(),
                    table: source.table,
                    row_stride: source.row_stride(),
                });
            }
        }
    }
}

/// A row of a patch. Its columns from `first` to `end` are inside the image.
struct PatchLine {
    row: usize,
    first: usize,
    end: usize,
    /// The pixel of the image in column `first`.
    pixel: (usize, usize),
}

/// The rows of the patch of `size` whose first pixel is (`top`, `left`).
fn lines<E>(source: &PatchSource<E>, top: isize, left: isize, size: PatchSize) -> impl Iterator<Item = PatchLine> {
    let (height, width) = (source.height as isize, source.width as isize);
    let first = (-left).clamp(0, size.columns as isize) as usize;
    let end = (width - left).clamp(first as isize, size.columns as isize) as usize;
    (0..size.rows).map(move |row| {
        let y = top + row as isize;
        let (first, end) = if (0..height).contains(&y) { (first, end) } else { (size.columns, size.columns) };
        PatchLine { row, first, end, pixel: (y.max(0) as usize, (left + first as isize).max(0) as usize) }
    })
}

impl PatchLine {
    /// Zeros the columns outside the image.
    ///
    /// # Safety
    /// `into` is this row of a patch of `size`.
    unsafe fn clear<E: Element>(&self, into: *mut E, channels: usize, size: PatchSize) {
        for block in 0..channels.div_ceil(E::BLOCK) {
            // SAFETY: by this function's contract.
            unsafe {
                let into = into.add(block * size.block::<E>());
                into.write_bytes(0, self.first * E::BLOCK);
                into.add(self.end * E::BLOCK).write_bytes(0, (size.columns - self.end) * E::BLOCK);
            }
        }
    }

    /// Where the columns inside the image begin.
    ///
    /// # Safety
    /// The row has such columns, and the frame is valid.
    unsafe fn start<E>(&self, source: &PatchSource<E>) -> *const E {
        let ((y, x), pixels) = (self.pixel, source.width * source.spread);
        let pixel = (y * source.spread + source.phase.0) * pixels + x * source.spread + source.phase.1;
        // SAFETY: by this function's contract.
        unsafe { source.frame.add(pixel * source.channels) }
    }
}

/// A run of pixels of a pair's input frames d0 to d3, normalised and combined: see [`windowed_pair`].
struct PairRow<'a, E> {
    from: [Option<*const E>; 4],
    pixels: usize,
    channels: usize,
    /// Whether pixels are divided by their length. There are [`MOST_LENGTHS`] at most then.
    by_length: bool,
    kept: KeptInputs<E>,
    into: [*mut E; 4],
    block: usize,
    prologue: Prologue,
    tables: [&'a [f32]; 4],
    /// The next row is prefetched: the processor foresees the pixels of a row, but not where the next one begins.
    row_stride: usize,
}

impl<E: Element> SimdOp for PairRow<'_, E> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: by this function's contract.
        unsafe { normalise_with::<S>(&self, self.prologue) }
    }
}

impl<E: Element> Normalise for PairRow<'_, E> {
    #[inline(always)]
    unsafe fn run_with<S: Simd, const NORM: bool, const SILU: bool>(&self) {
        // SAFETY: by this function's contract.
        unsafe {
            match (self.from[0].is_some(), self.from[3].is_some()) {
                (true, true) => self.combine::<S, NORM, SILU, true, true>(),
                (true, false) => self.combine::<S, NORM, SILU, true, false>(),
                _ => self.combine::<S, NORM, SILU, false, true>(),
            }
        }
    }
}

impl<E: Element> PairRow<'_, E> {
    /// `FIRST` and `SECOND`: which frames of the pair are computed.
    ///
    /// # Safety
    /// As [`SimdOp::run`].
    #[inline(always)]
    unsafe fn combine<S: Simd, const NORM: bool, const SILU: bool, const FIRST: bool, const SECOND: bool>(&self) {
        let ([kept0, kept1], [keep2, keep3]) = (self.kept.from, self.kept.into);
        let [into0, into1, into2, into3] = self.into;
        // Those that are kept have been normalised.
        let fresh = [FIRST && kept0.is_none(), kept1.is_none(), true, SECOND];
        // SAFETY: pixels of the run.
        let factors = unsafe { self.factors::<S>(fresh) };
        for channel in (0..self.channels.next_multiple_of(E::BLOCK)).step_by(S::LANES) {
            // SAFETY: pixels of the run and their channels; the tables are padded to whole blocks.
            unsafe {
                let d0 = self.channels_of::<S, NORM>(if FIRST { 0 } else { 1 }, channel, &factors);
                let d1 = self.channels_of::<S, NORM>(1, channel, &factors);
                let d2 = self.channels_of::<S, NORM>(2, channel, &factors);
                let d3 = self.channels_of::<S, NORM>(if SECOND { 3 } else { 2 }, channel, &factors);
                // Where the vector is in the patches.
                let mut at = channel / E::BLOCK * self.block + channel % E::BLOCK;
                for pixel in 0..self.pixels {
                    // All are read before any is kept: the patches may be the same.
                    let value0 = match kept0 {
                        _ if !FIRST => S::splat(0.0),
                        Some(kept) => E::load::<S>(kept.wrapping_add(at)),
                        None => d0.value::<SILU>(pixel),
                    };
                    let value1 = match kept1 {
                        Some(kept) => E::load::<S>(kept.wrapping_add(at)),
                        None => d1.value::<SILU>(pixel),
                    };
                    let value2 = d2.value::<SILU>(pixel);
                    E::store::<S>(into1.wrapping_add(at), S::add(value1, value2));
                    E::store::<S>(into2.wrapping_add(at), S::sub(value2, value1));
                    if let Some(keep) = keep2 {
                        E::store::<S>(keep.wrapping_add(at), value2);
                    }
                    if FIRST {
                        E::store::<S>(into0.wrapping_add(at), S::sub(value0, value2));
                    }
                    if SECOND {
                        let value3 = d3.value::<SILU>(pixel);
                        E::store::<S>(into3.wrapping_add(at), S::sub(value1, value3));
                        if let Some(keep) = keep3 {
                            E::store::<S>(keep.wrapping_add(at), value3);
                        }
                    }
                    at = at.wrapping_add(E::BLOCK);
                }
            }
        }
    }

    /// Of each `fresh` frame, the factors that bring its pixels to length 1, if they are divided by their length.
    ///
    /// # Safety
    /// As [`SimdOp::run`].
    #[inline(always)]
    unsafe fn factors<S: Simd>(&self, fresh: [bool; 4]) -> [[f32; MOST_LENGTHS]; 4] {
        let mut factors = [[1.0; MOST_LENGTHS]; 4];
        let frames = self.from.iter().zip(fresh).zip(&mut factors);
        for ((from, _), factors) in frames.filter(|((_, fresh), _)| *fresh && self.by_length) {
            let Some(from) = from else { continue };
            // SAFETY: by this function's contract.
            unsafe { reciprocal_lengths::<S, E>(*from, self.channels, self.channels, &mut factors[..self.pixels]) };
        }
        factors
    }

    /// A vector of channels of frame `i`.
    ///
    /// # Safety
    /// The frame is there, and as [`SimdOp::run`].
    #[inline(always)]
    unsafe fn channels_of<'a, S: Simd, const NORM: bool>(
        &self,
        i: usize,
        channel: usize,
        factors: &'a [[f32; MOST_LENGTHS]; 4],
    ) -> FrameChannels<'a, S, E, NORM> {
        let from = self.from[i].unwrap_or(std::ptr::null()).wrapping_add(channel);
        // SAFETY: by this function's contract.
        let table = unsafe { table_vectors::<S, NORM>(self.tables[i], channel) };
        let ahead = if channel.is_multiple_of(E::BLOCK) { self.row_stride } else { 0 };
        let factors = self.by_length.then_some(&factors[i]);
        let (step, there) = (self.channels, self.channels.saturating_sub(channel));
        FrameChannels { from, step, there, factors, table, ahead }
    }
}

/// A vector of channels of all pixels of a run.
struct FrameChannels<'a, S: Simd, E, const NORM: bool> {
    from: *const E,
    /// Stride of pixels.
    step: usize,
    /// Channels that the frame has from there on.
    there: usize,
    /// What each pixel is multiplied by before the table is applied.
    factors: Option<&'a [f32; MOST_LENGTHS]>,
    table: [S::V; 3],
    /// From there to what is prefetched; 0 where no cache line begins.
    ahead: usize,
}

impl<S: Simd, E: Element, const NORM: bool> FrameChannels<'_, S, E, NORM> {
    /// The vector of one pixel after the prologue, rounded.
    ///
    /// # Safety
    /// The run has the pixel.
    #[inline(always)]
    unsafe fn value<const SILU: bool>(&self, pixel: usize) -> S::V {
        let from = self.from.wrapping_add(pixel.wrapping_mul(self.step));
        S::prefetch_later(from.wrapping_add(self.ahead).cast());
        // SAFETY: by this function's contract.
        let value =
            unsafe { if self.there >= S::LANES { E::load::<S>(from) } else { load_padded::<S, E>(from, self.there) } };
        let value = self.factors.map_or(value, |factors| S::mul(value, S::splat(factors[pixel])));
        E::rounded::<S>(normalise::<S, E, NORM, SILU>(value, self.table))
    }
}

/// The last `left` channels of a pixel, fewer than a vector, padded with zeros.
///
/// # Safety
/// `from` has `left` values.
#[inline(always)]
unsafe fn load_padded<S: Simd, E: Element>(from: *const E, left: usize) -> S::V {
    let mut values = [E::of(0.0); MOST_CHANNELS];
    for (i, value) in values.iter_mut().enumerate().take(left) {
        // SAFETY: by this function's contract.
        *value = unsafe { *from.add(i) };
    }
    // SAFETY: no vector is wider than a block.
    unsafe { E::load::<S>(values.as_ptr()) }
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
    /// Whether pixels are divided by their length.
    by_length: bool,
    table: &'a [f32],
    /// The next row is prefetched.
    row_stride: usize,
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
        let mut lengths = [1.0; MOST_LENGTHS];
        for first in (0..self.pixels).step_by(MOST_LENGTHS) {
            let factors = &mut lengths[..MOST_LENGTHS.min(self.pixels - first)];
            // SAFETY: pixels of the run.
            unsafe {
                if self.by_length {
                    let from = self.from.add(first * self.from_step);
                    reciprocal_lengths::<S, E>(from, self.from_step, self.channels, factors);
                }
                for (i, factor) in factors.iter().enumerate() {
                    self.normalise_pixel::<S, NORM, SILU>(first + i, self.by_length.then_some(*factor));
                }
            }
        }
    }
}

impl<E: Element> DirectRow<'_, E> {
    /// One pixel, which is multiplied by `factor` before the table is applied.
    ///
    /// # Safety
    /// As [`SimdOp::run`].
    #[inline(always)]
    unsafe fn normalise_pixel<S: Simd, const NORM: bool, const SILU: bool>(&self, pixel: usize, factor: Option<f32>) {
        let whole = self.channels / E::BLOCK * E::BLOCK;
        // SAFETY: inside the run and its channels; a partial last block is padded first.
        unsafe {
            let from = self.from.add(pixel * self.from_step);
            let into = self.into.add(pixel * E::BLOCK);
            for channel in (0..whole).step_by(E::BLOCK) {
                S::prefetch_later(from.wrapping_add(self.row_stride + channel).cast());
                let into = into.add(channel / E::BLOCK * self.block);
                self.normalise_block::<S, NORM, SILU>(from.add(channel), channel, factor, into);
            }
            if whole < self.channels {
                let mut rest = [E::of(0.0); MOST_CHANNELS];
                for (channel, value) in (whole..self.channels).zip(&mut rest) {
                    *value = *from.add(channel);
                }
                let into = into.add(whole / E::BLOCK * self.block);
                self.normalise_block::<S, NORM, SILU>(rest.as_ptr(), whole, factor, into);
            }
        }
    }

    /// One block of one pixel, which is multiplied by `factor` before the table is applied.
    ///
    /// # Safety
    /// As [`SimdOp::run`].
    #[inline(always)]
    unsafe fn normalise_block<S: Simd, const NORM: bool, const SILU: bool>(
        &self,
        from: *const E,
        channel: usize,
        factor: Option<f32>,
        into: *mut E,
    ) {
        for lane in (0..E::BLOCK).step_by(S::LANES) {
            // SAFETY: the table is padded to whole blocks; `from` and `into` have one block each.
            unsafe {
                let table = table_vectors::<S, NORM>(self.table, channel + lane);
                let value = E::load::<S>(from.add(lane));
                let value = factor.map_or(value, |factor| S::mul(value, S::splat(factor)));
                E::store::<S>(into.add(lane), normalise::<S, E, NORM, SILU>(value, table));
            }
        }
    }
}
