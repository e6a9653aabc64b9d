//! Emits the operations of single layers: which frames go in, where results lie, and what stays cached.
//!
//! Owns the caches of a work item. Knows the policy and the sizes; does not know which stage runs next.

use std::ops::Range;
use std::sync::Arc;

use super::layer_cache::{LayerCache, SlotRef, drop_frames, resident};
use super::sink::Sink;
use super::weights::WeightFetcher;
use crate::ir::{
    AttentionOp, ConvFrame, ConvOp, FetchedWeights, FrameRef, LayerId, NormaliseOp, Op, PartialSums, PartialSumsOut,
    PartialSumsSize, Rematerialise, Term, Window,
};
use crate::model::{Cone, Network};
use crate::plan::arena::{Arena, Slot, SlotKind, Slots};
use crate::plan::cost::FrameSizes;
use crate::plan::policy::{CachePolicy, SchedulePolicy};

/// In place of a first frame: there is none.
pub const NONE: u64 = u64::MAX;

/// What is added to a convolution's sum beside its own inputs.
#[derive(Clone, Copy)]
pub enum Addend<'a> {
    None,
    Residual(&'a [Slot]),
    Shortcut(&'a [SlotRef]),
}

impl<'a> Addend<'a> {
    pub fn residuals(&self) -> Option<&'a [Slot]> {
        if let Addend::Residual(x) = self { Some(x) } else { None }
    }

    pub fn residual(&self, frame: usize) -> Option<Slot> {
        if let Addend::Residual(x) = self { Some(x[frame]) } else { None }
    }

    pub fn shortcut(&self, frame: usize) -> Option<SlotRef> {
        if let Addend::Shortcut(x) = self { Some(x[frame]) } else { None }
    }
}

/// What a layer is to compute: output frames, and what is added to them. Those from `first_cached` on stay cached.
#[derive(Clone)]
pub struct LayerOutputs<'a> {
    pub layer: LayerId,
    pub frames: Range<u64>,
    pub addend: Addend<'a>,
    pub first_cached: u64,
    /// The first frame of those that are computed for their statistics only.
    pub first_rematerialised: u64,
    /// How those of its inputs are computed that are rematerialised.
    pub rematerialise: Option<Rematerialise<Slots>>,
}

impl LayerOutputs<'_> {
    /// With nothing added.
    pub fn plain(layer: LayerId, frames: Range<u64>, first_cached: u64) -> LayerOutputs<'static> {
        LayerOutputs {
            layer,
            frames,
            addend: Addend::None,
            first_cached,
            first_rematerialised: NONE,
            rematerialise: None,
        }
    }
}

/// Emits the layers of one work item.
#[derive(Debug)]
pub struct Emitter {
    pub network: Arc<Network>,
    pub cone: Arc<Cone>,
    pub sizes: Arc<FrameSizes>,
    pub policy: Arc<SchedulePolicy>,
    pub caches: Vec<LayerCache>,
    /// Of each layer, input frames that wait for its first output: where a range begins within a clip.
    pub waiting: Vec<Vec<SlotRef>>,
    pub weights: WeightFetcher,
    /// True if the job has more slices than are traced. Then each slice must take the same slots, also the last.
    pub periodic: bool,
    /// True if other work items run in between: frames that outlive the turn are pooled.
    pub interleaved: bool,
    /// True if nobody runs the operations: then frames have no terms, unless they have one only.
    pub is_rehearsal: bool,
    /// Where the current chunk of a stage ends.
    pub chunk_end: u64,
    /// True for the last chunk of a stage: nothing needs to be cached.
    pub last_chunk: bool,
}

impl Emitter {
    /// The outputs of a stage's head. Its inputs are in its queue, and stay there.
    pub fn head(&mut self, head: LayerId, frames: Range<u64>, first_cached: u64, to: &mut Sink) -> Vec<SlotRef> {
        if frames.is_empty() {
            return Vec::new();
        }
        let made = self.conv_queued(&LayerOutputs::plain(head, frames, first_cached), to);
        made.into_iter().map(FrameRef::Resident).collect()
    }

    pub fn is_banded(&self, layer: LayerId) -> bool {
        self.policy.caches[layer] != CachePolicy::Resident
    }

