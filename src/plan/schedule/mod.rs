//! The order of operations for a whole job: every clip of a batch, every tile of a clip, to the last frame.
//!
//! Owns work items and the queue of operations. Knows the policy; does not choose it.

mod emit;
mod emit_banded;
mod layer_cache;
mod sink;
mod snapshot;
#[cfg(test)]
mod tests;
mod weights;
mod work_item;

pub use snapshot::PersistedSlot;
pub use work_item::is_periodic;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use self::sink::Sink;
use self::work_item::WorkItem;
use super::arena::{Arena, Arenas, Slot, SlotKind, Slots};
use super::cost::{FrameSizes, Target};
use super::spec::{ItemOrder, ScheduleSpec};
use crate::ir::{BlendOp, FrameShape, Op, StoreOp};

/// What a schedule waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// Nothing: an operation is at the front of the queue.
    No,
    Input,
    End,
}

/// A frame of the whole image that tiles are blended into.
#[derive(Debug)]
struct Canvas {
    slot: Slot,
    tiles: usize,
}

#[derive(Debug)]
pub struct Schedule {
    spec: ScheduleSpec,
    canvas_bytes: u64,
    arenas: Arenas,
    items: Vec<WorkItem>,
    current: usize,
    /// Whether a host pushes frames through [`Schedule::load`], or they are loaded as needed.
    pushed: bool,
    queue: VecDeque<Op<Slots>>,
    canvases: BTreeMap<(u64, u64), Canvas>,
    /// Finished frames of each clip of a stream. They leave when every clip of the batch has one.
    outbox: Vec<VecDeque<Slot>>,
    stored: u64,
    finished: Vec<(u64, Slot)>,
}

impl Schedule {
    /// `frames`: where the input ends, or `None` for a stream.
    pub fn new(spec: ScheduleSpec, frames: Option<u64>, arenas: Arenas, target: &Target) -> Schedule {
        let mut known: Vec<Arc<FrameSizes>> = Vec::new();
        let mut sizes_of = |input: FrameShape| {
            let same = known.iter().find(|sizes| sizes.input == input).cloned();
            same.unwrap_or_else(|| {
                known.push(Arc::new(FrameSizes::new(&spec.network, &spec.policy, input, target)));
                Arc::clone(known.last().expect("just pushed"))
            })
        };
        let mut items = Vec::new();
        for batch in 0..spec.batch {
            for _ in 0..spec.tiles() {
                let item = items.len();
                let sizes = sizes_of(spec.regions(spec.tile_of(item)).0.shape);
                items.push(WorkItem::new(&spec, sizes, frames, item, batch));
            }
        }
        let first = spec.cone.range().first;
        let mut schedule = Schedule {
            canvas_bytes: target.frame_bytes(spec.network.output_shape(spec.input)),
            outbox: (0..spec.batch).map(|_| VecDeque::new()).collect(),
            spec,
            arenas,
            items,
            current: 0,
            pushed: frames.is_none(),
            queue: VecDeque::new(),
            canvases: BTreeMap::new(),
            stored: first,
            finished: Vec::new(),
        };
        if let Some(frames) = frames {
            schedule.set_total(frames);
        }
        schedule
    }

    pub fn spec(&self) -> &ScheduleSpec {
        &self.spec
    }

    pub fn arenas(&self) -> &Arenas {
        &self.arenas
    }

    /// Input frames that a push would take now.
    pub fn room(&self) -> u64 {
        if self.queue.is_empty() { self.items[0].room() } else { 0 }
    }

    /// The next input frame to load.
    pub fn loaded(&self) -> u64 {
        self.items[0].loaded()
    }

    /// Loads the next frame of every clip of the batch.
    pub fn load(&mut self) {
        for item in &mut self.items {
            item.load(&mut Sink { arenas: &mut self.arenas, ops: &mut self.queue });
        }
    }

    /// Sets where the input ends.
    pub fn set_total(&mut self, frames: u64) {
        for item in &mut self.items {
            item.set_total(frames, &mut self.arenas);
        }
        self.arenas.each(|arena| arena.set_partial(self.items[0].is_partial()));
    }

    /// The next operation. It stays in front until [`Schedule::done`], so an interrupted operation runs again.
    pub fn front(&self) -> Option<&Op<Slots>> {
        self.queue.front()
    }

    pub fn done(&mut self) {
        self.queue.pop_front();
    }

