//! How the kernels divide their work: tiles, threads, shared memory, rows of a band, and which layers they can do. The
//! numbers are those of `kernels/*.cu` and `kernels/*.cuh`. Needs no device and no driver.

use std::ops::Range;

use crate::backend::Precision;
use crate::error::{Error, Result};
use crate::ir::{ConvLayout, FrameShape, Norm, PairSlabs, Prologue, Window};

/// The most frames of one launch.
pub const MAX_FRAMES: usize = 32;
/// Bytes of a pixel in a patch, and of an output channel in a tile of weights.
pub const ROW_BYTES: u64 = 128;
/// Output channels of a tile.
pub const TILE_CHANNELS: u64 = 128;

/// What the kernels of many channels multiply at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TileWidths {
    /// Output channels of a tile.
    pub columns: u64,
    /// Bytes of a pixel in a patch, and of an output channel in a tile of weights.
    pub row_bytes: u64,
}

impl TileWidths {
    pub const WIDE: TileWidths = TileWidths { columns: TILE_CHANNELS, row_bytes: ROW_BYTES };
    /// For widths that the wide tiles do not divide, such as 96 and 192.
    pub const NARROW: TileWidths = TileWidths { columns: 96, row_bytes: 64 };

    /// By the layout alone, on every card. Narrow tiles take no statistics, and have no kernels that shrink frames or
    /// upsample in pairs.
    pub fn of(layout: &ConvLayout) -> TileWidths {
        let has_kernels = match layout.window {
            Window::Point | Window::Same => true,
            Window::Up => layout.pairs.is_none(),
            Window::Down => false,
        };
        let is_main = matches!(ConvKernel::of(layout), Ok(ConvKernel::Main));
        let padded = |widths: TileWidths| layout.cout.next_multiple_of(widths.columns);
        let gains = padded(TileWidths::NARROW) < padded(TileWidths::WIDE);
        if layout.norm == Norm::Pixel && is_main && has_kernels && gains { Self::NARROW } else { Self::WIDE }
    }

    pub fn is_narrow(self) -> bool {
        self == TileWidths::NARROW
    }

    /// The time of `cout` output channels, as a part of that of as many in whole wide tiles. Less than a tile is bound by
    /// its input, not by products. `in_pairs`: by the kernels of pairs of frames.
    pub fn cost(self, cout: u64, in_pairs: bool) -> f64 {
        let whole = if cout > self.columns { cout.next_multiple_of(self.columns) } else { cout };
        let narrow = if in_pairs { NARROW_PAIR_COST } else { NARROW_COST };
        let slower = if self.is_narrow() { narrow } else { 1.0 };
        slower * whole as f64 / cout as f64
    }

    /// Packed weights of one tap.
    pub const fn bytes(self) -> u64 {
        self.columns * self.row_bytes
    }

    /// Input channels of a patch, for elements of so many bytes.
    pub const fn k_block(self, element: u64) -> u64 {
        self.row_bytes / element
    }
}
/// The time of a product in a narrow tile, as a part of that in a wide one, in the kernels of pairs: by whole clips of
/// Wan 2.1 on an H200 (2026-11-18).
const NARROW_PAIR_COST: f64 = 1.17;
/// The same in the kernels of single frames: by whole stills of Qwen-Image, in the same run. There the wide tile leaves
/// a tenth of the shared memory's rate unused, by count, and the narrow one nothing.
const NARROW_COST: f64 = 1.44;
/// Products at the card's rate that take as long as reading and writing an element: on an H200, by the rates of its
/// profile.
const PASS_PRODUCTS: f64 = 357.0;
/// Passes over the input that the convolution to pixels takes: on an H200 659 us for two frames of 720p (2026-11-17).
const OUT_PASSES: f64 = 2.5;

