//! Launches convolutions from pixels and of many channels, whole or in bands.

use std::ops::Range;

use super::conv_params::{ConvParamsBuilder, LaunchedFrames};
use super::kernels::WgmmaKernels;
use super::launcher::Launcher;
use super::params::ConvParams;
use super::queue::JobBlock;
use super::tiling::{self, ConvKernel, MAX_FRAMES, TileWidths, WeightOrder};
use crate::backend::cuda::driver::{CudaStream, DeviceBlock, Kernel};
use crate::backend::gpu::{
    self, ConvBand, ConvLaunch, LaunchConv, RowSizes, WeightAddresses, conv_products, conv_whole,
};
use crate::error::{Error, Result};
use crate::ir::{ConvFrame, ConvLayout, ConvOp, FrameShape, Norm, Offsets, Prologue, Window};

/// Rows that a launch of several frames has at least: of the tallest tiles.
const LEAST_ROWS: u64 = 16;

/// A kernel with the tile it works on.
struct ConvVariant {
    kernel: Kernel,
    tile: (i32, i32),
    threads: u32,
    /// Reads and writes by tensor maps; blocks are persistent.
    wgmma: bool,
}

impl WgmmaKernels {
    /// Of two frames, or of two columns.
    fn pair_variant(&self, layout: &ConvLayout, in_columns: bool) -> ConvVariant {
        let kernel = match (layout.window == Window::Up, TileWidths::of(layout).is_narrow()) {
            _ if in_columns => &self.columns,
            (true, _) => &self.pair_up,
            (false, true) => &self.pair_96,
            (false, false) => &self.pair,
        };
        let (kernel, tile) = (kernel.clone(), tiling::CONV_PAIR_TILE);
        ConvVariant { kernel, tile, threads: tiling::CONV_WGMMA_THREADS, wgmma: true }
    }

    fn variant(&self, layout: &ConvLayout, tile: (i32, i32)) -> ConvVariant {
        let kernel = match layout.window {
            Window::Down => &self.down,
            _ if TileWidths::of(layout).is_narrow() => &self.plain_96,
            _ => &self.plain,
        };
        ConvVariant { kernel: kernel.clone(), tile, threads: tiling::CONV_WGMMA_THREADS, wgmma: true }
    }
}

impl Launcher {
    /// Of a convolution of many channels. Only the kernels of warpgroup products read swizzled weights.
    pub fn weight_order(&self, layout: &ConvLayout) -> WeightOrder {
        // The epilogue of `conv_wgmma` stores a K block of a phase's channels at a time.
        let k_block = TileWidths::of(layout).k_block(self.sizes.element());
        let whole = layout.window != Window::Up || layout.cout.is_multiple_of(k_block);
        if self.kernels.conv_wgmma.is_some() && whole { WeightOrder::Swizzled } else { WeightOrder::Fragments }
    }

    /// `next`: the prologue that is applied to the output.
    fn conv_variant(
        &self,
        layout: &ConvLayout,
        grid: FrameShape,
        rows: &Range<u64>,
        next: Prologue,
        pairs: bool,
    ) -> Result<ConvVariant> {
        let wgmma = self.kernels.conv_wgmma.as_ref();
        let wgmma = wgmma.filter(|_| self.weight_order(layout) == WeightOrder::Swizzled);
        match (ConvKernel::of(layout)?, wgmma) {
            (ConvKernel::In, _) => Ok(self.conv_in_variant(next)),
            _ if next != Prologue::None => {
                Err(Error::Internal("a convolution of many channels cannot normalise its output".into()))
            }
            (ConvKernel::Out, _) if !pairs => Err(Error::Internal("a convolution to pixels needs partial sums".into())),
            (_, Some(wgmma)) if pairs => Ok(wgmma.pair_variant(layout, self.sizes.in_column_pairs(layout))),
            (_, Some(wgmma)) => Ok(wgmma.variant(layout, tiling::conv_wgmma_tile(grid, rows))),
            (_, None) if pairs => self.conv_mma_pair_variant(layout),
            (_, None) => Ok(self.conv_mma_variant(layout)),
        }
    }

