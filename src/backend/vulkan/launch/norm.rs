//! Launches norms, and the statistics that they need.

use super::params::{FinalizeParams, NormFrame, NormParams};
use super::{Launcher, per_frame};
use crate::backend::gpu::{self, AddressedBlock, ConvLaunch, LaunchNorm, NormInPlace, NormOf, NormRows, RowSizes};
use crate::backend::vulkan::driver::{DeviceBlock, Shader};
use crate::backend::vulkan::sizes::{MAX_FRAMES, channel_stride, padded_outputs};
use crate::error::Result;
use crate::ir::{DeviceOffset, Norm, Prologue};

/// Added to the variance of a norm.
const EPSILON: f32 = 1e-6;
/// Eights of channels that a thread of the norm has, where there are as many.
const UNITS_A_THREAD: u64 = 8;
/// Pixels of a workgroup of the norm of pixels.
const WORKGROUP_PIXELS: u64 = 32;

impl Launcher {
    fn launch_norm(&self, of: &NormOf<Launcher>, frames: &[NormFrame], pixels: u64) -> Result<()> {
        let (layout, precision) = (of.layout, self.sizes.precision);
        let (channels, groups) = (channel_stride(of.shape.channels), layout.norm.groups());
        let params = NormParams {
            gamma: of.weights.gamma,
            beta: of.weights.beta,
            pixels,
            channels: channels as u32,
            groups: groups as u32,
            group_channels: (layout.cin / groups.max(1)) as u32,
            silu: u32::from(layout.prologue == Prologue::NormSilu),
            frame: per_frame(frames.iter().map(|frame| Ok(*frame)))?,
        };
        let (shader, workgroups) = match layout.norm {
            Norm::Group { .. } => {
                // A multiple of a pixel's threads, so that each keeps its channels.
                let units = channels.div_ceil(8);
                let threads = (pixels * units).div_ceil(UNITS_A_THREAD);
                let workgroups = super::workgroups(threads).next_multiple_of(units as u32);
                (Shader::Norm(precision), workgroups.min(65_535 / units as u32 * units as u32))
            }
            Norm::Pixel => (Shader::NormPixel(precision), pixels.div_ceil(WORKGROUP_PIXELS).clamp(1, 65_535) as u32),
        };
        // SAFETY: the kernel's parameters. All regions were checked, and blocks wait for the queues.
        unsafe { self.queue.launch(shader, [workgroups, frames.len() as u32, 1], &[], |_| params) }
    }

    fn statistics_at(&self, block: &DeviceBlock, at: DeviceOffset, groups: u64) -> Result<u64> {
        if groups == 0 { Ok(0) } else { block.at(at.0, self.sizes.statistics_bytes(groups)) }
    }
}

impl LaunchNorm for Launcher {
    fn statistics(&self, block: &DeviceBlock, of: &ConvLaunch, (): &(), into: &[DeviceOffset]) -> Result<()> {
        let (layout, groups) = (of.layout, of.layout.norm.groups());
        if !of.statistics || groups == 0 {
            return Ok(());
        }
        let grid = gpu::tile_grid(layout, of.input);
        let bytes = into.len() as u64 * self.sizes.records_bytes(layout, of.input);
        let params = FinalizeParams {
            records: block.at(of.scratch, bytes)?,
            channels: padded_outputs(layout) as i32,
            group_channels: (layout.cout / groups) as i32,
            phases: layout.window.phases() as i32,
            height: grid.height as i32,
            width: grid.width as i32,
            epsilon: EPSILON,
            statistics: per_frame(into.iter().map(|at| self.statistics_at(block, *at, groups)))?,
        };
        // SAFETY: as in `launch_norm`.
        unsafe { self.queue.launch(Shader::Finalize, [groups as u32, into.len() as u32, 1], &[], |_| params) }
    }

    fn norm(
        &self,
        block: &DeviceBlock,
        norm: &NormOf<Launcher>,
        frames: &[(DeviceOffset, DeviceOffset)],
        rows: Option<NormRows>,
    ) -> Result<()> {
        let (shape, sizes) = (norm.shape, self.sizes);
        let rows = rows.map_or(0..shape.height, |rows| rows.rows);
        let (row, count) = (sizes.row_bytes(shape), rows.end - rows.start);
        let frame = |(from, to): &(DeviceOffset, DeviceOffset)| {
            Ok(NormFrame {
                from: block.at(from.0 + rows.start * row, count * row)?,
                to: block.at(to.0, count * row)?,
                statistics: self.statistics_at(
                    block,
                    DeviceOffset(from.0 + sizes.data_bytes(shape)),
                    norm.layout.norm.groups(),
                )?,
            })
        };
        let frames = frames.iter().map(frame).collect::<Result<Vec<NormFrame>>>()?;
        frames.chunks(MAX_FRAMES).try_for_each(|frames| self.launch_norm(norm, frames, count * shape.width))
    }

    fn norm_in_place(&self, block: &DeviceBlock, norm: &NormOf<Launcher>, frame: NormInPlace) -> Result<()> {
        let NormInPlace { first, pixels, statistics } = frame;
        let bytes = pixels * channel_stride(norm.shape.channels) * self.sizes.element();
        let at = block.at(first.0, bytes)?;
        let statistics = self.statistics_at(block, statistics, norm.layout.norm.groups())?;
        self.launch_norm(norm, &[NormFrame { from: at, to: at, statistics }], pixels)
    }
}
