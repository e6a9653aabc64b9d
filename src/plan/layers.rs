//! How single layers of a clip are scheduled: which frames go in, where the results lie, and what is forgotten afterwards.

use std::ops::Range;

use super::banded::{Fresh, all_on_device};
use super::clip::{Clip, Schedule};
use super::cut::Past;
use super::slots::{Life, Pools, Slot, SlotPool};
use super::step::{CarryFrame, Carrying, ConvFrame, SlotAt, Step};
use crate::model::LayerId;
use crate::tensor::{At, Onward, Sums, Window};

impl Clip {
    /// The outputs of a stage's head, whose inputs wait in its history.
    pub(super) fn head(&mut self, head: LayerId, frames: Range<u64>, left: u64, to: &mut Schedule) -> Vec<SlotAt> {
        if frames.is_empty() {
            return Vec::new();
        }
        let sums = self.sums_along(head, frames.end, &mut to.pools.frames);
        let outputs = self.conv_frames(head, frames, Side::None, sums, left, to);
        sums.before.into_iter().for_each(|slot| to.pools.frames.drop(slot));
        outputs.into_iter().map(At::Device).collect()
    }

    /// What a layer's frames up to `end` begin with and what they leave, where sums stand for its past. The caller drops the former.
    fn sums_along(&mut self, layer: LayerId, end: u64, pool: &mut SlotPool) -> Sums<Slot> {
        let Some(bytes) = self.shapes.sums[layer] else { return Sums::NONE };
        let before = self.sums[layer].take();
        let after = (!self.closing).then(|| {
            let (input, slab) = self.network.layers[layer].time.recipe(end).terms()[0];
            // Where others take turns, it outlives this one's.
            let life = if self.shared { Life::Free } else { Life::Scheduled };
            Onward { input: self.histories[layer].at(input), slab, sums: pool.take(bytes, life) }
        });
        self.sums[layer] = after.map(|onward| onward.sums);
        Sums { before, after }
    }

    /// A layer's outputs for inputs that others go on using.
    pub(super) fn conv(
        &mut self,
        layer: LayerId,
        frames: Range<u64>,
        inputs: &[Slot],
        side: Side,
        left: u64,
        to: &mut Schedule,
    ) -> Vec<SlotAt> {
        let weights = self.weights_of(layer, to);
        let pool = &mut to.pools.frames;
        match self.shapes.normalised[layer] {
            Some(bytes) => {
                let left = self.left(layer);
                let lives = frames.clone().map(|frame| life(left, frame));
                let pairs = inputs.iter().zip(lives).map(|(from, life)| (*from, pool.take(bytes, life)));
                let pairs: Vec<(Slot, Slot)> = pairs.collect();
                self.histories[layer].frames.extend(pairs.iter().map(|(_, to)| *to));
                let shape = self.shapes.layers[layer];
                to.steps.push_back(Step::Normalise { layer, weights, shape, frames: pairs });
            }
            None => {
                inputs.iter().for_each(|slot| pool.keep(*slot));
                self.histories[layer].frames.extend(inputs);
            }
        }
        self.conv_history(layer, frames, side, left, to)
    }

    /// A layer's outputs for inputs that nobody else needs.
    pub(super) fn conv_consuming(
        &mut self,
        layer: LayerId,
        frames: Range<u64>,
        inputs: Vec<SlotAt>,
        side: Side,
        left: u64,
        to: &mut Schedule,
    ) -> Vec<SlotAt> {
        if self.cut.past[layer] != Past::Device {
            let outputs = self.conv_banded(layer, frames, Fresh::Own(&inputs), side, left, to);
            drop_all(inputs, to.pools);
            return outputs;
        }
        let inputs = on_device(&inputs);
        if self.shapes.normalised[layer].is_some() {
            let (weights, shape) = (self.weights_of(layer, to), self.shapes.layers[layer]);
            let frames = inputs.iter().map(|slot| (*slot, *slot)).collect();
            to.steps.push_back(Step::Normalise { layer, weights, shape, frames });
        }
        self.histories[layer].frames.extend(inputs);
        self.conv_history(layer, frames, side, left, to)
    }

