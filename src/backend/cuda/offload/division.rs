//! How the frames of a convolution are divided among bands of rows: which rows, and where in a place their parts lie.

use std::ops::Range;

use crate::backend::cuda::launch::conv::quads_fit;
use crate::backend::cuda::launch::tiling as geometry;
use crate::backend::{
    BandedFrame, BandedOp, ConvFrame, ConvLayout, Frame, FrameAt, HostFrame, PastFrame, Precision, Prologue, Term,
    Terms,
};
use crate::error::{Error, Result};
use crate::tensor::{At, BandFrames, FrameShape};

/// A band: its own rows, those of the input that they see, and those of inputs made anew that no band above it has made.
pub struct Rows {
    pub own: Range<u64>,
    pub seen: Range<u64>,
    pub made: Range<u64>,
}

impl Rows {
    pub fn new(top: u64, rows: u64, height: u64, above: Option<&Rows>) -> Rows {
        let own = top..(top + rows).min(height);
        let seen = top.saturating_sub(geometry::HALO)..(own.end + geometry::HALO).min(height);
        let made = above.map_or(0, |above| above.made.end)..(own.end + geometry::LEAD).min(height);
        Rows { own, seen, made }
    }

    /// Those of the rows that it sees that the band above it sees too.
    pub fn shared(&self, above: Option<&Under>) -> Range<u64> {
        self.seen.start..above.map_or(self.seen.start, |above| above.rows.seen.end)
    }
}

/// A band on its way.
pub struct Under {
    /// Of the places that bands take turns in, the one that it has.
    pub turn: usize,
    pub rows: Rows,
}

/// What becomes of a band.
pub trait Turns {
    /// Brings its input to a place. Nothing that the bands above it write, or what is remembered of them, is read for it.
    fn fetch(&mut self, rows: Rows, above: Option<&Under>) -> Result<Under>;
    /// Needs what was fetched for it, and the past that is on the device, of which nothing it sees has been written over yet.
    fn compute(&mut self, band: &Under) -> Result<()>;
    /// Keeps on the device what later frames need. That may be over frames of the past, of which the band below sees the last row,
    /// and the one above the first: so both have to be computed as well.
    fn remember(&mut self, band: &Under, below: Option<&Under>) -> Result<()>;
}

/// Goes through frames in bands of so many rows.
pub fn go_through(height: u64, rows: u64, turns: &mut impl Turns) -> Result<()> {
    let (mut fetched, mut computed): (Option<Under>, Option<Under>) = (None, None);
    for top in (0..height).step_by(rows as usize) {
        let above = fetched.as_ref();
        let band = turns.fetch(Rows::new(top, rows, height, above.map(|above| &above.rows)), above)?;
        if let Some(above) = fetched.replace(band) {
            turns.compute(&above)?;
            if let Some(further_above) = computed.as_ref() {
                turns.remember(further_above, Some(&above))?;
            }
            computed = Some(above);
        }
    }
    let Some(last) = fetched else { return Ok(()) };
    turns.compute(&last)?;
    computed.iter().try_for_each(|above| turns.remember(above, Some(&last)))?;
    turns.remember(&last, None)
}

/// Bytes of what a band of so many rows has of each frame.
pub struct Parts {
    pub rows: u64,
    pub input: u64,
    past: u64,
    anew: u64,
    shortcut: u64,
    out: u64,
}

impl Parts {
    fn new(precision: Precision, layout: &ConvLayout, shape: FrameShape, frames: BandFrames, rows: u64) -> Parts {
        let far = FrameShape { width: frames.far_columns, ..shape };
        let output = layout.window.output(shape, layout.cout);
        let side = output.with_channels(layout.shortcut.unwrap_or(0));
        Parts {
            rows,
            input: precision.band_frame_bytes(shape, rows + 2 * geometry::HALO),
            past: precision.band_frame_bytes(far, rows + 2 * geometry::HALO),
            anew: precision.band_frame_bytes(shape, geometry::HALO + rows + geometry::LEAD),
            shortcut: precision.band_frame_bytes(side, rows),
            out: precision.band_frame_bytes(output, rows * geometry::output_rows(layout)),
        }
    }

