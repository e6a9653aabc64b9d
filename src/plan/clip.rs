//! The order of work for one clip, or one tile of it: which layers run on which frames, and where those lie.
//!
//! Stages pull frames through as deep as they can before new input is taken, so that few frames exist at a time. All
//! of it depends on frame counts alone; rehearsing it without doing the work tells how much memory it takes.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use super::Costs;
use super::banded::{Fresh, drop_past};
use super::cut::{Cut, PAST_FRAMES, Past, repeatable};
use super::job::{Layout, goes_on};
use super::layers::{Side, drop_all, on_device};
use super::slots::{Life, Pools, Slot, SlotPool};
use super::step::{Anew, PastSlots, SlotAt, Step};
use super::weights::{Fetching, fetched_bytes};
use crate::model::{Block, LayerId, Network, Stage, Time};
use crate::tensor::{ConvLayout, FrameShape, PastAt, Prologue, Window};

/// Input frames of a layer that are still needed. The front one is frame `first` of the clip.
#[derive(Debug, Default)]
pub(super) struct History {
    pub frames: VecDeque<Slot>,
    pub first: u64,
}

impl History {
    pub fn end(&self) -> u64 {
        self.first + self.frames.len() as u64
    }

    pub fn at(&self, frame: u64) -> Slot {
        self.frames[(frame - self.first) as usize]
    }
}

/// The sizes of a network's frames for one input size; the same for every clip and tile of that size.
#[derive(Debug)]
pub struct Shapes {
    input: FrameShape,
    input_bytes: u64,
    /// Of each layer's input.
    pub(super) layers: Vec<FrameShape>,
    /// Of each layer's output.
    pub(super) bytes: Vec<u64>,
    /// Of each layer's normalised input, where a step of its own makes it.
    pub(super) normalised: Vec<Option<u64>>,
    /// Of what each layer carries on, where that stands for its past.
    pub(super) carries: Vec<Option<u64>>,
    /// Of the sums that each layer leaves for its next frame, where these stand for its past.
    pub(super) sums: Vec<Option<u64>>,
    /// Of the statistics of a frame that is not on the device.
    pub(super) statistics: u64,
    /// Of a frame of each layer's past on the device and in host memory, where the layer works in bands.
    pub(super) past: Vec<PastAt<u64, u64>>,
    /// Of each layer's weights with none of its slabs, with the first, with two, and so on.
    pub(super) weights: Vec<Vec<u64>>,
    pub(super) adds_in_place: bool,
}

impl Shapes {
    pub fn new(network: &Network, cut: &Cut, input: FrameShape, costs: &dyn Costs) -> Shapes {
        let layers = network.input_shapes(input);
        let bytes = network
            .layers
            .iter()
            .zip(&layers)
            .map(|(layer, shape)| costs.frame_bytes(layer.layout.window.output(*shape, layer.layout.cout)));
        let normalised = network.layers.iter().zip(&layers).map(|(layer, shape)| {
            let separate = layer.layout.prologue != Prologue::None && !costs.fuses_norm(&layer.layout);
            separate.then(|| costs.frame_bytes(*shape))
        });
        let carries = network.layers.iter().zip(&layers).map(|(layer, shape)| costs.carry_bytes(&layer.layout, *shape));
        let sums = network.layers.iter().zip(&layers).map(|(layer, shape)| {
            let bytes = costs.sums_bytes(&layer.layout, *shape);
            // Two chunks of these see one frame alike, and in the first of its terms.
            bytes.filter(|_| layer.time == Time::Halve)
        });
        let past = cut.past.iter().zip(&layers).map(|(past, shape)| {
            let columns = past.columns(shape.width);
            let bytes = |columns: Range<u64>| {
                let width = columns.end - columns.start;
                (width > 0).then(|| costs.frame_bytes(FrameShape { width, ..*shape }))
            };
            PastAt { near: bytes(columns.near()), far: bytes(columns.far()) }
        });
        Shapes {
            past: past.collect(),
            input,
            input_bytes: costs.frame_bytes(input),
            bytes: bytes.collect(),
            normalised: normalised.collect(),
            carries: carries.collect(),
            sums: sums.collect(),
            statistics: costs.frame_bytes(FrameShape::new(0, 0, 1)),
            weights: network.layers.iter().map(|layer| bytes_by_slabs(&layer.layout, costs)).collect(),
            adds_in_place: costs.adds_in_place(),
            layers,
        }
    }

