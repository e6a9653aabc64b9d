//! Convolutions in bands of rows, for layers whose past lies in host memory. While one band computes, the copy engines fetch
//! the past of the next and take away what the last one leaves for the future; bands take turns in a few places, also from one
//! layer to the next, so the fetching runs ahead by itself.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::sys;

use super::context::Context;
use super::conv::Band;
use super::driver::check;
use super::memory::Block;
use super::norm::NormRows;
use super::params::ConvParams;
use super::pinned::Pinned;
use super::stream::{Event, Stream};
use super::weights::Conv;
use super::{Cuda, geometry};
use crate::backend::{BandedOp, ConvFrame, ConvOp, Frame, HostFrame, Precision, Term, Terms};
use crate::error::{Error, Result};

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

/// A band: the rows of the output, and those of the input that they see.
#[derive(Clone)]
struct Rows {
    own: Range<u64>,
    seen: Range<u64>,
}

impl Cuda {
    pub(super) fn launch_banded(&self, block: &Block, bands: &mut Bands, weights: &Conv, op: &BandedOp) -> Result<()> {
        let height = op.input.height;
        let rows = geometry::band_rows(op.layout, op.input, op.frames.len() as u64);
        for frame in op.past {
            if let Some(arrived) = bands.arrived.get(&frame.0) {
                bands.upload.wait_for(arrived)?;
            }
        }
        let (mut fetched, mut params) = (None, None);
        for top in (0..height).step_by(rows as usize) {
            let own = top..(top + rows).min(height);
            let seen = top.saturating_sub(geometry::HALO)..(own.end + geometry::HALO).min(height);
            let band = self.fetch_band(block, bands, weights, op, Rows { own, seen })?;
            // A band's input is read before the band above it is written, which may be over that input.
            if let Some(above) = fetched.replace(band) {
                params = Some(self.compute_band(block, bands, weights, op, above)?);
            }
        }
        if let Some(last) = fetched {
            params = Some(self.compute_band(block, bands, weights, op, last)?);
        }
        for (_, frame) in op.keep {
            let arrived = match bands.arrived.remove(&frame.0) {
                Some(event) => event,
                None => Event::new(&self.context)?,
            };
            arrived.record(&bands.download)?;
            bands.arrived.insert(frame.0, arrived);
        }
        match params {
            Some(params) => self.launch_statistics(&conv_of(op), &params),
            None => Ok(()),
        }
    }

    /// Brings the input of a band to its place: the past from the host, fresh frames by normalising them.
    fn fetch_band(
        &self,
        block: &Block,
        bands: &mut Bands,
        weights: &Conv,
        op: &BandedOp,
        rows: Rows,
    ) -> Result<(usize, Rows)> {
        let turn = bands.next;
        bands.next = (bands.next + 1) % bands.places.len();
        let (place, input) = (&bands.places[turn], Inputs::new(self.precision, op, turn));
        let (row, whole) = (self.precision.row_bytes(op.input), self.precision.data_bytes(op.input));
        let bytes = (rows.seen.end - rows.seen.start) * row;
        // Another layer's band may have been here, and divided the place in another way.
        bands.upload.wait_for(&place.computed)?;
        bands.upload.wait_for(&place.kept)?;
        for (i, past) in op.past.iter().enumerate() {
            let to = block.at(input.at(i).0, bytes)?;
            let from = bands.at(*past, whole)?.wrapping_add((rows.seen.start * row) as usize);
            // SAFETY: both regions are that long; the place is free, and the past stays until its own layer is done.
            let answer = unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.cast(), bytes as usize, bands.upload.handle()) };
            check("fetching frames of the past", answer)?;
        }
        place.fetched.record(&bands.upload)?;

        self.stream.wait_for(&place.kept)?;
        let fresh: Vec<(Frame, Frame)> =
            op.fresh.iter().enumerate().map(|(i, from)| (*from, input.at(op.past.len() + i))).collect();
        let frame_bytes = self.precision.frame_bytes(op.input, op.layout.groups);
        // Kernels want frames that lie whole frames apart; those made again lie elsewhere.
        for run in fresh.chunk_by(|a, b| b.0.0 == a.0.0 + frame_bytes) {
            let rows = NormRows { rows: rows.seen.clone(), out_bytes: input.bytes };
            self.launch_norm(block, weights, (op.layout, op.input), run, Some(rows))?;
        }
        place.normalised.record(&self.stream)?;
        Ok((turn, rows))
    }

    fn compute_band(
        &self,
        block: &Block,
        bands: &Bands,
        weights: &Conv,
        op: &BandedOp,
        (turn, rows): (usize, Rows),
    ) -> Result<ConvParams> {
        let (place, input) = (&bands.places[turn], Inputs::new(self.precision, op, turn));
        let (row, whole) = (self.precision.row_bytes(op.input), self.precision.data_bytes(op.input));
        self.stream.wait_for(&place.fetched)?;
        let frames: Vec<ConvFrame> = op.frames.iter().map(|frame| in_band(frame, op.layout.slabs, &input)).collect();
        let band = Band { rows: rows.own.clone(), seen: rows.seen.clone(), frame_bytes: input.bytes };
        let params = self.launch_sums(block, weights, &conv_of(op), &frames, Some(band))?;
        place.computed.record(&self.stream)?;

        bands.download.wait_for(&place.normalised)?;
        let bytes = (rows.own.end - rows.own.start) * row;
        for (i, to) in op.keep {
            let from = block.at(input.at(op.past.len() + i).0 + (rows.own.start - rows.seen.start) * row, bytes)?;
            let to = bands.at(*to, whole)?.wrapping_add((rows.own.start * row) as usize);
            // SAFETY: both regions are that long; nobody reads the frame before the event that says it has arrived.
            let answer = unsafe { sys::cuMemcpyDtoHAsync_v2(to.cast(), from, bytes as usize, bands.download.handle()) };
            check("keeping frames for the future", answer)?;
        }
        place.kept.record(&bands.download)?;
        Ok(params)
    }
}

/// Where the inputs of a band lie in its place.
struct Inputs {
    start: u64,
    bytes: u64,
}

impl Inputs {
    fn new(precision: Precision, op: &BandedOp, turn: usize) -> Inputs {
        let start = op.bands.0 + turn as u64 * (op.bands.1 / geometry::BANDS);
        Inputs { start, bytes: precision.band_frame_bytes(op.layout, op.input, op.frames.len() as u64) }
    }

    fn at(&self, input: usize) -> Frame {
        Frame(self.start + input as u64 * self.bytes)
    }
}

fn conv_of<'a>(op: &BandedOp<'a>) -> ConvOp<'a> {
    let BandedOp { layout, input, frames, statistics, scratch, .. } = *op;
    ConvOp { layout, input, frames, statistics, scratch }
}

/// A frame whose inputs are counted, with the places that these have in a band.
fn in_band(frame: &ConvFrame, slabs: u64, inputs: &Inputs) -> ConvFrame {
    let mut terms = Terms::new();
    for term in frame.terms.iter() {
        let counted = u64::from(term.slab) < slabs;
        terms
            .push(Term { frame: if counted { inputs.at(term.frame.0 as usize) } else { term.frame }, slab: term.slab });
    }
    ConvFrame { terms, ..*frame }
}
