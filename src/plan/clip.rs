//! The order of work for one clip, or one tile of it: which layers run on which frames, and where those lie.
//!
//! Stages pull frames through as deep as they can before new input is taken, so that few frames exist at a time. All
//! of it depends on frame counts alone; rehearsing it without doing the work tells how much memory it takes.

use std::collections::VecDeque;
use std::sync::Arc;

use super::Costs;
use super::banded::Fresh;
use super::cut::{Cut, PAST_FRAMES, Past, repeatable};
use super::slots::{Life, Pools, Slot, SlotPool};
use super::step::{ConvFrame, Step};
use crate::model::{Block, LayerId, Network, Time};
use crate::tensor::{FrameShape, Prologue, Window};

/// Input frames of a layer that are still needed. The front one is frame `first` of the clip.
#[derive(Debug, Default)]
pub(super) struct History {
    pub frames: VecDeque<Slot>,
    pub first: u64,
}

impl History {
    fn end(&self) -> u64 {
        self.first + self.frames.len() as u64
    }

    fn at(&self, frame: u64) -> Slot {
        self.frames[(frame - self.first) as usize]
    }
}

/// The sizes of a network's frames for one input size; the same for every clip and tile of that size.
#[derive(Debug)]
pub struct Shapes {
    input: FrameShape,
    input_bytes: u64,
    /// Of each layer's input.
    layers: Vec<FrameShape>,
    /// Of each layer's output.
    bytes: Vec<u64>,
    /// Of each layer's normalised input, where a step of its own makes it.
    normalised: Vec<Option<u64>>,
    adds_in_place: bool,
}

impl Shapes {
    pub fn new(network: &Network, input: FrameShape, costs: &dyn Costs) -> Shapes {
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
        Shapes {
            input,
            input_bytes: costs.frame_bytes(input),
            bytes: bytes.collect(),
            normalised: normalised.collect(),
            adds_in_place: costs.adds_in_place(),
            layers,
        }
    }

    pub fn input(&self) -> FrameShape {
        self.input
    }

    /// Of a frame of a layer's output.
    pub(super) fn output_bytes(&self, layer: LayerId) -> u64 {
        self.bytes[layer]
    }

    /// Of a layer's input.
    pub(super) fn layer(&self, layer: LayerId) -> FrameShape {
        self.layers[layer]
    }

    /// Of a frame of a layer's input in the pool of the past.
    pub(super) fn past_bytes(&self, layer: LayerId) -> u64 {
        self.normalised[layer].expect("a layer whose past is on the host has a norm of its own")
    }
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
    computed: Vec<u64>,
    /// Input frames taken so far, and where the current slice ends.
    loaded: u64,
    slice_end: u64,
    /// Input frames in all, once known, and the frames that each stage then computes in all.
    total: Option<u64>,
    ends: Vec<u64>,
    /// Whether a stage is at its last frames: what it keeps for later ones, nobody will need.
    closing: bool,
}

