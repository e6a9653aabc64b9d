//! Frames in pinned host memory, and the copies of their rows from and to band buffers.

use std::ops::Range;

use super::api::{CopyDirection, GpuMemory, HostBlock, HostCopy, Queue};
use super::division::RowsAt;
use crate::error::{Error, Result};
use crate::ir::HostOffset;

const FETCHING: &str = "fetching frames from host memory";
const OFFLOADING: &str = "offloading frames to host memory";

/// The offloaded frames of a job, and a queue for each direction.
pub struct HostFrames<G: GpuMemory> {
    /// Dropped before the queues that copy from and to it.
    memory: Option<G::HostBlock>,
    pub upload: G::Queue,
    pub download: G::Queue,
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

    fn offset(&self) -> u64 {
        self.frame.0 + self.rows.start * self.row_bytes
    }
}

impl<G: GpuMemory> HostFrames<G> {
    pub fn new(gpu: &G, bytes: u64) -> Result<HostFrames<G>> {
        Ok(HostFrames {
            memory: if bytes > 0 { Some(gpu.host_block(bytes)?) } else { None },
            upload: gpu.queue()?,
            download: gpu.queue()?,
        })
    }

    /// Whether the memory could not be pinned, so that copies are slow.
    pub fn is_pageable(&self) -> bool {
        self.memory.as_ref().is_some_and(|memory| !memory.is_pinned())
    }

    /// Notes when copies run.
    pub fn set_spans(&mut self, spans: Option<&G::Spans>) {
        self.upload.set_spans(spans, "caches to device");
        self.download.set_spans(spans, "caches to host");
    }

    /// Fetches rows to an offset in the block.
    pub fn fetch_rows(&self, gpu: &G, block: &G::Block, from: &HostRows, to: u64) -> Result<()> {
        self.copy(gpu, block, HostCopy::run(CopyDirection::ToDevice, from.offset(), to, from.bytes(), FETCHING))
    }

    /// Offloads rows from an offset in the block.
    pub fn offload_rows(&self, gpu: &G, block: &G::Block, from: u64, to: &HostRows) -> Result<()> {
        self.copy(gpu, block, HostCopy::run(CopyDirection::ToHost, to.offset(), from, to.bytes(), OFFLOADING))
    }

    /// A band buffer that is written is free, and its source stays until its last reader is done. A host frame that is
    /// written is read by nobody before the event that says it has arrived.
    fn copy(&self, gpu: &G, block: &G::Block, copy: HostCopy) -> Result<()> {
        if copy.bytes == 0 || copy.count == 0 {
            return Ok(());
        }
        let memory = self.memory.as_ref().ok_or_else(|| Error::Internal("no offloaded frames were planned".into()))?;
        let queue = if copy.direction == CopyDirection::ToDevice { &self.upload } else { &self.download };
        gpu.copy(queue, block, memory, &copy)
    }

    /// Fetches rows of cached frames, each to its offset. Two frames go in one copy where the second follows the first
    /// on both sides, as the engine pauses between copies.
    pub fn fetch_cached(&self, gpu: &G, block: &G::Block, cached: &[(HostRows, u64)]) -> Result<()> {
        let pitch = |from: u64, to: u64| to.checked_sub(from).filter(|pitch| *pitch <= G::MAX_PITCH);
        let pitches = match cached {
            [(first, to), (second, to_second)] if !first.rows.is_empty() => {
                pitch(first.frame.0, second.frame.0).zip(pitch(*to, *to_second))
            }
            _ => None,
        };
        let Some((host_pitch, device_pitch)) = pitches else {
            return cached.iter().try_for_each(|(from, to)| self.fetch_rows(gpu, block, from, *to));
        };
        let (first, to) = &cached[0];
        let one = HostCopy::run(CopyDirection::ToDevice, first.offset(), *to, first.bytes(), FETCHING);
        self.copy(gpu, block, HostCopy { count: 2, host_pitch, device_pitch, ..one })
    }

    /// Offloads the right columns of a band's rows, as many as the host frame has.
    pub fn offload_columns(&self, gpu: &G, block: &G::Block, from: RowsAt, to: &HostRows) -> Result<()> {
        let (host_row, band_row, first) = (to.row_bytes, from.row_bytes, from.row(to.rows.start));
        if host_row == band_row {
            return self.offload_rows(gpu, block, first, to);
        }
        let device = first + (band_row - host_row);
        let one = HostCopy::run(CopyDirection::ToHost, to.offset(), device, host_row, OFFLOADING);
        self.copy(gpu, block, HostCopy { count: to.rows.end - to.rows.start, device_pitch: band_row, ..one })
    }
}
