//! The memory that folding takes, kept by each thread from block to block.

use super::product::Real;
use crate::error::Result;
use crate::reserve;

/// A cache line. Vectors that lie in two are loaded at half the rate.
#[derive(Clone, Copy, Default)]
#[repr(align(64))]
pub(super) struct Line(#[allow(dead_code)] [u64; 8]);

/// The first `count` values of a buffer, grown where it has fewer. They begin with a cache line.
pub(super) fn aligned<E: Real>(buffer: &mut Vec<Line>, count: usize) -> Result<&mut [E]> {
    let lines = reserve::grown("folding", buffer, (count * size_of::<E>()).div_ceil(size_of::<Line>()))?;
    // SAFETY: the lines have room for them and a larger alignment, and any bits are values.
    Ok(unsafe { std::slice::from_raw_parts_mut(lines.as_mut_ptr().cast(), count) })
}

/// Buffers for folding a block. They grow to what the largest block needs.
#[derive(Default)]
pub struct FoldBuffers<T = f32> {
    /// Values as the file has them.
    pub(super) bytes: Vec<u8>,
    /// The same, widened.
    pub(super) kernels: Vec<f32>,
    /// Of an upsampler: the 1x1x1 convolution, the 3x3x3 one at every point, and their products.
    pub(super) upscale: Vec<f32>,
    pub(super) conv: Vec<Line>,
    pub(super) products: Vec<Line>,
    /// A block of a slab, or of every slab.
    pub(super) plain: Vec<T>,
}

/// Bytes of [`FoldBuffers`], and of what biases take for a moment.
#[derive(Debug, Clone, Copy, Default)]
pub struct FoldBytes {
    pub(super) bytes: u64,
    pub(super) kernels: u64,
    pub(super) upscale: u64,
    pub(super) conv: u64,
    pub(super) products: u64,
    pub(super) plain: u64,
    pub(super) vectors: u64,
}

impl FoldBytes {
    /// Buffers for both.
    pub fn max(self, other: FoldBytes) -> FoldBytes {
        FoldBytes {
            bytes: self.bytes.max(other.bytes),
            kernels: self.kernels.max(other.kernels),
            upscale: self.upscale.max(other.upscale),
            conv: self.conv.max(other.conv),
            products: self.products.max(other.products),
            plain: self.plain.max(other.plain),
            vectors: self.vectors.max(other.vectors),
        }
    }

    pub fn total(self) -> u64 {
        let FoldBytes { bytes, kernels, upscale, conv, products, plain, vectors } = self;
        [bytes, kernels, upscale, conv, products, plain, vectors].iter().sum()
    }
}
