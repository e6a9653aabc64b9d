//! The order of work for a whole job: every clip of a batch, every tile of a clip, to the last frame.

mod snapshot;
#[cfg(test)]
mod tests;

pub use snapshot::Remembered;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use super::Costs;
use super::clip::{Clip, Schedule, Shapes};
use super::cut::Cut;
use super::slots::{Life, Packed, Pools, Slot};
use super::step::Step;
use super::tiles::Grid;
use crate::model::{Direction, Network};
use crate::tensor::FrameShape;

/// Which lane goes next. A lane is one tile of one clip; without tiles, a clip.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// One lane runs to its end before the next begins: only one lane's history exists at a time, but with tiles every
    /// frame of the clip waits for its last tile.
    LaneByLane,
    /// All lanes go through a slice before any begins the next: frames leave slice by slice, but every lane keeps its
    /// history.
    SliceBySlice,
}

/// Everything that decides the order of work, but for the number of frames.
#[derive(Debug, Clone)]
pub struct Layout {
    pub network: Arc<Network>,
    pub batch: u64,
    /// The whole input frame, in the network's units: no padding left to do.
    pub input: FrameShape,
    pub cut: Arc<Cut>,
    pub grid: Option<Arc<Grid>>,
    pub order: Order,
}

/// The part of the image a lane works on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    pub top: u64,
    pub left: u64,
    pub shape: FrameShape,
}

impl Layout {
    /// Rows and columns of input and of output that a tile covers; `None` is the whole image.
    pub fn regions(&self, tile: Option<usize>) -> (Region, Region) {
        let output = self.network.output_shape(self.input);
        let (Some(grid), Some(tile)) = (&self.grid, tile) else {
            let whole = |shape| Region { top: 0, left: 0, shape };
            return (whole(self.input), whole(output));
        };
        let (rows, columns) = grid.spans(tile);
        let scale = self.network.config.spatial_scale();
        let region = |scale: u64, channels| Region {
            top: rows.start * scale,
            left: columns.start * scale,
            shape: FrameShape::new(rows.len() * scale, columns.len() * scale, channels),
        };
        let (inward, outward) = match self.network.direction {
            Direction::Encode => (scale, 1),
            Direction::Decode => (1, scale),
        };
        (region(inward, self.input.channels), region(outward, output.channels))
    }

    /// Whether clips or tiles take turns within a slice.
    pub(super) fn is_shared(&self) -> bool {
        self.order == Order::SliceBySlice && self.tiles() as u64 * self.batch > 1
    }

    fn tiles(&self) -> usize {
        self.grid.as_ref().map_or(1, |grid| grid.tiles())
    }

    /// Which tile of its clip a lane is.
    pub fn tile_of(&self, lane: usize) -> Option<usize> {
        self.grid.as_ref().map(|_| lane % self.tiles())
    }
}

/// What a job waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// Nothing: a step is at the front of the queue.
    No,
    Input,
    End,
}

/// A frame of the whole image that tiles are being blended into.
#[derive(Debug)]
struct Canvas {
    slot: Slot,
    tiles: usize,
}

#[derive(Debug)]
pub struct Job {
    layout: Layout,
    canvas_bytes: u64,
    pools: Pools,
    lanes: Vec<Clip>,
    current: usize,
    /// Whether frames are brought by [`Job::load`] as a host pushes them, or taken as they are needed.
    pushed: bool,
    queue: VecDeque<Step>,
    canvases: BTreeMap<(u64, u64), Canvas>,
    /// Finished frames of each clip of a pushed job, which leave when every clip of the batch has them.
    outbox: Vec<VecDeque<Slot>>,
    stored: u64,
    finished: Vec<(u64, Slot)>,
}

/// Whether so many frames, or a stream, are more slices than need to be rehearsed.
pub(super) fn goes_on(frames: Option<u64>, slice: u64) -> bool {
    frames.is_none_or(|frames| frames > 1 + Packed::TELLING_SLICES as u64 * slice)
}

impl Job {
    /// `frames`: how many go in, or `None` for a stream.
    pub fn new(layout: Layout, frames: Option<u64>, pools: Pools, costs: &dyn Costs) -> Job {
        let mut shapes: Vec<Arc<Shapes>> = Vec::new();
        let mut shapes_of = |input: FrameShape| {
            let known = shapes.iter().find(|s| s.input() == input).cloned();
            known.unwrap_or_else(|| {
                shapes.push(Arc::new(Shapes::new(&layout.network, &layout.cut, input, costs)));
                Arc::clone(shapes.last().expect("just pushed"))
            })
        };
        let mut lanes = Vec::new();
        for batch in 0..layout.batch {
            for _ in 0..layout.tiles() {
                let lane = lanes.len();
                let shapes = shapes_of(layout.regions(layout.tile_of(lane)).0.shape);
                lanes.push(Clip::new(&layout, shapes, frames, lane, batch));
            }
        }
        let mut job = Job {
            canvas_bytes: costs.frame_bytes(layout.network.output_shape(layout.input)),
            outbox: (0..layout.batch).map(|_| VecDeque::new()).collect(),
            layout,
            pools,
            lanes,
            current: 0,
            pushed: frames.is_none(),
            queue: VecDeque::new(),
            canvases: BTreeMap::new(),
            stored: 0,
            finished: Vec::new(),
        };
        if let Some(frames) = frames {
            job.set_total(frames);
        }
        job
    }

    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    pub fn pools(&self) -> &Pools {
        &self.pools
    }

