//! Launches attention.

use crate::backend::AttentionOp;
use crate::backend::cuda::Cuda;
use crate::backend::cuda::driver::memory::Block;
use crate::backend::cuda::launch::conv::Slots;
use crate::backend::cuda::launch::limits;
use crate::backend::cuda::launch::params::{AttentionParams, MAX_FRAMES};
use crate::backend::cuda::launch::tiling as geometry;
use crate::error::Result;

/// Dynamic shared memory with 128 and with 64 KiB of keys and values, and their scores.
pub const SHARED_128: u32 = (128 + 16) << 10;
pub const SHARED_64: u32 = SHARED_128 / 2;

impl Cuda {
    pub(in crate::backend::cuda) fn launch_attention(&self, block: &Block, op: &AttentionOp) -> Result<()> {
        let shape = op.shape;
        limits::attention(shape.channels)?;
        for frames in op.frames.chunks(MAX_FRAMES) {
            for (from, to) in frames {
                block.at(from.0, self.precision.data_bytes(shape.with_channels(3 * shape.channels)))?;
                block.at(to.0, self.precision.data_bytes(shape))?;
            }
            let input = Slots::new(frames.iter().map(|f| block.address(f.0)), geometry::ALIGN)?;
            let out = Slots::new(frames.iter().map(|f| block.address(f.1)), geometry::ALIGN)?;
            let mut params = AttentionParams {
                input: input.address(),
                out: out.address(),
                in_slot_bytes: input.bytes(),
                out_slot_bytes: out.bytes(),
                pixels: shape.pixels() as i32,
                channels: shape.channels as i32,
                ..AttentionParams::default()
            };
            for (i, (from, to)) in frames.iter().enumerate() {
                (params.in_slot[i], params.out_slot[i]) = (input.of(block.address(*from)), out.of(block.address(*to)));
            }
            // As many warps share 16 queries as an element has bytes.
            let queries = 8 / self.precision.bytes() * 16;
            let grid = [shape.pixels().div_ceil(queries) as u32, frames.len() as u32];
            // SAFETY: the parameters have the kernel's layout and point into `block`, which outlives the stream's work.
            unsafe { self.kernels.attention.collect(&self.stream, grid, 256, &params)? };
        }
        Ok(())
    }
}
