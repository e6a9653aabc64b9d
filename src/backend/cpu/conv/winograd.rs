//! Winograd's F(2 x 2, 3 x 3): a square of four output pixels from 16 products instead of 36. The way into the Winograd
//! domain and back, in four steps of four components each.
//! The factors are small, so little precision is lost. F(4, 3) would save more products and lose much more precision.

use super::grid::COMPONENTS;
use super::patch::PatchSize;
use crate::backend::cpu::simd::{BLOCK, PANEL, Simd, SimdOp};

/// The components of three weights, in each output channel.
///
/// Two neighbouring outputs read four values d through three weights g:
///
/// - m0 = (d0 - d2) g0
/// - m1 = (d1 + d2) (g0 + g1 + g2) / 2
/// - m2 = (d2 - d1) (g0 - g1 + g2) / 2
/// - m3 = (d1 - d3) g2
///
/// The outputs are m0 + m1 + m2 and m1 - m2 - m3. In two dimensions the columns of 4 x 4 values are transformed, then
/// the rows of the result. Channels and terms are summed before the way back. So each of the 16 components is a
/// convolution of its own, with one tap over an image of squares.
fn transform_weights([g0, g1, g2]: [&[f32]; 3], into: &mut [[f32; PANEL]; COMPONENTS]) {
    for (c, ((g0, g1), g2)) in g0.iter().zip(g1).zip(g2).enumerate() {
        let outer = g0 + g2;
        into[0][c] = *g0;
        into[1][c] = (outer + g1) * 0.5;
        into[2][c] = (outer - g1) * 0.5;
        into[3][c] = *g2;
    }
}

/// All components of the weights of a window, in each output channel of a panel: [of columns][of rows].
pub fn transform_window(window: [&[f32]; 9]) -> [[[f32; PANEL]; COMPONENTS]; COMPONENTS] {
    // [column][component of columns]
    let mut columns = [[[0.0; PANEL]; COMPONENTS]; 3];
    for (j, into) in columns.iter_mut().enumerate() {
        transform_weights([window[j], window[3 + j], window[6 + j]], into);
    }
    let mut all = [[[0.0; PANEL]; COMPONENTS]; COMPONENTS];
    for (i, into) in all.iter_mut().enumerate() {
        transform_weights([&columns[0][i], &columns[1][i], &columns[2][i]], into);
    }
    all
}

/// The input of an area in the four components that component `column` of its columns has:
/// [component of rows][block of 16 channels][square][16 channels], with `component` floats from one to the next.
pub struct InputTransform {
    /// [block of 16 channels][row][column][16 channels], in whole squares.
    pub patch: *const f32,
    pub size: PatchSize,
    pub blocks: usize,
    pub column: usize,
    pub into: *mut f32,
    pub component: usize,
}

impl SimdOp for InputTransform {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let (rows, columns) = (self.size.rows / 2 - 1, self.size.columns / 2 - 1);
        for block in 0..self.blocks {
            for row in 0..rows {
                // SAFETY: rows of the patch, and squares of the area.
                unsafe {
                    let line = |i: usize| {
                        self.patch.add(block * self.size.block::<f32>() + (2 * row + i) * self.size.columns * BLOCK)
                    };
                    let into = self.into.add((block * rows + row) * columns * BLOCK);
                    match self.column {
                        0 => self.row::<S, false>([line(0), line(2)], columns, into),
                        1 => self.row::<S, true>([line(1), line(2)], columns, into),
                        2 => self.row::<S, false>([line(2), line(1)], columns, into),
                        _ => self.row::<S, false>([line(1), line(3)], columns, into),
                    }
                }
            }
        }
    }
}

impl InputTransform {
    /// A row of squares, from the sum or the difference of two rows of the patch.
    ///
    /// # Safety
    /// As [`SimdOp::run`].
    #[inline(always)]
    unsafe fn row<S: Simd, const ADD: bool>(&self, [a, b]: [*const f32; 2], columns: usize, into: *mut f32) {
        for lane in (0..BLOCK).step_by(S::LANES) {
            // SAFETY: by this function's contract.
            unsafe {
                let (mut a, mut b, mut into) = (a.add(lane), b.add(lane), into.add(lane));
                let mut d0 = combine::<S, ADD>(a, b);
                let mut d1 = combine::<S, ADD>(a.add(BLOCK), b.add(BLOCK));
                for _ in 0..columns {
                    (a, b) = (a.add(2 * BLOCK), b.add(2 * BLOCK));
                    let d2 = combine::<S, ADD>(a, b);
                    let d3 = combine::<S, ADD>(a.add(BLOCK), b.add(BLOCK));
                    S::store(into, S::sub(d0, d2));
                    S::store(into.add(self.component), S::add(d1, d2));
                    S::store(into.add(2 * self.component), S::sub(d2, d1));
                    S::store(into.add(3 * self.component), S::sub(d1, d3));
                    into = into.add(BLOCK);
                    (d0, d1) = (d2, d3);
                }
            }
        }
    }
}

