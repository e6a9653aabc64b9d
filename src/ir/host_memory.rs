//! The memory of a job beside its frames: device buffers, and pinned host bytes.

/// Pinned host memory of a job, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PinnedBytes {
    /// Staging buffers for input and for output. Each holds two frames: one is copied while the other is filled.
    pub load: u64,
    pub store: u64,
    /// Offloaded frames: causal caches, and outputs of still images.
    pub offloaded: u64,
}

impl PinnedBytes {
    pub fn total(&self) -> u64 {
        self.load.saturating_add(self.store).saturating_add(self.offloaded)
    }
}

/// The part of a job's device block that bands share.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BandBuffers {
    pub offset: u64,
    pub bytes: u64,
}

/// Parts of a job's device block that belong to no frame, as offsets. They are the same for all operations of a job.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Buffers {
    pub scratch: u64,
    /// The band buffers. Bands of one operation are in flight while the next one starts.
    pub bands: BandBuffers,
    /// Staging buffers on the device, for input and for output.
    pub staging: [u64; 2],
}
