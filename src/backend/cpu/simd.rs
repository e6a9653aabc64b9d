//! Vectors of whatever width the processor has, and the functions of them that the model needs.
//!
//! Code that uses vectors is an [`Op`], written once for every [`Simd`]. [`Simd::enter`] compiles it for the
//! instruction set; everything inside has to be inlined into that, hence `inline(always)` throughout.

use super::kernel::Tile;

/// A piece of work on vectors.
pub(super) trait Op {
    /// # Safety
    /// The pointers in `self` are good for what the operation does with them, and the processor has `S`.
    unsafe fn run<S: Simd>(self);
}

/// An instruction set. Its functions may be called on processors that have it, which [`super::Cpu::new`] makes sure of.
pub(super) trait Simd: Copy + Send + Sync + 'static {
    type V: Copy;
    const LANES: usize;
    /// Pixels of the widest tile of the convolution's kernel: as many as leave its sums in registers.
    const PIXELS: usize;
    /// Channels of a tile of the attention's second product.
    const CHANNELS: usize;

    /// # Safety
    /// As [`Op::run`].
    unsafe fn enter<O: Op>(op: O);
    /// One tile of a convolution of `pixels` pixels, up to [`Simd::PIXELS`].
    ///
    /// # Safety
    /// As [`Op::run`].
    unsafe fn tile(tile: &Tile, pixels: usize);

    /// Brings the cache line at `at` nearer, if it exists.
    #[inline(always)]
    fn prefetch(_at: *const f32) {}
    fn splat(value: f32) -> Self::V;
    /// # Safety
    /// `from` has [`Simd::LANES`] values.
    unsafe fn load(from: *const f32) -> Self::V;
    /// # Safety
    /// `into` has room for [`Simd::LANES`] values.
    unsafe fn store(into: *mut f32, v: Self::V);
    fn add(a: Self::V, b: Self::V) -> Self::V;
    fn sub(a: Self::V, b: Self::V) -> Self::V;
    fn mul(a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, rounded once where the processor can.
    fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The larger; `b` where either is no number.
    fn max(a: Self::V, b: Self::V) -> Self::V;
    /// The smaller; `b` where either is no number.
    fn min(a: Self::V, b: Self::V) -> Self::V;
    /// To the nearest integer, for magnitudes below 2^22.
    fn round(a: Self::V) -> Self::V;
    /// `a * 2^n` for integers `n` from -126 to 127.
    fn scale(a: Self::V, n: Self::V) -> Self::V;
    /// The sum of all lanes.
    fn sum(a: Self::V) -> f32;
    /// `1 / a` to a unit in the last place or so, for `a` from 1 to 2^120.
    fn reciprocal(a: Self::V) -> Self::V;
}

