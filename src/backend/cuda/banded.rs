//! Convolutions in bands of rows, for layers whose input, past or output is not to lie whole on the device. While one band
//! computes, the copy engines fetch what the next one needs and take away what the last one leaves; bands take turns in a few
//! places, also from one layer to the next, so the fetching runs ahead by itself.

mod division;

pub use division::bytes;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::sys;

use super::context::Context;
use super::conv::Band;
use super::driver::check;
use super::memory::Block;
use super::norm::NormRows;
use super::params::{ConvParams, CopyParams};
use super::pinned::Pinned;
use super::stream::{Event, Stream};
use super::weights::Conv;
use super::{Cuda, geometry};
use crate::backend::{AnewOp, BandedOp, ConvFrame, ConvOp, Frame, HostFrame};
use crate::error::{Error, Result};
use crate::tensor::{At, FrameShape};
use division::{Division, Rows, Turns, Under, on_host};

/// Of a block that copies rows, and the bytes that it copies at once.
const THREADS: u64 = 256;
const COPIED: u64 = 16;

/// What is copied of each of some frames.
struct Copied {
    rows: u64,
    row_bytes: u64,
    /// Bytes from one row to the next.
    from_pitch: u64,
    to_pitch: u64,
}

impl Copied {
    /// Bytes that follow one another.
    fn together(bytes: u64) -> Copied {
        Copied { rows: 1, row_bytes: bytes, from_pitch: 0, to_pitch: 0 }
    }
}

/// Where columns of the past go.
#[derive(Clone, Copy)]
enum Towards {
    Band,
    Frame,
}

/// A place that bands take turns in, and how far its current band is.
struct Place {
    fetched: Event,
    normalised: Event,
    computed: Event,
    kept: Event,
}

/// The past of a job and what is under way from and to it.
pub struct Bands {
    past: Option<Pinned>,
    upload: Stream,
    download: Stream,
    places: Vec<Place>,
    next: usize,
    /// When each frame of the past has arrived, by its offset.
    arrived: HashMap<u64, Event>,
    context: Arc<Context>,
}

impl Bands {
    pub fn new(context: &Arc<Context>, bytes: u64) -> Result<Bands> {
        let event = || Event::new(context);
        let place = || Ok(Place { fetched: event()?, normalised: event()?, computed: event()?, kept: event()? });
        Ok(Bands {
            past: if bytes > 0 { Some(Pinned::new(context, bytes)?) } else { None },
            upload: Stream::new(context)?,
            download: Stream::new(context)?,
            places: (0..geometry::BANDS).map(|_| place()).collect::<Result<_>>()?,
            next: 0,
            arrived: HashMap::new(),
            context: Arc::clone(context),
        })
    }

    /// Whether the past had to be put where the copy engines are slow to reach it.
    pub fn is_pageable(&self) -> bool {
        self.past.as_ref().is_some_and(|past| !past.is_pinned())
    }

    /// Lets `stream` wait for everything that is under way, and what comes next wait for `stream`.
    pub fn join(&self, stream: &Stream) -> Result<()> {
        let event = Event::new(&self.context)?;
        for ours in [&self.upload, &self.download] {
            event.between(ours.handle(), stream.handle())?;
        }
        event.between(stream.handle(), self.upload.handle())
    }

    pub fn wait(&self) -> Result<()> {
        self.upload.wait().and(self.download.wait())
    }

    /// The address of a frame of the past.
    pub fn at(&self, frame: HostFrame, bytes: u64) -> Result<*mut u8> {
        let past =
            self.past.as_ref().ok_or_else(|| Error::Internal("a layer has a past that was not planned".into()))?;
        past.at(frame.0, bytes)
    }
}

impl Drop for Bands {
    /// Host memory must outlive the copies that use it.
    fn drop(&mut self) {
        if let Ok(_current) = self.context.enter() {
            let _ = self.wait();
        }
    }
}

/// A convolution under way.
struct Work<'a> {
    block: &'a Block,
    division: Division<'a, Conv>,
}

/// The launches of its bands; all of them have the same parameters but for the rows.
struct Launches<'a> {
    cuda: &'a Cuda,
    bands: &'a mut Bands,
    work: &'a Work<'a>,
    params: Option<ConvParams>,
}

