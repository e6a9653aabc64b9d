//! The schedule policy: every choice that a plan makes. All policies without tiles give the same bits.
//!
//! Owns the policy and the questions about a network that limit it. Knows no memory and no device.

use crate::ir::{LayerId, SplitColumns};
use crate::model::Network;

/// Input frames that a causal layer caches for its next frame.
pub const CACHE_FRAMES: u64 = 2;

/// The fewest hidden frames that are materialised. The others then read only frames of their chunk: the first layer has
/// already overwritten its cache.
pub const MIN_MATERIALISED_HIDDEN: u64 = CACHE_FRAMES;

/// Latent frames of a slice at most. Packing a longer one, and rehearsing every end a stream may have, would take too
/// long. The planner itself never chooses as many.
pub const MAX_SLICE_LATENTS: u64 = 6;

/// Where a layer's causal cache lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CachePolicy {
    /// In device memory, where the frames were computed.
    Resident,
    /// The leftmost `resident_shares`/64 of each cached row stays on the device; the rest is offloaded and streamed per
    /// band. Every row is split at the same column, so all bands wait equally.
    Offloaded { resident_shares: u8 },
    /// Nowhere: the stage's head computes the frames again, band by band, from its own smaller input.
    Recomputed,
}

impl CachePolicy {
    /// Shares of a row.
    pub const SHARES: u8 = 64;
    pub const HOST: CachePolicy = CachePolicy::Offloaded { resident_shares: 0 };
    /// On the device, while the layer runs in bands.
    pub const DEVICE: CachePolicy = CachePolicy::Offloaded { resident_shares: CachePolicy::SHARES };

    /// The fewest shares that keep this part of each row resident, or more. Rows are split at multiples of `step`.
    pub fn shares_for(part: f64, width: u64, step: u64) -> u8 {
        let columns = (part * width as f64 / step as f64).ceil() as u64 * step;
        let shares = (columns * u64::from(CachePolicy::SHARES)).div_ceil(width.max(1));
        shares.min(u64::from(CachePolicy::SHARES)) as u8
    }

    /// Whether any of the cache is in host memory.
    pub fn uses_host(self) -> bool {
        matches!(self, CachePolicy::Offloaded { resident_shares } if resident_shares < CachePolicy::SHARES)
    }

    /// How the columns of a cached frame are split.
    pub fn columns(self, width: u64, step: u64) -> SplitColumns {
        match self {
            CachePolicy::Offloaded { resident_shares } => {
                SplitColumns::new(width, width * u64::from(resident_shares) / u64::from(CachePolicy::SHARES), step)
            }
            CachePolicy::Resident | CachePolicy::Recomputed => SplitColumns::all_resident(width),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SchedulePolicy {
    /// Input frames per slice. The first slice has one more.
    pub slice: u64,
    /// Frames that each stage computes at a time.
    pub chunks: Vec<u64>,
    /// Of these, how many outputs of the stage's head are materialised. The others are rematerialised for each reader.
    pub materialised: Vec<u64>,
    /// Of these, how many hidden frames of a block are materialised, where both its layers run in bands and it has no
    /// shortcut. The others are rematerialised for the second layer. At least [`MIN_MATERIALISED_HIDDEN`], or all.
    pub materialised_hidden: Vec<u64>,
    /// Of each layer.
    pub caches: Vec<CachePolicy>,
    /// Of each layer, whether its output is offloaded. Its readers then run in bands. Still images only.
    pub offloaded_outputs: Vec<bool>,
    /// Of each layer, whether its weights are offloaded.
    pub offloaded_weights: Vec<bool>,
}

impl SchedulePolicy {
    /// Everything on the device.
    pub fn resident(network: &Network, slice: u64, chunks: Vec<u64>) -> SchedulePolicy {
        let layers = network.layers.len();
        SchedulePolicy {
            slice,
            materialised: chunks.clone(),
            materialised_hidden: chunks.clone(),
            chunks,
            caches: vec![CachePolicy::Resident; layers],
            offloaded_outputs: vec![false; layers],
            offloaded_weights: vec![false; layers],
        }
    }

    /// The same with `frames` outputs of a stage's head materialised.
    pub fn with_materialised(&self, stage: usize, frames: u64) -> SchedulePolicy {
        let mut policy = self.clone();
        policy.materialised[stage] = frames;
        policy
    }

    /// The same with at most `frames` hidden frames of a stage's blocks materialised.
    pub fn with_materialised_hidden(&self, stage: usize, frames: u64) -> SchedulePolicy {
        let mut policy = self.clone();
        policy.materialised_hidden[stage] = frames.min(policy.chunks[stage]);
        policy
    }

    /// Of a whole chunk, the hidden inputs of a layer that are rematerialised for it, and the layer that does it.
    pub fn hidden_by(&self, network: &Network, layer: LayerId) -> Option<(LayerId, u64)> {
        let stage = network.stage_of(layer);
        let rematerialised = self.chunks[stage] - self.materialised_hidden[stage];
        network.hidden_by(layer).filter(|_| rematerialised > 0).map(|by| (by, rematerialised))
    }

    /// Of a whole chunk, the outputs of a stage's first layer that are rematerialised for each reader.
    pub fn rematerialised(&self, stage: usize) -> u64 {
        self.chunks[stage] - self.materialised[stage]
    }

    /// Whether a layer reads outputs of its stage's first layer that are rematerialised.
    pub fn reads_rematerialised(&self, network: &Network, layer: LayerId) -> bool {
        let stage = network.stage_of(layer);
        let mut readers = network.readers(network.stages[stage].head()).iter();
        self.rematerialised(stage) > 0 && readers.any(|reader| reader.layer == layer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_keep_as_many_columns_as_asked_and_no_step_more() {
        for (width, step) in [(1920, 32), (960, 32), (512, 32), (77, 32), (33, 1)] {
            for part in [0.0, 0.01, 0.3, 0.734, 0.99, 1.0] {
                let resident_shares = CachePolicy::shares_for(part, width, step);
                let columns = CachePolicy::Offloaded { resident_shares }.columns(width, step).split();
                let (wanted, share) = (part * width as f64, width.div_ceil(u64::from(CachePolicy::SHARES)));
                assert!(columns as f64 >= wanted, "{columns} of {width} for {part}");
                assert!(
                    columns == width || (columns as f64) < wanted + (step + share) as f64,
                    "{columns} for {wanted}"
                );
            }
        }
    }
}