    pub fn input(&self) -> FrameShape {
        self.input
    }

    /// Of a frame of a layer's input in the pool of the past.
    pub(super) fn past_bytes(&self, layer: LayerId) -> u64 {
        self.normalised[layer].expect("a layer whose past is on the host has a norm of its own")
    }
}

/// Of a layer's weights with none of its slabs, with the first, with two, and so on.
fn bytes_by_slabs(layout: &ConvLayout, costs: &dyn Costs) -> Vec<u64> {
    (0..=layout.slabs).map(|slabs| fetched_bytes(layout, slabs, costs)).collect()
}

/// Where steps are put, and what their frames lie in.
pub struct Schedule<'a> {
    pub pools: &'a mut Pools,
    pub steps: &'a mut VecDeque<Step>,
}

/// The work on one clip, or on one tile of it, frame by frame.
#[derive(Debug)]
pub struct Clip {
    pub(super) network: Arc<Network>,
    pub(super) shapes: Arc<Shapes>,
    pub(super) cut: Arc<Cut>,
    lane: usize,
    batch: u64,
    pub(super) histories: Vec<History>,
    /// Frames that each stage has computed.
    pub(super) computed: Vec<u64>,
    /// Input frames taken so far, and where the current slice ends.
    pub(super) loaded: u64,
    pub(super) slice_end: u64,
    /// Input frames in all, once known, and the frames that each stage then computes in all.
    total: Option<u64>,
    ends: Vec<u64>,
    /// Whether so many slices may come that each has to be like the other, up to the last.
    goes_on: bool,
    /// Whether others take turns with it within a slice, so that what outlives its turn finds a place for itself.
    pub(super) shared: bool,
    /// Of each stage, the first input frame that still waits when the current slice is done.
    waiting: Vec<u64>,
    /// Of each stage, what its head has made already of frames that wait for their chunk.
    early: Vec<Vec<SlotAt>>,
    /// Where the chunk ends that a stage computes.
    pub(super) chunk_end: u64,
    /// Whether a stage is at its last frames: what it keeps for later ones, nobody will need.
    pub(super) closing: bool,
    /// What the head of the current stage makes anew for the first block.
    pub(super) anew: Option<Anew>,
    /// Those of them that are the past of its first layer.
    pub(super) again: Vec<SlotAt>,
    /// Of each layer whose past is made again, the statistics of these frames.
    pub(super) statistics: Vec<VecDeque<Slot>>,
    /// The past of each layer that works in bands.
    pub(super) pasts: Vec<VecDeque<PastSlots>>,
    /// What each layer's next frame begins with, if sums stand for its past.
    pub(super) sums: Vec<Option<Slot>>,
    pub(super) fetching: Fetching,
}

impl Clip {
    /// `frames`: how many there will be, if that is known.
    pub fn new(layout: &Layout, shapes: Arc<Shapes>, frames: Option<u64>, lane: usize, batch: u64) -> Clip {
        let (shared, goes_on) = (layout.is_shared(), goes_on(frames, layout.cut.slice));
        let (network, cut) = (Arc::clone(&layout.network), Arc::clone(&layout.cut));
        let histories: Vec<History> = network.layers.iter().map(|_| History::default()).collect();
        let (statistics, pasts) = (vec![VecDeque::new(); histories.len()], vec![VecDeque::new(); histories.len()]);
        let (sums, computed) = (vec![None; histories.len()], vec![0; network.stages.len()]);
        // A slice that is shorter than the others comes first: there is no past yet that would have to move for few frames.
        let more = frames.map_or(0, |frames| network.padded_frames(frames).saturating_sub(1) % cut.slice);
        let (slice_end, ends) = (1 + if more == 0 { cut.slice } else { more }, Vec::new());
        let (waiting, early) = (vec![0; network.stages.len()], vec![Vec::new(); network.stages.len()]);
        let mut clip = Clip {
            network,
            shapes,
            cut,
            lane,
            batch,
            histories,
            computed,
            loaded: 0,
            slice_end,
            total: None,
            ends,
            goes_on,
            shared,
            waiting,
            early,
            chunk_end: 0,
            closing: false,
            anew: None,
            again: Vec::new(),
            statistics,
            pasts,
            sums,
            fetching: Fetching::default(),
        };
        clip.look_ahead();
        clip
    }

