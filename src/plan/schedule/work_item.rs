//! The schedule of one work item: a clip, or one tile of it. Decides which stage computes which frames next.
//!
//! Stages run as deep as they can before new input is loaded, so few frames are live. Everything depends on frame
//! counts only, so a rehearsal without computing finds the memory.

use std::sync::Arc;

use super::emit::{Emitter, Inputs, Kept, LayerOutputs};
use super::item_facts::{Chunk, ItemFacts};
use super::layer_cache::{FrameQueue, SlotRef, drop_frames, resident};
use super::sink::Sink;
use crate::ir::{LayerId, LoadOp, Op, Rematerialise, Window};
use crate::model::{ChunkPairs, Network, Reader, Role, Source};
use crate::plan::arena::{Arena, Arenas, PackedLayout, Slot, SlotKind, Slots};
use crate::plan::cost::FrameSizes;
use crate::plan::policy::{CACHE_FRAMES, Placement};
use crate::plan::repeats::{ItemPlace, Purpose};
use crate::plan::spec::ScheduleSpec;

#[derive(Debug, Clone)]
pub struct WorkItem {
    emitter: Emitter,
    pub place: ItemPlace,
    /// Of each stage, the next frame to compute.
    computed: Vec<u64>,
    /// The next input frame to load, and where the current slice ends.
    loaded: u64,
    slice_end: u64,
    /// Where the input ends, once known, and where the frames of each stage then end.
    total: Option<u64>,
    ends: Option<Vec<u64>>,
    /// Of each stage, outputs of its head that wait for their chunk.
    early: Vec<Vec<SlotRef>>,
}

/// The frames of a chunk that each layer has computed and that later layers of the stage read.
struct ChunkValues {
    of: Vec<Vec<SlotRef>>,
    /// Of each layer, which of its output frames outlive the chunk.
    kept: Vec<Kept>,
}

impl ChunkValues {
    fn take(&mut self, layer: LayerId) -> Vec<SlotRef> {
        std::mem::take(&mut self.of[layer])
    }

    /// The last frames of a value: a range may have more of them than its reader computes.
    fn last_frames(&self, source: Source, count: usize) -> Vec<SlotRef> {
        let frames = &self.of[layer_of(source)];
        frames[frames.len() - count..].to_vec()
    }
}

fn layer_of(source: Source) -> LayerId {
    source.layer().expect("only the first layer of a stage reads another stage")
}

/// Whether a job has more slices than a rehearsal traces.
pub fn is_periodic(spec: &ScheduleSpec) -> bool {
    spec.is_longer_than(PackedLayout::TRACED_SLICES)
}

impl WorkItem {
    pub fn new(spec: &ScheduleSpec, sizes: Arc<FrameSizes>, place: ItemPlace, purpose: Purpose) -> WorkItem {
        let (network, cone) = (&spec.network, &spec.cone);
        let facts = ItemFacts { spec: spec.clone(), sizes, purpose, is_periodic: is_periodic(spec) };
        WorkItem {
            emitter: Emitter::new(facts),
            place,
            computed: network.stages.iter().map(|stage| cone.first(stage.head())).collect(),
            loaded: cone.first_input,
            slice_end: spec.first_slice_end(),
            total: None,
            ends: None,
            early: vec![Vec::new(); network.stages.len()],
        }
    }

    fn facts(&self) -> &ItemFacts {
        &self.emitter.facts
    }

    fn network(&self) -> &Network {
        &self.emitter.facts.spec.network
    }

    fn head_of(&self, stage: usize) -> LayerId {
        self.network().stages[stage].head()
    }

    /// The first input frame of a stage that is still queued when the current slice is done.
    fn first_queued(&self, stage: usize) -> u64 {
        let made = self.network().stage_frames(self.slice_end)[stage];
        let next = self.reachable(stage, made).saturating_sub(self.reread(stage));
        self.facts().oldest_needed(self.head_of(stage), next.max(self.first(stage)))
    }

    /// The first frame of a stage.
    fn first(&self, stage: usize) -> u64 {
        self.facts().spec.cone.first(self.head_of(stage))
    }

    /// Up to which frame a stage computes whose input suffices for frames up to `end`.
    fn reachable(&self, stage: usize, end: u64) -> u64 {
        let first = self.first(stage);
        if end < first + self.least_first_chunk(stage) { first } else { end }
    }

