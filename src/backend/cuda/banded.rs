//! Convolutions in bands of rows, for layers whose past, or whose frames, lie in host memory. While one band computes, the copy
//! engines fetch what the next one needs and take away what the last one leaves; bands take turns in a few places, also from
//! one layer to the next, so the fetching runs ahead by itself.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::sys;

use super::context::Context;
use super::conv::{Band, quads_fit};
use super::driver::check;
use super::memory::Block;
use super::norm::NormRows;
use super::params::ConvParams;
use super::pinned::Pinned;
use super::stream::{Event, Stream};
use super::weights::Conv;
use super::{Cuda, geometry};
use crate::backend::{
    AnewOp, BandedFrame, BandedOp, ConvFrame, ConvLayout, ConvOp, Frame, FrameAt, HostFrame, Kept, Precision, Prologue,
    Term, Terms, Window,
};
use crate::error::{Error, Result};
use crate::tensor::{At, BandFrames, FrameShape};

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

/// A band: its own rows, those of the input that they see, and those of inputs made anew that no band above it has made.
#[derive(Clone)]
struct Rows {
    own: Range<u64>,
    seen: Range<u64>,
    made: Range<u64>,
}

impl Rows {
    fn new(top: u64, rows: u64, height: u64, above: Option<&Rows>) -> Rows {
        let own = top..(top + rows).min(height);
        let seen = top.saturating_sub(geometry::HALO)..(own.end + geometry::HALO).min(height);
        let made = above.map_or(0, |above| above.made.end)..(own.end + geometry::LEAD).min(height);
        Rows { own, seen, made }
    }
}

/// A band on its way, and the place it is in.
type Under = (usize, Rows);

/// Bytes of what a band of so many rows has of each frame.
struct Parts {
    rows: u64,
    input: u64,
    anew: u64,
    shortcut: u64,
    out: u64,
}

impl Parts {
    fn new(precision: Precision, layout: &ConvLayout, shape: FrameShape, rows: u64) -> Parts {
        let output = layout.window.output(shape, layout.cout);
        let side = output.with_channels(layout.shortcut.unwrap_or(0));
        Parts {
            rows,
            input: precision.band_frame_bytes(shape, rows + 2 * geometry::HALO),
            anew: precision.band_frame_bytes(shape, geometry::HALO + rows + geometry::LEAD),
            shortcut: precision.band_frame_bytes(side, rows),
            out: precision.band_frame_bytes(output, rows * output_rows(layout)),
        }
    }

    /// Of a place that has all of them.
    fn bytes(&self, frames: BandFrames) -> u64 {
        let BandFrames { inputs, anew, shortcuts, outs, .. } = frames;
        inputs * self.input + anew * self.anew + shortcuts * self.shortcut + outs * self.out
    }
}

/// Output rows that one row of a band becomes.
fn output_rows(layout: &ConvLayout) -> u64 {
    if layout.window == Window::Up { 2 } else { 1 }
}

/// Device memory of all places, for convolutions of such frames.
pub fn bytes(precision: Precision, layout: &ConvLayout, shape: FrameShape, frames: BandFrames) -> Option<u64> {
    // The statistics of what does not stay are made on the way, from fours of channels.
    if frames.outs > 0 && !quads_fit(layout) {
        return None;
    }
    let rows = geometry::band_rows(layout, shape, frames.outputs);
    Some(geometry::BANDS * Parts::new(precision, layout, shape, rows).bytes(frames))
}

/// A convolution under way, and where in a place the parts of its frames lie that are not whole on the device.
struct Work<'a> {
    block: &'a Block,
    op: &'a BandedOp<'a, Conv>,
    parts: Parts,
    output: FrameShape,
    /// Of each input, past ones first.
    inputs: Vec<Option<u64>>,
    /// Of each output's shortcut, and of each output.
    shortcuts: Vec<Option<u64>>,
    outs: Vec<Option<u64>>,
}