impl Turns for Launches<'_> {
    fn fetch(&mut self, rows: Rows, above: Option<&Under>) -> Result<Under> {
        self.cuda.fetch_band(self.bands, self.work, rows, above)
    }

    fn compute(&mut self, band: &Under, below: Option<&Under>) -> Result<()> {
        self.params = Some(self.cuda.compute_band(self.bands, self.work, band, below)?);
        Ok(())
    }

    fn remember(&mut self, band: &Under) -> Result<()> {
        self.cuda.remember_band(self.bands, self.work, band)
    }
}

impl Cuda {
    pub(super) fn launch_banded(&self, block: &Block, bands: &mut Bands, op: &BandedOp<Conv>) -> Result<()> {
        let division = Division::new(self.precision, self.context.gpu.multiprocessors, op)?;
        let work = Work { block, division };
        for frame in work.division.fetched() {
            if let Some(arrived) = bands.arrived.get(&frame.0) {
                bands.upload.wait_for(arrived)?;
            }
        }
        self.keep_statistics(&work)?;
        let mut launches = Launches { cuda: self, bands, work: &work, params: None };
        division::go_through(op.input.height, work.division.parts.rows, &mut launches)?;
        let Launches { bands, params, .. } = launches;
        for frame in work.division.given() {
            let arrived = match bands.arrived.remove(&frame.0) {
                Some(event) => event,
                None => Event::new(&self.context)?,
            };
            arrived.record(&bands.download)?;
            bands.arrived.insert(frame.0, arrived);
        }
        let Some(params) = params else { return Ok(()) };
        let statistics = op.frames.iter().map(|frame| match frame.out {
            At::Device(out) => Ok(block.address(out) + self.precision.data_bytes(work.division.output)),
            At::Host { statistics, .. } | At::Anew { statistics, .. } => block.at(statistics.0, op.layout.groups * 8),
        });
        let statistics = statistics.collect::<Result<Vec<_>>>()?;
        self.launch_statistics((op.layout, op.input, op.statistics), &params, &statistics)
    }

    /// What is made may lie over a frame, and its statistics over those.
    fn keep_statistics(&self, work: &Work) -> Result<()> {
        let op = work.division.op;
        let kept = op.keep_statistics.iter().map(|(i, to)| match op.fresh[*i] {
            At::Device(frame) => Ok((frame.0 + self.precision.data_bytes(op.input), to.0)),
            At::Host { .. } | At::Anew { .. } => {
                Err(Error::Internal("statistics that are kept already are to be kept".into()))
            }
        });
        let bytes = (op.layout.groups * 8).next_multiple_of(COPIED);
        self.copy(work, &kept.collect::<Result<Vec<_>>>()?, Copied::together(bytes))
    }

    /// Brings the input of a band to its place: what is in host memory by the copy engine, fresh frames by normalising them.
    fn fetch_band(&self, bands: &mut Bands, work: &Work, rows: Rows, above: Option<&Under>) -> Result<Under> {
        let turn = bands.next;
        bands.next = (bands.next + 1) % bands.places.len();
        let (place, op) = (&bands.places[turn], work.division.op);
        // Another layer's band may have been here, and divided the place in another way.
        bands.upload.wait_for(&place.computed)?;
        bands.upload.wait_for(&place.kept)?;
        self.stream.wait_for(&place.kept)?;
        let band = Under { turn, rows };
        let rows = &band.rows;
        let new = rows.shared(above).end..rows.seen.end;
        let mut copied = Vec::new();
        for (past, part) in op.past.iter().zip(&work.division.inputs) {
            let Some(part) = *part else { continue };
            let to = work.division.past_row(&band, part, new.start);
            if let Some(frame) = past.far {
                self.upload_columns(bands, work, (frame, new.clone()), to)?;
            }
            copied.extend(past.near.map(|near| (work.division.near_row(near, new.start), to)));
        }
        self.copy_near(work, &copied, &new, Towards::Band)?;
        for (i, at) in op.fresh.iter().enumerate() {
            if let Some(frame) = on_host(*at) {
                self.upload_rows(bands, work, (frame, op.input, rows.seen.clone()), work.division.fresh(turn, i))?;
            }
        }
        for (frame, part) in op.frames.iter().zip(&work.division.shortcuts) {
            let away = frame.shortcut.and_then(|(at, _)| on_host(at));
            if let (Some(frame), Some(part)) = (away, part) {
                self.upload_rows(
                    bands,
                    work,
                    (frame, work.division.side(), rows.own.clone()),
                    work.division.place(turn) + part,
                )?;
            }
        }
        place.fetched.record(&bands.upload)?;
        if work.division.has_norm() {
            let near = op.fresh.iter().enumerate().filter_map(|(i, at)| match *at {
                At::Device(frame) => Some((frame, Frame(work.division.fresh(turn, i)))),
                At::Host { .. } | At::Anew { .. } => None,
            });
            let near: Vec<(Frame, Frame)> = near.collect();
            if !near.is_empty() {
                let rows = NormRows { rows: rows.seen.clone(), out_bytes: work.division.parts.input };
                self.launch_norm(work.block, op.weights, (op.layout, op.input), &near, Some(rows))?;
            }
            self.make_fresh_rows(work, &band, above)?;
        }
        place.normalised.record(&self.stream)?;
        Ok(band)
    }

