//! What bands have copied: from and to host memory by the copy engines, and within the device by a kernel of our own.

use std::ops::Range;

use cudarc::driver::sys;

use super::bands::{Bands, Work};
use crate::backend::HostFrame;
use crate::backend::cuda::Cuda;
use crate::backend::cuda::driver::device::check;
use crate::backend::cuda::driver::stream::Stream;
use crate::backend::cuda::launch::kernels::BESIDE_THREADS;
use crate::backend::cuda::launch::params::{CopyParams, MAX_FRAMES};
use crate::error::{Error, Result};
use crate::tensor::FrameShape;

/// Of a block that copies rows, and the bytes that each of them copies at once.
const THREADS: u64 = BESIDE_THREADS as u64;
const UNIT: u64 = 16;
/// Bytes from one part of a copy to the next that the driver takes.
const MOST_APART: u64 = i32::MAX as u64;

/// Part of a frame that is copied: from where it begins to where it goes.
pub struct Copied {
    pub from: u64,
    pub to: u64,
    /// Whole units are copied.
    pub bytes: u64,
}

/// How the rows lie of what is copied: the bytes of one, and from one to the next.
struct Pitches {
    row: u64,
    from: u64,
    to: u64,
}

/// Parts of memory that one copy moves: how many of so many bytes, and the bytes from one to the next.
struct Parts {
    count: u64,
    bytes: u64,
    host_apart: u64,
    device_apart: u64,
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
    pub(in crate::backend::cuda) fn move_rows(
        &self,
        bands: &Bands,
        work: &Work,
        host: &OnHost,
        in_band: u64,
        towards: Towards,
    ) -> Result<()> {
        let bytes = (host.rows.end - host.rows.start) * self.precision.row_bytes(host.shape);
        if bytes == 0 {
            return Ok(());
        }
        let device = work.block.at(in_band, bytes)?;
        let host = self.host_rows(bands, host)?;
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

    /// Brings rows of frames of the past to where they begin in a band. Two frames go in one copy if they follow one another here and
    /// there: between copies the engine rests.
    pub(in crate::backend::cuda) fn fetch_past(
        &self,
        bands: &Bands,
        work: &Work,
        past: &[(OnHost, u64)],
    ) -> Result<()> {
        let apart = |from: u64, to: u64| to.checked_sub(from).filter(|apart| *apart <= MOST_APART);
        let together = match past {
            [(first, to), (second, to_second)] if !first.rows.is_empty() => {
                apart(first.frame.0, second.frame.0).zip(apart(*to, *to_second)).map(|apart| (first, to, apart))
            }
            _ => None,
        };
        let Some((first, to, (host_apart, band_apart))) = together else {
            return past.iter().try_for_each(|(from, to)| self.move_rows(bands, work, from, *to, Towards::Band));
        };
        let bytes = (first.rows.end - first.rows.start) * self.precision.row_bytes(first.shape);
        // Where the second lies follows from the first; that it is there is checked here.
        self.host_rows(bands, &past[1].0)?;
        let host = self.host_rows(bands, first)?;
        let device = work.block.at(*to, band_apart + bytes)?;
        let parts = Parts { count: 2, bytes, host_apart, device_apart: band_apart };
        self.move_parts(bands, (host, device), parts, Towards::Band)
    }

    /// Takes what host memory is to have of these rows from where they begin in a band, of which some columns may stay on the device.
    pub(in crate::backend::cuda) fn keep_far(
        &self,
        bands: &Bands,
        work: &Work,
        (frame, rows): (HostFrame, &Range<u64>),
        in_band: u64,
    ) -> Result<()> {
        let (op, host) = (work.division.op, OnHost { frame, shape: work.division.far(), rows });
        if !op.columns.is_parted() || rows.is_empty() {
            return self.move_rows(bands, work, &host, in_band, Towards::Frame);
        }
        let [band_row, far_row] = [op.input, host.shape].map(|shape| self.precision.row_bytes(shape));
        let count = rows.end - rows.start;
        let device = work.block.at(in_band, count * band_row)? + (band_row - far_row);
        let host = self.host_rows(bands, &host)?;
        let parts = Parts { count, bytes: far_row, host_apart: far_row, device_apart: band_row };
        self.move_parts(bands, (host, device), parts, Towards::Frame)
    }

    /// Moves parts of memory that are as far apart each time, in one copy.
    fn move_parts(&self, bands: &Bands, (host, device): (*mut u8, u64), parts: Parts, towards: Towards) -> Result<()> {
        use sys::CUmemorytype::{CU_MEMORYTYPE_DEVICE, CU_MEMORYTYPE_HOST};
        let (in_host, on_device) = ((CU_MEMORYTYPE_HOST, parts.host_apart), (CU_MEMORYTYPE_DEVICE, parts.device_apart));
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
            WidthInBytes: parts.bytes as usize,
            Height: parts.count as usize,
        };
        // SAFETY: as in `move_rows`.
        let answer = unsafe { sys::cuMemcpy2DAsync_v2(&copy, stream.handle()) };
        check(what(towards), answer)
    }

