//! Emits banded convolutions: for layers whose normalised input, cache or output does not lie whole on the device.

use std::ops::Range;
use std::sync::Arc;

use super::emit::{Emitter, LayerOutputs};
use super::layer_cache::{CachedSlots, LayerCache, SlotRef, all_resident, drop_cached};
use super::sink::Sink;
use crate::ir::{
    BandInput, BandTerm, BandedConvOp, BandedFrame, CacheFormat, CachedFrame, FrameRef, LayerId, Op, Rematerialise,
    RematerialisedFrame, Shortcut, SplitColumns, Term,
};
use crate::model::{Recipe, pair_of};
use crate::plan::arena::{Arena, Arenas, Slot, SlotKind, Slots};
use crate::plan::policy::{CACHE_FRAMES, CachePolicy};

impl Emitter {
    /// A layer's outputs for fresh inputs that end with the same frame. If `consumed`, no other layer reads the inputs,
    /// so outputs may overwrite them: a band reads its rows before it writes any.
    pub fn conv_banded(
        &mut self,
        of: &LayerOutputs,
        inputs: &[SlotRef],
        consumed: bool,
        to: &mut Sink,
    ) -> Vec<SlotRef> {
        let LayerOutputs { layer, ref frames, addend, .. } = *of;
        let weights = self.weights_of(layer, to);
        let facts = &self.network.layers[layer];
        let (layout, statistics, format) = (facts.layout, facts.statistics, facts.cache);
        let time = Arc::clone(&facts.time);
        let is_recomputed = self.policy.caches[layer] == CachePolicy::Recomputed;
        let recomputed = self.recomputed_inputs(layer);
        let overwritable = if consumed { all_resident(inputs) } else { None };
        let outputs = self.banded_outputs(of, overwritable, to.arenas);
        let cached = self.caches[layer].split_frames();
        let fresh = frames.end - inputs.len() as u64..frames.end;
        // Cached and recomputed frames precede the fresh ones, so inputs are numbered from here.
        let recomputed_frames = fresh.start - recomputed.len() as u64..fresh.start;
        let first = recomputed_frames.start - cached.len() as u64;
        // Outputs of a later pair read an input as the cache stores it.
        let is_rounded = |input: u64, output: u64| {
            format == CacheFormat::U8 && input >= recomputed_frames.start && pair_of(input) < pair_of(output)
        };
        let mut banded_inputs: Vec<BandInput<Slots>> = cached.into_iter().map(BandInput::cached).collect();
        banded_inputs.extend(recomputed.iter().chain(inputs).map(|frame| BandInput::fresh(*frame)));
        for output in frames.clone().filter(|_| format == CacheFormat::U8) {
            let recipe = time.recipe(output);
            let read = recipe.terms().iter().map(|(input, _)| *input).filter(|input| is_rounded(*input, output));
            read.for_each(|input| banded_inputs[(input - first) as usize].is_rounded = true);
        }
        let banded = frames.clone().zip(&outputs).enumerate().map(|(i, (frame, out))| {
            let recipe = time.recipe(frame);
            let slab = layout.slabs as u8;
            BandedFrame {
                terms: self.terms_from(first, &recipe, |input| is_rounded(input, frame)),
                shortcut: addend.shortcut(i).map(|from| Shortcut { from, slab }),
                bias: recipe.bias,
                residual: addend.residual(i),
                out: *out,
            }
        });
        let banded = banded.collect();
        let fresh_inputs = &mut banded_inputs[(fresh.start - first) as usize..];
        self.write_cache(layer, fresh.clone(), fresh_inputs, to.arenas);
        if is_recomputed {
            self.write_statistics(layer, fresh, fresh_inputs, &mut to.arenas.device);
        }
        let recomputing = self.network.recomputed_by(layer).filter(|_| !recomputed.is_empty());
        let mut op = BandedConvOp {
            layer,
            layout,
            weights,
            input: self.sizes.inputs[layer],
            inputs: banded_inputs,
            columns: self.sizes.columns[layer],
            format,
            frames: banded,
            rematerialise: None,
            statistics,
        };
        if op.rematerialised_frames() > 0 {
            let recompute = || recomputing.map(|by| self.rematerialised_by_head(by, recomputed_frames));
            op.rematerialise = of.rematerialise.clone().or_else(recompute);
        }
        to.ops.push_back(Op::BandedConv(Box::new(op)));
        self.done_with_weights(layer, frames.end, to);
        if let Some(by) = recomputing {
            self.drop_inputs_before(by, frames.end.saturating_sub(CACHE_FRAMES), &mut to.arenas.device);
        }
        outputs
    }

