//! Launches norms.

use std::ops::Range;

use super::conv::Slots;
use super::geometry;
use super::params::{Norm, NormParams};
use super::weights::Conv;
use super::{Cuda, On};
use crate::backend::{ConvLayout, Frame, Prologue};
use crate::error::Result;
use crate::tensor::FrameShape;

/// Rows of frames that are normalised, and the bytes from one frame's rows to the next's where they go.
pub struct NormRows {
    pub rows: Range<u64>,
    pub out_bytes: u64,
}

impl Cuda {
    /// `rows`: `None` for whole frames that stay frames.
    pub(super) fn launch_norm(
        &self,
        on: &On,
        weights: &Conv,
        (layout, shape): (&ConvLayout, FrameShape),
        frames: &[(Frame, Frame)],
        rows: Option<NormRows>,
    ) -> Result<()> {
        let bytes = self.precision.frame_bytes(shape, layout.groups);
        let NormRows { rows, out_bytes } = rows.unwrap_or(NormRows { rows: 0..shape.height, out_bytes: bytes });
        let input = Slots::new(frames.iter().map(|f| f.0.0), bytes);
        let out = Slots::new(frames.iter().map(|f| f.1.0), out_bytes);
        let mut params = NormParams {
            norm: Norm {
                statistics: input.address(on.block)? + self.precision.data_bytes(shape),
                gamma: weights.gamma()?,
                beta: weights.beta()?,
                stride: input.bytes() / 8,
                groups: layout.groups as i32,
                group_channels: (layout.cin / layout.groups) as i32,
            },
            input: input.address(on.block)? + rows.start * self.precision.row_bytes(shape),
            out: out.address(on.block)?,
            in_slot_bytes: input.bytes(),
            out_slot_bytes: out.bytes(),
            pixels: ((rows.end - rows.start) * shape.width) as i64,
            channels: geometry::stride(shape.channels) as i32,
            ..NormParams::default()
        };
        for (i, (from, to)) in frames.iter().enumerate() {
            (params.in_slot[i], params.out_slot[i]) = (input.of(from.0), out.of(to.0));
        }
        let kernel = match layout.prologue {
            Prologue::NormSilu => self.kernels.norm_silu,
            Prologue::Norm | Prologue::None => self.kernels.norm_apply,
        };
        let blocks = (self.context.gpu.multiprocessors * 16 / frames.len() as u32).max(1);
        // SAFETY: the parameters have the kernel's layout and point into `block` and `weights`, which outlive the work.
        unsafe { kernel.collect(on.stream, [blocks, frames.len() as u32], 256, &params) }
    }
}
