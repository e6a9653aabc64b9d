//! Vectors of aarch64 processors: NEON, and its products of bf16 where the processor has them.
//! By inline assembly where the compiler's own functions are not stable.

use std::arch::aarch64::*;
use std::arch::asm;

use half::bf16;

use super::bf16::{Bf16Kernels, BlockProduct, TILE, WEIGHT_TILE};
use super::vector::{PANEL, Simd, SimdOp};

#[derive(Clone, Copy)]
pub struct Neon;

/// The vectors of [`Neon`], with convolutions by `bfmmla`.
#[derive(Clone, Copy)]
pub struct NeonBf16;

/// Implements an instruction set. Its users know that the processor has it, see [`Simd`].
macro_rules! instruction_set {
    ($set:ident, $features:literal, $($name:ident($($arg:ident),*) = $body:expr;)*) => {
        impl Simd for $set {
            type V = float32x4_t;
            type Pairs = [float32x4_t; 2];
            const LANES: usize = 4;

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
                unsafe { asm!("prfm pldl1keep, [{}]", in(reg) at, options(nostack, readonly, preserves_flags)) }
            }

            #[inline(always)]
            fn prefetch_later(at: *const f32) {
                // SAFETY: a prefetch never faults.
                unsafe { asm!("prfm pldl2keep, [{}]", in(reg) at, options(nostack, readonly, preserves_flags)) }
            }

            #[inline(always)]
            fn splat(value: f32) -> float32x4_t {
                // SAFETY: every aarch64 processor has NEON; so below.
                unsafe { vdupq_n_f32(value) }
            }

            #[inline(always)]
            unsafe fn load(from: *const f32) -> float32x4_t {
                // SAFETY: by this function's contract.
                unsafe { vld1q_f32(from) }
            }

            #[inline(always)]
            unsafe fn store(into: *mut f32, v: float32x4_t) {
                // SAFETY: by this function's contract.
                unsafe { vst1q_f32(into, v) }
            }

            #[inline(always)]
            unsafe fn load_bf16(from: *const bf16) -> float32x4_t {
                // SAFETY: by this function's contract.
                unsafe { vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(from.cast()))) }
            }

            #[inline(always)]
            unsafe fn store_bf16(into: *mut bf16, v: float32x4_t) {
                // SAFETY: by this function's contract.
                unsafe {
                    let bits = vreinterpretq_u32_f32(v);
                    let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
                    let rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
                    let rounded = vbslq_u32(vceqq_f32(v, v), rounded, vdupq_n_u32(0x7fc0_0000));
                    vst1_u16(into.cast(), vshrn_n_u32::<16>(rounded));
                }
            }

            #[inline(always)]
            unsafe fn load_pairs(from: *const bf16) -> [float32x4_t; 2] {
                // SAFETY: by this function's contract.
                split(unsafe { vreinterpretq_u32_u16(vld1q_u16(from.cast())) })
            }

            #[inline(always)]
            unsafe fn splat_pair(from: *const bf16) -> [float32x4_t; 2] {
                // SAFETY: by this function's contract.
                split(unsafe { vdupq_n_u32(from.cast::<u32>().read_unaligned()) })
            }

            #[inline(always)]
            fn dot_pairs(a: [float32x4_t; 2], b: [float32x4_t; 2], sum: float32x4_t) -> float32x4_t {
                Self::fma(a[1], b[1], Self::fma(a[0], b[0], sum))
            }

            #[inline(always)]
            fn sum(a: float32x4_t) -> f32 {
                // SAFETY: NEON.
                unsafe { vaddvq_f32(a) }
            }

            $(
                #[inline(always)]
                fn $name($($arg: float32x4_t),*) -> float32x4_t {
                    // SAFETY: NEON.
                    unsafe { $body }
                }
            )*
        }
    };
    ($($set:ident: $features:literal),*) => {
        $(instruction_set! {
            $set, $features,
            add(a, b) = vaddq_f32(a, b);
            sub(a, b) = vsubq_f32(a, b);
            mul(a, b) = vmulq_f32(a, b);
            fma(a, b, c) = vfmaq_f32(c, a, b);
            max(a, b) = vbslq_f32(vcgtq_f32(a, b), a, b);
            min(a, b) = vbslq_f32(vcltq_f32(a, b), a, b);
            round(a) = vrndnq_f32(a);
            scale(a, n) = {
                let exponent = vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127));
                vmulq_f32(a, vreinterpretq_f32_s32(vshlq_n_s32::<23>(exponent)))
            };
            reciprocal(a) = vdivq_f32(vdupq_n_f32(1.0), a);
            rough_reciprocal(a) = {
                // 8 bits, then one Newton step.
                let r = vrecpeq_f32(a);
                vmulq_f32(r, vrecpsq_f32(a, r))
            };
        })*
    };
}

