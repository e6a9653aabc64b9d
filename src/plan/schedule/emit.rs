//! Emits the operations of single layers: which frames go in, where results lie, and what stays cached.
//!
//! Owns the caches of a work item. Knows the policy and the sizes; does not know which stage runs next.

use std::ops::Range;
use std::sync::Arc;

use super::item_facts::{Chunk, ItemFacts};
use super::layer_cache::{LayerCache, SlotRef, drop_frames, resident};
use super::sink::Sink;
use super::weights::WeightFetcher;
use crate::ir::{
    AttentionOp, ConvFrame, ConvOp, FrameRef, LayerId, NormaliseOp, Op, PartialSums, PartialSumsOut, PartialSumsSize,
    Rematerialise, Term, Window,
};
use crate::model::{Layer, Recipe};
use crate::plan::arena::{Arena, Slot, SlotKind, Slots};
use crate::plan::policy::Memory;
use crate::plan::repeats::Purpose;
use crate::plan::spec::ScheduleSpec;

/// Which frames of a value have to be pooled, because they outlive their chunk in a job whose slices repeat, or their
/// work item's turn. The smaller one has the frames of both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kept {
    From(u64),
    None,
}

impl Kept {
    fn has(self, frame: u64) -> bool {
        matches!(self, Kept::From(first) if frame >= first)
    }

    /// Frames that are kept are pooled: they form a ring, and each takes the slot of the one it replaces.
    pub fn slot_kind(self, frame: u64) -> SlotKind {
        if self.has(frame) { SlotKind::Pooled } else { SlotKind::Packed }
    }
}

/// What a layer is to compute within a chunk.
#[derive(Clone)]
pub struct LayerOutputs<'a> {
    pub layer: LayerId,
    pub chunk: &'a Chunk,
    pub frames: Range<u64>,
    /// How many of the last frames are computed for their statistics only.
    pub rematerialised: u64,
    pub kept: Kept,
    /// What is added to each frame: as it is, or through the layer's shortcut.
    pub added: Option<&'a [SlotRef]>,
    /// How those of its inputs are computed that are rematerialised.
    pub rematerialise: Option<Rematerialise<Slots>>,
}

impl<'a> LayerOutputs<'a> {
    /// With nothing added.
    pub fn plain(layer: LayerId, chunk: &'a Chunk, frames: Range<u64>, kept: Kept) -> LayerOutputs<'a> {
        LayerOutputs { layer, chunk, frames, rematerialised: 0, kept, added: None, rematerialise: None }
    }

    pub fn materialised(&self) -> Range<u64> {
        self.frames.start..self.frames.end - self.rematerialised
    }
}

/// The input frames of a layer that end with the chunk.
pub struct Inputs<'a> {
    pub frames: &'a [SlotRef],
    /// Whether no later layer reads them. They are then the layer's, and it may write over them.
    pub consumed: bool,
}

/// Emits the layers of one work item.
#[derive(Debug, Clone)]
pub struct Emitter {
    pub facts: Arc<ItemFacts>,
    pub caches: Vec<LayerCache>,
    pub weights: WeightFetcher,
}

impl Emitter {
    pub fn new(facts: ItemFacts) -> Emitter {
        let facts = Arc::new(facts);
        let ScheduleSpec { network, cone, .. } = &facts.spec;
        let new_cache = |(layer, own): (LayerId, &Layer)| {
            let first = cone.first(layer);
            LayerCache::new(own.time.oldest(first), own.level.map_or(0, |level| level.waiting(first)))
        };
        let caches = network.layers.iter().enumerate().map(new_cache).collect();
        Emitter { caches, weights: WeightFetcher::new(Arc::clone(&facts)), facts }
    }

    /// The outputs of a stage's head. Its inputs are in its queue. The caller drops those that no later frame reads.
    pub fn head(&mut self, of: &LayerOutputs, to: &mut Sink) -> Vec<SlotRef> {
        let outputs = self.head_alone(of, to);
        self.add_around(of, outputs, to)
    }

