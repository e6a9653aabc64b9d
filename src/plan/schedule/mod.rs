//! The order of operations for a whole job: every clip of a batch, every tile of a clip, to the last frame.
//!
//! Owns work items and the queue of operations. Knows the policy; does not choose it.

mod around;
mod emit;
mod emit_banded;
mod item_facts;
mod layer_cache;
mod sink;
#[cfg(test)]
mod tests;
mod weights;
mod work_item;

pub use work_item::is_periodic;

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use self::sink::Sink;
use self::work_item::WorkItem;
use super::arena::{Arena, Arenas, Slot, SlotKind, Slots};
use super::cost::{FrameSizes, Target};
use super::repeats::{ItemPlace, Purpose, work_items};
use super::spec::{ItemOrder, ScheduleSpec};
use crate::ir::{BlendOp, FrameShape, Op, StoreOp};

/// What comes next in a schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// An operation, which is at the front of the queue.
    Op,
    /// Input has to be loaded first.
    Input,
    End,
}

/// A frame of the whole image that tiles are blended into.
#[derive(Debug, Clone)]
struct Canvas {
    slot: Slot,
    tiles: usize,
}

#[derive(Debug, Clone)]
pub struct Schedule {
    spec: ScheduleSpec,
    canvas_bytes: u64,
    to: Sink,
    items: Vec<WorkItem>,
    current: usize,
    /// Whether the current work item's turn has begun.
    in_turn: bool,
    /// Whether a host pushes frames through [`Schedule::load`], or they are loaded as needed.
    pushed: bool,
    canvases: BTreeMap<(u64, u64), Canvas>,
    /// Finished frames of each clip of a stream. They leave when every clip of the batch has one.
    outbox: Vec<VecDeque<StoreOp<Slots>>>,
    /// Frames of the current work item, with their numbers, until they are stored or blended.
    finished: Vec<(u64, Slot)>,
}

impl Schedule {
    pub fn new(purpose: Purpose, spec: ScheduleSpec, arenas: Arenas, target: &Target) -> Schedule {
        let largest = spec.largest_tile();
        let mut known: Vec<Arc<FrameSizes>> = Vec::new();
        let mut shared_sizes = |input: FrameShape| {
            let same = known.iter().find(|sizes| sizes.input == input).cloned();
            same.unwrap_or_else(|| {
                // Work items that run one after the other share slots; otherwise each size of tile would have its own.
                let slots = if spec.is_interleaved() { input } else { largest };
                known.push(Arc::new(FrameSizes::new(&spec, input, slots, target)));
                Arc::clone(&known[known.len() - 1])
            })
        };
        let items = work_items(purpose, &spec).into_iter().map(|place| {
            let sizes = shared_sizes(spec.input_region(spec.tile_of(place.item)).shape);
            WorkItem::new(&spec, sizes, place, purpose)
        });
        let items: Vec<WorkItem> = items.collect();
        let (clips, end) = (items.last().map_or(0, |last| last.place.clip + 1), spec.end);
        let mut schedule = Schedule {
            canvas_bytes: target.frame_bytes(spec.network.output_shape(spec.input)),
            outbox: (0..clips).map(|_| VecDeque::new()).collect(),
            spec,
            to: Sink { arenas, ops: VecDeque::new() },
            items,
            current: 0,
            in_turn: false,
            pushed: end.is_none(),
            canvases: BTreeMap::new(),
            finished: Vec::new(),
        };
        end.into_iter().for_each(|end| schedule.set_total(end));
        schedule
    }

    pub fn spec(&self) -> &ScheduleSpec {
        &self.spec
    }

    pub fn arenas(&self) -> &Arenas {
        &self.to.arenas
    }

    /// Input frames that a push would take now.
    pub fn room(&self) -> u64 {
        if self.to.ops.is_empty() { self.items[0].room() } else { 0 }
    }

    /// The next input frame to load.
    pub fn loaded(&self) -> u64 {
        self.items[0].loaded()
    }

    /// Loads the next frame of every work item.
    pub fn load(&mut self) {
        for item in &mut self.items {
            self.to.arenas.each(Arena::begin_group);
            item.load(&mut self.to);
            self.to.arenas.each(|arena| arena.end_group(item.place.items - 1));
        }
    }

    /// Sets where the input ends.
    pub fn set_total(&mut self, frames: u64) {
        for item in &mut self.items {
            item.set_total(frames, &mut self.to.arenas);
        }
        self.to.arenas.each(|arena| arena.set_partial(self.items[0].is_partial()));
    }

    /// The next operation. It stays in front until [`Schedule::done`], so an interrupted operation runs again.
    pub fn front(&self) -> Option<&Op<Slots>> {
        self.to.ops.front()
    }

    pub fn done(&mut self) {
        self.to.ops.pop_front();
    }

    /// Puts an operation in front, if there is one.
    pub fn prepare_next(&mut self) -> Next {
        while self.to.ops.is_empty() {
            self.begin_turn();
            let item = &mut self.items[self.current];
            if item.advance(!self.pushed, &mut self.to, &mut self.finished) {
                self.hand_over();
            } else if !self.next_item() {
                return if self.items.iter().all(WorkItem::is_complete) { Next::End } else { Next::Input };
            }
        }
        Next::Op
    }

    fn begin_turn(&mut self) {
        if !std::mem::replace(&mut self.in_turn, true) {
            (0..self.items[self.current].place.begins).for_each(|_| self.to.arenas.each(Arena::begin_group));
        }
    }

    fn end_turn(&mut self) {
        if std::mem::replace(&mut self.in_turn, false) {
            let ends = self.items[self.current].place.ends;
            ends.into_iter().flatten().for_each(|times| self.to.arenas.each(|arena| arena.end_group(times)));
        }
    }

