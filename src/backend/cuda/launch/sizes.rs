//! How many bytes everything takes on a GPU: frames, weights, scratch, bands, partial sums. Plain arithmetic on shapes,
//! so that plans for a GPU can be made on a machine without one.

use super::tiling::{
    self, COLUMN_PAIR_TAPS, CONV_OUT_PIXEL_BYTES, ConvKernel, FRAME_ALIGN, MAX_FRAMES, STATISTICS_RECORD, Statistics,
    TileWidths, UNIT_BYTES, WeightOrder,
};
use crate::backend::Precision;
use crate::backend::cuda::driver::KernelArch;
use crate::backend::gpu::{self, MOMENTS_BYTES, PaddedWeights, RowSizes, WeightLayout};
use crate::ir::{BandPart, BandShape, ConvLayout, ConvProducts, FrameShape, PartialSumsSize, Sizes, Window};

/// The driver gives memory in whole pages of this size, and counts them as used.
const DEVICE_PAGE: u64 = 2 << 20;
/// Page tables on the device for pinned host memory: 8 bytes for each page of 4 KiB.
const HOST_PAGE: u64 = 4096;
const HOST_PAGE_ENTRY: u64 = 8;

/// The sizes of one precision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CudaSizes {
    pub precision: Precision,
    /// Whether there are kernels of warpgroup products.
    has_wgmma: bool,
}

impl CudaSizes {
    pub fn new(precision: Precision, arch: KernelArch) -> CudaSizes {
        CudaSizes { precision, has_wgmma: precision != Precision::Fp32 && arch.has_wgmma() }
    }

    pub fn in_column_pairs(self, layout: &ConvLayout) -> bool {
        self.has_wgmma && tiling::suits_column_pairs(layout)
    }

    /// Of a convolution of many channels. Only the kernels of warpgroup products read swizzled weights.
    pub fn weight_order(self, layout: &ConvLayout) -> WeightOrder {
        // The epilogue of `conv_wgmma` stores a K block of a phase's channels at a time.
        let k_block = TileWidths::of(layout).k_block(self.element());
        let whole = layout.window != Window::Up || layout.cout.is_multiple_of(k_block);
        if self.in_column_pairs(layout) {
            WeightOrder::ColumnPairs
        } else if self.has_wgmma && whole {
            WeightOrder::Swizzled
        } else {
            WeightOrder::Fragments
        }
    }

    /// Statistics records of one output frame.
    pub fn statistics_records_bytes(self, layout: &ConvLayout, input: FrameShape) -> u64 {
        if layout.norm.groups() == 0 {
            return 0;
        }
        let grid = gpu::tile_grid(layout, input);
        let views = if self.in_column_pairs(layout) { 2 } else { 1 };
        let columns = grid.width.div_ceil(views).div_ceil(STATISTICS_RECORD.1);
        let records = grid.height.div_ceil(STATISTICS_RECORD.0) * columns;
        layout.window.phases() * views * records * tiling::padded_outputs(layout) / 4 * MOMENTS_BYTES
    }

    pub fn weight_layout(self, layout: &ConvLayout) -> WeightLayout {
        let (element, widths) = (self.element(), TileWidths::of(layout));
        let (tiles, outputs) = (tiling::channel_tiles(layout), tiling::padded_outputs(layout));
        let k_block = widths.k_block(element);
        let slab_bytes = match ConvKernel::of(layout) {
            Ok(ConvKernel::In) => outputs * 9 * 4 * element,
            Ok(ConvKernel::Out) => layout.cin.div_ceil(k_block / 2) * (k_block / 2) * 32 * element,
            _ => {
                let taps = if self.in_column_pairs(layout) { COLUMN_PAIR_TAPS } else { layout.window.taps() };
                taps * layout.cin.div_ceil(k_block) * tiles * widths.bytes()
            }
        };
        let shortcut_bytes = layout.shortcut.map_or(0, |cin| cin.div_ceil(k_block) * tiles * widths.bytes());
        let inputs = layout.cin.next_multiple_of(64);
        WeightLayout::new(layout, &PaddedWeights { slab_bytes, shortcut_bytes, inputs, outputs })
    }

    /// Partial sums of a downsampling convolution for one output frame, in f32 in every precision.
    fn down_partial_sums_bytes(self, layout: &ConvLayout, input: FrameShape) -> Option<u64> {
        let pixels = layout.window.output(input, layout.cout).pixels();
        tiling::passes_partial_sums(layout).then(|| pixels * tiling::output_stride(layout.cout) * 4)
    }