    /// The fewest frames of a stage's first chunk. Rematerialised frames cannot wait: a chunk with some reaches to the
    /// first output of the layers whose input they are.
    fn least_first_chunk(&self, stage: usize) -> u64 {
        let head = self.head_of(stage);
        if self.facts().spec.policy.layers[head].rematerialised == 0 {
            return 1;
        }
        let readers = self.network().readers(head).iter().filter(|reader| reader.role == Role::Input);
        let ends = readers.map(|reader| self.facts().spec.cone.first(reader.layer) + 1);
        ends.max().map_or(1, |end| end - self.first(stage))
    }

    /// The layer of a stage whose cache is recomputed.
    fn recomputed_layer(&self, stage: usize) -> Option<LayerId> {
        let mut body = self.network().stages[stage].body();
        body.find(|layer| self.facts().spec.policy.layers[*layer].cache == Placement::Recomputed)
    }

    /// Outputs of a stage's head that the next chunk needs again.
    fn reread(&self, stage: usize) -> u64 {
        if self.recomputed_layer(stage).is_some() { CACHE_FRAMES } else { 0 }
    }

    /// Input frames that the current slice still takes.
    pub fn room(&self) -> u64 {
        self.total.map_or(self.slice_end, |total| total.min(self.slice_end)) - self.loaded
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
        if total == self.facts().spec.cone.first_input {
            return true;
        }
        let end = self.network().padded_frames(total);
        end < self.slice_end || end == self.slice_end && self.facts().spec.cone.is_trimmed()
    }

    pub fn next_slice(&mut self) {
        self.slice_end += self.facts().spec.policy.slice;
    }

    /// Sets where the input ends. Must be called before the last slice ends.
    pub fn set_total(&mut self, total: u64, arenas: &mut Arenas) {
        self.total = Some(total);
        if total > self.facts().spec.cone.first_input {
            self.ends = Some(self.facts().spec.cone.stage_ends(self.network(), total));
        }
        self.pad(&mut arenas.device);
    }

    /// Drops all caches.
    pub fn clear(&mut self, arenas: &mut Arenas) {
        self.emitter.caches.iter_mut().for_each(|cache| cache.clear(arenas));
    }

    /// Loads the next input frame.
    pub fn load(&mut self, to: &mut Sink) {
        let arena = &mut to.arenas.device;
        // A stream's host pushes frames at any time.
        let into = arena.take(self.emitter.facts.sizes.input_bytes, SlotKind::Pooled);
        to.ops.push_back(Op::Load(LoadOp { item: self.place.item, batch: self.place.batch, frame: self.loaded, into }));
        let head = self.head_of(0);
        self.emitter.caches[head].inputs.frames.push_back(into);
        self.loaded += 1;
        self.pad(arena);
    }

    /// Repeats the last frame of a clip until its length fits the latent frame rate.
    fn pad(&mut self, arena: &mut Arena) {
        if self.total != Some(self.loaded) || self.loaded == self.facts().spec.cone.first_input {
            return;
        }
        let (needed, head) = (self.network().padded_frames(self.loaded), self.head_of(0));
        let inputs = &mut self.emitter.caches[head].inputs;
        while inputs.end() < needed {
            let last = *inputs.frames.back().expect("the last frame is cached");
            arena.keep(last);
            inputs.frames.push_back(last);
        }
    }

    /// Schedules one chunk of the current slice, or one load; `false` if nothing is left to do without more input. With
    /// `may_load`, loads input as needed. Without, work starts with the whole slice, so that memory does not depend on
    /// how the host pushes. Finished frames are appended to `finished`.
    pub fn advance(&mut self, may_load: bool, to: &mut Sink, finished: &mut Vec<(u64, Slot)>) -> bool {
        if !may_load && self.room() > 0 {
            return false;
        }
        let stages = 0..self.network().stages.len();
        let whole = stages.clone().rev().find(|stage| self.ready(*stage) >= self.chunk_frames(*stage));
        if whole.is_none() && self.room() > 0 {
            self.load(to);
            return true;
        }
        let stage = whole.or_else(|| stages.into_iter().find(|stage| self.ready(*stage) > 0));
        stage.into_iter().for_each(|stage| self.compute(stage, to, finished));
        stage.is_some()
    }

