//! The sizes of a model. A checkpoint's tensors determine them.

/// The parameters of a network.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Config {
    /// Channels of each level, from full resolution down.
    pub channels: Vec<u64>,
    /// Residual blocks of an encoder level. A decoder level has one more.
    pub layers: u64,
    /// Groups of every norm.
    pub groups: u64,
    /// Channels of a latent.
    pub latent: u64,
    /// Changes of resolution that also change the frame rate: the innermost ones.
    pub temporal_levels: u64,
}

impl Config {
    pub const PIXEL_CHANNELS: u64 = 3;

    /// Pixels of video per pixel of latent, in each direction.
    pub fn spatial_scale(&self) -> u64 {
        1 << (self.channels.len() - 1)
    }

    /// Frames of video per latent frame, after the first.
    pub fn time_scale(&self) -> u64 {
        1 << self.temporal_levels
    }

    /// Whether the encoder's downsampler after `level` also halves the frame rate.
    pub fn halves_time(&self, level: usize) -> bool {
        level as u64 + self.temporal_levels >= self.channels.len() as u64 - 1
    }

    /// Whether the decoder's upsampler after `level`, counted from the latent, also doubles the frame rate.
    pub fn doubles_time(&self, level: usize) -> bool {
        (level as u64) < self.temporal_levels
    }

    /// Latent frames of `frames` frames of video.
    pub fn latent_frames(&self, frames: u64) -> u64 {
        (frames - 1).div_ceil(self.time_scale()) + 1
    }

    /// Frames of video that `latents` latent frames decode to.
    pub fn video_frames(&self, latents: u64) -> u64 {
        (latents - 1) * self.time_scale() + 1
    }
}