instruction_set!(Neon: "neon", NeonBf16: "neon,bf16");

/// The low and the high bf16 of each lane, as f32.
#[inline(always)]
fn split(pairs: uint32x4_t) -> [float32x4_t; 2] {
    // SAFETY: NEON.
    unsafe {
        let high = vandq_u32(pairs, vdupq_n_u32(0xffff_0000));
        [vreinterpretq_f32_u32(vshlq_n_u32::<16>(pairs)), vreinterpretq_f32_u32(high)]
    }
}

impl Bf16Kernels for Neon {}

impl Bf16Kernels for NeonBf16 {
    unsafe fn product(block: &BlockProduct) {
        for tile in 0..block.tiles {
            for (position, channel) in [(0, 0), (0, 8), (8, 0), (8, 8)] {
                // SAFETY: by this function's contract.
                unsafe { products_8x8(block, tile, position, channel) }
            }
        }
    }
}

/// Eight positions times eight output channels. Each sum is a square of two positions and two channels.
///
/// # Safety
/// As [`Bf16Kernels::product`].
#[target_feature(enable = "neon,bf16")]
unsafe fn products_8x8(block: &BlockProduct, tile: usize, position: usize, channel: usize) {
    // SAFETY: inside the tile's positions and the panel, by this function's contract.
    unsafe {
        let out = block.out.add((tile * TILE + position) * PANEL + channel);
        // Four channels of a position, and of the next one.
        let rows = |i: usize, j: usize| [out.add(2 * i * PANEL + 4 * j), out.add((2 * i + 1) * PANEL + 4 * j)];
        let mut sum = [[vdupq_n_f32(0.0); 4]; 4];
        if block.add {
            for (i, sum) in sum.iter_mut().enumerate() {
                for j in 0..2 {
                    let [first, second] = rows(i, j).map(|row| vreinterpretq_f64_f32(vld1q_f32(row)));
                    sum[2 * j] = vreinterpretq_f32_f64(vzip1q_f64(first, second));
                    sum[2 * j + 1] = vreinterpretq_f32_f64(vzip2q_f64(first, second));
                }
            }
        }
        let mut weights = block.weights.add(2 * channel);
        for channels in 0..block.blocks {
            let at = block.at[tile].add(channels * block.block + position * block.step);
            for tap in block.taps {
                for pair in (0..TILE).step_by(2) {
                    multiply(&mut sum, at.add(*tap + 2 * pair), block.step, weights.add(pair * 2 * TILE));
                }
                weights = weights.wrapping_add(WEIGHT_TILE);
            }
        }
        for (i, sum) in sum.iter().enumerate() {
            for j in 0..2 {
                let [first, second] = [sum[2 * j], sum[2 * j + 1]].map(|sum| vreinterpretq_f64_f32(sum));
                let [above, below] = rows(i, j);
                vst1q_f32(above, vreinterpretq_f32_f64(vzip1q_f64(first, second)));
                vst1q_f32(below, vreinterpretq_f32_f64(vzip2q_f64(first, second)));
            }
        }
    }
}

/// Four input channels of eight positions, `step` apart, times two rows of pairs of weights.
///
/// # Safety
/// `at` has the positions and `weights` the rows.
#[target_feature(enable = "neon,bf16")]
#[inline]
unsafe fn multiply(sum: &mut [[float32x4_t; 4]; 4], at: *const bf16, step: usize, weights: *const bf16) {
    // SAFETY: by this function's contract.
    unsafe {
        let row = |at: *const bf16| vreinterpretq_u32_u16(vld1q_u16(at.cast()));
        let [left, right] = [0, 8].map(|at| (row(weights.add(at)), row(weights.add(2 * TILE + at))));
        // Four input channels of two output channels each.
        let channels = [
            vzip1q_u32(left.0, left.1),
            vzip2q_u32(left.0, left.1),
            vzip1q_u32(right.0, right.1),
            vzip2q_u32(right.0, right.1),
        ];
        for (i, sum) in sum.iter_mut().enumerate() {
            let four = |position: usize| vld1_u16(at.add(position * step).cast());
            let positions = vcombine_u16(four(2 * i), four(2 * i + 1));
            for (sum, channels) in sum.iter_mut().zip(channels) {
                asm!(
                    "bfmmla {0:v}.4s, {1:v}.8h, {2:v}.8h",
                    inout(vreg) *sum, in(vreg) positions, in(vreg) channels,
                    options(pure, nomem, nostack, preserves_flags),
                );
            }
        }
    }
}
