//! Launches the convolution to pixels. What a frame adds to the next two is handed on as partial sums: 24 bytes a pixel
//! instead of two cached input frames.

use super::launcher::{Launcher, WeightPointers};
use super::norm::norm_params;
use super::params::{OutFrameParams, OutParams};
use super::slots::Slots;
use super::tiling::{self, CONV_OUT_PIXEL_BYTES, CONV_OUT_THREADS, MAX_FRAMES};
use crate::backend::cuda::driver::DeviceBlock;
use crate::backend::{CarryOp, Frame};
use crate::error::{Error, Result};

impl Launcher {
    pub fn conv_out(&self, block: &DeviceBlock, weights: &WeightPointers, op: &CarryOp) -> Result<()> {
        let CarryOp { layout, input, frames, .. } = *op;
        if frames.len() > MAX_FRAMES {
            return Err(Error::Internal(format!("{} frames at a time were planned", frames.len())));
        }
        let output = layout.window.output(input, layout.cout);
        let [in_bytes, out_bytes] = [input, output].map(|shape| self.sizes.frame_bytes(shape, layout.groups));
        for frame in frames {
            block.at(frame.input.0, in_bytes)?;
            block.at(frame.out.0, self.sizes.data_bytes(output))?;
        }
        let partial_sums = |at: Option<Frame>| match at {
            Some(frame) => block.at(frame.0, input.pixels() * CONV_OUT_PIXEL_BYTES),
            None => Ok(0),
        };
        let from = Slots::new(frames.iter().map(|frame| block.address(frame.input)), in_bytes)?;
        let to = Slots::new(frames.iter().map(|frame| block.address(frame.out)), out_bytes)?;
        let (rows, columns) = tiling::conv_out_tile(self.sizes.precision);
        let tiles_x = input.width.div_ceil(columns);
        let statistics = from.address() + self.sizes.data_bytes(input);
        let mut params = OutParams {
            norm: norm_params(weights, layout, statistics, from.bytes() / 8),
            frames: from.address(),
            weights: weights.slabs,
            bias: weights.bias,
            out: to.address(),
            partial_in: partial_sums(op.before)?,
            partial_out: partial_sums(op.after)?,
            slot_bytes: from.bytes(),
            out_slot_bytes: to.bytes(),
            height: input.height as i32,
            width: input.width as i32,
            channels: tiling::channel_stride(layout.cin) as i32,
            cout: tiling::output_stride(layout.cout) as i32,
            tiles_x: tiles_x as i32,
            count: frames.len() as i32,
            ..OutParams::default()
        };
        for (params, frame) in params.frame.iter_mut().zip(frames) {
            *params = OutFrameParams {
                slot: from.of(block.address(frame.input)),
                slab: frame.slabs.map(i32::from),
                bias: i32::from(frame.bias),
                out: to.of(block.address(frame.out)),
            };
        }
        let tiles = tiles_x * input.height.div_ceil(rows);
        // SAFETY: as in `conv_band`.
        unsafe { self.queue.launch(&self.kernels.conv_out, [tiles as u32, 1], CONV_OUT_THREADS, &params) }
    }
}
