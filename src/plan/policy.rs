//! The schedule policy: every choice that a plan makes. All policies without tiles give the same bits.
//!
//! Owns where values lie between operations, and how layers run. Knows no memory and no device.

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

/// Where a value lies between the operation that makes it and those that read it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Placement {
    /// The leftmost `resident_shares`/64 of each row on the device, the rest in host memory, streamed per band. Every
    /// row is split at the same column, so all bands wait equally.
    Columns { resident_shares: u8 },
    /// Nowhere: the layer that made it computes it again, band by band, for each reader. Its statistics are resident.
    Recomputed,
}

impl Placement {
    /// Shares of a row.
    pub const SHARES: u8 = 64;
    pub const HOST: Placement = Placement::Columns { resident_shares: 0 };
    pub const RESIDENT: Placement = Placement::Columns { resident_shares: Placement::SHARES };

    /// The fewest shares that keep at least this part of each row resident. Rows are split at multiples of `step`.
    pub fn shares_for(part: f64, width: u64, step: u64) -> u8 {
        let columns = (part * width as f64 / step as f64).ceil() as u64 * step;
        let shares = (columns * u64::from(Placement::SHARES)).div_ceil(width.max(1));
        shares.min(u64::from(Placement::SHARES)) as u8
    }

    /// Whether any of the value is in host memory.
    pub fn uses_host(self) -> bool {
        matches!(self, Placement::Columns { resident_shares } if resident_shares < Placement::SHARES)
    }

    /// How the columns of a frame are split.
    pub fn columns(self, width: u64, step: u64) -> SplitColumns {
        match self {
            Placement::Columns { resident_shares } => {
                SplitColumns::new(width, width * u64::from(resident_shares) / u64::from(Placement::SHARES), step)
            }
            // The value is not stored, so nothing is split.
            Placement::Recomputed => SplitColumns::all_resident(width),
        }
    }
}

/// How a layer runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Form {
    /// On whole frames. Its cache is resident.
    Whole,
    /// In bands of rows. Fresh input is normalised band by band, never whole; frames of its cache may be stored
    /// normalised.
    Banded,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Memory {
    Device,
    Host,
}

/// The choices for one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct LayerPolicy {
    pub form: Form,
    /// Of the input frames that it reads again with its next chunk.
    pub cache: Placement,
    /// Where its output frames lie within a chunk.
    pub output: Memory,
    /// How many output frames at the end of a whole chunk are rematerialised: between operations they lie nowhere, as
    /// under [`Placement::Recomputed`].
    pub rematerialised: u64,
    pub weights: Memory,
}

impl LayerPolicy {
    /// Everything on the device, on whole frames.
    pub const RESIDENT: LayerPolicy = LayerPolicy {
        form: Form::Whole,
        cache: Placement::RESIDENT,
        output: Memory::Device,
        rematerialised: 0,
        weights: Memory::Device,
    };

    /// The same in bands, with its cache at `cache`.
    pub fn banded(self, cache: Placement) -> LayerPolicy {
        LayerPolicy { form: Form::Banded, cache, ..self }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct SchedulePolicy {
    /// Input frames per slice. The first slice may have one more, or fewer.
    pub slice: u64,
    /// Frames that each stage computes at a time.
    pub chunks: Vec<u64>,
    pub layers: Vec<LayerPolicy>,
}

impl SchedulePolicy {
    /// Everything on the device.
    pub fn resident(network: &Network, slice: u64, chunks: Vec<u64>) -> SchedulePolicy {
        SchedulePolicy { slice, chunks, layers: vec![LayerPolicy::RESIDENT; network.layers.len()] }
    }

    /// The same with `frames` outputs of a stage's head materialised in a chunk, the others rematerialised.
    pub fn with_materialised(&self, network: &Network, stage: usize, frames: u64) -> SchedulePolicy {
        let mut policy = self.clone();
        policy.layers[network.stages[stage].head()].rematerialised = self.chunks[stage] - frames;
        policy
    }

    /// The same with at most `frames` hidden frames of a stage's blocks materialised in a chunk.
    pub fn with_materialised_hidden(&self, network: &Network, stage: usize, frames: u64) -> SchedulePolicy {
        let mut policy = self.clone();
        for hidden in network.stages[stage].body().filter_map(|layer| network.hidden_by(layer)) {
            policy.layers[hidden].rematerialised = self.chunks[stage].saturating_sub(frames);
        }
        policy
    }

    /// Of a whole chunk, the outputs of a stage's head that are rematerialised.
    pub fn rematerialised(&self, network: &Network, stage: usize) -> u64 {
        self.layers[network.stages[stage].head()].rematerialised
    }

    /// Of a whole chunk, the hidden frames of a stage's blocks that are rematerialised.
    pub fn rematerialised_hidden(&self, network: &Network, stage: usize) -> u64 {
        network.stages[stage].body().map(|layer| self.layers[layer].rematerialised).max().unwrap_or(0)
    }

    /// The layer that rematerialises frames for `layer` in every chunk: the one that makes its input or its addend.
    pub fn rematerialised_for(&self, network: &Network, layer: LayerId) -> Option<LayerId> {
        let is_in_stage = |from: &LayerId| network.stage_of(*from) == network.stage_of(layer);
        let mut sources = network.layers[layer].sources().filter(is_in_stage);
        sources.find(|from| self.layers[*from].rematerialised > 0)
    }

    /// Of each layer, whether its weights are in host memory.
    pub fn offloaded_weights(&self) -> Vec<bool> {
        self.layers.iter().map(|layer| layer.weights == Memory::Host).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_keep_as_many_columns_as_asked_and_no_step_more() {
        for (width, step) in [(1920, 32), (960, 32), (512, 32), (77, 32), (33, 1)] {
            for part in [0.0, 0.01, 0.3, 0.734, 0.99, 1.0] {
                let resident_shares = Placement::shares_for(part, width, step);
                let columns = Placement::Columns { resident_shares }.columns(width, step).split();
                let (wanted, share) = (part * width as f64, width.div_ceil(u64::from(Placement::SHARES)));
                assert!(columns as f64 >= wanted, "{columns} of {width} for {part}");
                assert!(
                    columns == width || (columns as f64) < wanted + (step + share) as f64,
                    "{columns} for {wanted}"
                );
            }
        }
    }
}
