//! How frames lie in memory, and how the convolution kernels cut them. The numbers are those of `kernels/conv.cuh`.

use crate::backend::cuda::launch::limits;
use crate::backend::cuda::launch::params::{Plane, Source};
use crate::backend::{ConvLayout, Precision, Prologue, Window};
use crate::error::Result;
use crate::tensor::FrameShape;

/// Bytes of a pixel in a patch, and of a column in a tile of weights.
pub const ROW: u64 = 128;
/// Output channels of a tile.
pub const COLUMNS: u64 = 128;
/// Bytes of packed weights for one tap, chunk and column tile.
pub const WEIGHT_TILE: u64 = COLUMNS * ROW;
/// Rows and columns of pixels that one record of partial statistics covers.
const RECORD: (u64, u64) = (8, 16);
/// Frames begin at multiples of this.
pub const ALIGN: u64 = 256;

/// Channels that a pixel takes in memory: blocks of the matrix product, and whole 16-byte units in any precision.
pub fn stride(channels: u64) -> u64 {
    channels.next_multiple_of(8)
}

/// Pixels that go into the network have a fourth channel, of zeros.
pub fn input_stride(channels: u64) -> u64 {
    if channels <= 3 { 4 } else { stride(channels) }
}

/// Pixels that come out of the network are packed.
pub fn output_stride(channels: u64) -> u64 {
    if channels <= 3 { channels } else { stride(channels) }
}

impl Precision {
    /// Input channels of a patch.
    pub(in crate::backend::cuda) const fn chunk(self) -> u64 {
        ROW / self.bytes()
    }

    /// Bytes of a frame's pixels. Its statistics follow.
    pub(in crate::backend::cuda) fn data_bytes(self, shape: FrameShape) -> u64 {
        (shape.pixels() * input_stride(shape.channels) * self.bytes()).next_multiple_of(16)
    }

    pub(in crate::backend::cuda) fn frame_bytes(self, shape: FrameShape, groups: u64) -> u64 {
        (self.data_bytes(shape) + groups * 8).next_multiple_of(ALIGN)
    }

    pub(in crate::backend::cuda) fn row_bytes(self, shape: FrameShape) -> u64 {
        shape.width * stride(shape.channels) * self.bytes()
    }

    /// Bytes of so many rows of a frame, as part of a band.
    pub(in crate::backend::cuda) fn band_frame_bytes(self, shape: FrameShape, rows: u64) -> u64 {
        (self.row_bytes(shape) * rows.min(shape.height)).next_multiple_of(ALIGN)
    }
}

/// Which kernel a convolution takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// From pixels.
    In,
    /// To pixels.
    Out,
    Main,
}

impl Kind {
    pub fn of(layout: &ConvLayout) -> Result<Kind> {
        let plain = layout.window == Window::Same && layout.shortcut.is_none();
        match layout {
            _ if layout.cin > 3 && layout.cout > 3 => Ok(Kind::Main),
            _ if layout.cout > 3 && plain && layout.prologue == Prologue::None => Ok(Kind::In),
            _ if (4..=128).contains(&layout.cin) && plain && layout.prologue == Prologue::NormSilu => Ok(Kind::Out),
            _ => limits::refuse(format!("a convolution from {} to {} channels", layout.cin, layout.cout)),
        }
    }
}

pub fn column_tiles(layout: &ConvLayout) -> u64 {
    layout.cout.div_ceil(COLUMNS)
}

/// Rows and columns of the grid of tiles: the output of one phase.
pub fn grid(layout: &ConvLayout, input: FrameShape) -> FrameShape {
    match layout.window {
        Window::Up => input,
        window => window.output(input, layout.cout),
    }
}

/// Output rows that one row of the grid becomes.
pub fn output_rows(layout: &ConvLayout) -> u64 {
    if layout.window == Window::Up { 2 } else { 1 }
}

/// Whether sums of a convolution go from one launch to the next: where frames shrink, and later ones see earlier ones.
pub fn keeps_sums(layout: &ConvLayout) -> bool {
    layout.window == Window::Down && layout.slabs > 1
}

