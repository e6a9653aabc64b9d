//! What planning knows about a device: one value of facts, and one trait for sizes that depend on shapes.

use std::fmt;

use super::{BandPart, BandShape, ConvLayout, FrameShape};

/// How fast a device is. Good enough to choose between plans.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rates {
    /// Multiplications a second.
    pub products: f64,
    /// Bytes a second of device memory.
    pub memory: f64,
    /// Bytes a second from host memory while as many go to it.
    pub copies: f64,
    /// Copy contention: how much copies slow the arithmetic beside them, as a share of the copies' time.
    pub copy_contention: f64,
}

/// As the parameter `rates` takes them: the shortest digits that parse back to the same numbers.
impl fmt::Display for Rates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "products={:e},memory={:e},copies={:e}", self.products, self.memory, self.copies)
    }
}

/// Rates that the host gives. They replace those of the device.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct GivenRates {
    pub products: Option<f64>,
    pub memory: Option<f64>,
    pub copies: Option<f64>,
}

impl GivenRates {
    pub fn or(self, device: Rates) -> Rates {
        Rates {
            products: self.products.unwrap_or(device.products),
            memory: self.memory.unwrap_or(device.memory),
            copies: self.copies.unwrap_or(device.copies),
            ..device
        }
    }
}

/// Time of an output frame where pairs share products, relative to two products at the device's rate. `together`: both
/// frames of a pair are in one operation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PairCosts {
    pub together: f64,
    pub alone: f64,
}

/// The facts about a device that do not depend on shapes. Made by a backend, read by the planner.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DeviceProfile {
    pub rates: Rates,
    /// Pixels of all frames of a chunk that keep the device busy. Larger chunks take memory and gain nothing.
    pub busy_pixels: u64,
    /// The most frames of a chunk.
    pub chunk_frames: u64,
    /// Cached rows are split between device and host memory at multiples of this many columns.
    pub column_step: u64,
    /// True if convolutions normalise their input themselves. If false, a norm operation precedes them.
    pub fuses_norm: bool,
    /// Whether convolutions behind norms compute pairs of frames: see [`super::PairSlabs`].
    pub pairs: Option<PairCosts>,
    /// Whether upsamplers that do not double time compute pairs too.
    pub upsampler_pairs: bool,
    /// Products of convolutions that take as long as one of attention.
    pub attention_cost: f64,
    /// True if a convolution may write its output over its residual.
    pub adds_in_place: bool,
    /// True if frames and weights can be offloaded to host memory, and convolutions run in bands.
    pub offloads: bool,
}

/// Which layers a device computes by pairs of frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PairedLayers {
    /// Convolutions behind norms.
    pub normalised: bool,
    /// Upsamplers that do not double time.
    pub upsamplers: bool,
}

impl DeviceProfile {
    pub fn paired_layers(&self) -> PairedLayers {
        PairedLayers { normalised: self.pairs.is_some(), upsamplers: self.upsampler_pairs }
    }
}

/// Partial sums of one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartialSumsSize {
    pub bytes: u64,
    /// True if an operation may write them over those it reads.
    pub in_place: bool,
}

/// Convolution frames that are computed together, as their time depends on them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ConvProducts {
    /// Multiplications as counted. Of pairs, with [`PairCosts`].
    pub products: f64,
    /// Elements of input, once for each term, and of output.
    pub elements: f64,
    /// Whether it is the first frame of a clip.
    pub starts_clip: bool,
}

/// Bytes of frames, weights and buffers, and what kernels make of products. Every method is required: a missing feature
/// must be stated, not inherited.
pub trait Sizes: Send + Sync {
    /// A frame of activations and its norm statistics, rounded so that frames can lie side by side.
    fn frame_bytes(&self, shape: FrameShape, groups: u64) -> u64;
    /// A frame in [`CacheFormat::U8`](super::CacheFormat), padded likewise. `None` if the device cannot store it so.
    fn u8_frame_bytes(&self, shape: FrameShape) -> Option<u64>;
    /// Prepared weights, rounded so that those of several convolutions can lie side by side.
    fn weight_bytes(&self, layout: &ConvLayout) -> u64;
    fn conv_scratch(&self, layout: &ConvLayout, input: FrameShape, frames: u64) -> u64;
    /// `shape` is that of the result.
    fn attention_scratch(&self, shape: FrameShape, frames: u64) -> u64;
    /// All band buffers of a banded convolution of `outputs` frames. More output frames mean fewer rows a band. The
    /// result also suffices for fewer frames in bands of as many rows. `None` if the device cannot run this layout in
    /// bands.
    fn band_bytes(&self, shape: &BandShape, parts: &[BandPart], outputs: u64) -> Option<u64>;
    /// Whether its kernel normalises whole frames itself. It then runs in no bands.
    fn normalises_itself(&self, layout: &ConvLayout) -> bool;
    /// Partial sums for `pending` later outputs, in place of cached frames. `None` if no kernel keeps them.
    fn partial_sums(&self, layout: &ConvLayout, input: FrameShape, pending: u64) -> Option<PartialSumsSize>;
    /// A staging buffer for one frame of a host tensor, on the device and in pinned memory alike.
    fn staging_bytes(&self, shape: FrameShape) -> u64;
    /// Scratch for the fades of tiles that are blended into a frame.
    fn fade_bytes(&self, shape: FrameShape) -> u64;
    /// The least offset in the block of band buffers in which frames of this shape are computed without being whole.
    fn least_band_offset(&self, shape: FrameShape) -> u64;
    /// Products at the device's rate that take as long as this work.
    fn effective_products(&self, layout: &ConvLayout, work: ConvProducts) -> f64;
    /// What the device takes for a block of `bytes`.
    fn block_bytes(&self, bytes: u64) -> u64;
    /// What the device takes to reach `host` bytes of pinned memory.
    fn mapping_bytes(&self, host: u64) -> u64;
}
