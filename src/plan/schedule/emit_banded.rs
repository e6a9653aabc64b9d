//! Emits banded convolutions: for layers whose normalised input, cache or output does not lie whole on the device.

use std::ops::Range;

use super::emit::{Emitter, Inputs, LayerOutputs};
use super::layer_cache::{CachedSlots, FrameQueue, LayerCache, SlotRef, all_resident, drop_cached};
use super::sink::Sink;
use crate::ir::{
    BandInput, BandTerm, BandedConvOp, BandedFrame, CacheFormat, CachedFrame, FetchedWeights, FrameRef, LayerId, Op,
    Prologue, Rematerialise, RematerialisedFrame, Shortcut, Term,
};
use crate::model::{RecipeTerm, pair_of};
use crate::plan::arena::{Arena, Arenas, SlotKind, Slots};
use crate::plan::policy::{CACHE_FRAMES, Memory, Placement};
use crate::plan::repeats::Purpose;

/// The inputs of a banded convolution. Frames of the causal cache come first, then those of it that are recomputed,
/// then fresh ones.
struct BandInputs {
    list: Vec<BandInput<Slots>>,
    /// The frame of the clip that input 0 is, and those that do not come from a stored cache.
    first: u64,
    unstored: Range<u64>,
    fresh: Range<u64>,
    /// Whether outputs of a later pair read an input as the cache stores it.
    rounds: bool,
}

impl BandInputs {
    fn is_rounded(&self, input: u64, output: u64) -> bool {
        self.rounds && self.unstored.contains(&input) && pair_of(input) < pair_of(output)
    }

    fn fresh_mut(&mut self) -> &mut [BandInput<Slots>] {
        &mut self.list[(self.fresh.start - self.first) as usize..]
    }
}

impl Emitter {
    /// A layer's outputs for fresh inputs that end with the same frame. If these are consumed, outputs may overwrite
    /// them: a band reads its rows before it writes any.
    pub fn conv_banded(&mut self, of: &LayerOutputs, inputs: Inputs, to: &mut Sink) -> Vec<SlotRef> {
        let weights = self.weights.of(of.layer, to);
        let outputs = self.banded_outputs(of, &inputs, &mut to.arenas);
        let mut inputs = self.band_inputs(of, inputs.frames, of.frames.end);
        match self.facts.spec.policy.layers[of.layer].cache {
            Placement::Columns { .. } => self.write_cache(of, &mut inputs, &mut to.arenas),
            Placement::Recomputed => self.write_statistics(of, &mut inputs, &mut to.arenas.device),
        }
        self.emit_bands(of, weights, inputs, &outputs, to);
        outputs
    }

    /// The outputs of a stage's head that are not resident. Its inputs are read in place.
    pub fn head_banded(&mut self, of: &LayerOutputs, to: &mut Sink) -> Vec<SlotRef> {
        let queue = &self.caches[of.layer].inputs;
        let frames: Vec<SlotRef> = queue.frames.iter().copied().map(FrameRef::Resident).collect();
        let inputs = self.band_inputs(of, &frames, queue.end());
        let outputs = self.banded_outputs(of, &Inputs { frames: &[], consumed: false }, &mut to.arenas);
        self.emit_bands(of, None, inputs, &outputs, to);
        outputs
    }

    fn emit_bands(
        &mut self,
        of: &LayerOutputs,
        weights: Option<FetchedWeights<Slots>>,
        inputs: BandInputs,
        outputs: &[SlotRef],
        to: &mut Sink,
    ) {
        let (facts, sizes) = (&self.facts.spec.network.layers[of.layer], &self.facts.sizes.layers[of.layer]);
        to.ops.push_back(Op::BandedConv(Box::new(BandedConvOp {
            layer: of.layer,
            layout: facts.layout,
            weights,
            input: sizes.input,
            frames: self.banded_frames(of, outputs, &inputs),
            inputs: inputs.list,
            columns: sizes.columns,
            format: facts.cache,
            rematerialise: of.rematerialise.clone(),
            statistics: facts.statistics,
        })));
        self.done_with_weights(of, to);
    }

