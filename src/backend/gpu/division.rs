//! How a convolution is divided into bands of rows: which rows each band reads and writes, and where in a band buffer
//! they lie. Knows no queue and no copy, so that tests run it on symbols.
//!
//! The rules of a band buffer, which launches and copies rely on:
//! 1. Parts lie one after the other, in the order of `BandedConvOp::band_parts`, and no two overlap. Their sizes are
//!    those that the plan added up, for at least as many rows.
//! 2. A part holds rows of one frame without gaps, from the first row that its band has: the input's with halo, or the
//!    band's own. An output begins where the whole frame would; only the band's rows are backed by memory.
//! 3. A part is written by one of fetch, norm, launch or copy, and read after the event that says so: `fetched` for
//!    host memory, `ready` for the rest, `computed` for outputs, `written` for new host columns in 8 bits.
//! 4. A buffer has a new band only after `computed`, `cached` and `offloaded` of the band before, and after the band
//!    below that one has copied its halo.
//! 5. The new cache may lie over the old one. So a row of it is written only after the bands above and below have read
//!    it, and `download` waits for `fetched`.

use std::ops::Range;

use super::rows::{self, BANDS_IN_FLIGHT, REMATERIALISED_LEAD, RowSizes};
use crate::error::{Error, Result};
use crate::ir::{
    BandBuffers, BandPart, BandSource, BandTerm, BandedConvOp, BandedFrame, CacheFormat, CachedFrame, ConvFrame,
    DeviceOffset, FrameRef, FrameShape, HostOffset, Offsets, Shortcut, Term,
};

pub struct BandRows {
    /// Rows of the tile grid that it computes.
    pub own: Range<u64>,
    /// Rows of the input that it reads, halo included.
    pub input: Range<u64>,
    /// Rows of rematerialised inputs that no band above has made.
    pub rematerialised: Range<u64>,
}

impl BandRows {
    pub fn new(top: u64, rows: u64, height: u64, above: Option<&BandRows>) -> BandRows {
        let own = top..(top + rows).min(height);
        let input = rows::with_halo(&own, height);
        let made = above.map_or(0, |above| above.rematerialised.end);
        let rematerialised = made..(own.end + REMATERIALISED_LEAD).min(height);
        BandRows { own, input, rematerialised }
    }

    /// Input rows that the band above reads too.
    pub fn shared(&self, above: Option<&InFlightBand>) -> Range<u64> {
        self.input.start..above.map_or(self.input.start, |above| above.rows.input.end)
    }
}

/// A band, and the index of its band buffer.
pub struct InFlightBand {
    pub buffer: usize,
    pub rows: BandRows,
}

/// What is done with each band.
pub trait BandSteps {
    /// Brings a band's input to a band buffer. Reads nothing that the bands above write or cache.
    fn fetch(&mut self, rows: BandRows, above: Option<&InFlightBand>) -> Result<InFlightBand>;
    /// Needs the fetched input, and resident cached frames that are not overwritten yet.
    fn compute(&mut self, band: &InFlightBand) -> Result<()>;
    /// Copies a band's part of the new causal cache to its resident place. That may overwrite cached frames that the
    /// bands above and below read a row of, so both have to be computed before.
    fn cache(&mut self, band: &InFlightBand, below: Option<&InFlightBand>) -> Result<()>;
}

/// Goes through a frame in bands of so many rows.
pub fn run_pipeline(height: u64, rows: u64, stages: &mut impl BandSteps) -> Result<()> {
    let (mut fetched, mut computed): (Option<InFlightBand>, Option<InFlightBand>) = (None, None);
    for top in (0..height).step_by(rows as usize) {
        let above = fetched.as_ref();
        let band = stages.fetch(BandRows::new(top, rows, height, above.map(|above| &above.rows)), above)?;
        if let Some(above) = fetched.replace(band) {
            stages.compute(&above)?;
            if let Some(further_above) = computed.as_ref() {
                stages.cache(further_above, Some(&above))?;
            }
            computed = Some(above);
        }
    }
    let Some(last) = fetched else { return Ok(()) };
    stages.compute(&last)?;
    computed.iter().try_for_each(|above| stages.cache(above, Some(&last)))?;
    stages.cache(&last, None)
}

/// Rows that lie one after the other.
#[derive(Debug, Clone, Copy)]
pub struct RowsAt {
    /// Where row `first` of the frame begins in the block.
    pub offset: u64,
    pub first: u64,
    pub row_bytes: u64,
}

impl RowsAt {
    pub fn row(self, row: u64) -> u64 {
        self.offset + (row - self.first) * self.row_bytes
    }

    /// Where the frame would begin.
    pub fn virtual_top(self) -> DeviceOffset {
        DeviceOffset(self.offset.wrapping_sub(self.first * self.row_bytes))
    }
}

/// A convolution, and where in a band buffer the rows of its frames lie.
pub struct Division<'a, S> {
    pub op: &'a BandedConvOp<Offsets>,
    bands: BandBuffers,
    /// Rows of a band.
    pub rows: u64,
    pub output: FrameShape,
    sizes: S,
    /// Each part, and where it begins in a band buffer.
    parts: Vec<(BandPart, u64)>,
}

