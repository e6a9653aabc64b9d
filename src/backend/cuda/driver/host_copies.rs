//! Copies of rows between device and host memory, in a stream of their own.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUmemorytype};

use super::context::Context;
use super::error::check;
use super::stream::CudaStream;
use crate::backend::gpu::Queue;
use crate::error::Result;
use crate::ir::Rows;

/// The driver takes no longer pitch.
pub const MAX_PITCH: u64 = i32::MAX as u64;

/// One side of a copy of rows. The driver reads the address that the type names.
#[derive(Clone, Copy)]
pub struct CopySide {
    pub memory: CUmemorytype,
    pub host: *mut c_void,
    pub device: u64,
    pub pitch: usize,
}

/// A copy of `height` rows of `width` bytes.
pub fn pitched_copy(from: CopySide, to: CopySide, width: usize, height: usize) -> sys::CUDA_MEMCPY2D {
    sys::CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: from.memory,
        srcHost: from.host,
        srcDevice: from.device,
        srcArray: std::ptr::null_mut(),
        srcPitch: from.pitch,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: to.memory,
        dstHost: to.host,
        dstDevice: to.device,
        dstArray: std::ptr::null_mut(),
        dstPitch: to.pitch,
        WidthInBytes: width,
        Height: height,
    }
}

pub struct HostCopies {
    context: Arc<Context>,
    stream: CudaStream,
}

impl HostCopies {
    pub fn new(index: u32) -> Result<HostCopies> {
        let context = Context::new(index, None)?;
        Ok(HostCopies { stream: CudaStream::new(&context)?, context })
    }

    pub fn to_host(&self, rows: &Rows) -> Result<()> {
        self.copy(rows, CUmemorytype::CU_MEMORYTYPE_DEVICE, CUmemorytype::CU_MEMORYTYPE_HOST)
    }

    pub fn from_host(&self, rows: &Rows) -> Result<()> {
        self.copy(rows, CUmemorytype::CU_MEMORYTYPE_HOST, CUmemorytype::CU_MEMORYTYPE_DEVICE)
    }

    /// Waits for all copies.
    pub fn finish(&self) -> Result<()> {
        let _current = self.context.enter()?;
        self.stream.synchronise()
    }

    fn copy(&self, rows: &Rows, from: CUmemorytype, to: CUmemorytype) -> Result<()> {
        let pitches = rows.width as isize..=MAX_PITCH as isize;
        if rows.height > 1 && !(pitches.contains(&rows.from_pitch) && pitches.contains(&rows.to_pitch)) {
            // Rows that overlap or run backwards: one at a time.
            return (0..rows.height as isize).try_for_each(|row| {
                let (down, across) = (row * rows.from_pitch, row * rows.to_pitch);
                let (start, end) = (rows.from.wrapping_add_signed(down), rows.to.wrapping_add_signed(across));
                self.copy(&Rows { from: start, to: end, height: 1, ..*rows }, from, to)
            });
        }
        let side = |memory, address: usize, pitch: isize| CopySide {
            memory,
            host: std::ptr::with_exposed_provenance_mut(address),
            device: address as u64,
            pitch: if rows.height > 1 { pitch as usize } else { rows.width },
        };
        let (from, to) = (side(from, rows.from, rows.from_pitch), side(to, rows.to, rows.to_pitch));
        let copy = pitched_copy(from, to, rows.width, rows.height);
        let _current = self.context.enter()?;
        // SAFETY: rows of both views, for which the host vouches, and which live until `finish`.
        let answer = unsafe { sys::cuMemcpy2DAsync_v2(&copy, self.stream.handle()) };
        check("copying a tensor between a GPU and host memory", answer)
    }
}