    /// What a layer keeps, and `fresh` frames that end with input frame `end`.
    fn band_inputs(&self, of: &LayerOutputs, fresh: &[SlotRef], end: u64) -> BandInputs {
        let LayerCache { split, statistics, .. } = &self.caches[of.layer];
        let recomputed = statistics.iter().enumerate();
        let recomputed = recomputed.map(|(index, slot)| FrameRef::Rematerialised { index, statistics: *slot });
        let unstored = recomputed.chain(fresh.iter().copied()).map(BandInput::fresh);
        let list: Vec<BandInput<Slots>> = split.iter().copied().map(BandInput::cached).chain(unstored).collect();
        let first = end - list.len() as u64;
        let mut all = BandInputs {
            list,
            first,
            unstored: first + split.len() as u64..end,
            fresh: end - fresh.len() as u64..end,
            rounds: self.facts.spec.network.layers[of.layer].cache == CacheFormat::U8,
        };
        let time = &self.facts.spec.network.layers[of.layer].time;
        for output in of.frames.clone().filter(|_| all.rounds) {
            for term in time.recipe(output).terms() {
                if all.is_rounded(term.input, output) {
                    all.list[(term.input - all.first) as usize].is_rounded = true;
                }
            }
        }
        all
    }

    fn banded_frames(&self, of: &LayerOutputs, outputs: &[SlotRef], inputs: &BandInputs) -> Vec<BandedFrame<Slots>> {
        let facts = &self.facts.spec.network.layers[of.layer];
        let residuals = self.residuals(of);
        let shortcuts = of.added.filter(|_| residuals.is_none());
        let banded = of.frames.clone().zip(outputs).enumerate().map(|(i, (frame, out))| {
            let recipe = facts.time.recipe(frame);
            let term = |term: &RecipeTerm| BandTerm {
                input: (term.input - inputs.first) as usize,
                is_rounded: inputs.is_rounded(term.input, frame),
                slab: term.slab,
            };
            BandedFrame {
                terms: self.facts.terms(&recipe).iter().map(term).collect(),
                shortcut: shortcuts.map(|from| Shortcut { from: from[i], slab: facts.layout.slabs as u8 }),
                bias: recipe.bias,
                residual: residuals.as_ref().map(|residuals| residuals[i]),
                out: *out,
            }
        });
        banded.collect()
    }

    /// Where outputs go: to host memory, over frames that nobody needs any more, or to slots of their own.
    /// Rematerialised ones go nowhere.
    fn banded_outputs(&self, of: &LayerOutputs, inputs: &Inputs, arenas: &mut Arenas) -> Vec<SlotRef> {
        let sizes = &self.facts.sizes.layers[of.layer];
        let statistics = |arenas: &mut Arenas| arenas.device.take(self.facts.sizes.statistics, SlotKind::Packed);
        let mut outputs: Vec<SlotRef> = match self.facts.spec.policy.layers[of.layer].output {
            Memory::Host => {
                let offloaded = of.materialised().map(|_| FrameRef::Offloaded {
                    statistics: statistics(arenas),
                    frame: arenas.host.take(sizes.output, SlotKind::Packed),
                });
                offloaded.collect()
            }
            Memory::Device => {
                let may_overwrite = inputs.consumed && sizes.normalised == Some(sizes.output);
                let own = if may_overwrite { all_resident(inputs.frames) } else { None };
                let own = own.map(|mut own| own.split_off(own.len() - of.frames.clone().count()));
                let over = self.residuals(of).or(own);
                let slots = self.outputs(of, over.as_deref(), &mut arenas.device);
                slots.into_iter().map(FrameRef::Resident).collect()
            }
        };
        let rematerialised = 0..of.rematerialised as usize;
        outputs.extend(rematerialised.map(|index| FrameRef::Rematerialised { index, statistics: statistics(arenas) }));
        outputs
    }

    /// How a layer computes these output frames again from its `inputs`. If it has a norm, both end with the same
    /// frame.
    pub fn rematerialised_by(&self, layer: LayerId, frames: Range<u64>, inputs: &FrameQueue) -> Rematerialise<Slots> {
        let facts = &self.facts.spec.network.layers[layer];
        let has_norm = facts.layout.prologue != Prologue::None;
        let normalised = (facts.time.oldest(frames.start)..inputs.end()).filter(|_| has_norm);
        let needed = frames.take_while(|_| self.facts.purpose != Purpose::Rehearsal);
        let frames = needed.map(|frame| {
            let recipe = facts.time.recipe(frame);
            let terms = recipe.terms().iter().map(|term| Term { frame: inputs.at(term.input), slab: term.slab });
            RematerialisedFrame { terms: terms.collect(), bias: recipe.bias }
        });
        Rematerialise {
            layer,
            layout: facts.layout,
            input: self.facts.sizes.layers[layer].input,
            block_inputs: normalised.map(|frame| inputs.at(frame)).collect(),
            frames: frames.collect(),
        }
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
