//! Bytes of frames and weights on a device, for one network and one input size.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::ir::{
    CacheFormat, ConvLayout, DeviceProfile, FrameShape, LayerId, PartialSumsSize, Prologue, Sizes, SplitColumns,
};
use crate::model::{Layer, LevelMap, Network};
use crate::plan::exclusions::Choices;
use crate::plan::policy::{LayerPolicy, Memory, Placement, SchedulePolicy};
use crate::reserve;

/// The device that a plan is for.
#[derive(Clone, Copy)]
pub struct Target<'a> {
    pub profile: DeviceProfile,
    pub sizes: &'a dyn Sizes,
    /// Groups of the model's norms: their statistics are stored with each frame.
    pub groups: u64,
    cancel: &'a AtomicBool,
    times_low: usize,
}

static NEVER: AtomicBool = AtomicBool::new(false);

impl<'a> Target<'a> {
    pub fn new(profile: DeviceProfile, sizes: &'a dyn Sizes, groups: u64) -> Target<'a> {
        Target { profile, sizes, groups, cancel: &NEVER, times_low: reserve::times_low() }
    }

    /// Planning for it ends early when `cancel` is set. Its result is then useless.
    pub fn with_cancel(self, cancel: &'a AtomicBool) -> Target<'a> {
        Target { cancel, ..self }
    }

    /// By the host, or because its memory ran out meanwhile.
    pub fn is_cancelled(&self) -> bool {
        self.cancel.load(Ordering::Relaxed) || self.times_low != reserve::times_low()
    }

    pub fn frame_bytes(&self, shape: FrameShape) -> u64 {
        self.sizes.frame_bytes(shape, self.groups)
    }

    /// Bytes of a frame, or of a part of one, in an offloaded cache.
    pub fn cached_bytes(&self, shape: FrameShape, format: CacheFormat) -> u64 {
        match format {
            CacheFormat::Exact => self.frame_bytes(shape),
            CacheFormat::U8 => self.sizes.u8_frame_bytes(shape).expect("only a device that has such caches gets them"),
        }
    }

    /// Bytes of a frame's statistics alone. Where a norm has none, the least that a slot can have: it names the frame.
    pub fn statistics_bytes(&self) -> u64 {
        let side = if self.groups > 0 { 0 } else { 1 };
        self.frame_bytes(FrameShape::new(side, side, 1))
    }

    /// Bytes of fetched weights with the first `slabs` slabs: as if there were no others.
    pub fn fetched_bytes(&self, layout: &ConvLayout, slabs: u64) -> u64 {
        self.sizes.weight_bytes(&ConvLayout { slabs, ..*layout })
    }

    /// A layer's partial sums, if they replace its causal cache.
    pub fn partial_sums(&self, layer: &Layer, input: FrameShape) -> Option<PartialSumsSize> {
        self.sizes.partial_sums(&layer.layout, input, layer.time.pending_outputs()?)
    }

    /// Whether a layer keeps partial sums in place of its causal cache.
    pub fn keeps_partial_sums(&self, layer: &Layer) -> bool {
        self.partial_sums(layer, FrameShape::new(1, 1, layer.layout.cin)).is_some()
    }

    /// Layers that can run in bands, so their caches can leave the device.
    pub fn bandable_layers(&self, network: &Network) -> Vec<LayerId> {
        let is_head = |layer: LayerId| network.stages[network.stage_of(layer)].head() == layer;
        let can = |layer: &LayerId| self.can_run_banded(&network.layers[*layer], is_head(*layer));
        (0..network.layers.len()).filter(can).collect()
    }

    /// Whether a layer can run in bands.
    pub fn can_run_banded(&self, layer: &Layer, is_head: bool) -> bool {
        let keeps_partial_sums = self.keeps_partial_sums(layer);
        let banded = LayerPolicy::RESIDENT.banded(Placement::HOST);
        let in_bands = layer.runs_in_bands() && !self.sizes.normalises_itself(&layer.layout);
        in_bands && !Choices { is_head, keeps_partial_sums, ..Choices::of(banded) }.is_excluded()
    }

    /// What a policy chooses for a layer, and what that is judged by.
    pub fn choices(&self, policy: &SchedulePolicy, network: &Network, layer: LayerId, is_still: bool) -> Choices {
        let (facts, stage) = (&network.layers[layer], network.stage_of(layer));
        Choices {
            own: policy.layers[layer],
            chunk: policy.chunks[stage],
            is_head: layer == network.stages[stage].head(),
            is_largest: stage == network.largest_stage(),
            keeps_partial_sums: self.keeps_partial_sums(facts),
            reads_rematerialised: policy.rematerialised_for(network, layer).is_some(),
            rounds: facts.cache == CacheFormat::U8,
            is_still,
        }
    }
}

/// The sizes of a network's frames for one input size. All work items of that size share them.
#[derive(Debug)]
pub struct FrameSizes {
    pub input: FrameShape,
    pub input_bytes: u64,
    /// Shape of each layer's input.
    pub inputs: Vec<FrameShape>,
    /// Bytes of each layer's output.
    pub outputs: Vec<u64>,
    /// Bytes of the means that are added to each layer's output around a level.
    pub pooled: Vec<Option<u64>>,
    /// Bytes of each layer's normalised input, if an operation of its own makes it.
    pub normalised: Vec<Option<u64>>,
    /// Each layer's partial sums, if they replace its causal cache.
    pub partial_sums: Vec<Option<PartialSumsSize>>,
    /// Bytes of the statistics of a frame that is not resident.
    pub statistics: u64,
    /// How each layer's cached frames are split, and the bytes of both parts.
    pub columns: Vec<SplitColumns>,
    pub cached: Vec<[Option<u64>; 2]>,
    /// Bytes of each layer's weights with no slab, with the first, with two, and so on.
    pub weights: Vec<Vec<u64>>,
    pub adds_in_place: bool,
}

impl FrameSizes {
    pub fn new(network: &Network, policy: &SchedulePolicy, input: FrameShape, target: &Target) -> FrameSizes {
        let inputs = network.input_shapes(input);
        let layers = || network.layers.iter().zip(&inputs);
        let outputs = layers().map(|(layer, shape)| target.frame_bytes(layer.output_shape(*shape)));
        let pooled = layers().map(|(layer, shape)| {
            let is_mean = layer.level.is_some_and(|level| level.map == LevelMap::Mean);
            is_mean.then(|| target.frame_bytes(layer.output_shape(*shape)))
        });
        let pooled = pooled.collect();
        let normalised = layers().map(|(layer, shape)| {
            let fused = target.profile.fuses_norm || target.sizes.normalises_itself(&layer.layout);
            (layer.layout.prologue != Prologue::None && !fused).then(|| target.frame_bytes(*shape))
        });
        let normalised: Vec<Option<u64>> = normalised.collect();
        let partial_sums: Vec<Option<PartialSumsSize>> =
            layers().map(|(layer, shape)| target.partial_sums(layer, *shape)).collect();
        let columns = policy.layers.iter().zip(&inputs);
        let columns: Vec<SplitColumns> =
            columns.map(|(layer, shape)| layer.cache.columns(shape.width, target.profile.column_step)).collect();
        let cached = columns.iter().zip(layers()).map(|(columns, (layer, shape))| {
            [columns.resident(), columns.host()].map(|Range { start, end }| {
                (end > start).then(|| target.cached_bytes(FrameShape { width: end - start, ..*shape }, layer.cache))
            })
        });
        let weights = network
            .layers
            .iter()
            .map(|layer| (0..=layer.layout.slabs).map(|slabs| target.fetched_bytes(&layer.layout, slabs)).collect());
        FrameSizes {
            input,
            input_bytes: target.frame_bytes(input),
            outputs: outputs.collect(),
            pooled,
            normalised,
            partial_sums,
            statistics: target.statistics_bytes(),
            cached: cached.collect(),
            weights: weights.collect(),
            adds_in_place: target.profile.adds_in_place,
            columns,
            inputs,
        }
    }
}

impl FrameSizes {
    /// The same in slots that frames of a `larger` input fit too. Work items that run one after the other then share
    /// slots; otherwise each size of tile would have pooled slots of its own.
    pub fn in_slots_of(mut self, larger: &FrameSizes) -> FrameSizes {
        let grow = |own: &mut u64, other: u64| *own = other.max(*own);
        let grow_part = |(own, other): (&mut Option<u64>, &Option<u64>)| {
            *own = own.map(|own| own.max(other.unwrap_or(0)));
        };
        grow(&mut self.input_bytes, larger.input_bytes);
        self.outputs.iter_mut().zip(&larger.outputs).for_each(|(own, other)| grow(own, *other));
        self.pooled.iter_mut().zip(&larger.pooled).for_each(grow_part);
        self.normalised.iter_mut().zip(&larger.normalised).for_each(grow_part);
        self.cached
            .iter_mut()
            .zip(&larger.cached)
            .for_each(|(own, other)| own.iter_mut().zip(other).for_each(grow_part));
        for (own, other) in self.partial_sums.iter_mut().zip(&larger.partial_sums) {
            own.iter_mut().zip(other).for_each(|(own, other)| grow(&mut own.bytes, other.bytes));
        }
        self
    }
}

/// Bytes of a network's weights.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WeightBytes {
    /// The block on the device.
    pub block: u64,
    /// Offloaded weights, and what the device takes to reach them.
    pub host: u64,
    mapping: u64,
}

impl WeightBytes {
    /// `offloaded`: of each layer, whether its weights are in host memory.
    pub fn new(network: &Network, offloaded: &[bool], target: &Target) -> WeightBytes {
        let (mut resident, mut host) = (0, 0);
        for (layer, offloaded) in network.layers.iter().zip(offloaded) {
            *(if *offloaded { &mut host } else { &mut resident }) += target.sizes.weight_bytes(&layer.layout);
        }
        let sizes = target.sizes;
        WeightBytes { block: sizes.block_bytes(resident), host, mapping: sizes.mapping_bytes(host) }
    }

