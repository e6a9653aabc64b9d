//! Runs the band pipeline on symbols: memory holds which row of which frame was written there. So a read before the
//! write, or after an overwrite, fails.

use std::collections::BTreeMap;

use super::*;
use crate::ir::{BandBuffers, BandInput, ConvLayout, Norm, Prologue, Rematerialise, SplitColumns, Window};

/// Tiles of every kernel begin at multiples of this many columns.
const COLUMN_STEP: u64 = 32;

/// Elements of two bytes.
#[derive(Clone, Copy)]
struct SymbolicSizes;

const SIZES: SymbolicSizes = SymbolicSizes;

impl RowSizes for SymbolicSizes {
    const FRAME_ALIGN: u64 = 256;

    fn element(self) -> u64 {
        2
    }

    fn channel_stride(self, channels: u64) -> u64 {
        channels
    }

    fn u8_row_bytes(self, shape: FrameShape) -> u64 {
        (shape.width * (shape.channels + 2)).next_multiple_of(16)
    }

    fn data_bytes(self, shape: FrameShape) -> u64 {
        shape.elements() * 2
    }

    fn channel_tiles(self, _: &ConvLayout) -> u64 {
        1
    }
}

/// A kind of frame, its number and a row. An "input" is normalised; cached ones are counted first. A "raw" frame is a
/// fresh one before its norm. A "stored" one is an input in 8 bits. A "cached" one is a new part of the cache.
type SymbolicRow = (&'static str, usize, u64);

/// Rows by their first byte, with their end.
#[derive(Clone, Default)]
struct SymbolicMemory(BTreeMap<u64, (u64, SymbolicRow)>);

impl SymbolicMemory {
    fn read(&self, kind: &'static str, frame: usize, rows: Range<u64>, at: impl Fn(u64) -> u64) {
        for row in rows {
            let found = self.0.get(&at(row)).map(|(_, found)| *found);
            assert_eq!(found, Some((kind, frame, row)), "at {}", at(row));
        }
    }

    /// Erases every row that it overlaps.
    fn write(&mut self, kind: &'static str, frame: usize, rows: Range<u64>, bytes: u64, at: impl Fn(u64) -> u64) {
        for row in rows {
            let (start, end) = (at(row), at(row) + bytes);
            let overlapping = self.0.range(..end).rev().take_while(|(_, (end, _))| *end > start);
            let lost: Vec<u64> = overlapping.map(|(start, _)| *start).collect();
            for start in lost {
                self.0.remove(&start);
            }
            self.0.insert(start, (end, (kind, frame, row)));
        }
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
    /// All but the first two, from frames that outputs overwrite.
    Hidden,
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
    division: Division<'a, SymbolicSizes>,
    memory: SymbolicMemory,
    host: SymbolicMemory,
    buffer: usize,
}

/// What a cache has of its frames.
fn cached_kind(format: CacheFormat) -> &'static str {
    if format == CacheFormat::U8 { "stored" } else { "input" }
}

impl SymbolicRun<'_> {
    /// Rows that the band above has are copied from there.
    fn share(
        &mut self,
        (kind, input): (&'static str, usize),
        rows: Range<u64>,
        bytes: u64,
        [from, to]: [&InFlightBand; 2],
        at: impl Fn(&Division<SymbolicSizes>, &InFlightBand, u64) -> u64,
    ) {
        self.memory.read(kind, input, rows.clone(), |row| at(&self.division, from, row));
        self.memory.write(kind, input, rows, bytes, |row| at(&self.division, to, row));
    }

    /// As many rows at a time as a part has.
    fn normalise_block_inputs(&mut self, band: &InFlightBand) {
        let (division, made) = (&self.division, &band.rows.rematerialised);
        let (height, row) = (division.op.input.height, SIZES.row_bytes(division.op.input));
        for top in made.clone().step_by(division.rows as usize) {
            let end = (top + division.rows).min(made.end);
            let read = rows::with_halo(&(top..end), height);
            for (i, (from, part)) in division.normalised_block_inputs(band.buffer).into_iter().enumerate() {
                self.memory.read("block input", i, read.clone(), |r| from.0 + r * row);
                let at = |r: u64| part.0 + (r - read.start) * row;
                self.memory.write("normalised", i, read.clone(), row, at);
                assert!(part.0 >= division.buffer(band.buffer) && at(read.end) <= division.buffer(band.buffer + 1));
            }
            for (i, (_, part)) in division.normalised_block_inputs(band.buffer).into_iter().enumerate() {
                self.memory.read("normalised", i, read.clone(), |r| part.0 + (r - read.start) * row);
            }
        }
    }

    /// Restores cached frames, and rounds fresh ones.
    fn round(&mut self, band: &InFlightBand) {
        let (division, rows) = (&self.division, &band.rows.input);
        let (op, bytes) = (division.op, SIZES.row_bytes(division.op.input));
        for (i, cached) in op.cached() {
            if let Some(resident) = cached.resident {
                self.memory.read("stored", i, rows.clone(), |row| division.resident_rows(resident).row(row));
            }
            if let Some(part) = division.rows_of(band, BandPart::HostColumns(i)) {
                self.memory.read("stored", i, rows.clone(), |row| part.row(row));
            }
            self.memory.write("input", i, rows.clone(), bytes, |row| division.input_rows(band, i).row(row));
        }
        for i in 0..op.inputs.len() {
            let Some(part) = division.rows_of(band, BandPart::Rounded(i)) else { continue };
            self.memory.read("input", i, rows.clone(), |row| division.input_rows(band, i).row(row));
            self.memory.write("rounded", i, rows.clone(), bytes, |row| part.row(row));
        }
    }

    /// Brings the new cache to host memory.
    fn offload(&mut self, band: &InFlightBand) {
        let (division, own) = (&self.division, &band.rows.own);
        let [_, host_row] = division.cached_rows();
        for (i, to) in division.op.cache_writes() {
            let Some(to) = to.host else { continue };
            self.memory.read("input", i, own.clone(), |r| division.input_rows(band, i).row(r));
            if let Some(part) = division.rows_of(band, BandPart::NewHostColumns(i)) {
                self.memory.write("written", i, own.clone(), host_row, |row| part.row(row));
                assert!(part.row(own.end) <= division.buffer(band.buffer + 1));
            }
            self.host.write("cached", i, own.clone(), host_row, |row| to.0 + row * host_row);
        }
    }
}

impl BandSteps for SymbolicRun<'_> {
    fn fetch(&mut self, rows: BandRows, above: Option<&InFlightBand>) -> Result<InFlightBand> {
        let band = InFlightBand { buffer: self.buffer, rows };
        self.buffer = (self.buffer + 1) % BANDS_IN_FLIGHT as usize;
        let op = self.division.op;
        let (row, [_, host_row]) = (SIZES.row_bytes(op.input), self.division.cached_rows());
        let shared = band.rows.shared(above);
        let new = shared.end..band.rows.input.end;
        let kind = cached_kind(op.format);
        for (i, cached) in op.cached() {
            let Some(frame) = cached.host else { continue };
            let at = |division: &Division<SymbolicSizes>, band: &InFlightBand, row| {
                division.rows_of(band, BandPart::HostColumns(i)).unwrap().row(row)
            };
            self.host.read(kind, i, new.clone(), |row| frame.0 + row * host_row);
            self.memory.write(kind, i, new.clone(), host_row, |row| at(&self.division, &band, row));
            if let Some(above) = above {
                self.share((kind, i), shared.clone(), host_row, [above, &band], at);
            }
        }
        self.normalise_block_inputs(&band);
        for (i, fresh) in op.fresh() {
            let at =
                |division: &Division<SymbolicSizes>, band: &InFlightBand, row| division.input_rows(band, i).row(row);
            let (computed, copied) = match fresh {
                FrameRef::Resident(frame) => {
                    self.memory.read("raw", i, new.clone(), |r| frame.0 + r * row);
                    (new.clone(), shared.clone())
                }
                FrameRef::Offloaded { .. } => (band.rows.input.clone(), 0..0),
                FrameRef::Rematerialised { .. } => {
                    let made = &band.rows.rematerialised;
                    let whole = |r: u64| r.is_multiple_of(REMATERIALISED_LEAD) || r == op.input.height;
                    assert!(whole(made.start) && whole(made.end), "{made:?}");
                    (made.clone(), band.rows.input.start..made.start)
                }
            };
            if let Some(above) = above {
                self.share(("input", i), copied, row, [above, &band], at);
            }
            self.memory.write("input", i, computed, row, |row| at(&self.division, &band, row));
        }
        let shortcut_row = SIZES.row_bytes(self.division.shortcut_shape());
        for (i, frame) in op.frames.iter().enumerate() {
            if let Some(Shortcut { from: FrameRef::Offloaded { .. }, .. }) = frame.shortcut {
                let part = self.division.rows_of(&band, BandPart::Shortcut(i)).unwrap();
                self.memory.write("shortcut", i, band.rows.own.clone(), shortcut_row, |row| part.row(row));
            }
        }
        Ok(band)
    }

    fn compute(&mut self, band: &InFlightBand) -> Result<()> {
        if self.division.op.format == CacheFormat::U8 {
            self.round(band);
        }
        let (division, own, input_rows) = (&self.division, &band.rows.own, &band.rows.input);
        let (op, buffer) = (division.op, division.buffer(band.buffer));
        let [row, resident_row, host_row, shortcut_row] =
            [op.input, division.resident_shape(), division.host_shape(), division.shortcut_shape()]
                .map(|shape| SIZES.row_bytes(shape));
        let (frames, split) = (division.conv_frames(band), division.split_frames(band));
        let shortcut_at = |term: &Term<Offsets>, row| term.frame.0 + (row - own.start) * shortcut_row;
        for (i, (banded, frame)) in op.frames.iter().zip(&frames).enumerate() {
            let made = banded.shortcut.filter(|shortcut| shortcut.from.is_rematerialised());
            if let (Some(_), Some(term)) = (made, frame.terms.last()) {
                self.memory.write("shortcut", i, own.clone(), shortcut_row, |row| shortcut_at(term, row));
            }
        }
        let seen = own.start.saturating_sub(1)..(own.end + 1).min(op.input.height);
        assert!(input_rows.start <= seen.start && seen.end <= input_rows.end);
        for (i, (banded, frame)) in op.frames.iter().zip(&frames).enumerate() {
            for (term, BandTerm { input, is_rounded, .. }) in frame.terms.iter().zip(&banded.terms) {
                let kind = if *is_rounded { "rounded" } else { "input" };
                let parts = match split.iter().find(|(resident, _)| *resident == term.frame) {
                    Some((resident, host)) => vec![(*resident, resident_row), (*host, host_row)],
                    None => vec![(term.frame, row)],
                };
                for (part, bytes) in parts {
                    self.memory.read(kind, *input, seen.clone(), |row| part.0 + (row - input_rows.start) * bytes);
                }
            }
            if let (Some(_), Some(term)) = (banded.shortcut, frame.terms.last()) {
                self.memory.read("shortcut", i, own.clone(), |row| shortcut_at(term, row));
            }
        }
        for (i, (banded, frame)) in op.frames.iter().zip(&frames).enumerate() {
            let part = !matches!(banded.out, FrameRef::Resident(_));
            let at = |r: u64| frame.out.0.wrapping_add(r * row);
            let backed = buffer..division.buffer(band.buffer + 1) - row + 1;
            assert!(!part || own.clone().all(|r| backed.contains(&at(r))));
            self.memory.write("out", i, own.clone(), row, at);
        }
        self.offload(band);
        Ok(())
    }

    fn cache(&mut self, band: &InFlightBand, _: Option<&InFlightBand>) -> Result<()> {
        let (division, own) = (&self.division, &band.rows.own);
        for (i, to) in division.op.cache_writes() {
            let Some(to) = to.resident else { continue };
            self.memory.read("input", i, own.clone(), |row| division.input_rows(band, i).row(row));
            let [bytes, _] = division.cached_rows();
            self.memory.write("cached", i, own.clone(), bytes, |row| division.resident_rows(to).row(row));
        }
        Ok(())
    }
}