impl<'a> Work<'a> {
    fn new(cuda: &Cuda, block: &'a Block, op: &'a BandedOp<'a, Conv>) -> Result<Work<'a>> {
        let parts = cuda.divide(op)?;
        let mut end = 0;
        let mut next = |bytes: u64| {
            end += bytes;
            Some(end - bytes)
        };
        let mut inputs = Vec::new();
        if op.layout.prologue != Prologue::None {
            inputs.extend(op.past.iter().map(|past| match past {
                Kept::Host(_) => next(parts.input),
                Kept::Device(_) => None,
            }));
            inputs.extend(op.fresh.iter().map(|at| next(if at.is_anew() { parts.anew } else { parts.input })));
        }
        let shortcuts = op.frames.iter().map(|frame| match frame.shortcut {
            Some((At::Host { .. } | At::Anew { .. }, _)) => next(parts.shortcut),
            Some((At::Device(_), _)) | None => None,
        });
        let shortcuts = shortcuts.collect();
        // Nobody reads what is made for its statistics, so that all of it may lie in the same place.
        let mut for_statistics = None;
        let outs = op.frames.iter().map(|frame| match frame.out {
            At::Device(_) => None,
            At::Host { .. } => next(parts.out),
            At::Anew { .. } => {
                for_statistics = for_statistics.or_else(|| next(parts.out));
                for_statistics
            }
        });
        let outs = outs.collect();
        let output = op.layout.window.output(op.input, op.layout.cout);
        Ok(Work { block, op, parts, output, inputs, shortcuts, outs })
    }

    fn place(&self, turn: usize) -> u64 {
        self.op.bands.0 + turn as u64 * (self.op.bands.1 / geometry::BANDS)
    }

    /// Where the part of a fresh frame lies.
    fn fresh(&self, turn: usize, fresh: usize) -> u64 {
        self.place(turn) + self.inputs[self.op.past.len() + fresh].unwrap_or(0)
    }

    fn has_norm(&self) -> bool {
        self.op.layout.prologue != Prologue::None
    }

    /// What the shortcuts read.
    fn side(&self) -> FrameShape {
        self.output.with_channels(self.op.layout.shortcut.unwrap_or(0))
    }

    /// Everything that comes from host memory.
    fn fetched(&self) -> impl Iterator<Item = HostFrame> + '_ {
        let past = self.op.past.iter().filter_map(|past| match past {
            Kept::Host(frame) => Some(*frame),
            Kept::Device(_) => None,
        });
        let shortcuts = self.op.frames.iter().filter_map(|frame| on_host(frame.shortcut?.0));
        past.chain(self.op.fresh.iter().filter_map(|at| on_host(*at))).chain(shortcuts)
    }

    /// Everything that goes there.
    fn given(&self) -> impl Iterator<Item = HostFrame> + '_ {
        let kept = self.op.keep.iter().filter_map(|(_, to)| match to {
            Kept::Host(frame) => Some(*frame),
            Kept::Device(_) => None,
        });
        kept.chain(self.op.frames.iter().filter_map(|frame| on_host(frame.out)))
    }
}

fn on_host(at: FrameAt) -> Option<HostFrame> {
    match at {
        At::Host { frame, .. } => Some(frame),
        At::Device(_) | At::Anew { .. } => None,
    }
}