    /// Frames that a stage could compute from its queued input.
    fn ready(&self, stage: usize) -> u64 {
        let head = self.head_of(stage);
        let made = self.network().layers[head].time.outputs(self.emitter.caches[head].inputs.end());
        let end = self.ends.as_ref().map_or(made, |ends| made.min(ends[stage]));
        self.reachable(stage, end).saturating_sub(self.computed[stage])
    }

    /// Frames of a stage's next chunk.
    fn chunk_frames(&self, stage: usize) -> u64 {
        let is_first = self.computed[stage] == self.first(stage);
        if is_first { self.first_chunk(stage) } else { self.facts().spec.policy.chunks[stage] }
    }

    /// Frames of a stage's first chunk, if there is input for as many.
    fn first_chunk(&self, stage: usize) -> u64 {
        let frames = self.incomplete_chunk(stage).unwrap_or_else(|| self.chunk_up_to_pair(stage));
        let frames = frames.max(self.least_first_chunk(stage));
        // Caches in 8 bits hold whole pairs.
        let needs_pairs = self.network().chunk_pairs(stage) == ChunkPairs::Required;
        frames + u64::from(needs_pairs && self.cuts_pair(stage, frames))
    }

    /// Where caches are offloaded, an incomplete chunk comes first: there is no cache to move yet, and at the end it
    /// would move all of it for few frames.
    fn incomplete_chunk(&self, stage: usize) -> Option<u64> {
        let (network, policy) = (self.network(), &self.facts().spec.policy);
        let offloads = network.stages[stage].body().any(|layer| policy.layers[layer].cache.uses_host());
        let made = network.stage_frames(self.slice_end)[stage].saturating_sub(self.first(stage));
        (offloads && made > 0).then(|| (made - 1) % policy.chunks[stage] + 1)
    }

    /// A whole chunk, or one frame less: frame 0 has no partner, so the first chunk ends at an odd number of frames, and
    /// the others have whole pairs.
    fn chunk_up_to_pair(&self, stage: usize) -> u64 {
        let chunk = self.facts().spec.policy.chunks[stage];
        chunk - u64::from(self.network().chunk_pairs(stage).are_kept(chunk) && self.cuts_pair(stage, chunk))
    }

    /// Whether a first chunk of so many frames ends within a pair.
    fn cuts_pair(&self, stage: usize, frames: u64) -> bool {
        (self.first(stage) + frames).is_multiple_of(2)
    }

    /// The chunk of a stage that ends with frame `end`.
    fn chunk_to(&self, stage: usize, end: u64) -> Chunk {
        let ends = self.ends.as_ref().is_some_and(|ends| ends[stage] == end);
        Chunk { stage, frames: self.computed[stage]..end, is_last: ends && !self.facts().is_periodic }
    }

    /// Computes one chunk of a stage, layer by layer.
    fn compute(&mut self, stage: usize, to: &mut Sink, finished: &mut Vec<(u64, Slot)>) {
        let facts = Arc::clone(&self.emitter.facts);
        let (network, cone) = (&facts.spec.network, &facts.spec.cone);
        let count = self.ready(stage).min(self.chunk_frames(stage));
        let chunk = self.chunk_to(stage, self.computed[stage] + count);
        self.computed[stage] = chunk.frames.end;
        let layers = &network.stages[stage];
        self.emitter.weights.begin(&chunk, to);
        let mut values = ChunkValues { of: vec![Vec::new(); network.layers.len()], kept: self.kept_outputs(&chunk) };
        let reads_input_last = self.reads_input_last(&chunk);
        for layer in layers.layers.clone() {
            if layer == layers.head() {
                values.of[layer] = self.head(&chunk, values.kept[layer], to);
            } else {
                self.body_layer(layer, &chunk, &mut values, to);
            }
            if layer == reads_input_last {
                let end = chunk.frames.end.saturating_sub(self.reread(stage));
                self.emitter.drop_inputs_before(layers.head(), end, &chunk, &mut to.arenas.device);
            }
            if layer == layers.head() {
                self.emitter.hand_around(layer, chunk.frames.clone(), &values.of[layer], to);
            }
        }
        let outputs = resident(&values.take(layers.last()));
        match network.stages.get(stage + 1) {
            Some(next) => {
                self.emitter.caches[next.head()].inputs.frames.extend(outputs);
                self.downsample_early(stage + 1, to);
            }
            None => finished.extend(cone.outputs(layers.last(), &chunk.frames).zip(outputs)),
        }
    }