    /// Finds out which frames the current slice will leave waiting for the next.
    pub(super) fn look_ahead(&mut self) {
        let made = self.network.stage_frames(self.slice_end);
        for (stage, made) in made.into_iter().enumerate() {
            let head = self.network.stages[stage].head;
            let seen_again = if self.repeats(stage).is_some() { PAST_FRAMES } else { 0 };
            self.waiting[stage] = self.oldest_kept(head, made.saturating_sub(seen_again));
        }
    }

    /// The layer of a stage whose past its head makes again.
    fn repeats(&self, stage: usize) -> Option<LayerId> {
        repeatable(&self.network, stage).filter(|layer| self.cut.past[*layer] == Past::Again)
    }

    /// Input frames that the current slice still takes.
    pub fn room(&self) -> u64 {
        self.slice_end.min(self.total.unwrap_or(u64::MAX)) - self.loaded
    }

    pub fn loaded(&self) -> u64 {
        self.loaded
    }

    /// Whether every frame has been taken and computed. Meaningful between slices.
    pub fn complete(&self) -> bool {
        self.total == Some(self.loaded)
    }

    /// Whether the current slice is the last, and shorter than others even with what it is padded by.
    pub fn is_partial(&self) -> bool {
        self.total.is_some_and(|total| total == 0 || self.network.padded_frames(total) < self.slice_end)
    }

    pub fn next_slice(&mut self) {
        self.slice_end += self.cut.slice;
        self.look_ahead();
    }

    /// Says how many input frames there are. Must be called before the last slice ends.
    pub fn set_total(&mut self, total: u64, pools: &mut Pools) {
        self.total = Some(total);
        if total > 0 {
            self.ends = self.network.stage_frames(total);
        }
        self.pad(&mut pools.frames);
    }

    /// Gives back the frames that were kept for a future that will not come.
    pub fn forget(&mut self, pools: &mut Pools) {
        let frames = self.histories.iter_mut().flat_map(|history| history.frames.drain(..));
        let statistics = self.statistics.iter_mut().flat_map(|slots| slots.drain(..));
        let sums = self.sums.iter_mut().filter_map(Option::take);
        frames.chain(statistics).chain(sums).for_each(|slot| pools.frames.drop(slot));
        self.pasts.iter_mut().flat_map(|past| past.drain(..)).for_each(|past| drop_past(past, pools));
    }

    /// Takes the next input frame.
    pub fn load(&mut self, to: &mut Schedule) {
        let pool = &mut to.pools.frames;
        // A stream's frames come when its host pushes them.
        let into = pool.take(self.shapes.input_bytes, Life::Free);
        to.steps.push_back(Step::Load { lane: self.lane, batch: self.batch, frame: self.loaded, into });
        self.histories[self.network.stages[0].head].frames.push_back(into);
        self.loaded += 1;
        self.pad(pool);
    }

    /// A clip whose length does not fit the frame rate of its latents goes on with its last frame.
    fn pad(&mut self, pool: &mut SlotPool) {
        if self.total != Some(self.loaded) || self.loaded == 0 {
            return;
        }
        let needed = self.network.padded_frames(self.loaded);
        let history = &mut self.histories[self.network.stages[0].head];
        while history.end() < needed {
            let last = *history.frames.back().expect("the last frame is kept as history");
            pool.keep(last);
            history.frames.push_back(last);
        }
    }

    /// Schedules one chunk of work in the current slice; `false` when nothing is left to do without more input. With
    /// `may_load` it takes input as it needs it; without, it works with what [`Clip::load`] brought. Finished frames
    /// go to `finished`.
    pub fn advance(&mut self, may_load: bool, to: &mut Schedule, finished: &mut Vec<(u64, Slot)>) -> bool {
        if !may_load && self.room() > 0 {
            // Work begins with the whole slice, so that what it takes does not depend on how the host pushes.
            return false;
        }
        let stages = 0..self.network.stages.len();
        if let Some(stage) = stages.clone().rev().find(|s| self.ready(*s) >= self.chunk(*s)) {
            self.compute(stage, to, finished);
            return true;
        }
        if self.room() > 0 {
            self.load(to);
            return true;
        }
        match stages.into_iter().find(|s| self.ready(*s) > 0) {
            Some(stage) => {
                self.compute(stage, to, finished);
                true
            }
            None => false,
        }
    }