/// `e^x` to about 1e-7 of itself, for `x` from -87 to 88; the nearer of these outside. NaN stays NaN.
#[inline(always)]
pub(super) fn exp<S: Simd>(x: S::V) -> S::V {
    let x = S::min(S::splat(88.0), S::max(S::splat(-87.0), x));
    let n = S::round(S::mul(x, S::splat(std::f32::consts::LOG2_E)));
    // ln 2 in two parts, the first of few enough bits that its product with n is exact.
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
pub(super) fn silu<S: Simd>(x: S::V) -> S::V {
    let e = exp::<S>(S::min(S::splat(80.0), S::sub(S::splat(0.0), x)));
    S::mul(x, S::reciprocal(S::add(S::splat(1.0), e)))
}

/// Plain Rust, for processors we know nothing of. The compiler makes of it what the target's baseline has.
#[derive(Clone, Copy)]
pub(super) struct Portable;

#[derive(Clone, Copy)]
#[repr(align(16))]
pub(super) struct Quad([f32; 4]);

impl Quad {
    #[inline(always)]
    fn zip(a: Quad, b: Quad, f: impl Fn(f32, f32) -> f32) -> Quad {
        Quad([f(a.0[0], b.0[0]), f(a.0[1], b.0[1]), f(a.0[2], b.0[2]), f(a.0[3], b.0[3])])
    }
}

impl Simd for Portable {
    type V = Quad;
    const LANES: usize = 4;
    const PIXELS: usize = 4;
    const CHANNELS: usize = 4;

    #[inline(always)]
    unsafe fn enter<O: Op>(op: O) {
        // SAFETY: the caller vouches for the operation; plain Rust runs everywhere.
        unsafe { op.run::<Portable>() }
    }

    unsafe fn tile(tile: &Tile, pixels: usize) {
        // SAFETY: the caller vouches for the tile.
        unsafe { super::kernel::portable(tile, pixels) }
    }

    #[inline(always)]
    fn splat(value: f32) -> Quad {
        Quad([value; 4])
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Quad {
        // SAFETY: the caller vouches for four values.
        Quad(unsafe { from.cast::<[f32; 4]>().read_unaligned() })
    }

    #[inline(always)]
    unsafe fn store(into: *mut f32, v: Quad) {
        // SAFETY: the caller vouches for room for four values.
        unsafe { into.cast::<[f32; 4]>().write_unaligned(v.0) }
    }

    #[inline(always)]
    fn add(a: Quad, b: Quad) -> Quad {
        Quad::zip(a, b, |a, b| a + b)
    }

    #[inline(always)]
    fn sub(a: Quad, b: Quad) -> Quad {
        Quad::zip(a, b, |a, b| a - b)
    }

    #[inline(always)]
    fn mul(a: Quad, b: Quad) -> Quad {
        Quad::zip(a, b, |a, b| a * b)
    }

    #[inline(always)]
    fn fma(a: Quad, b: Quad, c: Quad) -> Quad {
        // `mul_add` would be a call to the C library on every value where the baseline lacks the instruction.
        Self::add(Self::mul(a, b), c)
    }

    #[inline(always)]
    fn max(a: Quad, b: Quad) -> Quad {
        Quad::zip(a, b, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    fn min(a: Quad, b: Quad) -> Quad {
        Quad::zip(a, b, |a, b| if a < b { a } else { b })
    }

    #[inline(always)]
    fn round(a: Quad) -> Quad {
        // Adding 1.5 * 2^23 leaves no bits for a fraction.
        const SHIFT: f32 = 12_582_912.0;
        let shift = Self::splat(SHIFT);
        Self::sub(Self::add(a, shift), shift)
    }

    #[inline(always)]
    fn scale(a: Quad, n: Quad) -> Quad {
        Quad::zip(a, n, |a, n| a * f32::from_bits(((n as i32 + 127) as u32) << 23))
    }

    #[inline(always)]
    fn sum(a: Quad) -> f32 {
        (a.0[0] + a.0[1]) + (a.0[2] + a.0[3])
    }

    #[inline(always)]
    fn reciprocal(a: Quad) -> Quad {
        Quad::zip(a, a, |a, _| 1.0 / a)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::backend::cpu::Instructions;

    struct Apply<'a> {
        from: &'a [f32],
        exp: &'a mut [f32],
        silu: &'a mut [f32],
    }

    impl Op for Apply<'_> {
        #[inline(always)]
        unsafe fn run<S: Simd>(self) {
            for at in (0..self.from.len()).step_by(S::LANES) {
                // SAFETY: the slices are equally long, a multiple of every number of lanes.
                unsafe {
                    let x = S::load(self.from.as_ptr().add(at));
                    S::store(self.exp.as_mut_ptr().add(at), exp::<S>(x));
                    S::store(self.silu.as_mut_ptr().add(at), silu::<S>(x));
                }
            }
        }
    }

    #[test]
    fn exp_and_silu_are_accurate() {
        let from: Vec<f32> = (0..64_000).map(|i| (i as f32 - 32_000.0) / 32_000.0 * 86.0).collect();
        for instructions in Instructions::available() {
            let (mut e, mut s) = (vec![0.0; from.len()], vec![0.0; from.len()]);
            let op = Apply { from: &from, exp: &mut e, silu: &mut s };
            // SAFETY: the instruction set is available.
            super::super::with_simd!(instructions, S => unsafe { S::enter(op) });
            for (i, x) in from.iter().enumerate() {
                let x = f64::from(*x);
                let error = (f64::from(e[i]) / x.exp() - 1.0).abs();
                assert!(error < 2.5e-7, "{instructions:?}: exp({x}) is off by {error}");
                let exact = x / (1.0 + (-x).exp());
                let error = (f64::from(s[i]) - exact).abs() / exact.abs().max(1e-30);
                assert!(error < 4e-7 || x < -79.0, "{instructions:?}: silu({x}) is off by {error}");
            }
        }
    }

    #[test]
    fn no_number_stays_none_and_the_infinite_stays_sane() {
        let mut from = [0.0f32; 16];
        from[..4].copy_from_slice(&[f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -1e30]);
        for instructions in Instructions::available() {
            let (mut e, mut s) = ([0.0; 16], [0.0; 16]);
            let op = Apply { from: &from, exp: &mut e, silu: &mut s };
            // SAFETY: the instruction set is available.
            super::super::with_simd!(instructions, S => unsafe { S::enter(op) });
            assert!(e[0].is_nan() && s[0].is_nan());
            assert!(e[1] > 1e38 && s[1] == f32::INFINITY);
            assert!(e[2] < 1e-37 && e[3] < 1e-37);
            assert!(s[3].abs() < 1e-3);
        }
    }
}
