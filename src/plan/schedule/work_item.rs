//! The schedule of one work item: a clip, or one tile of it. Decides which stage computes which frames next.
//!
//! Stages run as deep as they can before new input is loaded, so few frames are live. Everything depends on frame
//! counts only; a rehearsal without computing tells the memory.

use std::ops::Range;
use std::sync::Arc;

use super::emit::{Addend, Emitter, NONE};
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
    /// Frames that each stage has computed.
    computed: Vec<u64>,
    /// Input frames loaded so far, and where the current slice ends.
    loaded: u64,
    slice_end: u64,
    /// Input frames in all, once known, and the frames that each stage then computes in all.
    total: Option<u64>,
    ends: Vec<u64>,
    /// Of each stage, the first input frame that is still queued when the current slice is done.
    first_queued: Vec<u64>,
    /// Of each stage, outputs of its head that wait for their chunk.
    early: Vec<Vec<SlotRef>>,
}

/// Whether a job has more slices than a rehearsal traces; `None` is a stream.
pub fn is_periodic(frames: Option<u64>, slice: u64) -> bool {
    frames.is_none_or(|frames| frames > 1 + PackedLayout::TRACED_SLICES as u64 * slice)
}

impl WorkItem {
    /// `frames`: how many there will be, if that is known.
    pub fn new(spec: &ScheduleSpec, sizes: Arc<FrameSizes>, frames: Option<u64>, item: usize, batch: u64) -> WorkItem {
        let (network, policy) = (Arc::clone(&spec.network), Arc::clone(&spec.policy));
        let caches = policy.caches.iter().zip(&sizes.partial_sums);
        let caches = caches.map(|(policy, partial)| LayerCache::new(*policy, partial.is_some())).collect();
        // A shorter slice comes first: it has no cache yet that would have to move for few frames.
        let first = frames.map_or(0, |frames| network.padded_frames(frames).saturating_sub(1) % policy.slice);
        let stages = network.stages.len();
        let mut item_state = WorkItem {
            item,
            batch,
            computed: vec![0; stages],
            loaded: 0,
            slice_end: 1 + if first == 0 { policy.slice } else { first },
            total: None,
            ends: Vec::new(),
            first_queued: vec![0; stages],
            early: vec![Vec::new(); stages],
            emitter: Emitter {
                periodic: is_periodic(frames, policy.slice),
                interleaved: spec.is_interleaved(),
                network,
                sizes,
                policy,
                caches,
                weights: WeightFetcher::default(),
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
            self.first_queued[stage] = self.emitter.oldest_needed(head, made.saturating_sub(self.reread(stage)));
        }
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

    /// Whether the current slice is the last and, even padded, shorter than others.
    pub fn is_partial(&self) -> bool {
        self.total.is_some_and(|total| total == 0 || self.network().padded_frames(total) < self.slice_end)
    }

    pub fn next_slice(&mut self) {
        self.slice_end += self.emitter.policy.slice;
        self.look_ahead();
    }

    /// Sets the number of input frames. Must be called before the last slice ends.
    pub fn set_total(&mut self, total: u64, arenas: &mut Arenas) {
        self.total = Some(total);
        if total > 0 {
            self.ends = self.network().stage_frames(total);
        }
        self.pad(&mut arenas.device);
    }

    /// Drops all caches.
    pub fn clear(&mut self, arenas: &mut Arenas) {
        self.emitter.caches.iter_mut().for_each(|cache| cache.clear(arenas));
    }

    pub fn caches(&self) -> &[LayerCache] {
        &self.emitter.caches
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
        if self.total != Some(self.loaded) || self.loaded == 0 {
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

    /// Schedules one chunk of the current slice; `false` if nothing is left to do without more input. With `may_load`,
    /// loads input as needed. Finished frames are appended to `finished`.
    pub fn advance(&mut self, may_load: bool, to: &mut Sink, finished: &mut Vec<(u64, Slot)>) -> bool {
        if !may_load && self.room() > 0 {
            // Work starts with the whole slice, so that memory does not depend on how the host pushes.
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
        self.network().layers[head].time.outputs(queued) - self.computed[stage]
    }

    /// Frames of a stage's next chunk. Where caches are offloaded, an incomplete chunk comes first: there is no cache
    /// to move yet, and at the end it would move all of it for few frames.
    fn chunk(&self, stage: usize) -> u64 {
        let policy = &self.emitter.policy;
        let chunk = policy.chunks[stage];
        let offloads = || self.network().stages[stage].body().any(|layer| policy.caches[layer].uses_host());
        if self.computed[stage] > 0 || !offloads() {
            return chunk;
        }
        (self.network().stage_frames(self.slice_end)[stage] - 1) % chunk + 1
    }

    /// Computes one chunk of a stage: head, blocks, tail.
    fn compute(&mut self, stage: usize, to: &mut Sink, finished: &mut Vec<(u64, Slot)>) {
        let network = Arc::clone(self.network());
        let (first, count) = (self.computed[stage], self.ready(stage).min(self.chunk(stage)));
        let frames = first..first + count;
        self.computed[stage] += count;
        self.set_chunk_end(stage, frames.end);
        let layers = &network.stages[stage];
        let offloaded = layers.body().filter(|layer| self.emitter.policy.offloaded_weights[*layer]).collect();
        let Emitter { weights, sizes, .. } = &mut self.emitter;
        weights.begin(offloaded, frames.clone(), (&network, sizes), to);
        if let Some(layer) = self.recomputes(stage) {
            self.emitter.recompute_cache(layers.head, layer, first);
        }
        let (first_block, rest) = layers.blocks.split_first().expect("a stage has blocks");
        let mut x = self.head_and_first_block(stage, first_block, frames.clone(), to);
        for (i, block) in rest.iter().enumerate() {
            x = self.block(block, frames.clone(), x, self.first_cached_input(stage, i + 2), to);
        }
        match (layers.tail, network.stages.get(stage + 1)) {
            (Some(tail), _) => {
                let out = self.emitter.conv_consuming(tail, frames, x, Addend::None, self.outlives_turn(), to);
                finished.extend((first..).zip(resident(&out)));
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
            return self.block(first_block, frames, x, first_cached, to);
        }
        let oldest = self.network().layers[head].time.oldest(materialised);
        self.emitter.caches[head].inputs_mut().drop_before(oldest, &mut to.arenas.device);
        x.extend(self.emitter.head_rematerialised(head, materialised..frames.end, to));
        let out = self.block(first_block, frames.clone(), x, first_cached, to);
        self.emitter.rematerialise = None;
        self.emitter.drop_inputs_before(head, frames.end, &mut to.arenas.device);
        out
    }

    /// A block's outputs. Consumes `x`. Output frames from `first_cached` on stay cached.
    fn block(
        &mut self,
        block: &Block,
        frames: Range<u64>,
        x: Vec<SlotRef>,
        first_cached: u64,
        to: &mut Sink,
    ) -> Vec<SlotRef> {
        let emitter = &mut self.emitter;
        let out = match *block {
            Block::Residual { first, second } => {
                let has_shortcut = emitter.network.layers[second].layout.shortcut.is_some();
                let banded = |layer: LayerId| emitter.policy.caches[layer] != CachePolicy::Resident;
                // A banded second layer with a shortcut overwrites its input.
                let h_cached = match banded(second) && has_shortcut {
                    true => first_cached,
                    false => emitter.first_cached_frame(second),
                };
                let h = match banded(first) {
                    true => emitter.conv_banded(first, frames.clone(), &x, false, Addend::None, h_cached, to),
                    false => emitter.conv(first, frames.clone(), &resident(&x), Addend::None, h_cached, to),
                };
                match has_shortcut {
                    true => emitter.conv_consuming(second, frames, h, Addend::Shortcut(&x), first_cached, to),
                    false => {
                        emitter.conv_consuming(second, frames, h, Addend::Residual(&resident(&x)), first_cached, to)
                    }
                }
            }
            Block::Attention { qkv, project } => {
                let x = resident(&x);
                let projections = emitter.conv(qkv, frames.clone(), &x, Addend::None, NONE, to);
                let mixed = emitter.attention(project, resident(&projections), to);
                emitter.conv_consuming(project, frames, mixed, Addend::Residual(&x), first_cached, to)
            }
        };
        drop_frames(x, to.arenas);
        out
    }

    /// The first input frame of block `block` that stays cached; `block` may be one past the last, for the stage's
    /// output. A frame that blocks add to in place lives until a block with a shortcut writes a new one.
    fn first_cached_input(&self, stage: usize, block: usize) -> u64 {
        let (emitter, layers) = (&self.emitter, &self.network().stages[stage]);
        let Some(block_layers) = layers.blocks.get(block) else {
            return match layers.tail {
                Some(tail) => emitter.first_cached_frame(tail),
                None if emitter.interleaved => self.first_queued[stage + 1],
                None => NONE,
            };
        };
        let [first, second] = block_layers.layers();
        let flows_on = emitter.sizes.adds_in_place && self.network().layers[second].layout.shortcut.is_none();
        let after = if flows_on { self.first_cached_input(stage, block + 1) } else { NONE };
        // A layer that normalises its input itself caches it as it is.
        match emitter.sizes.normalised[first] {
            None => after.min(emitter.first_cached_frame(first)),
            Some(_) => after,
        }
    }

    /// Counts `loaded` more input frames, for which each stage has computed `computed` frames.
    pub fn skip(&mut self, loaded: u64, computed: &[u64]) {
        self.loaded += loaded;
        self.slice_end += loaded;
        let inputs = [loaded].into_iter().chain(computed.iter().copied());
        for (stage, (into, made)) in inputs.zip(computed).enumerate() {
            self.computed[stage] += made;
            let Emitter { network, caches, .. } = &mut self.emitter;
            caches[network.stages[stage].head].skip(into);
            network.stages[stage].body().for_each(|layer| caches[layer].skip(*made));
        }
        self.look_ahead();
    }
}