impl Cuda {
    pub(super) fn launch_banded(&self, block: &Block, bands: &mut Bands, op: &BandedOp<Conv>) -> Result<()> {
        let work = Work::new(self, block, op)?;
        for frame in work.fetched() {
            if let Some(arrived) = bands.arrived.get(&frame.0) {
                bands.upload.wait_for(arrived)?;
            }
        }
        let mut params = None;
        let (mut fetched, mut computed): (Option<Under>, Option<Under>) = (None, None);
        for top in (0..op.input.height).step_by(work.parts.rows as usize) {
            let above = fetched.as_ref();
            let rows = Rows::new(top, work.parts.rows, op.input.height, above.map(|(_, rows)| rows));
            let band = self.fetch_band(bands, &work, rows, above)?;
            // A band's input is read before the band above it is written, which may be over that input.
            if let Some(above) = fetched.replace(band) {
                params = Some(self.compute_band(bands, &work, &above)?);
                self.remember_band(bands, &work, computed.replace(above))?;
            }
        }
        if let Some(last) = fetched {
            params = Some(self.compute_band(bands, &work, &last)?);
            self.remember_band(bands, &work, computed)?;
            self.remember_band(bands, &work, Some(last))?;
        }
        for frame in work.given() {
            let arrived = match bands.arrived.remove(&frame.0) {
                Some(event) => event,
                None => Event::new(&self.context)?,
            };
            arrived.record(&bands.download)?;
            bands.arrived.insert(frame.0, arrived);
        }
        let Some(params) = params else { return Ok(()) };
        let statistics = op.frames.iter().map(|frame| match frame.out {
            At::Device(out) => Ok(block.address(out) + self.precision.data_bytes(work.output)),
            At::Host { statistics, .. } | At::Anew { statistics, .. } => block.at(statistics.0, op.layout.groups * 8),
        });
        let statistics = statistics.collect::<Result<Vec<_>>>()?;
        self.launch_statistics((op.layout, op.input, op.statistics), &params, &statistics)
    }

    /// The number of rows, of those that fit into a place, which keeps all multiprocessors busy to the end of a band for the
    /// most part. Places are as large as the largest bands of a job need them at the least.
    fn divide(&self, op: &BandedOp<Conv>) -> Result<Parts> {
        let (frames, place) = (op.frames_in_band(), op.bands.1 / geometry::BANDS);
        let at_least = geometry::band_rows(op.layout, op.input, frames.outputs);
        let parts = geometry::bands_from(at_least, op.input)
            .map(|rows| Parts::new(self.precision, op.layout, op.input, rows))
            .take_while(|parts| parts.bytes(frames) <= place);
        let idle = |parts: &Parts| {
            let tiles = geometry::band_tiles(op.layout, op.input, frames.outputs, parts.rows) as f64;
            let rounds = tiles / f64::from(self.context.gpu.multiprocessors);
            1.0 - rounds / rounds.ceil()
        };
        let best = parts.min_by(|a, b| idle(a).total_cmp(&idle(b)));
        best.ok_or_else(|| Error::Internal(format!("bands of {at_least} rows were not planned")))
    }

    /// Brings the input of a band to its place: what is in host memory by the copy engine, fresh frames by normalising them.
    fn fetch_band(&self, bands: &mut Bands, work: &Work, rows: Rows, above: Option<&Under>) -> Result<Under> {
        let turn = bands.next;
        bands.next = (bands.next + 1) % bands.places.len();
        let (place, op) = (&bands.places[turn], work.op);
        // Another layer's band may have been here, and divided the place in another way.
        bands.upload.wait_for(&place.computed)?;
        bands.upload.wait_for(&place.kept)?;
        self.stream.wait_for(&place.kept)?;
        for (past, part) in op.past.iter().zip(&work.inputs) {
            if let (Kept::Host(frame), Some(part)) = (*past, part) {
                self.upload_rows(bands, work, (frame, op.input, rows.seen.clone()), work.place(turn) + part)?;
            }
        }
        for (i, at) in op.fresh.iter().enumerate() {
            if let Some(frame) = on_host(*at) {
                self.upload_rows(bands, work, (frame, op.input, rows.seen.clone()), work.fresh(turn, i))?;
            }
        }
        for (frame, part) in op.frames.iter().zip(&work.shortcuts) {
            let away = frame.shortcut.and_then(|(at, _)| on_host(at));
            if let (Some(frame), Some(part)) = (away, part) {
                self.upload_rows(bands, work, (frame, work.side(), rows.own.clone()), work.place(turn) + part)?;
            }
        }
        place.fetched.record(&bands.upload)?;
        if work.has_norm() {
            let near = op.fresh.iter().enumerate().filter_map(|(i, at)| match *at {
                At::Device(frame) => Some((frame, Frame(work.fresh(turn, i)))),
                At::Host { .. } | At::Anew { .. } => None,
            });
            let near: Vec<(Frame, Frame)> = near.collect();
            if !near.is_empty() {
                let rows = NormRows { rows: rows.seen.clone(), out_bytes: work.parts.input };
                self.launch_norm(work.block, op.weights, (op.layout, op.input), &near, Some(rows))?;
            }
            self.make_fresh_rows(work, turn, &rows, above)?;
        }
        place.normalised.record(&self.stream)?;
        Ok((turn, rows))
    }

