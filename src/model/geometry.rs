//! The two directions of an autoencoder, and how video and latents correspond.

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    Encode,
    Decode,
}

impl Direction {
    pub const ALL: [Direction; 2] = [Direction::Encode, Direction::Decode];

    pub const fn name(self) -> &'static str {
        match self {
            Direction::Encode => "encode",
            Direction::Decode => "decode",
        }
    }
}

/// How video and latents correspond.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Geometry {
    /// Of video that is encoded. A decoder may give another number.
    pub pixel_channels: u64,
    pub latent_channels: u64,
    /// Pixels of video per pixel of latent, in rows and columns alike.
    pub space: u64,
    /// Frames of video per latent frame, after the first.
    pub time: u64,
    /// Rows, and columns, of video that are unshuffled into one of activations. Their pixels are channels there.
    pub patch: u64,
    /// Rows, and columns, of latent that are one in the host's tensors. Their pixels are channels there.
    pub packing: u64,
}

impl Geometry {
    /// Channels of activations that the encoder reads.
    pub fn patch_channels(&self) -> u64 {
        self.pixel_channels * self.patch * self.patch
    }

    /// Rows of activations at the side of the pixels per row of latent, and columns alike.
    pub fn scale(&self) -> u64 {
        self.space / self.patch
    }

    /// Channels of a latent in the host's tensors.
    pub fn packed_channels(&self) -> u64 {
        self.latent_channels * self.packing * self.packing
    }

    /// Pixels of video per pixel of the host's latents.
    pub fn packed_space(&self) -> u64 {
        self.space * self.packing
    }

    /// Latent frames of `frames` frames of video.
    pub fn latent_frames(&self, frames: u64) -> u64 {
        (frames - 1).div_ceil(self.time) + 1
    }

    /// Frames of video that `latents` latent frames decode to.
    pub fn video_frames(&self, latents: u64) -> u64 {
        (latents - 1) * self.time + 1
    }
}
