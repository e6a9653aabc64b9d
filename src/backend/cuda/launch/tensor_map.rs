//! Tensor maps: how the copy engine of compute capability 9.0 sees frames.

use cudarc::driver::sys;

use super::params::{AttentionParams, ConvParams, FramePart, SourceParams, TensorMap};
use super::sizes::CudaSizes;
use super::tiling::{ATTENTION_WGMMA_BOX, TileWidths};
use crate::backend::Precision;
use crate::backend::cuda::driver::check;
use crate::backend::gpu::RowSizes;
use crate::error::Result;
use crate::ir::FrameShape;

/// The swizzle of a box, by the bytes of its rows.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Swizzle {
    Rows64,
    Rows128,
}

impl Swizzle {
    pub fn of(row_bytes: u64) -> Swizzle {
        if row_bytes == 64 { Swizzle::Rows64 } else { Swizzle::Rows128 }
    }

    /// Channels of a row.
    fn channels(self, sizes: CudaSizes) -> u32 {
        let bytes = match self {
            Swizzle::Rows64 => 64,
            Swizzle::Rows128 => 128,
        };
        bytes / sizes.element() as u32
    }
}

/// Columns of frames: all of them, or every second one.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct ColumnView {
    first: u64,
    step: u64,
}

impl ColumnView {
    pub const ALL: ColumnView = ColumnView { first: 0, step: 1 };
    pub const EVEN_AND_ODD: [ColumnView; 2] = [ColumnView { first: 0, step: 2 }, ColumnView { first: 1, step: 2 }];

    pub fn is_empty(self, width: u64) -> bool {
        width <= self.first
    }

    /// Of so many. A tensor map has at least one column: the kernels touch none of an empty view.
    fn columns(self, width: u64) -> u64 {
        width.saturating_sub(self.first).div_ceil(self.step).max(1)
    }

    fn first_of(self, width: u64) -> u64 {
        if self.is_empty(width) { 0 } else { self.first }
    }
}

/// Patches of a row's channels by `pitch` columns by `rows` rows of a source's frames.
pub fn patch_map(
    sizes: CudaSizes,
    source: &SourceParams,
    part: &FramePart,
    slots: u64,
    swizzle: Swizzle,
    view: ColumnView,
) -> Result<TensorMap> {
    let (channels, width, height) = (source.channels as u64, part.width as u64, source.height as u64);
    let (step, pixel) = (source.stride as u32, channels * sizes.element());
    let boxes = Boxes {
        address: part.frames + view.first_of(width) * pixel,
        dims: &[channels, view.columns(width), height, slots],
        strides: &[view.step * pixel, width * pixel, part.slot_bytes as u64],
        box_dims: &[swizzle.channels(sizes), source.pitch as u32 * step, source.rows as u32 * step, 1],
        steps: &[1, step, step, 1],
        swizzle,
    };
    boxes.encode(sizes)
}

/// Boxes of a row's channels by 8 x 16 pixels of the residual.
pub fn residual_map(
    sizes: CudaSizes,
    params: &ConvParams,
    shape: FrameShape,
    slots: u64,
    widths: TileWidths,
    view: ColumnView,
) -> Result<TensorMap> {
    let swizzle = Swizzle::of(widths.row_bytes);
    let (channels, pixel) = (params.cout as u64, params.cout as u64 * sizes.element());
    let boxes = Boxes {
        address: params.residual + view.first_of(shape.width) * pixel,
        dims: &[channels, view.columns(shape.width), shape.height, slots],
        strides: &[view.step * pixel, shape.width * pixel, params.residual_slot_bytes as u64],
        box_dims: &[swizzle.channels(sizes), 16, 8, 1],
        steps: &[1; 4],
        swizzle,
    };
    boxes.encode(sizes)
}

/// Tiles of the output as kernels store them.
pub struct OutputTiles {
    pub widths: TileWidths,
    pub columns: u32,
    pub view: ColumnView,
}

/// Boxes of a row's channels by the output's pixels of a tile, one phase at a time. With four phases, two adjacent
/// columns count as adjacent channels, and the two rows of a phase are a dimension of their own.
pub fn output_map(
    sizes: CudaSizes,
    params: &ConvParams,
    shape: FrameShape,
    slots: u64,
    tiles: OutputTiles,
) -> Result<TensorMap> {
    let OutputTiles { widths, columns, view } = tiles;
    let swizzle = Swizzle::of(widths.row_bytes);
    let (channels, sides) = (params.cout as u64, if params.phases == 4 { 2 } else { 1 });
    let pixel = channels * sizes.element();
    let row = shape.width * pixel;
    let boxes = Boxes {
        address: params.out + view.first_of(shape.width) * pixel,
        dims: &[channels * sides, view.columns(shape.width / sides), sides, shape.height / sides, slots],
        strides: &[view.step * sides * pixel, row, row * sides, params.out_slot_bytes as u64],
        box_dims: &[swizzle.channels(sizes), columns, 1, 8, 1],
        steps: &[1; 5],
        swizzle,
    };
    boxes.encode(sizes)
}

/// Boxes of a K block of channels by some pixels of the queries, keys or values.
pub fn attention_map(sizes: CudaSizes, params: &AttentionParams, slots: u64) -> Result<TensorMap> {
    let (channels, pixels) = (params.channels as u64, params.pixels as u64);
    let part = channels * sizes.element();
    let boxes = Boxes {
        address: params.input,
        dims: &[channels, 3, pixels, slots],
        strides: &[part, 3 * part, params.in_slot_bytes as u64],
        box_dims: &[Swizzle::Rows128.channels(sizes), 1, ATTENTION_WGMMA_BOX, 1],
        steps: &[1; 4],
        swizzle: Swizzle::Rows128,
    };
    boxes.encode(sizes)
}

/// Swizzled boxes, zeros outside.
struct Boxes<'a> {
    address: u64,
    dims: &'a [u64],
    /// In bytes, of all dimensions but the first.
    strides: &'a [u64],
    box_dims: &'a [u32],
    steps: &'a [u32],
    swizzle: Swizzle,
}

impl Boxes<'_> {
    fn encode(&self, sizes: CudaSizes) -> Result<TensorMap> {
        use sys::CUtensorMapDataType as T;
        let Boxes { address, dims, strides, box_dims, steps, swizzle } = *self;
        debug_assert!(strides.len() + 1 == dims.len() && box_dims.len() == dims.len() && steps.len() == dims.len());
        let element = match sizes.precision {
            Precision::Fp16 => T::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            Precision::Bf16 => T::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            Precision::Fp32 => T::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        };
        let swizzle = match swizzle {
            Swizzle::Rows64 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_64B,
            Swizzle::Rows128 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
        };
        let mut map = TensorMap::default();
        // SAFETY: every list has an entry for each dimension; the map is 128 bytes, aligned to 64, as the driver asks.
        let answer = unsafe {
            sys::cuTensorMapEncodeTiled(
                std::ptr::from_mut(&mut map).cast(),
                element,
                dims.len() as u32,
                address as *mut _,
                dims.as_ptr(),
                strides.as_ptr(),
                box_dims.as_ptr(),
                steps.as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        check("encoding a tensor map", answer)?;
        Ok(map)
    }
}
