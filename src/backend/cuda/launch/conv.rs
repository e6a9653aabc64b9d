//! Launches convolutions from pixels and of many channels, whole or in bands.

use std::ops::Range;

use super::conv_params::{ConvParamsBuilder, LaunchedFrames};
use super::kernels::WgmmaKernels;
use super::launcher::Launcher;
use super::params::ConvParams;
use super::queue::JobBlock;
use super::tiling::{self, ConvIn, ConvKernel, MAX_FRAMES, TileWidths, WeightOrder};
use crate::backend::cuda::driver::{CudaStream, DeviceBlock, Kernel};
use crate::backend::gpu::{self, ConvBand, ConvLaunch, LaunchConv, WeightAddresses, conv_products, conv_whole};
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
    from_pixels: Option<ConvIn>,
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
        ConvVariant { kernel, tile, threads: tiling::CONV_WGMMA_THREADS, wgmma: true, from_pixels: None }
    }

    fn variant(&self, layout: &ConvLayout, tile: (i32, i32)) -> ConvVariant {
        let kernel = match layout.window {
            Window::Down => &self.down,
            _ if TileWidths::of(layout).is_narrow() => &self.plain_96,
            _ => &self.plain,
        };
        ConvVariant {
            kernel: kernel.clone(),
            tile,
            threads: tiling::CONV_WGMMA_THREADS,
            wgmma: true,
            from_pixels: None,
        }
    }
}

impl Launcher {
    /// Of a convolution of many channels.
    fn conv_variant(
        &self,
        layout: &ConvLayout,
        grid: FrameShape,
        rows: &Range<u64>,
        pairs: bool,
    ) -> Result<ConvVariant> {
        let wgmma = self.kernels.conv_wgmma.as_ref();
        let wgmma = wgmma.filter(|_| self.sizes.weight_order(layout) != WeightOrder::Fragments);
        match wgmma {
            Some(wgmma) if pairs => Ok(wgmma.pair_variant(layout, self.sizes.in_column_pairs(layout))),
            Some(wgmma) => Ok(wgmma.variant(layout, tiling::conv_wgmma_tile(grid, rows))),
            None if pairs => self.conv_mma_pair_variant(layout),
            None => Ok(self.conv_mma_variant(layout)),
        }
    }

    /// Of a convolution from pixels. `next`: the prologue that is applied to the output.
    fn conv_in_variant(&self, frames: &[ConvFrame<Offsets>], next: Prologue) -> ConvVariant {
        let alone = next == Prologue::None && frames.iter().all(|frame| frame.terms.len() == 1);
        let kernel = match next {
            Prologue::None if alone => &self.kernels.conv_in_alone,
            Prologue::None => &self.kernels.conv_in,
            Prologue::Norm => &self.kernels.conv_in_norm,
            Prologue::NormSilu => &self.kernels.conv_in_silu,
        };
        let (tile, threads) = (tiling::CONV_TILE, tiling::CONV_IN_THREADS);
        let from_pixels = Some(ConvIn { precision: self.sizes.precision, alone });
        ConvVariant { kernel: kernel.clone(), tile, threads, wgmma: false, from_pixels }
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
        Ok(ConvVariant { kernel, tile: tiling::CONV_TILE, threads, wgmma: false, from_pixels: None })
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
        ConvVariant { kernel: kernel.clone(), tile: tiling::CONV_TILE, threads, wgmma: false, from_pixels: None }
    }

    /// Loads the kernel of a layer. The context has to be current.
    pub fn load_conv(&self, layout: &ConvLayout) -> Result<()> {
        // Which kernel it is does not depend on the rows.
        let variant = |pairs| self.conv_variant(layout, FrameShape::new(0, 0, 0), &(0..0), pairs);
        let in_columns = self.sizes.in_column_pairs(layout);
        if layout.pairs.is_some() || in_columns {
            variant(true)?.kernel.function()?;
        }
        let of = &self.kernels;
        let kernels = match ConvKernel::of(layout)? {
            // Which one it is depends on the frames of a launch, and on the next layer.
            ConvKernel::In => {
                [&of.conv_in, &of.conv_in_alone, &of.conv_in_norm, &of.conv_in_silu].map(Kernel::clone).into()
            }
            ConvKernel::Out => [of.conv_out(layout.norm), of.conv_out_alone(layout.norm)].map(Kernel::clone).into(),
            ConvKernel::Main => vec![variant(in_columns)?.kernel],
        };
        kernels.iter().try_for_each(|kernel| kernel.function().map(|_| ()))
    }

    fn launch_conv(
        &self,
        block: &DeviceBlock,
        weights: &WeightAddresses,
        conv: &ConvLaunch,
        frames: &[ConvFrame<Offsets>],
        launched: &LaunchedFrames,
        band: &ConvBand<Launcher>,
    ) -> Result<ConvParams> {
        let (layout, grid) = (conv.layout, gpu::tile_grid(conv.layout, conv.input));
        let next = band.next_prologue();
        let variant = match ConvKernel::of(layout)? {
            ConvKernel::In => self.conv_in_variant(frames, next),
            ConvKernel::Main if next == Prologue::None => {
                self.conv_variant(layout, grid, &band.rows, launched.is_paired())?
            }
            of => return Err(Error::Internal(format!("{of:?} neither runs in bands nor normalises its output"))),
        };
        let (sizes, tile, tensor_maps) = (self.sizes, variant.tile, variant.wgmma);
        let builder = ConvParamsBuilder { sizes, block, weights, conv, frames, band, launched, tile, tensor_maps };
        let params = builder.build()?;
        // Tiles do not depend on each other, so any rows of tiles may be a launch.
        let products = conv_products(layout, conv.input, tile.0 as u64).saturating_mul(frames.len() as u64);
        for rows in self.limit.launches(params.tiles_y as u64, products) {
            let first_row = params.first_row + rows.start as i32 * tile.0;
            let tiles_y = (rows.end - rows.start) as i32;
            let params = ConvParams { first_row, tiles_y, ..params };
            self.launch_tiles(&variant, launched, band.queue, params)?;
        }
        Ok(params)
    }

    fn launch_tiles(
        &self,
        variant: &ConvVariant,
        launched: &LaunchedFrames,
        stream: Option<&CudaStream>,
        mut params: ConvParams,
    ) -> Result<()> {
        let rows = params.tiles_y * params.frames * params.channel_tiles;
        let gpu = &self.context.gpu;
        let tiles = match variant.from_pixels {
            Some(form) => {
                let (tiles_x, rows) = (params.tiles_x as u32, rows as u32);
                params.run = form.run(gpu.multiprocessors, gpu.shared_bytes, tiles_x, rows);
                tiles_x.div_ceil(params.run as u32) * rows
            }
            None => (params.tiles_x * rows * params.phases) as u32,
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
            params = self.launch_conv(block, weights, conv, frames, &launched, band)?;
        }
        Ok(params)
    }

    /// Its warps have 32 channels of a pixel each, too few for the norm of a pixel.
    fn normalises_output(&self, layout: &ConvLayout) -> Result<bool> {
        Ok(ConvKernel::of(layout)? == ConvKernel::In && layout.norm != Norm::Pixel)
    }
}
