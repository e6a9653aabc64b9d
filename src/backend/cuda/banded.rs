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
    BandedFrame, BandedOp, ConvFrame, ConvLayout, ConvOp, Frame, FrameAt, HostFrame, Kept, Precision, Prologue, Term,
    Terms, Window,
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

/// A band: its own rows, and those of the input that they see.
#[derive(Clone)]
struct Rows {
    own: Range<u64>,
    seen: Range<u64>,
}

/// How a place is divided: the input's part of the band, that of a shortcut's input, and that of the output.
struct Division {
    rows: u64,
    input: u64,
    inputs: u64,
    shortcut: u64,
    out: u64,
}

impl Division {
    fn new(precision: Precision, layout: &ConvLayout, shape: FrameShape, frames: BandFrames) -> Division {
        let rows = geometry::band_rows(layout, shape, frames.outputs);
        let output = layout.window.output(shape, layout.cout);
        let part = |away: bool, shape, rows| if away { precision.band_frame_bytes(shape, rows) } else { 0 };
        let side = output.with_channels(layout.shortcut.unwrap_or(0));
        Division {
            rows,
            input: precision.band_frame_bytes(shape, rows + 2 * geometry::HALO),
            inputs: frames.inputs,
            shortcut: part(frames.shortcut_away, side, rows),
            out: part(frames.out_away, output, rows * output_rows(layout)),
        }
    }

    fn bytes(&self) -> u64 {
        self.input * self.inputs + self.shortcut + self.out
    }
}

/// Output rows that one row of a band becomes.
fn output_rows(layout: &ConvLayout) -> u64 {
    if layout.window == Window::Up { 2 } else { 1 }
}

/// Device memory of all places, for convolutions of such frames.
pub fn bytes(precision: Precision, layout: &ConvLayout, shape: FrameShape, frames: BandFrames) -> Option<u64> {
    let away = frames.shortcut_away || frames.out_away;
    // The statistics of what leaves are made on the way, from fours of channels.
    if (away && frames.outputs > 1) || (frames.out_away && !quads_fit(layout)) {
        return None;
    }
    Some(geometry::BANDS * Division::new(precision, layout, shape, frames).bytes())
}

/// A convolution under way, and where its bands lie.
struct Work<'a> {
    block: &'a Block,
    weights: &'a Conv,
    op: &'a BandedOp<'a>,
    division: Division,
    output: FrameShape,
}

impl Work<'_> {
    fn place(&self, turn: usize) -> u64 {
        self.op.bands.0 + turn as u64 * (self.op.bands.1 / geometry::BANDS)
    }

    fn input(&self, turn: usize, input: usize) -> Frame {
        Frame(self.place(turn) + input as u64 * self.division.input)
    }

    fn shortcut(&self, turn: usize) -> u64 {
        self.place(turn) + self.division.inputs * self.division.input
    }

    fn out(&self, turn: usize) -> u64 {
        self.shortcut(turn) + self.division.shortcut
    }

    fn has_norm(&self) -> bool {
        self.op.layout.prologue != Prologue::None
    }

    /// The one output frame that goes to host memory, with its statistics.
    fn out_away(&self) -> Option<(HostFrame, Frame)> {
        self.op.frames.iter().find_map(|frame| on_host(frame.out))
    }

    fn shortcut_away(&self) -> Option<HostFrame> {
        self.op.frames.iter().find_map(|frame| on_host(frame.shortcut?.0)).map(|(frame, _)| frame)
    }

    /// Everything that comes from host memory.
    fn fetched(&self) -> impl Iterator<Item = HostFrame> + '_ {
        let past = self.op.past.iter().filter_map(|past| match past {
            Kept::Host(frame) => Some(*frame),
            Kept::Device(_) => None,
        });
        let fresh = self.op.fresh.iter().filter_map(|at| on_host(*at)).map(|(frame, _)| frame);
        past.chain(fresh).chain(self.shortcut_away())
    }

    /// Everything that goes there.
    fn given(&self) -> impl Iterator<Item = HostFrame> + '_ {
        let kept = self.op.keep.iter().filter_map(|(_, to)| match to {
            Kept::Host(frame) => Some(*frame),
            Kept::Device(_) => None,
        });
        kept.chain(self.out_away().map(|(frame, _)| frame))
    }
}

