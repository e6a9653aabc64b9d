//! The epilogue of a row while its sums are in cache: bias, residual, rounding, and statistics for the next norm.

use crate::backend::cpu::element::Element;
use crate::backend::cpu::norm::{Moments, RowSums};
use crate::backend::cpu::simd::{Simd, SimdOp};

/// One panel of a row of the output.
#[derive(Clone, Copy)]
pub struct EpilogueRow<E> {
    /// Sums of the terms. They may lie in `out`.
    pub sums: *const f32,
    /// Stride of pixels in `sums`.
    pub sum_step: usize,
    pub out: *mut E,
    /// Stride of pixels in `out` and `residual`.
    pub step: usize,
    pub pixels: usize,
    pub channels: usize,
    pub bias: *const f32,
    /// The pixel in an outer column, and its bias.
    pub edge: Option<(usize, *const f32)>,
    /// Null if there is none.
    pub residual: *const E,
}

impl<E: Element> EpilogueRow<E> {
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

struct FinishRow<'a, E> {
    row: &'a EpilogueRow<E>,
    sums: Option<&'a mut RowSums>,
}

impl<E: Element> SimdOp for FinishRow<'_, E> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let EpilogueRow { sums: from, sum_step, out, step, pixels, channels, bias, edge, residual } = *self.row;
        let whole = channels / S::LANES * S::LANES;
        let mut sums = self.sums;
        let n = pixels as f32;
        let mut c = 0;
        while c < whole {
            // SAFETY: inside the row's pixels and channels.
            unsafe {
                c += if whole - c >= 2 * S::LANES {
                    self.row.finish_vectors::<S, 2>(c, sums.as_deref_mut())
                } else {
                    self.row.finish_vectors::<S, 1>(c, sums.as_deref_mut())
                };
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
                    let mut v = *from.add(pixel * sum_step + c) + add;
                    if !residual.is_null() {
                        v += (*residual.add(pixel * step + c)).value();
                    }
                    *out.add(pixel * step + c) = E::of(v);
                    sum += v;
                }
                if let Some(sums) = sums.as_deref_mut() {
                    let centre = sum * (1.0 / n);
                    let (mut difference, mut square) = (0.0, 0.0);
                    for pixel in 0..pixels {
                        let d = (*out.add(pixel * step + c)).value() - centre;
                        difference += d;
                        square += d * d;
                    }
                    (sums.centre[c], sums.difference[c], sums.square[c]) = (centre, difference, square);
                }
            }
        }
    }
}

impl<E: Element> EpilogueRow<E> {
    /// `N` vectors of channels from `c` on, at once: their sums do not wait for each other. Returns how many channels.
    ///
    /// # Safety
    /// As [`SimdOp::run`].
    #[inline(always)]
    unsafe fn finish_vectors<S: Simd, const N: usize>(&self, c: usize, sums: Option<&mut RowSums>) -> usize {
        let (out, residual) = (self.out.wrapping_add(c), self.residual.wrapping_add(c));
        let mut sum = [S::splat(0.0); N];
        for pixel in 0..self.pixels {
            let bias = match self.edge {
                Some((at, bias)) if at == pixel => bias,
                _ => self.bias,
            };
            for (i, sum) in sum.iter_mut().enumerate() {
                let at = pixel * self.step + i * S::LANES;
                // SAFETY: by this function's contract.
                unsafe {
                    let bias = S::load(bias.add(c + i * S::LANES));
                    let mut v = S::add(S::load(self.sums.add(pixel * self.sum_step + c + i * S::LANES)), bias);
                    if !self.residual.is_null() {
                        v = S::add(v, E::load::<S>(residual.add(at)));
                    }
                    E::store::<S>(out.add(at), v);
                    *sum = S::add(*sum, v);
                }
            }
        }
        let Some(sums) = sums else { return N * S::LANES };
        let centre = sum.map(|sum| S::mul(sum, S::splat(1.0 / self.pixels as f32)));
        let (mut difference, mut square) = ([S::splat(0.0); N], [S::splat(0.0); N]);
        for pixel in 0..self.pixels {
            for i in 0..N {
                // SAFETY: by this function's contract.
                let v = unsafe { E::load::<S>(out.add(pixel * self.step + i * S::LANES)) };
                let d = S::sub(v, centre[i]);
                difference[i] = S::add(difference[i], d);
                square[i] = S::fma(d, d, square[i]);
            }
        }
        for i in 0..N {
            let c = c + i * S::LANES;
            // SAFETY: channels of a panel.
            unsafe {
                S::store(sums.centre.as_mut_ptr().add(c), centre[i]);
                S::store(sums.difference.as_mut_ptr().add(c), difference[i]);
                S::store(sums.square.as_mut_ptr().add(c), square[i]);
            }
        }
        N * S::LANES
    }
}