/// Of one frame, in f32 whatever the precision.
pub fn sums_bytes(layout: &ConvLayout, input: FrameShape) -> Option<u64> {
    let pixels = layout.window.output(input, layout.cout).pixels();
    keeps_sums(layout).then(|| (pixels * output_stride(layout.cout) * 4).next_multiple_of(ALIGN))
}

/// Bytes of partial statistics for one frame.
pub fn partial_bytes(layout: &ConvLayout, input: FrameShape) -> u64 {
    let grid = grid(layout, input);
    let records = grid.height.div_ceil(RECORD.0) * grid.width.div_ceil(RECORD.1);
    layout.window.phases() * records * column_tiles(layout) * COLUMNS / 4 * 8
}

/// Fills in how patches of a tile are cut and which taps read them.
pub fn cut(source: &mut Source, window: Window, tile: (i32, i32)) {
    let halo = match window {
        Window::Same => 2,
        Window::Point => 0,
        Window::Down | Window::Up => 1,
    };
    source.rows = tile.0 + halo;
    source.pitch = tile.1 + halo;
    source.patch_bytes = source.rows * source.pitch * ROW as i32;
    source.stride = if window == Window::Down { 2 } else { 1 };
    source.planes = if window == Window::Down { 4 } else { 1 };
    source.taps = (window.side() * window.side()) as i32;
    source.plane = std::array::from_fn(|i| {
        let (r, s) = (i as i32 / 2, i as i32 % 2);
        match window {
            Window::Same => Plane { dx: -1, dy: -1, rows: 3, cols: 3 },
            Window::Point => Plane { dx: 0, dy: 0, rows: 1, cols: 1 },
            Window::Up => Plane { dx: s - 1, dy: r - 1, rows: 2, cols: 2 },
            Window::Down => Plane { dx: s, dy: r, rows: 2 - r, cols: 2 - s },
        }
    });
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

/// Pixels of a band that keep the GPU busy, times their channels, for one tile of columns. Few channels are not worth more pixels,
/// nor is a single frame, which waits for its past most of the time: both are for little memory.
const BAND_WORK: u64 = 1 << 24;
const BAND_CHANNELS: u64 = 128;
const FRAME_PIXELS: u64 = 1 << 16;
/// Bands begin at whole tiles of every kernel, of which the largest are so many rows and columns.
const BAND_ROWS: u64 = 16;
/// Rows above and below that a band of a 3x3 convolution sees.
pub const HALO: u64 = 1;
/// Rows below a band that are made anew with it, so that the next one begins at whole tiles of what makes them.
pub const LEAD: u64 = 16;
/// Bands that are fetched, computed and given back at the same time: one each.
pub const BANDS: u64 = 3;

/// Rows that a band of so many frames of `shape` wants, which is that of the input: as many as keep the GPU busy, or a few less,
/// and no more than leave something to do at the same time.
pub fn band_rows(layout: &ConvLayout, shape: FrameShape, frames: u64) -> u64 {
    let columns = column_tiles(layout) * layout.window.phases();
    let pixels = (BAND_WORK / shape.channels.max(BAND_CHANNELS)).min(frames * FRAME_PIXELS);
    let rows = pixels.div_ceil(shape.width * frames * columns) / BAND_ROWS * BAND_ROWS;
    rows.clamp(BAND_ROWS, most_band_rows(shape))
}

fn most_band_rows(shape: FrameShape) -> u64 {
    shape.height.div_ceil(BANDS).next_multiple_of(BAND_ROWS)
}

/// Rows that a band may have.
pub fn possible_band_rows(shape: FrameShape) -> impl Iterator<Item = u64> {
    (BAND_ROWS..=most_band_rows(shape)).step_by(BAND_ROWS as usize)
}

/// As many bands as there are with `most` rows, of as equal size as can be.
pub fn even_band_rows(shape: FrameShape, most: u64) -> u64 {
    let bands = shape.height.div_ceil(most);
    shape.height.div_ceil(bands).next_multiple_of(BAND_ROWS)
}

/// A place that a frame of a host tensor passes through, in the widest element type.
pub fn staging_bytes(shape: FrameShape) -> u64 {
    (shape.elements() * 4).next_multiple_of(ALIGN)
}

/// The fades of all rows and columns.
pub fn fade_bytes(shape: FrameShape) -> u64 {
    ((shape.height + shape.width) * 4).next_multiple_of(ALIGN)
}