    /// Of a place that has all of them.
    fn bytes(&self, frames: BandFrames) -> u64 {
        let BandFrames { inputs, past, anew, shortcuts, outs, .. } = frames;
        inputs * self.input + past * self.past + anew * self.anew + shortcuts * self.shortcut + outs * self.out
    }

    /// Bands of as many rows as fit into a place, and of the same number but for the last one. Places are as large as the largest
    /// bands of a job want them.
    fn fitting<C>(precision: Precision, op: &BandedOp<C>) -> Result<Parts> {
        let (frames, place) = (op.frames_in_band(), op.bands.1 / geometry::BANDS);
        let parts = |rows: u64| Parts::new(precision, op.layout, op.input, frames, rows);
        let fit = geometry::possible_band_rows(op.input).take_while(|rows| parts(*rows).bytes(frames) <= place);
        let most = fit.last();
        let most = most.ok_or_else(|| Error::Internal(format!("no bands were planned in {} bytes", op.bands.1)))?;
        Ok(parts(geometry::even_band_rows(op.input, most)))
    }
}

/// Device memory of all places, for convolutions of such frames. Those of fewer find room for smaller bands at least.
pub fn bytes(precision: Precision, layout: &ConvLayout, shape: FrameShape, frames: BandFrames) -> Option<u64> {
    // The statistics of what does not stay are made on the way, from fours of channels.
    if frames.outs > 0 && !quads_fit(layout) {
        return None;
    }
    // Inputs that are made anew take more rows, and make as much work, as outputs.
    let rows = geometry::band_rows(layout, shape, frames.outputs + frames.anew);
    Some(geometry::BANDS * Parts::new(precision, layout, shape, frames, rows).bytes(frames))
}

/// Where in a place the parts of a convolution's frames lie: normalised ones, and those that are not whole on the device.
pub struct Division<'a, C> {
    pub op: &'a BandedOp<'a, C>,
    pub parts: Parts,
    pub output: FrameShape,
    precision: Precision,
    /// Of each input, past ones first.
    pub inputs: Vec<Option<u64>>,
    /// Of each output's shortcut, and of each output.
    pub shortcuts: Vec<Option<u64>>,
    pub outs: Vec<Option<u64>>,
}

impl<'a, C> Division<'a, C> {
    pub fn new(precision: Precision, op: &'a BandedOp<'a, C>) -> Result<Division<'a, C>> {
        let parts = Parts::fitting(precision, op)?;
        let mut end = 0;
        let mut next = |bytes: u64| {
            end += bytes;
            Some(end - bytes)
        };
        let mut inputs = Vec::new();
        if op.layout.prologue != Prologue::None {
            inputs.extend(op.past.iter().map(|past| past.far.and_then(|_| next(parts.past))));
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
        Ok(Division { op, parts, output, precision, inputs, shortcuts, outs })
    }

    pub fn place(&self, turn: usize) -> u64 {
        self.op.bands.0 + turn as u64 * (self.op.bands.1 / geometry::BANDS)
    }

    /// What the device has of a frame of the past, and what host memory has.
    pub fn near(&self) -> FrameShape {
        FrameShape { width: self.op.columns.near_width(), ..self.op.input }
    }

    pub fn far(&self) -> FrameShape {
        FrameShape { width: self.op.columns.far_width(), ..self.op.input }
    }

    /// Where row `row` of the columns begins that the device has of a frame of the past.
    pub fn near_row(&self, near: Frame, row: u64) -> u64 {
        near.0 + row * self.precision.row_bytes(self.near())
    }

    /// Where row `row` of what host memory has of a frame of the past lies, whose part this is, in a band that sees it.
    pub fn past_row(&self, Under { turn, rows }: &Under, part: u64, row: u64) -> u64 {
        self.place(*turn) + part + (row - rows.seen.start) * self.precision.row_bytes(self.far())
    }

    /// Of each frame of the past that is parted, what the device has of it and what the band has, from the first row that the band
    /// sees. The [convolution](Self::in_band) knows it by the first.
    pub fn parted(&self, band: &Under) -> Vec<(Frame, Frame)> {
        let part = |(past, part): (&PastFrame, &Option<u64>)| {
            let first = band.rows.seen.start;
            Some((Frame(self.near_row(past.near?, first)), Frame(self.past_row(band, (*part)?, first))))
        };
        self.op.past.iter().zip(&self.inputs).filter_map(part).collect()
    }

