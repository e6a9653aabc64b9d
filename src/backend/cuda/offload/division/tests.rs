//! Bands are gone through on symbols: what a row of memory holds is known by the frame and the row that it belongs to. So a band
//! that would read a row before it is there, or after it was written over, shows.

use std::collections::BTreeMap;

use super::*;
use crate::backend::{PastFrame, Window};
use crate::tensor::{Columns, PastAt};

/// What a row of memory holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Row {
    /// Of an input as it goes into the sums, by its number with the past ones first.
    Input(usize, u64),
    /// Of a fresh frame as it is on the device.
    Raw(usize, u64),
    /// Of what the shortcut of an output reads.
    Side(usize, u64),
    Out(usize, u64),
    /// Of a fresh frame that is kept on the device.
    Kept(usize, u64),
}

/// Rows by where they begin, with their ends.
#[derive(Clone, Default)]
struct Memory(BTreeMap<u64, (u64, Row)>);

impl Memory {
    fn read(&self, at: u64, row: Row) {
        assert_eq!(self.0.get(&at).map(|(_, found)| *found), Some(row), "at {at}");
    }

    /// Whatever it lies over, even in part, is lost.
    fn write(&mut self, at: u64, bytes: u64, row: Row) {
        let lost: Vec<u64> =
            self.0.range(..at + bytes).rev().take_while(|(_, (end, _))| *end > at).map(|r| *r.0).collect();
        self.0.retain(|start, _| !lost.contains(start));
        self.0.insert(at, (at + bytes, row));
    }
}

/// Where frames lie that are whole on the device, one after the other.
struct Frames {
    end: u64,
    bytes: u64,
}

