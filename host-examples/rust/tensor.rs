//! Pixels and latents in memory, and how the library is told of them.

use std::ffi::c_void;

use crate::api::*;
use crate::units::counted;
use crate::{Result, memory};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dtype {
    U8,
    U16,
    F16,
    Bf16,
    F32,
}

impl Dtype {
    const ALL: [(Dtype, u32, &str); 5] = [
        (Dtype::U8, VVAE_DTYPE_U8, "U8"),
        (Dtype::U16, VVAE_DTYPE_U16, "U16"),
        (Dtype::F16, VVAE_DTYPE_F16, "F16"),
        (Dtype::Bf16, VVAE_DTYPE_BF16, "BF16"),
        (Dtype::F32, VVAE_DTYPE_F32, "F32"),
    ];

    pub fn code(self) -> u32 {
        Dtype::ALL[self as usize].1
    }

    /// As safetensors spells it.
    pub fn name(self) -> &'static str {
        Dtype::ALL[self as usize].2
    }

    /// In any case of letters.
    pub fn parse(name: &str) -> Option<Dtype> {
        Dtype::ALL.iter().find(|(_, _, n)| n.eq_ignore_ascii_case(name)).map(|(dtype, _, _)| *dtype)
    }

    pub fn from_code(code: u32) -> Option<Dtype> {
        Dtype::ALL.iter().find(|(_, c, _)| *c == code).map(|(dtype, _, _)| *dtype)
    }

    pub fn bytes(self) -> usize {
        (self.code() >> 8 & 0xff) as usize / 8
    }
}

/// The shape of a frame and how it lies in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameKind {
    pub dtype: Dtype,
    pub channels: usize,
    pub height: usize,
    pub width: usize,
    /// Channels innermost, as in pixels of a picture; else one plane after the other, as latents are kept.
    pub interleaved: bool,
}

impl FrameKind {
    pub fn pixels(dtype: Dtype, width: usize, height: usize) -> FrameKind {
        FrameKind { dtype, channels: 3, height, width, interleaved: true }
    }

    pub fn with_channels(self, channels: usize) -> FrameKind {
        FrameKind { channels, ..self }
    }

    pub fn latent(dtype: Dtype, [channels, height, width]: [usize; 3]) -> FrameKind {
        FrameKind { dtype, channels, height, width, interleaved: false }
    }

    pub fn elements(&self) -> usize {
        self.channels * self.height * self.width
    }

    pub fn bytes(&self) -> usize {
        self.elements() * self.dtype.bytes()
    }

    /// Room for the bytes of a frame.
    pub fn buffer(&self) -> Result<Vec<u8>> {
        memory::zeroed(self.bytes(), format_args!("a frame of {}x{}", self.width, self.height))
    }

    /// Fails unless work on a frame can have so many bytes for each pixel.
    pub fn spare(&self, bytes: usize) -> Result<()> {
        let (width, height) = (self.width, self.height);
        memory::spare(
            width.saturating_mul(height).saturating_mul(bytes),
            format_args!("work on {width}x{height} pixels"),
        )
    }

    /// As a clip of `frames`.
    pub fn shape(&self, frames: u64) -> [i64; 5] {
        [1, self.channels as i64, frames as i64, self.height as i64, self.width as i64]
    }

    /// Pixels of a frame as interleaved RGB from 0 to 255, without alpha.
    pub fn rgb(&self, frame: &[u8]) -> Result<Vec<f32>> {
        let value = |bytes: &[u8]| match *bytes {
            [value] => f32::from(value),
            [low, high] => f32::from(u16::from_le_bytes([low, high])) / 257.0,
            // As `vvae decode` writes it, from -1 to 1.
            [a, b, c, d] => ((f32::from_le_bytes([a, b, c, d]) + 1.0) * 127.5).clamp(0.0, 255.0),
            _ => 0.0,
        };
        if !matches!(self.dtype, Dtype::U8 | Dtype::U16 | Dtype::F32) {
            return Err(format!("video in {} cannot be compared; store it as F32", self.dtype.name()));
        }
        let (plane, bytes) = (self.width * self.height, self.dtype.bytes());
        let at = |i: usize| if self.interleaved { i / 3 * self.channels + i % 3 } else { i % 3 * plane + i / 3 };
        let values = (0..3 * plane).map(|i| value(&frame[at(i) * bytes..][..bytes]));
        memory::collected(3 * plane, values, format_args!("a frame of {}x{}", self.width, self.height))
    }

    fn strides(&self) -> [i64; 5] {
        let (c, h, w) = (self.channels as i64, self.height as i64, self.width as i64);
        // There is one clip, so how far it is to the next does not matter.
        if self.interleaved { [0, 1, h * w * c, w * c, c] } else { [0, h * w, c * h * w, w, 1] }
    }
}

/// Some frames, one after the other.
pub struct Frames {
    /// Wide elements, so that the memory is aligned for every element type.
    memory: Vec<u64>,
    pub kind: FrameKind,
    shape: [i64; 5],
    strides: [i64; 5],
}

impl Frames {
    pub fn new(kind: FrameKind, frames: u64) -> Result<Frames> {
        let what = format!("{} of {}x{}", counted(frames, "frame"), kind.width, kind.height);
        // A size beyond all numbers is one beyond all memory.
        let bytes = kind.bytes().saturating_mul(usize::try_from(frames).unwrap_or(usize::MAX));
        let memory = memory::zeroed(bytes.div_ceil(8), what)?;
        Ok(Frames { memory, kind, shape: kind.shape(frames), strides: kind.strides() })
    }

    /// The first frames of it, or all and room for more.
    pub fn resized(&self, frames: u64) -> Result<Frames> {
        let mut resized = Frames::new(self.kind, frames)?;
        let bytes = resized.bytes().len().min(self.bytes().len());
        resized.bytes_mut()[..bytes].copy_from_slice(&self.bytes()[..bytes]);
        Ok(resized)
    }

    pub fn count(&self) -> usize {
        self.shape[2] as usize
    }

    /// As the library takes it. Valid while `self` is neither moved nor dropped.
    pub fn tensor(&self) -> vvae_tensor {
        vvae_tensor {
            data: self.memory.as_ptr().cast_mut().cast::<c_void>(),
            device_type: VVAE_DEVICE_CPU,
            device_id: 0,
            ndim: 5,
            dtype: self.kind.dtype.code(),
            shape: self.shape.as_ptr(),
            strides: self.strides.as_ptr(),
            byte_offset: 0,
        }
    }

    /// Like `tensor`, for the library to write to.
    pub fn tensor_mut(&mut self) -> vvae_tensor {
        vvae_tensor { data: self.memory.as_mut_ptr().cast::<c_void>(), ..self.tensor() }
    }

    /// The same frames in memory of a GPU.
    pub fn tensor_on(&self, device_id: i32, address: u64) -> vvae_tensor {
        let data = std::ptr::without_provenance_mut(address as usize);
        vvae_tensor { data, device_type: VVAE_DEVICE_CUDA, device_id, ..self.tensor() }
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: `new` made at least as many bytes.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr().cast(), self.kind.bytes() * self.count()) }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`.
        unsafe { std::slice::from_raw_parts_mut(self.memory.as_mut_ptr().cast(), self.kind.bytes() * self.count()) }
    }

    pub fn frame(&self, index: usize) -> &[u8] {
        &self.bytes()[index * self.kind.bytes()..][..self.kind.bytes()]
    }

    pub fn frame_mut(&mut self, index: usize) -> &mut [u8] {
        let bytes = self.kind.bytes();
        &mut self.bytes_mut()[index * bytes..][..bytes]
    }
}
