//! The order of work for one clip, or one tile of it: which layers run on which frames, and where those lie.
//!
//! Stages pull frames through as deep as they can before new input is taken, so that few frames exist at a time. All
//! of it depends on frame counts alone; rehearsing it without doing the work tells how much memory it takes.

use std::collections::VecDeque;
use std::sync::Arc;

use super::Costs;
use super::slots::{Slot, SlotPool};
use super::step::{ConvFrame, Step};
use crate::model::{Block, LayerId, Network};
use crate::tensor::{FrameShape, Prologue, Window};

/// How a clip is cut. All cuts give the same numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cut {
    /// Input frames per slice. The first slice has one more.
    pub slice: u64,
    /// Frames that each stage computes at a time.
    pub chunks: Vec<u64>,
}

/// Input frames of a layer that are still needed. The front one is frame `first` of the clip.
#[derive(Debug, Default)]
struct History {
    frames: VecDeque<Slot>,
    first: u64,
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
            layers,
        }
    }

    pub fn input(&self) -> FrameShape {
        self.input
    }
}

/// The work on one clip, or on one tile of it, frame by frame.
#[derive(Debug)]
pub struct Clip {
    network: Arc<Network>,
    shapes: Arc<Shapes>,
    cut: Arc<Cut>,
    lane: usize,
    batch: u64,
    histories: Vec<History>,
    /// Frames that each stage has computed.
    computed: Vec<u64>,
    /// Input frames taken so far, and where the current slice ends.
    loaded: u64,
    slice_end: u64,
    /// Input frames in all, once known.
    total: Option<u64>,
}