fn on_host(at: FrameAt) -> Option<(HostFrame, Frame)> {
    match at {
        At::Device(_) => None,
        At::Host { frame, statistics } => Some((frame, statistics)),
    }
}

impl Cuda {
    pub(super) fn launch_banded(&self, block: &Block, bands: &mut Bands, weights: &Conv, op: &BandedOp) -> Result<()> {
        let division = Division::new(self.precision, op.layout, op.input, op.frames_in_band());
        let work = Work { block, weights, op, division, output: op.layout.window.output(op.input, op.layout.cout) };
        for frame in work.fetched() {
            if let Some(arrived) = bands.arrived.get(&frame.0) {
                bands.upload.wait_for(arrived)?;
            }
        }
        let (mut fetched, mut params) = (None, None);
        let height = op.input.height;
        for top in (0..height).step_by(work.division.rows as usize) {
            let own = top..(top + work.division.rows).min(height);
            let seen = top.saturating_sub(geometry::HALO)..(own.end + geometry::HALO).min(height);
            let band = self.fetch_band(bands, &work, Rows { own, seen })?;
            // A band's input is read before the band above it is written, which may be over that input.
            if let Some(above) = fetched.replace(band) {
                params = Some(self.compute_band(bands, &work, above)?);
            }
        }
        if let Some(last) = fetched {
            params = Some(self.compute_band(bands, &work, last)?);
        }
        for frame in work.given() {
            let arrived = match bands.arrived.remove(&frame.0) {
                Some(event) => event,
                None => Event::new(&self.context)?,
            };
            arrived.record(&bands.download)?;
            bands.arrived.insert(frame.0, arrived);
        }
        match params {
            Some(params) => {
                let away = work.out_away().map(|(_, at)| block.at(at.0, op.layout.groups * 8)).transpose()?;
                let statistics = away.unwrap_or(params.out + self.precision.data_bytes(work.output));
                self.launch_statistics((op.layout, op.input, op.statistics), &params, statistics)
            }
            None => Ok(()),
        }
    }

    /// Brings the input of a band to its place: what is in host memory by the copy engine, fresh frames by normalising them.
    fn fetch_band(&self, bands: &mut Bands, work: &Work, rows: Rows) -> Result<(usize, Rows)> {
        let turn = bands.next;
        bands.next = (bands.next + 1) % bands.places.len();
        let (place, op) = (&bands.places[turn], work.op);
        // Another layer's band may have been here, and divided the place in another way.
        bands.upload.wait_for(&place.computed)?;
        bands.upload.wait_for(&place.kept)?;
        self.stream.wait_for(&place.kept)?;
        for (i, past) in op.past.iter().enumerate() {
            match *past {
                Kept::Host(frame) => {
                    self.upload_rows(bands, work, (frame, op.input, rows.seen.clone()), work.input(turn, i).0)?
                }
                Kept::Device(frame) => self.copy_rows(
                    work,
                    frame.0 + rows.seen.start * self.precision.row_bytes(op.input),
                    work.input(turn, i).0,
                    &rows.seen,
                )?,
            }
        }
        for (i, at) in op.fresh.iter().enumerate() {
            if let At::Host { frame, .. } = *at {
                let to = work.input(turn, op.past.len() + i).0;
                self.upload_rows(bands, work, (frame, op.input, rows.seen.clone()), to)?;
            }
        }
        if let Some(frame) = work.shortcut_away() {
            let side = work.output.with_channels(op.layout.shortcut.unwrap_or(0));
            self.upload_rows(bands, work, (frame, side, rows.own.clone()), work.shortcut(turn))?;
        }
        place.fetched.record(&bands.upload)?;
        if work.has_norm() {
            let near = op.fresh.iter().enumerate().filter_map(|(i, at)| match *at {
                At::Device(frame) => Some((frame, work.input(turn, op.past.len() + i))),
                At::Host { .. } => None,
            });
            let near: Vec<(Frame, Frame)> = near.collect();
            if !near.is_empty() {
                let rows = NormRows { rows: rows.seen.clone(), out_bytes: work.division.input };
                self.launch_norm(work.block, work.weights, (op.layout, op.input), &near, Some(rows))?;
            }
        }
        place.normalised.record(&self.stream)?;
        Ok((turn, rows))
    }