    /// Where the part of a fresh frame lies.
    pub fn fresh(&self, turn: usize, fresh: usize) -> u64 {
        self.place(turn)
            + self.inputs[self.op.past.len() + fresh].expect("fresh frames that are normalised have a part")
    }

    pub fn has_norm(&self) -> bool {
        self.op.layout.prologue != Prologue::None
    }

    /// What the shortcuts read.
    pub fn side(&self) -> FrameShape {
        self.output.with_channels(self.op.layout.shortcut.unwrap_or(0))
    }

    /// Everything that comes from host memory.
    pub fn fetched(&self) -> impl Iterator<Item = HostFrame> + '_ {
        let past = self.op.past.iter().filter_map(|past| past.far);
        let shortcuts = self.op.frames.iter().filter_map(|frame| on_host(frame.shortcut?.0));
        past.chain(self.op.fresh.iter().filter_map(|at| on_host(*at))).chain(shortcuts)
    }

    /// Whether no fresh frame comes from host memory. What does then, of the past and for shortcuts, is read by nobody but its band and
    /// by the sharing with the one below.
    pub fn fetches_nothing_fresh(&self) -> bool {
        self.op.fresh.iter().all(|at| on_host(*at).is_none())
    }

    /// Everything that goes there.
    pub fn given(&self) -> impl Iterator<Item = HostFrame> + '_ {
        let kept = self.op.keep.iter().filter_map(|(_, to)| to.far);
        kept.chain(self.op.frames.iter().filter_map(|frame| on_host(frame.out)))
    }

    /// Where a frame would begin whose row `first` lies here.
    pub fn top(&self, here: u64, first: u64, shape: FrameShape) -> Frame {
        Frame(here.wrapping_sub(first * self.precision.row_bytes(shape)))
    }

    /// Where row `row` of a fresh frame lies in a band that sees it.
    pub fn fresh_row(&self, Under { turn, rows }: &Under, fresh: usize, row: u64) -> u64 {
        self.fresh(*turn, fresh) + (row - rows.seen.start) * self.precision.row_bytes(self.op.input)
    }

    /// The frames of a convolution as its [band](crate::backend::cuda::launch::conv::Band) finds them.
    pub fn in_band(&self, Under { turn, rows }: &Under) -> Vec<ConvFrame> {
        let (op, place) = (self.op, self.place(*turn));
        let from = |frame: Frame, row: u64, shape| Frame(frame.0 + row * self.precision.row_bytes(shape));
        let input = |i: usize| match (op.past.get(i).and_then(|past| past.near), self.inputs.get(i).copied().flatten())
        {
            (Some(near), _) => Frame(self.near_row(near, rows.seen.start)),
            (None, Some(part)) => Frame(place + part),
            (None, None) => device(op.fresh[i - op.past.len()]),
        };
        let banded = |(i, banded): (usize, &BandedFrame)| {
            let mut terms = Terms::new();
            banded.terms.iter().for_each(|(i, slab)| terms.push(Term { frame: input(*i), slab: *slab }));
            if let Some((at, slab)) = banded.shortcut {
                let part = self.shortcuts[i].map(|part| Frame(place + part));
                let frame = part.unwrap_or_else(|| from(device(at), rows.own.start, self.side()));
                terms.push(Term { frame, slab });
            }
            let first = rows.own.start * geometry::output_rows(op.layout);
            let part = self.outs[i].map(|part| self.top(place + part, first, self.output));
            let out = part.unwrap_or_else(|| device(banded.out));
            ConvFrame { terms, bias: banded.bias, residual: banded.residual, out }
        };
        op.frames.iter().enumerate().map(banded).collect()
    }
}

pub fn on_host(at: FrameAt) -> Option<HostFrame> {
    match at {
        At::Host { frame, .. } => Some(frame),
        At::Device(_) | At::Anew { .. } => None,
    }
}

/// A frame that is whole on the device.
fn device(at: FrameAt) -> Frame {
    match at {
        At::Device(frame) => frame,
        At::Host { .. } | At::Anew { .. } => unreachable!("a band has a part of it"),
    }
}

#[cfg(test)]
mod tests;