impl Frames {
    fn next(&mut self) -> Frame {
        self.end += self.bytes;
        Frame(self.end - self.bytes)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fresh {
    /// Others need them too, or the outputs lie over them.
    Device,
    Own,
    Host,
    /// All but the first.
    Anew,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Past {
    None,
    Host,
    /// Kept frames are written over those of the past.
    Device,
    /// Some columns of it, and the others on the host.
    Parted,
    /// Made anew before the fresh ones, and kept like them.
    Again,
}

struct Run<'a> {
    division: Division<'a, ()>,
    memory: Memory,
    row: u64,
    near_row: u64,
    far_row: u64,
    side_row: u64,
    place_bytes: u64,
    turn: usize,
}

impl Turns for Run<'_> {
    fn fetch(&mut self, rows: Rows, above: Option<&Under>) -> Result<Under> {
        let turn = self.turn;
        self.turn = (turn + 1) % geometry::BANDS as usize;
        let (division, row) = (&self.division, self.row);
        let op = division.op;
        let band = Under { turn, rows };
        let rows = &band.rows;
        for (i, part) in division.inputs.iter().take(op.past.len()).enumerate() {
            let Some(part) = *part else { continue };
            let row = self.far_row;
            for r in rows.shared(above).end..rows.seen.end {
                self.memory.write(division.past_row(&band, part, r), row, Row::Input(i, r));
            }
            for r in rows.shared(above) {
                let above = above.expect("somebody shares these");
                self.memory.read(division.past_row(above, part, r), Row::Input(i, r));
                self.memory.write(division.past_row(&band, part, r), row, Row::Input(i, r));
            }
        }
        for (i, at) in op.fresh.iter().enumerate() {
            let (input, part) = (op.past.len() + i, division.fresh(turn, i));
            let place = |r: u64| part + (r - rows.seen.start) * row;
            match *at {
                At::Device(frame) => {
                    for r in rows.shared(above).end..rows.seen.end {
                        self.memory.read(frame.0 + r * row, Row::Raw(i, r));
                        self.memory.write(place(r), row, Row::Input(input, r));
                    }
                    for r in rows.shared(above) {
                        let above = above.expect("somebody shares these");
                        self.memory.read(division.fresh_row(above, i, r), Row::Input(input, r));
                        self.memory.write(place(r), row, Row::Input(input, r));
                    }
                }
                At::Host { .. } => {
                    rows.seen.clone().for_each(|r| self.memory.write(place(r), row, Row::Input(input, r)))
                }
                At::Anew { .. } => {
                    let whole = |r: u64| r.is_multiple_of(geometry::LEAD) || r == op.input.height;
                    assert!(whole(rows.made.start) && whole(rows.made.end), "{:?}", rows.made);
                    if let Some(above) = above {
                        for r in rows.seen.start..rows.made.start {
                            let from = division.fresh(above.turn, i) + (r - above.rows.seen.start) * row;
                            self.memory.read(from, Row::Input(input, r));
                            self.memory.write(place(r), row, Row::Input(input, r));
                        }
                    }
                    rows.made.clone().for_each(|r| self.memory.write(place(r), row, Row::Input(input, r)));
                }
            }
        }
        for (i, (frame, part)) in op.frames.iter().zip(&division.shortcuts).enumerate() {
            if let (Some((At::Host { .. }, _)), Some(part)) = (frame.shortcut, part) {
                for r in rows.own.clone() {
                    let to = division.place(turn) + part + (r - rows.own.start) * self.side_row;
                    self.memory.write(to, self.side_row, Row::Side(i, r));
                }
            }
        }
        Ok(band)
    }

    fn compute(&mut self, band: &Under) -> Result<()> {
        let (division, Under { turn, rows }) = (&self.division, band);
        let (op, place) = (division.op, division.place(*turn));
        let (frames, parted) = (division.in_band(band), division.parted(band));
        for (i, (banded, frame)) in op.frames.iter().zip(&frames).enumerate() {
            if let (Some((At::Anew { .. }, _)), Some(term)) = (banded.shortcut, frame.terms.last()) {
                for r in rows.own.clone() {
                    self.memory.write(
                        term.frame.0 + (r - rows.own.start) * self.side_row,
                        self.side_row,
                        Row::Side(i, r),
                    );
                }
            }
        }
        for (i, (banded, frame)) in op.frames.iter().zip(&frames).enumerate() {
            for (term, (input, _)) in frame.terms.iter().zip(&banded.terms) {
                for r in rows.own.clone().flat_map(|r| r.saturating_sub(1)..(r + 2).min(op.input.height)) {
                    assert!(rows.seen.contains(&r));
                    let at = |frame: Frame, row: u64| frame.0 + (r - rows.seen.start) * row;
                    match parted.iter().find(|(near, _)| *near == term.frame) {
                        Some((near, far)) => {
                            self.memory.read(at(*near, self.near_row), Row::Input(*input, r));
                            self.memory.read(at(*far, self.far_row), Row::Input(*input, r));
                        }
                        None => self.memory.read(at(term.frame, self.row), Row::Input(*input, r)),
                    }
                }
            }
            if let (Some(_), Some(term)) = (banded.shortcut, frame.terms.last()) {
                let read =
                    |r: u64| self.memory.read(term.frame.0 + (r - rows.own.start) * self.side_row, Row::Side(i, r));
                rows.own.clone().for_each(read);
            }
        }
        for (i, (frame, part)) in frames.iter().zip(&division.outs).enumerate() {
            for r in rows.own.clone() {
                let to = frame.out.0.wrapping_add(r * self.row);
                assert!(part.is_none() || (place..place + self.place_bytes - self.row + 1).contains(&to));
                self.memory.write(to, self.row, Row::Out(i, r));
            }
        }
        Ok(())
    }

    fn remember(&mut self, band: &Under, _: Option<&Under>) -> Result<()> {
        for (i, to) in self.division.op.keep {
            let Some(to) = to.near else { continue };
            for r in band.rows.own.clone() {
                let input = Row::Input(self.division.op.past.len() + i, r);
                self.memory.read(self.division.fresh_row(band, *i, r), input);
                let bytes = self.division.near_row(to, 1) - to.0;
                self.memory.write(self.division.near_row(to, r), bytes, Row::Kept(*i, r));
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

fn check(height: u64, count: usize, past: Past, fresh: Fresh, out_away: bool, room: u64) {
    let precision = Precision::Fp16;
    let input = FrameShape::new(height, 70, 16);
    let side_channels = if fresh == Fresh::Own { Some(32) } else { None };
    let layout = layout(side_channels);
    let row = precision.row_bytes(input);
    let side_row = precision.row_bytes(input.with_channels(32));
    let mut memory = Memory::default();
    let mut whole = Frames { end: 0, bytes: height * side_row };
    let mut put = |memory: &mut Memory, of: &dyn Fn(u64) -> Row, bytes: u64| {
        let frame = whole.next();
        (0..height).for_each(|r| memory.write(frame.0 + r * bytes, bytes, of(r)));
        frame
    };
    let elsewhere = |i: usize| HostFrame(i as u64 * 1000);
    let columns = match past {
        Past::Device | Past::Again => Columns::all_near(input.width),
        Past::Host | Past::None => Columns::new(input.width, 0),
        Past::Parted => Columns::new(input.width, input.width / 2),
    };
    assert_eq!(columns.is_parted(), past == Past::Parted);
    let [near_row, far_row] = [columns.near(), columns.far()]
        .map(|columns| precision.row_bytes(FrameShape { width: columns.count() as u64, ..input }));
    let kept: Vec<PastFrame> = (0..2)
        .map(|i| PastAt {
            near: (near_row > 0).then(|| put(&mut memory, &|r| Row::Input(i, r), near_row)),
            far: (far_row > 0).then(|| elsewhere(i)),
        })
        .collect();
    let past_frames = if matches!(past, Past::None | Past::Again) { &[][..] } else { &kept[..] };
    let again = if past == Past::Again { 2 } else { 0 };
    let inputs: Vec<FrameAt> = (0..again + count)
        .map(|i| match fresh {
            _ if i < again => At::Anew { index: i, statistics: Frame(0) },
            Fresh::Host => At::Host { frame: elsewhere(9 + i), statistics: Frame(0) },
            Fresh::Anew if i > again => At::Anew { index: i - 1, statistics: Frame(0) },
            _ => At::Device(put(&mut memory, &|r| Row::Raw(i, r), row)),
        })
        .collect();
    let frames: Vec<BandedFrame> = (0..count)
        .map(|i| {
            let shortcut = side_channels.map(|_| match i % 3 {
                0 => At::Device(put(&mut memory, &|r| Row::Side(i, r), side_row)),
                1 => At::Host { frame: elsewhere(20 + i), statistics: Frame(0) },
                _ => At::Anew { index: i, statistics: Frame(0) },
            });
            let out = match (fresh, inputs[again + i]) {
                (Fresh::Own, own) => own,
                _ if out_away => At::Host { frame: elsewhere(30 + i), statistics: Frame(0) },
                _ => At::Device(put(&mut memory, &|r| Row::Out(usize::MAX, r), row)),
            };
            let input = past_frames.len() + again + i;
            let terms = (input.saturating_sub(2)..=input).zip(0u8..).collect();
            BandedFrame { terms, shortcut: shortcut.map(|at| (at, 3)), bias: 0, residual: None, out }
        })
        .collect();
    let keep = (inputs.len().saturating_sub(2)..inputs.len()).zip(kept.iter().copied());
    let keep: Vec<(usize, PastFrame)> = keep.collect();
    let mut op = BandedOp {
        weights: &(),
        layout: &layout,
        input,
        past: past_frames,
        fresh: &inputs,
        keep: &keep,
        columns,
        keep_statistics: &[],
        frames: &frames,
        anew: None,
        statistics: false,
        scratch: 0,
        bands: (0, 0),
    };
    let planned = bytes(precision, &layout, input, op.frames_in_band()).expect("groups of four channels");
    op.bands = (whole.end, planned * room);
    let division = Division::new(precision, &op).unwrap();
    let place_bytes = planned * room / geometry::BANDS;
    let rows = division.parts.rows;
    let mut run = Run { division, memory: memory.clone(), row, near_row, far_row, side_row, place_bytes, turn: 0 };
    for lazily in [false, true] {
        (run.memory, run.turn) = (memory.clone(), 0);
        match lazily {
            false => go_through(height, rows, &mut run).unwrap(),
            true => go_through_lazily(height, rows, &mut run),
        }
        for (i, to) in op.keep {
            if let Some(to) = to.near {
                (0..height).for_each(|r| run.memory.read(to.0 + r * near_row, Row::Kept(*i, r)));
            }
        }
        for (i, frame) in op.frames.iter().enumerate() {
            if let At::Device(out) = frame.out {
                (0..height).for_each(|r| run.memory.read(out.0 + r * row, Row::Out(i, r)));
            }
        }
    }
}

/// Streams may be late: each band is fetched when the one above it has been computed, though nothing has to wait for that.
fn go_through_lazily(height: u64, rows: u64, turns: &mut impl Turns) {
    let mut above: Option<Under> = None;
    for top in (0..height).step_by(rows as usize) {
        let rows = Rows::new(top, rows, height, above.as_ref().map(|above| &above.rows));
        let band = turns.fetch(rows, above.as_ref()).unwrap();
        turns.compute(&band).unwrap();
        if let Some(above) = &above {
            turns.remember(above, Some(&band)).unwrap();
        }
        above = Some(band);
    }
    above.iter().for_each(|last| turns.remember(last, None).unwrap());
}

#[test]
fn every_row_is_where_a_band_reads_it() {
    for height in [2, 16, 18, 52, 100, 160, 262] {
        for count in [1, 2, 3, 5] {
            for past in [Past::None, Past::Host, Past::Device, Past::Parted, Past::Again] {
                for fresh in [Fresh::Device, Fresh::Own, Fresh::Host, Fresh::Anew] {
                    for (out_away, room) in [(false, 1), (true, 1), (false, 3)] {
                        check(height, count, past, fresh, out_away, room);
                    }
                }
            }
        }
    }
}

#[test]
fn bands_that_were_not_planned_are_refused() {
    let layout = layout(None);
    let input = FrameShape::new(64, 64, 16);
    let (fresh, out) = ([At::Device(Frame(0))], At::Device(Frame(1 << 20)));
    let frames = [BandedFrame { terms: vec![(0, 0)], shortcut: None, bias: 0, residual: None, out }];
    let mut op = BandedOp {
        weights: &(),
        layout: &layout,
        input,
        past: &[],
        fresh: &fresh,
        keep: &[],
        columns: Columns::new(input.width, 0),
        keep_statistics: &[],
        frames: &frames,
        anew: None,
        statistics: false,
        scratch: 0,
        bands: (2 << 20, 0),
    };
    let planned = bytes(Precision::Fp16, &layout, input, op.frames_in_band()).unwrap();
    op.bands.1 = planned;
    assert!(Division::new(Precision::Fp16, &op).is_ok());
    op.bands.1 = planned / 4;
    assert!(Division::new(Precision::Fp16, &op).is_err());
}
