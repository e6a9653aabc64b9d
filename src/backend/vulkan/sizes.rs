//! How many bytes everything takes: frames, weights, scratch, bands. Plain arithmetic on shapes, which needs no device.

use crate::backend::Precision;
use crate::backend::gpu::{self, MOMENTS_BYTES, PaddedWeights, RowSizes, WeightLayout};
use crate::ir::{BandPart, BandShape, ConvLayout, ConvProducts, FrameShape, PartialSumsSize, Sizes};

/// Rows and columns of pixels that a tile of a convolution has, and a record of statistics covers.
pub const TILE: (u64, u64) = (8, 16);
/// Input channels of weights come in so many.
pub const K_BLOCK: u64 = 32;
/// Frames begin at multiples of this.
pub const FRAME_ALIGN: u64 = 256;
/// The most frames of one launch.
pub const MAX_FRAMES: usize = 32;

/// Channels that a pixel takes in memory. Kernels load four at a time; a row of a cache has whole units of 16 bytes.
pub const fn channel_stride(channels: u64) -> u64 {
    if channels <= 3 { 4 } else { channels.next_multiple_of(8) }
}

/// Output channels of a tile, by the layout alone. Narrower ones where they fill up fewer channels.
pub fn tile_channels(layout: &ConvLayout) -> u64 {
    let padded = |width: u64| layout.cout.next_multiple_of(width);
    match layout.cout {
        0..=32 => 32,
        _ if padded(96) < padded(128) => 96,
        _ => 128,
    }
}

/// Output channels with those that fill up the last tile.
pub fn padded_outputs(layout: &ConvLayout) -> u64 {
    layout.cout.next_multiple_of(tile_channels(layout))
}

/// The sizes of one precision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VulkanSizes {
    pub precision: Precision,
}

impl VulkanSizes {
    /// Records of one output frame.
    pub fn records_bytes(self, layout: &ConvLayout, input: FrameShape) -> u64 {
        if layout.norm.groups() == 0 {
            return 0;
        }
        let grid = gpu::tile_grid(layout, input);
        let tiles = grid.height.div_ceil(TILE.0) * grid.width.div_ceil(TILE.1);
        layout.window.phases() * tiles * padded_outputs(layout) * MOMENTS_BYTES
    }

    /// Weights of one tap: [input channel][output channel], both padded.
    pub fn tap_bytes(self, layout: &ConvLayout, inputs: u64) -> u64 {
        channel_stride(inputs).next_multiple_of(K_BLOCK) * padded_outputs(layout) * self.element()
    }

    pub fn weight_layout(self, layout: &ConvLayout) -> WeightLayout {
        let padded = PaddedWeights {
            slab_bytes: layout.window.taps() * self.tap_bytes(layout, layout.cin),
            shortcut_bytes: layout.shortcut.map_or(0, |cin| self.tap_bytes(layout, cin)),
            inputs: channel_stride(layout.cin),
            outputs: padded_outputs(layout),
        };
        WeightLayout::new(layout, &padded)
    }
}

impl RowSizes for VulkanSizes {
    const FRAME_ALIGN: u64 = FRAME_ALIGN;

    fn element(self) -> u64 {
        self.precision.bytes()
    }

    fn channel_stride(self, channels: u64) -> u64 {
        channel_stride(channels)
    }

    fn data_bytes(self, shape: FrameShape) -> u64 {
        (self.row_bytes(shape) * shape.height).next_multiple_of(16)
    }

    fn channel_tiles(self, layout: &ConvLayout) -> u64 {
        padded_outputs(layout) / tile_channels(layout)
    }
}

impl Sizes for VulkanSizes {
    fn frame_bytes(&self, shape: FrameShape, groups: u64) -> u64 {
        (self.data_bytes(shape) + self.statistics_bytes(groups)).next_multiple_of(FRAME_ALIGN)
    }

    fn u8_frame_bytes(&self, shape: FrameShape) -> Option<u64> {
        Some((self.u8_row_bytes(shape) * shape.height).next_multiple_of(FRAME_ALIGN))
    }

    fn weight_bytes(&self, layout: &ConvLayout) -> u64 {
        self.weight_layout(layout).end.next_multiple_of(FRAME_ALIGN)
    }

    /// Records of the frames of a launch.
    fn conv_scratch(&self, layout: &ConvLayout, input: FrameShape, frames: u64) -> u64 {
        frames.min(MAX_FRAMES as u64) * self.records_bytes(layout, input)
    }

    fn attention_scratch(&self, _: FrameShape, _: u64) -> u64 {
        0
    }

    fn band_bytes(&self, shape: &BandShape, parts: &[BandPart], outputs: u64) -> Option<u64> {
        Some(self.band_buffers(shape, parts, outputs))
    }

    fn normalises_itself(&self, _: &ConvLayout) -> bool {
        false
    }

    fn partial_sums(&self, _: &ConvLayout, _: FrameShape, _: u64) -> Option<PartialSumsSize> {
        None
    }

    /// A frame in the widest element type.
    fn staging_bytes(&self, shape: FrameShape) -> u64 {
        (shape.elements() * 4).next_multiple_of(FRAME_ALIGN)
    }

    /// Fades travel with a launch's parameters.
    fn fade_bytes(&self, _: FrameShape) -> u64 {
        0
    }

    fn least_band_offset(&self, _: FrameShape) -> u64 {
        0
    }

    fn effective_products(&self, _: &ConvLayout, work: ConvProducts) -> f64 {
        work.products
    }

    fn block_bytes(&self, bytes: u64) -> u64 {
        bytes
    }

    fn mapping_bytes(&self, _: u64) -> u64 {
        0
    }
}