    /// The terms of a recipe. Input `first` of the clip is input 0 of the operation.
    fn terms_from(&self, first: u64, recipe: &Recipe, is_rounded: impl Fn(u64) -> bool) -> Vec<BandTerm> {
        let terms = recipe.terms().iter().take_while(|_| !self.is_rehearsal || recipe.terms().len() == 1);
        let term =
            |(t, slab): &(u64, u8)| BandTerm { input: (*t - first) as usize, is_rounded: is_rounded(*t), slab: *slab };
        terms.map(term).collect()
    }

    /// Where outputs go: to host memory, over frames that nobody needs any more, or to slots of their own.
    fn banded_outputs(&self, of: &LayerOutputs, overwritable: Option<Vec<Slot>>, arenas: &mut Arenas) -> Vec<SlotRef> {
        let (layer, frames) = (of.layer, of.frames.clone());
        if self.policy.offloaded_outputs[layer] {
            return frames.map(|_| self.offloaded_frame(layer, arenas)).collect();
        }
        let own = overwritable.filter(|_| self.sizes.normalised[layer] == Some(self.sizes.outputs[layer]));
        let own = own.as_ref().map(|own| &own[own.len() - frames.clone().count()..]);
        let over = of.addend.residuals().or(own);
        let rematerialised = of.first_rematerialised.min(frames.end)..frames.end;
        let materialised = LayerOutputs { frames: frames.start..rematerialised.start, ..of.clone() };
        let over = over.map(|over| &over[..materialised.frames.clone().count()]);
        let outputs = self.outputs(&materialised, over, &mut arenas.device);
        let outputs = outputs.into_iter().map(FrameRef::Resident);
        outputs.chain(self.rematerialised_outputs(rematerialised, &mut arenas.device)).collect()
    }

    /// The outputs of a stage's head in host memory. Its inputs are read in place.
    pub fn head_offloaded(&mut self, head: LayerId, frames: Range<u64>, to: &mut Sink) -> Vec<SlotRef> {
        let outputs: Vec<SlotRef> = frames.clone().map(|_| self.offloaded_frame(head, to.arenas)).collect();
        self.head_banded(head, frames, &outputs, to);
        outputs
    }

    /// The statistics of a stage head's outputs. Readers rematerialise the outputs themselves.
    pub fn head_rematerialised(&mut self, head: LayerId, frames: Range<u64>, to: &mut Sink) -> Vec<SlotRef> {
        let outputs = self.rematerialised_outputs(frames.clone(), &mut to.arenas.device);
        self.head_banded(head, frames, &outputs, to);
        outputs
    }

    /// Outputs that are computed for their statistics only.
    fn rematerialised_outputs(&self, frames: Range<u64>, arena: &mut Arena) -> Vec<SlotRef> {
        let mut statistics = || arena.take(self.sizes.statistics, SlotKind::Packed);
        frames.enumerate().map(|(index, _)| FrameRef::Rematerialised { index, statistics: statistics() }).collect()
    }

    /// How a layer computes these hidden frames again. `x`: its input, which ends with the same frame.
    pub fn rematerialised_hidden(&self, first: LayerId, frames: Range<u64>, x: &[Slot]) -> Rematerialise<Slots> {
        let first_input = frames.end - x.len() as u64;
        let oldest = self.network.layers[first].time.oldest(frames.start);
        let by = self.rematerialised_by(first, frames, |frame| x[(frame - first_input) as usize]);
        Rematerialise { block_inputs: x[(oldest - first_input) as usize..].to_vec(), ..by }
    }

    fn head_banded(&mut self, head: LayerId, frames: Range<u64>, outputs: &[SlotRef], to: &mut Sink) {
        debug_assert!(self.sizes.partial_sums[head].is_none(), "bands read whole input frames");
        let (facts, inputs) = (&self.network.layers[head], self.caches[head].inputs());
        let banded = frames.zip(outputs).map(|(frame, out)| {
            let recipe = facts.time.recipe(frame);
            let terms = self.terms_from(inputs.first, &recipe, |_| false);
            BandedFrame { terms, shortcut: None, bias: recipe.bias, residual: None, out: *out }
        });
        let input = self.sizes.inputs[head];
        let op = BandedConvOp {
            layer: head,
            layout: facts.layout,
            weights: None,
            input,
            inputs: inputs.frames.iter().map(|slot| BandInput::fresh(FrameRef::Resident(*slot))).collect(),
            columns: SplitColumns::all_resident(input.width),
            format: CacheFormat::Exact,
            frames: banded.collect(),
            rematerialise: None,
            statistics: facts.statistics,
        };
        to.ops.push_back(Op::BandedConv(Box::new(op)));
    }

