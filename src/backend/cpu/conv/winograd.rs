//! Winograd's F(2 x 2, 3 x 3) and F(4 x 4, 3 x 3): a square of 4 output pixels from 16 products instead of 36, or one
//! of 16 from 36 instead of 144. The way into the Winograd domain, one component of columns at a time, and back.
//!
//! A row of n outputs reads n + 2 values d through three weights g. Both are polynomials, of which the n + 2 components
//! are values: at 0, at each point p and -p, and at infinity. Components are multiplied; the outputs are sums of the
//! products. With one pair of points, 1 and -1:
//!
//! - m0 = (d0 - d2) g0
//! - m1 = (d2 + d1) (g0 + g1 + g2) / 2
//! - m2 = (d2 - d1) (g0 - g1 + g2) / 2
//! - m3 = (d3 - d1) g2
//!
//! The outputs are m0 + m1 + m2 and m1 - m2 + m3. In two dimensions the columns of a square's values are transformed,
//! then the rows of the result. Channels and terms are summed before the way back. So each component is a convolution
//! of its own, with one tap over an image of squares.

use super::patch::PatchSize;
use super::square::Square;
use crate::backend::cpu::simd::{BLOCK, PANEL, Simd, SimdOp};

/// The largest side, and the most components of a row.
const MOST_SIDE: usize = 4;
const MOST_COMPONENTS: usize = 6;

/// Points of large squares. With 1 and 2, whose factors are further apart, rounding errors are twice as large.
const A: f32 = 0.75;
const B: f32 = 1.5;

impl Square {
    /// The points p of the components that are neither the first nor the last: p, -p, and so on.
    const fn points(self) -> &'static [f32] {
        match self {
            Square::Small => &[1.0],
            Square::Large => &[A, B],
        }
    }

    /// The point of such a component.
    fn point(self, component: usize) -> f32 {
        let point = self.points()[(component - 1) / 2];
        if component % 2 == 1 { point } else { -point }
    }

    /// The factors of three weights in each component.
    fn weight_factors(self) -> [[f64; 3]; MOST_COMPONENTS] {
        let mut factors = [[0.0; 3]; MOST_COMPONENTS];
        let squares = self.points().iter().map(|p| f64::from(*p).powi(2));
        factors[0][0] = 1.0 / squares.clone().product::<f64>();
        for (component, factors) in factors.iter_mut().enumerate().take(self.side() + 1).skip(1) {
            let p = f64::from(self.point(component));
            let others: f64 = squares.clone().filter(|q| *q != p * p).map(|q| p * p - q).product();
            *factors = [1.0, p, p * p].map(|power| power / (2.0 * p * p * others));
        }
        factors[self.components() - 1][2] = 1.0;
        factors
    }

    /// All components of the nine weights of a window in each output channel of a panel: [of columns][of rows].
    pub fn transform_window(self, window: [&[f32]; 9]) -> [[[f32; PANEL]; MOST_COMPONENTS]; MOST_COMPONENTS] {
        let factors = self.weight_factors();
        let mut all = [[[0.0; PANEL]; MOST_COMPONENTS]; MOST_COMPONENTS];
        for (into, [f0, f1, f2]) in all.iter_mut().zip(factors).take(self.components()) {
            let mut columns = [[0.0; PANEL]; 3];
            for (j, column) in columns.iter_mut().enumerate() {
                let weights = window[j].iter().zip(window[3 + j]).zip(window[6 + j]);
                for (into, ((g0, g1), g2)) in column.iter_mut().zip(weights) {
                    *into = f0 * f64::from(*g0) + f1 * f64::from(*g1) + f2 * f64::from(*g2);
                }
            }
            for (into, [f0, f1, f2]) in into.iter_mut().zip(factors).take(self.components()) {
                for (c, into) in into.iter_mut().enumerate() {
                    *into = (f0 * columns[0][c] + f1 * columns[1][c] + f2 * columns[2][c]) as f32;
                }
            }
        }
        all
    }
}

