//! Launches attention.

use super::params::AttentionParams;
use super::{Launcher, per_frame};
use crate::backend::gpu::{AddressedBlock, RowSizes, attention_products};
use crate::backend::vulkan::driver::{DeviceBlock, Shader};
use crate::backend::vulkan::sizes::{MAX_FRAMES, channel_stride};
use crate::error::Result;
use crate::ir::{AttentionOp, Offsets};

/// Queries of a workgroup, without and with the matrix unit, and channels of the result.
const QUERIES: [u64; 2] = [32, 64];
const CHANNELS: u64 = 512;
/// Channels that the matrix unit takes are a multiple of this.
const MATRIX_CHANNELS: u64 = 64;

impl Launcher {
    pub fn launch_attention(&self, block: &DeviceBlock, op: &AttentionOp<Offsets>) -> Result<()> {
        let (shape, sizes) = (op.shape, self.sizes);
        let input = shape.with_channels(3 * shape.channels);
        let (shader, queries) = match self.matrix() {
            Some(unit) if shape.channels.is_multiple_of(MATRIX_CHANNELS) => {
                (Shader::AttentionMatrix(unit.element), QUERIES[1])
            }
            _ => (Shader::Attention(sizes.precision), QUERIES[0]),
        };
        for frames in op.frames.chunks(MAX_FRAMES) {
            let params = AttentionParams {
                pixels: shape.pixels() as u32,
                channels: shape.channels as u32,
                first_query: 0,
                input_channels: channel_stride(input.channels) as u32,
                out_channels: channel_stride(shape.channels) as u32,
                unused: 0,
                from: per_frame(frames.iter().map(|(from, _)| block.at(from.0, sizes.data_bytes(input))))?,
                to: per_frame(frames.iter().map(|(_, to)| block.at(to.0, sizes.data_bytes(shape))))?,
            };
            let products = attention_products(shape, queries).saturating_mul(frames.len() as u64);
            let parts = shape.channels.div_ceil(CHANNELS) as u32;
            let mut launches = self.limit.launches(shape.pixels().div_ceil(queries), products).peekable();
            while let Some(pieces) = launches.next() {
                let size = [(pieces.end - pieces.start) as u32, frames.len() as u32, parts];
                let params = AttentionParams { first_query: (pieces.start * queries) as u32, ..params };
                // SAFETY: the kernel's parameters. All regions were checked, and blocks wait for the queues.
                unsafe { self.queue.launch(shader, size, &[], |_| params)? };
                // As for convolutions.
                launches.peek().map_or(Ok(()), |_| self.queue.flush())?;
            }
        }
        Ok(())
    }
}
