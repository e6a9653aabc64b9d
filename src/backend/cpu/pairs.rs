//! Two output pixels from four products instead of six: Winograd's F(2, 3), along the rows of a 3 x 3 window.
//!
//! Two neighbouring output pixels see four pixels d in each row of the window, through three weights g:
//!
//! - m0 = (d0 - d2) g0
//! - m1 = (d1 + d2) (g0 + g1 + g2) / 2
//! - m2 = (d2 - d1) (g0 - g1 + g2) / 2
//! - m3 = (d1 - d3) g2
//!
//! The outputs are m0 + m1 + m2 and m1 - m2 - m3. Rows of the window and channels are summed before that, so each of
//! the four *parts* is a convolution of its own, with a window of 3 x 1 over an image of pairs. The factors are small,
//! and so is what is lost to rounding. Larger groups of pixels would save more, and lose much more.

use super::band::{Extent, Prepare, Source, factors, prepare, prologue};
use super::geometry::{Area, Geometry};
use super::kernel::{BLOCK, FEW, PANEL};
use super::simd::{Op, Simd};
use crate::backend::{ConvLayout, Window};

pub(super) const PARTS: usize = 4;

/// Whether a convolution is computed in pairs. With few channels the sums are too short to pay for it.
pub(super) fn paired(layout: &ConvLayout) -> bool {
    let rest = layout.cout as usize % PANEL;
    layout.window == Window::Same && layout.cin as usize >= BLOCK && (rest == 0 || rest > FEW)
}

/// What a part multiplies with, of the three weights of a row of the window.
pub(super) fn weight(part: usize, [g0, g1, g2]: [f32; 3]) -> f32 {
    match part {
        0 => g0,
        1 => ((g0 + g2) + g1) * 0.5,
        2 => ((g0 + g2) - g1) * 0.5,
        _ => g2,
    }
}

/// The band that `area` sees: [part][block of 16 channels][row][pair][16 channels]. No columns beside the image: a tap is
/// a number of rows, so a tile may go on from the end of a row to the next.
///
/// # Safety
/// The frame exists, `into` has room for the band, and the processor has `S`.
pub(super) unsafe fn band<S: Simd>(source: &Source, geometry: &Geometry, area: Area, into: *mut f32) -> Extent {
    let extent = Extent { rows: geometry.extent(area.height), columns: area.width.div_ceil(2) };
    let blocks = source.channels.div_ceil(BLOCK);
    // Of the columns that the pairs see, the first lies left of the area; these lie in the image.
    let first = usize::from(area.left == 0);
    let end = (source.width + 1 - area.left).min(2 * extent.columns + 2);
    for row in 0..extent.rows {
        // SAFETY: rows of the band; what is read lies in the image, as `first` and `end` say.
        unsafe {
            let into = into.add(row * extent.columns * BLOCK);
            let y = (area.top + row).wrapping_sub(1);
            if y >= source.height {
                for plane in 0..PARTS * blocks {
                    into.add(plane * extent.block()).write_bytes(0, extent.columns * BLOCK);
                }
                continue;
            }
            let pixel = y * source.width + area.left + first - 1;
            S::enter(Row { source, from: source.frame.add(pixel * source.channels), first, end, into, extent });
        }
    }
    extent
}

/// A row of the band.
struct Row<'a> {
    source: &'a Source<'a>,
    /// The pixel in column `first`.
    from: *const f32,
    /// Columns in the image; there are zeros before and after.
    first: usize,
    end: usize,
    into: *mut f32,
    extent: Extent,
}

impl Op for Row<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: whoever made the row vouches for it.
        unsafe { prepare::<S>(&self, self.source.prologue) }
    }
}

impl Prepare for Row<'_> {
    #[inline(always)]
    unsafe fn all<S: Simd, const NORM: bool, const SILU: bool>(&self) {
        let (channels, block) = (self.source.channels, self.extent.block());
        let part = channels.div_ceil(BLOCK) * block;
        for channel in (0..channels.next_multiple_of(BLOCK)).step_by(S::LANES) {
            // SAFETY: channels of the table, pixels of the image, and pairs of the row.
            unsafe {
                let factors = factors::<S, NORM>(self.source.table, channel);
                let mut into = self.into.add(channel / BLOCK * block + channel % BLOCK);
                let mut d0 = self.value::<S, NORM, SILU>(0, channel, factors);
                let mut d1 = self.value::<S, NORM, SILU>(1, channel, factors);
                for pair in 0..self.extent.columns {
                    let d2 = self.value::<S, NORM, SILU>(2 * pair + 2, channel, factors);
                    let d3 = self.value::<S, NORM, SILU>(2 * pair + 3, channel, factors);
                    S::store(into, S::sub(d0, d2));
                    S::store(into.add(part), S::add(d1, d2));
                    S::store(into.add(2 * part), S::sub(d2, d1));
                    S::store(into.add(3 * part), S::sub(d1, d3));
                    into = into.add(BLOCK);
                    (d0, d1) = (d2, d3);
                }
            }
        }
    }
}

