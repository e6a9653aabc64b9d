//! Runs the band pipeline on symbols: memory holds which row of which frame was written there. So a read before the
//! write, or after an overwrite, fails.

use std::collections::BTreeMap;

use super::*;
use crate::backend::Precision;
use crate::backend::cuda::launch::tiling::COLUMN_STEP;
use crate::ir::{ConvLayout, Sizes, SplitColumns, Window};

const SIZES: CudaSizes = CudaSizes { precision: Precision::Fp16 };

/// Which row of which frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SymbolicRow {
    /// Of an input, normalised; cached ones are counted first.
    Input(usize, u64),
    /// Of a fresh frame before its norm.
    Raw(usize, u64),
    /// Of an output's shortcut.
    Shortcut(usize, u64),
    Out(usize, u64),
    /// Of a fresh frame in the resident cache.
    Cached(usize, u64),
}

/// Rows by their first byte, with their end.
#[derive(Clone, Default)]
struct SymbolicMemory(BTreeMap<u64, (u64, SymbolicRow)>);

impl SymbolicMemory {
    fn read(&self, at: u64, row: SymbolicRow) {
        assert_eq!(self.0.get(&at).map(|(_, found)| *found), Some(row), "at {at}");
    }

    /// Erases every row that it overlaps.
    fn write(&mut self, at: u64, bytes: u64, row: SymbolicRow) {
        let lost: Vec<u64> =
            self.0.range(..at + bytes).rev().take_while(|(_, (end, _))| *end > at).map(|r| *r.0).collect();
        self.0.retain(|start, _| !lost.contains(start));
        self.0.insert(at, (at + bytes, row));
    }
}

/// Whole frames on the device, one after the other.
struct FrameAllocator {
    end: u64,
    bytes: u64,
}