    /// Makes the rows of fresh frames that are made anew, but for those that the band above has made.
    fn make_fresh_rows(&self, work: &Work, Under { turn, rows }: &Under, above: Option<&Under>) -> Result<()> {
        let (op, row) = (work.division.op, self.precision.row_bytes(work.division.op.input));
        let (mut copied, mut outs) = (Vec::new(), Vec::new());
        for (i, at) in op.fresh.iter().enumerate() {
            let At::Anew { index, .. } = *at else { continue };
            let part = work.division.fresh(*turn, i);
            if let Some(above) = above {
                let from = work.division.fresh(above.turn, i) + (rows.seen.start - above.rows.seen.start) * row;
                copied.push((from, part));
            }
            outs.push((index, work.division.top(part, rows.seen.start, op.input)));
        }
        self.copy_rows(work, &copied, &(rows.seen.start..rows.made.start))?;
        if outs.is_empty() || rows.made.is_empty() {
            return Ok(());
        }
        self.make_rows(work, &outs, &rows.made)?;
        for (i, at) in op.fresh.iter().enumerate() {
            let At::Anew { statistics, .. } = *at else { continue };
            let first = Frame(work.division.fresh(*turn, i) + (rows.made.start - rows.seen.start) * row);
            let pixels = (rows.made.end - rows.made.start) * op.input.width;
            let what = (op.layout, op.input);
            self.launch_norm_in_place(work.block, op.weights, what, (first, pixels), statistics)?;
        }
        Ok(())
    }

    /// Gives the band below what it sees of the past too, as long as it is here.
    fn share_past(&self, work: &Work, band: &Under, below: &Under) -> Result<()> {
        let shared = below.rows.shared(Some(band));
        let past = work.division.inputs.iter().take(work.division.op.past.len()).flatten();
        let at = |band: &Under, part: u64| work.division.past_row(band, part, shared.start);
        let copied: Vec<(u64, u64)> = past.map(|part| (at(band, *part), at(below, *part))).collect();
        self.copy_rows(work, &copied, &shared)
    }

    /// Makes these rows of frames anew, by their number, where they would lie in whole frames.
    fn make_rows(&self, work: &Work, outs: &[(usize, Frame)], rows: &Range<u64>) -> Result<()> {
        let Some(AnewOp { weights, layout, input, frames }) = work.division.op.anew else {
            return Err(Error::Internal("a frame is to be made anew, but nobody makes it".into()));
        };
        let made = outs.iter().map(|(index, out)| {
            let (terms, bias) = frames[*index];
            ConvFrame { terms, bias, residual: None, out: *out }
        });
        let by = geometry::output_rows(layout);
        let conv = ConvOp { layout, input, frames: &[], statistics: false, scratch: work.division.op.scratch };
        let frames: Vec<ConvFrame> = made.collect();
        let band = Band { rows: rows.start / by..rows.end / by, seen: 0..input.height };
        self.launch_sums(work.block, weights, &conv, &frames, Some(band)).map(|_| ())
    }