/// The sum or the difference of two vectors.
///
/// # Safety
/// Both have a vector, and the processor has `S`.
#[inline(always)]
unsafe fn combine<S: Simd, const ADD: bool>(a: *const f32, b: *const f32) -> S::V {
    // SAFETY: by this function's contract.
    let (a, b) = unsafe { (S::load(a), S::load(b)) };
    if ADD { S::add(a, b) } else { S::sub(a, b) }
}

/// The sums of a pair of frames: of the products that both share to what each has of them. See
/// [`PAIR_SLABS`](crate::ir::PAIR_SLABS).
pub struct ShareProducts {
    pub first: *mut f32,
    pub second: *mut f32,
    pub floats: usize,
}

impl SimdOp for ShareProducts {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        for at in (0..self.floats).step_by(S::LANES) {
            // SAFETY: inside the sums.
            unsafe {
                let (a, b) = (S::load(self.first.add(at)), S::load(self.second.add(at)));
                S::store(self.first.add(at), S::add(a, b));
                S::store(self.second.add(at), S::sub(a, b));
            }
        }
    }
}

/// What the four components of component `column` of the columns add to a row of squares of the output.
pub struct OutputTransform {
    /// [component of rows][square][one panel of channels]
    pub sums: *const f32,
    /// Floats from one component to the next in `sums`.
    pub component: usize,
    pub column: usize,
    /// The two rows of pixels; the second is null below the image.
    pub out: [*mut f32; 2],
    /// Stride of pixels in `out`.
    pub step: usize,
    pub pixels: usize,
    pub channels: usize,
    /// Whether to add to the values in `out` from the first component on.
    pub add: bool,
}

impl SimdOp for OutputTransform {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let [top, bottom] = self.out;
        // SAFETY: by this function's contract.
        unsafe {
            match self.column {
                0 if self.add => self.row::<S, true, false>(top),
                0 => self.row::<S, false, false>(top),
                1 => {
                    self.row::<S, true, false>(top);
                    match self.add {
                        true => self.row::<S, true, false>(bottom),
                        false => self.row::<S, false, false>(bottom),
                    }
                }
                2 => {
                    self.row::<S, true, false>(top);
                    self.row::<S, true, true>(bottom);
                }
                _ => self.row::<S, true, true>(bottom),
            }
        }
    }
}

impl OutputTransform {
    /// Writes a row of pixels, adds to it or subtracts from it. No row if `out` is null.
    ///
    /// # Safety
    /// As [`SimdOp::run`].
    #[inline(always)]
    unsafe fn row<S: Simd, const ADD: bool, const NEGATE: bool>(&self, out: *mut f32) {
        if out.is_null() {
            return;
        }
        let whole = self.channels / S::LANES * S::LANES;
        for square in 0..self.pixels.div_ceil(2) {
            let both = 2 * square + 1 < self.pixels;
            // SAFETY: inside the row's squares and channels; a panel's sums are whole vectors.
            unsafe {
                let sums = self.sums.add(square * PANEL);
                let out = out.add(2 * square * self.step);
                for c in (0..whole).step_by(S::LANES) {
                    self.square::<S, ADD, NEGATE>(sums.add(c), out.add(c), out.add(self.step + c), both);
                }
                if whole < self.channels {
                    let left = self.channels - whole;
                    let mut pixels = [[0.0f32; BLOCK]; 2];
                    for (i, pixel) in pixels.iter_mut().enumerate().take(1 + usize::from(both)) {
                        out.add(i * self.step + whole).copy_to_nonoverlapping(pixel.as_mut_ptr(), left);
                    }
                    let [first, second] = &mut pixels;
                    self.square::<S, ADD, NEGATE>(sums.add(whole), first.as_mut_ptr(), second.as_mut_ptr(), both);
                    for (i, pixel) in pixels.iter().enumerate().take(1 + usize::from(both)) {
                        out.add(i * self.step + whole).copy_from_nonoverlapping(pixel.as_ptr(), left);
                    }
                }
            }
        }
    }

    /// One vector of each of two neighbouring pixels.
    ///
    /// # Safety
    /// The vectors are valid; the second pixel's only if `both`.
    #[inline(always)]
    unsafe fn square<S: Simd, const ADD: bool, const NEGATE: bool>(
        &self,
        sums: *const f32,
        first: *mut f32,
        second: *mut f32,
        both: bool,
    ) {
        // SAFETY: by this function's contract.
        unsafe {
            let (m0, m1) = (S::load(sums), S::load(sums.add(self.component)));
            let (m2, m3) = (S::load(sums.add(2 * self.component)), S::load(sums.add(3 * self.component)));
            put::<S, ADD, NEGATE>(first, S::add(S::add(m1, m2), m0));
            if both {
                put::<S, ADD, NEGATE>(second, S::sub(S::sub(m1, m2), m3));
            }
        }
    }
}

/// # Safety
/// `out` has a vector, and the processor has `S`.
#[inline(always)]
unsafe fn put<S: Simd, const ADD: bool, const NEGATE: bool>(out: *mut f32, sum: S::V) {
    // SAFETY: by this function's contract.
    unsafe {
        let sum = match (ADD, NEGATE) {
            (false, _) => sum,
            (true, false) => S::add(S::load(out), sum),
            (true, true) => S::sub(S::load(out), sum),
        };
        S::store(out, sum);
    }
}