    /// Input frames that a push would be taken of now.
    pub fn room(&self) -> u64 {
        if self.queue.is_empty() { self.lanes[0].room() } else { 0 }
    }

    /// Input frames taken so far.
    pub fn loaded(&self) -> u64 {
        self.lanes[0].loaded()
    }

    /// Takes the next frame of every clip of the batch.
    pub fn load(&mut self) {
        for lane in &mut self.lanes {
            lane.load(&mut Schedule { pools: &mut self.pools, steps: &mut self.queue });
        }
    }

    /// Says how many frames go in.
    pub fn set_total(&mut self, frames: u64) {
        for lane in &mut self.lanes {
            lane.set_total(frames, &mut self.pools);
        }
        self.pools.set_partial(self.lanes[0].is_partial());
    }

    /// The next step, which stays in front until [`Job::done`] takes it away; so a step that was interrupted is met
    /// again.
    pub fn front(&mut self) -> Option<&Step> {
        self.queue.front()
    }

    pub fn done(&mut self) {
        self.queue.pop_front();
    }

    /// Sees to it that there is a step in front.
    pub fn wait(&mut self) -> Wait {
        while self.queue.is_empty() {
            let lane = &mut self.lanes[self.current];
            let to = &mut Schedule { pools: &mut self.pools, steps: &mut self.queue };
            if lane.advance(!self.pushed, to, &mut self.finished) {
                self.hand_over();
            } else if !self.next_lane() {
                return if self.lanes.iter().all(Clip::complete) { Wait::End } else { Wait::Input };
            }
        }
        Wait::No
    }

    /// Moves on from a lane that has nothing left to do in its slice; `false` when no lane has.
    fn next_lane(&mut self) -> bool {
        match self.layout.order {
            Order::LaneByLane if !self.lanes[self.current].complete() => {
                let blocked = self.lanes[self.current].room() > 0;
                if !blocked {
                    self.lanes[self.current].next_slice();
                    self.pools.next_slice(self.lanes[self.current].is_partial());
                }
                !blocked
            }
            Order::LaneByLane => {
                let more = self.current + 1 < self.lanes.len();
                if more {
                    self.lanes[self.current].forget(&mut self.pools);
                    self.current += 1;
                    self.pools.first_slice(self.lanes[self.current].is_partial());
                }
                more
            }
            Order::SliceBySlice => {
                self.current += 1;
                self.pools.next_turn();
                if self.current < self.lanes.len() {
                    return true;
                }
                self.current = 0;
                // Between slices all lanes have taken the same number of frames.
                let (blocked, complete) = (self.lanes[0].room() > 0, self.lanes[0].complete());
                if !blocked && !complete {
                    self.lanes.iter_mut().for_each(Clip::next_slice);
                    self.pools.next_slice(self.lanes[0].is_partial());
                }
                !blocked && !complete
            }
        }
    }

    /// Takes the frames a lane has finished to where they go.
    fn hand_over(&mut self) {
        let (lane, tiles) = (self.current, self.layout.tiles());
        let batch = (lane / tiles) as u64;
        for (frame, slot) in std::mem::take(&mut self.finished) {
            match self.layout.grid {
                Some(_) => self.blend(lane, batch, frame, slot),
                None => self.finish(batch, frame, slot),
            }
        }
    }

    fn blend(&mut self, lane: usize, batch: u64, frame: u64, from: Slot) {
        let (pool, bytes) = (&mut self.pools.frames, self.canvas_bytes);
        let canvas = || Canvas { slot: pool.take(bytes, Life::Free), tiles: 0 };
        let canvas = self.canvases.entry((batch, frame)).or_insert_with(canvas);
        let into = canvas.slot;
        self.queue.push_back(Step::Blend { lane, from, into, clear: canvas.tiles == 0 });
        canvas.tiles += 1;
        let complete = canvas.tiles == self.layout.tiles();
        self.pools.frames.drop(from);
        if complete {
            self.canvases.remove(&(batch, frame));
            self.finish(batch, frame, into);
        }
    }

    /// A frame of the whole image is finished.
    fn finish(&mut self, batch: u64, frame: u64, from: Slot) {
        if !self.pushed {
            self.queue.push_back(Step::Store { batch, frame, from });
            self.pools.frames.drop(from);
            return;
        }
        self.outbox[batch as usize].push_back(from);
        while self.outbox.iter().all(|frames| !frames.is_empty()) {
            for (batch, frames) in (0..).zip(&mut self.outbox) {
                let from = frames.pop_front().expect("checked above");
                self.queue.push_back(Step::Store { batch, frame: self.stored, from });
                self.pools.frames.drop(from);
            }
            self.stored += 1;
        }
    }

    /// Runs through the schedule without doing the work, for a stream with so many frames, but no further than the first
    /// `slices`; its slots and the steps seen on the way, with the number of their slice, tell what it takes.
    pub fn rehearse(mut self, frames: Option<u64>, slices: usize, mut seen: impl FnMut(usize, &Step)) -> Pools {
        loop {
            match self.wait() {
                _ if self.pools.frames.slices() > slices => return self.pools,
                Wait::No => {
                    let step = self.queue.pop_front().expect("nothing to wait for");
                    seen(self.pools.frames.slices(), &step);
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
                Wait::Input | Wait::End => return self.pools,
            }
        }
    }
}
