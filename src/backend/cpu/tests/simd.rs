//! Functions of vectors, against f64.

use super::*;
use crate::backend::cpu::simd::{Simd, SimdOp, exp, rough_silu, silu, with_bf16_simd};

/// Applies the functions to `from`.
struct Apply<'a> {
    from: &'a [f32],
    exp: &'a mut [f32],
    silu: &'a mut [f32],
    rough: &'a mut [f32],
}

impl SimdOp for Apply<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        for at in (0..self.from.len()).step_by(S::LANES) {
            // SAFETY: the slices are equally long, a multiple of every number of lanes.
            unsafe {
                let x = S::load(self.from.as_ptr().add(at));
                S::store(self.exp.as_mut_ptr().add(at), exp::<S>(x));
                S::store(self.silu.as_mut_ptr().add(at), silu::<S>(x));
                S::store(self.rough.as_mut_ptr().add(at), rough_silu::<S>(x));
            }
        }
    }
}

#[test]
fn exp_and_silu_are_accurate() {
    let from: Vec<f32> = (0..64_000).map(|i| (i as f32 - 32_000.0) / 32_000.0 * 86.0).collect();
    for instructions in Instructions::available(Precision::Bf16) {
        let [mut e, mut s, mut r] = [(); 3].map(|()| vec![0.0; from.len()]);
        let op = Apply { from: &from, exp: &mut e, silu: &mut s, rough: &mut r };
        // SAFETY: the instruction set is available.
        with_bf16_simd!(instructions, S => unsafe { S::enter(op) });
        for (i, x) in from.iter().enumerate() {
            let x = f64::from(*x);
            let error = (f64::from(e[i]) / x.exp() - 1.0).abs();
            assert!(error < 2.5e-7, "{instructions:?}: exp({x}) is off by {error}");
            let exact = x / (1.0 + (-x).exp());
            let error = (f64::from(s[i]) - exact).abs() / exact.abs().max(1e-30);
            assert!(error < 4e-7 || x < -79.0, "{instructions:?}: silu({x}) is off by {error}");
            let error = (f64::from(r[i]) - exact).abs() / exact.abs().max(1e-30);
            assert!(error < 2e-4 || x < -79.0, "{instructions:?}: rough silu({x}) is off by {error}");
        }
    }
}

#[test]
fn exp_and_silu_take_nan_and_infinity() {
    let mut from = [0.0f32; 16];
    from[..4].copy_from_slice(&[f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -1e30]);
    for instructions in Instructions::available(Precision::Bf16) {
        let [mut e, mut s, mut r] = [[0.0; 16]; 3];
        let op = Apply { from: &from, exp: &mut e, silu: &mut s, rough: &mut r };
        // SAFETY: the instruction set is available.
        with_bf16_simd!(instructions, S => unsafe { S::enter(op) });
        assert!(e[0].is_nan() && s[0].is_nan() && r[0].is_nan());
        assert!(e[1] > 1e38 && s[1] == f32::INFINITY && r[1] == f32::INFINITY);
        assert!(e[2] < 1e-37 && e[3] < 1e-37);
        assert!(s[3].abs() < 1e-3 && r[3].abs() < 1e-3);
    }
}