    /// Makes the rows of fresh frames that are made anew, but for those that the band above has made.
    fn make_fresh_rows(&self, work: &Work, turn: usize, rows: &Rows, above: Option<&Under>) -> Result<()> {
        let (op, row) = (work.op, self.precision.row_bytes(work.op.input));
        let mut outs = Vec::new();
        for (i, at) in op.fresh.iter().enumerate() {
            let At::Anew { index, .. } = *at else { continue };
            let part = work.fresh(turn, i);
            if let Some((turn_above, above)) = above {
                let from = work.fresh(*turn_above, i) + (rows.seen.start - above.seen.start) * row;
                self.copy_rows(work, from, part, &(rows.seen.start..rows.made.start))?;
            }
            outs.push((index, Frame(part.wrapping_sub(rows.seen.start * row))));
        }
        if outs.is_empty() || rows.made.is_empty() {
            return Ok(());
        }
        self.make_rows(work, &outs, &rows.made)?;
        for (i, at) in op.fresh.iter().enumerate() {
            let At::Anew { statistics, .. } = *at else { continue };
            let first = Frame(work.fresh(turn, i) + (rows.made.start - rows.seen.start) * row);
            let pixels = (rows.made.end - rows.made.start) * op.input.width;
            let what = (op.layout, op.input);
            self.launch_norm_in_place(work.block, op.weights, what, (first, pixels), statistics)?;
        }
        Ok(())
    }

    /// Makes these rows of frames anew, by their number, where they would lie in whole frames.
    fn make_rows(&self, work: &Work, outs: &[(usize, Frame)], rows: &Range<u64>) -> Result<()> {
        let Some(AnewOp { weights, layout, input, frames }) = work.op.anew else {
            return Err(Error::Internal("a frame is to be made anew, but nobody makes it".into()));
        };
        let made = outs.iter().map(|(index, out)| {
            let (terms, bias) = frames[*index];
            ConvFrame { terms, bias, residual: None, out: *out }
        });
        let by = output_rows(layout);
        let conv = ConvOp { layout, input, frames: &[], statistics: false, scratch: work.op.scratch };
        let frames: Vec<ConvFrame> = made.collect();
        let band = Band { rows: rows.start / by..rows.end / by, seen: 0..input.height };
        self.launch_sums(work.block, weights, &conv, &frames, Some(band)).map(|_| ())
    }

