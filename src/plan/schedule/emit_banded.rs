//! Emits banded convolutions: for layers whose normalised input, cache or output does not lie whole on the device.

use std::ops::Range;

use super::emit::{Emitter, Inputs, LayerOutputs, Purpose};
use super::layer_cache::{CachedSlots, LayerCache, SlotRef, all_resident, drop_cached};
use super::sink::Sink;
use crate::ir::{
    BandedConvOp, BandedFrame, CacheFormat, CachedFrame, FrameRef, LayerId, Op, Rematerialise, RematerialisedFrame,
    SplitColumns, Term,
};
use crate::model::{Recipes, pair_of};
use crate::plan::arena::{Arena, Arenas, Slot, SlotKind, Slots};
use crate::plan::policy::{CACHE_FRAMES, Placement, Representation};

impl Emitter {
    /// A layer's outputs for fresh inputs that end with the same frame. If these are consumed, outputs may overwrite
    /// them: a band reads its rows before it writes any.
    pub fn conv_banded(&mut self, of: &LayerOutputs, inputs: Inputs, to: &mut Sink) -> Vec<SlotRef> {
        let (layer, end) = (of.layer, of.frames.end);
        let weights = self.weights.of(layer, to);
        let recomputed = self.recomputed_inputs(layer);
        let outputs = self.banded_outputs(of, &inputs, to.arenas);
        let cached = self.caches[layer].split_frames();
        let fresh = end - inputs.frames.len() as u64..end;
        // Cached and recomputed frames precede the fresh ones, so inputs are numbered from here.
        let first_computed = fresh.start - recomputed.len() as u64;
        let first = first_computed - cached.len() as u64;
        let time = &self.facts.network.layers[layer].time;
        let rounded = match self.facts.sizes.kept[layer] {
            Representation::EightBit => rounded_inputs(time, &of.frames, first_computed),
            _ => Vec::new(),
        };
        let frames = self.banded_frames(of, &outputs, first, &rounded);
        let cache_writes = self.write_cache(of, fresh.clone(), to.arenas);
        let statistics_writes = self.write_statistics(of, fresh, recomputed.len(), &mut to.arenas.device);
        let recomputing = self.facts.network.recomputed_by(layer).filter(|_| !recomputed.is_empty());
        let recomputed_frames = first_computed..first_computed + recomputed.len() as u64;
        let facts = &self.facts.network.layers[layer];
        let mut op = BandedConvOp {
            layer,
            layout: facts.layout,
            weights,
            input: self.facts.sizes.inputs[layer],
            cached,
            fresh: recomputed.into_iter().chain(inputs.frames.iter().copied()).collect(),
            cache_writes,
            columns: self.facts.sizes.columns[layer],
            format: facts.cache,
            rounded: rounded.iter().map(|frame| (frame - first_computed) as usize).collect(),
            statistics_writes,
            frames,
            rematerialise: None,
            statistics: facts.statistics,
        };
        if op.rematerialised_frames() > 0 {
            let recompute = || recomputing.map(|by| self.rematerialised_by_head(by, recomputed_frames));
            op.rematerialise = of.rematerialise.clone().or_else(recompute);
        }
        to.ops.push_back(Op::BandedConv(Box::new(op)));
        self.done_with_weights(of, to);
        if let Some(by) = recomputing {
            self.drop_inputs_before(by, end.saturating_sub(CACHE_FRAMES), of.chunk, &mut to.arenas.device);
        }
        outputs
    }

