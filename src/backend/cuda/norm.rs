//! Launches norms.

use super::Cuda;
use super::conv::Slots;
use super::geometry;
use super::memory::Block;
use super::params::{Norm, NormParams};
use super::weights::Conv;
use crate::backend::{Frame, NormOp, Prologue};
use crate::error::Result;

impl Cuda {
    pub(super) fn launch_norm(
        &self,
        block: &Block,
        weights: &Conv,
        op: &NormOp,
        frames: &[(Frame, Frame)],
    ) -> Result<()> {
        let (layout, shape) = (op.layout, op.shape);
        let bytes = self.precision.frame_bytes(shape, layout.groups);
        let input = Slots::new(frames.iter().map(|f| f.0.0), bytes);
        let out = Slots::new(frames.iter().map(|f| f.1.0), bytes);
        let mut params = NormParams {
            norm: Norm {
                statistics: input.address(block)? + self.precision.data_bytes(shape),
                gamma: weights.gamma()?,
                beta: weights.beta()?,
                stride: input.bytes() / 8,
                groups: layout.groups as i32,
                group_channels: (layout.cin / layout.groups) as i32,
            },
            input: input.address(block)?,
            out: out.address(block)?,
            in_slot_bytes: input.bytes(),
            out_slot_bytes: out.bytes(),
            pixels: shape.pixels() as i64,
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
        unsafe { kernel.collect(&self.stream, [blocks, frames.len() as u32], 256, &params) }
    }
}