    fn compute_band(&self, bands: &Bands, work: &Work, (turn, rows): &Under) -> Result<ConvParams> {
        let (turn, place, op) = (*turn, &bands.places[*turn], work.op);
        self.stream.wait_for(&place.fetched)?;
        for (i, at) in op.fresh.iter().enumerate() {
            if let At::Host { statistics, .. } = *at {
                let pixels = (rows.seen.end - rows.seen.start) * op.input.width;
                let frame = Frame(work.fresh(turn, i));
                self.launch_norm_in_place(work.block, op.weights, (op.layout, op.input), (frame, pixels), statistics)?;
                place.normalised.record(&self.stream)?;
            }
        }
        let frames = self.in_band(work, turn, rows);
        let above = rows.own.start * self.precision.row_bytes(work.side());
        let shortcuts = op.frames.iter().zip(&frames).filter_map(|(banded, frame)| match banded.shortcut {
            Some((At::Anew { index, .. }, _)) => {
                frame.terms.last().map(|term| (index, Frame(term.frame.0.wrapping_sub(above))))
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
        let seen = if work.has_norm() { rows.seen.clone() } else { 0..input.height };
        let band = Band { rows: rows.own.clone(), seen };
        let params = self.launch_sums(work.block, op.weights, &conv, &frames, Some(band))?;
        place.computed.record(&self.stream)?;

        bands.download.wait_for(&place.normalised)?;
        for (i, to) in op.keep {
            if let Kept::Host(to) = *to {
                let from = self.own_rows(work, turn, rows, *i);
                self.download_rows(bands, work, from, (to, op.input, rows.own.clone()))?;
            }
        }
        let by = output_rows(op.layout);
        for (frame, part) in op.frames.iter().zip(&work.outs) {
            if let (Some(to), Some(part)) = (on_host(frame.out), part) {
                bands.download.wait_for(&place.computed)?;
                let made = rows.own.start * by..rows.own.end * by;
                self.download_rows(bands, work, work.place(turn) + part, (to, work.output, made))?;
            }
        }
        place.kept.record(&bands.download)?;
        Ok(params)
    }

    /// Copies what a band has of the frames that are kept on the device. That may be over those of the past, of which the band
    /// below sees the last row: so it has been computed too.
    fn remember_band(&self, bands: &Bands, work: &Work, band: Option<Under>) -> Result<()> {
        let Some((turn, rows)) = band else { return Ok(()) };
        let row = self.precision.row_bytes(work.op.input);
        for (i, to) in work.op.keep {
            if let Kept::Device(to) = *to {
                let from = self.own_rows(work, turn, &rows, *i);
                self.copy_rows(work, from, to.0 + rows.own.start * row, &rows.own)?;
                bands.places[turn].computed.record(&self.stream)?;
            }
        }
        Ok(())
    }

    /// Where a band's own rows of a fresh frame lie.
    fn own_rows(&self, work: &Work, turn: usize, rows: &Rows, fresh: usize) -> u64 {
        work.fresh(turn, fresh) + (rows.own.start - rows.seen.start) * self.precision.row_bytes(work.op.input)
    }

    /// The frames of a convolution as its [`Band`] finds them.
    fn in_band(&self, work: &Work, turn: usize, rows: &Rows) -> Vec<ConvFrame> {
        let (op, place) = (work.op, work.place(turn));
        let from = |frame: Frame, row: u64, shape| Frame(frame.0 + row * self.precision.row_bytes(shape));
        let input = |i: usize| match (work.inputs.get(i).copied().flatten(), op.past.get(i)) {
            (Some(part), _) => Frame(place + part),
            (None, Some(Kept::Device(frame))) => from(*frame, rows.seen.start, op.input),
            (None, _) => device(op.fresh[i - op.past.len()]),
        };
        let banded = |(i, banded): (usize, &BandedFrame)| {
            let mut terms = Terms::new();
            banded.terms.iter().for_each(|(i, slab)| terms.push(Term { frame: input(*i), slab: *slab }));
            if let Some((at, slab)) = banded.shortcut {
                let part = work.shortcuts[i].map(|part| Frame(place + part));
                let frame = part.unwrap_or_else(|| from(device(at), rows.own.start, work.side()));
                terms.push(Term { frame, slab });
            }
            let above = rows.own.start * output_rows(op.layout) * self.precision.row_bytes(work.output);
            let part = work.outs[i].map(|part| Frame((place + part).wrapping_sub(above)));
            let out = part.unwrap_or_else(|| device(banded.out));
            ConvFrame { terms, bias: banded.bias, residual: banded.residual, out }
        };
        op.frames.iter().enumerate().map(banded).collect()
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

    /// Copies rows of an input frame within the device's memory.
    fn copy_rows(&self, work: &Work, from: u64, to: u64, rows: &Range<u64>) -> Result<()> {
        let bytes = (rows.end - rows.start) * self.precision.row_bytes(work.op.input);
        let (from, to) = (work.block.at(from, bytes)?, work.block.at(to, bytes)?);
        // SAFETY: both regions are that long, and all that uses them is in the same stream, or waits for it.
        let answer = unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes as usize, self.stream.handle()) };
        check("copying frames of the past", answer)
    }
}

/// A frame that is whole on the device.
fn device(at: FrameAt) -> Frame {
    match at {
        At::Device(frame) => frame,
        At::Host { .. } | At::Anew { .. } => unreachable!("a band has a part of it"),
    }
}
