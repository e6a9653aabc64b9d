//! Launches norms, and the statistics that they need.

use super::frame_stride::FrameStride;
use super::launcher::Launcher;
use super::params::{ConvParams, FinalizeParams, Norm, NormParams, StatisticsParams};
use super::queue::JobBlock;
use super::tiling::{self, CO_RESIDENT_THREADS, EPSILON, STATISTICS_THREADS, Statistics, UNIT_BYTES};
use crate::backend::gpu::{
    AddressedBlock, ConvLaunch, LaunchNorm, NormInPlace, NormOf, NormRows, RowSizes, WeightAddresses,
};
use crate::error::Result;
use crate::ir::{self, ConvLayout, DeviceOffset, Prologue, Sizes};

/// By registers nine blocks of `norm_silu` fit on a multiprocessor. So these are two full rounds.
const BLOCKS_A_MULTIPROCESSOR: u32 = 18;

/// The norm before a layer. That of pixels reads gamma alone. `stride` is in pairs of floats, from one slot of statistics to
/// the next.
pub fn norm_params(weights: &WeightAddresses, layout: &ConvLayout, statistics: u64, stride: i64) -> Norm {
    Norm {
        statistics,
        gamma: weights.gamma,
        beta: weights.beta,
        stride,
        groups: layout.norm.groups() as i32,
        group_channels: (layout.cin / layout.norm.groups().max(1)) as i32,
    }
}

impl Launcher {
    fn launch_norms(&self, layout: &ConvLayout, params: &NormParams, frames: u32) -> Result<()> {
        let kernels = &self.kernels;
        let kernel = match (layout.norm, layout.prologue) {
            (ir::Norm::Group { .. }, Prologue::NormSilu) => &kernels.norm_silu,
            (ir::Norm::Group { .. }, Prologue::Norm | Prologue::None) => &kernels.norm_apply,
            (ir::Norm::Pixel, Prologue::NormSilu) => &kernels.norm_pixel_silu,
            (ir::Norm::Pixel, Prologue::Norm | Prologue::None) => &kernels.norm_pixel,
        };
        let blocks = (self.context.gpu.multiprocessors * BLOCKS_A_MULTIPROCESSOR / frames).max(1);
        // GroupNorm has a thread for each unit of a pixel.
        let units = params.channels as u32 * self.sizes.element() as u32 / UNIT_BYTES as u32;
        let threads = match layout.norm {
            ir::Norm::Group { .. } => CO_RESIDENT_THREADS.max(units),
            ir::Norm::Pixel => CO_RESIDENT_THREADS,
        };
        // SAFETY: the parameters have the kernel's layout and point into a job's block and into weights, which outlive
        // the work.
        unsafe { self.queue.launch(kernel, [blocks, frames], threads, params) }
    }
}

impl LaunchNorm for Launcher {
    fn norm_in_place(
        &self,
        block: &JobBlock,
        &NormOf { weights, layout, shape }: &NormOf<Launcher>,
        NormInPlace { first, pixels, statistics }: NormInPlace,
    ) -> Result<()> {
        let channels = tiling::channel_stride(shape.channels);
        let address = block.at(first.0, pixels * channels * self.sizes.element())?;
        let statistics = block.at(statistics.0, self.sizes.statistics_bytes(layout.norm.groups()))?;
        let params = NormParams {
            norm: norm_params(weights, layout, statistics, 0),
            input: address,
            out: address,
            pixels: pixels as i64,
            channels: channels as i32,
            ..NormParams::default()
        };
        self.launch_norms(layout, &params, 1)
    }

    fn norm(
        &self,
        block: &JobBlock,
        &NormOf { weights, layout, shape }: &NormOf<Launcher>,
        frames: &[(DeviceOffset, DeviceOffset)],
        rows: Option<NormRows>,
    ) -> Result<()> {
        let bytes = self.sizes.frame_bytes(shape, layout.norm.groups());
        let NormRows { rows, out_bytes } = rows.unwrap_or(NormRows { rows: 0..shape.height, out_bytes: bytes });
        let row = self.sizes.row_bytes(shape);
        for (from, to) in frames {
            block.at(from.0, bytes)?;
            block.at(to.0, (rows.end - rows.start) * row)?;
        }
        let input = FrameStride::new(frames.iter().map(|f| block.address(f.0)), bytes)?;
        let out = FrameStride::new(frames.iter().map(|f| block.address(f.1)), out_bytes)?;
        let statistics = input.address() + self.sizes.data_bytes(shape);
        let mut params = NormParams {
            norm: norm_params(weights, layout, statistics, input.bytes() / 8),
            input: input.address() + rows.start * row,
            out: out.address(),
            in_slot_bytes: input.bytes(),
            out_slot_bytes: out.bytes(),
            pixels: ((rows.end - rows.start) * shape.width) as i64,
            channels: tiling::channel_stride(shape.channels) as i32,
            ..NormParams::default()
        };
        for (i, (from, to)) in frames.iter().enumerate() {
            (params.in_slot[i], params.out_slot[i]) = (input.of(block.address(*from)), out.of(block.address(*to)));
        }
        self.launch_norms(layout, &params, frames.len() as u32)
    }

    fn statistics(&self, block: &JobBlock, of: &ConvLaunch, conv: &ConvParams, into: &[DeviceOffset]) -> Result<()> {
        let (layout, gathered) = (of.layout, Statistics::of(of.layout));
        if !of.statistics || gathered == Statistics::None {
            return Ok(());
        }
        let statistics = into.iter().map(|at| block.at(at.0, self.sizes.statistics_bytes(layout.norm.groups())));
        let statistics = statistics.collect::<Result<Vec<u64>>>()?;
        let (slots, count) = (FrameStride::new(statistics.iter().copied(), 8)?, statistics.len());
        let group_channels = (layout.cout / layout.norm.groups()) as i32;
        let slot = std::array::from_fn(|i| statistics.get(i).map_or(0, |address| slots.of(*address)));
        let (statistics, stride) = (slots.address(), slots.bytes() / 8);
        let grid = [layout.norm.groups() as u32, count as u32];
        if gathered == Statistics::Records {
            let params = FinalizeParams {
                records: conv.records,
                statistics,
                stride,
                quads: tiling::padded_outputs(layout) as i32 / 4,
                group_quads: group_channels / 4,
                groups: layout.norm.groups() as i32,
                phases: if self.sizes.in_column_pairs(layout) { 2 } else { conv.phases },
                height: conv.height,
                width: conv.width,
                missing_columns: conv.missing_columns,
                eps: EPSILON,
                slot,
            };
            // SAFETY: as in `conv_band`.
            unsafe { self.queue.launch(&self.kernels.norm_finalize, grid, STATISTICS_THREADS, &params) }
        } else {
            let params = StatisticsParams {
                input: conv.out,
                statistics,
                stride,
                slot_bytes: conv.out_slot_bytes,
                pixels: of.output().pixels() as i64,
                channels: conv.cout,
                group_channels,
                groups: layout.norm.groups() as i32,
                eps: EPSILON,
                slot,
            };
            // SAFETY: as in `conv_band`.
            unsafe { self.queue.launch(&self.kernels.norm_statistics, grid, STATISTICS_THREADS, &params) }
        }
    }
}