fn layout(shortcut: Option<u64>) -> ConvLayout {
    let (window, prologue) = (Window::Same, Prologue::NormSilu);
    ConvLayout {
        cin: 16,
        cout: 16,
        window,
        prologue,
        slabs: 3,
        shortcut,
        biases: 1,
        norm: Norm::Group { groups: 4 },
        pairs: None,
        first_frame_slab: None,
    }
}

/// An operation without caches.
fn plain_op(layout: ConvLayout, input: FrameShape) -> BandedConvOp<Offsets> {
    BandedConvOp {
        layer: 0,
        layout,
        weights: None,
        input,
        inputs: Vec::new(),
        columns: SplitColumns::new(input.width, 0, COLUMN_STEP),
        format: CacheFormat::Exact,
        frames: Vec::new(),
        rematerialise: None,
        statistics: false,
    }
}

fn planned_bytes(op: &BandedConvOp<Offsets>) -> u64 {
    SIZES.band_buffers(&op.band_shape(), &op.band_parts().collect::<Vec<_>>(), op.frames.len() as u64)
}

fn check(
    height: u64,
    count: usize,
    (cache, format): (CacheCase, CacheFormat),
    fresh: FreshCase,
    out_offloaded: bool,
    room: u64,
) {
    let input = FrameShape::new(height, 70, 16);
    let layout = layout((fresh == FreshCase::InPlace).then_some(32));
    let (row, shortcut_row) = (SIZES.row_bytes(input), SIZES.row_bytes(input.with_channels(32)));
    let (mut memory, mut host, mut end) = (SymbolicMemory::default(), SymbolicMemory::default(), 0);
    // Whole frames on the device, one after the other.
    let mut put = |kind: &'static str, number: usize, bytes: u64| {
        let start = end;
        memory.write(kind, number, 0..height, bytes, |row| start + row * bytes);
        end += height * shortcut_row;
        DeviceOffset(start)
    };
    let no_statistics = DeviceOffset(0);
    let offloaded = |i: usize| FrameRef::Offloaded { frame: HostOffset(i as u64 * 1000), statistics: no_statistics };
    let rematerialised = |index: usize| FrameRef::Rematerialised { index, statistics: no_statistics };
    let columns = match cache {
        CacheCase::Resident | CacheCase::Recomputed => SplitColumns::all_resident(input.width),
        CacheCase::Host | CacheCase::None => SplitColumns::new(input.width, 0, COLUMN_STEP),
        CacheCase::Split => SplitColumns::new(input.width, input.width / 2, COLUMN_STEP),
    };
    let [resident_row, host_row] = [columns.resident_width(), columns.host_width()]
        .map(|width| SIZES.cached_row_bytes(FrameShape { width, ..input }, format));
    assert_eq!(resident_row > 0 && host_row > 0, cache == CacheCase::Split);
    let kind = cached_kind(format);
    let mut put_on_host = |i: usize| {
        let frame = i as u64 * height * row;
        host.write(kind, i, 0..height, host_row, |row| frame + row * host_row);
        HostOffset(frame)
    };
    let cached_frame = |i| CachedFrame {
        resident: (resident_row > 0).then(|| put(kind, i, resident_row)),
        host: (host_row > 0).then(|| put_on_host(i)),
    };
    let all_cached: Vec<CachedFrame<Offsets>> = (0..2).map(cached_frame).collect();
    let cached = if matches!(cache, CacheCase::None | CacheCase::Recomputed) { Vec::new() } else { all_cached.clone() };
    let recomputed = if cache == CacheCase::Recomputed { 2 } else { 0 };
    let fresh_frame = |i| match fresh {
        _ if i < recomputed => rematerialised(i),
        FreshCase::Host => offloaded(9 + i),
        FreshCase::Rematerialised if i > recomputed => rematerialised(i - 1),
        FreshCase::Hidden if i > recomputed + 1 => rematerialised(i - 2),
        _ => FrameRef::Resident(put("raw", cached.len() + i, row)),
    };
    let inputs: Vec<FrameRef<Offsets>> = (0..recomputed + count).map(fresh_frame).collect();
    let block_inputs = (0..count).filter(|_| fresh == FreshCase::Hidden).map(|i| put("block input", i, row));
    let block_inputs: Vec<DeviceOffset> = block_inputs.collect();
    let banded_frame = |i| {
        let shortcut = layout.shortcut.map(|_| match i % 3 {
            0 => FrameRef::Resident(put("shortcut", i, shortcut_row)),
            1 => offloaded(20 + i),
            _ => rematerialised(i),
        });
        let out = match fresh {
            FreshCase::InPlace => inputs[recomputed + i],
            FreshCase::Hidden => FrameRef::Resident(block_inputs[i]),
            _ if out_offloaded => offloaded(30 + i),
            _ => FrameRef::Resident(put("out", usize::MAX, row)),
        };
        let input = cached.len() + recomputed + i;
        // Of each frame, the fresh inputs before it are read rounded, where there is a format to round to.
        let is_rounded = |t: usize| format == CacheFormat::U8 && t >= cached.len() && t < input;
        let term = |(t, slab): (usize, u8)| BandTerm { input: t, is_rounded: is_rounded(t), slab };
        let terms = (input.saturating_sub(2)..=input).zip(0u8..).map(term).collect();
        let shortcut = shortcut.map(|from| Shortcut { from, slab: 3 });
        BandedFrame { terms, shortcut, bias: 0, residual: None, out }
    };
    let frames = (0..count).map(banded_frame).collect();
    let mut op_inputs: Vec<BandInput<Offsets>> = cached.iter().copied().map(BandInput::cached).collect();
    op_inputs.extend(inputs.iter().copied().map(BandInput::fresh));
    let newest = op_inputs.len() - 1;
    let is_rounded = |i: usize| format == CacheFormat::U8 && (cached.len()..newest).contains(&i);
    op_inputs.iter_mut().enumerate().for_each(|(i, input)| input.is_rounded = is_rounded(i));
    let newest = op_inputs.len() - inputs.len().min(2)..;
    op_inputs[newest].iter_mut().zip(all_cached).for_each(|(input, to)| input.cached_to = Some(to));
    let hidden = (fresh == FreshCase::Hidden && count > 2).then(|| Rematerialise {
        layer: 1,
        layout,
        input,
        block_inputs: block_inputs.clone(),
        frames: Vec::new(),
    });
    let op =
        BandedConvOp { rematerialise: hidden, inputs: op_inputs, columns, format, frames, ..plain_op(layout, input) };
    let planned = planned_bytes(&op);
    for late in [false, true] {
        let division = Division::new(SIZES, &op, BandBuffers { offset: end, bytes: planned * room }).unwrap();
        let rows = division.rows;
        let mut run = SymbolicRun { division, memory: memory.clone(), host: host.clone(), buffer: 0 };
        match late {
            false => run_pipeline(height, rows, &mut run).unwrap(),
            true => run_pipeline_late(height, rows, &mut run),
        }
        for (i, to) in op.cache_writes() {
            if let Some(to) = to.resident {
                run.memory.read("cached", i, 0..height, |row| to.0 + row * resident_row);
            }
            if let Some(to) = to.host {
                run.host.read("cached", i, 0..height, |row| to.0 + row * host_row);
            }
        }
        for (i, frame) in op.frames.iter().enumerate() {
            if let FrameRef::Resident(out) = frame.out {
                run.memory.read("out", i, 0..height, |r| out.0 + r * row);
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
        above.iter().for_each(|above| stages.cache(above, Some(&band)).unwrap());
        above = Some(band);
    }
    above.iter().for_each(|last| stages.cache(last, None).unwrap());
}

#[test]
fn pipeline_finds_every_row_that_a_band_reads() {
    use CacheCase::{Host, None, Recomputed, Resident, Split};
    for height in [2, 16, 18, 52, 100, 160, 262] {
        for count in [1, 2, 3, 5] {
            for cache in [None, Host, Resident, Split, Recomputed] {
                let all = [FreshCase::Device, FreshCase::InPlace, FreshCase::Host, FreshCase::Rematerialised];
                // One operation rematerialises for one reason.
                let hidden = (cache != Recomputed).then_some(FreshCase::Hidden);
                for fresh in all.into_iter().chain(hidden) {
                    for (out_offloaded, room) in [(false, 1), (true, 1), (false, 3)] {
                        for format in [CacheFormat::Exact, CacheFormat::U8] {
                            check(height, count, (cache, format), fresh, out_offloaded, room);
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn division_refuses_a_buffer_that_was_not_planned() {
    let input = FrameShape::new(64, 64, 16);
    let (fresh, out) = (FrameRef::Resident(DeviceOffset(0)), FrameRef::Resident(DeviceOffset(1 << 20)));
    let terms = vec![BandTerm { input: 0, is_rounded: false, slab: 0 }];
    let frame = BandedFrame { terms, shortcut: None, bias: 0, residual: None, out };
    let op =
        BandedConvOp { inputs: vec![BandInput::fresh(fresh)], frames: vec![frame], ..plain_op(layout(None), input) };
    let divided = |bytes: u64| Division::new(SIZES, &op, BandBuffers { offset: 2 << 20, bytes });
    let planned = planned_bytes(&op);
    assert!(divided(planned).is_ok());
    assert!(divided(planned / 4).is_err());
}