/// The input of an area in those components that component `column` of its columns has:
/// [component of rows][block of 16 channels][square][16 channels], with `component` floats from one to the next.
pub struct InputTransform {
    pub square: Square,
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
        let (last, one) = (self.square.components() - 1, 1.0);
        // Lines of the patch and their factors.
        // SAFETY: by this function's contract.
        unsafe {
            match (self.square, self.column) {
                (Square::Small, 0) => self.rows::<S, 2, 2>([(0, one), (2, -one)]),
                (Square::Small, 3) => self.rows::<S, 2, 2>([(3, one), (1, -one)]),
                (Square::Small, column) => self.rows::<S, 2, 2>([(2, one), (1, self.square.point(column))]),
                (Square::Large, column) if column == 0 || column == last => {
                    let first = usize::from(column == last);
                    self.rows::<S, 3, 4>([(first + 4, one), (first + 2, -(A * A + B * B)), (first, A * A * B * B)]);
                }
                (Square::Large, column) => {
                    let point = self.square.point(column);
                    let other = A * A + B * B - point * point;
                    self.rows::<S, 4, 4>([(4, one), (3, point), (2, -other), (1, -point * other)]);
                }
            }
        }
    }
}

impl InputTransform {
    /// All rows of squares, from `N` lines of the patch each. The first factor is 1.
    ///
    /// # Safety
    /// As [`SimdOp::run`].
    #[inline(always)]
    unsafe fn rows<S: Simd, const N: usize, const SIDE: usize>(&self, from: [(usize, f32); N]) {
        let (rows, columns) = self.size.squares(self.square);
        for block in 0..self.blocks {
            for row in 0..rows {
                let first = block * self.size.block::<f32>() + SIDE * row * self.size.columns * BLOCK;
                let mut lines = [(self.patch, 0.0); N];
                for (line, (number, factor)) in lines.iter_mut().zip(from) {
                    *line = (self.patch.wrapping_add(first + number * self.size.columns * BLOCK), factor);
                }
                // SAFETY: rows of the patch, and squares of the area.
                unsafe { self.row::<S, N, SIDE>(lines, columns, self.into.add((block * rows + row) * columns * BLOCK)) }
            }
        }
    }

    /// A row of squares.
    ///
    /// # Safety
    /// As [`SimdOp::run`].
    #[inline(always)]
    unsafe fn row<S: Simd, const N: usize, const SIDE: usize>(
        &self,
        lines: [(*const f32, f32); N],
        columns: usize,
        into: *mut f32,
    ) {
        let zero = S::splat(0.0);
        let mut factors = [zero; N];
        for (factor, (_, value)) in factors.iter_mut().zip(lines) {
            *factor = S::splat(value);
        }
        for lane in (0..BLOCK).step_by(S::LANES) {
            let mut d = [zero; MOST_COMPONENTS];
            // SAFETY: by this function's contract.
            unsafe {
                for (i, d) in d.iter_mut().enumerate().take(2) {
                    *d = combine::<S, N>(&lines, &factors, i * BLOCK + lane);
                }
                for square in 0..columns {
                    for i in 0..SIDE {
                        d[2 + i] = combine::<S, N>(&lines, &factors, (square * SIDE + 2 + i) * BLOCK + lane);
                    }
                    let components = if SIDE == 2 { small_components::<S>(&d) } else { large_components::<S>(&d) };
                    for (i, value) in components.iter().enumerate().take(SIDE + 2) {
                        S::store(into.add(i * self.component + square * BLOCK + lane), *value);
                    }
                    (d[0], d[1]) = (d[SIDE], d[SIDE + 1]);
                }
            }
        }
    }
}