/// What the kernels from and to pixels take for each element and term, in products. The one from pixels takes as long as
/// reading and writing its output. The one to pixels reads a frame once for all its terms. Networks with GroupNorm are
/// left out: the rate of products was fitted to them without this.
pub fn element_products(layout: &ConvLayout, starts_clip: bool) -> f64 {
    let terms = if starts_clip { 1.0 } else { layout.slabs as f64 };
    match ConvKernel::of(layout) {
        Ok(ConvKernel::In) if layout.norm == Norm::Pixel => PASS_PRODUCTS,
        Ok(ConvKernel::Out) if layout.norm == Norm::Pixel => OUT_PASSES * PASS_PRODUCTS / terms,
        _ => 0.0,
    }
}
/// Rows and columns of pixels that one statistics record covers.
pub const STATISTICS_RECORD: (u64, u64) = (8, 16);
/// Frames begin at multiples of this.
pub const FRAME_ALIGN: u64 = 256;
/// Bytes that a thread loads at once.
pub const UNIT_BYTES: u64 = 16;
/// Pixels of the frames of a launch that keep the GPU busy.
pub const BUSY_PIXELS: u64 = 1 << 18;
/// More frames of a chunk gain nothing.
pub const CHUNK_FRAMES: u64 = 8;
/// Tiles of every kernel begin at multiples of this many columns.
pub const COLUMN_STEP: u64 = 32;
/// Added to the variance of a norm.
pub const EPSILON: f32 = 1e-6;

/// Threads of a block that shares a multiprocessor with `conv_wgmma`; `kernels/norm.cu` bounds its registers.
pub const CO_RESIDENT_THREADS: u32 = 128;
pub const STATISTICS_THREADS: u32 = 256;
pub const ATTENTION_THREADS: u32 = 256;
pub const ATTENTION_WGMMA_THREADS: u32 = 512;
pub const ATTENTION_WIDE_THREADS: u32 = 384;
pub const LEVEL_THREADS: u32 = 256;
pub const PIXEL_THREADS: u32 = 256;
/// The most channels of a tensor that have maps of their own.
pub const MAX_MAPS: usize = 128;
pub const CONV_OUT_THREADS: u32 = 192;
pub const CONV_OUT_ALONE_THREADS: u32 = 384;
/// On a multiprocessor.
pub const CONV_OUT_ALONE_BLOCKS: u32 = 2;
pub const CONV_IN_THREADS: u32 = 256;
pub const CONV_WGMMA_THREADS: u32 = 384;
pub const fn conv_mma_threads(precision: Precision) -> u32 {
    64 * precision.bytes() as u32
}

pub const CONV_MMA_PAIR_THREADS: u32 = 256;
/// Of the same kernels with narrow tiles.
pub const CONV_MMA_96_THREADS: u32 = 192;
pub const CONV_MMA_PAIR_96_THREADS: u32 = 384;

/// Dynamic shared memory. Leaves room for a co-resident block that has none: each block takes 1 KiB of the driver's.
pub const CONV_WGMMA_SHARED: u32 = 230_528;
/// Two patches.
pub const CONV_MMA_SHARED: u32 = 2 * 23_040;
/// Six half patches, where each thread loads them from, sums that are exchanged, moments, and tiles.
pub const CONV_MMA_PAIR_SHARED: u32 = 6 * 11_520 + 2 * 256 * 16 + 16_384 + 768 + 8 * 20;
/// The same with narrow tiles.
pub const CONV_MMA_96_SHARED: u32 = 2 * 11_520;
pub const CONV_MMA_PAIR_96_SHARED: u32 = 6 * 11_520 + 2 * 256 * 16 + 12_288 + 1_152 + 12 * 20;
pub const ATTENTION_WGMMA_SHARED: u32 = 231_936;
/// Keys and values of two steps, and their scores.
pub const ATTENTION_SHARED: u32 = (64 + 16) << 10;
/// Queries, probabilities, and what warps tell each other of their keys.
pub const fn attention_wide_shared(precision: Precision) -> u32 {
    let queries = attention_wide_queries(precision);
    let (warps, units) = (ATTENTION_WIDE_THREADS as u64 / 32, UNIT_BYTES / precision.bytes());
    let (row, probabilities) = (MOST_WIDE_ATTENTION_CHANNELS, warps * 16 + units);
    (queries * ((row + probabilities) * precision.bytes() + 2 * warps * 4)) as u32
}
/// Products, weights and norm of `span` output frames that an input frame contributes to, and partial sums.
pub const fn conv_out_shared(precision: Precision, span: u64) -> u32 {
    let (rows, columns) = conv_out_tile(precision);
    let (products, weights) = ((rows + 2) * (columns + 2) * (27 * span + 2) * 4, span * 128 * 32 * precision.bytes());
    let sums = if span == 1 { 0 } else { CONV_OUT_PIXEL_BYTES * rows * columns };
    (products + weights + 128 * 8 + sums) as u32
}

/// Partial sums of a pixel of `conv_out`: three outputs of two frames, in f32 in every precision.
pub const CONV_OUT_PIXEL_BYTES: u64 = 2 * 3 * 4;