impl Clip {
    pub fn new(network: Arc<Network>, shapes: Arc<Shapes>, cut: Arc<Cut>, lane: usize, batch: u64) -> Clip {
        let histories = network.layers.iter().map(|_| History::default()).collect();
        let computed = vec![0; network.stages.len()];
        let slice_end = 1 + cut.slice;
        Clip { network, shapes, cut, lane, batch, histories, computed, loaded: 0, slice_end, total: None }
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
    pub fn set_total(&mut self, total: u64, pool: &mut SlotPool) {
        self.total = Some(total);
        self.pad(pool);
    }

    /// Gives back the frames that were kept for a future that will not come.
    pub fn forget(&mut self, pool: &mut SlotPool) {
        for history in &mut self.histories {
            history.frames.drain(..).for_each(|slot| pool.drop(slot));
        }
    }

    /// Takes the next input frame.
    pub fn load(&mut self, pool: &mut SlotPool, steps: &mut VecDeque<Step>) {
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
        pool: &mut SlotPool,
        steps: &mut VecDeque<Step>,
        finished: &mut Vec<(u64, Slot)>,
    ) -> bool {
        if !may_load && self.room() > 0 {
            // Work begins with the whole slice, so that what it takes does not depend on how the host pushes.
            return false;
        }
        let stages = 0..self.network.stages.len();
        if let Some(stage) = stages.clone().rev().find(|s| self.ready(*s) >= self.cut.chunks[*s]) {
            self.compute(stage, pool, steps, finished);
            return true;
        }
        if self.room() > 0 {
            self.load(pool, steps);
            return true;
        }
        match stages.into_iter().find(|s| self.ready(*s) > 0) {
            Some(stage) => {
                self.compute(stage, pool, steps, finished);
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
        pool: &mut SlotPool,
        steps: &mut VecDeque<Step>,
        finished: &mut Vec<(u64, Slot)>,
    ) {
        let network = Arc::clone(&self.network);
        let (first, count) = (self.computed[stage], self.ready(stage).min(self.cut.chunks[stage]));
        let frames = first..first + count;
        self.computed[stage] += count;

        let stage_layers = &network.stages[stage];
        let mut x = self.conv_history(stage_layers.head, frames.clone(), Side::None, pool, steps);
        for block in &stage_layers.blocks {
            let out = match *block {
                Block::Residual { first, second } => {
                    let h = self.conv(first, frames.clone(), &x, Side::None, pool, steps);
                    let side = match network.layers[second].layout.shortcut {
                        Some(_) => Side::Shortcut(&x),
                        None => Side::Residual(&x),
                    };
                    self.conv_consuming(second, frames.clone(), h, side, pool, steps)
                }
                Block::Attention { qkv, project } => {
                    let projections = self.conv(qkv, frames.clone(), &x, Side::None, pool, steps);
                    let mixed = self.attend(project, projections, pool, steps);
                    self.conv_consuming(project, frames.clone(), mixed, Side::Residual(&x), pool, steps)
                }
            };
            drop_all(std::mem::replace(&mut x, out), pool);
        }
        match (stage_layers.tail, network.stages.get(stage + 1)) {
            (Some(tail), _) => {
                let out = self.conv_consuming(tail, frames, x, Side::None, pool, steps);
                finished.extend((first..).zip(out));
            }
            (None, Some(next)) => self.histories[next.head].frames.extend(x),
            (None, None) => unreachable!("the last stage of a network has a tail"),
        }
    }

    /// A layer's outputs for inputs that others go on using.
    fn conv(
        &mut self,
        layer: LayerId,
        frames: std::ops::Range<u64>,
        inputs: &[Slot],
        side: Side,
        pool: &mut SlotPool,
        steps: &mut VecDeque<Step>,
    ) -> Vec<Slot> {
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
        self.conv_history(layer, frames, side, pool, steps)
    }

    /// A layer's outputs for inputs that nobody else needs.
    fn conv_consuming(
        &mut self,
        layer: LayerId,
        frames: std::ops::Range<u64>,
        inputs: Vec<Slot>,
        side: Side,
        pool: &mut SlotPool,
        steps: &mut VecDeque<Step>,
    ) -> Vec<Slot> {
        if self.shapes.normalised[layer].is_some() {
            let frames = inputs.iter().map(|slot| (*slot, *slot)).collect();
            steps.push_back(Step::Normalise { layer, shape: self.shapes.layers[layer], frames });
        }
        self.histories[layer].frames.extend(inputs);
        self.conv_history(layer, frames, side, pool, steps)
    }

    /// A layer's outputs `frames`, whose inputs its history holds; then forgets the inputs that no later frame sees.
    fn conv_history(
        &mut self,
        layer: LayerId,
        frames: std::ops::Range<u64>,
        side: Side,
        pool: &mut SlotPool,
        steps: &mut VecDeque<Step>,
    ) -> Vec<Slot> {
        let (time, layout) = (self.network.layers[layer].time, &self.network.layers[layer].layout);
        let history = &mut self.histories[layer];
        let mut jobs = Vec::with_capacity((frames.end - frames.start) as usize);
        for (i, frame) in frames.clone().enumerate() {
            let recipe = time.recipe(frame);
            let mut terms: Vec<(Slot, u8)> = recipe.terms().iter().map(|(t, slab)| (history.at(*t), *slab)).collect();
            let residual = match side {
                Side::None => None,
                Side::Residual(x) => Some(x[i]),
                Side::Shortcut(x) => {
                    terms.push((x[i], layout.slabs as u8));
                    None
                }
            };
            jobs.push(ConvFrame { terms, bias: recipe.bias, residual, out: pool.take(self.shapes.bytes[layer]) });
        }
        let outputs = jobs.iter().map(|job| job.out).collect();
        steps.push_back(Step::Conv { layer, input: self.shapes.layers[layer], frames: jobs });
        let oldest = time.oldest(frames.end);
        while history.first < oldest && !history.frames.is_empty() {
            pool.drop(history.frames.pop_front().expect("not empty"));
            history.first += 1;
        }
        outputs
    }

    fn attend(
        &mut self,
        project: LayerId,
        projections: Vec<Slot>,
        pool: &mut SlotPool,
        steps: &mut VecDeque<Step>,
    ) -> Vec<Slot> {
        debug_assert_eq!(self.network.layers[project].layout.window, Window::Point);
        let (shape, bytes) = (self.shapes.layers[project], self.shapes.bytes[project]);
        let frames: Vec<(Slot, Slot)> = projections.iter().map(|from| (*from, pool.take(bytes))).collect();
        let mixed = frames.iter().map(|(_, to)| *to).collect();
        steps.push_back(Step::Attention { shape, frames });
        drop_all(projections, pool);
        mixed
    }
}

/// What is added to a convolution's sum beside its own inputs.
#[derive(Clone, Copy)]
enum Side<'a> {
    None,
    Residual(&'a [Slot]),
    Shortcut(&'a [Slot]),
}

fn drop_all(slots: Vec<Slot>, pool: &mut SlotPool) {
    slots.into_iter().for_each(|slot| pool.drop(slot));
}
