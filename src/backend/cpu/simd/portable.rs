//! Plain Rust vectors of four lanes, for every processor. The compiler maps them to the target's baseline.

use half::bf16;

use super::vector::{Simd, SimdOp};

#[derive(Clone, Copy)]
pub struct Portable;

#[derive(Clone, Copy)]
#[repr(align(16))]
pub struct Quad([f32; 4]);

impl Quad {
    #[inline(always)]
    fn zip(a: Quad, b: Quad, f: impl Fn(f32, f32) -> f32) -> Quad {
        Quad([f(a.0[0], b.0[0]), f(a.0[1], b.0[1]), f(a.0[2], b.0[2]), f(a.0[3], b.0[3])])
    }
}

/// Functions of two vectors, lane by lane.
macro_rules! lanewise {
    ($($name:ident($a:ident, $b:ident) = $body:expr;)*) => {
        $(
            #[inline(always)]
            fn $name(a: Quad, b: Quad) -> Quad {
                Quad::zip(a, b, |$a, $b| $body)
            }
        )*
    };
}

impl Simd for Portable {
    type V = Quad;
    type Pairs = [Quad; 2];
    const LANES: usize = 4;

    #[inline(always)]
    unsafe fn enter<O: SimdOp>(op: O) {
        // SAFETY: by this function's contract; plain Rust runs everywhere.
        unsafe { op.run::<Portable>() }
    }

    #[inline(always)]
    fn splat(value: f32) -> Quad {
        Quad([value; 4])
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Quad {
        // SAFETY: `from` has four values, by this function's contract.
        Quad(unsafe { from.cast::<[f32; 4]>().read_unaligned() })
    }

    #[inline(always)]
    unsafe fn store(into: *mut f32, v: Quad) {
        // SAFETY: `into` has room for four values, by this function's contract.
        unsafe { into.cast::<[f32; 4]>().write_unaligned(v.0) }
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16) -> Quad {
        // SAFETY: `from` has four values, by this function's contract.
        Quad(unsafe { from.cast::<[bf16; 4]>().read_unaligned() }.map(bf16::to_f32))
    }

    #[inline(always)]
    unsafe fn store_bf16(into: *mut bf16, v: Quad) {
        // SAFETY: `into` has room for four values, by this function's contract.
        unsafe { into.cast::<[bf16; 4]>().write_unaligned(v.0.map(bf16::from_f32)) }
    }

    #[inline(always)]
    unsafe fn load_pairs(from: *const bf16) -> [Quad; 2] {
        // SAFETY: `from` has four pairs, by this function's contract.
        let pairs = unsafe { from.cast::<[[bf16; 2]; 4]>().read_unaligned() };
        [0, 1].map(|i| Quad(pairs.map(|pair| pair[i].to_f32())))
    }

    #[inline(always)]
    unsafe fn splat_pair(from: *const bf16) -> [Quad; 2] {
        // SAFETY: `from` has a pair, by this function's contract.
        unsafe { from.cast::<[bf16; 2]>().read_unaligned() }.map(|value| Self::splat(value.to_f32()))
    }

    #[inline(always)]
    fn dot_pairs(a: [Quad; 2], b: [Quad; 2], sum: Quad) -> Quad {
        Self::fma(a[1], b[1], Self::fma(a[0], b[0], sum))
    }

    lanewise! {
        add(a, b) = a + b;
        sub(a, b) = a - b;
        mul(a, b) = a * b;
        max(a, b) = if a > b { a } else { b };
        min(a, b) = if a < b { a } else { b };
        scale(a, n) = a * f32::from_bits(((n as i32 + 127) as u32) << 23);
    }

    #[inline(always)]
    fn fma(a: Quad, b: Quad, c: Quad) -> Quad {
        // Without the instruction, `mul_add` is a call to the C library per value.
        Self::add(Self::mul(a, b), c)
    }

    #[inline(always)]
    fn round(a: Quad) -> Quad {
        // Adding 1.5 * 2^23 leaves no bits for a fraction.
        const SHIFT: f32 = 12_582_912.0;
        let shift = Self::splat(SHIFT);
        Self::sub(Self::add(a, shift), shift)
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
