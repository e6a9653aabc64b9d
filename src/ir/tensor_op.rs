//! Operations that touch the host's tensors, with everything a backend needs to run them.

use super::{DeviceOffset, FrameShape, View};

/// `value * mul + add`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Affine {
    pub mul: f32,
    pub add: f32,
}

/// A map of its own for each channel of a host's latents. `side` x `side` pixels of activations are one pixel there,
/// with the channels `(c * side + row) * side + column`.
#[derive(Debug, Clone, Copy)]
pub struct ChannelMaps<'a> {
    pub side: u64,
    pub maps: &'a [Affine],
}

/// Frame `frame` of clip `batch` of a host tensor, from (`top`, `left`) on, becomes a frame of activations. Rows and
/// columns beyond the host's image repeat its last ones, and channels that it lacks are 1. (`top`, `left`) and `shape` are
/// of activations.
#[derive(Debug, Clone, Copy)]
pub struct LoadTensor<'a> {
    pub from: &'a View,
    pub batch: u64,
    pub frame: u64,
    pub top: u64,
    pub left: u64,
    pub map: Affine,
    /// In place of `map`, only for backends that have them.
    pub channels: Option<ChannelMaps<'a>>,
    /// Pixels of the host that are one of activations, in rows and columns alike: see [`patch_pixel`].
    pub patch: u64,
    pub shape: FrameShape,
    pub into: DeviceOffset,
}

impl LoadTensor<'_> {
    /// Pixels of activations that are one of the host's packed latents, in rows and columns alike.
    pub fn side(&self) -> u64 {
        self.channels.map_or(1, |channels| channels.side)
    }

    /// Row and column within a packed pixel at which the activations begin.
    pub fn within_packed(&self) -> [u64; 2] {
        let (host, side) = (self.from.shape(), self.side());
        [(self.top, host.height), (self.left, host.width)].map(|(start, length)| start.min(length * side - 1) % side)
    }
}

/// The host's channel of a channel of activations, and its row and column within the `side` x `side` pixels that are
/// unshuffled into one. The channels are `(c * side + column) * side + row`.
pub const fn patch_pixel(channel: u64, side: u64) -> (u64, [u64; 2]) {
    (channel / (side * side), [channel % side, channel / side % side])
}

/// One weight for each row and each column of a tile, or of the image.
#[derive(Debug, Clone, Copy)]
pub struct Fades<'a> {
    pub rows: &'a [f32],
    pub columns: &'a [f32],
}

/// `into[top + y, left + x] += from[y, x] * rows[y] * columns[x]`. The first tile of a frame clears it before.
#[derive(Debug, Clone, Copy)]
pub struct BlendTile<'a> {
    pub from: DeviceOffset,
    pub from_shape: FrameShape,
    pub into: DeviceOffset,
    pub into_shape: FrameShape,
    pub top: u64,
    pub left: u64,
    pub fades: Fades<'a>,
    pub clear: bool,
}

/// A sample of the latent's distribution instead of its mean. The noise of an element depends on the seed and on the
/// element's position in the clip only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Posterior {
    pub seed: u64,
    /// The channel of the log-variance that belongs to channel 0.
    pub logvar_channel: u64,
}

/// Channels of a frame of activations, from `channel` on, become frame `frame` of clip `batch` of a host tensor; as
/// many as the tensor has. Rows and columns beyond the host's image are dropped.
#[derive(Debug, Clone, Copy)]
pub struct StoreTensor<'a> {
    pub from: DeviceOffset,
    pub shape: FrameShape,
    pub channel: u64,
    /// Sums of the fades of all tiles. Each element is divided by `rows[y] * columns[x]` (at least 1e-6).
    pub divide: Option<Fades<'a>>,
    /// Applied before `map`.
    pub clamp: Option<(f32, f32)>,
    pub sample: Option<Posterior>,
    /// Applied last. Integer types are then rounded to nearest and clamped to their range.
    pub map: Affine,
    /// As in [`LoadTensor`].
    pub channels: Option<ChannelMaps<'a>>,
    /// As in [`LoadTensor`].
    pub patch: u64,
    pub into: &'a View,
    pub batch: u64,
    pub frame: u64,
    /// The indices in the whole batch and the whole clip, for the noise. They differ from `batch` and `frame` where
    /// the tensor is a part.
    pub clip: u64,
    pub clip_frame: u64,
}