    /// The first output of a layer that is rematerialised for its reader. All are materialised while a range fills its
    /// cone.
    pub fn first_hidden(&self, layer: LayerId, frames: &Range<u64>) -> u64 {
        let hides = |reader: &LayerId| self.policy.hidden_by(&self.network, *reader).is_some_and(|(by, _)| by == layer);
        let reader = self.network.readers(layer).iter().map(|reader| reader.layer).find(hides);
        let can = |layer: LayerId| {
            let none_waits = self.waiting[layer].is_empty() && self.cone.outputs(layer, frames) == *frames;
            self.is_banded(layer) && none_waits
        };
        match reader {
            Some(reader) if can(layer) && can(reader) => {
                frames.end.min(frames.start + self.policy.materialised_hidden[self.network.stage_of(layer)])
            }
            _ => NONE,
        }
    }

    /// The inputs of a layer that waited for its first output. `None` if there is no output yet: then these wait too.
    fn waited(&mut self, of: &LayerOutputs, inputs: &[SlotRef], arena: &mut Arena) -> Option<Vec<SlotRef>> {
        if !of.frames.is_empty() {
            return Some(std::mem::take(&mut self.waiting[of.layer]));
        }
        resident(inputs).into_iter().for_each(|slot| arena.keep(slot));
        self.waiting[of.layer].extend(inputs);
        None
    }

    /// A layer's outputs for inputs that other layers read too. There may be more inputs than outputs at first.
    pub fn conv(&mut self, of: &LayerOutputs, inputs: &[SlotRef], to: &mut Sink) -> Vec<SlotRef> {
        let Some(waited) = self.waited(of, inputs, &mut to.arenas.device) else { return Vec::new() };
        let all: Vec<SlotRef>;
        let inputs = if waited.is_empty() {
            inputs
        } else {
            all = [&waited, inputs].concat();
            &all
        };
        let outputs = match self.is_banded(of.layer) {
            true => self.conv_banded(of, inputs, false, to),
            false => self.conv_resident(of, &resident(inputs), to),
        };
        drop_frames(waited, to.arenas);
        outputs
    }

    fn conv_resident(&mut self, of: &LayerOutputs, inputs: &[Slot], to: &mut Sink) -> Vec<SlotRef> {
        let (layer, end) = (of.layer, of.frames.end);
        let weights = self.weights_of(layer, to);
        let arena = &mut to.arenas.device;
        match self.sizes.normalised[layer] {
            Some(bytes) => {
                let cached = self.first_cached_frame(layer);
                let numbers = end - inputs.len() as u64..end;
                let normalised = numbers.map(|frame| arena.take(bytes, slot_kind(cached, frame)));
                let pairs: Vec<(Slot, Slot)> = inputs.iter().copied().zip(normalised).collect();
                self.caches[layer].inputs_mut().frames.extend(pairs.iter().map(|(_, to)| *to));
                self.normalise(layer, weights, pairs, to);
            }
            None => {
                inputs.iter().for_each(|slot| arena.keep(*slot));
                self.caches[layer].inputs_mut().frames.extend(inputs);
            }
        }
        self.conv_and_drop(of, to)
    }

    /// A layer's outputs for inputs that no other layer reads.
    pub fn conv_consuming(&mut self, of: &LayerOutputs, inputs: Vec<SlotRef>, to: &mut Sink) -> Vec<SlotRef> {
        let layer = of.layer;
        let Some(waited) = self.waited(of, &inputs, &mut to.arenas.device) else {
            drop_frames(inputs, to.arenas);
            return Vec::new();
        };
        let inputs = if waited.is_empty() { inputs } else { [waited, inputs].concat() };
        if self.is_banded(layer) {
            let outputs = self.conv_banded(of, &inputs, true, to);
            drop_frames(inputs, to.arenas);
            return outputs;
        }
        let inputs = resident(&inputs);
        if self.sizes.normalised[layer].is_some() {
            let weights = self.weights_of(layer, to);
            self.normalise(layer, weights, inputs.iter().map(|slot| (*slot, *slot)).collect(), to);
        }
        self.caches[layer].inputs_mut().frames.extend(inputs);
        self.conv_and_drop(of, to)
    }

