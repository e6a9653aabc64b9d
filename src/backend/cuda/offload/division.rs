//! How a convolution is divided into bands of rows: which rows each band reads and writes, and where in a band buffer
//! they lie. Knows no stream and no copy, so that tests run it on symbols.

use std::ops::Range;

use crate::backend::cuda::launch::tiling::{BANDS_IN_FLIGHT, REMATERIALISED_LEAD};
use crate::backend::cuda::launch::{BandLayout, CudaSizes, tiling};
use crate::error::{Error, Result};
use crate::ir::{
    BandedConvOp, BandedFrame, CacheFormat, CachedFrame, ConvFrame, DeviceOffset, FrameRef, FrameShape, HostOffset,
    Offsets, Prologue, Term,
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
        let input = tiling::with_halo(&own, height);
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

/// Bands of as many rows as fit into a band buffer, evenly divided. Buffers are as large as the largest bands of the
/// job want.
fn fitting_layout(sizes: CudaSizes, op: &BandedConvOp<Offsets>, bytes: u64) -> Result<BandLayout> {
    let (contents, buffer) = (op.band_contents(), bytes / BANDS_IN_FLIGHT);
    let layout = |rows: u64| BandLayout::new(sizes, &op.layout, op.input, contents, rows);
    let fit = tiling::possible_band_rows(op.input).take_while(|rows| layout(*rows).bytes(contents) <= buffer);
    let most = fit.last();
    let most = most.ok_or_else(|| Error::Internal(format!("no bands were planned in {bytes} bytes")))?;
    Ok(layout(tiling::even_band_rows(op.input, most)))
}

/// A convolution, and where in a band buffer the rows of its frames lie. Frames have a part there if they are
/// normalised, or not whole on the device.
pub struct Division<'a> {
    pub op: &'a BandedConvOp<Offsets>,
    /// Offset and bytes of all band buffers.
    bands: (u64, u64),
    pub layout: BandLayout,
    pub output: FrameShape,
    sizes: CudaSizes,
    /// Offset of the part of each input as it is, cached ones first. Cached ones have it if they are restored.
    pub inputs: Vec<Option<u64>>,
    /// Offset of the part of each frame that is normalised to rematerialise inputs.
    pub block_inputs: Vec<u64>,
    /// Offset of the part that comes from host memory, of each cached frame.
    pub host_parts: Vec<Option<u64>>,
    /// Offset of the part that goes to host memory in 8 bits, of each new cached frame.
    pub written: Vec<Option<u64>>,
    /// Offset of each shortcut's part, and of each output's.
    pub shortcuts: Vec<Option<u64>>,
    pub outs: Vec<Option<u64>>,
}

