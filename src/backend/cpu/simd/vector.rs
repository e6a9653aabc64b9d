//! Vectors of an instruction set, and the functions of them that the model needs.
//! Code on vectors is a [`SimdOp`], written once. [`Simd::enter`] compiles it per instruction set, so all of it must
//! inline: hence `inline(always)` throughout.

use half::bf16;

/// Output channels of a full panel of weights.
pub const PANEL: usize = 32;

/// A piece of work on vectors.
pub trait SimdOp {
    /// # Safety
    /// The pointers in `self` are valid for what the operation reads and writes, and the processor has `S`.
    unsafe fn run<S: Simd>(self);
}

/// An instruction set. Callers must know that the processor has it; [`Cpu::new`](crate::backend::cpu::Cpu::new) checks.
pub trait Simd: Copy + Send + Sync + 'static {
    type V: Copy;
    /// [`Simd::LANES`] pairs of bf16.
    type Pairs: Copy;
    const LANES: usize;

    /// # Safety
    /// As [`SimdOp::run`].
    unsafe fn enter<O: SimdOp>(op: O);

    /// Prefetches the cache line at `at`. The address need not be valid.
    #[inline(always)]
    fn prefetch(_at: *const f32) {}
    /// As [`Simd::prefetch`], into the second-level cache only.
    #[inline(always)]
    fn prefetch_later(_at: *const f32) {}
    fn splat(value: f32) -> Self::V;
    /// # Safety
    /// `from` has [`Simd::LANES`] values.
    unsafe fn load(from: *const f32) -> Self::V;
    /// # Safety
    /// `into` has room for [`Simd::LANES`] values.
    unsafe fn store(into: *mut f32, v: Self::V);
    /// # Safety
    /// `from` has [`Simd::LANES`] values.
    unsafe fn load_bf16(from: *const bf16) -> Self::V;
    /// Rounds to nearest.
    ///
    /// # Safety
    /// `into` has room for [`Simd::LANES`] values.
    unsafe fn store_bf16(into: *mut bf16, v: Self::V);
    /// # Safety
    /// `from` has [`Simd::LANES`] pairs.
    unsafe fn load_pairs(from: *const bf16) -> Self::Pairs;
    /// The same pair in every lane.
    ///
    /// # Safety
    /// `from` has a pair.
    unsafe fn splat_pair(from: *const bf16) -> Self::Pairs;
    /// `sum + a0 * b0 + a1 * b1` of the pairs a and b.
    fn dot_pairs(a: Self::Pairs, b: Self::Pairs, sum: Self::V) -> Self::V;
    fn add(a: Self::V, b: Self::V) -> Self::V;
    fn sub(a: Self::V, b: Self::V) -> Self::V;
    fn mul(a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, rounded once where the processor has the instruction.
    fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The larger; `b` where either is NaN.
    fn max(a: Self::V, b: Self::V) -> Self::V;
    /// The smaller; `b` where either is NaN.
    fn min(a: Self::V, b: Self::V) -> Self::V;
    /// To the nearest integer, for magnitudes below 2^22.
    fn round(a: Self::V) -> Self::V;
    /// `a * 2^n` for integers `n` from -126 to 127.
    fn scale(a: Self::V, n: Self::V) -> Self::V;
    /// The sum of all lanes.
    fn sum(a: Self::V) -> f32;
    /// `1 / a` to about one unit in the last place, for `a` from 1 to 2^120.
    fn reciprocal(a: Self::V) -> Self::V;
    /// `1 / a` to at least 11 bits, for `a` from 1 to 2^120.
    #[inline(always)]
    fn rough_reciprocal(a: Self::V) -> Self::V {
        Self::reciprocal(a)
    }
    /// `2^a` to 1e-4 for `a` from -115 to 115; below that nearly 0, above it at least 2^115. NaN stays NaN.
    #[inline(always)]
    fn rough_exp2(a: Self::V) -> Self::V {
        let a = Self::min(Self::splat(115.0), Self::max(Self::splat(-115.0), a));
        let n = Self::round(a);
        // 2^r from -0.5 to 0.5.
        let r = Self::sub(a, n);
        let mut p = Self::splat(0.055_171_66);
        p = Self::fma(p, r, Self::splat(0.242_611_13));
        p = Self::fma(p, r, Self::splat(0.693_261));
        Self::scale(Self::fma(p, r, Self::splat(0.999_928_1)), n)
    }
}

/// `e^x` to a relative error of about 1e-7; `x` is clamped to -87 to 88. NaN stays NaN.
#[inline(always)]
pub fn exp<S: Simd>(x: S::V) -> S::V {
    let x = S::min(S::splat(88.0), S::max(S::splat(-87.0), x));
    let n = S::round(S::mul(x, S::splat(std::f32::consts::LOG2_E)));
    // ln 2 in two parts. The first has few bits, so its product with n is exact.
    let r = S::fma(n, S::splat(-0.693_359_4), x);
    let r = S::fma(n, S::splat(2.121_944_4e-4), r);
    let mut p = S::splat(1.987_569_1e-4);
    p = S::fma(p, r, S::splat(1.398_2e-3));
    p = S::fma(p, r, S::splat(8.333_452e-3));
    p = S::fma(p, r, S::splat(4.166_579_6e-2));
    p = S::fma(p, r, S::splat(1.666_666_5e-1));
    p = S::fma(p, r, S::splat(0.5));
    p = S::fma(p, S::mul(r, r), S::add(r, S::splat(1.0)));
    S::scale(p, n)
}

/// `x / (1 + e^-x)`.
#[inline(always)]
pub fn silu<S: Simd>(x: S::V) -> S::V {
    let e = exp::<S>(S::min(S::splat(80.0), S::sub(S::splat(0.0), x)));
    S::mul(x, S::reciprocal(S::add(S::splat(1.0), e)))
}

/// `x / (1 + e^-x)` to at least 11 bits, for results that are rounded to bf16.
#[inline(always)]
pub fn rough_silu<S: Simd>(x: S::V) -> S::V {
    let e = S::rough_exp2(S::mul(x, S::splat(-std::f32::consts::LOG2_E)));
    S::mul(x, S::rough_reciprocal(S::add(S::splat(1.0), e)))
}