    fn head_alone(&mut self, of: &LayerOutputs, to: &mut Sink) -> Vec<SlotRef> {
        let mut outputs = Vec::with_capacity(of.frames.clone().count());
        outputs.extend(self.passed_output(of, &mut to.arenas.device));
        let of = &LayerOutputs { frames: of.frames.start + outputs.len() as u64..of.frames.end, ..of.clone() };
        let materialised = of.materialised();
        if of.frames.is_empty() {
            return outputs;
        }
        let whole = LayerOutputs { rematerialised: 0, frames: materialised.clone(), ..of.clone() };
        if self.facts.spec.policy.layers[of.layer].output == Memory::Host {
            outputs.extend(self.head_banded(&whole, to));
        } else if !materialised.is_empty() {
            outputs.extend(self.conv_queued(&whole, to).into_iter().map(FrameRef::Resident));
        }
        if of.rematerialised > 0 {
            // The last reader drops the inputs of rematerialised frames.
            let oldest = self.facts.spec.network.layers[of.layer].time.oldest(materialised.end);
            self.caches[of.layer].inputs.drop_before(Some(oldest), &mut to.arenas.device);
            let frames = materialised.end..of.frames.end;
            outputs.extend(self.head_banded(&LayerOutputs { frames, ..of.clone() }, to));
        }
        outputs
    }

    /// The first output, if it is an input frame as it is. That frame then has one more use.
    fn passed_output(&self, of: &LayerOutputs, arena: &mut Arena) -> Option<SlotRef> {
        let recipe = self.facts.spec.network.layers[of.layer].time.recipe(of.frames.start);
        if !recipe.is_passed || of.frames.is_empty() {
            return None;
        }
        let passed = self.caches[of.layer].inputs.at(recipe.terms()[0].input);
        arena.keep(passed);
        Some(FrameRef::Resident(passed))
    }

    /// Of a layer's outputs in a chunk, how many are rematerialised for the layer that reads them as its input. 0
    /// while a range fills its cone: frames that wait are whole.
    pub fn hidden(&self, layer: LayerId, chunk: &Chunk) -> u64 {
        let ScheduleSpec { network, cone, .. } = &self.facts.spec;
        let can = |layer: LayerId| {
            let none_waits =
                self.caches[layer].waiting.is_empty() && cone.outputs(layer, &chunk.frames) == chunk.frames;
            self.facts.is_banded(layer) && none_waits
        };
        let rematerialised = self.facts.rematerialised(layer, chunk);
        let is_possible = || can(layer) && network.readers(layer).iter().all(|reader| can(reader.layer));
        if rematerialised > 0 && is_possible() { rematerialised } else { 0 }
    }

    /// A layer's outputs. There may be more inputs than outputs at first; with no output yet, the inputs wait.
    pub fn conv(&mut self, of: &LayerOutputs, inputs: Inputs, to: &mut Sink) -> Vec<SlotRef> {
        let Inputs { frames, consumed } = inputs;
        if of.frames.is_empty() {
            if !consumed {
                resident(frames).into_iter().for_each(|slot| to.arenas.device.keep(slot));
            }
            self.caches[of.layer].waiting.extend(frames);
            return Vec::new();
        }
        let waited = std::mem::take(&mut self.caches[of.layer].waiting);
        let all = [&waited, frames].concat();
        let frames = &all[..];
        if !self.facts.is_banded(of.layer) {
            self.queue_inputs(of, Inputs { frames, consumed }, to);
            let outputs = self.conv_queued(of, to);
            self.drop_inputs_before(of.layer, of.frames.end, of.chunk, &mut to.arenas.device);
            if !consumed {
                drop_frames(waited, &mut to.arenas);
            }
            return self.add_around(of, outputs.into_iter().map(FrameRef::Resident).collect(), to);
        }
        let outputs = self.conv_banded(of, Inputs { frames, consumed }, to);
        drop_frames(if consumed { frames } else { &waited }.iter().copied(), &mut to.arenas);
        self.add_around(of, outputs, to)
    }