    /// A layer's outputs for inputs that nobody else needs. In place of its past it remembers what these add to later frames.
    pub(super) fn conv_carrying(
        &mut self,
        layer: LayerId,
        frames: Range<u64>,
        inputs: Vec<Slot>,
        bytes: u64,
        left: u64,
        to: &mut Schedule,
    ) -> Vec<Slot> {
        let time = self.network.layers[layer].time;
        let outputs = self.outputs(layer, frames.clone(), None, left, &mut to.pools.frames);
        let before = self.histories[layer].frames.pop_front();
        let after = match before {
            _ if self.closing => None,
            Some(_) => before,
            None => Some(to.pools.frames.take(bytes, Life::Free)),
        };
        self.histories[layer].frames.extend(after);
        let jobs = frames.zip(inputs.iter().zip(&outputs)).map(|(frame, (input, out))| CarryFrame {
            input: *input,
            slabs: time.onward(frame),
            bias: time.recipe(frame).bias,
            out: *out,
        });
        let (frames, input) = (jobs.collect(), self.shapes.layers[layer]);
        to.steps.push_back(Step::Carrying(Carrying { layer, input, frames, before, after }));
        let done = inputs.into_iter().chain(before.filter(|_| after.is_none()));
        done.for_each(|slot| to.pools.frames.drop(slot));
        outputs
    }

    /// A layer's outputs `frames`, whose inputs its history holds; then forgets the inputs that no later frame sees.
    fn conv_history(
        &mut self,
        layer: LayerId,
        frames: Range<u64>,
        side: Side,
        left: u64,
        to: &mut Schedule,
    ) -> Vec<SlotAt> {
        let end = frames.end;
        let outputs = self.conv_frames(layer, frames, side, Sums::NONE, left, to);
        self.forget_before(layer, end, &mut to.pools.frames);
        outputs.into_iter().map(At::Device).collect()
    }

    /// A layer's outputs `frames`, whose inputs its history holds, but for what is in the sums that the first begins with.
    fn conv_frames(
        &mut self,
        layer: LayerId,
        frames: Range<u64>,
        side: Side,
        sums: Sums<Slot>,
        left: u64,
        to: &mut Schedule,
    ) -> Vec<Slot> {
        let (weights, end) = (self.weights_of(layer, to), frames.end);
        let (time, layout) = (self.network.layers[layer].time, &self.network.layers[layer].layout);
        let history = &self.histories[layer];
        let outputs = self.outputs(layer, frames.clone(), side.residuals(), left, &mut to.pools.frames);
        let jobs = frames.zip(&outputs).enumerate().map(|(i, (frame, out))| {
            let recipe = time.recipe(frame);
            let summed = usize::from(i == 0 && sums.before.is_some());
            let terms = recipe.terms()[summed..].iter().map(|(t, slab)| (history.at(*t), *slab));
            let mut terms: Vec<(Slot, u8)> = terms.collect();
            terms.extend(side.shortcut(i).map(|at| (on_device(&[at])[0], layout.slabs as u8)));
            ConvFrame { terms, bias: recipe.bias, residual: side.residual(i), out: *out }
        });
        let frames = jobs.collect();
        to.steps.push_back(Step::Conv { layer, weights, input: self.shapes.layers[layer], frames, sums });
        self.done_with_weights(layer, end, to);
        outputs
    }

    /// Where output frames go, of which those from `left` on are remembered: over frames that may be written `over`, where nobody
    /// else needs these and the device can.
    pub(super) fn outputs(
        &self,
        layer: LayerId,
        frames: Range<u64>,
        over: Option<&[Slot]>,
        left: u64,
        pool: &mut SlotPool,
    ) -> Vec<Slot> {
        match over.filter(|slots| self.shapes.adds_in_place && slots.iter().all(|slot| pool.is_sole(*slot))) {
            Some(slots) => {
                slots.iter().for_each(|slot| pool.keep(*slot));
                slots.to_vec()
            }
            None => frames.map(|frame| pool.take(self.shapes.bytes[layer], life(left, frame))).collect(),
        }
    }

