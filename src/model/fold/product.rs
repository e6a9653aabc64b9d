//! The matrix product of folding, in f32 or f64. Its factors are sums of a few values of the file, so products are not
//! exact: without fused multiplication the last bit of a sum may be another. Every sum has the same order.

use std::ops::{Add, AddAssign, Mul, Sub};

/// Columns of a product.
pub(super) const COLUMNS: usize = 16;
/// Rows of a product.
pub(super) const ROWS: usize = 8;

/// Terms of a product that are summed at a time: with them, both factors stay in cache.
pub(super) const TERMS: usize = 64;

/// The type of a product and its factors.
///
/// # Safety
/// Every bit pattern is a value.
pub(super) unsafe trait Real:
    Copy + Default + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> + AddAssign + From<f32> + Into<f64>
{
    /// `self * factor + term`, rounded once.
    fn mul_add(self, factor: Self, term: Self) -> Self;

    /// [`add`], by intrinsics, because the compiler keeps these sums in memory.
    ///
    /// # Safety
    /// The processor must have AVX-512F.
    #[cfg(target_arch = "x86_64")]
    unsafe fn add_avx512<const N: usize>(
        left: &[[Self; ROWS]],
        right: [&[[Self; COLUMNS]]; N],
        into: [&mut Tile<Self>; N],
    );
}

/// A product of a few rows and columns.
pub(super) type Tile<E> = [[E; COLUMNS]; ROWS];

// SAFETY: any bits are a number or a NaN.
unsafe impl Real for f32 {
    #[inline(always)]
    fn mul_add(self, factor: f32, term: f32) -> f32 {
        self.mul_add(factor, term)
    }

    #[cfg(target_arch = "x86_64")]
    unsafe fn add_avx512<const N: usize>(
        left: &[[f32; ROWS]],
        right: [&[[f32; COLUMNS]]; N],
        into: [&mut Tile<f32>; N],
    ) {
        // SAFETY: the caller's promise.
        unsafe { add_f32_avx512(left, right, into) };
    }
}

// SAFETY: as above.
unsafe impl Real for f64 {
    #[inline(always)]
    fn mul_add(self, factor: f64, term: f64) -> f64 {
        self.mul_add(factor, term)
    }

    #[cfg(target_arch = "x86_64")]
    unsafe fn add_avx512<const N: usize>(
        left: &[[f64; ROWS]],
        right: [&[[f64; COLUMNS]]; N],
        into: [&mut Tile<f64>; N],
    ) {
        for (right, into) in right.iter().zip(into) {
            // SAFETY: the caller's promise.
            unsafe { add_f64_avx512(left, right, into) };
        }
    }
}

/// Adds the products of `left`, transposed, and each of `right`.
pub(super) fn add<E: Real, const N: usize>(left: &[[E; ROWS]], right: [&[[E; COLUMNS]]; N], into: [&mut Tile<E>; N]) {
    #[cfg(target_arch = "x86_64")]
    {
        if std::arch::is_x86_feature_detected!("avx512f") {
            // SAFETY: the processor has the instructions.
            return unsafe { E::add_avx512(left, right, into) };
        }
        if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
            // SAFETY: as above.
            return unsafe { add_avx2(left, right, into) };
        }
    }
    // Where fused multiplication is no instruction, it is a slow function.
    add_each::<E, N, { cfg!(target_arch = "aarch64") }>(left, right, into);
}

/// All of `right` at once: a factor is loaded for several sums, and none waits for the one before.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn add_f32_avx512<const N: usize>(left: &[[f32; ROWS]], right: [&[[f32; COLUMNS]]; N], into: [&mut Tile<f32>; N]) {
    use std::arch::x86_64::*;
    assert!(right.iter().all(|right| right.len() >= left.len()));
    // From zero, so that nothing waits for the sums before.
    let mut sums = [[_mm512_setzero_ps(); ROWS]; N];
    for (term, left) in left.iter().enumerate() {
        // SAFETY: each has so many terms, and sixteen elements in each.
        let right = right.map(|right| unsafe { _mm512_loadu_ps(right.get_unchecked(term).as_ptr()) });
        for (row, factor) in left.iter().enumerate() {
            let factor = _mm512_set1_ps(*factor);
            for (sums, right) in sums.iter_mut().zip(right) {
                sums[row] = _mm512_fmadd_ps(factor, right, sums[row]);
            }
        }
    }
    for (sums, into) in sums.iter().zip(into) {
        for (sum, into) in sums.iter().zip(into) {
            // SAFETY: sixteen elements.
            unsafe { _mm512_storeu_ps(into.as_mut_ptr(), _mm512_add_ps(_mm512_loadu_ps(into.as_ptr()), *sum)) };
        }
    }
}

