//! Launches the convolution to pixels. What a frame adds to the next two is handed on as partial sums: 24 bytes a pixel
//! instead of two cached input frames.

use super::frame_stride::FrameStride;
use super::launcher::Launcher;
use super::norm::norm_params;
use super::params::{OutFrameParams, OutParams};
use super::tiling::{
    self, CONV_OUT_ALONE_BLOCKS, CONV_OUT_ALONE_THREADS, CONV_OUT_PIXEL_BYTES, CONV_OUT_THREADS, MAX_FRAMES,
};
use crate::backend::cuda::driver::{DeviceBlock, Kernel};
use crate::backend::gpu::{AddressedBlock, RowSizes, WeightAddresses};
use crate::error::{Error, Result};
use crate::ir::{ConvOp, DeviceOffset, Offsets, Sizes, Term};

/// The input frames of a launch, in order. The newest input of each output frame; where the sums of the first output
/// frame are not those of an earlier launch, its older inputs come before. Returns them with the number of the latter.
fn inputs_of(op: &ConvOp<Offsets>) -> Result<(Vec<DeviceOffset>, usize)> {
    let first = op.frames.first().map_or(&[][..], |frame| &frame.terms);
    let older = first.split_last().map_or(&[][..], |(_, older)| older);
    let newest = op.frames.iter().map(|frame| frame.terms.last());
    let terms: Option<Vec<&Term<Offsets>>> = older.iter().map(Some).chain(newest).collect();
    let terms = terms.ok_or_else(|| Error::Internal("an output frame without input".into()))?;
    Ok((terms.into_iter().map(|term| term.frame).collect(), older.len()))
}

/// The slabs that input number `at` goes with: for the output frame of the same number, and for the next two. Outputs
/// that nothing continues, and those of the `older` inputs, take any slab.
fn slabs_of(op: &ConvOp<Offsets>, at: usize, input: DeviceOffset, older: usize) -> [i32; 3] {
    let pending = op.partial_sums.after.iter().flat_map(|after| after.pending.iter());
    let outputs = op.frames.iter().map(|frame| &frame.terms).chain(pending).map(Some);
    let outputs = std::iter::repeat_n(None, older).chain(outputs);
    let mut slabs = [0; 3];
    for (slab, terms) in slabs.iter_mut().zip(outputs.skip(at)) {
        let term = terms.and_then(|terms| terms.iter().find(|term| term.frame == input));
        *slab = term.map_or(0, |term| i32::from(term.slab));
    }
    slabs
}

impl Launcher {
    pub fn launch_conv_out(&self, block: &DeviceBlock, weights: &WeightAddresses, op: &ConvOp<Offsets>) -> Result<()> {
        let (layout, input, frames) = (&op.layout, op.input, &op.frames);
        let ((inputs, older), output) = (inputs_of(op)?, layout.window.output(input, layout.cout));
        if inputs.len() > MAX_FRAMES {
            return Err(Error::Internal(format!("{} frames at a time were planned", inputs.len())));
        }
        let [in_bytes, out_bytes] = [input, output].map(|shape| self.sizes.frame_bytes(shape, layout.norm.groups()));
        for input in &inputs {
            block.at(input.0, in_bytes)?;
        }
        for frame in frames {
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
            count: inputs.len() as i32,
            ..OutParams::default()
        };
        for (i, (params, input)) in params.frame.iter_mut().zip(&inputs).enumerate() {
            // What comes out for older inputs is not whole: each thread overwrites it with the first frame's pixel.
            let frame = &frames[i.saturating_sub(older)];
            *params = OutFrameParams {
                slot: from.of(block.address(*input)),
                slab: slabs_of(op, i, *input, older),
                bias: i32::from(frame.bias),
                out: to.of(block.address(frame.out)),
            };
        }
        let tiles = (tiles_x * input.height.div_ceil(rows)) as u32;
        let (kernel, grid, threads) = self.conv_out_kernel(op, tiles);
        // SAFETY: as in `conv_band`.
        unsafe { self.queue.launch(kernel, grid, threads, &params) }
    }

    /// The kernel of a launch, its grid for so many tiles of a frame, and its threads.
    fn conv_out_kernel(&self, op: &ConvOp<Offsets>, tiles: u32) -> (&Kernel, [u32; 2], u32) {
        let (frames, norm) = (op.frames.len() as u32, op.layout.norm);
        let alone = op.partial_sums.is_none() && op.frames.iter().all(|frame| frame.terms.len() == 1);
        if !alone {
            return (self.kernels.conv_out(norm), [tiles, 1], CONV_OUT_THREADS);
        }
        // Each block computes tiles of one frame in turn.
        let blocks = (self.context.gpu.multiprocessors * CONV_OUT_ALONE_BLOCKS).div_ceil(frames);
        (self.kernels.conv_out_alone(norm), [tiles.min(blocks), frames], CONV_OUT_ALONE_THREADS)
    }
}
