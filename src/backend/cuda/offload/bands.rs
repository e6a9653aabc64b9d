//! Convolutions in bands of rows, for layers whose input, past or output is not to lie whole on the device. While one band
//! computes, the copy engines fetch what the next one needs and take away what the last one leaves; bands take turns in a few
//! places, also from one layer to the next, so the fetching runs ahead by itself.
//!
//! A band is a handful of tiles for each multiprocessor, so a part of them would have nothing to do at its end. Therefore bands
//! compute in two streams in turn, each waiting for its own input alone, and what is prepared for the next one has another: the
//! multiprocessors that a band leaves go on with whatever is ready. On compute capability 9.0 that runs beside a band, too.

pub use super::division::bytes;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use super::copies::{Copied, OnHost, Towards};
use super::division::{self, Division, Rows, Turns, Under, on_host};
use crate::backend::cuda::Cuda;
use crate::backend::cuda::driver::context::Context;
use crate::backend::cuda::driver::memory::Block;
use crate::backend::cuda::driver::pinned::Pinned;
use crate::backend::cuda::driver::stream::{Event, Stream};
use crate::backend::cuda::launch::conv::{Band, NextNorm, Parted};
use crate::backend::cuda::launch::norm::NormRows;
use crate::backend::cuda::launch::params::ConvParams;
use crate::backend::cuda::launch::tiling as geometry;
use crate::backend::cuda::launch::tiling::Kind;
use crate::backend::cuda::offload::weights::Conv;
use crate::backend::{AnewOp, BandedOp, ConvFrame, ConvOp, Frame, HostFrame, Sums};
use crate::error::{Error, Result};
use crate::tensor::At;

/// A place that bands take turns in, and how far its current band is.
struct Place {
    /// What comes from host memory is there,
    fetched: Event,
    /// and all other input.
    ready: Event,
    computed: Event,
    /// What stays on the device has been copied from here, and what goes to host memory has left.
    remembered: Event,
    kept: Event,
}

/// The past of a job and what is under way from and to it.
pub struct Bands {
    past: Option<Pinned>,
    pub upload: Stream,
    pub download: Stream,
    /// Where bands compute in turn.
    compute: [Stream; 2],
    places: Vec<Place>,
    next: usize,
    /// When each frame of the past has arrived, by its offset.
    arrived: HashMap<u64, Event>,
    context: Arc<Context>,
}

impl Bands {
    pub fn new(context: &Arc<Context>, bytes: u64) -> Result<Bands> {
        let event = || Event::new(context);
        let place = || {
            let (fetched, ready, computed) = (event()?, event()?, event()?);
            Ok(Place { fetched, ready, computed, remembered: event()?, kept: event()? })
        };
        Ok(Bands {
            past: if bytes > 0 { Some(Pinned::new(context, bytes)?) } else { None },
            upload: Stream::new(context)?,
            download: Stream::new(context)?,
            compute: [Stream::new(context)?, Stream::new(context)?],
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
        for ours in self.streams() {
            event.between(ours.handle(), stream.handle())?;
        }
        event.between(stream.handle(), self.upload.handle())
    }

    pub fn wait(&self) -> Result<()> {
        self.streams().into_iter().map(Stream::wait).fold(Ok(()), Result::and)
    }

    fn streams(&self) -> [&Stream; 4] {
        let [even, odd] = &self.compute;
        [&self.upload, &self.download, even, odd]
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
pub struct Work<'a> {
    pub block: &'a Block,
    pub division: Division<'a, Conv>,
}

impl Work<'_> {
    /// Where a band computes.
    fn stream<'b>(&self, bands: &'b Bands, band: &Under) -> &'b Stream {
        &bands.compute[(band.rows.own.start / self.division.parts.rows % 2) as usize]
    }
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

    fn compute(&mut self, band: &Under) -> Result<()> {
        self.params = Some(self.cuda.compute_band(self.bands, self.work, band)?);
        Ok(())
    }

    fn remember(&mut self, band: &Under, below: Option<&Under>) -> Result<()> {
        self.cuda.remember_band(self.bands, self.work, band, below)
    }
}

