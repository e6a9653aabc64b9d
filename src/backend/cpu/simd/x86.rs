//! Vectors of x86-64 processors: AVX-512 and AVX2.

use std::arch::x86_64::*;

use super::vector::{Simd, SimdOp};

#[derive(Clone, Copy)]
pub struct Avx512;

#[derive(Clone, Copy)]
pub struct Avx2;

/// Implements an instruction set. Its users know that the processor has it, see [`Simd`].
macro_rules! instruction_set {
    (
        $set:ident, $vector:ty, $lanes:literal, $features:literal, $splat:ident, $load:ident, $store:ident,
        sum($summed:ident) = $sum:expr;
        $($name:ident($($arg:ident),*) = $body:expr;)*
    ) => {
        impl Simd for $set {
            type V = $vector;
            const LANES: usize = $lanes;

            #[inline(always)]
            unsafe fn enter<O: SimdOp>(op: O) {
                #[target_feature(enable = $features)]
                unsafe fn inside<O: SimdOp>(op: O) {
                    // SAFETY: by the contract of `enter`.
                    unsafe { op.run::<$set>() }
                }
                // SAFETY: the processor has the instruction set, by this function's contract.
                unsafe { inside(op) }
            }

            #[inline(always)]
            fn prefetch(at: *const f32) {
                // SAFETY: a prefetch never faults.
                unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
            }

            #[inline(always)]
            fn splat(value: f32) -> $vector {
                // SAFETY: the processor has the instruction set, see `Simd`.
                unsafe { $splat(value) }
            }

            #[inline(always)]
            unsafe fn load(from: *const f32) -> $vector {
                // SAFETY: by this function's contract.
                unsafe { $load(from) }
            }

            #[inline(always)]
            unsafe fn store(into: *mut f32, v: $vector) {
                // SAFETY: by this function's contract.
                unsafe { $store(into, v) }
            }

            #[inline(always)]
            fn sum($summed: $vector) -> f32 {
                // SAFETY: the processor has the instruction set, see `Simd`.
                unsafe { $sum }
            }

            $(
                #[inline(always)]
                fn $name($($arg: $vector),*) -> $vector {
                    // SAFETY: the processor has the instruction set, see `Simd`.
                    unsafe { $body }
                }
            )*
        }
    };
}

instruction_set! {
    Avx512, __m512, 16, "avx512f,avx2,fma", _mm512_set1_ps, _mm512_loadu_ps, _mm512_storeu_ps,
    sum(a) = _mm512_reduce_add_ps(a);
    add(a, b) = _mm512_add_ps(a, b);
    sub(a, b) = _mm512_sub_ps(a, b);
    mul(a, b) = _mm512_mul_ps(a, b);
    fma(a, b, c) = _mm512_fmadd_ps(a, b, c);
    max(a, b) = _mm512_max_ps(a, b);
    min(a, b) = _mm512_min_ps(a, b);
    round(a) = _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a);
    scale(a, n) = _mm512_scalef_ps(a, n);
    reciprocal(a) = {
        // 14 bits, then one Newton step: much cheaper than a division.
        let r = _mm512_rcp14_ps(a);
        _mm512_fmadd_ps(r, _mm512_fnmadd_ps(a, r, _mm512_set1_ps(1.0)), r)
    };
}

instruction_set! {
    Avx2, __m256, 8, "avx2,fma", _mm256_set1_ps, _mm256_loadu_ps, _mm256_storeu_ps,
    sum(a) = {
        let four = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
    };
    add(a, b) = _mm256_add_ps(a, b);
    sub(a, b) = _mm256_sub_ps(a, b);
    mul(a, b) = _mm256_mul_ps(a, b);
    fma(a, b, c) = _mm256_fmadd_ps(a, b, c);
    max(a, b) = _mm256_max_ps(a, b);
    min(a, b) = _mm256_min_ps(a, b);
    round(a) = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a);
    scale(a, n) = {
        let exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
        _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent)))
    };
    reciprocal(a) = _mm256_div_ps(_mm256_set1_ps(1.0), a);
}
