//! Launches the convolution to pixels. What a frame adds to the next two is handed on as partial sums: 24 bytes a pixel
//! instead of two cached input frames.

use super::frame_stride::FrameStride;
use super::launcher::{Launcher, WeightPointers};
use super::norm::norm_params;
use super::params::{OutFrameParams, OutParams};
use super::tiling::{self, CONV_OUT_PIXEL_BYTES, CONV_OUT_THREADS, MAX_FRAMES};
use crate::backend::cuda::driver::DeviceBlock;
use crate::error::{Error, Result};
use crate::ir::{ConvOp, DeviceOffset, Offsets, Sizes, Term};

/// The slabs that an input frame goes with: for the output frame of the same number, and for the next two. Outputs that
/// nothing continues take any slab.
fn slabs_of(op: &ConvOp<Offsets>, frame: usize, input: DeviceOffset) -> [i32; 3] {
    let pending = op.partial_sums.after.iter().flat_map(|after| after.pending.iter());
    let outputs = op.frames.iter().map(|frame| &frame.terms).chain(pending);
    let mut slabs = [0; 3];
    for (slab, terms) in slabs.iter_mut().zip(outputs.skip(frame)) {
        let term = terms.iter().find(|term| term.frame == input);
        *slab = term.map_or(0, |term| i32::from(term.slab));
    }
    slabs
}

/// The newest input frame of each output frame. Older ones are in the launch too, or in the partial sums.
fn inputs_of(op: &ConvOp<Offsets>) -> Result<Vec<DeviceOffset>> {
    let newest = op.frames.iter().map(|frame| frame.terms.last().map(|Term { frame, .. }| *frame));
    newest.collect::<Option<_>>().ok_or_else(|| Error::Internal("an output frame without input".into()))
}

impl Launcher {
    pub fn conv_out(&self, block: &DeviceBlock, weights: &WeightPointers, op: &ConvOp<Offsets>) -> Result<()> {
        let (layout, input, frames) = (&op.layout, op.input, &op.frames);
        if frames.len() > MAX_FRAMES {
            return Err(Error::Internal(format!("{} frames at a time were planned", frames.len())));
        }
        let (inputs, output) = (inputs_of(op)?, layout.window.output(input, layout.cout));
        let [in_bytes, out_bytes] = [input, output].map(|shape| self.sizes.frame_bytes(shape, layout.groups));
        for (frame, input) in frames.iter().zip(&inputs) {
            block.at(input.0, in_bytes)?;
            block.at(frame.out.0, self.sizes.data_bytes(output))?;
        }
        let partial_sums = |at: Option<DeviceOffset>| match at {
            Some(sums) => block.at(sums.0, input.pixels() * CONV_OUT_PIXEL_BYTES),
            None => Ok(0),
        };
        let from = FrameStride::new(inputs.iter().map(|input| block.address(*input)), in_bytes)?;
        let to = FrameStride::new(frames.iter().map(|frame| block.address(frame.out)), out_bytes)?;
        let (rows, columns) = tiling::conv_out_tile(self.sizes.precision);
        let tiles_x = input.width.div_ceil(columns);
        let statistics = from.address() + self.sizes.data_bytes(input);
        let mut params = OutParams {
            norm: norm_params(weights, layout, statistics, from.bytes() / 8),
            frames: from.address(),
            weights: weights.slabs,
            bias: weights.bias,
            out: to.address(),
            partial_in: partial_sums(op.partial_sums.before)?,
            partial_out: partial_sums(op.partial_sums.after.as_ref().map(|after| after.into))?,
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
        for (i, (params, (frame, input))) in params.frame.iter_mut().zip(frames.iter().zip(&inputs)).enumerate() {
            *params = OutFrameParams {
                slot: from.of(block.address(*input)),
                slab: slabs_of(op, i, *input),
                bias: i32::from(frame.bias),
                out: to.of(block.address(frame.out)),
            };
        }
        let tiles = tiles_x * input.height.div_ceil(rows);
        // SAFETY: as in `conv_band`.
        unsafe { self.queue.launch(&self.kernels.conv_out, [tiles as u32, 1], CONV_OUT_THREADS, &params) }
    }
}