    fn compute_band(&self, bands: &Bands, work: &Work, band: &Under, below: Option<&Under>) -> Result<ConvParams> {
        let (turn, rows) = (band.turn, &band.rows);
        let (place, op) = (&bands.places[turn], work.division.op);
        self.stream.wait_for(&place.fetched)?;
        if let Some(below) = below {
            self.share_past(work, band, below)?;
        }
        for (i, at) in op.fresh.iter().enumerate() {
            if let At::Host { statistics, .. } = *at {
                let pixels = (rows.seen.end - rows.seen.start) * op.input.width;
                let frame = Frame(work.division.fresh(turn, i));
                self.launch_norm_in_place(work.block, op.weights, (op.layout, op.input), (frame, pixels), statistics)?;
                place.normalised.record(&self.stream)?;
            }
        }
        let frames = work.division.in_band(band);
        let shortcuts =
            op.frames.iter().zip(&work.division.shortcuts).filter_map(|(frame, part)| match (frame.shortcut, part) {
                (Some((At::Anew { index, .. }, _)), Some(part)) => {
                    let here = work.division.place(turn) + part;
                    Some((index, work.division.top(here, rows.own.start, work.division.side())))
                }
                _ => None,
            });
        let shortcuts: Vec<(usize, Frame)> = shortcuts.collect();
        if !shortcuts.is_empty() {
            self.make_rows(work, &shortcuts, &rows.own)?;
        }
        let BandedOp { layout, input, statistics, scratch, .. } = *op;
        let conv = ConvOp { layout, input, frames: &[], statistics, scratch };
        // Without a norm the input is read where it lies.
        let seen = if work.division.has_norm() { rows.seen.clone() } else { 0..input.height };
        let launched = Band { rows: rows.own.clone(), seen };
        let params = self.launch_sums(work.block, op.weights, &conv, &frames, Some(launched))?;
        place.computed.record(&self.stream)?;

        bands.download.wait_for(&place.normalised)?;
        for (i, to) in op.keep {
            if let Some(to) = to.far {
                let from = work.division.fresh_row(band, *i, rows.own.start);
                self.download_columns(bands, work, from, (to, rows.own.clone()))?;
            }
        }
        let by = geometry::output_rows(op.layout);
        for (frame, part) in op.frames.iter().zip(&work.division.outs) {
            if let (Some(to), Some(part)) = (on_host(frame.out), part) {
                bands.download.wait_for(&place.computed)?;
                let made = rows.own.start * by..rows.own.end * by;
                self.download_rows(bands, work, work.division.place(turn) + part, (to, work.division.output, made))?;
            }
        }
        place.kept.record(&bands.download)?;
        Ok(params)
    }

    /// Copies what a band has of the frames that are kept on the device.
    fn remember_band(&self, bands: &Bands, work: &Work, band: &Under) -> Result<()> {
        let own = &band.rows.own;
        let kept = work.division.op.keep.iter().filter_map(|(i, to)| {
            Some((work.division.fresh_row(band, *i, own.start), work.division.near_row(to.near?, own.start)))
        });
        let kept: Vec<(u64, u64)> = kept.collect();
        if kept.is_empty() {
            return Ok(());
        }
        self.copy_near(work, &kept, own, Towards::Frame)?;
        bands.places[band.turn].computed.record(&self.stream)
    }

    /// Copies the columns of the past that are on the device: from where a row of each begins to where it goes.
    fn copy_near(&self, work: &Work, frames: &[(u64, u64)], rows: &Range<u64>, towards: Towards) -> Result<()> {
        let [band, near] = [work.division.op.input, work.division.near()].map(|shape| self.precision.row_bytes(shape));
        let (from_pitch, to_pitch) = match towards {
            Towards::Band => (near, band),
            Towards::Frame => (band, near),
        };
        self.copy(work, frames, Copied { rows: rows.end - rows.start, row_bytes: near, from_pitch, to_pitch })
    }

    /// The columns of the past that are in host memory, to where these rows begin in a band.
    fn upload_columns(&self, bands: &Bands, work: &Work, (from, rows): (HostFrame, Range<u64>), to: u64) -> Result<()> {
        if work.division.op.near_columns == 0 {
            return self.upload_rows(bands, work, (from, work.division.op.input, rows), to);
        }
        let copy = self.columns(bands, work, (from, &rows), to, Towards::Band)?;
        // SAFETY: both regions are that long; the place is free, and the frame stays until its last reader is done.
        let answer = unsafe { sys::cuMemcpy2DAsync_v2(&copy, bands.upload.handle()) };
        check("fetching frames from host memory", answer)
    }

