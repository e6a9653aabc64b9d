//! The parameters of the kernels, field for field as `kernels/*.cu` and `kernels/*.cuh` declare them.

use super::tiling::{MAX_FRAMES, MAX_MAPS};
use crate::backend::gpu::Strided;

#[repr(C, align(64))]
#[derive(Clone, Copy, Default, PartialEq)]
pub struct TensorMap(pub [u64; 16]);

/// A patch of input pixels and the taps that read it.
#[repr(C)]
#[derive(Clone, Copy, Default, PartialEq)]
pub struct Plane {
    pub dx: i32,
    pub dy: i32,
    pub rows: i32,
    pub cols: i32,
}

/// Input frames of one shape, and their weights.
#[repr(C)]
#[derive(Clone, Copy, Default, PartialEq)]
pub struct SourceParams {
    pub weights: u64,
    pub height: i32,
    pub channels: i32,
    pub k_blocks: i32,
    pub taps: i32,
    pub rows: i32,
    pub pitch: i32,
    pub stride: i32,
    pub planes: i32,
    pub patch_bytes: i32,
    pub plane: [Plane; 4],
}

#[repr(C)]
#[derive(Clone, Copy, Default, PartialEq)]
pub struct Norm {
    pub statistics: u64,
    pub gamma: u64,
    pub beta: u64,
    /// From one slot of statistics to the next, in pairs of floats.
    pub stride: i64,
    pub groups: i32,
    pub group_channels: i32,
}

/// Where input frames, or a range of their columns, are in device memory.
#[repr(C)]
#[derive(Clone, Copy, Default, PartialEq)]
pub struct FramePart {
    pub frames: u64,
    pub slot_bytes: i64,
    pub width: i32,
    pub first_column: i32,
}

/// Index of a part: whole frames of the main source, of the shortcut, and the two parts of split frames. The latter are
/// odd columns, if even and odd ones are apart.
pub const MAIN: usize = 0;
pub const SHORTCUT: usize = 1;
pub const RESIDENT: usize = 2;
pub const HOST: usize = 3;
pub const MAIN_ODD: usize = RESIDENT;
pub const SHORTCUT_ODD: usize = HOST;
/// Index of the shortcut's term.
pub const SHORTCUT_TERM: usize = 3;

/// One output frame.
#[repr(C)]
#[derive(Clone, Copy, PartialEq)]
pub struct FrameParams {
    /// -1 for no shortcut.
    pub slot: [i32; 4],
    pub slab: [i32; 4],
    /// The slot in [`HOST`] of a split frame, else -1.
    pub host_slot: [i32; 4],
    pub terms: i32,
    pub bias: i32,
    pub residual: i32,
    pub out: i32,
    /// The index of its statistics records.
    pub record: i32,
}

impl Default for FrameParams {
    fn default() -> FrameParams {
        FrameParams {
            slot: [0, 0, 0, -1],
            slab: [0; 4],
            host_slot: [-1; 4],
            terms: 0,
            bias: 0,
            residual: -1,
            out: 0,
            record: 0,
        }
    }
}

#[repr(C)]
#[derive(Clone, Copy, Default, PartialEq)]
pub struct ConvParams {
    pub input_map: [TensorMap; 4],
    /// Two if even and odd columns are apart.
    pub residual_map: [TensorMap; 2],
    pub out_map: [TensorMap; 2],
    pub source: [SourceParams; 2],
    pub part: [FramePart; 4],
    pub out: u64,
    pub residual: u64,
    pub bias: u64,
    /// Statistics records, 0 for none.
    pub records: u64,
    /// Partial sums, 0 for none.
    pub partial_in: u64,
    pub partial_out: u64,
    pub out_slot_bytes: i64,
    pub residual_slot_bytes: i64,
    pub height: i32,
    pub width: i32,
    pub missing_columns: i32,
    pub first_row: i32,
    pub tiles_x: i32,
    pub tiles_y: i32,
    pub channel_tiles: i32,
    pub phases: i32,
    pub frames: i32,
    pub cout: i32,
    pub split_column: i32,
    pub tile_rows: i32,
    pub run: i32,
    pub frame: [FrameParams; MAX_FRAMES],
    pub norm: Norm,
    pub statistics: [i32; MAX_FRAMES],
}

/// The most that a launch can pass on every card.
const _: () = assert!(size_of::<ConvParams>() <= 4096);

#[repr(C)]
#[derive(Clone, Copy, Default, PartialEq)]
pub struct OutFrameParams {
    pub slot: i32,
    pub slab: [i32; 3],
    pub bias: i32,
    pub out: i32,
}

#[repr(C)]
#[derive(Clone, Copy, Default, PartialEq)]
pub struct OutParams {
    pub norm: Norm,
    pub frames: u64,
    pub weights: u64,
    pub bias: u64,
    pub out: u64,
    /// Partial sums, 0 for none.
    pub partial_in: u64,
    pub partial_out: u64,
    pub slot_bytes: i64,
    pub out_slot_bytes: i64,
    pub height: i32,
    pub width: i32,
    pub channels: i32,
    pub cout: i32,
    pub tiles_x: i32,
    pub count: i32,
    pub frame: [OutFrameParams; MAX_FRAMES],
}

#[repr(C)]
#[derive(Clone, Copy, Default, PartialEq)]
pub struct FinalizeParams {
    pub records: u64,
    pub statistics: u64,
    pub stride: i64,
    pub quads: i32,
    pub group_quads: i32,
    pub groups: i32,
    pub phases: i32,
    pub height: i32,
    pub width: i32,
    pub missing_columns: i32,
    pub eps: f32,
    pub slot: [i32; MAX_FRAMES],
}