    /// Moves on from a work item whose slice is done; `false` if no item can go on.
    fn next_item(&mut self) -> bool {
        match self.spec.order {
            ItemOrder::ItemByItem if !self.items[self.current].is_complete() => {
                self.next_slice(self.current..self.current + 1)
            }
            ItemOrder::ItemByItem => {
                let more = self.current + 1 < self.items.len();
                if more {
                    self.items[self.current].clear(&mut self.to.arenas);
                    self.end_turn();
                    self.current += 1;
                    self.to.arenas.each(|arena| arena.begin_slice(0, self.items[self.current].is_partial()));
                }
                more
            }
            ItemOrder::SliceBySlice => {
                if self.items[self.current].is_complete() {
                    // Nothing packed may outlive the turn.
                    self.items[self.current].clear(&mut self.to.arenas);
                }
                self.end_turn();
                self.current += 1;
                self.to.arenas.each(Arena::next_item);
                if self.current < self.items.len() {
                    return true;
                }
                self.current = 0;
                self.next_slice(0..self.items.len())
            }
        }
    }

    /// Begins the next slice of work items, which have loaded the same number of frames; `false` if there is none yet.
    fn next_slice(&mut self, items: Range<usize>) -> bool {
        let items = &mut self.items[items];
        if items[0].room() > 0 || items[0].is_complete() {
            return false;
        }
        items.iter_mut().for_each(WorkItem::next_slice);
        let partial = items[0].is_partial();
        self.to.arenas.each(|arena| arena.begin_slice(arena.slices(), partial));
        true
    }

    /// Blends or stores the frames that a work item has finished.
    fn hand_over(&mut self) {
        let place = self.items[self.current].place;
        for (frame, slot) in std::mem::take(&mut self.finished) {
            match self.spec.grid {
                Some(_) => self.blend(place, frame, slot),
                None => self.finish(place, frame, slot),
            }
        }
    }

    fn blend(&mut self, place: ItemPlace, frame: u64, from: Slot) {
        let (arena, bytes) = (&mut self.to.arenas.device, self.canvas_bytes);
        let canvas = || Canvas { slot: arena.take(bytes, SlotKind::Pooled), tiles: 0 };
        let canvas = self.canvases.entry((place.batch, frame)).or_insert_with(canvas);
        let into = canvas.slot;
        self.to.ops.push_back(Op::Blend(BlendOp { item: place.item, from, into, clear: canvas.tiles == 0 }));
        canvas.tiles += 1;
        let complete = canvas.tiles == self.items.len() / self.outbox.len();
        self.to.arenas.device.drop(from);
        if complete {
            self.canvases.remove(&(place.batch, frame));
            self.finish(place, frame, into);
        }
    }

    /// A whole frame is finished.
    fn finish(&mut self, place: ItemPlace, frame: u64, from: Slot) {
        let store = StoreOp { batch: place.batch, frame, from };
        if !self.pushed {
            self.to.ops.push_back(Op::Store(store));
            self.to.arenas.device.drop(from);
            return;
        }
        self.outbox[place.clip].push_back(store);
        let tiles = self.items.len() / self.outbox.len();
        while self.outbox.iter().all(|stores| !stores.is_empty()) {
            for (clip, stores) in self.outbox.iter_mut().enumerate() {
                let store = stores.pop_front().expect("checked above");
                self.to.arenas.device.drop_with(store.from, self.items[clip * tiles].place.clips - 1);
                self.to.ops.push_back(Op::Store(store));
            }
        }
    }

    /// Goes through the schedule without running it: for a stream of `frames`, and at most the first `slices`. Shows
    /// each operation with the number of its slice. Returns the arenas, which count the memory.
    pub fn rehearse(
        mut self,
        frames: Option<u64>,
        slices: Option<usize>,
        target: &Target,
        mut seen: impl FnMut(usize, &Op<Slots>),
    ) -> Arenas {
        self.walk(frames, |schedule, op| {
            let slice = schedule.to.arenas.device.slices();
            let goes_on = slices.is_none_or(|most| slice <= most) && !target.is_cancelled();
            op.filter(|_| goes_on).into_iter().for_each(|op| seen(slice, op));
            goes_on
        });
        self.to.arenas
    }

    /// Takes the operations of a stream without running them, up to the slice that input ending at frame `end` ends in.
    pub fn follow_stream(&mut self, end: u64, target: &Target) {
        if self.pushed {
            self.walk(None, |schedule, op| {
                !target.is_cancelled() && (op.is_some() || schedule.loaded() + schedule.room() <= end)
            });
        }
    }

    /// Gives a stream the input of its slice, which ends at frame `end` if that is known.
    fn feed(&mut self, end: Option<u64>) {
        if end == Some(self.loaded()) {
            self.set_total(self.loaded());
        } else {
            let room = end.map_or(self.room(), |end| self.room().min(end - self.loaded()));
            (0..room).for_each(|_| self.load());
        }
    }

    /// Takes every operation without running it, until `step` returns `false`. A stream is fed up to frame `end`, if
    /// that is known; before that `step` sees no operation. Returns whether every operation was taken.
    pub fn walk(&mut self, end: Option<u64>, mut step: impl FnMut(&Schedule, Option<&Op<Slots>>) -> bool) -> bool {
        loop {
            let next = self.prepare_next();
            let op = self.to.ops.pop_front();
            match next {
                Next::Op if step(self, op.as_ref()) => {}
                Next::Input if self.pushed && step(self, None) => self.feed(end),
                Next::Op => return false,
                _ => return true,
            }
        }
    }
}