    /// The same the other way.
    fn download_columns(
        &self,
        bands: &Bands,
        work: &Work,
        from: u64,
        (to, rows): (HostFrame, Range<u64>),
    ) -> Result<()> {
        if work.division.op.near_columns == 0 {
            return self.download_rows(bands, work, from, (to, work.division.op.input, rows));
        }
        let copy = self.columns(bands, work, (to, &rows), from, Towards::Frame)?;
        // SAFETY: both regions are that long; nobody reads the frame before the event that says it has arrived.
        let answer = unsafe { sys::cuMemcpy2DAsync_v2(&copy, bands.download.handle()) };
        check("leaving frames in host memory", answer)
    }

    /// Rows of a frame in host memory, and where they begin in a band.
    fn columns(
        &self,
        bands: &Bands,
        work: &Work,
        (frame, rows): (HostFrame, &Range<u64>),
        in_band: u64,
        towards: Towards,
    ) -> Result<sys::CUDA_MEMCPY2D> {
        use sys::CUmemorytype::{CU_MEMORYTYPE_DEVICE, CU_MEMORYTYPE_HOST};
        let far = work.division.far();
        let [band_row, near_row, far_row] =
            [work.division.op.input, work.division.near(), far].map(|shape| self.precision.row_bytes(shape));
        let height = rows.end - rows.start;
        let device = work.block.at(in_band, height * band_row)? + near_row;
        let host = bands.at(frame, self.precision.data_bytes(far))?.wrapping_add((rows.start * far_row) as usize);
        let (in_host, on_device) = ((CU_MEMORYTYPE_HOST, far_row), (CU_MEMORYTYPE_DEVICE, band_row));
        let (source, target) = match towards {
            Towards::Band => (in_host, on_device),
            Towards::Frame => (on_device, in_host),
        };
        Ok(sys::CUDA_MEMCPY2D {
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
        })
    }

    fn upload_rows(
        &self,
        bands: &Bands,
        work: &Work,
        (from, shape, rows): (HostFrame, FrameShape, Range<u64>),
        to: u64,
    ) -> Result<()> {
        let row = self.precision.row_bytes(shape);
        let bytes = (rows.end - rows.start) * row;
        let to = work.block.at(to, bytes)?;
        let from = bands.at(from, self.precision.data_bytes(shape))?.wrapping_add((rows.start * row) as usize);
        // SAFETY: both regions are that long; the place is free, and the frame stays until its last reader is done.
        let answer = unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.cast(), bytes as usize, bands.upload.handle()) };
        check("fetching frames from host memory", answer)
    }

    fn download_rows(
        &self,
        bands: &Bands,
        work: &Work,
        from: u64,
        (to, shape, rows): (HostFrame, FrameShape, Range<u64>),
    ) -> Result<()> {
        let row = self.precision.row_bytes(shape);
        let bytes = (rows.end - rows.start) * row;
        let from = work.block.at(from, bytes)?;
        let to = bands.at(to, self.precision.data_bytes(shape))?.wrapping_add((rows.start * row) as usize);
        // SAFETY: both regions are that long; nobody reads the frame before the event that says it has arrived.
        let answer = unsafe { sys::cuMemcpyDtoHAsync_v2(to.cast(), from, bytes as usize, bands.download.handle()) };
        check("leaving frames in host memory", answer)
    }

    /// Copies rows of input frames within the device's memory: from where they begin to where they go.
    fn copy_rows(&self, work: &Work, frames: &[(u64, u64)], rows: &Range<u64>) -> Result<()> {
        let bytes = rows.end.saturating_sub(rows.start) * self.precision.row_bytes(work.division.op.input);
        self.copy(work, frames, Copied::together(bytes))
    }

    fn copy(&self, work: &Work, frames: &[(u64, u64)], copied: Copied) -> Result<()> {
        let Copied { rows, row_bytes, from_pitch, to_pitch } = copied;
        if frames.is_empty() || rows * row_bytes == 0 {
            return Ok(());
        }
        let units = rows * row_bytes / COPIED;
        let Ok(counted) = i32::try_from(units) else {
            return Err(Error::Internal(format!("{rows} rows of {row_bytes} bytes are copied at once")));
        };
        let mut params = CopyParams {
            from_pitch: from_pitch as i64,
            to_pitch: to_pitch as i64,
            row_units: (row_bytes / COPIED) as u32,
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
        unsafe { self.kernels.copy_rows.launch(&self.stream, [blocks, frames.len() as u32], THREADS as u32, &params) }
    }
}