impl FrameAllocator {
    fn next(&mut self) -> DeviceOffset {
        self.end += self.bytes;
        DeviceOffset(self.end - self.bytes)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FreshCase {
    Device,
    /// Outputs overwrite them.
    InPlace,
    Host,
    /// All but the first.
    Rematerialised,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CacheCase {
    None,
    Host,
    /// The new cache overwrites the old.
    Resident,
    Split,
    /// Rematerialised before the fresh frames, and cached like them.
    Recomputed,
}

struct SymbolicRun<'a> {
    division: Division<'a>,
    memory: SymbolicMemory,
    row: u64,
    resident_row: u64,
    host_row: u64,
    shortcut_row: u64,
    buffer_bytes: u64,
    buffer: usize,
}

impl BandSteps for SymbolicRun<'_> {
    fn fetch(&mut self, rows: BandRows, above: Option<&InFlightBand>) -> Result<InFlightBand> {
        let buffer = self.buffer;
        self.buffer = (buffer + 1) % BANDS_IN_FLIGHT as usize;
        let (division, row) = (&self.division, self.row);
        let op = division.op;
        let band = InFlightBand { buffer, rows };
        let rows = &band.rows;
        for (i, part) in division.inputs.iter().take(op.cached.len()).enumerate() {
            let Some(part) = *part else { continue };
            let row = self.host_row;
            for r in rows.shared(above).end..rows.input.end {
                self.memory.write(division.host_part_row(&band, part, r), row, SymbolicRow::Input(i, r));
            }
            for r in rows.shared(above) {
                let above = above.expect("somebody shares these");
                self.memory.read(division.host_part_row(above, part, r), SymbolicRow::Input(i, r));
                self.memory.write(division.host_part_row(&band, part, r), row, SymbolicRow::Input(i, r));
            }
        }
        for (i, at) in op.fresh.iter().enumerate() {
            let (input, part) = (op.cached.len() + i, division.fresh_part(buffer, i));
            let place = |r: u64| part + (r - rows.input.start) * row;
            match *at {
                FrameRef::Resident(frame) => {
                    for r in rows.shared(above).end..rows.input.end {
                        self.memory.read(frame.0 + r * row, SymbolicRow::Raw(i, r));
                        self.memory.write(place(r), row, SymbolicRow::Input(input, r));
                    }
                    for r in rows.shared(above) {
                        let above = above.expect("somebody shares these");
                        self.memory.read(division.fresh_row(above, i, r), SymbolicRow::Input(input, r));
                        self.memory.write(place(r), row, SymbolicRow::Input(input, r));
                    }
                }
                FrameRef::Offloaded { .. } => {
                    rows.input.clone().for_each(|r| self.memory.write(place(r), row, SymbolicRow::Input(input, r)))
                }
                FrameRef::Rematerialised { .. } => {
                    let whole = |r: u64| r.is_multiple_of(REMATERIALISED_LEAD) || r == op.input.height;
                    assert!(
                        whole(rows.rematerialised.start) && whole(rows.rematerialised.end),
                        "{:?}",
                        rows.rematerialised
                    );
                    if let Some(above) = above {
                        for r in rows.input.start..rows.rematerialised.start {
                            let from = division.fresh_part(above.buffer, i) + (r - above.rows.input.start) * row;
                            self.memory.read(from, SymbolicRow::Input(input, r));
                            self.memory.write(place(r), row, SymbolicRow::Input(input, r));
                        }
                    }
                    rows.rematerialised
                        .clone()
                        .for_each(|r| self.memory.write(place(r), row, SymbolicRow::Input(input, r)));
                }
            }
        }
        for (i, (frame, part)) in op.frames.iter().zip(&division.shortcuts).enumerate() {
            if let (Some((FrameRef::Offloaded { .. }, _)), Some(part)) = (frame.shortcut, part) {
                for r in rows.own.clone() {
                    let to = division.buffer(buffer) + part + (r - rows.own.start) * self.shortcut_row;
                    self.memory.write(to, self.shortcut_row, SymbolicRow::Shortcut(i, r));
                }
            }
        }
        Ok(band)
    }

    fn compute(&mut self, band: &InFlightBand) -> Result<()> {
        let (division, InFlightBand { buffer, rows }) = (&self.division, band);
        let (op, place) = (division.op, division.buffer(*buffer));
        let (frames, split) = (division.conv_frames(band), division.split_frames(band));
        for (i, (banded, frame)) in op.frames.iter().zip(&frames).enumerate() {
            if let (Some((FrameRef::Rematerialised { .. }, _)), Some(term)) = (banded.shortcut, frame.terms.last()) {
                for r in rows.own.clone() {
                    self.memory.write(
                        term.frame.0 + (r - rows.own.start) * self.shortcut_row,
                        self.shortcut_row,
                        SymbolicRow::Shortcut(i, r),
                    );
                }
            }
        }
        for (i, (banded, frame)) in op.frames.iter().zip(&frames).enumerate() {
            for (term, (input, _)) in frame.terms.iter().zip(&banded.terms) {
                for r in rows.own.clone().flat_map(|r| r.saturating_sub(1)..(r + 2).min(op.input.height)) {
                    assert!(rows.input.contains(&r));
                    let at = |frame: DeviceOffset, row: u64| frame.0 + (r - rows.input.start) * row;
                    match split.iter().find(|(resident, _)| *resident == term.frame) {
                        Some((resident, host)) => {
                            self.memory.read(at(*resident, self.resident_row), SymbolicRow::Input(*input, r));
                            self.memory.read(at(*host, self.host_row), SymbolicRow::Input(*input, r));
                        }
                        None => self.memory.read(at(term.frame, self.row), SymbolicRow::Input(*input, r)),
                    }
                }
            }
            if let (Some(_), Some(term)) = (banded.shortcut, frame.terms.last()) {
                let read = |r: u64| {
                    self.memory
                        .read(term.frame.0 + (r - rows.own.start) * self.shortcut_row, SymbolicRow::Shortcut(i, r))
                };
                rows.own.clone().for_each(read);
            }
        }
        for (i, (frame, part)) in frames.iter().zip(&division.outs).enumerate() {
            for r in rows.own.clone() {
                let to = frame.out.0.wrapping_add(r * self.row);
                assert!(part.is_none() || (place..place + self.buffer_bytes - self.row + 1).contains(&to));
                self.memory.write(to, self.row, SymbolicRow::Out(i, r));
            }
        }
        Ok(())
    }

    fn cache(&mut self, band: &InFlightBand, _: Option<&InFlightBand>) -> Result<()> {
        for (i, to) in &self.division.op.cache_writes {
            let Some(to) = to.resident else { continue };
            for r in band.rows.own.clone() {
                let input = SymbolicRow::Input(self.division.op.cached.len() + i, r);
                self.memory.read(self.division.fresh_row(band, *i, r), input);
                let bytes = self.division.resident_row(to, 1) - to.0;
                self.memory.write(self.division.resident_row(to, r), bytes, SymbolicRow::Cached(*i, r));
            }
        }
        Ok(())
    }
}

fn layout(shortcut: Option<u64>) -> ConvLayout {
    ConvLayout {
        cin: 16,
        cout: 16,
        window: Window::Same,
        prologue: Prologue::NormSilu,
        slabs: 3,
        shortcut,
        biases: 1,
        groups: 4,
    }
}

fn check(height: u64, count: usize, cache: CacheCase, fresh: FreshCase, out_offloaded: bool, room: u64) {
    let sizes = SIZES;
    let input = FrameShape::new(height, 70, 16);
    let shortcut_channels = if fresh == FreshCase::InPlace { Some(32) } else { None };
    let layout = layout(shortcut_channels);
    let row = sizes.row_bytes(input);
    let shortcut_row = sizes.row_bytes(input.with_channels(32));
    let mut memory = SymbolicMemory::default();
    let mut whole = FrameAllocator { end: 0, bytes: height * shortcut_row };
    let mut put = |memory: &mut SymbolicMemory, of: &dyn Fn(u64) -> SymbolicRow, bytes: u64| {
        let frame = whole.next();
        (0..height).for_each(|r| memory.write(frame.0 + r * bytes, bytes, of(r)));
        frame
    };
    let elsewhere = |i: usize| HostOffset(i as u64 * 1000);
    let columns = match cache {
        CacheCase::Resident | CacheCase::Recomputed => SplitColumns::all_resident(input.width),
        CacheCase::Host | CacheCase::None => SplitColumns::new(input.width, 0, COLUMN_STEP),
        CacheCase::Split => SplitColumns::new(input.width, input.width / 2, COLUMN_STEP),
    };
    assert_eq!(columns.resident_width() > 0 && columns.host_width() > 0, cache == CacheCase::Split);
    let [resident_row, host_row] =
        [columns.resident_width(), columns.host_width()].map(|width| sizes.row_bytes(FrameShape { width, ..input }));
    let cached: Vec<CachedFrame<Offsets>> = (0..2)
        .map(|i| CachedFrame {
            resident: (resident_row > 0).then(|| put(&mut memory, &|r| SymbolicRow::Input(i, r), resident_row)),
            host: (host_row > 0).then(|| elsewhere(i)),
        })
        .collect();
    let cached_frames = if matches!(cache, CacheCase::None | CacheCase::Recomputed) { &[][..] } else { &cached[..] };
    let recomputed = if cache == CacheCase::Recomputed { 2 } else { 0 };
    let inputs: Vec<FrameRef<Offsets>> = (0..recomputed + count)
        .map(|i| match fresh {
            _ if i < recomputed => FrameRef::Rematerialised { index: i, statistics: DeviceOffset(0) },
            FreshCase::Host => FrameRef::Offloaded { frame: elsewhere(9 + i), statistics: DeviceOffset(0) },
            FreshCase::Rematerialised if i > recomputed => {
                FrameRef::Rematerialised { index: i - 1, statistics: DeviceOffset(0) }
            }
            _ => FrameRef::Resident(put(&mut memory, &|r| SymbolicRow::Raw(i, r), row)),
        })
        .collect();
    let frames = (0..count)
        .map(|i| {
            let shortcut = shortcut_channels.map(|_| match i % 3 {
                0 => FrameRef::Resident(put(&mut memory, &|r| SymbolicRow::Shortcut(i, r), shortcut_row)),
                1 => FrameRef::Offloaded { frame: elsewhere(20 + i), statistics: DeviceOffset(0) },
                _ => FrameRef::Rematerialised { index: i, statistics: DeviceOffset(0) },
            });
            let out = match (fresh, inputs[recomputed + i]) {
                (FreshCase::InPlace, own) => own,
                _ if out_offloaded => FrameRef::Offloaded { frame: elsewhere(30 + i), statistics: DeviceOffset(0) },
                _ => FrameRef::Resident(put(&mut memory, &|r| SymbolicRow::Out(usize::MAX, r), row)),
            };
            let input = cached_frames.len() + recomputed + i;
            let terms = (input.saturating_sub(2)..=input).zip(0u8..).collect();
            BandedFrame { terms, shortcut: shortcut.map(|at| (at, 3)), bias: 0, residual: None, out }
        })
        .collect();
    let cache_writes = (inputs.len().saturating_sub(2)..inputs.len()).zip(cached.iter().copied());
    let op = BandedConvOp {
        layer: 0,
        layout,
        weights: None,
        input,
        cached: cached_frames.to_vec(),
        cache_writes: cache_writes.collect(),
        fresh: inputs,
        columns,
        statistics_writes: Vec::new(),
        frames,
        rematerialise: None,
        statistics: false,
    };
    let planned = sizes.band_bytes(&layout, input, op.band_contents()).expect("groups of four channels");
    let division = Division::new(sizes, &op, (whole.end, planned * room)).unwrap();
    let buffer_bytes = planned * room / BANDS_IN_FLIGHT;
    let rows = division.layout.rows;
    let mut run = SymbolicRun {
        division,
        memory: memory.clone(),
        row,
        resident_row,
        host_row,
        shortcut_row,
        buffer_bytes,
        buffer: 0,
    };
    for late in [false, true] {
        (run.memory, run.buffer) = (memory.clone(), 0);
        match late {
            false => run_pipeline(height, rows, &mut run).unwrap(),
            true => run_pipeline_late(height, rows, &mut run),
        }
        for (i, to) in &op.cache_writes {
            if let Some(to) = to.resident {
                (0..height).for_each(|r| run.memory.read(to.0 + r * resident_row, SymbolicRow::Cached(*i, r)));
            }
        }
        for (i, frame) in op.frames.iter().enumerate() {
            if let FrameRef::Resident(out) = frame.out {
                (0..height).for_each(|r| run.memory.read(out.0 + r * row, SymbolicRow::Out(i, r)));
            }
        }
    }
}

/// Streams may run late: each band is fetched after the one above is computed, as late as events allow.
fn run_pipeline_late(height: u64, rows: u64, stages: &mut impl BandSteps) {
    let mut above: Option<InFlightBand> = None;
    for top in (0..height).step_by(rows as usize) {
        let rows = BandRows::new(top, rows, height, above.as_ref().map(|above| &above.rows));
        let band = stages.fetch(rows, above.as_ref()).unwrap();
        stages.compute(&band).unwrap();
        if let Some(above) = &above {
            stages.cache(above, Some(&band)).unwrap();
        }
        above = Some(band);
    }
    above.iter().for_each(|last| stages.cache(last, None).unwrap());
}

#[test]
fn pipeline_finds_every_row_that_a_band_reads() {
    for height in [2, 16, 18, 52, 100, 160, 262] {
        for count in [1, 2, 3, 5] {
            for cache in
                [CacheCase::None, CacheCase::Host, CacheCase::Resident, CacheCase::Split, CacheCase::Recomputed]
            {
                for fresh in [FreshCase::Device, FreshCase::InPlace, FreshCase::Host, FreshCase::Rematerialised] {
                    for (out_offloaded, room) in [(false, 1), (true, 1), (false, 3)] {
                        check(height, count, cache, fresh, out_offloaded, room);
                    }
                }
            }
        }
    }
}

#[test]
fn division_refuses_a_buffer_that_was_not_planned() {
    let layout = layout(None);
    let input = FrameShape::new(64, 64, 16);
    let (fresh, out) = (FrameRef::Resident(DeviceOffset(0)), FrameRef::Resident(DeviceOffset(1 << 20)));
    let op = BandedConvOp {
        layer: 0,
        layout,
        weights: None,
        input,
        cached: Vec::new(),
        fresh: vec![fresh],
        cache_writes: Vec::new(),
        columns: SplitColumns::new(input.width, 0, COLUMN_STEP),
        statistics_writes: Vec::new(),
        frames: vec![BandedFrame { terms: vec![(0, 0)], shortcut: None, bias: 0, residual: None, out }],
        rematerialise: None,
        statistics: false,
    };
    let planned = SIZES.band_bytes(&layout, input, op.band_contents()).unwrap();
    assert!(Division::new(SIZES, &op, (2 << 20, planned)).is_ok());
    assert!(Division::new(SIZES, &op, (2 << 20, planned / 4)).is_err());
}