impl<'a, S: RowSizes> Division<'a, S> {
    /// Bands of as many rows as fit into a band buffer, evenly divided. Buffers are as large as the largest bands of
    /// the job want.
    pub fn new(sizes: S, op: &'a BandedConvOp<Offsets>, bands: BandBuffers) -> Result<Division<'a, S>> {
        let (shape, parts) = (op.band_shape(), op.band_parts().collect::<Vec<_>>());
        let bytes = |rows: u64| parts.iter().map(|part| sizes.band_part_bytes(&shape, *part, rows)).sum::<u64>();
        let fit = rows::possible_band_rows(op.input).take_while(|rows| bytes(*rows) <= bands.bytes / BANDS_IN_FLIGHT);
        let most = fit.last();
        let most = most.ok_or_else(|| Error::Internal(format!("no bands were planned in {} bytes", bands.bytes)))?;
        let rows = rows::even_band_rows(op.input, most);
        let mut end = 0;
        let placed = parts.into_iter().map(|part| {
            let start = end;
            end += sizes.band_part_bytes(&shape, part, rows);
            (part, start)
        });
        let output = op.layout.window.output(op.input, op.layout.cout);
        Ok(Division { op, bands, rows, output, sizes, parts: placed.collect() })
    }

    /// Where a band buffer begins.
    pub fn buffer(&self, index: usize) -> u64 {
        self.bands.offset + index as u64 * (self.bands.bytes / BANDS_IN_FLIGHT)
    }

    /// Bytes of an input's part.
    pub fn input_bytes(&self) -> u64 {
        self.sizes.band_part_bytes(&self.op.band_shape(), BandPart::Input(0), self.rows)
    }

    fn part(&self, part: BandPart) -> Option<u64> {
        self.parts.iter().find(|(known, _)| *known == part).map(|(_, offset)| *offset)
    }

    /// The rows of a part in a band that has it.
    pub fn rows_of(&self, InFlightBand { buffer, rows }: &InFlightBand, part: BandPart) -> Option<RowsAt> {
        let offset = self.buffer(*buffer) + self.part(part)?;
        let row_bytes = |shape| self.sizes.row_bytes(shape);
        let (first, row_bytes) = match part {
            BandPart::HostColumns(_) => (rows.input.start, self.cached_rows()[1]),
            BandPart::NewHostColumns(_) => (rows.own.start, self.cached_rows()[1]),
            BandPart::Shortcut(_) => (rows.own.start, row_bytes(self.shortcut_shape())),
            BandPart::Output(_) | BandPart::StatisticsOutput => {
                (rows.own.start * rows::output_rows(&self.op.layout), row_bytes(self.output))
            }
            // The rows of a block input are those that a launch reads.
            BandPart::BlockInput(_) | BandPart::Input(_) | BandPart::Rematerialised(_) | BandPart::Rounded(_) => {
                (rows.input.start, row_bytes(self.op.input))
            }
        };
        Some(RowsAt { offset, first, row_bytes })
    }

    /// The rows of an input, as terms read it that do not want it rounded.
    pub fn input_rows(&self, band: &InFlightBand, input: usize) -> RowsAt {
        let rows = self.rows_of(band, BandPart::Input(input));
        let rows = rows.or_else(|| self.rows_of(band, BandPart::Rematerialised(input)));
        rows.expect("an input that is normalised or restored has a part")
    }

    /// The resident part of a cached frame.
    pub fn resident_shape(&self) -> FrameShape {
        FrameShape { width: self.op.columns.resident_width(), ..self.op.input }
    }

    /// The host part of a cached frame.
    pub fn host_shape(&self) -> FrameShape {
        FrameShape { width: self.op.columns.host_width(), ..self.op.input }
    }

    pub fn shortcut_shape(&self) -> FrameShape {
        self.output.with_channels(self.op.layout.shortcut.unwrap_or(0))
    }

    /// Bytes of a row of a cached frame's parts: resident, and in host memory.
    pub fn cached_rows(&self) -> [u64; 2] {
        [self.resident_shape(), self.host_shape()].map(|part| self.sizes.cached_row_bytes(part, self.op.format))
    }

    /// The rows of the resident part of a cached frame.
    pub fn resident_rows(&self, resident: DeviceOffset) -> RowsAt {
        RowsAt { offset: resident.0, first: 0, row_bytes: self.cached_rows()[0] }
    }

    /// (resident part, host part) of each split cached frame that is read as it is, from the first input row of a
    /// band. [Terms](Self::conv_frames) name it by the resident part.
    pub fn split_frames(&self, band: &InFlightBand) -> Vec<(DeviceOffset, DeviceOffset)> {
        let first = band.rows.input.start;
        let split = |(i, cached): (usize, CachedFrame<Offsets>)| {
            let host = self.rows_of(band, BandPart::HostColumns(i))?;
            Some((self.resident_rows(cached.resident?).row(first), host.row(first)))
        };
        let exact = self.op.cached().filter(|_| self.op.format == CacheFormat::Exact);
        exact.filter_map(split).map(|(resident, host)| (DeviceOffset(resident), DeviceOffset(host))).collect()
    }

    /// Frames that are normalised to rematerialise inputs, and where their rows go.
    pub fn normalised_block_inputs(&self, buffer: usize) -> Vec<(DeviceOffset, DeviceOffset)> {
        let frames = self.op.rematerialise.iter().flat_map(|by| &by.block_inputs).copied().enumerate();
        let at = |i: usize| self.part(BandPart::BlockInput(i)).expect("each block input has a part");
        frames.map(|(i, frame)| (frame, DeviceOffset(self.buffer(buffer) + at(i)))).collect()
    }

    /// Everything that is fetched from host memory.
    pub fn fetched_frames(&self) -> impl Iterator<Item = HostOffset> + '_ {
        let cached = self.op.cached().filter_map(|(_, cached)| cached.host);
        let shortcuts = self.op.frames.iter().filter_map(|frame| host_frame(frame.shortcut?.from));
        cached.chain(self.op.fresh().filter_map(|(_, at)| host_frame(at))).chain(shortcuts)
    }