impl Clip {
    pub fn new(network: Arc<Network>, shapes: Arc<Shapes>, cut: Arc<Cut>, lane: usize, batch: u64) -> Clip {
        let histories = network.layers.iter().map(|_| History::default()).collect();
        let computed = vec![0; network.stages.len()];
        let (slice_end, ends) = (1 + cut.slice, Vec::new());
        Clip {
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
            closing: false,
        }
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

    pub fn next_slice(&mut self) {
        self.slice_end += self.cut.slice;
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
        for (history, past) in self.histories.iter_mut().zip(&self.cut.past) {
            let pool = if *past == Past::Host { &mut pools.past } else { &mut pools.frames };
            history.frames.drain(..).for_each(|slot| pool.drop(slot));
        }
    }

    /// Takes the next input frame.
    pub fn load(&mut self, pools: &mut Pools, steps: &mut VecDeque<Step>) {
        self.begin_turn(0, false, pools, steps);
        let pool = &mut pools.frames;
        let into = pool.take(self.shapes.input_bytes);
        steps.push_back(Step::Load { lane: self.lane, batch: self.batch, frame: self.loaded, into });
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
    pub fn advance(
        &mut self,
        may_load: bool,
        pools: &mut Pools,
        steps: &mut VecDeque<Step>,
        finished: &mut Vec<(u64, Slot)>,
    ) -> bool {
        if !may_load && self.room() > 0 {
            // Work begins with the whole slice, so that what it takes does not depend on how the host pushes.
            return false;
        }
        let stages = 0..self.network.stages.len();
        if let Some(stage) = stages.clone().rev().find(|s| self.ready(*s) >= self.cut.chunks[*s]) {
            self.compute(stage, pools, steps, finished);
            return true;
        }
        if self.room() > 0 {
            self.load(pools, steps);
            return true;
        }
        match stages.into_iter().find(|s| self.ready(*s) > 0) {
            Some(stage) => {
                self.compute(stage, pools, steps, finished);
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

    fn compute(
        &mut self,
        stage: usize,
        pools: &mut Pools,
        steps: &mut VecDeque<Step>,
        finished: &mut Vec<(u64, Slot)>,
    ) {
        let network = Arc::clone(&self.network);
        let (first, count) = (self.computed[stage], self.ready(stage).min(self.cut.chunks[stage]));
        let frames = first..first + count;
        self.computed[stage] += count;
        self.closing = self.ends.get(stage) == Some(&self.computed[stage]);

        let (before, after) = (self.hands_over(stage.wrapping_sub(1)), self.hands_over(stage));
        self.begin_turn(stage, before || after, pools, steps);
        let stage_layers = &network.stages[stage];
        let repeats = repeatable(&network, stage).filter(|layer| self.cut.past[*layer] == Past::Again);
        let mut again = match repeats {
            Some(_) => self.head_again(stage_layers.head, first, pools, steps),
            None => Vec::new(),
        };
        let life = self.life_of_blocks(stage, 0);
        let mut x = self.head(stage_layers.head, frames.clone(), life, repeats.is_some(), pools, steps);
        if before {
            // What the other worker made has been read.
            steps.push_back(Step::Mark);
        }
        for (i, block) in stage_layers.blocks.iter().enumerate() {
            let out_life = self.life_of_blocks(stage, i + 1);
            let out = match *block {
                Block::Residual { first, second } => {
                    // What a band of the second layer makes with a shortcut, it writes over what it read.
                    let life = match (self.cut.past[second], network.layers[second].layout.shortcut) {
                        (Past::Host | Past::Again, Some(_)) => out_life,
                        _ => self.life_of_input(second),
                    };
                    let h = match self.cut.past[first] {
                        Past::Device => self.conv(first, frames.clone(), &x, Side::None, life, pools, steps),
                        _ => self.conv_banded(
                            first,
                            frames.clone(),
                            Fresh::Shared(&again, &x),
                            Side::None,
                            life,
                            pools,
                            steps,
                        ),
                    };
                    drop_all(std::mem::take(&mut again), &mut pools.frames);
                    let side = match network.layers[second].layout.shortcut {
                        Some(_) => Side::Shortcut(&x),
                        None => Side::Residual(&x),
                    };
                    self.conv_consuming(second, frames.clone(), h, side, out_life, pools, steps)
                }
                Block::Attention { qkv, project } => {
                    let life = self.life_of_input(project);
                    let projections = self.conv(qkv, frames.clone(), &x, Side::None, life, pools, steps);
                    let mixed = self.attend(project, projections, life, &mut pools.frames, steps);
                    self.conv_consuming(project, frames.clone(), mixed, Side::Residual(&x), out_life, pools, steps)
                }
            };
            drop_all(std::mem::replace(&mut x, out), &mut pools.frames);
        }
        match (stage_layers.tail, network.stages.get(stage + 1)) {
            (Some(tail), _) => {
                let out = self.conv_consuming(tail, frames, x, Side::None, Life::Long, pools, steps);
                finished.extend((first..).zip(out));
            }
            (None, Some(next)) => self.histories[next.head].frames.extend(x),
            (None, None) => unreachable!("the last stage of a network has a tail"),
        }
        if after {
            steps.push_back(Step::Mark);
        }
        debug_assert!(pools.frames.turn_is_over(), "a frame outlives its turn");
    }

    /// Whether what a stage makes goes from one worker to the other.
    fn hands_over(&self, stage: usize) -> bool {
        let next = stage.wrapping_add(1);
        stage < next && next < self.network.stages.len() && self.cut.worker(stage) != self.cut.worker(next)
    }

    fn begin_turn(&self, stage: usize, waits: bool, pools: &mut Pools, steps: &mut VecDeque<Step>) {
        if self.cut.apart.is_some() {
            let worker = self.cut.worker(stage);
            pools.work_for(worker);
            steps.push_back(Step::Turn { worker, waits });
        }
    }

    /// How long what comes into block `block` of a stage lives, or out of its last one. Blocks add to it where it lies, until a
    /// shortcut makes something new of it; what is left at the end waits for the next stage, or for the tail.
    fn life_of_blocks(&self, stage: usize, block: usize) -> Life {
        let stage_layers = &self.network.stages[stage];
        let has_shortcut = |block: &Block| match *block {
            Block::Residual { second, .. } => self.network.layers[second].layout.shortcut.is_some(),
            Block::Attention { .. } => false,
        };
        let ends_here = stage_layers.blocks[block..].iter().any(has_shortcut);
        match (ends_here, stage_layers.tail) {
            _ if !self.shapes.adds_in_place => Life::Long,
            (true, _) => Life::Turn,
            (false, Some(tail)) => self.life_of_input(tail),
            (false, None) => Life::Long,
        }
    }

    /// How long the input of a layer lives that it alone needs: it becomes the layer's past, if that is on the device.
    fn life_of_input(&self, layer: LayerId) -> Life {
        let remembered = self.cut.past[layer] == Past::Device && self.network.layers[layer].time != Time::Still;
        if remembered || !self.shapes.adds_in_place { Life::Long } else { Life::Turn }
    }

    /// The outputs of a stage's head, whose inputs wait in its history; then forgets the inputs that no later frame sees, nor
    /// any of those that `repeats` will want once more.
    fn head(
        &mut self,
        head: LayerId,
        frames: std::ops::Range<u64>,
        life: Life,
        repeats: bool,
        pools: &mut Pools,
        steps: &mut VecDeque<Step>,
    ) -> Vec<Slot> {
        let oldest = frames.end.saturating_sub(if repeats { PAST_FRAMES } else { 0 });
        let outputs = self.conv_frames(head, frames, Side::None, life, pools, steps);
        self.forget_before(head, oldest, &mut pools.frames);
        outputs
    }

    /// The frames before `first` that the head made once already.
    fn head_again(&mut self, head: LayerId, first: u64, pools: &mut Pools, steps: &mut VecDeque<Step>) -> Vec<Slot> {
        let frames = first.saturating_sub(PAST_FRAMES)..first;
        if frames.is_empty() {
            return Vec::new();
        }
        self.conv_frames(head, frames, Side::None, Life::Turn, pools, steps)
    }

    /// A layer's outputs for inputs that others go on using.
    fn conv(
        &mut self,
        layer: LayerId,
        frames: std::ops::Range<u64>,
        inputs: &[Slot],
        side: Side,
        life: Life,
        pools: &mut Pools,
        steps: &mut VecDeque<Step>,
    ) -> Vec<Slot> {
        let pool = &mut pools.frames;
        match self.shapes.normalised[layer] {
            Some(bytes) => {
                let pairs: Vec<(Slot, Slot)> = inputs.iter().map(|from| (*from, pool.take(bytes))).collect();
                self.histories[layer].frames.extend(pairs.iter().map(|(_, to)| *to));
                steps.push_back(Step::Normalise { layer, shape: self.shapes.layers[layer], frames: pairs });
            }
            None => {
                inputs.iter().for_each(|slot| pool.keep(*slot));
                self.histories[layer].frames.extend(inputs);
            }
        }
        self.conv_history(layer, frames, side, life, pools, steps)
    }

    /// A layer's outputs for inputs that nobody else needs.
    fn conv_consuming(
        &mut self,
        layer: LayerId,
        frames: std::ops::Range<u64>,
        inputs: Vec<Slot>,
        side: Side,
        life: Life,
        pools: &mut Pools,
        steps: &mut VecDeque<Step>,
    ) -> Vec<Slot> {
        if self.cut.past[layer] != Past::Device {
            let outputs = self.conv_banded(layer, frames, Fresh::Own(&inputs), side, life, pools, steps);
            drop_all(inputs, &mut pools.frames);
            return outputs;
        }
        if self.shapes.normalised[layer].is_some() {
            let frames = inputs.iter().map(|slot| (*slot, *slot)).collect();
            steps.push_back(Step::Normalise { layer, shape: self.shapes.layers[layer], frames });
        }
        self.histories[layer].frames.extend(inputs);
        self.conv_history(layer, frames, side, life, pools, steps)
    }

    /// A layer's outputs `frames`, whose inputs its history holds; then forgets the inputs that no later frame sees.
    fn conv_history(
        &mut self,
        layer: LayerId,
        frames: std::ops::Range<u64>,
        side: Side,
        life: Life,
        pools: &mut Pools,
        steps: &mut VecDeque<Step>,
    ) -> Vec<Slot> {
        let end = frames.end;
        let outputs = self.conv_frames(layer, frames, side, life, pools, steps);
        self.forget_before(layer, end, &mut pools.frames);
        outputs
    }

    /// A layer's outputs `frames`, whose inputs its history holds.
    fn conv_frames(
        &mut self,
        layer: LayerId,
        frames: std::ops::Range<u64>,
        side: Side,
        life: Life,
        pools: &mut Pools,
        steps: &mut VecDeque<Step>,
    ) -> Vec<Slot> {
        let (time, layout) = (self.network.layers[layer].time, &self.network.layers[layer].layout);
        let history = &self.histories[layer];
        let count = (frames.end - frames.start) as usize;
        let outputs = self.outputs(layer, count, side.residuals(), life, &mut pools.frames);
        let jobs = frames.zip(&outputs).enumerate().map(|(i, (frame, out))| {
            let recipe = time.recipe(frame);
            let mut terms: Vec<(Slot, u8)> = recipe.terms().iter().map(|(t, slab)| (history.at(*t), *slab)).collect();
            terms.extend(side.shortcut(i).map(|slot| (slot, layout.slabs as u8)));
            ConvFrame { terms, bias: recipe.bias, residual: side.residual(i), out: *out }
        });
        let jobs = jobs.collect();
        steps.push_back(Step::Conv { layer, input: self.shapes.layers[layer], frames: jobs });
        outputs
    }

    /// Where output frames go: over frames that may be written `over`, where nobody else needs these and the device can.
    pub(super) fn outputs(
        &self,
        layer: LayerId,
        count: usize,
        over: Option<&[Slot]>,
        life: Life,
        pool: &mut SlotPool,
    ) -> Vec<Slot> {
        match over.filter(|slots| self.shapes.adds_in_place && slots.iter().all(|slot| pool.is_sole(*slot))) {
            Some(slots) => {
                slots.iter().for_each(|slot| pool.keep(*slot));
                slots.to_vec()
            }
            None => pool.take_many(self.shapes.bytes[layer], count, life),
        }
    }

    /// The oldest input that an output frame from `frame` on sees.
    pub(super) fn oldest(&self, layer: LayerId, frame: u64) -> u64 {
        if self.closing { u64::MAX } else { self.network.layers[layer].time.oldest(frame) }
    }

    /// Drops the inputs that no output frame from `frame` on sees.
    fn forget_before(&mut self, layer: LayerId, frame: u64, pool: &mut SlotPool) {
        let oldest = self.oldest(layer, frame);
        let history = &mut self.histories[layer];
        while history.first < oldest && !history.frames.is_empty() {
            pool.drop(history.frames.pop_front().expect("not empty"));
            history.first += 1;
        }
    }

    fn attend(
        &mut self,
        project: LayerId,
        projections: Vec<Slot>,
        life: Life,
        pool: &mut SlotPool,
        steps: &mut VecDeque<Step>,
    ) -> Vec<Slot> {
        debug_assert_eq!(self.network.layers[project].layout.window, Window::Point);
        let (shape, bytes) = (self.shapes.layers[project], self.shapes.bytes[project]);
        let mixed = pool.take_many(bytes, projections.len(), life);
        let frames = projections.iter().copied().zip(mixed.iter().copied()).collect();
        steps.push_back(Step::Attention { shape, frames });
        drop_all(projections, pool);
        mixed
    }
}

/// What is added to a convolution's sum beside its own inputs.
#[derive(Clone, Copy)]
pub(super) enum Side<'a> {
    None,
    Residual(&'a [Slot]),
    Shortcut(&'a [Slot]),
}

impl<'a> Side<'a> {
    pub fn residuals(&self) -> Option<&'a [Slot]> {
        if let Side::Residual(x) = self { Some(x) } else { None }
    }

    pub fn residual(&self, frame: usize) -> Option<Slot> {
        if let Side::Residual(x) = self { Some(x[frame]) } else { None }
    }

    pub fn shortcut(&self, frame: usize) -> Option<Slot> {
        if let Side::Shortcut(x) = self { Some(x[frame]) } else { None }
    }
}

fn drop_all(slots: Vec<Slot>, pool: &mut SlotPool) {
    slots.into_iter().for_each(|slot| pool.drop(slot));
}