    /// The output frames of a banded convolution. Inputs are numbered from frame `first` on, and after them those that
    /// are read `rounded`.
    fn banded_frames(
        &self,
        of: &LayerOutputs,
        outputs: &[SlotRef],
        first: u64,
        rounded: &[u64],
    ) -> Vec<BandedFrame<Slots>> {
        let facts = &self.facts.network.layers[of.layer];
        let residuals = self.residuals(of);
        let shortcuts = of.added.filter(|_| residuals.is_none());
        let banded = of.frames.clone().zip(outputs).enumerate().map(|(i, (frame, out))| {
            let recipe = facts.time.recipe(frame);
            let input = |t: u64| match rounded.iter().position(|rounded| *rounded == t) {
                Some(place) if pair_of(t) < pair_of(frame) => of.frames.end + place as u64,
                _ => t,
            };
            let terms = self.facts.terms(&recipe).iter();
            BandedFrame {
                terms: terms.map(|(t, slab)| ((input(*t) - first) as usize, *slab)).collect(),
                shortcut: shortcuts.map(|shortcuts| (shortcuts[i], facts.layout.slabs as u8)),
                bias: recipe.bias,
                residual: residuals.as_ref().map(|residuals| residuals[i]),
                out: *out,
            }
        });
        banded.collect()
    }