    /// Whether no fresh frame is offloaded. Then fetched rows are read by their own band, and by the band below as its
    /// halo.
    pub fn fetches_nothing_fresh(&self) -> bool {
        self.op.fresh().all(|(_, at)| host_frame(at).is_none())
    }

    /// Everything that is written to host memory.
    pub fn offloaded_frames(&self) -> impl Iterator<Item = HostOffset> + '_ {
        let cached = self.op.cache_writes().filter_map(|(_, to)| to.host);
        cached.chain(self.op.frames.iter().filter_map(|frame| host_frame(frame.out)))
    }

    /// Where a term finds its input, from the first input row of a band.
    fn term_frame(&self, band: &InFlightBand, term: &BandTerm) -> DeviceOffset {
        let part = |part: BandPart| self.rows_of(band, part).map(|rows| DeviceOffset(rows.offset));
        if term.is_rounded {
            return part(BandPart::Rounded(term.input)).expect("a rounded input has a part");
        }
        let whole = part(BandPart::Input(term.input)).or_else(|| part(BandPart::Rematerialised(term.input)));
        whole.unwrap_or_else(|| match self.op.inputs[term.input].from {
            BandSource::Fresh(frame) => device_frame(frame),
            BandSource::Cached(CachedFrame { resident: Some(resident), .. }) => {
                DeviceOffset(self.resident_rows(resident).row(band.rows.input.start))
            }
            BandSource::Cached(CachedFrame { resident: None, .. }) => {
                part(BandPart::HostColumns(term.input)).expect("a cached frame has a part somewhere")
            }
        })
    }

    /// The frames of a band's launch.
    pub fn conv_frames(&self, band: &InFlightBand) -> Vec<ConvFrame<Offsets>> {
        let banded = |(i, banded): (usize, &BandedFrame<Offsets>)| {
            let terms = banded.terms.iter().map(|term| Term { frame: self.term_frame(band, term), slab: term.slab });
            let mut terms: Vec<Term<Offsets>> = terms.collect();
            if let Some(Shortcut { from, slab }) = banded.shortcut {
                let part = self.rows_of(band, BandPart::Shortcut(i)).map(|rows| rows.offset);
                let row_bytes = self.sizes.row_bytes(self.shortcut_shape());
                let frame = part.unwrap_or_else(|| device_frame(from).0 + band.rows.own.start * row_bytes);
                terms.push(Term { frame: DeviceOffset(frame), slab });
            }
            let out = match banded.out {
                FrameRef::Resident(frame) => frame,
                FrameRef::Offloaded { .. } => self.output_top(band, BandPart::Output(i)),
                FrameRef::Rematerialised { .. } => self.output_top(band, BandPart::StatisticsOutput),
            };
            ConvFrame { terms, bias: banded.bias, residual: banded.residual, out }
        };
        self.op.frames.iter().enumerate().map(banded).collect()
    }

    fn output_top(&self, band: &InFlightBand, part: BandPart) -> DeviceOffset {
        self.rows_of(band, part).expect("an output that is not resident has a part").virtual_top()
    }
}

pub fn host_frame(at: FrameRef<Offsets>) -> Option<HostOffset> {
    match at {
        FrameRef::Offloaded { frame, .. } => Some(frame),
        FrameRef::Resident(_) | FrameRef::Rematerialised { .. } => None,
    }
}

/// A frame that is whole on the device.
fn device_frame(at: FrameRef<Offsets>) -> DeviceOffset {
    match at {
        FrameRef::Resident(frame) => frame,
        FrameRef::Offloaded { .. } | FrameRef::Rematerialised { .. } => unreachable!("a band has a part of it"),
    }
}

#[cfg(test)]
mod tests;