/// One product has as many sums as registers can hold.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn add_f64_avx512(left: &[[f64; ROWS]], right: &[[f64; COLUMNS]], into: &mut Tile<f64>) {
    use std::arch::x86_64::*;
    const LANES: usize = COLUMNS / 2;
    let mut sums = [_mm512_setzero_pd(); 2 * ROWS];
    for (left, right) in left.iter().zip(right) {
        // SAFETY: sixteen elements.
        let right = unsafe { [_mm512_loadu_pd(right.as_ptr()), _mm512_loadu_pd(right[LANES..].as_ptr())] };
        for (factor, sums) in left.iter().zip(sums.as_chunks_mut::<2>().0) {
            let factor = _mm512_set1_pd(*factor);
            sums[0] = _mm512_fmadd_pd(factor, right[0], sums[0]);
            sums[1] = _mm512_fmadd_pd(factor, right[1], sums[1]);
        }
    }
    for (sum, into) in sums.iter().zip(into.as_flattened_mut().as_chunks_mut::<LANES>().0) {
        // SAFETY: eight elements.
        unsafe { _mm512_storeu_pd(into.as_mut_ptr(), _mm512_add_pd(_mm512_loadu_pd(into.as_ptr()), *sum)) };
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn add_avx2<E: Real, const N: usize>(left: &[[E; ROWS]], right: [&[[E; COLUMNS]]; N], into: [&mut Tile<E>; N]) {
    add_each::<E, N, true>(left, right, into);
}

#[inline(always)]
fn add_each<E: Real, const N: usize, const FUSED: bool>(
    left: &[[E; ROWS]],
    right: [&[[E; COLUMNS]]; N],
    into: [&mut Tile<E>; N],
) {
    for (right, into) in right.iter().zip(into) {
        // So many rows have their sums in registers, except those of f64 with SSE2, which has no fused multiplication.
        match (size_of::<E>(), FUSED) {
            (4, true) => add_rows::<E, 4, FUSED>(left, right, into),
            _ => add_rows::<E, 2, FUSED>(left, right, into),
        }
    }
}

/// `HELD` rows at a time.
#[inline(always)]
fn add_rows<E: Real, const HELD: usize, const FUSED: bool>(
    left: &[[E; ROWS]],
    right: &[[E; COLUMNS]],
    into: &mut Tile<E>,
) {
    for (group, into) in into.as_chunks_mut::<HELD>().0.iter_mut().enumerate() {
        let mut sums = [[E::default(); COLUMNS]; HELD];
        for (left, right) in left.iter().zip(right) {
            for (sums, factor) in sums.iter_mut().zip(&left[HELD * group..][..HELD]) {
                for (sum, value) in sums.iter_mut().zip(right) {
                    *sum = if FUSED { factor.mul_add(*value, *sum) } else { *factor * *value + *sum };
                }
            }
        }
        for (into, sums) in into.iter_mut().zip(sums) {
            into.iter_mut().zip(sums).for_each(|(to, sum)| *to += sum);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::array::from_fn;

    const PRODUCTS: usize = 3;

    /// `value` must have products that are exact in `E`; their sums need not be.
    fn every_instruction_set_gives_the_same_bits<E: Real + PartialEq + std::fmt::Debug>(value: fn(usize) -> f32) {
        let value = |i| E::from(value(i));
        let left: [[E; ROWS]; 37] = from_fn(|t| from_fn(|r| value(t * ROWS + r)));
        let right: [[[E; COLUMNS]; 37]; PRODUCTS] = from_fn(|p| from_fn(|t| from_fn(|c| value(t * 17 + c + 5 + p))));
        let right = right.each_ref().map(<[_; 37]>::as_slice);
        let mut expected = [[[E::default(); COLUMNS]; ROWS]; PRODUCTS];
        for (right, expected) in right.iter().zip(&mut expected) {
            for (left, right) in left.iter().zip(*right) {
                for (factor, into) in left.iter().zip(&mut *expected) {
                    into.iter_mut().zip(right).for_each(|(sum, value)| *sum += *factor * *value);
                }
            }
        }
        expected.as_flattened_mut().as_flattened_mut().iter_mut().for_each(|sum| *sum += E::from(1.0));
        for add in [add::<E, PRODUCTS>, add_each::<E, PRODUCTS, true>, add_each::<E, PRODUCTS, false>] {
            let mut found = [[[E::from(1.0); COLUMNS]; ROWS]; PRODUCTS];
            add(&left, right, found.each_mut());
            assert_eq!(found, expected);
        }
    }

    #[test]
    fn every_instruction_set_gives_the_same_bits_where_products_are_exact() {
        // Of very different size, so that sums round.
        every_instruction_set_gives_the_same_bits::<f64>(|i| {
            ((i * 7919 % 1000) as f32 - 499.5) * 10f32.powi((i * 31 % 12) as i32 - 6)
        });
        every_instruction_set_gives_the_same_bits::<f32>(|i| {
            ((i * 7919 % 1000) as f32 - 499.5) * 2f32.powi((i * 31 % 12) as i32 - 6)
        });
    }
}
