//! What bands have copied: from and to host memory by the copy engines, and within the device by a kernel of our own.

use std::ops::Range;

use cudarc::driver::sys;

use super::super::Cuda;
use super::super::driver::check;
use super::super::params::CopyParams;
use super::super::stream::Stream;
use super::{Bands, Work};
use crate::backend::HostFrame;
use crate::error::{Error, Result};
use crate::tensor::FrameShape;

/// Of a block that copies rows, and the bytes that each of them copies at once.
const THREADS: u64 = 256;
const UNIT: u64 = 16;

/// What is copied of each of some frames.
pub struct Copied {
    rows: u64,
    row_bytes: u64,
    /// Bytes from one row to the next.
    from_pitch: u64,
    to_pitch: u64,
}

impl Copied {
    /// Bytes that follow one another, and those that make the last of them a whole unit.
    pub fn together(bytes: u64) -> Copied {
        Copied { rows: 1, row_bytes: bytes.next_multiple_of(UNIT), from_pitch: 0, to_pitch: 0 }
    }
}

/// Whether a band gets its input, or gives something back.
#[derive(Clone, Copy)]
pub enum Towards {
    Band,
    Frame,
}

/// Rows of a frame in host memory.
pub struct OnHost<'a> {
    pub frame: HostFrame,
    pub shape: FrameShape,
    pub rows: &'a Range<u64>,
}

impl Cuda {
    /// Moves whole rows between host memory and where they begin in a band.
    pub(super) fn move_rows(
        &self,
        bands: &Bands,
        work: &Work,
        host: OnHost,
        in_band: u64,
        towards: Towards,
    ) -> Result<()> {
        let bytes = (host.rows.end - host.rows.start) * self.precision.row_bytes(host.shape);
        if bytes == 0 {
            return Ok(());
        }
        let device = work.block.at(in_band, bytes)?;
        let host = self.host_rows(bands, &host)?;
        // SAFETY: both regions are that long. A place that something comes to is free, and its frame stays until its last reader is
        // done; a frame that something goes to is read by nobody before the event that says it has arrived.
        let answer = unsafe {
            match towards {
                Towards::Band => sys::cuMemcpyHtoDAsync_v2(device, host.cast(), bytes as usize, bands.upload.handle()),
                Towards::Frame => {
                    sys::cuMemcpyDtoHAsync_v2(host.cast(), device, bytes as usize, bands.download.handle())
                }
            }
        };
        check(what(towards), answer)
    }

    /// Moves what host memory has of these rows of the past, of which some columns may be on the device.
    pub(super) fn move_past(
        &self,
        bands: &Bands,
        work: &Work,
        (frame, rows): (HostFrame, &Range<u64>),
        in_band: u64,
        towards: Towards,
    ) -> Result<()> {
        use sys::CUmemorytype::{CU_MEMORYTYPE_DEVICE, CU_MEMORYTYPE_HOST};
        let host = OnHost { frame, shape: work.division.far(), rows };
        if work.division.op.near_columns == 0 || rows.is_empty() {
            return self.move_rows(bands, work, host, in_band, towards);
        }
        let [band_row, near_row, far_row] =
            [work.division.op.input, work.division.near(), host.shape].map(|shape| self.precision.row_bytes(shape));
        let height = rows.end - rows.start;
        let device = work.block.at(in_band, height * band_row)? + near_row;
        let host = self.host_rows(bands, &host)?;
        let (in_host, on_device) = ((CU_MEMORYTYPE_HOST, far_row), (CU_MEMORYTYPE_DEVICE, band_row));
        let (source, target, stream) = match towards {
            Towards::Band => (in_host, on_device, &bands.upload),
            Towards::Frame => (on_device, in_host, &bands.download),
        };
        let copy = sys::CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: source.0,
            srcHost: host.cast(),
            srcDevice: device,
            srcArray: std::ptr::null_mut(),
            srcPitch: source.1 as usize,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: target.0,
            dstHost: host.cast(),
            dstDevice: device,
            dstArray: std::ptr::null_mut(),
            dstPitch: target.1 as usize,
            WidthInBytes: far_row as usize,
            Height: height as usize,
        };
        // SAFETY: as in `move_rows`.
        let answer = unsafe { sys::cuMemcpy2DAsync_v2(&copy, stream.handle()) };
        check(what(towards), answer)
    }

    fn host_rows(&self, bands: &Bands, OnHost { frame, shape, rows }: &OnHost) -> Result<*mut u8> {
        let start = rows.start * self.precision.row_bytes(*shape);
        Ok(bands.at(*frame, self.precision.data_bytes(*shape))?.wrapping_add(start as usize))
    }

    /// Copies the columns of the past that are on the device: from where a row of each begins to where it goes.
    pub(super) fn copy_near(
        &self,
        stream: &Stream,
        work: &Work,
        frames: &[(u64, u64)],
        rows: &Range<u64>,
        towards: Towards,
    ) -> Result<()> {
        let [band, near] = [work.division.op.input, work.division.near()].map(|shape| self.precision.row_bytes(shape));
        let (from_pitch, to_pitch) = match towards {
            Towards::Band => (near, band),
            Towards::Frame => (band, near),
        };
        self.copy(stream, work, frames, Copied { rows: rows.end - rows.start, row_bytes: near, from_pitch, to_pitch })
    }

    /// Copies rows of input frames within the device's memory: from where they begin to where they go.
    pub(super) fn copy_rows(
        &self,
        stream: &Stream,
        work: &Work,
        frames: &[(u64, u64)],
        rows: &Range<u64>,
    ) -> Result<()> {
        let bytes = rows.end.saturating_sub(rows.start) * self.precision.row_bytes(work.division.op.input);
        self.copy(stream, work, frames, Copied::together(bytes))
    }

    pub(super) fn copy(&self, stream: &Stream, work: &Work, frames: &[(u64, u64)], copied: Copied) -> Result<()> {
        let Copied { rows, row_bytes, from_pitch, to_pitch } = copied;
        if frames.is_empty() || rows * row_bytes == 0 {
            return Ok(());
        }
        let units = rows * row_bytes / UNIT;
        let Ok(counted) = i32::try_from(units) else {
            return Err(Error::Internal(format!("{rows} rows of {row_bytes} bytes are copied at once")));
        };
        let mut params = CopyParams {
            from_pitch: from_pitch as i64,
            to_pitch: to_pitch as i64,
            row_units: (row_bytes / UNIT) as u32,
            units: counted as u32,
            ..CopyParams::default()
        };
        let reach = |pitch: u64| (rows - 1) * pitch + row_bytes;
        for (i, (from, to)) in frames.iter().enumerate() {
            params.from[i] = work.block.at(*from, reach(from_pitch))?;
            params.to[i] = work.block.at(*to, reach(to_pitch))?;
        }
        let blocks = (units.div_ceil(THREADS * 4) as u32).min(self.context.gpu.multiprocessors * 8);
        // SAFETY: all regions are that long, no more than were planned for, and all that uses them is in the same stream, or waits
        // for it.
        unsafe { self.kernels.copy_rows.launch(stream, [blocks, frames.len() as u32], THREADS as u32, &params) }
    }
}

fn what(towards: Towards) -> &'static str {
    match towards {
        Towards::Band => "fetching frames from host memory",
        Towards::Frame => "leaving frames in host memory",
    }
}
