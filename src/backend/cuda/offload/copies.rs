//! Frames in pinned host memory, and the copies of their rows from and to band buffers.

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::sys;

use crate::backend::cuda::driver::{
    Context, CopySide, CudaStream, DeviceBlock, MAX_PITCH, PinnedMemory, SpanRecorder, check, pitched_copy,
};
use crate::error::{Error, Result};
use crate::ir::HostOffset;

/// The offloaded frames of a job, and a stream for each direction.
pub struct HostFrames {
    memory: Option<PinnedMemory>,
    pub upload: CudaStream,
    pub download: CudaStream,
}

/// Rows of a frame in host memory.
pub struct HostRows<'a> {
    pub frame: HostOffset,
    pub row_bytes: u64,
    pub rows: &'a Range<u64>,
}

impl HostRows<'_> {
    fn bytes(&self) -> u64 {
        (self.rows.end - self.rows.start) * self.row_bytes
    }
}

#[derive(Clone, Copy)]
enum CopyDirection {
    ToDevice,
    ToHost,
}

impl CopyDirection {
    fn doing(self) -> &'static str {
        match self {
            CopyDirection::ToDevice => "fetching frames from host memory",
            CopyDirection::ToHost => "offloading frames to host memory",
        }
    }
}

/// A copy of `count` runs of `bytes` each.
struct PitchedCopy {
    count: u64,
    bytes: u64,
    host_pitch: u64,
    device_pitch: u64,
}

impl HostFrames {
    pub fn new(context: &Arc<Context>, bytes: u64) -> Result<HostFrames> {
        Ok(HostFrames {
            memory: if bytes > 0 { Some(PinnedMemory::new(context, bytes)?) } else { None },
            upload: CudaStream::new(context)?,
            download: CudaStream::new(context)?,
        })
    }

    /// Whether the memory could not be pinned, so that copies are slow.
    pub fn is_pageable(&self) -> bool {
        self.memory.as_ref().is_some_and(|memory| !memory.is_pinned())
    }

    fn at(&self, frame: HostOffset, bytes: u64) -> Result<*mut u8> {
        let memory = self.memory.as_ref().ok_or_else(|| Error::Internal("no offloaded frames were planned".into()))?;
        memory.at(frame.0, bytes)
    }

    /// Fetches rows to an offset in the block.
    pub fn fetch_rows(&self, block: &DeviceBlock, from: &HostRows, to: u64) -> Result<()> {
        self.copy_rows(block, from, to, CopyDirection::ToDevice)
    }

    /// Offloads rows from an offset in the block.
    pub fn offload_rows(&self, block: &DeviceBlock, from: u64, to: &HostRows) -> Result<()> {
        self.copy_rows(block, to, from, CopyDirection::ToHost)
    }

    fn copy_rows(&self, block: &DeviceBlock, host: &HostRows, offset: u64, direction: CopyDirection) -> Result<()> {
        let bytes = host.bytes();
        if bytes == 0 {
            return Ok(());
        }
        let device = block.at(offset, bytes)?;
        let host = self.row_address(host)?;
        let (stream, doing) = (self.stream(direction), direction.doing());
        // SAFETY: both regions are that long. A band buffer that is written is free, and its source stays until its
        // last reader is done; a host frame that is written is read by nobody before the event that says it has
        // arrived.
        unsafe {
            match direction {
                CopyDirection::ToDevice => stream.upload(doing, host, device, bytes as usize),
                CopyDirection::ToHost => stream.download(doing, device, host, bytes as usize),
            }
        }
    }

    fn stream(&self, direction: CopyDirection) -> &CudaStream {
        match direction {
            CopyDirection::ToDevice => &self.upload,
            CopyDirection::ToHost => &self.download,
        }
    }

    /// Notes when copies run.
    pub fn set_spans(&mut self, spans: Option<&Arc<SpanRecorder>>) {
        self.upload.set_spans(spans.map(|spans| (Arc::clone(spans), "caches to device")));
        self.download.set_spans(spans.map(|spans| (Arc::clone(spans), "caches to host")));
    }

    /// Fetches rows of cached frames, each to its offset. Two frames go in one copy where the second follows the first
    /// on both sides, as the engine pauses between copies.
    pub fn fetch_cached(&self, block: &DeviceBlock, cached: &[(HostRows, u64)]) -> Result<()> {
        let pitch = |from: u64, to: u64| to.checked_sub(from).filter(|pitch| *pitch <= MAX_PITCH);
        let pair = match cached {
            [(first, to), (second, to_second)] if !first.rows.is_empty() => {
                pitch(first.frame.0, second.frame.0).zip(pitch(*to, *to_second)).map(|pitch| (first, to, pitch))
            }
            _ => None,
        };
        let Some((first, to, (host_pitch, device_pitch))) = pair else {
            return cached.iter().try_for_each(|(from, to)| self.fetch_rows(block, from, *to));
        };
        let bytes = first.bytes();
        // The copy derives the second address from the first; this checks it.
        self.row_address(&cached[1].0)?;
        let host = self.row_address(first)?;
        let device = block.at(*to, device_pitch + bytes)?;
        let copy = PitchedCopy { count: 2, bytes, host_pitch, device_pitch };
        self.copy_pitched((host, device), copy, CopyDirection::ToDevice)
    }

    /// Offloads the right columns of rows of `band_row` bytes, as many as the host frame has.
    pub fn offload_columns(&self, block: &DeviceBlock, (from, band_row): (u64, u64), to: &HostRows) -> Result<()> {
        let host_row = to.row_bytes;
        if host_row == band_row || to.rows.is_empty() {
            return self.offload_rows(block, from, to);
        }
        let count = to.rows.end - to.rows.start;
        let device = block.at(from, count * band_row)? + (band_row - host_row);
        let host = self.row_address(to)?;
        let copy = PitchedCopy { count, bytes: host_row, host_pitch: host_row, device_pitch: band_row };
        self.copy_pitched((host, device), copy, CopyDirection::ToHost)
    }

    fn copy_pitched(&self, (host, device): (*mut u8, u64), copy: PitchedCopy, direction: CopyDirection) -> Result<()> {
        use sys::CUmemorytype::{CU_MEMORYTYPE_DEVICE, CU_MEMORYTYPE_HOST};
        let side = |memory, pitch: u64| CopySide { memory, host: host.cast(), device, pitch: pitch as usize };
        let in_host = side(CU_MEMORYTYPE_HOST, copy.host_pitch);
        let on_device = side(CU_MEMORYTYPE_DEVICE, copy.device_pitch);
        let (source, target) = match direction {
            CopyDirection::ToDevice => (in_host, on_device),
            CopyDirection::ToHost => (on_device, in_host),
        };
        let described = pitched_copy(source, target, copy.bytes as usize, copy.count as usize);
        let stream = self.stream(direction);
        stream.copy(|| {
            // SAFETY: as in `copy_rows`.
            let answer = unsafe { sys::cuMemcpy2DAsync_v2(&described, stream.handle()) };
            check(direction.doing(), answer)
        })
    }

    fn row_address(&self, HostRows { frame, row_bytes, rows }: &HostRows) -> Result<*mut u8> {
        let start = rows.start * row_bytes;
        Ok(self.at(*frame, rows.end * row_bytes)?.wrapping_add(start as usize))
    }
}
