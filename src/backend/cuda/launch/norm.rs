//! Launches norms.

use std::ops::Range;

use crate::backend::cuda::Cuda;
use crate::backend::cuda::driver::memory::Block;
use crate::backend::cuda::launch::conv::Slots;
use crate::backend::cuda::launch::kernels::BESIDE_THREADS;
use crate::backend::cuda::launch::params::{Norm, NormParams};
use crate::backend::cuda::launch::tiling as geometry;
use crate::backend::cuda::offload::weights::Conv;
use crate::backend::{ConvLayout, Frame, Prologue};
use crate::error::Result;
use crate::tensor::FrameShape;

/// Rows of frames that are normalised, and the bytes from one frame's rows to the next's where they go.
pub struct NormRows {
    pub rows: Range<u64>,
    pub out_bytes: u64,
}

impl Cuda {
    /// The first pixels of one frame, or of a part of one, where they lie; its statistics are elsewhere.
    pub(in crate::backend::cuda) fn launch_norm_in_place(
        &self,
        block: &Block,
        weights: &Conv,
        (layout, shape): (&ConvLayout, FrameShape),
        (frame, pixels): (Frame, u64),
        statistics: Frame,
    ) -> Result<()> {
        let channels = geometry::stride(shape.channels);
        let address = block.at(frame.0, pixels * channels * self.precision.bytes())?;
        let params = NormParams {
            norm: self.norm(weights, layout, block.at(statistics.0, layout.groups * 8)?, 0)?,
            input: address,
            out: address,
            pixels: pixels as i64,
            channels: channels as i32,
            ..NormParams::default()
        };
        self.launch_norms(layout, &params, 1)
    }

    /// `rows`: `None` for whole frames that stay frames.
    pub(in crate::backend::cuda) fn launch_norm(
        &self,
        block: &Block,
        weights: &Conv,
        (layout, shape): (&ConvLayout, FrameShape),
        frames: &[(Frame, Frame)],
        rows: Option<NormRows>,
    ) -> Result<()> {
        let bytes = self.precision.frame_bytes(shape, layout.groups);
        let NormRows { rows, out_bytes } = rows.unwrap_or(NormRows { rows: 0..shape.height, out_bytes: bytes });
        let row = self.precision.row_bytes(shape);
        for (from, to) in frames {
            block.at(from.0, bytes)?;
            block.at(to.0, (rows.end - rows.start) * row)?;
        }
        let input = Slots::new(frames.iter().map(|f| block.address(f.0)), bytes)?;
        let out = Slots::new(frames.iter().map(|f| block.address(f.1)), out_bytes)?;
        let mut params = NormParams {
            norm: self.norm(weights, layout, input.address() + self.precision.data_bytes(shape), input.bytes() / 8)?,
            input: input.address() + rows.start * row,
            out: out.address(),
            in_slot_bytes: input.bytes(),
            out_slot_bytes: out.bytes(),
            pixels: ((rows.end - rows.start) * shape.width) as i64,
            channels: geometry::stride(shape.channels) as i32,
            ..NormParams::default()
        };
        for (i, (from, to)) in frames.iter().enumerate() {
            (params.in_slot[i], params.out_slot[i]) = (input.of(block.address(*from)), out.of(block.address(*to)));
        }
        self.launch_norms(layout, &params, frames.len() as u32)
    }

    pub(in crate::backend::cuda) fn norm(
        &self,
        weights: &Conv,
        layout: &ConvLayout,
        statistics: u64,
        stride: i64,
    ) -> Result<Norm> {
        Ok(Norm {
            statistics,
            gamma: weights.gamma()?,
            beta: weights.beta()?,
            stride,
            groups: layout.groups as i32,
            group_channels: (layout.cin / layout.groups) as i32,
        })
    }

    fn launch_norms(&self, layout: &ConvLayout, params: &NormParams, frames: u32) -> Result<()> {
        let kernel = match layout.prologue {
            Prologue::NormSilu => self.kernels.norm_silu,
            Prologue::Norm | Prologue::None => self.kernels.norm_apply,
        };
        let blocks = (self.context.gpu.multiprocessors * 16 / frames).max(1);
        // A pixel's channels are a unit for each thread.
        let threads = BESIDE_THREADS.max(params.channels as u32 * self.precision.bytes() as u32 / 16);
        // SAFETY: the parameters have the kernel's layout and point into a job's block and into weights, which outlive the
        // work.
        unsafe { kernel.collect(&self.stream, [blocks, frames], threads, params) }
    }
}