    fn conv_in_variant(&self, next: Prologue) -> ConvVariant {
        let kernel = match next {
            Prologue::None => &self.kernels.conv_in,
            Prologue::Norm => &self.kernels.conv_in_norm,
            Prologue::NormSilu => &self.kernels.conv_in_silu,
        };
        let kernel = kernel.clone();
        ConvVariant { kernel, tile: tiling::CONV_TILE, threads: tiling::CONV_IN_THREADS, wgmma: false }
    }

    fn conv_mma_pair_variant(&self, layout: &ConvLayout) -> Result<ConvVariant> {
        let kernels = &self.kernels;
        let (kernel, threads) = match (layout.window == Window::Up, TileWidths::of(layout).is_narrow()) {
            (true, _) => (&kernels.conv_mma_pair_up, tiling::CONV_MMA_PAIR_THREADS),
            (false, true) => (&kernels.conv_mma_pair_96, tiling::CONV_MMA_PAIR_96_THREADS),
            (false, false) => (&kernels.conv_mma_pair, tiling::CONV_MMA_PAIR_THREADS),
        };
        let missing = || Error::Internal("pairs of frames were planned, but no kernel computes them".into());
        let kernel = kernel.clone().ok_or_else(missing)?;
        Ok(ConvVariant { kernel, tile: tiling::CONV_TILE, threads, wgmma: false })
    }

    fn conv_mma_variant(&self, layout: &ConvLayout) -> ConvVariant {
        let (kernels, all_threads) = (&self.kernels, tiling::conv_mma_threads(self.sizes.precision));
        let (kernel, threads) = match &kernels.conv_mma_up {
            _ if TileWidths::of(layout).is_narrow() => (&kernels.conv_mma_96, tiling::CONV_MMA_96_THREADS),
            Some(conv_mma_up) if layout.window == Window::Up => (conv_mma_up, all_threads),
            // By layout alone, also for launches without partial sums: the order of additions must not depend on them.
            _ if tiling::passes_partial_sums(layout) => (&kernels.conv_mma_partial, all_threads),
            _ => (&kernels.conv_mma, all_threads),
        };
        ConvVariant { kernel: kernel.clone(), tile: tiling::CONV_TILE, threads, wgmma: false }
    }

    /// Loads the kernel of a layer. The context has to be current.
    pub fn load_conv(&self, layout: &ConvLayout) -> Result<()> {
        // Which kernel it is does not depend on the rows.
        let variant = |pairs| self.conv_variant(layout, FrameShape::new(0, 0, 0), &(0..0), Prologue::None, pairs);
        let in_columns = self.sizes.in_column_pairs(layout);
        if layout.pairs.is_some() || in_columns {
            variant(true)?.kernel.function()?;
        }
        let kernel = match ConvKernel::of(layout)? {
            ConvKernel::Out => self.kernels.conv_out(layout.norm).clone(),
            _ => variant(in_columns)?.kernel,
        };
        kernel.function().map(|_| ())
    }

    fn launch_conv(
        &self,
        block: &DeviceBlock,
        weights: &WeightAddresses,
        conv: &ConvLaunch,
        (frames, launched): (&[ConvFrame<Offsets>], &LaunchedFrames),
        band: &ConvBand<Launcher>,
    ) -> Result<ConvParams> {
        let (layout, grid) = (conv.layout, gpu::tile_grid(conv.layout, conv.input));
        let variant = self.conv_variant(layout, grid, &band.rows, band.next_prologue(), launched.is_paired())?;
        let (sizes, tile, tensor_maps) = (self.sizes, variant.tile, variant.wgmma);
        let builder = ConvParamsBuilder { sizes, block, weights, conv, frames, band, launched, tile, tensor_maps };
        let params = builder.build()?;
        // Tiles do not depend on each other, so any rows of tiles may be a launch.
        let products = conv_products(layout, conv.input, tile.0 as u64).saturating_mul(frames.len() as u64);
        for rows in self.limit.launches(params.tiles_y as u64, products) {
            let first_row = params.first_row + rows.start as i32 * tile.0;
            let tiles_y = (rows.end - rows.start) as i32;
            let params = ConvParams { first_row, tiles_y, ..params };
            self.launch_tiles(&variant, layout, (launched, band.queue), params)?;
        }
        Ok(params)
    }