impl Row<'_> {
    /// The channels from `channel` on of the pixel in a column, after the prologue.
    ///
    /// # Safety
    /// As [`Op::run`].
    #[inline(always)]
    unsafe fn value<S: Simd, const NORM: bool, const SILU: bool>(
        &self,
        column: usize,
        channel: usize,
        factors: [S::V; 3],
    ) -> S::V {
        if column < self.first || column >= self.end {
            return S::splat(0.0);
        }
        let channels = self.source.channels;
        // SAFETY: a pixel of the image, and of its channels no more than there are.
        let value = unsafe {
            let from = self.from.add((column - self.first) * channels);
            if channel + S::LANES <= channels {
                S::load(from.add(channel))
            } else {
                rest::<S>(from.wrapping_add(channel), channels.saturating_sub(channel))
            }
        };
        prologue::<S, NORM, SILU>(value, factors)
    }
}

/// The last channels of a pixel, fewer than a vector, and zeros.
///
/// # Safety
/// `from` has `left` values.
#[inline(always)]
unsafe fn rest<S: Simd>(from: *const f32, left: usize) -> S::V {
    let mut values = [0.0f32; BLOCK];
    for (i, value) in values.iter_mut().enumerate().take(left) {
        // SAFETY: as the caller vouches.
        *value = unsafe { *from.add(i) };
    }
    // SAFETY: no vector is wider than a block.
    unsafe { S::load(values.as_ptr()) }
}

/// A row of the output, from the products of all parts.
pub(super) struct Join {
    /// Of the first pair and part 0: as many as a panel has channels.
    pub products: *const f32,
    /// From a part to the next.
    pub part: usize,
    pub out: *mut f32,
    /// From a pixel to the next in `out`.
    pub step: usize,
    pub pixels: usize,
    pub channels: usize,
    /// Whether to add to what is in `out`.
    pub add: bool,
}

impl Op for Join {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        for pair in 0..self.pixels.div_ceil(2) {
            let both = 2 * pair + 1 < self.pixels;
            let whole = self.channels / S::LANES * S::LANES;
            // SAFETY: whoever made the operation vouches for its pairs and channels; a panel's products are whole vectors.
            unsafe {
                let products = self.products.add(pair * PANEL);
                let out = self.out.add(2 * pair * self.step);
                for c in (0..whole).step_by(S::LANES) {
                    self.join::<S>(products.add(c), out.add(c), out.add(self.step + c), both);
                }
                if whole < self.channels {
                    let left = self.channels - whole;
                    let mut pixels = [[0.0f32; BLOCK]; 2];
                    for (i, pixel) in pixels.iter_mut().enumerate().take(1 + usize::from(both)) {
                        out.add(i * self.step + whole).copy_to_nonoverlapping(pixel.as_mut_ptr(), left);
                    }
                    let [first, second] = &mut pixels;
                    self.join::<S>(products.add(whole), first.as_mut_ptr(), second.as_mut_ptr(), both);
                    for (i, pixel) in pixels.iter().enumerate().take(1 + usize::from(both)) {
                        out.add(i * self.step + whole).copy_from_nonoverlapping(pixel.as_ptr(), left);
                    }
                }
            }
        }
    }
}

impl Join {
    /// One vector of each pixel of a pair.
    ///
    /// # Safety
    /// The vectors are there, the second pixel's if there are `both`.
    #[inline(always)]
    unsafe fn join<S: Simd>(&self, products: *const f32, first: *mut f32, second: *mut f32, both: bool) {
        // SAFETY: as the caller vouches.
        unsafe {
            let (m0, m1) = (S::load(products), S::load(products.add(self.part)));
            let (m2, m3) = (S::load(products.add(2 * self.part)), S::load(products.add(3 * self.part)));
            self.put::<S>(first, S::add(S::add(m1, m2), m0));
            if both {
                self.put::<S>(second, S::sub(S::sub(m1, m2), m3));
            }
        }
    }

    /// # Safety
    /// The vector is there.
    #[inline(always)]
    unsafe fn put<S: Simd>(&self, out: *mut f32, sum: S::V) {
        // SAFETY: as the caller vouches.
        unsafe { S::store(out, if self.add { S::add(S::load(out), sum) } else { sum }) }
    }
}