    /// Interleaved, every frame may outlive the item's turn. Otherwise none does.
    fn outlives_turn(&self) -> Kept {
        if self.facts().spec.is_interleaved() { Kept::From(0) } else { Kept::None }
    }

    /// Where frames wait for their chunk, a downsampler runs early: its output is smaller.
    fn downsample_early(&mut self, stage: usize, to: &mut Sink) {
        let head = self.head_of(stage);
        let ready = self.ready(stage);
        if self.network().layers[head].layout.window != Window::Down || ready >= self.chunk_frames(stage) {
            return;
        }
        let chunk = self.chunk_to(stage, self.computed[stage] + ready);
        let frames = chunk.frames.start + self.early[stage].len() as u64..chunk.frames.end;
        let made = self.emitter.head(&LayerOutputs::plain(head, &chunk, frames, self.outlives_turn()), to);
        self.early[stage].extend(made);
        self.emitter.drop_inputs_before(head, chunk.frames.end, &chunk, &mut to.arenas.device);
    }

    /// The outputs of a stage's first layer.
    fn head(&mut self, chunk: &Chunk, kept: Kept, to: &mut Sink) -> Vec<SlotRef> {
        let (stage, end) = (chunk.stage, chunk.frames.end);
        let head = self.head_of(stage);
        let early = self.early[stage].len().min(chunk.count() as usize);
        let mut outputs: Vec<SlotRef> = self.early[stage].drain(..early).collect();
        let rematerialised = self.facts().rematerialised(head, chunk);
        let own = LayerOutputs::plain(head, chunk, chunk.frames.start + early as u64..end, kept);
        outputs.extend(self.emitter.head(&LayerOutputs { rematerialised, ..own }, to));
        outputs
    }

    /// The last layer that reads the queued input of a stage: the head, or the one that has frames of the head computed
    /// again.
    fn reads_input_last(&self, chunk: &Chunk) -> LayerId {
        let head = self.head_of(chunk.stage);
        let has_cache = |layer: &LayerId| !self.emitter.caches[*layer].statistics.is_empty();
        let recomputing = self.recomputed_layer(chunk.stage).filter(has_cache);
        let mut readers = self.network().readers(head).iter().map(|reader| reader.layer);
        let rematerialising = if self.facts().rematerialised(head, chunk) > 0 { readers.next_back() } else { None };
        recomputing.or(rematerialising).unwrap_or(head)
    }

    /// Computes a layer whose input is made in the same stage. Drops the values that no later layer reads.
    fn body_layer(&mut self, layer: LayerId, chunk: &Chunk, values: &mut ChunkValues, to: &mut Sink) {
        let facts = Arc::clone(&self.emitter.facts);
        let (network, own) = (&*facts.spec.network, &facts.spec.network.layers[layer]);
        let from = layer_of(own.input);
        if !values.of[from].is_empty() {
            let frames = facts.spec.cone.outputs(layer, &chunk.frames);
            let added = own.addend.map(|source| values.last_frames(source, frames.clone().count()));
            let outputs = LayerOutputs {
                added: added.as_deref(),
                rematerialised: self.emitter.hidden(layer, chunk),
                rematerialise: self.rematerialise(layer, chunk, values),
                ..LayerOutputs::plain(layer, chunk, frames.clone(), values.kept[layer])
            };
            let consumed = network.consumes_input(layer);
            let input = values.take(from);
            if own.attends {
                let mixed = self.emitter.attention(layer, resident(&input), to);
                values.of[layer] = self.emitter.conv(&outputs, Inputs { frames: &mixed, consumed: true }, to);
            } else {
                values.of[layer] = self.emitter.conv(&outputs, Inputs { frames: &input, consumed }, to);
                if !consumed {
                    values.of[from] = input;
                }
            }
            self.emitter.hand_around(layer, frames, &values.of[layer], to);
        }
        for from in own.sources().filter(|from| network.is_last_reader(*from, layer)) {
            drop_frames(values.take(from), &mut to.arenas);
        }
    }

