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
use crate::ir::{LayerId, LoadOp, Op, Window};
use crate::model::{Block, Network};
use crate::plan::arena::{Arena, Arenas, PackedLayout, Slot, SlotKind};
use crate::plan::cost::FrameSizes;
use crate::plan::policy::{CACHE_FRAMES, CachePolicy, recomputable_layer};
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

/// How far a work item is within its slice.
#[derive(Debug)]
pub struct ItemProgress {
    /// Where the input ends that has been taken.
    pub taken: u64,
    /// Frames that each stage has computed.
    pub computed: Vec<u64>,
    /// Everything else that decides what comes next, without frame numbers.
    pub state: Vec<u64>,
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
            computed: network.stages.iter().map(|stage| cone.first(stage.head)).collect(),
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
                rematerialise: None,
                recomputed: Vec::new(),
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
            let head = self.network().stages[stage].head;
            let next = self.reachable(stage, made).saturating_sub(self.reread(stage));
            self.first_queued[stage] = self.emitter.oldest_needed(head, next.max(self.first(stage)));
        }
    }

    /// The first frame of a stage.
    fn first(&self, stage: usize) -> u64 {
        self.emitter.cone.first(self.network().stages[stage].head)
    }

    /// Up to which frame a stage computes whose input suffices for frames up to `end`. Rematerialised frames cannot
    /// wait: the first chunk with some reaches to the first output of the layer that reads them.
    fn reachable(&self, stage: usize, end: u64) -> u64 {
        let (first, policy) = (self.first(stage), &self.emitter.policy);
        let rematerialises = policy.materialised[stage] < policy.chunks[stage];
        if end < first + if rematerialises { self.least_first_chunk(stage) } else { 0 } { first } else { end }
    }

    /// Frames of a stage up to the first output of its first block's first layer.
    fn least_first_chunk(&self, stage: usize) -> u64 {
        let [reader, _] = self.network().stages[stage].blocks[0].layers();
        self.emitter.cone.first(reader) + 1 - self.first(stage)
    }

    /// The layer of a stage whose cache its head recomputes.
    fn recomputes(&self, stage: usize) -> Option<LayerId> {
        let layer = recomputable_layer(self.network(), stage)?;
        (self.emitter.policy.caches[layer] == CachePolicy::Recomputed).then_some(layer)
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

    /// Loads the next `count` input frames, without operations.
    pub fn load_unseen(&mut self, count: u64, arena: &mut Arena) {
        let head = self.network().stages[0].head;
        let (inputs, bytes) = (self.emitter.caches[head].inputs_mut(), self.emitter.sizes.input_bytes);
        inputs.frames.extend((0..count).map(|_| arena.take(bytes, SlotKind::Pooled)));
        self.loaded += count;
        self.pad(arena);
    }

    /// Loads the next input frame.
    pub fn load(&mut self, to: &mut Sink) {
        let arena = &mut to.arenas.device;
        // A stream's host pushes frames at any time.
        let into = arena.take(self.emitter.sizes.input_bytes, SlotKind::Pooled);
        to.ops.push_back(Op::Load(LoadOp { item: self.item, batch: self.batch, frame: self.loaded, into }));
        let head = self.network().stages[0].head;
        self.emitter.caches[head].inputs_mut().frames.push_back(into);
        self.loaded += 1;
        self.pad(arena);
    }

    /// Repeats the last frame of a clip until its length fits the latent frame rate.
    fn pad(&mut self, arena: &mut Arena) {
        if self.total != Some(self.loaded) || self.loaded == self.emitter.cone.first_input {
            return;
        }
        let (needed, head) = (self.network().padded_frames(self.loaded), self.network().stages[0].head);
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
        let head = self.network().stages[stage].head;
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

    /// Computes one chunk of a stage: head, blocks, tail.
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
        if let Some(layer) = self.recomputes(stage) {
            self.emitter.recompute_cache(layers.head, layer, first);
        }
        let (first_block, rest) = layers.blocks.split_first().expect("a stage has blocks");
        let mut x = self.head_and_first_block(stage, first_block, frames.clone(), to);
        for (i, block) in rest.iter().enumerate() {
            x = self.block((stage, block), frames.clone(), x, self.first_cached_input(stage, i + 2), to);
        }
        match (layers.tail, network.stages.get(stage + 1)) {
            (Some(tail), _) => {
                let own = self.emitter.cone.outputs(tail, &frames);
                let outputs = LayerOutputs::plain(tail, own.clone(), self.outlives_turn());
                let out = self.emitter.conv_consuming(&outputs, x, to);
                finished.extend(own.zip(resident(&out)));
            }
            (None, Some(next)) => {
                self.emitter.caches[next.head].inputs_mut().frames.extend(resident(&x));
                self.downsample_early(stage + 1, to);
            }
            (None, None) => unreachable!("the last stage of a network has a tail"),
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
        let head = self.network().stages[stage].head;
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

    /// Frames through the head of a stage and its first block.
    fn head_and_first_block(
        &mut self,
        stage: usize,
        first_block: &Block,
        frames: Range<u64>,
        to: &mut Sink,
    ) -> Vec<SlotRef> {
        let head = self.network().stages[stage].head;
        let materialised = frames.end.min(frames.start + self.emitter.policy.materialised[stage]);
        let early = self.early[stage].len().min(frames.clone().count());
        let mut x: Vec<SlotRef> = self.early[stage].drain(..early).collect();
        let computed = frames.start + early as u64;
        let first_cached = self.first_cached_input(stage, 0);
        x.extend(match self.emitter.policy.offloaded_outputs[head] {
            true => self.emitter.head_offloaded(head, frames.clone(), to),
            false => self.emitter.head(head, computed..materialised, first_cached, to),
        });
        let first_cached = self.first_cached_input(stage, 1);
        if materialised == frames.end {
            // A recomputed cache still needs these inputs; its reader drops them.
            if self.emitter.recomputed.is_empty() {
                let end = frames.end.saturating_sub(self.reread(stage));
                self.emitter.drop_inputs_before(head, end, &mut to.arenas.device);
            }
            return self.block((stage, first_block), frames, x, first_cached, to);
        }
        let oldest = self.network().layers[head].time.oldest(materialised);
        self.emitter.caches[head].inputs_mut().drop_before(oldest, &mut to.arenas.device);
        x.extend(self.emitter.head_rematerialised(head, materialised..frames.end, to));
        let out = self.block((stage, first_block), frames.clone(), x, first_cached, to);
        self.emitter.drop_inputs_before(head, frames.end, &mut to.arenas.device);
        out
    }

    /// A block's outputs. Consumes `x`. Output frames from `first_cached` on stay cached.
    fn block(
        &mut self,
        (stage, block): (usize, &Block),
        frames: Range<u64>,
        x: Vec<SlotRef>,
        first_cached: u64,
        to: &mut Sink,
    ) -> Vec<SlotRef> {
        if x.is_empty() {
            return x;
        }
        let emitter = &mut self.emitter;
        let out = match *block {
            Block::Residual { first, second } => {
                let has_shortcut = emitter.network.layers[second].layout.shortcut.is_some();
                // A banded second layer with a shortcut overwrites its input.
                let h_cached = match emitter.is_banded(second) && has_shortcut {
                    true => first_cached,
                    false => emitter.first_cached_frame(second),
                };
                let h_cached = h_cached.min(emitter.first_waiting_frame(second));
                let [h_frames, out_frames] = [first, second].map(|layer| emitter.cone.outputs(layer, &frames));
                let hidden = emitter.hidden_end(stage, block, &frames)..frames.end;
                let h = LayerOutputs::plain(first, h_frames, h_cached);
                let h = emitter.conv(&LayerOutputs { first_rematerialised: hidden.start, ..h }, &x, to);
                if !hidden.is_empty() {
                    emitter.rematerialise_hidden(first, hidden, &resident(&x));
                }
                let added = &x[x.len() - out_frames.clone().count()..];
                let (residuals, addend);
                if has_shortcut {
                    addend = Addend::Shortcut(added);
                } else {
                    residuals = resident(added);
                    addend = Addend::Residual(&residuals);
                }
                let outputs = LayerOutputs { addend, ..LayerOutputs::plain(second, out_frames, first_cached) };
                emitter.conv_consuming(&outputs, h, to)
            }
            Block::Attention { qkv, project } => {
                let own = emitter.cone.outputs(project, &frames);
                let projections = emitter.conv(&LayerOutputs::plain(qkv, own.clone(), NONE), &x, to);
                let mixed = emitter.attention(project, resident(&projections), to);
                let residuals = resident(&x);
                let addend = Addend::Residual(&residuals);
                let outputs = LayerOutputs { addend, ..LayerOutputs::plain(project, own, first_cached) };
                emitter.conv_consuming(&outputs, mixed, to)
            }
        };
        self.emitter.rematerialise = None;
        drop_frames(x, to.arenas);
        out
    }

    /// The first input frame of block `block` that stays cached; `block` may be one past the last, for the stage's
    /// output. A frame that blocks add to in place lives until a block with a shortcut writes a new one.
    fn first_cached_input(&self, stage: usize, block: usize) -> u64 {
        let (emitter, layers) = (&self.emitter, &self.network().stages[stage]);
        let Some(block_layers) = layers.blocks.get(block) else {
            return match layers.tail {
                Some(tail) => emitter.first_cached_frame(tail).min(emitter.first_waiting_frame(tail)),
                None if emitter.interleaved => self.first_queued[stage + 1],
                None => NONE,
            };
        };
        let [first, second] = block_layers.layers();
        let flows_on = emitter.sizes.adds_in_place && self.network().layers[second].layout.shortcut.is_none();
        let after = if flows_on { self.first_cached_input(stage, block + 1) } else { NONE };
        let after = after.min(emitter.first_waiting_frame(first));
        // A layer that normalises its input itself caches it as it is.
        match emitter.sizes.normalised[first] {
            None => after.min(emitter.first_cached_frame(first)),
            Some(_) => after,
        }
    }

    /// Counts `inputs` more input frames of the slice, for which each stage has computed `computed` frames. In a stream the frames are loaded already, and lose their slots.
    pub fn skip_in_slice(&mut self, inputs: u64, computed: &[u64], pushed: bool) {
        self.count(inputs, computed);
        if pushed {
            let head = self.network().stages[0].head;
            self.emitter.caches[head].inputs_mut().frames.drain(..inputs as usize);
        } else {
            self.loaded += inputs;
        }
    }

    fn count(&mut self, inputs: u64, computed: &[u64]) {
        let inputs = [inputs].into_iter().chain(computed.iter().copied());
        for (stage, (into, made)) in inputs.zip(computed).enumerate() {
            self.computed[stage] += made;
            let Emitter { network, caches, .. } = &mut self.emitter;
            caches[network.stages[stage].head].skip(into);
            network.stages[stage].body().for_each(|layer| caches[layer].skip(*made));
        }
    }

    /// Where the input ends that has been taken. In a stream all input of a slice is loaded first.
    pub fn taken(&self, pushed: bool) -> u64 {
        let head = &self.emitter.caches[self.network().stages[0].head];
        if pushed { head.inputs().first } else { self.loaded }
    }

    /// Input frames of the slice that are left.
    pub fn left(&self, taken: u64) -> u64 {
        self.slice_end.min(self.total.unwrap_or(u64::MAX)).saturating_sub(taken)
    }

    /// Frames that each stage has computed.
    pub fn computed(&self) -> &[u64] {
        &self.computed
    }

    /// Everything else that decides what comes next, without frame numbers.
    pub fn state(&self, pushed: bool) -> Vec<u64> {
        let network = self.network();
        let mut state = Vec::with_capacity(4 * network.stages.len() + 2 * network.layers.len());
        for (stage, layers) in network.stages.iter().enumerate() {
            let computed = self.computed[stage];
            let oldest = network.layers[layers.head].time.oldest(computed);
            // The loaded input of a stream only shrinks.
            let is_input = stage == 0 && pushed;
            let queued = if is_input { 0 } else { self.ready(stage) };
            let cache = &self.emitter.caches[layers.head];
            let first = cache.first().map_or(0, |first| oldest.wrapping_sub(first));
            let kinds = if is_input { 0 } else { cache.slot_kinds() };
            state.extend([queued, self.early[stage].len() as u64, first, kinds]);
            for layer in layers.body() {
                let cache = &self.emitter.caches[layer];
                state.extend([cache.first().map_or(0, |first| computed.wrapping_sub(first)), cache.slot_kinds()]);
            }
        }
        state
    }
}