    /// The oldest input that an output frame from `frame` on sees.
    pub(super) fn oldest(&self, layer: LayerId, frame: u64) -> u64 {
        if self.closing { u64::MAX } else { self.oldest_kept(layer, frame) }
    }

    /// The same, whether or not the stage is at its last frames.
    pub(super) fn oldest_kept(&self, layer: LayerId, frame: u64) -> u64 {
        let time = self.network.layers[layer].time;
        match self.shapes.sums[layer] {
            // The oldest is in the sums.
            Some(_) if frame > 0 => time.oldest(frame) + 1,
            _ => time.oldest(frame),
        }
    }

    /// Drops the inputs that no output frame from `frame` on sees.
    pub(super) fn forget_before(&mut self, layer: LayerId, frame: u64, pool: &mut SlotPool) {
        self.forget_older(layer, self.oldest(layer, frame), pool);
    }

    /// Drops the inputs before `oldest`.
    pub(super) fn forget_older(&mut self, layer: LayerId, oldest: u64, pool: &mut SlotPool) {
        let history = &mut self.histories[layer];
        while history.first < oldest && !history.frames.is_empty() {
            pool.drop(history.frames.pop_front().expect("not empty"));
            history.first += 1;
        }
    }

    pub(super) fn attend(&mut self, project: LayerId, projections: Vec<Slot>, to: &mut Schedule) -> Vec<SlotAt> {
        debug_assert_eq!(self.network.layers[project].layout.window, Window::Point);
        let (shape, bytes) = (self.shapes.layers[project], self.shapes.bytes[project]);
        let mixed: Vec<Slot> = projections.iter().map(|_| to.pools.frames.take(bytes, Life::Scheduled)).collect();
        let frames = projections.iter().copied().zip(mixed.iter().copied()).collect();
        to.steps.push_back(Step::Attention { shape, frames });
        projections.into_iter().for_each(|slot| to.pools.frames.drop(slot));
        mixed.into_iter().map(At::Device).collect()
    }
}

/// Where a frame finds its place if those from `left` on are remembered. As these follow one another in a ring, they fit into
/// fewer places when each takes the next one that is free than when the script says which.
fn life(left: u64, frame: u64) -> Life {
    if frame >= left { Life::Free } else { Life::Scheduled }
}

/// What is added to a convolution's sum beside its own inputs.
#[derive(Clone, Copy)]
pub(super) enum Side<'a> {
    None,
    Residual(&'a [Slot]),
    Shortcut(&'a [SlotAt]),
}

impl<'a> Side<'a> {
    pub fn residuals(&self) -> Option<&'a [Slot]> {
        if let Side::Residual(x) = self { Some(x) } else { None }
    }

    pub fn residual(&self, frame: usize) -> Option<Slot> {
        if let Side::Residual(x) = self { Some(x[frame]) } else { None }
    }

    pub fn shortcut(&self, frame: usize) -> Option<SlotAt> {
        if let Side::Shortcut(x) = self { Some(x[frame]) } else { None }
    }
}

/// The slots of frames that a step reads whole.
pub(super) fn on_device(frames: &[SlotAt]) -> Vec<Slot> {
    all_on_device(frames).expect("what is elsewhere is read in bands")
}

pub(super) fn drop_all(frames: Vec<SlotAt>, pools: &mut Pools) {
    for at in frames {
        match at {
            At::Device(slot) => pools.frames.drop(slot),
            At::Host { frame, statistics } => {
                pools.past.drop(frame);
                pools.frames.drop(statistics);
            }
            At::Anew { statistics, .. } => pools.frames.drop(statistics),
        }
    }
}
