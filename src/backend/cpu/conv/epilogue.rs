//! The epilogue of a row while its sums are in the first-level cache: bias, residual, and statistics for the next norm.

use crate::backend::cpu::norm::{Moments, RowSums};
use crate::backend::cpu::simd::{Simd, SimdOp};

/// One panel of a row of the output.
#[derive(Clone, Copy)]
pub struct EpilogueRow {
    pub out: *mut f32,
    /// Stride of pixels in `out` and `residual`.
    pub step: usize,
    pub pixels: usize,
    pub channels: usize,
    pub bias: *const f32,
    /// The pixel in an outer column, and its bias.
    pub edge: Option<(usize, *const f32)>,
    /// Null if there is none.
    pub residual: *const f32,
}

impl EpilogueRow {
    /// Finishes the row, and adds it to `moments` of `rows` earlier rows unless that is null.
    ///
    /// # Safety
    /// The pointers are valid for the row, and the processor has `S`.
    pub unsafe fn finish<S: Simd>(&self, moments: *mut Moments, rows: usize) {
        // SAFETY: by this function's contract.
        unsafe {
            if moments.is_null() {
                S::enter(FinishRow { row: self, sums: None });
            } else {
                let mut sums = RowSums::ZERO;
                S::enter(FinishRow { row: self, sums: Some(&mut sums) });
                (*moments).add(&sums, self.channels, self.pixels, rows);
            }
        }
    }
}

struct FinishRow<'a> {
    row: &'a EpilogueRow,
    sums: Option<&'a mut RowSums>,
}

impl SimdOp for FinishRow<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let EpilogueRow { out, step, pixels, channels, bias, edge, residual } = *self.row;
        let whole = channels / S::LANES * S::LANES;
        let mut sums = self.sums;
        let n = pixels as f32;
        for c in (0..whole).step_by(S::LANES) {
            // SAFETY: inside the row's pixels and channels.
            unsafe {
                let (inner, out) = (S::load(bias.add(c)), out.add(c));
                let mut sum = S::splat(0.0);
                for pixel in 0..pixels {
                    let add = match edge {
                        Some((at, bias)) if at == pixel => S::load(bias.add(c)),
                        _ => inner,
                    };
                    let mut v = S::add(S::load(out.add(pixel * step)), add);
                    if !residual.is_null() {
                        v = S::add(v, S::load(residual.add(pixel * step + c)));
                    }
                    S::store(out.add(pixel * step), v);
                    sum = S::add(sum, v);
                }
                if let Some(sums) = sums.as_deref_mut() {
                    let centre = S::mul(sum, S::splat(1.0 / n));
                    let (mut difference, mut square) = (S::splat(0.0), S::splat(0.0));
                    for pixel in 0..pixels {
                        let d = S::sub(S::load(out.add(pixel * step)), centre);
                        difference = S::add(difference, d);
                        square = S::fma(d, d, square);
                    }
                    S::store(sums.centre.as_mut_ptr().add(c), centre);
                    S::store(sums.difference.as_mut_ptr().add(c), difference);
                    S::store(sums.square.as_mut_ptr().add(c), square);
                }
            }
        }
        for c in whole..channels {
            // SAFETY: as above.
            unsafe {
                let mut sum = 0.0;
                for pixel in 0..pixels {
                    let add = match edge {
                        Some((at, bias)) if at == pixel => *bias.add(c),
                        _ => *bias.add(c),
                    };
                    let v = out.add(pixel * step + c);
                    *v += add;
                    if !residual.is_null() {
                        *v += *residual.add(pixel * step + c);
                    }
                    sum += *v;
                }
                if let Some(sums) = sums.as_deref_mut() {
                    let centre = sum * (1.0 / n);
                    let (mut difference, mut square) = (0.0, 0.0);
                    for pixel in 0..pixels {
                        let d = *out.add(pixel * step + c) - centre;
                        difference += d;
                        square += d * d;
                    }
                    (sums.centre[c], sums.difference[c], sums.square[c]) = (centre, difference, square);
                }
            }
        }
    }
}
