//! Launches attention.

use super::Cuda;
use super::conv::Slots;
use super::geometry;
use super::limits;
use super::memory::Block;
use super::params::{AttentionParams, MAX_FRAMES};
use crate::backend::AttentionOp;
use crate::error::Result;

/// Dynamic shared memory for 32 and for 16 keys at a time.
pub const SHARED_32: u32 = 2 * 2 * 32 * 1024 + 8 * 16 * 32 * 4;
pub const SHARED_16: u32 = SHARED_32 / 2;
const QUERIES: u64 = 64;

impl Cuda {
    pub(super) fn launch_attention(&self, block: &Block, op: &AttentionOp) -> Result<()> {
        let shape = op.shape;
        limits::attention(shape.channels)?;
        for frames in op.frames.chunks(MAX_FRAMES) {
            let input = Slots::new(frames.iter().map(|f| f.0.0), geometry::ALIGN);
            let out = Slots::new(frames.iter().map(|f| f.1.0), geometry::ALIGN);
            let mut params = AttentionParams {
                input: input.address(block)?,
                out: out.address(block)?,
                in_slot_bytes: input.bytes(),
                out_slot_bytes: out.bytes(),
                pixels: shape.pixels() as i32,
                channels: shape.channels as i32,
                ..AttentionParams::default()
            };
            for (i, (from, to)) in frames.iter().enumerate() {
                (params.in_slot[i], params.out_slot[i]) = (input.of(from.0), out.of(to.0));
            }
            let grid = [shape.pixels().div_ceil(QUERIES) as u32, frames.len() as u32];
            // SAFETY: the parameters have the kernel's layout and point into `block`, which outlives the stream's work.
            unsafe { self.kernels.attention.collect(&self.stream, grid, 256, &params)? };
        }
        Ok(())
    }
}