    /// Where outputs go: to host memory, over frames that nobody needs any more, or to slots of their own.
    fn banded_outputs(&self, of: &LayerOutputs, inputs: &Inputs, arenas: &mut Arenas) -> Vec<SlotRef> {
        if self.facts.policy.layers[of.layer].output.uses_host() {
            return self.streamed_outputs(of.layer, of.frames.clone(), Placement::HOST, arenas);
        }
        let sizes = &self.facts.sizes;
        let may_overwrite = inputs.consumed && sizes.normalised[of.layer] == Some(sizes.outputs[of.layer]);
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
                    let frame = arenas.host.take(self.facts.sizes.outputs[layer], SlotKind::Packed);
                    FrameRef::Offloaded { frame, statistics }
                }
            }
        };
        frames.enumerate().map(output).collect()
    }

    /// How a layer computes these hidden frames again. `x`: its input, which ends with the same frame.
    pub fn rematerialised_hidden(&self, first: LayerId, frames: Range<u64>, x: &[Slot]) -> Rematerialise<Slots> {
        let first_input = frames.end - x.len() as u64;
        let oldest = self.facts.network.layers[first].time.oldest(frames.start);
        let by = self.rematerialised_by(first, frames, |frame| x[(frame - first_input) as usize]);
        Rematerialise { block_inputs: x[(oldest - first_input) as usize..].to_vec(), ..by }
    }

    /// The outputs of a stage's head that are not resident. Its inputs are read in place.
    pub fn head_banded(&mut self, head: LayerId, frames: Range<u64>, at: Placement, to: &mut Sink) -> Vec<SlotRef> {
        debug_assert!(self.facts.sizes.partial_sums[head].is_none(), "bands read whole input frames");
        let outputs = self.streamed_outputs(head, frames.clone(), at, to.arenas);
        let (facts, inputs) = (&self.facts.network.layers[head], self.caches[head].inputs());
        let banded = frames.zip(&outputs).map(|(frame, out)| {
            let recipe = facts.time.recipe(frame);
            let terms = self.facts.terms(&recipe).iter();
            let terms = terms.map(|(t, slab)| ((t - inputs.first) as usize, *slab)).collect();
            BandedFrame { terms, shortcut: None, bias: recipe.bias, residual: None, out: *out }
        });
        let input = self.facts.sizes.inputs[head];
        let op = BandedConvOp {
            layer: head,
            layout: facts.layout,
            weights: None,
            input,
            cached: vec![],
            fresh: inputs.frames.iter().map(|slot| FrameRef::Resident(*slot)).collect(),
            cache_writes: vec![],
            columns: SplitColumns::all_resident(input.width),
            format: CacheFormat::Exact,
            rounded: vec![],
            statistics_writes: vec![],
            frames: banded.collect(),
            rematerialise: None,
            statistics: facts.statistics,
        };
        to.ops.push_back(Op::BandedConv(Box::new(op)));
        outputs
    }

    /// The frames of a layer's cache that are recomputed.
    pub fn recomputed_inputs(&self, layer: LayerId) -> Vec<SlotRef> {
        let LayerCache::Statistics(statistics) = &self.caches[layer] else { return Vec::new() };
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
        let facts = &self.facts.network.layers[layer];
        let needed = frames.take_while(|_| self.facts.purpose != Purpose::Rehearsal);
        let frames = needed.map(|frame| {
            let recipe = facts.time.recipe(frame);
            let terms = recipe.terms().iter().map(|(t, slab)| Term { frame: input(*t), slab: *slab });
            RematerialisedFrame { terms: terms.collect(), bias: recipe.bias }
        });
        let (layout, input, frames) = (facts.layout, self.facts.sizes.inputs[layer], frames.collect());
        Rematerialise { layer, layout, input, block_inputs: Vec::new(), frames }
    }

    /// Takes slots for the inputs of `frames` that later frames read: the left columns on the device, the rest in host
    /// memory. Drops the slots of older frames. Returns (index in `frames`, slots).
    fn write_cache(&mut self, of: &LayerOutputs, frames: Range<u64>, arenas: &mut Arenas) -> Vec<(usize, CachedSlots)> {
        let oldest = self.oldest_cached(of.layer, frames.end, of.chunk).unwrap_or(frames.end);
        let [resident_bytes, host_bytes] = self.facts.sizes.cached[of.layer];
        let LayerCache::Split(cache) = &mut self.caches[of.layer] else { return Vec::new() };
        let expired = oldest.saturating_sub(frames.start - cache.len() as u64).min(cache.len() as u64) as usize;
        let expired: Vec<CachedSlots> = cache.drain(..expired).collect();
        // Both parts can be overwritten: the rows of a band are read before they are written.
        let mut reused = expired.into_iter();
        let written = (oldest.max(frames.start)..frames.end).map(|frame| {
            let slots = reused.next().unwrap_or_else(|| CachedFrame {
                resident: resident_bytes.map(|bytes| arenas.device.take(bytes, SlotKind::Pooled)),
                host: host_bytes.map(|bytes| arenas.host.take(bytes, SlotKind::Pooled)),
            });
            ((frame - frames.start) as usize, slots)
        });
        let written: Vec<(usize, CachedSlots)> = written.collect();
        reused.for_each(|frame| drop_cached(frame, arenas));
        cache.extend(written.iter().map(|(_, frame)| *frame));
        written
    }

    /// Finds slots for the statistics of those of `frames` that will be recomputed. `before` inputs precede them.
    fn write_statistics(
        &mut self,
        of: &LayerOutputs,
        frames: Range<u64>,
        before: usize,
        arena: &mut Arena,
    ) -> Vec<(usize, Slot)> {
        let LayerCache::Statistics(statistics) = &mut self.caches[of.layer] else { return Vec::new() };
        let cached_frames = if of.chunk.is_last { 0 } else { CACHE_FRAMES };
        let cached = of.chunk.frames.end.saturating_sub(cached_frames).max(frames.start)..frames.end;
        let bytes = self.facts.sizes.statistics;
        let written =
            cached.map(|frame| (before + (frame - frames.start) as usize, arena.take(bytes, SlotKind::Pooled)));
        let written: Vec<(usize, Slot)> = written.collect();
        statistics.extend(written.iter().map(|(_, slot)| *slot));
        let expired = statistics.len().saturating_sub(cached_frames as usize);
        statistics.drain(..expired).for_each(|slot| arena.drop(slot));
        written
    }
}

/// The inputs from frame `first` on that outputs of a later pair read: those in 8 bits.
fn rounded_inputs(time: &Recipes, outputs: &Range<u64>, first: u64) -> Vec<u64> {
    let mut rounded: Vec<u64> = Vec::new();
    for output in outputs.clone() {
        let recipe = time.recipe(output);
        let inputs = recipe.terms().iter().map(|(input, _)| *input);
        rounded.extend(inputs.filter(|input| *input >= first && pair_of(*input) < pair_of(output)));
    }
    rounded.sort_unstable();
    rounded.dedup();
    rounded
}