    fn host_rows(&self, bands: &Bands, OnHost { frame, shape, rows }: &OnHost) -> Result<*mut u8> {
        let start = rows.start * self.precision.row_bytes(*shape);
        Ok(bands.at(*frame, self.precision.data_bytes(*shape))?.wrapping_add(start as usize))
    }

    /// Copies rows of a band to where the device has its columns of them: from where they begin to where they go.
    pub(in crate::backend::cuda) fn keep_near(
        &self,
        stream: &Stream,
        work: &Work,
        frames: &[(u64, u64)],
        rows: &Range<u64>,
    ) -> Result<()> {
        let [band, near] = [work.division.op.input, work.division.near()].map(|shape| self.precision.row_bytes(shape));
        let bytes = (rows.end - rows.start) * near;
        let copied: Vec<Copied> = frames.iter().map(|(from, to)| Copied { from: *from, to: *to, bytes }).collect();
        self.copy_pitched(stream, work, &copied, Pitches { row: near, from: band, to: near })
    }

    /// Copies bytes within the device's memory.
    pub(in crate::backend::cuda) fn copy(&self, stream: &Stream, work: &Work, copied: &[Copied]) -> Result<()> {
        let most = copied.iter().map(|copied| copied.bytes).max().unwrap_or(0).next_multiple_of(UNIT);
        self.copy_pitched(stream, work, copied, Pitches { row: most, from: most, to: most })
    }

    fn copy_pitched(&self, stream: &Stream, work: &Work, copied: &[Copied], pitches: Pitches) -> Result<()> {
        let units = |bytes: u64| bytes.div_ceil(UNIT);
        let most = copied.iter().map(|copied| units(copied.bytes)).max().unwrap_or(0);
        if most == 0 {
            return Ok(());
        }
        if i32::try_from(most).is_err() || copied.len() > MAX_FRAMES {
            return Err(Error::Internal(format!("{most} units of {} frames are copied at once", copied.len())));
        }
        let mut params = CopyParams {
            from_pitch: pitches.from as i64,
            to_pitch: pitches.to as i64,
            row_units: units(pitches.row) as u32,
            ..CopyParams::default()
        };
        for (i, Copied { from, to, bytes }) in copied.iter().enumerate() {
            let reach = |pitch: u64| bytes.saturating_sub(1) / pitches.row * pitch + pitches.row.min(*bytes);
            params.from[i] = work.block.at(*from, reach(pitches.from))?;
            params.to[i] = work.block.at(*to, reach(pitches.to))?;
            params.units[i] = units(*bytes) as u32;
        }
        let blocks = (most.div_ceil(THREADS * 4) as u32).min(self.context.gpu.multiprocessors * 8);
        // SAFETY: all regions are that long, no more than were planned for, and all that uses them is in the same stream, or waits
        // for it.
        unsafe { self.kernels.copy_rows.launch(stream, [blocks, copied.len() as u32], THREADS as u32, &params) }
    }
}

fn what(towards: Towards) -> &'static str {
    match towards {
        Towards::Band => "fetching frames from host memory",
        Towards::Frame => "leaving frames in host memory",
    }
}