/// Rows and columns of a tile. Wider ones take more shared memory than every GPU has.
pub const fn conv_out_tile(precision: Precision) -> (u64, u64) {
    match precision {
        Precision::Fp16 | Precision::Bf16 => (8, 16),
        Precision::Fp32 => (6, 16),
    }
}

/// Queries of a block: as many warps share 16 queries as an element has bytes.
pub const fn attention_queries(precision: Precision) -> u64 {
    8 / precision.bytes() * 16
}

/// Of a block of `attention_wide`.
pub const fn attention_wide_queries(precision: Precision) -> u64 {
    64 / precision.bytes()
}

/// Queries of a block of `attention_wgmma`, blocks that share their loads, and pixels of such a load.
pub const ATTENTION_WGMMA_QUERIES: u64 = 64;
pub const ATTENTION_WGMMA_CLUSTER: u64 = 2;
pub const ATTENTION_WGMMA_BOX: u32 = 32;

/// Neighbouring tiles that a block of `conv_in` processes at most: shared memory has room for no more.
pub const fn longest_conv_in_run(precision: Precision) -> u32 {
    16 / precision.bytes() as u32
}

/// Blocks of `conv_in` and of `conv_in_alone` on a multiprocessor at most.
pub const CONV_IN_BLOCKS: u32 = 2;
pub const CONV_IN_ALONE_BLOCKS: u32 = 3;

/// A form of `conv_in`. `alone`: for frames of one term each.
#[derive(Clone, Copy)]
pub struct ConvIn {
    pub precision: Precision,
    pub alone: bool,
}

impl ConvIn {
    pub const fn shared(self) -> u32 {
        let (element, run) = (self.precision.bytes() as u32, longest_conv_in_run(self.precision));
        let (terms, taps) = if self.alone { (1, 12) } else { (3, 28) };
        let weights = 128 * (4 * taps + 16 / element) * element;
        let pitch = run * 16 + if element == 2 { 10 } else { 2 };
        weights + terms * 10 * pitch * 4 * element + 128 * (8 + 4) + run * 4 * 3 * 32 * 4
    }

    /// On a multiprocessor at most.
    fn blocks(self) -> u32 {
        if self.alone && self.precision != Precision::Fp32 { CONV_IN_ALONE_BLOCKS } else { CONV_IN_BLOCKS }
    }

    /// How many of the `tiles_x` tiles in a row a block processes. Loading a block's weights and patch costs about as
    /// much as one tile, so longer runs save work; shorter ones keep every multiprocessor busy.
    pub fn run(self, multiprocessors: u32, shared_bytes: u32, tiles_x: u32, rows: u32) -> i32 {
        // A block may have about all the shared memory of a multiprocessor.
        let at_once = multiprocessors * (shared_bytes / self.shared()).clamp(1, self.blocks());
        let time = |run: &u32| (tiles_x.div_ceil(*run) * rows).div_ceil(at_once) * (run + 1);
        (1..=longest_conv_in_run(self.precision)).rev().min_by_key(time).unwrap_or(1) as i32
    }
}

/// Tile of `conv_in`, `conv_mma` and `conv_mma_pair`.
pub const CONV_TILE: (i32, i32) = (8, 16);

/// Tile of `conv_wgmma`: 8 x 32 pixels where that wastes less than 16 x 16, or where 16 rows would reach beyond the
/// band.
pub fn conv_wgmma_tile(grid: FrameShape, rows: &Range<u64>) -> (i32, i32) {
    let tiles = |rows: u64, columns: u64| grid.height.div_ceil(rows) * grid.width.div_ceil(columns);
    let whole =
        |tile: u64| rows.start.is_multiple_of(tile) && (rows.end.is_multiple_of(tile) || rows.end == grid.height);
    if tiles(8, 32) < tiles(16, 16) || !whole(16) { (8, 32) } else { (16, 16) }
}

/// Blocks of a cluster of `conv_wgmma_pair`, pixels of a block, and pixels of a cluster: its blocks are side by side.
pub const CONV_PAIR_CLUSTER: u32 = 2;
pub const CONV_PAIR_BLOCK: (i32, i32) = (8, 16);
pub const CONV_PAIR_TILE: (i32, i32) = (CONV_PAIR_BLOCK.0, CONV_PAIR_BLOCK.1 * CONV_PAIR_CLUSTER as i32);
/// Bytes of a pixel in a patch of the kernels of pairs, and of an output channel in a slab's half of a tile of weights.
pub const PAIR_ROW_BYTES: u64 = ROW_BYTES / 2;