    fn compute_band(&self, bands: &Bands, work: &Work, (turn, rows): (usize, Rows)) -> Result<ConvParams> {
        let (place, op, row) = (&bands.places[turn], work.op, self.precision.row_bytes(work.op.input));
        self.stream.wait_for(&place.fetched)?;
        for (i, at) in op.fresh.iter().enumerate() {
            if let At::Host { statistics, .. } = *at {
                let pixels = (rows.seen.end - rows.seen.start) * op.input.width;
                let frame = work.input(turn, op.past.len() + i);
                self.launch_norm_in_place(
                    work.block,
                    work.weights,
                    (op.layout, op.input),
                    (frame, pixels),
                    statistics,
                )?;
                place.normalised.record(&self.stream)?;
            }
        }
        let (frames, conv) = (in_band(work, turn), conv_of(op, &[]));
        let band = Band {
            rows: rows.own.clone(),
            input: work.has_norm().then(|| (rows.seen.clone(), work.division.input)),
            shortcut: work
                .shortcut_away()
                .map(|_| work.block.at(work.shortcut(turn), work.division.shortcut))
                .transpose()?,
            out: work.out_away().map(|_| work.block.at(work.out(turn), work.division.out)).transpose()?,
        };
        let params = self.launch_sums(work.block, work.weights, &conv, &frames, Some(band))?;

        let own = (rows.own.start - rows.seen.start) * row;
        for (i, to) in op.keep {
            let from = work.input(turn, op.past.len() + i).0 + own;
            if let Kept::Device(to) = *to {
                self.copy_rows(work, from, to.0 + rows.own.start * row, &rows.own)?;
            }
        }
        place.computed.record(&self.stream)?;
        bands.download.wait_for(&place.normalised)?;
        for (i, to) in op.keep {
            let from = work.input(turn, op.past.len() + i).0 + own;
            if let Kept::Host(to) = *to {
                self.download_rows(bands, work, from, (to, op.input, rows.own.clone()))?;
            }
        }
        if let Some((to, _)) = work.out_away() {
            bands.download.wait_for(&place.computed)?;
            let by = output_rows(op.layout);
            let made = rows.own.start * by..rows.own.end * by;
            self.download_rows(bands, work, work.out(turn), (to, work.output, made))?;
        }
        place.kept.record(&bands.download)?;
        Ok(params)
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

fn conv_of<'a>(op: &BandedOp<'a>, frames: &'a [ConvFrame]) -> ConvOp<'a> {
    let BandedOp { layout, input, statistics, scratch, .. } = *op;
    ConvOp { layout, input, frames, statistics, scratch }
}

/// The frames of a convolution with the places that their inputs have in a band. What is lent by the band has no frame.
fn in_band(work: &Work, turn: usize) -> Vec<ConvFrame> {
    let frame = |at: FrameAt| match at {
        At::Device(frame) => frame,
        At::Host { .. } => Frame(0),
    };
    let input = |input: usize| match work.has_norm() {
        true => work.input(turn, input),
        false => frame(work.op.fresh[input]),
    };
    let in_place = |banded: &BandedFrame| {
        let mut terms = Terms::new();
        banded.terms.iter().for_each(|(i, slab)| terms.push(Term { frame: input(*i), slab: *slab }));
        if let Some((at, slab)) = banded.shortcut {
            terms.push(Term { frame: frame(at), slab });
        }
        ConvFrame { terms, bias: banded.bias, residual: banded.residual, out: frame(banded.out) }
    };
    work.op.frames.iter().map(in_place).collect()
}
