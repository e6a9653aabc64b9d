//! Winograd's F(2, 3) along the rows of a 3 x 3 window: two output pixels from four products instead of six.
//! The factors are small, so little precision is lost. F(4, 3) would save more products and lose much more precision.

use super::grid::{COMPONENTS, OutputArea, OutputGrid};
use super::patch::{PatchSize, PatchSource};
use crate::backend::cpu::norm::{Normalise, normalise, normalise_with, table_vectors};
use crate::backend::cpu::simd::{BLOCK, PANEL, Simd, SimdOp};

/// A component's weight, from the three weights of a row of the window.
///
/// Two neighbouring output pixels read four pixels d in each row of the window, through three weights g:
///
/// - m0 = (d0 - d2) g0
/// - m1 = (d1 + d2) (g0 + g1 + g2) / 2
/// - m2 = (d2 - d1) (g0 - g1 + g2) / 2
/// - m3 = (d1 - d3) g2
///
/// The outputs are m0 + m1 + m2 and m1 - m2 - m3. Rows of the window and channels are summed before that. So each
/// component m is a convolution of its own, with a window of 3 x 1 over an image of pixel pairs.
pub fn transform_weight(component: usize, [g0, g1, g2]: [f32; 3]) -> f32 {
    match component {
        0 => g0,
        1 => ((g0 + g2) + g1) * 0.5,
        2 => ((g0 + g2) - g1) * 0.5,
        _ => g2,
    }
}

/// The transformed patch of `area`: [component][block of 16 channels][row][pair][16 channels]. It has no columns
/// outside the image: a tap is a number of rows, so a tile may span the end of a row and the start of the next.
///
/// # Safety
/// The frame is valid, `into` has room for the patch, and the processor has `S`.
pub unsafe fn transform_patch<S: Simd>(
    source: &PatchSource<f32>,
    grid: &OutputGrid,
    area: OutputArea,
    into: *mut f32,
) -> PatchSize {
    let size = PatchSize { rows: grid.input_span(area.height), columns: area.width.div_ceil(2) };
    let blocks = source.channels.div_ceil(BLOCK);
    // The pairs read one column left of the area and on. Those from `first` to `end` are inside the image.
    let first = usize::from(area.left == 0);
    let end = (source.width + 1 - area.left).min(2 * size.columns + 2);
    for row in 0..size.rows {
        // SAFETY: writes stay inside the patch, reads inside the image: from `first` to `end`.
        unsafe {
            let into = into.add(row * size.columns * BLOCK);
            let y = (area.top + row).wrapping_sub(1);
            if y >= source.height {
                for plane in 0..COMPONENTS * blocks {
                    into.add(plane * size.block::<f32>()).write_bytes(0, size.columns * BLOCK);
                }
                continue;
            }
            let pixel = y * source.width + area.left + first - 1;
            S::enter(WinogradRow { source, from: source.frame.add(pixel * source.channels), first, end, into, size });
        }
    }
    size
}

/// A row of the transformed patch.
struct WinogradRow<'a> {
    source: &'a PatchSource<'a, f32>,
    /// The pixel in column `first`.
    from: *const f32,
    /// Columns inside the image. Others are zeros.
    first: usize,
    end: usize,
    into: *mut f32,
    size: PatchSize,
}

impl SimdOp for WinogradRow<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: by this function's contract.
        unsafe { normalise_with::<S>(&self, self.source.prologue) }
    }
}

impl Normalise for WinogradRow<'_> {
    #[inline(always)]
    unsafe fn run_with<S: Simd, const NORM: bool, const SILU: bool>(&self) {
        let (channels, block) = (self.source.channels, self.size.block::<f32>());
        let component = channels.div_ceil(BLOCK) * block;
        for channel in (0..channels.next_multiple_of(BLOCK)).step_by(S::LANES) {
            // SAFETY: channels of the table, pixels of the image, and pairs of the row.
            unsafe {
                let table = table_vectors::<S, NORM>(self.source.table, channel);
                let mut into = self.into.add(channel / BLOCK * block + channel % BLOCK);
                let mut d0 = self.value::<S, NORM, SILU>(0, channel, table);
                let mut d1 = self.value::<S, NORM, SILU>(1, channel, table);
                for pair in 0..self.size.columns {
                    let d2 = self.value::<S, NORM, SILU>(2 * pair + 2, channel, table);
                    let d3 = self.value::<S, NORM, SILU>(2 * pair + 3, channel, table);
                    S::store(into, S::sub(d0, d2));
                    S::store(into.add(component), S::add(d1, d2));
                    S::store(into.add(2 * component), S::sub(d2, d1));
                    S::store(into.add(3 * component), S::sub(d1, d3));
                    into = into.add(BLOCK);
                    (d0, d1) = (d2, d3);
                }
            }
        }
    }
}