impl<'a> Division<'a> {
    pub fn new(sizes: CudaSizes, op: &'a BandedConvOp<Offsets>, bands: (u64, u64)) -> Result<Division<'a>> {
        let layout = fitting_layout(sizes, op, bands.1)?;
        let mut end = 0;
        let mut next = |bytes: u64| {
            end += bytes;
            Some(end - bytes)
        };
        let (mut inputs, mut host_parts, mut written) = (Vec::new(), Vec::new(), Vec::new());
        let block_inputs =
            op.rematerialise.iter().flat_map(|by| &by.block_inputs).filter_map(|_| next(layout.input)).collect();
        if op.layout.prologue != Prologue::None {
            host_parts.extend(op.cached.iter().map(|cached| cached.host.and_then(|_| next(layout.cached))));
            let is_restored = op.format == CacheFormat::U8;
            inputs.extend(op.cached.iter().map(|_| if is_restored { next(layout.input) } else { None }));
            let fresh = op.fresh.iter();
            inputs.extend(
                fresh.map(|at| next(if at.is_rematerialised() { layout.rematerialised } else { layout.input })),
            );
            inputs.extend(op.rounded.iter().map(|_| next(layout.input)));
            let in_u8 = op.cache_writes.iter().filter(|_| is_restored);
            written.extend(in_u8.map(|(_, to)| to.host.and_then(|_| next(layout.written))));
        }
        let shortcuts = op.frames.iter().map(|frame| match frame.shortcut {
            Some((FrameRef::Offloaded { .. } | FrameRef::Rematerialised { .. }, _)) => next(layout.shortcut),
            Some((FrameRef::Resident(_), _)) | None => None,
        });
        let shortcuts = shortcuts.collect();
        // Outputs that are made for their statistics alone are never read, so they share a part.
        let mut for_statistics = None;
        let outs = op.frames.iter().map(|frame| match frame.out {
            FrameRef::Resident(_) => None,
            FrameRef::Offloaded { .. } => next(layout.out),
            FrameRef::Rematerialised { .. } => {
                for_statistics = for_statistics.or_else(|| next(layout.out));
                for_statistics
            }
        });
        let outs = outs.collect();
        let output = op.layout.window.output(op.input, op.layout.cout);
        Ok(Division { op, bands, layout, output, sizes, inputs, block_inputs, host_parts, written, shortcuts, outs })
    }

    /// Where a band buffer begins.
    pub fn buffer(&self, index: usize) -> u64 {
        self.bands.0 + index as u64 * (self.bands.1 / BANDS_IN_FLIGHT)
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

    /// Where a row of the resident part of a cached frame begins.
    pub fn resident_row(&self, resident: DeviceOffset, row: u64) -> u64 {
        resident.0 + row * self.cached_rows()[0]
    }

    /// Where a row of the host part of a cached frame lies in a band that reads it. `part`: of
    /// [`Division::host_parts`].
    pub fn host_part_row(&self, InFlightBand { buffer, rows }: &InFlightBand, part: u64, row: u64) -> u64 {
        self.buffer(*buffer) + part + (row - rows.input.start) * self.cached_rows()[1]
    }

    /// Where a row of an input lies in a band that reads it, if the input has a part. Inputs are numbered as in terms.
    pub fn input_row(&self, InFlightBand { buffer, rows }: &InFlightBand, input: usize, row: u64) -> u64 {
        let part = self.inputs[input].expect("an input that is normalised or restored has a part");
        self.buffer(*buffer) + part + (row - rows.input.start) * self.sizes.row_bytes(self.op.input)
    }

    /// (resident part, host part) of each split cached frame that is read as it is, from the first input row of a
    /// band. [Terms](Self::conv_frames) name it by the resident part.
    pub fn split_frames(&self, band: &InFlightBand) -> Vec<(DeviceOffset, DeviceOffset)> {
        if self.op.format != CacheFormat::Exact {
            return Vec::new();
        }
        let split = |(cached, part): (&CachedFrame<Offsets>, &Option<u64>)| {
            let first = band.rows.input.start;
            Some((
                DeviceOffset(self.resident_row(cached.resident?, first)),
                DeviceOffset(self.host_part_row(band, (*part)?, first)),
            ))
        };
        self.op.cached.iter().zip(&self.host_parts).filter_map(split).collect()
    }

    /// Where the part of a fresh frame begins.
    pub fn fresh_part(&self, buffer: usize, fresh: usize) -> u64 {
        let part = self.inputs[self.op.cached.len() + fresh];
        self.buffer(buffer) + part.expect("fresh frames that are normalised have a part")
    }

    /// Where a row of a fresh frame lies in a band that reads it.
    pub fn fresh_row(&self, band: &InFlightBand, fresh: usize, row: u64) -> u64 {
        self.input_row(band, self.op.cached.len() + fresh, row)
    }

    /// Frames that are normalised to rematerialise inputs, and where their rows go.
    pub fn normalised_block_inputs(&self, buffer: usize) -> Vec<(DeviceOffset, DeviceOffset)> {
        let frames = self.op.rematerialise.iter().flat_map(|by| &by.block_inputs).copied();
        frames.zip(self.block_inputs.iter().map(|part| DeviceOffset(self.buffer(buffer) + part))).collect()
    }

    pub fn has_norm(&self) -> bool {
        self.op.layout.prologue != Prologue::None
    }

    /// Everything that is fetched from host memory.
    pub fn fetched_frames(&self) -> impl Iterator<Item = HostOffset> + '_ {
        let cached = self.op.cached.iter().filter_map(|cached| cached.host);
        let shortcuts = self.op.frames.iter().filter_map(|frame| host_frame(frame.shortcut?.0));
        cached.chain(self.op.fresh.iter().filter_map(|at| host_frame(*at))).chain(shortcuts)
    }

    /// Whether no fresh frame is offloaded. Then fetched rows are read by their own band, and by the band below as its
    /// halo.
    pub fn fetches_nothing_fresh(&self) -> bool {
        self.op.fresh.iter().all(|at| host_frame(*at).is_none())
    }

    /// Everything that is written to host memory.
    pub fn offloaded_frames(&self) -> impl Iterator<Item = HostOffset> + '_ {
        let cached = self.op.cache_writes.iter().filter_map(|(_, to)| to.host);
        cached.chain(self.op.frames.iter().filter_map(|frame| host_frame(frame.out)))
    }

    /// The virtual begin of a frame, given the offset of its row `first`.
    pub fn virtual_top(&self, offset: u64, first: u64, shape: FrameShape) -> DeviceOffset {
        DeviceOffset(offset.wrapping_sub(first * self.sizes.row_bytes(shape)))
    }

    /// The frames of a band's launch.
    pub fn conv_frames(&self, InFlightBand { buffer, rows }: &InFlightBand) -> Vec<ConvFrame<Offsets>> {
        let (op, buffer) = (self.op, self.buffer(*buffer));
        let from = |frame: DeviceOffset, row: u64, shape| DeviceOffset(frame.0 + row * self.sizes.row_bytes(shape));
        let cached = |i: usize| match (op.cached[i].resident, self.host_parts[i]) {
            (Some(resident), _) => DeviceOffset(self.resident_row(resident, rows.input.start)),
            (None, part) => DeviceOffset(buffer + part.expect("a cached frame has a part somewhere")),
        };
        let input = |i: usize| match self.inputs.get(i).copied().flatten() {
            Some(part) => DeviceOffset(buffer + part),
            None if i < op.cached.len() => cached(i),
            None => device_frame(op.fresh[i - op.cached.len()]),
        };
        let banded = |(i, banded): (usize, &BandedFrame<Offsets>)| {
            let terms = banded.terms.iter().map(|(i, slab)| Term { frame: input(*i), slab: *slab });
            let mut terms: Vec<Term<Offsets>> = terms.collect();
            if let Some((at, slab)) = banded.shortcut {
                let part = self.shortcuts[i].map(|part| DeviceOffset(buffer + part));
                let frame = part.unwrap_or_else(|| from(device_frame(at), rows.own.start, self.shortcut_shape()));
                terms.push(Term { frame, slab });
            }
            let first = rows.own.start * tiling::output_rows(&op.layout);
            let part = self.outs[i].map(|part| self.virtual_top(buffer + part, first, self.output));
            let out = part.unwrap_or_else(|| device_frame(banded.out));
            ConvFrame { terms, bias: banded.bias, residual: banded.residual, out }
        };
        op.frames.iter().enumerate().map(banded).collect()
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