    /// Frames that a stage could compute from what the stage before it has made.
    fn ready(&self, stage: usize) -> u64 {
        let head = self.network.stages[stage].head;
        self.network.layers[head].time.outputs(self.histories[head].end()) - self.computed[stage]
    }

    /// Frames that a stage computes next, if they are there. Where chunks move their past, those that are no whole chunk come
    /// first: there is none yet, and if they were left over at the end they would have to move all of it.
    fn chunk(&self, stage: usize) -> u64 {
        let chunk = self.cut.chunks[stage];
        let moves_past = || self.network.stages[stage].body().any(|layer| self.cut.past[layer].moves());
        if self.computed[stage] > 0 || !moves_past() {
            return chunk;
        }
        (self.network.stage_frames(self.slice_end)[stage] - 1) % chunk + 1
    }

    fn compute(&mut self, stage: usize, to: &mut Schedule, finished: &mut Vec<(u64, Slot)>) {
        let network = Arc::clone(&self.network);
        let (first, count) = (self.computed[stage], self.ready(stage).min(self.chunk(stage)));
        let frames = first..first + count;
        self.computed[stage] += count;
        self.chunk_end = frames.end;
        let closing = !self.goes_on && self.ends.get(stage) == Some(&self.computed[stage]);

        let stage_layers = &network.stages[stage];
        self.fetch_first(stage, frames.clone(), to);
        if let Some(layer) = self.repeats(stage) {
            self.past_again(stage_layers.head, layer, first);
        }
        let (entry, rest) = stage_layers.blocks.split_first().expect("a stage has blocks");
        self.closing = closing;
        let mut x = self.enter(stage, entry, frames.clone(), to);
        for (i, block) in rest.iter().enumerate() {
            x = self.block(block, frames.clone(), x, self.left_of_blocks(stage, i + 2), to);
        }
        match (stage_layers.tail, network.stages.get(stage + 1)) {
            (Some(tail), _) => {
                let left = if self.shared { 0 } else { NONE };
                let out = match self.shapes.carries[tail] {
                    Some(bytes) => self.conv_carrying(tail, frames, on_device(&x), bytes, left, to),
                    None => on_device(&self.conv_consuming(tail, frames, x, Side::None, left, to)),
                };
                finished.extend((first..).zip(out));
            }
            (None, Some(next)) => {
                self.histories[next.head].frames.extend(on_device(&x));
                self.shrink(stage + 1, to);
            }
            (None, None) => unreachable!("the last stage of a network has a tail"),
        }
    }

    /// Where frames have to wait for their chunk, a downsampler goes ahead: what it makes of them takes less.
    fn shrink(&mut self, stage: usize, to: &mut Schedule) {
        let network = Arc::clone(&self.network);
        let Stage { head, .. } = network.stages[stage];
        let ready = self.ready(stage);
        if network.layers[head].layout.window != Window::Down || ready >= self.chunk(stage) {
            return;
        }
        let first = self.computed[stage] + self.early[stage].len() as u64;
        self.chunk_end = self.computed[stage] + ready;
        self.closing = !self.goes_on && self.ends.get(stage) == Some(&self.chunk_end);
        // Some of it may be remembered after its turn, and nobody knows yet which.
        let left = if self.shared { 0 } else { NONE };
        let made = self.head(head, first..self.chunk_end, left, to);
        self.early[stage].extend(made);
        self.forget_before(head, self.chunk_end, &mut to.pools.frames);
    }