    pub fn device(&self) -> u64 {
        self.block + self.mapping
    }
}

/// Weights below this fraction of all weights are not worth fetching. Set by hand: all of them together are a few
/// percent.
const MIN_WEIGHT_SHARE: u64 = 256;

/// Of each layer, whether its weights can be offloaded: large ones of stage bodies, which run layer by layer.
pub fn fetchable_weights(network: &Network, input: FrameShape, target: &Target) -> Vec<bool> {
    if !target.profile.offloads {
        return vec![false; network.layers.len()];
    }
    let bytes: Vec<u64> = network.layers.iter().map(|layer| target.sizes.weight_bytes(&layer.layout)).collect();
    let least = bytes.iter().sum::<u64>() / MIN_WEIGHT_SHARE;
    let pixels = network.stage_pixels(input);
    let full = pixels.iter().copied().max().unwrap_or(0);
    let mut found = vec![false; bytes.len()];
    let fetched = LayerPolicy { weights: Memory::Host, ..LayerPolicy::RESIDENT };
    for (stage, pixels) in network.stages.iter().zip(&pixels) {
        let can = !Choices { is_largest: *pixels == full, ..Choices::of(fetched) }.is_excluded();
        stage.body().for_each(|layer| found[layer] = can && bytes[layer] > least);
    }
    found
}