impl WinogradRow<'_> {
    /// One vector of channels of the pixel in a column, after the prologue.
    ///
    /// # Safety
    /// As [`SimdOp::run`].
    #[inline(always)]
    unsafe fn value<S: Simd, const NORM: bool, const SILU: bool>(
        &self,
        column: usize,
        channel: usize,
        table: [S::V; 3],
    ) -> S::V {
        if column < self.first || column >= self.end {
            return S::splat(0.0);
        }
        let channels = self.source.channels;
        // SAFETY: a pixel of the image, and only its own channels.
        let value = unsafe {
            let from = self.from.add((column - self.first) * channels);
            if channel + S::LANES <= channels {
                S::load(from.add(channel))
            } else {
                load_padded::<S>(from.wrapping_add(channel), channels.saturating_sub(channel))
            }
        };
        normalise::<S, f32, NORM, SILU>(value, table)
    }
}

/// The last `left` channels of a pixel, fewer than a vector, padded with zeros.
///
/// # Safety
/// `from` has `left` values.
#[inline(always)]
unsafe fn load_padded<S: Simd>(from: *const f32, left: usize) -> S::V {
    let mut values = [0.0f32; BLOCK];
    for (i, value) in values.iter_mut().enumerate().take(left) {
        // SAFETY: by this function's contract.
        *value = unsafe { *from.add(i) };
    }
    // SAFETY: no vector is wider than a block.
    unsafe { S::load(values.as_ptr()) }
}

/// A row of the output, from the products of all components.
pub struct OutputTransform {
    /// [component][pair][one panel of channels]
    pub products: *const f32,
    /// Stride of components in `products`.
    pub component: usize,
    pub out: *mut f32,
    /// Stride of pixels in `out`.
    pub step: usize,
    pub pixels: usize,
    pub channels: usize,
    /// Whether to add to the values in `out`.
    pub add: bool,
}

impl SimdOp for OutputTransform {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        for pair in 0..self.pixels.div_ceil(2) {
            let both = 2 * pair + 1 < self.pixels;
            let whole = self.channels / S::LANES * S::LANES;
            // SAFETY: inside the row's pairs and channels; a panel's products are whole vectors.
            unsafe {
                let products = self.products.add(pair * PANEL);
                let out = self.out.add(2 * pair * self.step);
                for c in (0..whole).step_by(S::LANES) {
                    self.transform_pair::<S>(products.add(c), out.add(c), out.add(self.step + c), both);
                }
                if whole < self.channels {
                    let left = self.channels - whole;
                    let mut pixels = [[0.0f32; BLOCK]; 2];
                    for (i, pixel) in pixels.iter_mut().enumerate().take(1 + usize::from(both)) {
                        out.add(i * self.step + whole).copy_to_nonoverlapping(pixel.as_mut_ptr(), left);
                    }
                    let [first, second] = &mut pixels;
                    self.transform_pair::<S>(products.add(whole), first.as_mut_ptr(), second.as_mut_ptr(), both);
                    for (i, pixel) in pixels.iter().enumerate().take(1 + usize::from(both)) {
                        out.add(i * self.step + whole).copy_from_nonoverlapping(pixel.as_ptr(), left);
                    }
                }
            }
        }
    }
}

impl OutputTransform {
    /// One vector of each pixel of a pair.
    ///
    /// # Safety
    /// The vectors are valid; the second pixel's only if `both`.
    #[inline(always)]
    unsafe fn transform_pair<S: Simd>(&self, products: *const f32, first: *mut f32, second: *mut f32, both: bool) {
        // SAFETY: by this function's contract.
        unsafe {
            let (m0, m1) = (S::load(products), S::load(products.add(self.component)));
            let (m2, m3) = (S::load(products.add(2 * self.component)), S::load(products.add(3 * self.component)));
            self.put::<S>(first, S::add(S::add(m1, m2), m0));
            if both {
                self.put::<S>(second, S::sub(S::sub(m1, m2), m3));
            }
        }
    }

    /// # Safety
    /// `out` has a vector.
    #[inline(always)]
    unsafe fn put<S: Simd>(&self, out: *mut f32, sum: S::V) {
        // SAFETY: by this function's contract.
        unsafe { S::store(out, if self.add { S::add(S::load(out), sum) } else { sum }) }
    }
}