    /// Adds frames to the inputs that a layer has queued, normalised if an operation of its own does that. A frame that
    /// was passed on may have other readers still; it is not written over.
    fn queue_inputs(&mut self, of: &LayerOutputs, inputs: Inputs, to: &mut Sink) {
        let (layer, frames) = (of.layer, resident(inputs.frames));
        let weights = self.weights.of(layer, to);
        let arena = &mut to.arenas.device;
        let Some(bytes) = self.facts.sizes.layers[layer].normalised else {
            frames.iter().filter(|_| !inputs.consumed).for_each(|slot| arena.keep(*slot));
            self.caches[layer].inputs.frames.extend(frames);
            return;
        };
        let kept = self.kept_inputs(layer, of.chunk);
        let numbers = of.frames.end - frames.len() as u64..of.frames.end;
        let normalised = |(frame, slot): (u64, &Slot)| {
            let overwrites = inputs.consumed && arena.is_sole(*slot);
            (*slot, if overwrites { *slot } else { arena.take(bytes, kept.slot_kind(frame)) })
        };
        let frames: Vec<(Slot, Slot)> = numbers.zip(&frames).map(normalised).collect();
        let shared = frames.iter().filter(|(from, into)| inputs.consumed && from != into);
        shared.for_each(|(from, _)| arena.drop(*from));
        self.caches[layer].inputs.frames.extend(frames.iter().map(|(_, into)| *into));
        let (layout, shape) = (self.facts.spec.network.layers[layer].layout, self.facts.sizes.layers[layer].input);
        to.ops.push_back(Op::Normalise(NormaliseOp { layer, layout, weights, shape, frames }));
    }

    /// A layer's outputs from its queued inputs. Terms of earlier inputs are in its partial sums.
    fn conv_queued(&mut self, of: &LayerOutputs, to: &mut Sink) -> Vec<Slot> {
        let layer = of.layer;
        let weights = self.weights.of(layer, to);
        let partial_sums = self.partial_sums(of, &mut to.arenas.device);
        let residuals = self.residuals(of);
        let outputs = self.outputs(of, residuals.as_deref(), &mut to.arenas.device);
        let facts = &self.facts.spec.network.layers[layer];
        let shortcuts = of.added.filter(|_| residuals.is_none() && self.facts.purpose != Purpose::Rehearsal);
        let shortcuts = shortcuts.map(resident);
        let end = self.caches[layer].inputs.end();
        let conv = of.frames.clone().zip(&outputs).enumerate().map(|(i, (frame, out))| {
            let recipe = facts.time.recipe(frame);
            let mut terms = self.queued_terms(layer, &recipe, end);
            let slab = facts.layout.slabs as u8;
            terms.extend(shortcuts.as_ref().map(|shortcuts| Term { frame: shortcuts[i], slab }));
            ConvFrame { terms, bias: recipe.bias, residual: residuals.as_ref().map(|all| all[i]), out: *out }
        });
        let before = partial_sums.before;
        let stays = partial_sums.after.as_ref().map(|after| after.into);
        to.ops.push_back(Op::Conv(ConvOp {
            layer,
            layout: facts.layout,
            weights,
            input: self.facts.sizes.layers[layer].input,
            frames: conv.collect(),
            statistics: facts.statistics,
            partial_sums,
        }));
        before.filter(|before| Some(*before) != stays).into_iter().for_each(|slot| to.arenas.device.drop(slot));
        self.done_with_weights(of, to);
        outputs
    }

    /// The frames that are added as they are.
    pub fn residuals(&self, of: &LayerOutputs) -> Option<Vec<Slot>> {
        let is_residual = self.facts.spec.network.layers[of.layer].layout.shortcut.is_none();
        of.added.filter(|_| is_residual).map(resident)
    }

    /// The terms of an output frame whose inputs are queued and come before frame `end`.
    fn queued_terms(&self, layer: LayerId, recipe: &Recipe, end: u64) -> Vec<Term<Slots>> {
        let inputs = &self.caches[layer].inputs;
        let queued = self.facts.terms(recipe).iter().filter(|term| (inputs.first..end).contains(&term.input));
        queued.map(|term| Term { frame: inputs.at(term.input), slab: term.slab }).collect()
    }