/// The sum of vectors of `N` lines, times their factors.
///
/// # Safety
/// All have a vector at `at`, and the processor has `S`.
#[inline(always)]
unsafe fn combine<S: Simd, const N: usize>(lines: &[(*const f32, f32); N], factors: &[S::V; N], at: usize) -> S::V {
    // SAFETY: by this function's contract.
    unsafe {
        let mut sum = S::load(lines[0].0.add(at));
        for i in 1..N {
            sum = S::fma(S::load(lines[i].0.add(at)), factors[i], sum);
        }
        sum
    }
}

#[inline(always)]
fn small_components<S: Simd>(d: &[S::V; MOST_COMPONENTS]) -> [S::V; MOST_COMPONENTS] {
    let [d0, d1, d2, d3, ..] = *d;
    [S::sub(d0, d2), S::add(d2, d1), S::sub(d2, d1), S::sub(d3, d1), d0, d0]
}

/// Of each point, the values at p and -p have the same terms of even and of odd powers.
#[inline(always)]
fn large_components<S: Simd>(d: &[S::V; MOST_COMPONENTS]) -> [S::V; MOST_COMPONENTS] {
    let [d0, d1, d2, d3, d4, d5] = *d;
    let (a2, b2) = (S::splat(-A * A), S::splat(-B * B));
    let (sum, product) = (S::splat(-(A * A + B * B)), S::splat(A * A * B * B));
    let (a_even, a_odd) = (S::fma(d2, b2, d4), S::fma(d1, b2, d3));
    let (b_even, b_odd) = (S::fma(d2, a2, d4), S::fma(d1, a2, d3));
    [
        S::fma(d0, product, S::fma(d2, sum, d4)),
        S::fma(a_odd, S::splat(A), a_even),
        S::fma(a_odd, S::splat(-A), a_even),
        S::fma(b_odd, S::splat(B), b_even),
        S::fma(b_odd, S::splat(-B), b_even),
        S::fma(d1, product, S::fma(d3, sum, d5)),
    ]
}

/// The sums of a pair of frames: of the products that both share to what each has of them. See
/// [`PairSlabs`](crate::ir::PairSlabs).
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

/// What a group of components of columns adds to a row of squares of the output: see [`Square::groups`].
pub struct OutputTransform {
    pub square: Square,
    /// [component of columns, of the group][component of rows][square][one panel of channels]
    pub sums: *const f32,
    /// Floats from one component of columns, and of rows, to the next in `sums`.
    pub column: usize,
    pub component: usize,
    pub group: usize,
    /// The first row of pixels, and how many of the square's are inside the image.
    pub out: *mut f32,
    pub rows: usize,
    /// Stride of rows and of pixels in `out`.
    pub row: usize,
    pub step: usize,
    pub pixels: usize,
    pub channels: usize,
    /// Whether to add to the values in `out` from the first component on.
    pub add: bool,
}

impl SimdOp for OutputTransform {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: by this function's contract.
        unsafe {
            match self.square {
                Square::Small => self.squares::<S, 2>(),
                Square::Large => self.squares::<S, 4>(),
            }
        }
    }
}

impl OutputTransform {
    /// # Safety
    /// As [`SimdOp::run`].
    #[inline(always)]
    unsafe fn squares<S: Simd, const SIDE: usize>(&self) {
        // Component 0 is part of the first row only, the last one of the last row.
        let (single, rows) = match self.group {
            0 => (true, 0..1),
            group if group > SIDE / 2 => (true, SIDE - 1..SIDE),
            _ => (false, 0..SIDE),
        };
        let (first, end) = (rows.start, rows.end.min(self.rows));
        for square in 0..self.pixels.div_ceil(SIDE) {
            let pixels = (self.pixels - square * SIDE).min(SIDE);
            for c in (0..self.channels).step_by(S::LANES) {
                // SAFETY: inside the row's squares and channels; a panel's sums are whole vectors.
                unsafe {
                    let sums = self.sums.add(square * PANEL + c);
                    let out = self.out.add(square * SIDE * self.step + c);
                    let mut even = self.values::<S, SIDE>(sums);
                    if single {
                        for row in first..end {
                            self.put_row::<S, SIDE>(out, row, pixels, self.channels - c, 1.0, &even);
                        }
                        continue;
                    }
                    // Row i has p^i of one and (-p)^i of the other.
                    let other = self.values::<S, SIDE>(sums.add(self.column));
                    let mut odd = even;
                    for i in 0..SIDE {
                        (even[i], odd[i]) = (S::add(even[i], other[i]), S::sub(even[i], other[i]));
                    }
                    let (point, mut factor) = (self.square.points()[self.group - 1], 1.0);
                    for row in 0..end {
                        let values = if row % 2 == 0 { &even } else { &odd };
                        self.put_row::<S, SIDE>(out, row, pixels, self.channels - c, factor, values);
                        factor *= point;
                    }
                }
            }
        }
    }