    /// Partial sums of the convolution to pixels, for the next two output frames.
    fn conv_out_partial_sums_bytes(self, layout: &ConvLayout, input: FrameShape) -> Option<u64> {
        self.normalises_itself(layout).then(|| input.pixels() * CONV_OUT_PIXEL_BYTES)
    }
}

impl RowSizes for CudaSizes {
    const FRAME_ALIGN: u64 = FRAME_ALIGN;

    fn element(self) -> u64 {
        self.precision.bytes()
    }

    fn channel_stride(self, channels: u64) -> u64 {
        tiling::channel_stride(channels)
    }

    fn data_bytes(self, shape: FrameShape) -> u64 {
        let stride = tiling::input_stride(shape.channels);
        (shape.pixels() * stride * self.element()).next_multiple_of(UNIT_BYTES)
    }

    fn channel_tiles(self, layout: &ConvLayout) -> u64 {
        tiling::channel_tiles(layout)
    }
}

impl Sizes for CudaSizes {
    fn frame_bytes(&self, shape: FrameShape, groups: u64) -> u64 {
        (self.data_bytes(shape) + self.statistics_bytes(groups)).next_multiple_of(FRAME_ALIGN)
    }

    fn u8_frame_bytes(&self, shape: FrameShape) -> Option<u64> {
        Some((self.u8_row_bytes(shape) * shape.height).next_multiple_of(FRAME_ALIGN))
    }

    fn weight_bytes(&self, layout: &ConvLayout) -> u64 {
        self.weight_layout(layout).end.next_multiple_of(FRAME_ALIGN)
    }

    /// Statistics records of the frames of a launch.
    fn conv_scratch(&self, layout: &ConvLayout, input: FrameShape, frames: u64) -> u64 {
        frames.min(MAX_FRAMES as u64) * self.statistics_records_bytes(layout, input)
    }

    fn attention_scratch(&self, _: FrameShape, _: u64) -> u64 {
        0
    }

    fn band_bytes(&self, shape: &BandShape, parts: &[BandPart], outputs: u64) -> Option<u64> {
        let is_streamed = |part: &BandPart| matches!(part, BandPart::Output(_) | BandPart::StatisticsOutput);
        // Statistics of streamed outputs are computed per band, from fours of channels.
        let is_possible = !parts.iter().any(is_streamed) || Statistics::of(&shape.layout) != Statistics::Frames;
        is_possible.then(|| self.band_buffers(shape, parts, outputs))
    }

    fn normalises_itself(&self, layout: &ConvLayout) -> bool {
        matches!(ConvKernel::of(layout), Ok(ConvKernel::Out))
    }

    fn partial_sums(&self, layout: &ConvLayout, input: FrameShape, pending: u64) -> Option<PartialSumsSize> {
        let (bytes, in_place) = match pending {
            1 => (self.down_partial_sums_bytes(layout, input)?, false),
            // Each thread reads the sums of its pixels before it writes them.
            2 => (self.conv_out_partial_sums_bytes(layout, input)?, true),
            _ => return None,
        };
        Some(PartialSumsSize { bytes: bytes.next_multiple_of(FRAME_ALIGN), in_place })
    }

    /// A frame in the widest element type.
    fn staging_bytes(&self, shape: FrameShape) -> u64 {
        (shape.elements() * 4).next_multiple_of(FRAME_ALIGN)
    }

    /// The fades of all rows and columns.
    fn fade_bytes(&self, shape: FrameShape) -> u64 {
        ((shape.height + shape.width) * 4).next_multiple_of(FRAME_ALIGN)
    }

    /// Bands of a frame are addressed through a tensor map whose base is the start of the whole frame.
    fn least_band_offset(&self, shape: FrameShape) -> u64 {
        self.data_bytes(shape)
    }

    fn effective_products(&self, layout: &ConvLayout, work: ConvProducts) -> f64 {
        let in_pairs = layout.pairs.is_some() && !work.starts_clip;
        let products = work.products * TileWidths::of(layout).cost(layout.cout, in_pairs);
        products.max(work.elements * tiling::element_products(layout, work.starts_clip))
    }

    fn block_bytes(&self, bytes: u64) -> u64 {
        bytes.checked_next_multiple_of(DEVICE_PAGE).unwrap_or(u64::MAX)
    }

    fn mapping_bytes(&self, host: u64) -> u64 {
        self.block_bytes(host / HOST_PAGE * HOST_PAGE_ENTRY)
    }
}
