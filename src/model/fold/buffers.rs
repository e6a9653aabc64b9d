//! The memory that folding takes, kept by each thread from block to block.

use crate::error::Result;
use crate::reserve;

/// Bytes of a cache line.
const LINE: usize = 64;
/// What [`aligned`] takes beside the values.
pub(super) const ALIGNMENT_BYTES: u64 = (LINE - size_of::<f64>()) as u64;

/// The first `count` values of a buffer, grown where it has fewer. They begin with a cache line, because vectors that lie in two
/// are loaded at half the rate.
pub(super) fn aligned(buffer: &mut Vec<f64>, count: usize) -> Result<&mut [f64]> {
    let buffer = reserve::grown("folding", buffer, count + LINE / size_of::<f64>() - 1)?;
    let first = buffer.as_ptr().align_offset(LINE);
    Ok(&mut buffer[first..][..count])
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
    pub(super) conv: Vec<f64>,
    pub(super) products: Vec<f64>,
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