    /// Frames through the head of a stage and its first block.
    fn enter(&mut self, stage: usize, entry: &Block, frames: Range<u64>, to: &mut Schedule) -> Vec<SlotAt> {
        let network = Arc::clone(&self.network);
        let head = network.stages[stage].head;
        let stored = frames.start..frames.end.min(frames.start + self.cut.stored[stage]);
        let early = self.early[stage].len().min(frames.clone().count());
        let mut x: Vec<SlotAt> = self.early[stage].drain(..early).collect();
        let made = frames.start + early as u64;
        x.extend(match self.cut.away[head] {
            true => self.head_away(head, frames.clone(), to),
            false => self.head(head, made..stored.end, self.left_of_blocks(stage, 0), to),
        });
        let out_left = self.left_of_blocks(stage, 1);
        if stored.end == frames.end {
            // What makes the past again is needed until that is done.
            if self.again.is_empty() {
                let seen_again = if self.repeats(stage).is_some() { PAST_FRAMES } else { 0 };
                self.forget_before(head, frames.end.saturating_sub(seen_again), &mut to.pools.frames);
            }
            return self.block(entry, frames, x, out_left, to);
        }
        let seen_anew = network.layers[head].time.oldest(stored.end);
        self.forget_older(head, seen_anew, &mut to.pools.frames);
        x.extend(self.head_anew(head, stored.end..frames.end, to));
        let out = self.block(entry, frames.clone(), x, out_left, to);
        self.anew = None;
        self.forget_before(head, frames.end, &mut to.pools.frames);
        out
    }

    /// What a block makes of frames that nobody needs afterwards; `left`: the first frame that others will remember.
    fn block(
        &mut self,
        block: &Block,
        frames: Range<u64>,
        x: Vec<SlotAt>,
        left: u64,
        to: &mut Schedule,
    ) -> Vec<SlotAt> {
        let out = match *block {
            Block::Residual { first, second } => {
                let shortcut = self.network.layers[second].layout.shortcut;
                // What a band of the second layer makes with a shortcut, it writes over what it read.
                let h_left = match (self.cut.past[second], shortcut) {
                    (Past::Bands { .. } | Past::Again, Some(_)) => left,
                    _ => self.left(second),
                };
                let h = match self.cut.past[first] {
                    Past::Device => self.conv(first, frames.clone(), &on_device(&x), Side::None, h_left, to),
                    _ => self.conv_banded(first, frames.clone(), Fresh::Shared(&x), Side::None, h_left, to),
                };
                match shortcut {
                    Some(_) => self.conv_consuming(second, frames, h, Side::Shortcut(&x), left, to),
                    None => self.conv_consuming(second, frames, h, Side::Residual(&on_device(&x)), left, to),
                }
            }
            Block::Attention { qkv, project } => {
                let x = on_device(&x);
                let projections = self.conv(qkv, frames.clone(), &x, Side::None, NONE, to);
                let mixed = self.attend(project, on_device(&projections), to);
                self.conv_consuming(project, frames, mixed, Side::Residual(&x), left, to)
            }
        };
        drop_all(x, to.pools);
        out
    }

    /// The first of a layer's input frames that it remembers after the chunk, where they lie.
    pub(super) fn left(&self, layer: LayerId) -> u64 {
        let stays = self.cut.past[layer] == Past::Device && self.shapes.carries[layer].is_none();
        let remembers = (self.goes_on || self.shared) && stays;
        if remembers { self.network.layers[layer].time.oldest(self.chunk_end) } else { NONE }
    }

    /// The same of what comes into block `block` of a stage, or out of its last one. Blocks add to it where it lies, until a
    /// shortcut makes something new of it.
    fn left_of_blocks(&self, stage: usize, block: usize) -> u64 {
        let layers = &self.network.stages[stage];
        let Some(block_layers) = layers.blocks.get(block) else {
            return match layers.tail {
                Some(tail) => self.left(tail),
                None if self.shared => self.waiting[stage + 1],
                None => NONE,
            };
        };
        let [first, second] = block_layers.layers();
        let flows_on = self.shapes.adds_in_place && self.network.layers[second].layout.shortcut.is_none();
        let after = if flows_on { self.left_of_blocks(stage, block + 1) } else { NONE };
        // A layer that normalises what it reads remembers its input as it is.
        if self.shapes.normalised[first].is_none() { after.min(self.left(first)) } else { after }
    }
}

/// In place of the first frame that is remembered: none is.
pub(super) const NONE: u64 = u64::MAX;