    fn normalise(
        &self,
        layer: LayerId,
        weights: Option<FetchedWeights<Slots>>,
        frames: Vec<(Slot, Slot)>,
        to: &mut Sink,
    ) {
        let (layout, shape) = (self.network.layers[layer].layout, self.sizes.inputs[layer]);
        to.ops.push_back(Op::Normalise(NormaliseOp { layer, layout, weights, shape, frames }));
    }

    /// A layer's outputs from its queued inputs; then drops the inputs that no later frame reads.
    fn conv_and_drop(&mut self, of: &LayerOutputs, to: &mut Sink) -> Vec<SlotRef> {
        let outputs = self.conv_queued(of, to);
        self.drop_inputs_before(of.layer, of.frames.end, &mut to.arenas.device);
        outputs.into_iter().map(FrameRef::Resident).collect()
    }

    /// A layer's outputs from its queued inputs. Terms of earlier inputs are in its partial sums.
    fn conv_queued(&mut self, of: &LayerOutputs, to: &mut Sink) -> Vec<Slot> {
        let LayerOutputs { layer, ref frames, addend, .. } = *of;
        let weights = self.weights_of(layer, to);
        let (partial_sums, before) = self.partial_sums(layer, frames.end, &mut to.arenas.device);
        let outputs = self.outputs(of, addend.residuals(), &mut to.arenas.device);
        let facts = &self.network.layers[layer];
        let conv = frames.clone().zip(&outputs).enumerate().map(|(i, (frame, out))| {
            let mut terms = self.queued_terms(layer, frame, u64::MAX);
            if !self.is_rehearsal {
                let shortcut = addend.shortcut(i).map(|input| resident(&[input])[0]);
                terms.extend(shortcut.map(|frame| Term { frame, slab: facts.layout.slabs as u8 }));
            }
            ConvFrame { terms, bias: facts.time.recipe(frame).bias, residual: addend.residual(i), out: *out }
        });
        to.ops.push_back(Op::Conv(ConvOp {
            layer,
            layout: facts.layout,
            weights,
            input: self.sizes.inputs[layer],
            frames: conv.collect(),
            statistics: facts.statistics,
            partial_sums,
        }));
        before.into_iter().for_each(|slot| to.arenas.device.drop(slot));
        self.done_with_weights(layer, frames.end, to);
        outputs
    }

    /// The terms of an output frame whose inputs are queued and come before frame `end`.
    fn queued_terms(&self, layer: LayerId, frame: u64, end: u64) -> Vec<Term<Slots>> {
        let recipe = self.network.layers[layer].time.recipe(frame);
        if self.is_rehearsal && recipe.terms().len() > 1 {
            return Vec::new();
        }
        let inputs = self.caches[layer].inputs();
        let queued = recipe.terms().iter().filter(|(input, _)| (inputs.first..end).contains(input));
        queued.map(|(input, slab)| Term { frame: inputs.at(*input), slab: *slab }).collect()
    }

    /// The partial sums that outputs up to `end` start from and leave. The caller drops the former.
    fn partial_sums(&mut self, layer: LayerId, end: u64, arena: &mut Arena) -> (PartialSums<Slots>, Option<Slot>) {
        let Some(PartialSumsSize { bytes, in_place }) = self.sizes.partial_sums[layer] else {
            return (PartialSums::NONE, None);
        };
        let LayerCache::PartialSums { sums, .. } = &mut self.caches[layer] else {
            unreachable!("a layer with partial sums caches these")
        };
        let before = sums.take();
        if self.last_chunk {
            return (PartialSums { before, after: None }, before);
        }
        // Partial sums that stay in place, or outlive the turn of an interleaved work item, are pooled.
        let kind = if in_place || self.interleaved { SlotKind::Pooled } else { SlotKind::Packed };
        let into = before.filter(|_| in_place).unwrap_or_else(|| arena.take(bytes, kind));
        *sums = Some(into);
        let (time, read) = (&self.network.layers[layer].time, self.oldest_needed(layer, end));
        let pending = (end..).take_while(|frame| time.oldest(*frame) < read);
        let pending = pending.map(|frame| self.queued_terms(layer, frame, read)).collect();
        (PartialSums { before, after: Some(PartialSumsOut { pending, into }) }, before.filter(|_| !in_place))
    }

