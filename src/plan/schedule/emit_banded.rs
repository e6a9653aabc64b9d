//! Emits banded convolutions: for layers whose normalised input, cache or output does not lie whole on the device.

use std::ops::Range;

use super::emit::{Emitter, Inputs, LayerOutputs, Purpose};
use super::layer_cache::{CachedSlots, SlotRef, all_resident, drop_cached};
use super::sink::Sink;
use crate::ir::{
    BandInput, BandTerm, BandedConvOp, BandedFrame, CacheFormat, CachedFrame, FrameRef, LayerId, Op, Rematerialise,
    RematerialisedFrame, Shortcut, SplitColumns, Term,
};
use crate::model::{Recipe, pair_of};
use crate::plan::arena::{Arena, Arenas, Slot, SlotKind, Slots};
use crate::plan::policy::{CACHE_FRAMES, Placement};

/// The inputs of a banded convolution. Frames of the causal cache come first, then those of it that are recomputed,
/// then fresh ones.
struct BandInputs {
    list: Vec<BandInput<Slots>>,
    /// The frame of the clip that input 0 is.
    first: u64,
    recomputed: Range<u64>,
    fresh: Range<u64>,
    /// Whether outputs of a later pair read an input as the cache stores it.
    rounds: bool,
}

impl BandInputs {
    fn is_rounded(&self, input: u64, output: u64) -> bool {
        self.rounds && input >= self.recomputed.start && pair_of(input) < pair_of(output)
    }

    fn fresh_mut(&mut self) -> &mut [BandInput<Slots>] {
        &mut self.list[(self.fresh.start - self.first) as usize..]
    }
}

impl Emitter {
    /// A layer's outputs for fresh inputs that end with the same frame. If these are consumed, outputs may overwrite
    /// them: a band reads its rows before it writes any.
    pub fn conv_banded(&mut self, of: &LayerOutputs, inputs: Inputs, to: &mut Sink) -> Vec<SlotRef> {
        let (layer, end) = (of.layer, of.frames.end);
        let weights = self.weights.of(layer, to);
        let outputs = self.banded_outputs(of, &inputs, to.arenas);
        let mut band_inputs = self.band_inputs(of, &inputs);
        let frames = self.banded_frames(of, &outputs, &band_inputs);
        match self.facts.policy.layers[layer].cache {
            Placement::Columns { .. } => self.write_cache(of, &mut band_inputs, to.arenas),
            Placement::Recomputed => self.write_statistics(of, &mut band_inputs, &mut to.arenas.device),
        }
        let BandInputs { list, recomputed, .. } = band_inputs;
        let recomputing = self.facts.network.recomputed_by(layer).filter(|_| !recomputed.is_empty());
        let facts = &self.facts.network.layers[layer];
        let mut op = BandedConvOp {
            layer,
            layout: facts.layout,
            weights,
            input: self.facts.sizes.layers[layer].input,
            inputs: list,
            columns: self.facts.sizes.layers[layer].columns,
            format: facts.cache,
            frames,
            rematerialise: None,
            statistics: facts.statistics,
        };
        if op.rematerialised_frames() > 0 {
            let recompute = || recomputing.map(|by| self.rematerialised_by_head(by, recomputed));
            op.rematerialise = of.rematerialise.clone().or_else(recompute);
        }
        to.ops.push_back(Op::BandedConv(Box::new(op)));
        self.done_with_weights(of, to);
        if let Some(by) = recomputing {
            self.drop_inputs_before(by, end.saturating_sub(CACHE_FRAMES), of.chunk, &mut to.arenas.device);
        }
        outputs
    }

    fn band_inputs(&self, of: &LayerOutputs, inputs: &Inputs) -> BandInputs {
        let end = of.frames.end;
        let cached = self.caches[of.layer].split.iter().copied().map(BandInput::cached);
        let mut list: Vec<BandInput<Slots>> = cached.collect();
        let cached = list.len() as u64;
        list.extend(self.recomputed_inputs(of.layer).map(BandInput::fresh));
        let recomputed = list.len() as u64 - cached;
        list.extend(inputs.frames.iter().map(|frame| BandInput::fresh(*frame)));
        let fresh = end - inputs.frames.len() as u64..end;
        let mut all = BandInputs {
            first: end - list.len() as u64,
            recomputed: fresh.start - recomputed..fresh.start,
            rounds: self.facts.network.layers[of.layer].cache == CacheFormat::U8,
            fresh,
            list,
        };
        let time = &self.facts.network.layers[of.layer].time;
        for output in of.frames.clone().filter(|_| all.rounds) {
            for (input, _) in time.recipe(output).terms() {
                if all.is_rounded(*input, output) {
                    all.list[(input - all.first) as usize].is_rounded = true;
                }
            }
        }
        all
    }

