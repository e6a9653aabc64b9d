//! The parameters of the kernels, field for field as `shaders/` declare them.

use crate::backend::gpu::Strided;
use crate::backend::vulkan::sizes::MAX_FRAMES;

/// Index of a source.
pub const MAIN: u32 = 0;
pub const SHORTCUT: u32 = 1;

pub const MAX_TERMS: usize = 4;

/// Declares structs of plain numbers without padding, so that every byte is one of a field.
macro_rules! plain_structs {
    ($($(#[$about:meta])* pub struct $name:ident {
        $($(#[$about_field:meta])* pub $field:ident: $kind:ty,)*
    })*) => {$(
        $(#[$about])*
        #[repr(C)]
        #[derive(Clone, Copy, Default)]
        pub struct $name {
            $($(#[$about_field])* pub $field: $kind,)*
        }
        const _: () = assert!(size_of::<$name>() == 0 $(+ size_of::<$kind>())*);
    )*};
}

plain_structs! {
    /// Input frames of one shape, and their weights.
    pub struct Source {
        pub weights: u64,
        pub slab_bytes: u64,
        pub height: i32,
        pub width: i32,
        pub first_row: i32,
        pub channels: i32,
        pub k_blocks: i32,
        pub side: i32,
        pub stride: i32,
        pub offset: i32,
    }

    pub struct Term {
        pub frame: u64,
        /// The host part of a split frame, or 0.
        pub host: u64,
        pub slab: u32,
        pub source: u32,
    }

    pub struct OutFrame {
        pub term: [Term; MAX_TERMS],
        /// Or 0.
        pub residual: u64,
        pub target: u64,
        pub terms: u32,
        pub bias: u32,
        pub record: u32,
        pub unused: u32,
    }

    pub struct ConvParams {
        pub source: [Source; 2],
        pub bias: u64,
        /// Or 0.
        pub records: u64,
        pub height: i32,
        pub width: i32,
        pub first_row: i32,
        pub channel_tiles: i32,
        pub phases: i32,
        pub cout: i32,
        pub padded_cout: i32,
        pub split_column: i32,
        pub resident_width: i32,
        pub host_first: i32,
        pub host_width: i32,
        pub unused: i32,
        pub frame: [OutFrame; MAX_FRAMES],
    }

    pub struct FinalizeParams {
        pub records: u64,
        pub channels: i32,
        pub group_channels: i32,
        pub phases: i32,
        pub height: i32,
        pub width: i32,
        pub epsilon: f32,
        pub statistics: [u64; MAX_FRAMES],
    }

    pub struct NormFrame {
        pub from: u64,
        pub to: u64,
        pub statistics: u64,
    }

    pub struct NormParams {
        pub gamma: u64,
        pub beta: u64,
        pub pixels: u64,
        pub channels: u32,
        pub groups: u32,
        pub group_channels: u32,
        pub silu: u32,
        pub frame: [NormFrame; MAX_FRAMES],
    }

    pub struct AttentionParams {
        pub pixels: u32,
        pub channels: u32,
        pub first_query: u32,
        pub input_channels: u32,
        pub out_channels: u32,
        pub unused: u32,
        pub from: [u64; MAX_FRAMES],
        pub to: [u64; MAX_FRAMES],
    }

    pub struct Copy {
        pub from: u64,
        pub to: u64,
        pub units: u64,
    }

    pub struct CopyParams {
        pub row_units: u64,
        pub from_pitch: u64,
        pub to_pitch: u64,
        pub copy: [Copy; MAX_FRAMES],
    }

    pub struct CacheParams {
        /// 0 stores, 1 restores, 2 rounds.
        pub copy: u32,
        pub rows: u32,
        pub columns: u32,
        pub channels: u32,
        pub block: u32,
        pub unused: u32,
        pub from_pitch: u64,
        pub to_pitch: u64,
        pub from: [u64; MAX_FRAMES],
        pub to: [u64; MAX_FRAMES],
    }

    pub struct LoadParams {
        pub from: Strided,
        pub into: u64,
        pub nonfinite: u64,
        /// Of each channel, or 0.
        pub maps: u64,
        pub height: i32,
        pub width: i32,
        pub channels: i32,
        pub own_channels: i32,
        pub mul: f32,
        pub add: f32,
        /// Rows and columns of the tensor that are one pixel.
        pub patch: i32,
        /// Rows and columns of activations that are one pixel of the tensor.
        pub side: i32,
        pub top: i32,
        pub left: i32,
    }

    pub struct StoreParams {
        pub into: Strided,
        pub from: u64,
        pub rows: u64,
        pub columns: u64,
        pub nonfinite: u64,
        pub maps: u64,
        pub width: i32,
        pub channels: i32,
        pub channel: i32,
        pub logvar: i32,
        pub clamp_low: f32,
        pub clamp_high: f32,
        pub mul: f32,
        pub add: f32,
        pub seed_low: u32,
        pub seed_high: u32,
        pub batch: u32,
        pub frame: u32,
        pub patch: i32,
        pub side: i32,
    }

    pub struct BlendParams {
        pub from: u64,
        pub into: u64,
        pub rows: u64,
        pub columns: u64,
        pub height: i32,
        pub width: i32,
        pub into_height: i32,
        pub into_width: i32,
        pub top: i32,
        pub left: i32,
        pub channels: i32,
        pub clear: i32,
    }

    pub struct PooledFrame {
        pub from: u64,
        pub into: u64,
        pub part: u32,
        pub clear: u32,
    }

    pub struct PoolParams {
        pub height: i32,
        pub width: i32,
        pub input_width: i32,
        pub input_channels: i32,
        pub out_channels: i32,
        pub channels: i32,
        pub parts: i32,
        pub unused: i32,
        pub frame: [PooledFrame; MAX_FRAMES],
    }

    pub struct AddedFrame {
        pub x: u64,
        pub addend: u64,
        pub target: u64,
        pub part: u32,
        pub unused: u32,
    }

    pub struct AddParams {
        pub height: i32,
        pub width: i32,
        pub channels: i32,
        pub out_channels: i32,
        pub addend_width: i32,
        pub addend_channels: i32,
        pub side: i32,
        pub parts: i32,
        pub repeats: i32,
        pub unused: i32,
        pub frame: [AddedFrame; MAX_FRAMES],
    }
}
