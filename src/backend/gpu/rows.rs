//! Rows of bands: how many a band has, which it reads beside its own, and the bytes of a band's parts. Needs no device.

use std::ops::Range;

use crate::ir::{BandPart, BandShape, CacheFormat, ConvLayout, FrameShape, Window};

/// Pixels of a band, times channels, that keep a GPU busy, for one channel tile. Bands of few channels, or of one
/// frame, which mostly waits for its cache, do with fewer: both are used when memory is short.
const BAND_WORK: u64 = 1 << 24;
const BAND_CHANNELS: u64 = 128;
const BAND_FRAME_PIXELS: u64 = 1 << 16;
/// Bands begin at whole tiles of every kernel; the tallest have this many rows.
const BAND_ROWS: u64 = 16;
/// Rows above and below a band that a 3x3 convolution reads.
const HALO: u64 = 1;
/// Rows below a band that are rematerialised with it, so that the next band begins at whole tiles of the producing
/// layer.
pub const REMATERIALISED_LEAD: u64 = 16;
/// Bands in flight: one is fetched, one computed, one given back.
pub const BANDS_IN_FLIGHT: u64 = 3;

/// Kernels load so many bytes at a time. Rows in 8 bits have whole units.
const UNIT_BYTES: u64 = 16;
/// Mean and another moment, in f32.
pub const MOMENTS_BYTES: u64 = 8;

/// How a device lays out rows of frames.
pub trait RowSizes: Copy + Send + Sync {
    /// Frames, and parts of a band buffer, begin at multiples of this.
    const FRAME_ALIGN: u64;
    /// Bytes of an activation, and of a weight.
    fn element(self) -> u64;
    /// Channels that a pixel takes in memory.
    fn channel_stride(self, channels: u64) -> u64;
    /// Pixels of a frame. Its statistics follow.
    fn data_bytes(self, shape: FrameShape) -> u64;
    /// Blocks of output channels that are computed apart from each other.
    fn channel_tiles(self, layout: &ConvLayout) -> u64;

    fn row_bytes(self, shape: FrameShape) -> u64 {
        shape.width * self.channel_stride(shape.channels) * self.element()
    }

    /// A row in 8 bits: pixels, then their scales in f16.
    fn u8_row_bytes(self, shape: FrameShape) -> u64 {
        let channels = self.channel_stride(shape.channels);
        let scales = channels / CacheFormat::block(channels) * 2;
        (shape.width * (channels + scales)).next_multiple_of(UNIT_BYTES)
    }

    /// Mean and another moment of each group of channels.
    fn statistics_bytes(self, groups: u64) -> u64 {
        groups * MOMENTS_BYTES
    }

    /// A row of a cached frame, or of a part of one.
    fn cached_row_bytes(self, shape: FrameShape, format: CacheFormat) -> u64 {
        match format {
            CacheFormat::Exact => self.row_bytes(shape),
            CacheFormat::U8 => self.u8_row_bytes(shape),
        }
    }

    /// All band buffers of a banded convolution of `outputs` frames.
    fn band_buffers(self, shape: &BandShape, parts: &[BandPart], outputs: u64) -> u64 {
        // A rematerialised input is as much work as an output.
        let rematerialised = parts.iter().filter(|part| matches!(part, BandPart::Rematerialised(_))).count();
        let tiles = self.channel_tiles(&shape.layout) * shape.layout.window.phases();
        let rows = band_rows(shape.input, tiles, outputs + rematerialised as u64);
        BANDS_IN_FLIGHT * parts.iter().map(|part| self.band_part_bytes(shape, *part, rows)).sum::<u64>()
    }

    /// A part of a band of so many rows.
    fn band_part_bytes(self, shape: &BandShape, part: BandPart, rows: u64) -> u64 {
        let output = shape.layout.window.output(shape.input, shape.layout.cout);
        let shortcut = output.with_channels(shape.layout.shortcut.unwrap_or(0));
        let host_part = FrameShape { width: shape.columns.host_width(), ..shape.input };
        let (row, height, rows) = match part {
            BandPart::BlockInput(_) | BandPart::Input(_) | BandPart::Rounded(_) => {
                (self.row_bytes(shape.input), shape.input.height, rows + 2 * HALO)
            }
            BandPart::Rematerialised(_) => {
                (self.row_bytes(shape.input), shape.input.height, HALO + rows + REMATERIALISED_LEAD)
            }
            BandPart::HostColumns(_) => {
                (self.cached_row_bytes(host_part, shape.format), shape.input.height, rows + 2 * HALO)
            }
            BandPart::NewHostColumns(_) => (self.cached_row_bytes(host_part, shape.format), shape.input.height, rows),
            BandPart::Shortcut(_) => (self.row_bytes(shortcut), shortcut.height, rows),
            BandPart::Output(_) | BandPart::StatisticsOutput => {
                (self.row_bytes(output), output.height, rows * output_rows(&shape.layout))
            }
        };
        (row * rows.min(height)).next_multiple_of(Self::FRAME_ALIGN)
    }
}

/// The pixels that tiles cover: the output of one phase.
pub fn tile_grid(layout: &ConvLayout, input: FrameShape) -> FrameShape {
    match layout.window {
        Window::Up => input,
        window => window.output(input, layout.cout),
    }
}

/// Output rows of one row of the grid.
pub fn output_rows(layout: &ConvLayout) -> u64 {
    if layout.window == Window::Up { 2 } else { 1 }
}

/// Rows of a frame, with those above and below that a 3x3 convolution reads for them.
pub fn with_halo(rows: &Range<u64>, height: u64) -> Range<u64> {
    rows.start.saturating_sub(HALO)..(rows.end + HALO).min(height)
}

/// Rows that a band of `frames` frames wants, where each pixel is computed in `tiles` tiles. `shape` is that of the
/// input. Enough to keep the GPU busy, and few enough that bands overlap.
fn band_rows(shape: FrameShape, tiles: u64, frames: u64) -> u64 {
    let pixels = (BAND_WORK / shape.channels.max(BAND_CHANNELS)).min(frames * BAND_FRAME_PIXELS);
    let rows = pixels.div_ceil(shape.width * frames * tiles) / BAND_ROWS * BAND_ROWS;
    rows.clamp(BAND_ROWS, most_band_rows(shape))
}

fn most_band_rows(shape: FrameShape) -> u64 {
    shape.height.div_ceil(BANDS_IN_FLIGHT).next_multiple_of(BAND_ROWS)
}

/// Rows that a band may have.
pub fn possible_band_rows(shape: FrameShape) -> impl Iterator<Item = u64> {
    (BAND_ROWS..=most_band_rows(shape)).step_by(BAND_ROWS as usize)
}

/// As many bands as with `most` rows, of sizes as equal as possible.
pub fn even_band_rows(shape: FrameShape, most: u64) -> u64 {
    let bands = shape.height.div_ceil(most);
    shape.height.div_ceil(bands).next_multiple_of(BAND_ROWS)
}
