//! Numbers in memory: those of host tensors, and the activations of either precision. Arithmetic is f32 throughout.

use half::{bf16, f16};

use super::simd::{self, Simd};
use crate::backend::Precision;
use crate::ir::FrameShape;

/// A number of a host tensor or of a frame.
pub(super) trait Number: Copy {
    fn value(self) -> f32;
    /// Rounded to nearest. Integers saturate, and take NaN as 0.
    fn of(value: f32) -> Self;
}

macro_rules! numbers {
    ($($number:ty: $value:expr, $of:expr;)*) => {
        $(
            impl Number for $number {
                #[inline(always)]
                fn value(self) -> f32 {
                    $value(self)
                }
                #[inline(always)]
                fn of(value: f32) -> $number {
                    $of(value)
                }
            }
        )*
    };
}

numbers! {
    u8: f32::from, |value: f32| value.round_ties_even() as u8;
    u16: f32::from, |value: f32| value.round_ties_even() as u16;
    f16: f16::to_f32, f16::from_f32;
    bf16: bf16::to_f32, bf16::from_f32;
    f32: f32::from, f32::from;
}

/// An activation.
pub(super) trait Element: Number + Send + Sync + 'static {
    const BYTES: u64 = size_of::<Self>() as u64;
    /// Channels of a patch that are contiguous: one cache line.
    const BLOCK: usize = 64 / size_of::<Self>();

    /// # Safety
    /// `from` has a vector's values, and the processor has `S`.
    unsafe fn load<S: Simd>(from: *const Self) -> S::V;
    /// # Safety
    /// `into` has room for a vector's values, and the processor has `S`.
    unsafe fn store<S: Simd>(into: *mut Self, v: S::V);
    /// A vector as it would be after a store and a load.
    fn rounded<S: Simd>(v: S::V) -> S::V;
    /// As precise as the element.
    fn silu<S: Simd>(v: S::V) -> S::V;
}

impl Element for f32 {
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const f32) -> S::V {
        // SAFETY: by this function's contract.
        unsafe { S::load(from) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(into: *mut f32, v: S::V) {
        // SAFETY: by this function's contract.
        unsafe { S::store(into, v) }
    }
    #[inline(always)]
    fn rounded<S: Simd>(v: S::V) -> S::V {
        v
    }
    #[inline(always)]
    fn silu<S: Simd>(v: S::V) -> S::V {
        simd::silu::<S>(v)
    }
}

impl Element for bf16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const bf16) -> S::V {
        // SAFETY: by this function's contract.
        unsafe { S::load_bf16(from) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(into: *mut bf16, v: S::V) {
        // SAFETY: by this function's contract.
        unsafe { S::store_bf16(into, v) }
    }
    #[inline(always)]
    fn rounded<S: Simd>(v: S::V) -> S::V {
        let mut values = [bf16::ZERO; <bf16 as Element>::BLOCK];
        // SAFETY: no vector is wider than a block.
        unsafe {
            S::store_bf16(values.as_mut_ptr(), v);
            S::load_bf16(values.as_ptr())
        }
    }
    #[inline(always)]
    fn silu<S: Simd>(v: S::V) -> S::V {
        simd::rough_silu::<S>(v)
    }
}

/// Bytes of a frame's pixels. Its statistics follow, as f32.
pub(super) fn pixel_bytes(precision: Precision, shape: FrameShape) -> u64 {
    (shape.elements() * precision.bytes()).next_multiple_of(4)
}

/// Channels of a patch that are contiguous.
pub(super) fn block_channels(precision: Precision) -> usize {
    64 / precision.bytes() as usize
}

/// Runs `$body` with `$element` as the type of an activation.
macro_rules! with_element {
    ($precision:expr, $element:ident => $body:expr) => {
        match $precision {
            $crate::backend::Precision::Bf16 => {
                type $element = half::bf16;
                $body
            }
            _ => {
                type $element = f32;
                $body
            }
        }
    };
}
pub(super) use with_element;