    /// How the rematerialised frames that a layer reads are computed: those of its cache by the stage's head, others by
    /// the layer that made them. A head's input is queued; that of another layer is a value of the chunk.
    fn rematerialise(&self, layer: LayerId, chunk: &Chunk, values: &ChunkValues) -> Option<Rematerialise<Slots>> {
        let head = self.head_of(chunk.stage);
        let recomputed = self.emitter.caches[layer].statistics.len() as u64;
        let (by, frames) = if recomputed > 0 {
            let end = chunk.frames.end - values.of[head].len() as u64;
            (head, end - recomputed..end)
        } else {
            let by = self.facts().spec.policy.rematerialised_for(self.network(), layer)?;
            let count = values.of[by].iter().filter(|frame| frame.is_rematerialised()).count() as u64;
            (by, chunk.frames.end - count..chunk.frames.end)
        };
        if frames.is_empty() {
            return None;
        }
        if by == head {
            return Some(self.emitter.rematerialised_by(by, frames, &self.emitter.caches[by].inputs));
        }
        let inputs = resident(&values.of[layer_of(self.network().layers[by].input)]);
        let inputs = FrameQueue { first: chunk.frames.end - inputs.len() as u64, frames: inputs.into() };
        Some(self.emitter.rematerialised_by(by, frames, &inputs))
    }

    /// Of each layer of a stage, which of its output frames outlive the chunk. An output that is added to in place, or
    /// overwritten, lives as long as the frame that replaces it; so later layers come first.
    fn kept_outputs(&self, chunk: &Chunk) -> Vec<Kept> {
        let (facts, network) = (self.facts(), self.network());
        let stage = &network.stages[chunk.stage];
        let mut kept = vec![Kept::None; network.layers.len()];
        for layer in stage.layers.clone().rev() {
            let of_reader = |reader: &Reader| match reader.role {
                Role::Input => self.kept_input(reader.layer, chunk, kept[reader.layer]),
                Role::Residual if facts.sizes.adds_in_place => kept[reader.layer],
                Role::Residual | Role::Shortcut => Kept::None,
            };
            let read = match layer {
                last if last == stage.last() => self.kept_by_next_stage(chunk.stage),
                _ => network.readers(layer).iter().map(of_reader).min().unwrap_or(Kept::None),
            };
            // What waits to be added around a level may do so for long.
            let waits = !network.added_around(layer).is_empty();
            kept[layer] = read.min(if waits { self.outlives_turn() } else { Kept::None });
        }
        kept
    }

    /// Which outputs of a stage outlive the work item's turn. A first frame that the next stage passes on lives as long
    /// as that stage's first output.
    fn kept_by_next_stage(&self, stage: usize) -> Kept {
        let Some(next) = self.network().stages.get(stage + 1) else { return self.outlives_turn() };
        if !self.facts().spec.is_interleaved() {
            return Kept::None;
        }
        let passes = self.computed[stage + 1] == 0 && self.network().layers[next.head()].time.rule.passes_first();
        let passed = if passes { self.kept_by_next_stage(stage + 1) } else { Kept::None };
        Kept::From(self.first_queued(stage + 1)).min(if passed == Kept::From(0) { passed } else { Kept::None })
    }

    /// Which frames of a layer's input it keeps, or overwrites with frames that are kept. `output`: of its outputs,
    /// those that are kept.
    fn kept_input(&self, layer: LayerId, chunk: &Chunk, output: Kept) -> Kept {
        let (facts, own) = (self.facts(), &self.network().layers[layer]);
        if own.attends {
            return Kept::None;
        }
        let (consumes, normalised) = (self.network().consumes_input(layer), facts.sizes.layers[layer].normalised);
        // A layer that normalises frames of others keeps copies.
        let is_queued = consumes || normalised.is_none();
        let kept = if is_queued { self.emitter.kept_inputs(layer, chunk) } else { Kept::None };
        let overwrites = consumes
            && facts.is_banded(layer)
            && own.residual().is_none()
            && normalised == Some(facts.sizes.layers[layer].output);
        let written = if overwrites { output } else { Kept::None };
        let waits = facts.spec.is_interleaved() && chunk.frames.end <= facts.spec.cone.first(layer);
        kept.min(written).min(if waits { Kept::From(0) } else { Kept::None })
    }
}
