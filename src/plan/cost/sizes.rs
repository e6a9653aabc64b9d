//! Bytes of frames and weights on a device, for one network and one input size.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{Result, check_cancel};
use crate::ir::{
    CacheFormat, ConvLayout, DeviceProfile, FrameShape, LayerId, PartialSumsSize, Prologue, Sizes, SplitColumns,
};
use crate::model::{Layer, Network};
use crate::plan::exclusions::Choices;
use crate::plan::policy::{LayerPolicy, Memory, Placement};
use crate::plan::spec::ScheduleSpec;
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

    /// Fails if the host has asked to stop.
    pub fn check_cancel(&self) -> Result<()> {
        check_cancel(self.cancel)
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
        (0..network.layers.len()).filter(|layer| self.can_run_banded(network, *layer)).collect()
    }

    /// Whether a layer can run in bands.
    pub fn can_run_banded(&self, network: &Network, layer: LayerId) -> bool {
        let own = &network.layers[layer];
        let (is_head, keeps_partial_sums) = (network.is_head(layer), self.keeps_partial_sums(own));
        let banded = LayerPolicy::RESIDENT.banded(Placement::HOST);
        let in_bands = own.runs_in_bands() && !self.sizes.normalises_itself(&own.layout);
        in_bands && Choices { is_head, keeps_partial_sums, ..Choices::of(banded) }.exclusion().is_none()
    }
}

/// The sizes of a network's frames for one input size. All work items of that size share them.
#[derive(Debug)]
pub struct FrameSizes {
    pub input: FrameShape,
    pub input_bytes: u64,
    /// Bytes of the statistics of a frame that is not resident.
    pub statistics: u64,
    pub adds_in_place: bool,
    pub layers: Vec<LayerSizes>,
}

/// The sizes of a layer's frames.
#[derive(Debug)]
pub struct LayerSizes {
    /// Shape of its input.
    pub input: FrameShape,
    /// Bytes of its output.
    pub output: u64,
    /// Bytes of its normalised input, if an operation of its own makes it.
    pub normalised: Option<u64>,
    /// Its partial sums, if they replace its causal cache.
    pub partial_sums: Option<PartialSumsSize>,
    /// How its cached frames are split, and the bytes of both parts.
    pub columns: SplitColumns,
    pub resident_part: Option<u64>,
    pub host_part: Option<u64>,
    /// Bytes of its weights with no slab, with the first, with two, and so on.
    pub weights: Vec<u64>,
}

impl LayerSizes {
    /// `slots`: the input whose frames' slots its own take.
    fn new(layer: &Layer, cache: Placement, input: FrameShape, slots: FrameShape, target: &Target) -> LayerSizes {
        let Target { profile, sizes, .. } = target;
        let is_fused = profile.fuses_norm || sizes.normalises_itself(&layer.layout);
        let has_norm = layer.layout.prologue != Prologue::None;
        let [columns, widest] = [input, slots].map(|shape| cache.columns(shape.width, profile.column_step));
        let part = |own: u64, widest: u64| {
            let shape = FrameShape { width: own.max(widest), ..slots };
            (own > 0).then(|| target.cached_bytes(shape, layer.cache))
        };
        LayerSizes {
            input,
            output: target.frame_bytes(layer.output_shape(slots)),
            normalised: (has_norm && !is_fused).then(|| target.frame_bytes(slots)),
            partial_sums: target.partial_sums(layer, slots),
            columns,
            resident_part: part(columns.resident_width(), widest.resident_width()),
            host_part: part(columns.host_width(), widest.host_width()),
            weights: (0..=layer.layout.slabs).map(|slabs| target.fetched_bytes(&layer.layout, slabs)).collect(),
        }
    }
}

impl FrameSizes {
    /// In slots that frames of the input `slots` fit too, which is no smaller.
    pub fn new(spec: &ScheduleSpec, input: FrameShape, slots: FrameShape, target: &Target) -> FrameSizes {
        let (network, policy) = (&spec.network, &spec.policy);
        let shapes = network.input_shapes(input).into_iter().zip(network.input_shapes(slots));
        let layers = network.layers.iter().zip(&policy.layers).zip(shapes);
        let sizes =
            layers.map(|((layer, own), (input, slots))| LayerSizes::new(layer, own.cache, input, slots, target));
        FrameSizes {
            input,
            input_bytes: target.frame_bytes(slots),
            statistics: target.statistics_bytes(),
            adds_in_place: target.profile.adds_in_place,
            layers: sizes.collect(),
        }
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

/// The layers whose weights can be offloaded: large ones of stage bodies, which run layer by layer.
pub fn fetchable_weights(network: &Network, target: &Target) -> Vec<LayerId> {
    let bytes: Vec<u64> = network.layers.iter().map(|layer| target.sizes.weight_bytes(&layer.layout)).collect();
    let least = bytes.iter().sum::<u64>() / MIN_WEIGHT_SHARE;
    let fetched = LayerPolicy { weights: Memory::Host, ..LayerPolicy::RESIDENT };
    let may_be = |layer: LayerId| {
        let is_largest = network.is_largest(network.stage_of(layer));
        !network.is_head(layer) && Choices { is_largest, ..Choices::of(fetched) }.exclusion().is_none()
    };
    let can = |layer: &LayerId| target.profile.offloads && bytes[*layer] > least && may_be(*layer);
    (0..bytes.len()).filter(can).collect()
}