    fn banded_frames(&self, of: &LayerOutputs, outputs: &[SlotRef], inputs: &BandInputs) -> Vec<BandedFrame<Slots>> {
        let facts = &self.facts.network.layers[of.layer];
        let residuals = self.residuals(of);
        let shortcuts = of.added.filter(|_| residuals.is_none());
        let banded = of.frames.clone().zip(outputs).enumerate().map(|(i, (frame, out))| {
            let recipe = facts.time.recipe(frame);
            let slab = facts.layout.slabs as u8;
            BandedFrame {
                terms: self.band_terms(inputs.first, &recipe, |input| inputs.is_rounded(input, frame)),
                shortcut: shortcuts.map(|shortcuts| Shortcut { from: shortcuts[i], slab }),
                bias: recipe.bias,
                residual: residuals.as_ref().map(|residuals| residuals[i]),
                out: *out,
            }
        });
        banded.collect()
    }

    /// The terms of a recipe. Input `first` of the clip is input 0 of the operation.
    fn band_terms(&self, first: u64, recipe: &Recipe, is_rounded: impl Fn(u64) -> bool) -> Vec<BandTerm> {
        let term =
            |(t, slab): &(u64, u8)| BandTerm { input: (*t - first) as usize, is_rounded: is_rounded(*t), slab: *slab };
        self.facts.terms(recipe).iter().map(term).collect()
    }

    /// Where outputs go: to host memory, over frames that nobody needs any more, or to slots of their own.
    fn banded_outputs(&self, of: &LayerOutputs, inputs: &Inputs, arenas: &mut Arenas) -> Vec<SlotRef> {
        if self.facts.policy.layers[of.layer].output.uses_host() {
            return self.streamed_outputs(of.layer, of.frames.clone(), Placement::HOST, arenas);
        }
        let sizes = &self.facts.sizes;
        let may_overwrite = inputs.consumed && sizes.layers[of.layer].normalised == Some(sizes.layers[of.layer].output);
        let own = if may_overwrite { all_resident(inputs.frames) } else { None };
        let own = own.map(|mut own| own.split_off(own.len() - of.frames.clone().count()));
        let over = self.residuals(of).or(own);
        let outputs = self.outputs(of, over.as_deref(), &mut arenas.device);
        let mut outputs: Vec<SlotRef> = outputs.into_iter().map(FrameRef::Resident).collect();
        let rematerialised = of.materialised().end..of.frames.end;
        outputs.extend(self.streamed_outputs(of.layer, rematerialised, Placement::Recomputed, arenas));
        outputs
    }

    /// Outputs that are not resident: in host memory, or computed for their statistics only.
    fn streamed_outputs(&self, layer: LayerId, frames: Range<u64>, at: Placement, arenas: &mut Arenas) -> Vec<SlotRef> {
        let output = |(index, _): (usize, u64)| {
            let statistics = arenas.device.take(self.facts.sizes.statistics, SlotKind::Packed);
            match at {
                Placement::Recomputed => FrameRef::Rematerialised { index, statistics },
                Placement::Columns { .. } => {
                    let frame = arenas.host.take(self.facts.sizes.layers[layer].output, SlotKind::Packed);
                    FrameRef::Offloaded { frame, statistics }
                }
            }
        };
        frames.enumerate().map(output).collect()
    }

    /// The outputs of a stage's head that are not resident. Its inputs are read in place.
    pub fn head_banded(&mut self, head: LayerId, frames: Range<u64>, at: Placement, to: &mut Sink) -> Vec<SlotRef> {
        debug_assert!(self.facts.sizes.layers[head].partial_sums.is_none(), "bands read whole input frames");
        let outputs = self.streamed_outputs(head, frames.clone(), at, to.arenas);
        let (facts, inputs) = (&self.facts.network.layers[head], &self.caches[head].inputs);
        let banded = frames.zip(&outputs).map(|(frame, out)| {
            let recipe = facts.time.recipe(frame);
            let terms = self.band_terms(inputs.first, &recipe, |_| false);
            BandedFrame { terms, shortcut: None, bias: recipe.bias, residual: None, out: *out }
        });
        let input = self.facts.sizes.layers[head].input;
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
        outputs
    }

