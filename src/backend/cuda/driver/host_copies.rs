//! Copies of rows between device and host memory, in a stream of their own.

use std::sync::Arc;

use cudarc::driver::sys::{self, CUmemorytype};

use super::context::Context;
use super::error::check;
use super::stream::CudaStream;
use crate::error::Result;
use crate::ir::Rows;

/// The driver takes no longer pitch.
const MAX_PITCH: isize = i32::MAX as isize;

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
        let pitches = rows.width as isize..=MAX_PITCH;
        if rows.height > 1 && !(pitches.contains(&rows.from_pitch) && pitches.contains(&rows.to_pitch)) {
            // Rows that overlap or run backwards: one at a time.
            return (0..rows.height as isize).try_for_each(|row| {
                let (down, across) = (row * rows.from_pitch, row * rows.to_pitch);
                let (start, end) = (rows.from.wrapping_add_signed(down), rows.to.wrapping_add_signed(across));
                self.copy(&Rows { from: start, to: end, height: 1, ..*rows }, from, to)
            });
        }
        let pitch = |pitch: isize| if rows.height > 1 { pitch as usize } else { rows.width };
        // The driver reads those addresses that the types name.
        let copy = sys::CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: from,
            srcHost: std::ptr::with_exposed_provenance(rows.from),
            srcDevice: rows.from as u64,
            srcArray: std::ptr::null_mut(),
            srcPitch: pitch(rows.from_pitch),
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: to,
            dstHost: std::ptr::with_exposed_provenance_mut(rows.to),
            dstDevice: rows.to as u64,
            dstArray: std::ptr::null_mut(),
            dstPitch: pitch(rows.to_pitch),
            WidthInBytes: rows.width,
            Height: rows.height,
        };
        let _current = self.context.enter()?;
        // SAFETY: rows of both views, for which the host vouches, and which live until `finish`.
        let answer = unsafe { sys::cuMemcpy2DAsync_v2(&copy, self.stream.handle()) };
        check("copying a tensor between a GPU and host memory", answer)
    }
}