    /// Slots for output frames: those of `over` if nobody else uses them and the device can write in place, else new
    /// ones. A frame that stays cached, or outlives the turn, is never written over a packed one: the next work item
    /// gets the same offset.
    pub fn outputs(&self, of: &LayerOutputs, over: Option<&[Slot]>, arena: &mut Arena) -> Vec<Slot> {
        let stays = |(frame, slot): (u64, &Slot)| frame < of.first_cached || matches!(slot, Slot::Pooled { .. });
        let usable = |slots: &&[Slot]| {
            self.sizes.adds_in_place
                && slots.iter().all(|slot| arena.is_sole(*slot))
                && of.frames.clone().zip(*slots).all(stays)
        };
        match over.filter(usable) {
            Some(slots) => {
                slots.iter().for_each(|slot| arena.keep(*slot));
                slots.to_vec()
            }
            None => {
                let take = |frame| arena.take(self.sizes.outputs[of.layer], slot_kind(of.first_cached, frame));
                of.frames.clone().map(take).collect()
            }
        }
    }

    pub fn attention(&mut self, project: LayerId, projections: Vec<Slot>, to: &mut Sink) -> Vec<SlotRef> {
        debug_assert_eq!(self.network.layers[project].layout.window, Window::Point);
        let (shape, bytes) = (self.sizes.inputs[project], self.sizes.outputs[project]);
        let mixed: Vec<Slot> = projections.iter().map(|_| to.arenas.device.take(bytes, SlotKind::Packed)).collect();
        let frames = projections.iter().copied().zip(mixed.iter().copied()).collect();
        to.ops.push_back(Op::Attention(AttentionOp { shape, frames }));
        projections.into_iter().for_each(|slot| to.arenas.device.drop(slot));
        mixed.into_iter().map(FrameRef::Resident).collect()
    }

    /// The first input frame of a layer that stays cached on the device after the chunk.
    pub fn first_cached_frame(&self, layer: LayerId) -> u64 {
        let caches = (self.periodic || self.interleaved) && matches!(self.caches[layer], LayerCache::Resident(_));
        if caches { self.network.layers[layer].time.oldest(self.chunk_end) } else { NONE }
    }

    /// The first input frame of a layer that still waits after the chunk, where its slot must not be packed.
    pub fn first_waiting_frame(&self, layer: LayerId) -> u64 {
        if self.interleaved && self.chunk_end <= self.cone.first(layer) { 0 } else { NONE }
    }

    /// The oldest input that output frames from `frame` on read.
    pub fn oldest_needed(&self, layer: LayerId, frame: u64) -> u64 {
        let time = &self.network.layers[layer].time;
        match self.sizes.partial_sums[layer] {
            // All inputs that earlier outputs read are in the partial sums.
            Some(_) if frame > self.cone.first(layer) => time.input_end(frame - 1),
            _ => time.oldest(frame),
        }
    }

    /// Drops the inputs that no output frame from `frame` on reads.
    pub fn drop_inputs_before(&mut self, layer: LayerId, frame: u64, arena: &mut Arena) {
        let oldest = if self.last_chunk { u64::MAX } else { self.oldest_needed(layer, frame) };
        self.caches[layer].inputs_mut().drop_before(oldest, arena);
    }

    pub fn weights_of(&mut self, layer: LayerId, to: &mut Sink) -> Option<FetchedWeights<Slots>> {
        self.weights.of(layer, (&self.network, &self.sizes), to)
    }

    /// A layer has computed its frames up to `end`.
    pub fn done_with_weights(&mut self, layer: LayerId, end: u64, to: &mut Sink) {
        if end >= self.chunk_end {
            self.weights.done(layer, to);
        }
    }
}

/// Cached frames are pooled: they form a ring, and each takes the slot of the one it replaces.
fn slot_kind(first_cached: u64, frame: u64) -> SlotKind {
    if frame >= first_cached { SlotKind::Pooled } else { SlotKind::Packed }
}