    /// Puts an operation in front, if there is one.
    pub fn wait(&mut self) -> Wait {
        while self.queue.is_empty() {
            let item = &mut self.items[self.current];
            let to = &mut Sink { arenas: &mut self.arenas, ops: &mut self.queue };
            if item.advance(!self.pushed, to, &mut self.finished) {
                self.hand_over();
            } else if !self.next_item() {
                return if self.items.iter().all(WorkItem::is_complete) { Wait::End } else { Wait::Input };
            }
        }
        Wait::No
    }

    /// Moves on from a work item whose slice is done; `false` if no item can go on.
    fn next_item(&mut self) -> bool {
        match self.spec.order {
            ItemOrder::ItemByItem if !self.items[self.current].is_complete() => {
                let blocked = self.items[self.current].room() > 0;
                if !blocked {
                    self.items[self.current].next_slice();
                    self.arenas.each(|arena| arena.next_slice(self.items[self.current].is_partial()));
                }
                !blocked
            }
            ItemOrder::ItemByItem => {
                let more = self.current + 1 < self.items.len();
                if more {
                    self.items[self.current].clear(&mut self.arenas);
                    self.current += 1;
                    self.arenas.each(|arena| arena.first_slice(self.items[self.current].is_partial()));
                }
                more
            }
            ItemOrder::SliceBySlice => {
                self.current += 1;
                self.arenas.each(Arena::next_item);
                if self.current < self.items.len() {
                    return true;
                }
                self.current = 0;
                // Between slices all items have loaded the same number of frames.
                let (blocked, complete) = (self.items[0].room() > 0, self.items[0].is_complete());
                if !blocked && !complete {
                    self.items.iter_mut().for_each(WorkItem::next_slice);
                    self.arenas.each(|arena| arena.next_slice(self.items[0].is_partial()));
                }
                !blocked && !complete
            }
        }
    }

    /// Blends or stores the frames that a work item has finished.
    fn hand_over(&mut self) {
        let (item, tiles) = (self.current, self.spec.tiles());
        let batch = (item / tiles) as u64;
        for (frame, slot) in std::mem::take(&mut self.finished) {
            match self.spec.grid {
                Some(_) => self.blend(item, batch, frame, slot),
                None => self.finish(batch, frame, slot),
            }
        }
    }

    fn blend(&mut self, item: usize, batch: u64, frame: u64, from: Slot) {
        let (arena, bytes) = (&mut self.arenas.device, self.canvas_bytes);
        let canvas = || Canvas { slot: arena.take(bytes, SlotKind::Pooled), tiles: 0 };
        let canvas = self.canvases.entry((batch, frame)).or_insert_with(canvas);
        let into = canvas.slot;
        self.queue.push_back(Op::Blend(BlendOp { item, from, into, clear: canvas.tiles == 0 }));
        canvas.tiles += 1;
        let complete = canvas.tiles == self.spec.tiles();
        self.arenas.device.drop(from);
        if complete {
            self.canvases.remove(&(batch, frame));
            self.finish(batch, frame, into);
        }
    }

    /// A whole frame is finished.
    fn finish(&mut self, batch: u64, frame: u64, from: Slot) {
        if !self.pushed {
            self.queue.push_back(Op::Store(StoreOp { batch, frame, from }));
            self.arenas.device.drop(from);
            return;
        }
        self.outbox[batch as usize].push_back(from);
        while self.outbox.iter().all(|frames| !frames.is_empty()) {
            for (batch, frames) in (0..).zip(&mut self.outbox) {
                let from = frames.pop_front().expect("checked above");
                self.queue.push_back(Op::Store(StoreOp { batch, frame: self.stored, from }));
                self.arenas.device.drop(from);
            }
            self.stored += 1;
        }
    }

    /// Goes through the schedule without running it: for a stream of `frames`, and at most the first `slices`. Shows
    /// each operation with the number of its slice. Returns the arenas, which tell the memory.
    pub fn rehearse(
        mut self,
        frames: Option<u64>,
        slices: usize,
        target: &Target,
        mut seen: impl FnMut(usize, &Op<Slots>),
    ) -> Arenas {
        loop {
            match self.wait() {
                _ if self.arenas.device.slices() > slices || target.is_cancelled() => return self.arenas,
                Wait::No => {
                    let op = self.queue.pop_front().expect("nothing to wait for");
                    seen(self.arenas.device.slices(), &op);
                }
                Wait::Input if self.pushed => match frames {
                    Some(total) if self.loaded() == total => self.set_total(total),
                    _ => {
                        for _ in 0..self.room() {
                            if Some(self.loaded()) != frames {
                                self.load();
                            }
                        }
                    }
                },
                Wait::Input | Wait::End => return self.arenas,
            }
        }
    }
}
