//! The schedule of one work item: a clip, or one tile of it. Decides which stage computes which frames next.
//!
//! Stages run as deep as they can before new input is loaded, so few frames are live. Everything depends on frame
//! counts only, so a rehearsal without computing finds the memory.

use std::ops::Range;
use std::sync::Arc;

use super::emit::{Addend, Emitter, LayerOutputs, NONE};
use super::layer_cache::{LayerCache, SlotRef, drop_frames, resident};
use super::sink::Sink;
use super::weights::WeightFetcher;
use crate::ir::{LayerId, LoadOp, Op, Rematerialise, Window};
use crate::model::{Network, Reader, Role, Source};
use crate::plan::arena::{Arena, Arenas, PackedLayout, Slot, SlotKind, Slots};
use crate::plan::cost::FrameSizes;
use crate::plan::policy::{CACHE_FRAMES, CachePolicy};
use crate::plan::spec::ScheduleSpec;

#[derive(Debug)]
pub struct WorkItem {
    emitter: Emitter,
    item: usize,
    batch: u64,
    /// Of each stage, the next frame to compute.
    computed: Vec<u64>,
    /// The next input frame to load, and where the current slice ends.
    loaded: u64,
    slice_end: u64,
    /// Where the input ends, once known, and where the frames of each stage then end.
    total: Option<u64>,
    ends: Vec<u64>,
    /// Of each stage, the first input frame that is still queued when the current slice is done.
    first_queued: Vec<u64>,
    /// Of each stage, outputs of its head that wait for their chunk.
    early: Vec<Vec<SlotRef>>,
}

/// The frames of a chunk that each layer of a stage has computed and that later layers read.
struct ChunkValues {
    first: LayerId,
    frames: Vec<Vec<SlotRef>>,
}

impl ChunkValues {
    fn of(&mut self, layer: LayerId) -> &mut Vec<SlotRef> {
        &mut self.frames[layer - self.first]
    }

    fn take(&mut self, layer: LayerId) -> Vec<SlotRef> {
        std::mem::take(self.of(layer))
    }

    /// The last frames of a value: a range may have more of them than its reader computes.
    fn last_frames(&mut self, source: Source, count: usize) -> Vec<SlotRef> {
        let Source::Layer(layer) = source else { unreachable!("only the first layer of a stage reads another stage") };
        let frames = self.of(layer);
        frames[frames.len() - count..].to_vec()
    }
}

/// Whether a job has more slices than a rehearsal traces; `None` is a stream.
pub fn is_periodic(spec: &ScheduleSpec, frames: Option<u64>) -> bool {
    spec.is_longer_than(PackedLayout::TRACED_SLICES, frames)
}

impl WorkItem {
    /// `frames`: where the input ends, if that is known.
    pub fn new(spec: &ScheduleSpec, sizes: Arc<FrameSizes>, frames: Option<u64>, item: usize, batch: u64) -> WorkItem {
        let (network, policy) = (Arc::clone(&spec.network), Arc::clone(&spec.policy));
        let cone = Arc::clone(&spec.cone);
        let new_cache = |layer: LayerId| {
            let first = network.layers[layer].time.oldest(cone.first(layer));
            LayerCache::new(policy.caches[layer], sizes.partial_sums[layer].is_some(), first)
        };
        let caches = (0..network.layers.len()).map(new_cache).collect();
        let stages = network.stages.len();
        let mut item_state = WorkItem {
            item,
            batch,
            computed: network.stages.iter().map(|stage| cone.first(stage.head())).collect(),
            loaded: cone.first_input,
            slice_end: spec.first_slice_end(frames),
            total: None,
            ends: Vec::new(),
            first_queued: vec![0; stages],
            early: vec![Vec::new(); stages],
            emitter: Emitter {
                periodic: is_periodic(spec, frames),
                interleaved: spec.is_interleaved(),
                waiting: vec![Vec::new(); network.layers.len()],
                network,
                cone,
                sizes,
                policy,
                caches,
                weights: WeightFetcher::default(),
                is_rehearsal: false,
                chunk_end: 0,
                last_chunk: false,
            },
        };
        item_state.look_ahead();
        item_state
    }

    fn network(&self) -> &Arc<Network> {
        &self.emitter.network
    }

