//! Tensors in compact and unusual layouts.

use std::ffi::c_void;

use half::{bf16, f16};
use video_vae::capi::*;

use crate::common::Random;
use crate::driver::Memory;

pub const DTYPES: [u32; 5] = [VVAE_DTYPE_U8, VVAE_DTYPE_U16, VVAE_DTYPE_F16, VVAE_DTYPE_BF16, VVAE_DTYPE_F32];
pub const FLOATS: [u32; 3] = [VVAE_DTYPE_F16, VVAE_DTYPE_BF16, VVAE_DTYPE_F32];

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Order {
    Compact,
    Interleaved,
    /// Frames before channels, a gap after every row and every plane.
    Padded,
    /// Upside down and right to left.
    Flipped,
    /// Every third column of a wider image, rows before frames.
    Sparse,
}

pub const ORDERS: [Order; 5] = [Order::Compact, Order::Interleaved, Order::Padded, Order::Flipped, Order::Sparse];

/// A tensor with strides and gaps, and its memory.
pub struct StridedTensor {
    /// Wide elements, so that the memory is aligned for every element type.
    memory: Vec<u64>,
    bytes: usize,
    dtype: u32,
    pub shape: [i64; 5],
    strides: [i64; 5],
    offset: u64,
}

fn element_bytes(dtype: u32) -> usize {
    (dtype >> 8 & 0xff) as usize / 8
}

impl StridedTensor {
    fn new(dtype: u32, shape: [i64; 5], order: Order) -> StridedTensor {
        let [_, c, t, h, w] = shape;
        let (row, plane) = (w + 3, h * (w + 3) + 5);
        let (strides, first) = match order {
            Order::Compact => ([c * t * h * w, t * h * w, h * w, w, 1], 0),
            Order::Interleaved => ([t * h * w * c, 1, h * w * c, w * c, c], 0),
            Order::Padded => ([t * c * plane, plane, c * plane, row, 1], 7),
            Order::Flipped => ([c * t * h * w, t * h * w, h * w, -w, -1], h * w - 1),
            Order::Sparse => ([c * h * t * w * 3, h * t * w * 3, w * 3, t * w * 3, 3], 1),
        };
        let reach: i64 = shape.iter().zip(strides).map(|(n, stride)| (n - 1) * stride.max(0)).sum();
        let bytes = (first + reach + 11) as usize * element_bytes(dtype);
        let offset = first as u64 * element_bytes(dtype) as u64;
        StridedTensor { memory: vec![0; bytes.div_ceil(8)], bytes, dtype, shape, strides, offset }
    }

    /// Values of the type's usual range, in the gaps too.
    pub fn random(dtype: u32, shape: [i64; 5], order: Order) -> StridedTensor {
        let mut tensor = StridedTensor::new(dtype, shape, order);
        let mut random = Random(dtype.into());
        for element in tensor.bytes_mut().chunks_exact_mut(element_bytes(dtype)) {
            let value = random.below(2001) as f32 / 1000.0 - 1.0;
            match dtype {
                VVAE_DTYPE_F16 => element.copy_from_slice(&f16::from_f32(value).to_le_bytes()),
                VVAE_DTYPE_BF16 => element.copy_from_slice(&bf16::from_f32(value).to_le_bytes()),
                VVAE_DTYPE_F32 => element.copy_from_slice(&value.to_le_bytes()),
                _ => element.fill_with(|| random.below(256) as u8),
            }
        }
        tensor
    }

    /// Filled with bytes that no result has.
    pub fn poisoned(dtype: u32, shape: [i64; 5], order: Order) -> StridedTensor {
        let mut tensor = StridedTensor::new(dtype, shape, order);
        tensor.bytes_mut().fill(0xa5);
        tensor
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: `new` allocated at least as many.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr().cast(), self.bytes) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`.
        unsafe { std::slice::from_raw_parts_mut(self.memory.as_mut_ptr().cast(), self.bytes) }
    }

    fn tensor(&self, data: *mut c_void, device_type: i32) -> vvae_tensor {
        vvae_tensor {
            data,
            device_type,
            device_id: 0,
            ndim: 5,
            dtype: self.dtype,
            shape: self.shape.as_ptr(),
            strides: self.strides.as_ptr(),
            byte_offset: self.offset,
        }
    }

    pub fn on_host(&mut self) -> vvae_tensor {
        let data = self.memory.as_mut_ptr().cast();
        self.tensor(data, VVAE_DEVICE_CPU)
    }

    /// The same layout in device memory of the same length.
    pub fn on_device(&self, memory: &Memory) -> vvae_tensor {
        assert_eq!(memory.bytes, self.bytes);
        self.tensor(std::ptr::without_provenance_mut(memory.address as usize), VVAE_DEVICE_CUDA)
    }
}
