//! Vectors of x86-64 processors: AVX-512, with and without its bf16 instructions, and AVX2.

use std::arch::x86_64::*;

use half::bf16;

use super::vector::{Simd, SimdOp};

#[derive(Clone, Copy)]
pub struct Avx512;

#[derive(Clone, Copy)]
pub struct Avx512Bf16;

/// The vectors of [`Avx512Bf16`], with convolutions on AMX tiles.
#[derive(Clone, Copy)]
pub struct Amx;

#[derive(Clone, Copy)]
pub struct Avx2;

/// Implements an instruction set. Its users know that the processor has it, see [`Simd`].
macro_rules! instruction_set {
    (
        $set:ident, $vector:ty, $lanes:literal, $features:literal, $splat:ident, $load:ident, $store:ident,
        sum($summed:ident) = $sum:expr;
        pairs($pairs:ty);
        load_bf16($bf16_from:ident) = $load_bf16:expr;
        store_bf16($bf16_into:ident, $bf16_v:ident) = $store_bf16:expr;
        load_pairs($pairs_from:ident) = $load_pairs:expr;
        splat_pair($pair_from:ident) = $splat_pair:expr;
        dot_pairs($dot_a:ident, $dot_b:ident, $dot_sum:ident) = $dot_pairs:expr;
        $($name:ident($($arg:ident),*) = $body:expr;)*
    ) => {
        impl Simd for $set {
            type V = $vector;
            type Pairs = $pairs;
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
            fn prefetch_later(at: *const f32) {
                // SAFETY: a prefetch never faults.
                unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
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
            unsafe fn load_bf16($bf16_from: *const bf16) -> $vector {
                // SAFETY: by this function's contract.
                unsafe { $load_bf16 }
            }

            #[inline(always)]
            unsafe fn store_bf16($bf16_into: *mut bf16, $bf16_v: $vector) {
                // SAFETY: by this function's contract.
                unsafe { $store_bf16 }
            }

            #[inline(always)]
            unsafe fn load_pairs($pairs_from: *const bf16) -> $pairs {
                // SAFETY: by this function's contract.
                unsafe { $load_pairs }
            }

            #[inline(always)]
            unsafe fn splat_pair($pair_from: *const bf16) -> $pairs {
                // SAFETY: by this function's contract.
                unsafe { $splat_pair }
            }

            #[inline(always)]
            fn dot_pairs($dot_a: $pairs, $dot_b: $pairs, $dot_sum: $vector) -> $vector {
                // SAFETY: the processor has the instruction set, see `Simd`.
                unsafe { $dot_pairs }
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

/// The AVX-512 sets differ in their features and in what they do with bf16.
macro_rules! avx512_set {
    ($set:ident, $features:literal, $($bf16:tt)*) => {
        instruction_set! {
            $set, __m512, 16, $features, _mm512_set1_ps, _mm512_loadu_ps, _mm512_storeu_ps,
            sum(a) = _mm512_reduce_add_ps(a);
            $($bf16)*
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
            rough_reciprocal(a) = _mm512_rcp14_ps(a);
        }
    };
}

avx512_set! {
    Avx512, "avx512f,avx2,fma",
    pairs([__m512; 2]);
    load_bf16(from) =
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()))));
    store_bf16(into, v) = {
        let bits = _mm512_castps_si512(v);
        let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v, v);
        let rounded = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0_0000));
        _mm256_storeu_si256(into.cast(), _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(rounded)))
    };
    load_pairs(from) = split512(_mm512_loadu_si512(from.cast()));
    splat_pair(from) = split512(_mm512_set1_epi32(from.cast::<i32>().read_unaligned()));
    dot_pairs(a, b, sum) = _mm512_fmadd_ps(a[1], b[1], _mm512_fmadd_ps(a[0], b[0], sum));
}

/// The sets that have the instructions for bf16.
macro_rules! native_bf16_set {
    ($set:ident) => {
        avx512_set! {
            $set, "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma",
            pairs(__m512bh);
            load_bf16(from) =
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()))));
            store_bf16(into, v) = into.cast::<__m256bh>().write_unaligned(_mm512_cvtneps_pbh(v));
            load_pairs(from) = from.cast::<__m512bh>().read_unaligned();
            splat_pair(from) =
                std::mem::transmute::<__m512i, __m512bh>(_mm512_set1_epi32(from.cast::<i32>().read_unaligned()));
            dot_pairs(a, b, sum) = _mm512_dpbf16_ps(sum, a, b);
            rough_exp2(a) = {
                // 2^r from 0 to 1. Scaling takes the integer part of `a` itself, whatever its size.
                let r = _mm512_reduce_ps::<{ _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC }>(a);
                let p = _mm512_fmadd_ps(_mm512_set1_ps(0.078_024_51), r, _mm512_set1_ps(0.226_067_19));
                let p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.695_833_56));
                _mm512_scalef_ps(_mm512_fmadd_ps(p, r, _mm512_set1_ps(0.999_925_26)), a)
            };
        }
    };
}

native_bf16_set!(Avx512Bf16);
native_bf16_set!(Amx);

/// The low and the high bf16 of each lane, as f32.
#[target_feature(enable = "avx512f")]
#[inline]
fn split512(pairs: __m512i) -> [__m512; 2] {
    let high = _mm512_and_si512(pairs, _mm512_set1_epi32(0xffff_0000_u32 as i32));
    [_mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs)), _mm512_castsi512_ps(high)]
}

/// As [`split512`].
#[target_feature(enable = "avx2")]
#[inline]
fn split256(pairs: __m256i) -> [__m256; 2] {
    let high = _mm256_and_si256(pairs, _mm256_set1_epi32(0xffff_0000_u32 as i32));
    [_mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs)), _mm256_castsi256_ps(high)]
}

instruction_set! {
    Avx2, __m256, 8, "avx2,fma", _mm256_set1_ps, _mm256_loadu_ps, _mm256_storeu_ps,
    sum(a) = {
        let four = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
    };
    pairs([__m256; 2]);
    load_bf16(from) =
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()))));
    store_bf16(into, v) = {
        let bits = _mm256_castps_si256(v);
        let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
        let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
        let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(v, v));
        let rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0_0000), nan);
        let high = _mm256_srli_epi32::<16>(rounded);
        let packed = _mm256_permute4x64_epi64::<0b1000>(_mm256_packus_epi32(high, high));
        _mm_storeu_si128(into.cast(), _mm256_castsi256_si128(packed))
    };
    load_pairs(from) = split256(_mm256_loadu_si256(from.cast()));
    splat_pair(from) = split256(_mm256_set1_epi32(from.cast::<i32>().read_unaligned()));
    dot_pairs(a, b, sum) = _mm256_fmadd_ps(a[1], b[1], _mm256_fmadd_ps(a[0], b[0], sum));
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
