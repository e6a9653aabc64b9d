//! What is the same for every layer of a work item, and the chunks that a stage's layers compute.

use std::ops::Range;
use std::sync::Arc;

use crate::ir::LayerId;
use crate::model::{Recipe, RecipeTerm};
use crate::plan::cost::FrameSizes;
use crate::plan::policy::Form;
use crate::plan::repeats::Purpose;
use crate::plan::spec::ScheduleSpec;

/// What the layers of a work item share. Nothing of it changes while the item runs.
#[derive(Debug)]
pub struct ItemFacts {
    pub spec: ScheduleSpec,
    pub sizes: Arc<FrameSizes>,
    pub purpose: Purpose,
    /// Whether the job has more slices than are traced. Then each slice must take the same slots, also the last.
    pub is_periodic: bool,
}

impl ItemFacts {
    pub fn is_banded(&self, layer: LayerId) -> bool {
        self.spec.policy.layers[layer].form == Form::Banded
    }

    /// Of a chunk of a stage, how many outputs of a layer are rematerialised: the last ones. A shorter chunk has as
    /// many materialised ones as a whole chunk.
    pub fn rematerialised(&self, layer: LayerId, chunk: &Chunk) -> u64 {
        match self.spec.policy.layers[layer].rematerialised {
            0 => 0,
            frames => chunk.count().saturating_sub(self.spec.policy.chunks[chunk.stage] - frames),
        }
    }

    /// The terms of a recipe that an operation has. Those of single terms tell estimates which frame is the first.
    pub fn terms<'a>(&self, recipe: &'a Recipe) -> &'a [RecipeTerm] {
        let is_needed = self.purpose != Purpose::Rehearsal || recipe.terms().len() == 1;
        if is_needed { recipe.terms() } else { &[] }
    }

    /// The oldest input that output frames from `frame` on read.
    pub fn oldest_needed(&self, layer: LayerId, frame: u64) -> u64 {
        let time = &self.spec.network.layers[layer].time;
        match self.sizes.layers[layer].partial_sums {
            // All inputs that earlier outputs read are in the partial sums.
            Some(_) if frame > self.spec.cone.first(layer) => time.input_end(frame - 1),
            _ => time.oldest(frame),
        }
    }
}

/// Frames that the layers of a stage compute one layer after the other.
#[derive(Debug)]
pub struct Chunk {
    pub stage: usize,
    pub frames: Range<u64>,
    /// Whether nothing needs to be cached after it. No chunk of a job whose slices repeat says so.
    pub is_last: bool,
}

impl Chunk {
    pub fn count(&self) -> u64 {
        self.frames.end - self.frames.start
    }
}
