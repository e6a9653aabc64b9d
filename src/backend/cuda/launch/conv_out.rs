//! Launches the convolution that ends in pixels. What a frame adds to the next two is carried on, so that its past takes 24
//! bytes a pixel instead of two frames of its input.

use crate::backend::cuda::Cuda;
use crate::backend::cuda::driver::memory::Block;
use crate::backend::cuda::launch::conv::Slots;
use crate::backend::cuda::launch::params::{MAX_FRAMES, OutFrameParams, OutParams};
use crate::backend::cuda::launch::tiling::{self as geometry, Kind};
use crate::backend::cuda::offload::weights::Conv;
use crate::backend::{CarryOp, ConvLayout, Frame, Precision};
use crate::error::{Error, Result};
use crate::tensor::FrameShape;

/// Of one pixel: three outputs of two frames, in f32 whatever the precision.
const PIXEL_BYTES: u64 = 2 * 3 * 4;
const THREADS: u32 = 192;

/// Rows and columns of a tile. What is wider takes more shared memory than every GPU has.
const fn tile(precision: Precision) -> (u64, u64) {
    match precision {
        Precision::Fp16 | Precision::Bf16 => (8, 16),
        Precision::Fp32 => (6, 16),
    }
}

/// Dynamic shared memory of the kernel: products, weights, norm and what is carried on.
pub const fn shared(precision: Precision) -> u32 {
    let (rows, columns) = tile(precision);
    let (products, weights) = ((rows + 2) * (columns + 2) * 83 * 4, 3 * 128 * 32 * precision.bytes());
    (products + weights + 128 * 8 + PIXEL_BYTES * rows * columns) as u32
}

/// Of what is carried on, for layouts that the kernel takes.
pub fn bytes(layout: &ConvLayout, input: FrameShape) -> Option<u64> {
    let carries = matches!(Kind::of(layout), Ok(Kind::Out));
    carries.then(|| (input.pixels() * PIXEL_BYTES).next_multiple_of(geometry::ALIGN))
}

impl Cuda {
    pub(in crate::backend::cuda) fn launch_carrying(&self, block: &Block, weights: &Conv, op: &CarryOp) -> Result<()> {
        let CarryOp { layout, input, frames, .. } = *op;
        if frames.len() > MAX_FRAMES {
            return Err(Error::Internal(format!("{} frames at a time were planned", frames.len())));
        }
        let output = layout.window.output(input, layout.cout);
        let (in_bytes, out_bytes) = [input, output].map(|s| self.precision.frame_bytes(s, layout.groups)).into();
        for frame in frames {
            block.at(frame.input.0, in_bytes)?;
            block.at(frame.out.0, self.precision.data_bytes(output))?;
        }
        let carry = |at: Option<Frame>| match at {
            Some(frame) => block.at(frame.0, input.pixels() * PIXEL_BYTES),
            None => Ok(0),
        };
        let from = Slots::new(frames.iter().map(|frame| block.address(frame.input)), in_bytes)?;
        let to = Slots::new(frames.iter().map(|frame| block.address(frame.out)), out_bytes)?;
        let (rows, columns) = tile(self.precision);
        let tiles_x = input.width.div_ceil(columns);
        let statistics = from.address() + self.precision.data_bytes(input);
        let mut params = OutParams {
            norm: self.norm(weights, layout, statistics, from.bytes() / 8)?,
            frames: from.address(),
            weights: weights.slabs()?,
            bias: weights.bias()?,
            out: to.address(),
            before: carry(op.before)?,
            after: carry(op.after)?,
            slot_bytes: from.bytes(),
            out_slot_bytes: to.bytes(),
            height: input.height as i32,
            width: input.width as i32,
            channels: geometry::stride(layout.cin) as i32,
            cout: geometry::output_stride(layout.cout) as i32,
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
        // SAFETY: `OutParams` has the kernel's layout, and all that is reached by it is in `block` and `weights`, which outlive
        // the stream's work: freeing either waits for it.
        unsafe { self.kernels.conv_out.collect(&self.stream, [tiles as u32, 1], THREADS, &params) }
    }
}