    /// Finds which input frames of each stage the current slice leaves queued.
    fn look_ahead(&mut self) {
        let made = self.network().stage_frames(self.slice_end);
        for (stage, made) in made.into_iter().enumerate() {
            let head = self.network().stages[stage].head();
            let next = self.reachable(stage, made).saturating_sub(self.reread(stage));
            self.first_queued[stage] = self.emitter.oldest_needed(head, next.max(self.first(stage)));
        }
    }

    /// The first frame of a stage.
    fn first(&self, stage: usize) -> u64 {
        self.emitter.cone.first(self.network().stages[stage].head())
    }

    /// Up to which frame a stage computes whose input suffices for frames up to `end`. Rematerialised frames cannot
    /// wait: the first chunk with some reaches to the first output of the layer that reads them.
    fn reachable(&self, stage: usize, end: u64) -> u64 {
        let (first, policy) = (self.first(stage), &self.emitter.policy);
        let rematerialises = policy.materialised[stage] < policy.chunks[stage];
        if end < first + if rematerialises { self.least_first_chunk(stage) } else { 0 } { first } else { end }
    }

    /// Frames of a stage up to the first output of the layers whose input its first layer makes.
    fn least_first_chunk(&self, stage: usize) -> u64 {
        let readers = self.network().readers(self.network().stages[stage].head()).iter();
        let firsts = readers.filter(|reader| reader.role == Role::Input).map(|r| self.emitter.cone.first(r.layer) + 1);
        firsts.max().map_or(0, |end| end - self.first(stage))
    }

    /// The layer of a stage whose cache is recomputed.
    fn recomputes(&self, stage: usize) -> Option<LayerId> {
        let mut body = self.network().stages[stage].body();
        body.find(|layer| self.emitter.policy.caches[*layer] == CachePolicy::Recomputed)
    }

    /// Outputs of a stage's head that the next chunk needs again.
    fn reread(&self, stage: usize) -> u64 {
        if self.recomputes(stage).is_some() { CACHE_FRAMES } else { 0 }
    }

    /// Input frames that the current slice still takes.
    pub fn room(&self) -> u64 {
        self.slice_end.min(self.total.unwrap_or(u64::MAX)) - self.loaded
    }

    pub fn loaded(&self) -> u64 {
        self.loaded
    }

    /// Whether every frame has been loaded and computed. Meaningful between slices.
    pub fn is_complete(&self) -> bool {
        self.total == Some(self.loaded)
    }

    /// Whether the current slice is the last and, even padded, makes less than others.
    pub fn is_partial(&self) -> bool {
        let Some(total) = self.total else { return false };
        if total == self.emitter.cone.first_input {
            return true;
        }
        let end = self.network().padded_frames(total);
        end < self.slice_end || end == self.slice_end && self.emitter.cone.is_trimmed()
    }

    pub fn next_slice(&mut self) {
        self.slice_end += self.emitter.policy.slice;
        self.look_ahead();
    }

    /// Sets where the input ends. Must be called before the last slice ends.
    pub fn set_total(&mut self, total: u64, arenas: &mut Arenas) {
        self.total = Some(total);
        if total > self.emitter.cone.first_input {
            self.ends = self.emitter.cone.stage_ends(self.network(), total);
        }
        self.pad(&mut arenas.device);
    }

    /// Drops all caches.
    pub fn clear(&mut self, arenas: &mut Arenas) {
        self.emitter.caches.iter_mut().for_each(|cache| cache.clear(arenas));
        self.emitter.waiting.iter_mut().for_each(|inputs| drop_frames(inputs.drain(..), arenas));
    }

    /// Says that nobody runs the operations.
    pub fn set_rehearsal(&mut self) {
        self.emitter.is_rehearsal = true;
    }

    /// Loads the next input frame.
    pub fn load(&mut self, to: &mut Sink) {
        let arena = &mut to.arenas.device;
        // A stream's host pushes frames at any time.
        let into = arena.take(self.emitter.sizes.input_bytes, SlotKind::Pooled);
        to.ops.push_back(Op::Load(LoadOp { item: self.item, batch: self.batch, frame: self.loaded, into }));
        let head = self.network().stages[0].head();
        self.emitter.caches[head].inputs_mut().frames.push_back(into);
        self.loaded += 1;
        self.pad(arena);
    }

