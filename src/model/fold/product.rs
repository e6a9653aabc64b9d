//! The matrix product of folding. Both factors are values of the file, at most f32. So each product of two is exact in
//! f64, and a fused multiplication gives the same bits as two operations.

/// Columns of a product.
pub(super) const COLUMNS: usize = 16;
/// Rows of a product are a multiple of this.
pub(super) const ROWS: usize = 8;

/// Adds the product of `left`, transposed, and `right`. `left` is [term][row], `right` [term][column].
pub(super) fn add(left: &[f64], right: &[[f64; COLUMNS]], into: &mut [[f64; COLUMNS]]) {
    assert!(into.len().is_multiple_of(ROWS) && left.len() == right.len() * into.len());
    #[cfg(target_arch = "x86_64")]
    {
        if std::arch::is_x86_feature_detected!("avx512f") {
            // SAFETY: the processor has the instructions.
            return unsafe { add_avx512(left, right, into) };
        }
        if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
            // SAFETY: as above.
            return unsafe { add_avx2(left, right, into) };
        }
    }
    // Where fused multiplication is no instruction, it is a slow function.
    add_tiles::<{ cfg!(target_arch = "aarch64") }>(left, right, into);
}

/// By intrinsics, because the compiler keeps these sums in memory.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn add_avx512(left: &[f64], right: &[[f64; COLUMNS]], into: &mut [[f64; COLUMNS]]) {
    use std::arch::x86_64::*;
    const LANES: usize = COLUMNS / 2;
    let rows = into.len();
    for (tile, into) in into.as_chunks_mut::<ROWS>().0.iter_mut().enumerate() {
        let into: &mut [[f64; LANES]] = into.as_flattened_mut().as_chunks_mut().0;
        let mut sums = [_mm512_setzero_pd(); 2 * ROWS];
        for (sum, from) in sums.iter_mut().zip(&*into) {
            // SAFETY: eight elements.
            *sum = unsafe { _mm512_loadu_pd(from.as_ptr()) };
        }
        for (left, right) in left.chunks_exact(rows).zip(right) {
            let left = &left[tile * ROWS..][..ROWS];
            // SAFETY: sixteen elements.
            let right = unsafe { [_mm512_loadu_pd(right.as_ptr()), _mm512_loadu_pd(right[LANES..].as_ptr())] };
            for (factor, sums) in left.iter().zip(sums.as_chunks_mut::<2>().0) {
                let factor = _mm512_set1_pd(*factor);
                sums[0] = _mm512_fmadd_pd(factor, right[0], sums[0]);
                sums[1] = _mm512_fmadd_pd(factor, right[1], sums[1]);
            }
        }
        for (sum, to) in sums.iter().zip(into) {
            // SAFETY: eight elements.
            unsafe { _mm512_storeu_pd(to.as_mut_ptr(), *sum) };
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn add_avx2(left: &[f64], right: &[[f64; COLUMNS]], into: &mut [[f64; COLUMNS]]) {
    add_tiles::<true>(left, right, into);
}

/// Two rows at a time have their sums in registers.
#[inline(always)]
fn add_tiles<const FUSED: bool>(left: &[f64], right: &[[f64; COLUMNS]], into: &mut [[f64; COLUMNS]]) {
    let rows = into.len();
    for (tile, into) in into.as_chunks_mut::<2>().0.iter_mut().enumerate() {
        let mut sums = *into;
        for (left, right) in left.chunks_exact(rows).zip(right) {
            for (sums, factor) in sums.iter_mut().zip(&left[2 * tile..][..2]) {
                for (sum, value) in sums.iter_mut().zip(right) {
                    *sum = if FUSED { factor.mul_add(*value, *sum) } else { factor * value + *sum };
                }
            }
        }
        *into = sums;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_instruction_set_gives_the_same_bits() {
        let (terms, rows) = (37, 3 * ROWS);
        // f32 values of very different size, so that sums round.
        let value = |i: usize| f64::from(((i * 7919 % 1000) as f32 - 499.5) * 10f32.powi((i * 31 % 12) as i32 - 6));
        let left: Vec<f64> = (0..terms * rows).map(value).collect();
        let right: Vec<[f64; COLUMNS]> = (0..terms).map(|t| std::array::from_fn(|c| value(t * 17 + c + 5))).collect();
        let mut expected = vec![[1.0; COLUMNS]; rows];
        for (term, right) in right.iter().enumerate() {
            for (row, into) in expected.iter_mut().enumerate() {
                into.iter_mut().zip(right).for_each(|(sum, value)| *sum += left[term * rows + row] * value);
            }
        }
        let mut found = vec![[1.0; COLUMNS]; rows];
        add(&left, &right, &mut found);
        assert_eq!(found, expected);
        let mut portable = vec![[1.0; COLUMNS]; rows];
        add_tiles::<false>(&left, &right, &mut portable);
        assert_eq!(portable, expected);
    }
}
