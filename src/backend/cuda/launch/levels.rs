//! Launches shortcuts around levels: means of pixels, and values that are repeated where they are added.

use super::launcher::Launcher;
use super::params::{AddParams, PoolParams};
use super::queue::JobBlock;
use super::tiling::{self, LEVEL_THREADS, UNIT_BYTES};
use crate::backend::gpu::{AddressedBlock, LaunchLevels, RowSizes};
use crate::error::Result;
use crate::ir::{AddOp, FrameShape, Offsets, PoolOp};

/// Enough to fill a multiprocessor.
const BLOCKS_A_MULTIPROCESSOR: u32 = 16;

impl Launcher {
    /// Of a pixel.
    fn units(&self, shape: FrameShape) -> u64 {
        tiling::channel_stride(shape.channels) * self.sizes.element() / UNIT_BYTES
    }

    /// Blocks for the units of these frames. Each goes round until all are done.
    fn unit_grid(&self, shape: FrameShape, frames: usize) -> [u32; 2] {
        let blocks = (shape.pixels() * self.units(shape)).div_ceil(u64::from(LEVEL_THREADS));
        let most = self.context.gpu.multiprocessors * BLOCKS_A_MULTIPROCESSOR;
        [blocks.min(u64::from(most)) as u32, frames as u32]
    }
}

impl LaunchLevels for Launcher {
    fn pool(&self, block: &JobBlock, op: &PoolOp<Offsets>) -> Result<()> {
        let (input, output) = (op.input, op.output());
        let [in_bytes, out_bytes] = [input, output].map(|shape| self.sizes.data_bytes(shape));
        let mut params = PoolParams {
            pixels: output.pixels() as i64,
            width: output.width as i32,
            in_units: self.units(input) as i32,
            out_units: self.units(output) as i32,
            parts: op.parts as i32,
            ..PoolParams::default()
        };
        for (i, frame) in op.frames.iter().enumerate() {
            params.from[i] = block.at(frame.from.0, in_bytes)?;
            params.into[i] = block.at(frame.into.0, out_bytes)?;
            params.part[i] = frame.part as i32;
            params.clear[i] = i32::from(frame.clear);
        }
        let grid = self.unit_grid(output, op.frames.len());
        // SAFETY: the parameters have the kernel's layout and point into `block`, which outlives the work.
        unsafe { self.queue.launch(&self.kernels.pool, grid, LEVEL_THREADS, &params) }
    }

    fn add(&self, block: &JobBlock, op: &AddOp<Offsets>) -> Result<()> {
        let (shape, addend) = (op.shape, op.addend());
        let [bytes, addend_bytes] = [shape, addend].map(|shape| self.sizes.data_bytes(shape));
        let mut params = AddParams {
            pixels: shape.pixels() as i64,
            width: shape.width as i32,
            units: self.units(shape) as i32,
            addend_units: self.units(addend) as i32,
            channels: shape.channels as i32,
            side: op.repeat.side as i32,
            parts: op.repeat.parts as i32,
            repeats: op.repeats() as i32,
            ..AddParams::default()
        };
        for (i, frame) in op.frames.iter().enumerate() {
            params.x[i] = block.at(frame.x.0, bytes)?;
            params.addend[i] = block.at(frame.addend.0, addend_bytes)?;
            params.out[i] = block.at(frame.out.0, bytes)?;
            params.part[i] = frame.part as i32;
        }
        let grid = self.unit_grid(shape, op.frames.len());
        // SAFETY: as in `pool`.
        unsafe { self.queue.launch(&self.kernels.add, grid, LEVEL_THREADS, &params) }
    }
}