    /// The frames of a layer's cache that are recomputed.
    pub fn recomputed_inputs(&self, layer: LayerId) -> Vec<SlotRef> {
        let LayerCache::Recomputed(statistics) = &self.caches[layer] else { return Vec::new() };
        let frames = statistics.iter().enumerate();
        frames.map(|(index, slot)| FrameRef::Rematerialised { index, statistics: *slot }).collect()
    }

    /// How a stage's first layer computes these frames again, from its queued input.
    pub fn rematerialised_by_head(&self, head: LayerId, frames: Range<u64>) -> Rematerialise<Slots> {
        let inputs = self.caches[head].inputs();
        self.rematerialised_by(head, frames, |frame| inputs.at(frame))
    }

    /// How a layer computes these output frames again. `input`: where each input frame is.
    fn rematerialised_by(
        &self,
        layer: LayerId,
        frames: Range<u64>,
        input: impl Fn(u64) -> Slot,
    ) -> Rematerialise<Slots> {
        let facts = &self.network.layers[layer];
        let frames = frames.take_while(|_| !self.is_rehearsal).map(|frame| {
            let recipe = facts.time.recipe(frame);
            let terms = recipe.terms().iter().map(|(t, slab)| Term { frame: input(*t), slab: *slab });
            RematerialisedFrame { terms: terms.collect(), bias: recipe.bias }
        });
        let (layout, input, frames) = (facts.layout, self.sizes.inputs[layer], frames.collect());
        Rematerialise { layer, layout, input, block_inputs: Vec::new(), frames }
    }

    fn offloaded_frame(&self, layer: LayerId, arenas: &mut Arenas) -> SlotRef {
        let statistics = arenas.device.take(self.sizes.statistics, SlotKind::Packed);
        FrameRef::Offloaded { frame: arenas.host.take(self.sizes.outputs[layer], SlotKind::Packed), statistics }
    }

    /// Takes slots for those of `frames` that later frames read: the left columns on the device, the rest in host
    /// memory. Drops the slots of older frames. `inputs`: those of `frames`.
    fn write_cache(
        &mut self,
        layer: LayerId,
        frames: Range<u64>,
        inputs: &mut [BandInput<Slots>],
        arenas: &mut Arenas,
    ) {
        let oldest = if self.last_chunk { u64::MAX } else { self.oldest_needed(layer, frames.end) };
        let [resident_bytes, host_bytes] = self.sizes.cached[layer];
        let LayerCache::Offloaded(cache) = &mut self.caches[layer] else { return };
        let expired = oldest.saturating_sub(frames.start - cache.len() as u64).min(cache.len() as u64) as usize;
        let expired: Vec<CachedSlots> = cache.drain(..expired).collect();
        // Both parts can be overwritten: the rows of a band are read before they are written.
        let mut reused = expired.into_iter();
        for (_, input) in frames.zip(inputs).filter(|(frame, _)| *frame >= oldest) {
            let slots = reused.next().unwrap_or_else(|| CachedFrame {
                resident: resident_bytes.map(|bytes| arenas.device.take(bytes, SlotKind::Pooled)),
                host: host_bytes.map(|bytes| arenas.host.take(bytes, SlotKind::Pooled)),
            });
            input.cached_to = Some(slots);
            cache.push_back(slots);
        }
        reused.for_each(|frame| drop_cached(frame, arenas));
    }

    /// Takes slots for the statistics of those of `frames` that will be recomputed. `inputs`: those of `frames`.
    fn write_statistics(
        &mut self,
        layer: LayerId,
        frames: Range<u64>,
        inputs: &mut [BandInput<Slots>],
        arena: &mut Arena,
    ) {
        let cached_frames = if self.last_chunk { 0 } else { CACHE_FRAMES };
        let first = self.chunk_end.saturating_sub(cached_frames);
        let LayerCache::Recomputed(statistics) = &mut self.caches[layer] else {
            unreachable!("only a recomputed cache keeps statistics")
        };
        for (_, input) in frames.zip(inputs).filter(|(frame, _)| *frame >= first) {
            let slot = arena.take(self.sizes.statistics, SlotKind::Pooled);
            input.statistics_to = Some(slot);
            statistics.push_back(slot);
        }
        let expired = statistics.len().saturating_sub(cached_frames as usize);
        statistics.drain(..expired).for_each(|slot| arena.drop(slot));
    }
}