impl Cuda {
    pub(in crate::backend::cuda) fn launch_banded(
        &self,
        block: &Block,
        bands: &mut Bands,
        op: &BandedOp<Conv>,
    ) -> Result<()> {
        let division = Division::new(self.precision, op)?;
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
        for place in &bands.places {
            self.stream.wait_for(&place.computed)?;
            self.stream.wait_for(&place.remembered)?;
        }
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
            At::Device(frame) => {
                let from = frame.0 + self.precision.data_bytes(op.input);
                Ok(Copied { from, to: to.0, bytes: op.layout.groups * 8 })
            }
            At::Host { .. } | At::Anew { .. } => {
                Err(Error::Internal("statistics that are kept already are to be kept".into()))
            }
        });
        self.copy(&self.stream, work, &kept.collect::<Result<Vec<_>>>()?)
    }

    /// Brings the input of a band to its place: what is in host memory by the copy engine, fresh frames by normalising them, and what
    /// the band above sees too from there. It was read before that band may write over it.
    fn fetch_band(&self, bands: &mut Bands, work: &Work, rows: Rows, above: Option<&Under>) -> Result<Under> {
        let turn = bands.next;
        bands.next = (bands.next + 1) % bands.places.len();
        let (place, op) = (&bands.places[turn], work.division.op);
        let before = [&place.computed, &place.remembered, &place.kept];
        before.into_iter().try_for_each(|event| self.stream.wait_for(event))?;
        // A band of another layer may have divided the place in another way. After one of the same layer, what is on its way from there
        // lies elsewhere than what is fetched.
        let by_this_layer = rows.own.start / work.division.parts.rows >= bands.places.len() as u64;
        let before = if by_this_layer && work.division.fetches_nothing_fresh() { &before[..1] } else { &before[..] };
        before.iter().try_for_each(|event| bands.upload.wait_for(event))?;
        // The band below that one has had its share of what was here.
        bands.upload.wait_for(&bands.places[(turn + 1) % bands.places.len()].ready)?;
        let band = Under { turn, rows };
        let rows = &band.rows;
        let new = rows.shared(above).end..rows.seen.end;
        let past = op.past.iter().zip(&work.division.inputs).filter_map(|(past, part)| {
            let from = OnHost { frame: past.far?, shape: work.division.far(), rows: &new };
            Some((from, work.division.past_row(&band, (*part)?, new.start)))
        });
        self.fetch_past(bands, work, &past.collect::<Vec<_>>())?;
        for (i, at) in op.fresh.iter().enumerate() {
            if let Some(frame) = on_host(*at) {
                let from = OnHost { frame, shape: op.input, rows: &rows.seen };
                self.move_rows(bands, work, &from, work.division.fresh(turn, i), Towards::Band)?;
            }
        }
        for (frame, part) in op.frames.iter().zip(&work.division.shortcuts) {
            let away = frame.shortcut.and_then(|(at, _)| on_host(at));
            if let (Some(frame), Some(part)) = (away, part) {
                let from = OnHost { frame, shape: work.division.side(), rows: &rows.own };
                self.move_rows(bands, work, &from, work.division.place(turn) + part, Towards::Band)?;
            }
        }
        place.fetched.record(&bands.upload)?;
        if work.division.has_norm() {
            let near = op.fresh.iter().enumerate().filter_map(|(i, at)| match *at {
                At::Device(frame) => Some((frame, Frame(work.division.fresh_row(&band, i, new.start)))),
                At::Host { .. } | At::Anew { .. } => None,
            });
            let near: Vec<(Frame, Frame)> = near.collect();
            if !near.is_empty() && !new.is_empty() {
                let rows = NormRows { rows: new, out_bytes: work.division.parts.input };
                self.launch_norm(work.block, op.weights, (op.layout, op.input), &near, Some(rows))?;
            }
            self.make_fresh_rows(work, &band, above)?;
            if let Some(above) = above {
                self.share_rows(bands, work, above, &band)?;
            }
        }
        place.ready.record(&self.stream)?;
        Ok(band)
    }

    /// Makes the rows of fresh frames that are made anew, but for those that the band above has made.
    fn make_fresh_rows(&self, work: &Work, Under { turn, rows }: &Under, above: Option<&Under>) -> Result<()> {
        let (op, row) = (work.division.op, self.precision.row_bytes(work.division.op.input));
        let (mut copied, mut outs, mut known) = (Vec::new(), Vec::new(), Vec::new());
        for (i, at) in op.fresh.iter().enumerate() {
            let At::Anew { index, statistics } = *at else { continue };
            let part = work.division.fresh(*turn, i);
            if let Some(above) = above {
                let from = work.division.fresh_row(above, i, rows.seen.start);
                copied.push(Copied { from, to: part, bytes: rows.made.start.saturating_sub(rows.seen.start) * row });
            }
            outs.push((index, work.division.top(part, rows.seen.start, op.input)));
            known.push(statistics);
        }
        self.copy(&self.stream, work, &copied)?;
        if outs.is_empty() || rows.made.is_empty() {
            return Ok(());
        }
        // From pixels little is computed, so that a pass for the norm would take as long again.
        if let Some(AnewOp { layout, .. }) = op.anew
            && Kind::of(layout)? == Kind::In
        {
            let norm = NextNorm { weights: op.weights, layout: op.layout, statistics: &known };
            return self.make_rows(work, &outs, &rows.made, Some(norm));
        }
        self.make_rows(work, &outs, &rows.made, None)?;
        for (i, at) in op.fresh.iter().enumerate() {
            let At::Anew { statistics, .. } = *at else { continue };
            let first = Frame(work.division.fresh(*turn, i) + (rows.made.start - rows.seen.start) * row);
            let pixels = (rows.made.end - rows.made.start) * op.input.width;
            let what = (op.layout, op.input);
            self.launch_norm_in_place(work.block, op.weights, what, (first, pixels), statistics)?;
        }
        Ok(())
    }

    /// Gives a band what the one above it has of the past, and of fresh frames that it normalised, and both see.
    fn share_rows(&self, bands: &Bands, work: &Work, above: &Under, band: &Under) -> Result<()> {
        let (op, shared) = (work.division.op, band.rows.shared(Some(above)));
        let bytes = |shape| (shared.end - shared.start) * self.precision.row_bytes(shape);
        let past = work.division.inputs.iter().take(op.past.len()).flatten();
        let at = |band: &Under, part: u64| work.division.past_row(band, part, shared.start);
        let far = bytes(work.division.far());
        let past = past.map(|part| Copied { from: at(above, *part), to: at(band, *part), bytes: far });
        let mut copied: Vec<Copied> = past.collect();
        if !copied.is_empty() {
            self.stream.wait_for(&bands.places[above.turn].fetched)?;
        }
        let at = |band: &Under, i: usize| work.division.fresh_row(band, i, shared.start);
        let normalised = op.fresh.iter().enumerate().filter(|(_, fresh)| matches!(fresh, At::Device(_)));
        let whole = bytes(op.input);
        copied.extend(normalised.map(|(i, _)| Copied { from: at(above, i), to: at(band, i), bytes: whole }));
        self.copy(&self.stream, work, &copied)
    }

    /// Makes these rows of frames anew, by their number, where they would lie in whole frames.
    fn make_rows(&self, work: &Work, outs: &[(usize, Frame)], rows: &Range<u64>, norm: Option<NextNorm>) -> Result<()> {
        let Some(AnewOp { weights, layout, input, frames }) = work.division.op.anew else {
            return Err(Error::Internal("a frame is to be made anew, but nobody makes it".into()));
        };
        let made = outs.iter().map(|(index, out)| {
            let (terms, bias) = frames[*index];
            ConvFrame { terms, bias, residual: None, out: *out }
        });
        let by = geometry::output_rows(layout);
        let conv = ConvOp {
            layout,
            input,
            frames: &[],
            statistics: false,
            scratch: work.division.op.scratch,
            sums: Sums::NONE,
        };
        let frames: Vec<ConvFrame> = made.collect();
        let rows = rows.start / by..rows.end / by;
        let band = Band { rows, seen: 0..input.height, parted: None, stream: &self.stream, norm };
        self.launch_sums(work.block, weights, &conv, &frames, Some(band)).map(|_| ())
    }

    fn compute_band(&self, bands: &Bands, work: &Work, band: &Under) -> Result<ConvParams> {
        let (turn, rows) = (band.turn, &band.rows);
        let (place, op) = (&bands.places[turn], work.division.op);
        self.finish_input(bands, work, band)?;
        let frames = work.division.in_band(band);
        let BandedOp { layout, input, statistics, scratch, .. } = *op;
        let conv = ConvOp { layout, input, frames: &[], statistics, scratch, sums: Sums::NONE };
        // Without a norm the input is read where it lies.
        let seen = if work.division.has_norm() { rows.seen.clone() } else { 0..input.height };
        let stream = work.stream(bands, band);
        stream.wait_for(&place.fetched)?;
        stream.wait_for(&place.ready)?;
        let parted = work.division.parted(band);
        let parted = (!parted.is_empty()).then_some(Parted { columns: op.columns, frames: &parted });
        let launched = Band { rows: rows.own.clone(), seen, parted, stream, norm: None };
        let params = self.launch_sums(work.block, op.weights, &conv, &frames, Some(launched))?;
        place.computed.record(stream)?;

        bands.download.wait_for(&place.ready)?;
        for (i, to) in op.keep {
            if let Some(to) = to.far {
                let from = work.division.fresh_row(band, *i, rows.own.start);
                self.keep_far(bands, work, (to, &rows.own), from)?;
            }
        }
        let by = geometry::output_rows(op.layout);
        for (frame, part) in op.frames.iter().zip(&work.division.outs) {
            if let (Some(to), Some(part)) = (on_host(frame.out), part) {
                bands.download.wait_for(&place.computed)?;
                let made = rows.own.start * by..rows.own.end * by;
                let to = OnHost { frame: to, shape: work.division.output, rows: &made };
                self.move_rows(bands, work, &to, work.division.place(turn) + part, Towards::Frame)?;
            }
        }
        place.kept.record(&bands.download)?;
        Ok(params)
    }

    /// What is left to do of a band's input once it is fetched: fresh frames from host memory are normalised where they are, and
    /// inputs of shortcuts that are made anew are made.
    fn finish_input(&self, bands: &Bands, work: &Work, Under { turn, rows }: &Under) -> Result<()> {
        let (place, op) = (&bands.places[*turn], work.division.op);
        let from_host = op.fresh.iter().enumerate().filter_map(|(i, at)| match *at {
            At::Host { statistics, .. } => Some((Frame(work.division.fresh(*turn, i)), statistics)),
            At::Device(_) | At::Anew { .. } => None,
        });
        let from_host: Vec<(Frame, Frame)> = from_host.collect();
        let shortcuts = op.frames.iter().zip(&work.division.shortcuts);
        let shortcuts = shortcuts.filter_map(|(frame, part)| match (frame.shortcut, part) {
            (Some((At::Anew { index, .. }, _)), Some(part)) => {
                let here = work.division.place(*turn) + part;
                Some((index, work.division.top(here, rows.own.start, work.division.side())))
            }
            _ => None,
        });
        let shortcuts: Vec<(usize, Frame)> = shortcuts.collect();
        if from_host.is_empty() && shortcuts.is_empty() {
            return Ok(());
        }
        if !from_host.is_empty() {
            self.stream.wait_for(&place.fetched)?;
        }
        for (frame, statistics) in from_host {
            let pixels = (rows.seen.end - rows.seen.start) * op.input.width;
            self.launch_norm_in_place(work.block, op.weights, (op.layout, op.input), (frame, pixels), statistics)?;
        }
        if !shortcuts.is_empty() {
            self.make_rows(work, &shortcuts, &rows.own, None)?;
        }
        place.ready.record(&self.stream)
    }

    /// Copies what a band has of the frames that are kept on the device. That may be over a past of which the bands below and above
    /// it see a row too: these two compute on the same stream, where the copy comes after both.
    fn remember_band(&self, bands: &Bands, work: &Work, band: &Under, below: Option<&Under>) -> Result<()> {
        let own = &band.rows.own;
        let kept = work.division.op.keep.iter().filter_map(|(i, to)| {
            Some((work.division.fresh_row(band, *i, own.start), work.division.near_row(to.near?, own.start)))
        });
        let kept: Vec<(u64, u64)> = kept.collect();
        if kept.is_empty() {
            return Ok(());
        }
        let (place, stream) = (&bands.places[band.turn], work.stream(bands, below.unwrap_or(band)));
        stream.wait_for(&place.computed)?;
        self.keep_near(stream, work, &kept, own)?;
        place.remembered.record(stream)
    }
}