    /// Adds to the first `pixels` pixels of a square's row. A row begins with the first group that is part of it.
    ///
    /// # Safety
    /// The pixels are valid in `left` channels or a vector.
    #[inline(always)]
    unsafe fn put_row<S: Simd, const SIDE: usize>(
        &self,
        out: *mut f32,
        row: usize,
        pixels: usize,
        left: usize,
        factor: f32,
        values: &[S::V; MOST_SIDE],
    ) {
        let (add, factor) = (self.add || self.group > usize::from(row > 0), S::splat(factor));
        for (i, value) in values.iter().enumerate().take(SIDE) {
            if i < pixels {
                // SAFETY: by this function's contract.
                unsafe { put::<S>(out.add(row * self.row + i * self.step), left, factor, *value, add) };
            }
        }
    }

    /// One vector of each pixel of a row, in this component of columns.
    ///
    /// # Safety
    /// `sums` has a vector of each component.
    #[inline(always)]
    unsafe fn values<S: Simd, const SIDE: usize>(&self, sums: *const f32) -> [S::V; MOST_SIDE] {
        let mut m = [S::splat(0.0); MOST_COMPONENTS];
        for (i, m) in m.iter_mut().enumerate().take(SIDE + 2) {
            // SAFETY: by this function's contract.
            *m = unsafe { S::load(sums.add(i * self.component)) };
        }
        let (even, odd) = (S::add(m[1], m[2]), S::sub(m[1], m[2]));
        if SIDE == 2 {
            return [S::add(m[0], even), S::add(odd, m[3]), even, odd];
        }
        let (b_even, b_odd) = (S::add(m[3], m[4]), S::sub(m[3], m[4]));
        [
            S::add(S::add(m[0], even), b_even),
            S::fma(odd, S::splat(A), S::mul(b_odd, S::splat(B))),
            S::fma(even, S::splat(A * A), S::mul(b_even, S::splat(B * B))),
            S::fma(odd, S::splat(A * A * A), S::fma(b_odd, S::splat(B * B * B), m[5])),
        ]
    }
}

/// Writes `factor * value`, or adds it, in up to `left` lanes.
///
/// # Safety
/// `out` has `left` values or a vector, and the processor has `S`.
#[inline(always)]
unsafe fn put<S: Simd>(out: *mut f32, left: usize, factor: S::V, value: S::V, add: bool) {
    // SAFETY: by this function's contract; no vector is wider than a block.
    unsafe {
        if left >= S::LANES {
            let before = if add { S::load(out) } else { S::splat(0.0) };
            S::store(out, S::fma(factor, value, before));
        } else {
            let mut buffer = [0.0f32; BLOCK];
            out.copy_to_nonoverlapping(buffer.as_mut_ptr(), left);
            let before = if add { S::load(buffer.as_ptr()) } else { S::splat(0.0) };
            S::store(buffer.as_mut_ptr(), S::fma(factor, value, before));
            out.copy_from_nonoverlapping(buffer.as_ptr(), left);
        }
    }
}