/// Whether the kernels of warpgroup products compute a layer by pairs of columns: Winograd F(2,3) along rows. Frames
/// have one term, so there is nothing to share in time. The input is normalised, so sums stay in the range of f16.
pub fn suits_column_pairs(layout: &ConvLayout) -> bool {
    let is_main = matches!(ConvKernel::of(layout), Ok(ConvKernel::Main));
    let is_normalised = layout.prologue != Prologue::None;
    is_main
        && is_normalised
        && layout.window == Window::Same
        && layout.slabs == 1
        && !TileWidths::of(layout).is_narrow()
}

/// Tap rows of a slab of pairs of columns, and those of its four slabs.
pub const COLUMN_PAIR_ROWS: u64 = 3;
pub const COLUMN_PAIR_TAPS: u64 = 4 * COLUMN_PAIR_ROWS;

/// The slabs of pairs, as the kernels of pairs know them.
pub const PAIRS: PairSlabs = PairSlabs { shared: [0, 1], own: [2, 3] };

/// Channels that a pixel takes in memory: blocks of the matrix product, and whole 16-byte units in any precision.
pub fn channel_stride(channels: u64) -> u64 {
    channels.next_multiple_of(8)
}

/// Pixels that enter the network have a fourth channel, of zeros.
pub fn input_stride(channels: u64) -> u64 {
    if channels <= 3 { 4 } else { channel_stride(channels) }
}

/// Pixels that leave the network are packed.
pub fn output_stride(channels: u64) -> u64 {
    if channels <= 3 { channels } else { channel_stride(channels) }
}

/// How the bytes of a tile of weights are ordered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightOrder {
    /// In the swizzle of matrices in shared memory, for warpgroup products.
    Swizzled,
    /// The same, of the slabs of pairs of columns. A shortcut's are as above.
    ColumnPairs,
    /// As operands of lanes, for `mma.sync`.
    Fragments,
}

/// Which kernel computes a convolution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConvKernel {
    /// From pixels.
    In,
    /// To pixels.
    Out,
    Main,
}

impl ConvKernel {
    pub fn of(layout: &ConvLayout) -> Result<ConvKernel> {
        let plain = layout.window == Window::Same && layout.shortcut.is_none();
        let norm_silu = layout.prologue == Prologue::NormSilu;
        match layout {
            _ if layout.cin > 3 && layout.cout > 3 => Ok(ConvKernel::Main),
            _ if layout.cout > 3 && plain && layout.prologue == Prologue::None => Ok(ConvKernel::In),
            _ if (4..=128).contains(&layout.cin) && plain && norm_silu => Ok(ConvKernel::Out),
            _ => refuse(format!("a convolution from {} to {} channels", layout.cin, layout.cout)),
        }
    }
}

pub fn channel_tiles(layout: &ConvLayout) -> u64 {
    layout.cout.div_ceil(TileWidths::of(layout).columns)
}

/// Output channels with those that fill up the last tile.
pub fn padded_outputs(layout: &ConvLayout) -> u64 {
    layout.cout.next_multiple_of(TileWidths::of(layout).columns)
}

/// Whether launches hand partial sums to each other: where frames shrink, and later ones see earlier ones.
pub fn passes_partial_sums(layout: &ConvLayout) -> bool {
    layout.window == Window::Down && layout.slabs > 1
}

/// How the statistics of a convolution's output are gathered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Statistics {
    /// The norm needs none.
    None,
    /// Groups consist of the fours of channels that records cover.
    Records,
    /// From whole frames.
    Frames,
}

impl Statistics {
    pub fn of(layout: &ConvLayout) -> Statistics {
        match layout.norm {
            Norm::Pixel => Statistics::None,
            Norm::Group { groups } if (layout.cout / groups.max(1)).is_multiple_of(4) => Statistics::Records,
            Norm::Group { .. } => Statistics::Frames,
        }
    }
}

/// The taps of a phase in the order the kernels use them: plane by plane.
pub fn tap_order(window: Window) -> Vec<u64> {
    match window {
        Window::Down => {
            let planes = (0..2).flat_map(|r| (0..2).map(move |s| (r, s)));
            planes
                .flat_map(|(r, s)| (r..3).step_by(2).flat_map(move |y| (s..3).step_by(2).map(move |x| y * 3 + x)))
                .collect()
        }
        _ => (0..window.side() * window.side()).collect(),
    }
}