#[repr(C)]
#[derive(Clone, Copy, Default, PartialEq)]
pub struct StatisticsParams {
    pub input: u64,
    pub statistics: u64,
    pub stride: i64,
    pub slot_bytes: i64,
    pub pixels: i64,
    pub channels: i32,
    pub group_channels: i32,
    pub groups: i32,
    pub eps: f32,
    pub slot: [i32; MAX_FRAMES],
}

#[repr(C)]
#[derive(Clone, Copy, Default, PartialEq)]
pub struct NormParams {
    pub norm: Norm,
    pub input: u64,
    pub out: u64,
    pub in_slot_bytes: i64,
    pub out_slot_bytes: i64,
    pub pixels: i64,
    pub channels: i32,
    pub in_slot: [i32; MAX_FRAMES],
    pub out_slot: [i32; MAX_FRAMES],
}

#[repr(C)]
#[derive(Clone, Copy, Default, PartialEq)]
pub struct CopyParams {
    pub from: [u64; MAX_FRAMES],
    pub to: [u64; MAX_FRAMES],
    pub from_pitch: i64,
    pub to_pitch: i64,
    pub row_units: u32,
    pub units: [u32; MAX_FRAMES],
}

#[repr(C)]
#[derive(Clone, Copy, Default, PartialEq)]
pub struct CacheParams {
    pub from: [u64; MAX_FRAMES],
    pub to: [u64; MAX_FRAMES],
    pub from_pitch: i64,
    pub to_pitch: i64,
    pub row_units: u32,
    pub units: u32,
    pub pixel_bytes: u32,
    pub block_units: i32,
}

#[repr(C)]
#[derive(Clone, Copy, Default, PartialEq)]
pub struct AttentionParams {
    pub map: TensorMap,
    pub input: u64,
    pub out: u64,
    pub in_slot_bytes: i64,
    pub out_slot_bytes: i64,
    pub pixels: i32,
    pub channels: i32,
    /// Of the launch.
    pub first_query: i32,
    pub in_slot: [i32; MAX_FRAMES],
    pub out_slot: [i32; MAX_FRAMES],
}

#[repr(C)]
#[derive(Clone, Copy, Default, PartialEq)]
pub struct PoolParams {
    pub from: [u64; MAX_FRAMES],
    pub into: [u64; MAX_FRAMES],
    /// Of the output, as `width`.
    pub pixels: i64,
    pub width: i32,
    /// Of a pixel.
    pub in_units: i32,
    pub out_units: i32,
    pub parts: i32,
    pub part: [i32; MAX_FRAMES],
    /// Not 0 where the channels of all other parts become zero.
    pub clear: [i32; MAX_FRAMES],
}

#[repr(C)]
#[derive(Clone, Copy, Default, PartialEq)]
pub struct AddParams {
    pub x: [u64; MAX_FRAMES],
    pub addend: [u64; MAX_FRAMES],
    pub out: [u64; MAX_FRAMES],
    pub pixels: i64,
    pub width: i32,
    /// Of a pixel.
    pub units: i32,
    pub addend_units: i32,
    pub channels: i32,
    pub side: i32,
    pub parts: i32,
    pub repeats: i32,
    pub part: [i32; MAX_FRAMES],
}

#[repr(C)]
#[derive(Clone, Copy, Default, PartialEq)]
pub struct LoadParams {
    pub from: Strided,
    pub into: u64,
    /// A word in host memory that is set to 1 if a value is not finite.
    pub nonfinite: u64,
    pub height: i32,
    pub width: i32,
    /// Channels of activations. Those that the tensor does not have are set to one.
    pub channels: i32,
    /// Channels of a pixel in memory. Those beyond the activations' are set to zero.
    pub stride: i32,
    /// Rows and columns of the tensor that are one pixel.
    pub patch: i32,
    pub mul: f32,
    pub add: f32,
}

/// A map for each channel of a tensor.
#[repr(C)]
#[derive(Clone, Copy, PartialEq)]
pub struct ChannelMaps {
    /// Rows and columns of activations that are one pixel of the tensor.
    pub side: i32,
    pub mul: [f32; MAX_MAPS],
    pub add: [f32; MAX_MAPS],
}

#[repr(C)]
#[derive(Clone, Copy, PartialEq)]
pub struct MappedLoadParams {
    pub load: LoadParams,
    pub maps: ChannelMaps,
    /// Of the activations within the tensor's first pixel.
    pub top: i32,
    pub left: i32,
}

#[repr(C)]
#[derive(Clone, Copy, Default, PartialEq)]
pub struct StoreParams {
    pub into: Strided,
    pub from: u64,
    /// Sums of the fades, or null.
    pub rows: u64,
    pub columns: u64,
    pub nonfinite: u64,
    pub width: i32,
    pub stride: i32,
    pub channel: i32,
    /// As in [`LoadParams`].
    pub patch: i32,
    /// The channel of the log-variance, or -1 for no sample.
    pub logvar: i32,
    pub clamp_low: f32,
    pub clamp_high: f32,
    pub mul: f32,
    pub add: f32,
    pub seed: u64,
    pub batch: u32,
    pub frame: u32,
}

#[repr(C)]
#[derive(Clone, Copy, PartialEq)]
pub struct MappedStoreParams {
    pub store: StoreParams,
    pub maps: ChannelMaps,
}

#[repr(C)]
#[derive(Clone, Copy, Default, PartialEq)]
pub struct BlendParams {
    pub from: u64,
    pub into: u64,
    pub rows: u64,
    pub columns: u64,
    pub height: i32,
    pub width: i32,
    pub into_width: i32,
    pub top: i32,
    pub left: i32,
    pub stride: i32,
    pub clear: i32,
}
