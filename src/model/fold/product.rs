//! The matrix product of folding. Its factors are sums of a few values of the file, so a product of two need not be exact
//! in f64: without fused multiplication the last bit of a sum may be another. Every sum has the same order.

/// Columns of a product.
pub(super) const COLUMNS: usize = 16;
/// Rows of a product.
pub(super) const ROWS: usize = 8;

/// Terms of a product that are summed at a time: with them, both factors stay in cache.
pub(super) const TERMS: usize = 64;

/// Adds the product of `left`, transposed, and `right`.
pub(super) fn add(left: &[[f64; ROWS]], right: &[[f64; COLUMNS]], into: &mut [[f64; COLUMNS]; ROWS]) {
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
    add_rows::<{ cfg!(target_arch = "aarch64") }>(left, right, into);
}

/// By intrinsics, because the compiler keeps these sums in memory.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn add_avx512(left: &[[f64; ROWS]], right: &[[f64; COLUMNS]], into: &mut [[f64; COLUMNS]; ROWS]) {
    use std::arch::x86_64::*;
    const LANES: usize = COLUMNS / 2;
    // From zero, so that nothing waits for the sums before.
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
fn add_avx2(left: &[[f64; ROWS]], right: &[[f64; COLUMNS]], into: &mut [[f64; COLUMNS]; ROWS]) {
    add_rows::<true>(left, right, into);
}

/// Two rows at a time have their sums in registers.
#[inline(always)]
fn add_rows<const FUSED: bool>(left: &[[f64; ROWS]], right: &[[f64; COLUMNS]], into: &mut [[f64; COLUMNS]; ROWS]) {
    for (pair, into) in into.as_chunks_mut::<2>().0.iter_mut().enumerate() {
        let mut sums = [[0.0; COLUMNS]; 2];
        for (left, right) in left.iter().zip(right) {
            for (sums, factor) in sums.iter_mut().zip(&left[2 * pair..][..2]) {
                for (sum, value) in sums.iter_mut().zip(right) {
                    *sum = if FUSED { factor.mul_add(*value, *sum) } else { factor * value + *sum };
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

    #[test]
    fn every_instruction_set_gives_the_same_bits_where_products_are_exact() {
        // f32 values of very different size, so that sums round.
        let value = |i: usize| f64::from(((i * 7919 % 1000) as f32 - 499.5) * 10f32.powi((i * 31 % 12) as i32 - 6));
        let left: [[f64; ROWS]; 37] = std::array::from_fn(|t| std::array::from_fn(|r| value(t * ROWS + r)));
        let right: [[f64; COLUMNS]; 37] = std::array::from_fn(|t| std::array::from_fn(|c| value(t * 17 + c + 5)));
        let mut expected = [[0.0; COLUMNS]; ROWS];
        for (left, right) in left.iter().zip(&right) {
            for (factor, into) in left.iter().zip(&mut expected) {
                into.iter_mut().zip(right).for_each(|(sum, value)| *sum += factor * value);
            }
        }
        expected.as_flattened_mut().iter_mut().for_each(|sum| *sum += 1.0);
        for add in [add, add_rows::<false>] {
            let mut found = [[1.0; COLUMNS]; ROWS];
            add(&left, &right, &mut found);
            assert_eq!(found, expected);
        }
    }
}
