//! Launches attention.

use super::frame_stride::FrameStride;
use super::launcher::Launcher;
use super::params::AttentionParams;
use super::tensor_map;
use super::tiling::{self, FRAME_ALIGN, MAX_FRAMES};
use crate::backend::cuda::driver::DeviceBlock;
use crate::backend::gpu::{AddressedBlock, RowSizes, attention_products};
use crate::error::Result;
use crate::ir::{AttentionOp, Offsets};

impl Launcher {
    pub fn launch_attention(&self, block: &DeviceBlock, op: &AttentionOp<Offsets>) -> Result<()> {
        let (shape, sizes) = (op.shape, self.sizes);
        tiling::check_attention(shape.channels)?;
        for frames in op.frames.chunks(MAX_FRAMES) {
            for (from, to) in frames {
                block.at(from.0, sizes.data_bytes(shape.with_channels(3 * shape.channels)))?;
                block.at(to.0, sizes.data_bytes(shape))?;
            }
            let input = FrameStride::new(frames.iter().map(|f| block.address(f.0)), FRAME_ALIGN)?;
            let out = FrameStride::new(frames.iter().map(|f| block.address(f.1)), FRAME_ALIGN)?;
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
            // A piece is a block, or the blocks of a cluster.
            let is_wide = shape.channels > tiling::MOST_ATTENTION_CHANNELS;
            let (kernel, threads, queries, cluster) = match &self.kernels.attention_wgmma {
                _ if is_wide => {
                    let queries = tiling::attention_wide_queries(sizes.precision);
                    (&self.kernels.attention_wide, tiling::ATTENTION_WIDE_THREADS, queries, 1)
                }
                Some(kernel) => {
                    params.map = tensor_map::attention_map(sizes, &params, input.count())?;
                    let queries = tiling::ATTENTION_WGMMA_QUERIES * tiling::ATTENTION_WGMMA_CLUSTER;
                    (kernel, tiling::ATTENTION_WGMMA_THREADS, queries, tiling::ATTENTION_WGMMA_CLUSTER)
                }
                None => {
                    (&self.kernels.attention, tiling::ATTENTION_THREADS, tiling::attention_queries(sizes.precision), 1)
                }
            };
            let products = attention_products(shape, queries).saturating_mul(frames.len() as u64);
            for pieces in self.limit.launches(shape.pixels().div_ceil(queries), products) {
                params.first_query = (pieces.start * queries) as i32;
                let grid = [((pieces.end - pieces.start) * cluster) as u32, frames.len() as u32];
                // SAFETY: the parameters have the kernel's layout and point into `block`, which outlives the work.
                unsafe { self.queue.launch(kernel, grid, threads, &params)? };
            }
        }
        Ok(())
    }
}