/// Channels of a query that fit into the registers of a warp; two warps share one query.
pub const MOST_ATTENTION_CHANNELS: u64 = 512;
/// The same with `attention_wide`: the queries of a block fit into the shared memory of every GPU.
pub const MOST_WIDE_ATTENTION_CHANNELS: u64 = 1152;
/// A block of GroupNorm has a thread for every 16 bytes of a pixel, and at most 256 threads.
const MOST_NORM_BYTES: u64 = 256 * UNIT_BYTES;

/// Whether the kernels can do all these layers. A checkpoint with others is refused when it is opened.
pub fn check_layers(precision: Precision, layouts: &[ConvLayout], attention: &[u64]) -> Result<()> {
    layouts.iter().try_for_each(|layout| check_conv(precision, layout))?;
    attention.iter().try_for_each(|channels| check_attention(*channels))
}

fn check_conv(precision: Precision, layout: &ConvLayout) -> Result<()> {
    ConvKernel::of(layout)?;
    if layout.pairs.is_some_and(|pairs| pairs != PAIRS) {
        return Err(Error::Internal(format!("pairs of frames with slabs {:?}", layout.pairs)));
    }
    let most = MOST_NORM_BYTES / precision.bytes();
    let is_group = matches!(layout.norm, Norm::Group { .. });
    if is_group && layout.prologue != Prologue::None && channel_stride(layout.cin) > most {
        return refuse(format!("a norm of {} channels in {} (at most {most})", layout.cin, precision.name()));
    }
    Ok(())
}

pub fn check_attention(channels: u64) -> Result<()> {
    if channels.is_multiple_of(8) && channels <= MOST_WIDE_ATTENTION_CHANNELS {
        return Ok(());
    }
    refuse(format!("attention over {channels} channels (a multiple of 8 up to {MOST_WIDE_ATTENTION_CHANNELS})"))
}

fn refuse<T>(layer: String) -> Result<T> {
    Err(Error::Device(format!("no kernel on the GPU does {layer}; use device \"cpu\" for this checkpoint")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Direction;
    use crate::model::families::seedvr2::Sizes;
    use crate::testing::network;

    fn error_in(precision: Precision, channels: &[u64], latent: u64) -> Option<String> {
        let sizes = Sizes { channels: channels.to_vec(), layers: 1, groups: 1, latent, temporal_levels: 0 };
        let answer = Direction::ALL.into_iter().try_for_each(|direction| {
            let network = network(&sizes, direction);
            let layouts: Vec<ConvLayout> = network.layers.iter().map(|layer| layer.layout).collect();
            check_layers(precision, &layouts, &network.attention_channels())
        });
        answer.err().map(|why| why.to_string())
    }

    fn error(channels: &[u64], latent: u64) -> Option<String> {
        error_in(Precision::Fp16, channels, latent)
    }

    #[test]
    fn check_layers_accepts_published_and_test_models() {
        for precision in Precision::ALL {
            assert_eq!(error_in(precision, &[128, 256, 512, 512], 16), None);
        }
        assert!(error_in(Precision::Fp32, &[128, 2048, 8], 1).is_some_and(|why| why.contains("2048 channels in fp32")));
        assert_eq!(error(&[16, 32, 32, 32], 16), None);
        assert_eq!(error(&[12, 20, 24], 3), None, "few channels in");
        assert_eq!(error(&[128, 2048, 8], 1), None, "few channels out");
    }

    #[test]
    fn check_layers_refuses_what_has_no_kernel_and_names_a_way_out() {
        for (channels, latent, says) in [
            (&[32, 36][..], 16, "attention over 36 channels"),
            (&[32, 1160], 16, "attention over 1160 channels"),
            (&[128, 2056, 64], 16, "a norm of 2056 channels"),
            (&[136, 64], 16, "a convolution from 136 to 3 channels"),
            (&[64, 256], 1, "a convolution from 256 to 2 channels"),
            (&[3, 8], 16, "a convolution from 3 to 3 channels"),
            (&[8, 2, 8], 16, "a convolution from 2 to 2 channels"),
        ] {
            let why = error(channels, latent).unwrap_or_else(|| panic!("{channels:?} is taken"));
            assert!(why.contains(says) && why.contains("\"cpu\""), "{why}");
        }
    }
}