    fn launch_tiles(
        &self,
        variant: &ConvVariant,
        layout: &ConvLayout,
        (launched, stream): (&LaunchedFrames, Option<&CudaStream>),
        mut params: ConvParams,
    ) -> Result<()> {
        let rows = params.tiles_y * params.frames * params.channel_tiles;
        let (gpu, precision) = (&self.context.gpu, self.sizes.precision);
        let tiles = match ConvKernel::of(layout)? {
            ConvKernel::In => {
                let (tiles_x, rows) = (params.tiles_x as u32, rows as u32);
                params.run = tiling::conv_in_run(precision, gpu.multiprocessors, gpu.shared_bytes, tiles_x, rows);
                tiles_x.div_ceil(params.run as u32) * rows
            }
            _ => (params.tiles_x * rows * params.phases) as u32,
        };
        let blocks = match launched {
            _ if variant.wgmma && launched.is_paired() => {
                let cluster = tiling::CONV_PAIR_CLUSTER;
                tiles.min(gpu.multiprocessors / cluster) * cluster
            }
            LaunchedFrames::Single(_) if !variant.wgmma => tiles,
            _ => tiles.min(gpu.multiprocessors),
        };
        // SAFETY: `ConvParams` has the kernel's layout. All that it points at is in `block` and in the weights, and
        // freeing either waits for the streams.
        unsafe {
            match stream {
                Some(stream) => variant.kernel.launch(stream, [blocks, 1], variant.threads, &params),
                None => self.queue.launch(&variant.kernel, [blocks, 1], variant.threads, &params),
            }
        }
    }
}

impl LaunchConv for Launcher {
    fn conv(&self, block: &JobBlock, weights: &WeightAddresses, op: &ConvOp<Offsets>, scratch: u64) -> Result<()> {
        if ConvKernel::of(&op.layout)? == ConvKernel::Out {
            return self.launch_conv_out(block, weights, op);
        }
        let sums = !op.partial_sums.is_none();
        if sums && (op.frames.len() >= MAX_FRAMES || !tiling::passes_partial_sums(&op.layout)) {
            let count = op.frames.len();
            return Err(Error::Internal(format!("partial sums of {count} frames of {:?} were planned", op.layout)));
        }
        let most = self.limit.pieces(conv_products(&op.layout, op.input, LEAST_ROWS)) as usize;
        let most = if sums { MAX_FRAMES } else { most.min(MAX_FRAMES) };
        conv_whole(self, block, weights, &ConvLaunch::of(op, scratch), &op.frames, most)
    }

    /// Returns the parameters of its last launch. Those that the statistics need are the same in all launches.
    fn conv_band(
        &self,
        block: &JobBlock,
        weights: &WeightAddresses,
        conv: &ConvLaunch,
        frames: &[ConvFrame<Offsets>],
        band: &ConvBand<Launcher>,
    ) -> Result<ConvParams> {
        let mut params = ConvParams::default();
        for launched in LaunchedFrames::of(self.sizes, conv.layout, frames) {
            params = self.launch_conv(block, weights, conv, (frames, &launched), band)?;
        }
        Ok(params)
    }

    /// Its warps have 32 channels of a pixel each, too few for the norm of a pixel.
    fn normalises_output(&self, layout: &ConvLayout) -> Result<bool> {
        Ok(ConvKernel::of(layout)? == ConvKernel::In && layout.norm != Norm::Pixel)
    }
}
