//! Host tensors that own their memory.

use std::ffi::c_void;
use std::ptr::null;

use video_vae::capi::*;

use super::Random;

/// A tensor with its memory, shape and strides.
#[derive(Clone)]
pub struct Buffer {
    /// Wide elements, so that the memory is aligned for every element type.
    memory: Vec<u64>,
    pub dtype: u32,
    pub shape: [i64; 5],
    /// `None`: compact.
    pub strides: Option<[i64; 5]>,
}

impl Buffer {
    pub fn new(dtype: u32, shape: [i64; 5]) -> Buffer {
        let bytes = shape.iter().product::<i64>() as usize * (dtype >> 8 & 0xff) as usize / 8;
        Buffer { memory: vec![0; bytes.div_ceil(8)], dtype, shape, strides: None }
    }

    /// Channels innermost in memory, as [B, T, H, W, C].
    pub fn interleaved(dtype: u32, shape: [i64; 5]) -> Buffer {
        let [_, c, t, h, w] = shape;
        Buffer { strides: Some([t * h * w * c, 1, h * w * c, w * c, c]), ..Buffer::new(dtype, shape) }
    }

    pub fn from_f32(shape: [i64; 5], values: &[f32]) -> Buffer {
        let mut buffer = Buffer::new(VVAE_DTYPE_F32, shape);
        buffer.f32_mut().copy_from_slice(values);
        buffer
    }

    /// Floats from -1 to 1.
    pub fn random(random: &mut Random, shape: [i64; 5]) -> Buffer {
        let mut buffer = Buffer::new(VVAE_DTYPE_F32, shape);
        buffer.f32_mut().iter_mut().for_each(|v| *v = random.below(2000) as f32 / 1000.0 - 1.0);
        buffer
    }

    /// NaN, so that unwritten elements show.
    pub fn poisoned(shape: [i64; 5]) -> Buffer {
        let mut buffer = Buffer::new(VVAE_DTYPE_F32, shape);
        buffer.f32_mut().fill(f32::NAN);
        buffer
    }

    /// A copy of frames `first..first + count` of a compact tensor of floats.
    pub fn part(&self, first: i64, count: i64) -> Buffer {
        let [b, c, t, h, w] = self.shape;
        let mut part = Buffer::new(VVAE_DTYPE_F32, [b, c, count, h, w]);
        let (plane, frames) = ((h * w) as usize, (count * h * w) as usize);
        let planes = self.f32().chunks_exact(t as usize * plane).zip(part.f32_mut().chunks_exact_mut(frames));
        planes.for_each(|(from, to)| to.copy_from_slice(&from[first as usize * plane..][..frames]));
        part
    }

    pub fn elements(&self) -> usize {
        self.shape.iter().product::<i64>() as usize
    }

    pub fn tensor(&self) -> vvae_tensor {
        vvae_tensor {
            data: self.memory.as_ptr().cast_mut().cast::<c_void>(),
            device_type: VVAE_DEVICE_CPU,
            device_id: 0,
            ndim: 5,
            dtype: self.dtype,
            shape: self.shape.as_ptr(),
            strides: self.strides.as_ref().map_or(null(), |s| s.as_ptr()),
            byte_offset: 0,
        }
    }

    pub fn bytes(&self) -> &[u8] {
        let bytes = self.elements() * (self.dtype >> 8 & 0xff) as usize / 8;
        // SAFETY: `new` allocated at least as many.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr().cast(), bytes) }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let bytes = self.bytes().len();
        // SAFETY: as in `bytes`.
        unsafe { std::slice::from_raw_parts_mut(self.memory.as_mut_ptr().cast(), bytes) }
    }

    pub fn f32(&self) -> &[f32] {
        assert_eq!(self.dtype, VVAE_DTYPE_F32);
        // SAFETY: the memory is aligned, has this many elements, and any bits are a valid float.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr().cast(), self.elements()) }
    }

    pub fn f32_mut(&mut self) -> &mut [f32] {
        assert_eq!(self.dtype, VVAE_DTYPE_F32);
        // SAFETY: as in `f32`.
        unsafe { std::slice::from_raw_parts_mut(self.memory.as_mut_ptr().cast(), self.elements()) }
    }
}