    /// The partial sums that outputs start from and leave.
    fn partial_sums(&mut self, of: &LayerOutputs, arena: &mut Arena) -> PartialSums<Slots> {
        let (layer, end) = (of.layer, of.frames.end);
        let Some(PartialSumsSize { bytes, in_place }) = self.facts.sizes.layers[layer].partial_sums else {
            return PartialSums::NONE;
        };
        let before = self.caches[layer].partial_sums.take();
        if of.chunk.is_last {
            return PartialSums { before, after: None };
        }
        // Partial sums that stay in place, or outlive the turn of an interleaved work item, are pooled.
        let kind = if in_place || self.facts.spec.is_interleaved() { SlotKind::Pooled } else { SlotKind::Packed };
        let into = before.filter(|_| in_place).unwrap_or_else(|| arena.take(bytes, kind));
        self.caches[layer].partial_sums = Some(into);
        let (time, read) = (&self.facts.spec.network.layers[layer].time, self.facts.oldest_needed(layer, end));
        let pending = (end..).map(|frame| time.recipe(frame)).take_while(|recipe| recipe.terms()[0].input < read);
        let pending = pending.map(|recipe| self.queued_terms(layer, &recipe, read)).collect();
        PartialSums { before, after: Some(PartialSumsOut { pending, into }) }
    }

    /// Slots for materialised outputs: those of `over` if nobody else uses them and the device can write in place, else
    /// new ones. A frame that is kept is never written over a packed one: the next work item gets the same offset.
    pub fn outputs(&self, of: &LayerOutputs, over: Option<&[Slot]>, arena: &mut Arena) -> Vec<Slot> {
        let frames = of.materialised();
        let stays = |(frame, slot): (u64, &Slot)| !of.kept.has(frame) || matches!(slot, Slot::Pooled { .. });
        let usable = |slots: &&[Slot]| {
            self.facts.sizes.adds_in_place
                && slots.iter().all(|slot| arena.is_sole(*slot))
                && frames.clone().zip(*slots).all(stays)
        };
        let over = over.map(|over| &over[..frames.clone().count()]);
        match over.filter(usable) {
            Some(slots) => {
                slots.iter().for_each(|slot| arena.keep(*slot));
                slots.to_vec()
            }
            None => {
                let bytes = self.facts.sizes.layers[of.layer].output;
                frames.map(|frame| arena.take(bytes, of.kept.slot_kind(frame))).collect()
            }
        }
    }

    /// Mixes the pixels of each frame. Nobody else reads the projections.
    pub fn attention(&mut self, project: LayerId, projections: Vec<Slot>, to: &mut Sink) -> Vec<SlotRef> {
        debug_assert_eq!(self.facts.spec.network.layers[project].layout.window, Window::Point);
        let (shape, bytes) = (self.facts.sizes.layers[project].input, self.facts.sizes.layers[project].output);
        let mixed: Vec<Slot> = projections.iter().map(|_| to.arenas.device.take(bytes, SlotKind::Packed)).collect();
        let frames = projections.iter().copied().zip(mixed.iter().copied()).collect();
        to.ops.push_back(Op::Attention(AttentionOp { shape, frames }));
        projections.into_iter().for_each(|slot| to.arenas.device.drop(slot));
        mixed.into_iter().map(FrameRef::Resident).collect()
    }

    /// The input frames that a layer keeps on the device after the chunk.
    pub fn kept_inputs(&self, layer: LayerId, chunk: &Chunk) -> Kept {
        let keeps_frames = !self.facts.is_banded(layer) && self.facts.sizes.layers[layer].partial_sums.is_none();
        if keeps_frames && (self.facts.is_periodic || self.facts.spec.is_interleaved()) {
            Kept::From(self.facts.spec.network.layers[layer].time.oldest(chunk.frames.end))
        } else {
            Kept::None
        }
    }

    /// The first input that output frames from `frame` on read; `None` after the last chunk, when nothing is read.
    pub fn oldest_cached(&self, layer: LayerId, frame: u64, chunk: &Chunk) -> Option<u64> {
        (!chunk.is_last).then(|| self.facts.oldest_needed(layer, frame))
    }

    /// Drops the inputs that no output frame from `frame` on reads.
    pub fn drop_inputs_before(&mut self, layer: LayerId, frame: u64, chunk: &Chunk, arena: &mut Arena) {
        let oldest = self.oldest_cached(layer, frame, chunk);
        self.caches[layer].inputs.drop_before(oldest, arena);
    }

    /// A layer's weights have been read for the last time in a chunk.
    pub fn done_with_weights(&mut self, of: &LayerOutputs, to: &mut Sink) {
        if of.frames.end >= of.chunk.frames.end {
            self.weights.done(of.layer, to);
        }
    }
}