    /// The frames of a layer's cache that are recomputed.
    pub fn recomputed_inputs(&self, layer: LayerId) -> impl ExactSizeIterator<Item = SlotRef> + '_ {
        let statistics = self.caches[layer].statistics.iter().enumerate();
        statistics.map(|(index, slot)| FrameRef::Rematerialised { index, statistics: *slot })
    }

    /// How a stage's first layer computes these frames again, from its queued input.
    pub fn rematerialised_by_head(&self, head: LayerId, frames: Range<u64>) -> Rematerialise<Slots> {
        let inputs = &self.caches[head].inputs;
        self.rematerialised_by(head, frames, |frame| inputs.at(frame))
    }

    /// How a layer computes these hidden frames again. `x`: its input, which ends with the same frame.
    pub fn rematerialised_hidden(&self, first: LayerId, frames: Range<u64>, x: &[Slot]) -> Rematerialise<Slots> {
        let first_input = frames.end - x.len() as u64;
        let oldest = self.facts.network.layers[first].time.oldest(frames.start);
        let by = self.rematerialised_by(first, frames, |frame| x[(frame - first_input) as usize]);
        Rematerialise { block_inputs: x[(oldest - first_input) as usize..].to_vec(), ..by }
    }

    /// How a layer computes these output frames again. `input`: where each input frame is.
    fn rematerialised_by(
        &self,
        layer: LayerId,
        frames: Range<u64>,
        input: impl Fn(u64) -> Slot,
    ) -> Rematerialise<Slots> {
        let facts = &self.facts.network.layers[layer];
        let needed = frames.take_while(|_| self.facts.purpose != Purpose::Rehearsal);
        let frames = needed.map(|frame| {
            let recipe = facts.time.recipe(frame);
            let terms = recipe.terms().iter().map(|(t, slab)| Term { frame: input(*t), slab: *slab });
            RematerialisedFrame { terms: terms.collect(), bias: recipe.bias }
        });
        let (layout, input, frames) = (facts.layout, self.facts.sizes.layers[layer].input, frames.collect());
        Rematerialise { layer, layout, input, block_inputs: Vec::new(), frames }
    }

    /// Takes slots for those fresh inputs that later frames read: the left columns on the device, the rest in host
    /// memory. Drops the slots of older frames.
    fn write_cache(&mut self, of: &LayerOutputs, inputs: &mut BandInputs, arenas: &mut Arenas) {
        let fresh = inputs.fresh.clone();
        let oldest = self.oldest_cached(of.layer, fresh.end, of.chunk).unwrap_or(fresh.end);
        let sizes = &self.facts.sizes.layers[of.layer];
        let cache = &mut self.caches[of.layer].split;
        let expired = oldest.saturating_sub(fresh.start - cache.len() as u64).min(cache.len() as u64) as usize;
        let expired: Vec<CachedSlots> = cache.drain(..expired).collect();
        // A new frame may take the place of one that this operation still reads: backends write a row of it only when
        // no band reads the old row any more.
        let mut reused = expired.into_iter();
        for (_, input) in fresh.zip(inputs.fresh_mut()).filter(|(frame, _)| *frame >= oldest) {
            let slots = reused.next().unwrap_or_else(|| CachedFrame {
                resident: sizes.resident_part.map(|bytes| arenas.device.take(bytes, SlotKind::Pooled)),
                host: sizes.host_part.map(|bytes| arenas.host.take(bytes, SlotKind::Pooled)),
            });
            input.cached_to = Some(slots);
            cache.push_back(slots);
        }
        reused.for_each(|frame| drop_cached(frame, arenas));
    }

    /// Takes slots for the statistics of those fresh inputs that will be recomputed.
    fn write_statistics(&mut self, of: &LayerOutputs, inputs: &mut BandInputs, arena: &mut Arena) {
        let statistics = &mut self.caches[of.layer].statistics;
        let cached_frames = if of.chunk.is_last { 0 } else { CACHE_FRAMES };
        let first = of.chunk.frames.end.saturating_sub(cached_frames);
        for (_, input) in inputs.fresh.clone().zip(inputs.fresh_mut()).filter(|(frame, _)| *frame >= first) {
            let slot = arena.take(self.facts.sizes.statistics, SlotKind::Pooled);
            input.statistics_to = Some(slot);
            statistics.push(slot);
        }
        let expired = statistics.len().saturating_sub(cached_frames as usize);
        statistics.drain(..expired).for_each(|slot| arena.drop(slot));
    }
}