    /// Repeats the last frame of a clip until its length fits the latent frame rate.
    fn pad(&mut self, arena: &mut Arena) {
        if self.total != Some(self.loaded) || self.loaded == self.emitter.cone.first_input {
            return;
        }
        let (needed, head) = (self.network().padded_frames(self.loaded), self.network().stages[0].head());
        let inputs = self.emitter.caches[head].inputs_mut();
        while inputs.end() < needed {
            let last = *inputs.frames.back().expect("the last frame is cached");
            arena.keep(last);
            inputs.frames.push_back(last);
        }
    }

    /// Whether a stream's slice is not there yet. Work starts with the whole slice, so that memory does not depend on
    /// how the host pushes.
    pub fn is_waiting(&self, pushed: bool) -> bool {
        pushed && self.room() > 0
    }

    /// Schedules one chunk of the current slice; `false` if nothing is left to do without more input. With `may_load`,
    /// loads input as needed. Finished frames are appended to `finished`.
    pub fn advance(&mut self, may_load: bool, to: &mut Sink, finished: &mut Vec<(u64, Slot)>) -> bool {
        if self.is_waiting(!may_load) {
            return false;
        }
        let stages = 0..self.network().stages.len();
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

    /// Frames that a stage could compute from its queued input.
    fn ready(&self, stage: usize) -> u64 {
        let head = self.network().stages[stage].head();
        let queued = self.emitter.caches[head].inputs().end();
        let end = self.network().layers[head].time.outputs(queued).min(self.ends.get(stage).copied().unwrap_or(NONE));
        self.reachable(stage, end).saturating_sub(self.computed[stage])
    }

    /// Frames of a stage's next chunk. Where caches are offloaded, an incomplete chunk comes first: there is no cache
    /// to move yet, and at the end it would move all of it for few frames.
    fn chunk(&self, stage: usize) -> u64 {
        let (policy, first) = (&self.emitter.policy, self.first(stage));
        let chunk = policy.chunks[stage];
        if self.computed[stage] > first {
            return chunk;
        }
        let least = if policy.materialised[stage] < chunk { self.least_first_chunk(stage) } else { 1 };
        let offloads = self.network().stages[stage].body().any(|layer| policy.caches[layer].uses_host());
        let made = self.network().stage_frames(self.slice_end)[stage].saturating_sub(first);
        // Frame 0 has no partner. So the first chunk ends at an odd number of frames, and the others have whole pairs.
        let cuts_pair = |frames: u64| (first + frames).is_multiple_of(2);
        let has_pairs = chunk > 1 && self.network().has_pairs(stage) || self.network().needs_pairs(stage);
        let incomplete = match made {
            1.. if offloads => (made - 1) % chunk + 1,
            _ => chunk - u64::from(has_pairs && cuts_pair(chunk)),
        };
        let incomplete = incomplete.max(least);
        incomplete + u64::from(self.network().needs_pairs(stage) && cuts_pair(incomplete))
    }

    /// Computes one chunk of a stage, layer by layer.
    fn compute(&mut self, stage: usize, to: &mut Sink, finished: &mut Vec<(u64, Slot)>) {
        let network = Arc::clone(self.network());
        let (first, count) = (self.computed[stage], self.ready(stage).min(self.chunk(stage)));
        let frames = first..first + count;
        self.computed[stage] += count;
        self.set_chunk_end(stage, frames.end);
        let layers = &network.stages[stage];
        let Emitter { weights, sizes, policy, cone, .. } = &mut self.emitter;
        let computing = layers.body().map(|layer| (layer, cone.outputs(layer, &frames)));
        let offloaded = computing.filter(|(layer, own)| policy.offloaded_weights[*layer] && !own.is_empty());
        weights.begin(offloaded.collect(), (&network, sizes), to);
        let mut values = ChunkValues { first: layers.head(), frames: vec![Vec::new(); layers.layers.len()] };
        *values.of(layers.head()) = self.head(stage, frames.clone(), to);
        for layer in layers.body() {
            self.body_layer(layer, &frames, &mut values, to);
        }
        let outputs = resident(&values.take(layers.last()));
        match network.stages.get(stage + 1) {
            Some(next) => {
                self.emitter.caches[next.head()].inputs_mut().frames.extend(outputs);
                self.downsample_early(stage + 1, to);
            }
            None => finished.extend(self.emitter.cone.outputs(layers.last(), &frames).zip(outputs)),
        }
    }

    fn set_chunk_end(&mut self, stage: usize, end: u64) {
        self.emitter.chunk_end = end;
        self.emitter.last_chunk = !self.emitter.periodic && self.ends.get(stage) == Some(&end);
    }

    /// Interleaved: every frame may outlive the item's turn, so all are pooled from frame 0 on. Otherwise none.
    fn outlives_turn(&self) -> u64 {
        if self.emitter.interleaved { 0 } else { NONE }
    }

    /// Where frames wait for their chunk, a downsampler runs early: its output is smaller.
    fn downsample_early(&mut self, stage: usize, to: &mut Sink) {
        let head = self.network().stages[stage].head();
        let ready = self.ready(stage);
        if self.network().layers[head].layout.window != Window::Down || ready >= self.chunk(stage) {
            return;
        }
        let first = self.computed[stage] + self.early[stage].len() as u64;
        let end = self.computed[stage] + ready;
        self.set_chunk_end(stage, end);
        let made = self.emitter.head(head, first..end, self.outlives_turn(), to);
        self.early[stage].extend(made);
        self.emitter.drop_inputs_before(head, end, &mut to.arenas.device);
    }

    /// The outputs of a stage's first layer.
    fn head(&mut self, stage: usize, frames: Range<u64>, to: &mut Sink) -> Vec<SlotRef> {
        let head = self.network().stages[stage].head();
        let materialised = frames.end.min(frames.start + self.emitter.policy.materialised[stage]);
        let early = self.early[stage].len().min(frames.clone().count());
        let mut outputs: Vec<SlotRef> = self.early[stage].drain(..early).collect();
        let computed = frames.start + early as u64;
        let first_cached = self.first_cached_output(head);
        outputs.extend(match self.emitter.policy.offloaded_outputs[head] {
            true => self.emitter.head_offloaded(head, frames.clone(), to),
            false => self.emitter.head(head, computed..materialised, first_cached, to),
        });
        if materialised < frames.end {
            // The last reader drops the inputs of the others.
            let oldest = self.network().layers[head].time.oldest(materialised);
            self.emitter.caches[head].inputs_mut().drop_before(oldest, &mut to.arenas.device);
            outputs.extend(self.emitter.head_rematerialised(head, materialised..frames.end, to));
        } else if self.recomputes(stage).is_none_or(|layer| self.emitter.recomputed_inputs(layer).is_empty()) {
            // Otherwise a recomputed cache still needs these inputs; its reader drops them.
            let end = frames.end.saturating_sub(self.reread(stage));
            self.emitter.drop_inputs_before(head, end, &mut to.arenas.device);
        }
        outputs
    }

    /// The outputs of a layer whose input is made in the same stage. Drops the values that no later layer reads.
    fn body_layer(&mut self, layer: LayerId, frames: &Range<u64>, values: &mut ChunkValues, to: &mut Sink) {
        let network = Arc::clone(self.network());
        let facts = &network.layers[layer];
        let Source::Layer(from) = facts.input else {
            unreachable!("only the first layer of a stage reads another stage")
        };
        let consumes = self.consumes_input(layer);
        let input = if consumes { values.take(from) } else { values.of(from).clone() };
        if !input.is_empty() {
            let own = self.emitter.cone.outputs(layer, frames);
            let added = facts.addend.map(|source| values.last_frames(source, own.clone().count()));
            let residuals = added.as_deref().filter(|_| facts.layout.shortcut.is_none()).map(resident);
            let addend = match (&residuals, &added) {
                (Some(residuals), _) => Addend::Residual(residuals),
                (None, Some(added)) => Addend::Shortcut(added),
                (None, None) => Addend::None,
            };
            let outputs = LayerOutputs {
                addend,
                first_rematerialised: self.emitter.first_hidden(layer, frames),
                rematerialise: self.rematerialise(layer, frames, &input, values),
                ..LayerOutputs::plain(layer, own, self.first_cached_output(layer))
            };
            *values.of(layer) = match (facts.attends, consumes) {
                (true, _) => {
                    let mixed = self.emitter.attention(layer, resident(&input), to);
                    self.emitter.conv_consuming(&outputs, mixed, to)
                }
                (false, true) => self.emitter.conv_consuming(&outputs, input, to),
                (false, false) => self.emitter.conv(&outputs, &input, to),
            };
        }
        for source in [Some(facts.input), facts.addend].into_iter().flatten() {
            self.drop_after(source, layer, frames, values, to);
        }
    }

    /// Drops a value after its last reader.
    fn drop_after(
        &mut self,
        source: Source,
        reader: LayerId,
        frames: &Range<u64>,
        values: &mut ChunkValues,
        to: &mut Sink,
    ) {
        let (network, policy) = (Arc::clone(self.network()), Arc::clone(&self.emitter.policy));
        let Source::Layer(from) = source else { return };
        if !network.is_last_reader(from, reader) {
            return;
        }
        drop_frames(values.take(from), to.arenas);
        let stage = network.stage_of(from);
        if from == network.stages[stage].head() && frames.start + policy.materialised[stage] < frames.end {
            self.emitter.drop_inputs_before(from, frames.end, &mut to.arenas.device);
        }
    }

    /// Whether a layer is the last one that reads its input, so it may write over it.
    fn consumes_input(&self, layer: LayerId) -> bool {
        let facts = &self.network().layers[layer];
        let Source::Layer(from) = facts.input else { return false };
        facts.addend != Some(facts.input) && self.network().is_last_reader(from, layer)
    }

    /// How a layer's rematerialised inputs are computed: by the stage's first layer, or hidden ones by their own.
    fn rematerialise(
        &self,
        layer: LayerId,
        frames: &Range<u64>,
        input: &[SlotRef],
        values: &mut ChunkValues,
    ) -> Option<Rematerialise<Slots>> {
        let network = self.network();
        let head = network.stages[network.stage_of(layer)].head();
        let reads = |source: Option<Source>| source == Some(Source::Layer(head));
        let facts = &network.layers[layer];
        let first = frames.start + self.emitter.policy.materialised[network.stage_of(layer)];
        if first < frames.end && (reads(Some(facts.input)) || reads(facts.addend)) {
            return Some(self.emitter.rematerialised_by_head(head, first..frames.end));
        }
        let hidden = input.iter().filter(|frame| frame.is_rematerialised()).count() as u64;
        let by = network.hidden_by(layer).filter(|_| hidden > 0)?;
        let Source::Layer(kept) = network.layers[by].input else { return None };
        let kept = resident(values.of(kept));
        Some(self.emitter.rematerialised_hidden(by, frames.end - hidden..frames.end, &kept))
    }

    /// The first output frame of a layer that stays cached, or outlives the work item's turn. An output that is added to
    /// in place, or overwritten, lives as long as the frame that replaces it.
    fn first_cached_output(&self, layer: LayerId) -> u64 {
        let (emitter, network) = (&self.emitter, self.network());
        let stage = network.stage_of(layer);
        if layer == network.stages[stage].last() {
            return match stage + 1 < network.stages.len() {
                true if emitter.interleaved => self.first_queued[stage + 1],
                true => NONE,
                false => self.outlives_turn(),
            };
        }
        let of_reader = |reader: &Reader| match reader.role {
            Role::Shortcut => NONE,
            Role::Residual if emitter.sizes.adds_in_place => self.first_cached_output(reader.layer),
            Role::Residual => NONE,
            Role::Input => self.first_cached_input(reader.layer),
        };
        network.readers(layer).iter().map(of_reader).min().unwrap_or(NONE)
    }

    /// The first frame of a layer's input that it keeps or overwrites with a frame that stays.
    fn first_cached_input(&self, layer: LayerId) -> u64 {
        let (emitter, facts) = (&self.emitter, &self.network().layers[layer]);
        if facts.attends {
            return NONE;
        }
        let (consumes, normalised) = (self.consumes_input(layer), emitter.sizes.normalised[layer]);
        // A layer that normalises frames of others keeps copies.
        let kept = if consumes || normalised.is_none() { emitter.first_cached_frame(layer) } else { NONE };
        let overwrites = consumes
            && emitter.is_banded(layer)
            && facts.residual().is_none()
            && normalised == Some(emitter.sizes.outputs[layer]);
        let written = if overwrites { self.first_cached_output(layer) } else { NONE };
        kept.min(written).min(emitter.first_waiting_frame(layer))
    }
}
