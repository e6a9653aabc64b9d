//! Weights that wait in host memory: where memory is short, those of large layers at low resolution are fetched into a job's own
//! memory while the layers before them compute. There is room for them then, as wide frames are elsewhere in the schedule.

use std::collections::VecDeque;
use std::ops::Range;

use super::Costs;
use super::clip::{Clip, Schedule};
use super::slots::Life;
use super::step::{Fetched, Step};
use crate::model::{LayerId, Network};
use crate::tensor::{ConvLayout, FrameShape};

/// Layers of a smaller share of all weights are not worth the fetching.
const LEAST_SHARE: u64 = 256;
/// Layers whose weights are fetched before they are needed. One is not enough where the past keeps the copy engine busy: it lets
/// others in between layers alone.
const AHEAD: usize = 2;

/// Whether each layer's weights can wait in host memory: large ones of a stage's body, which runs layer by layer, but for stages at
/// full resolution, which run the most often.
pub fn fetchable(network: &Network, input: FrameShape, costs: &dyn Costs) -> Vec<bool> {
    let bytes: Vec<u64> = network.layers.iter().map(|layer| costs.weight_bytes(&layer.layout)).collect();
    let least = bytes.iter().sum::<u64>() / LEAST_SHARE;
    let shapes = network.input_shapes(input);
    let pixels = |layer: LayerId| network.layers[layer].layout.window.output(shapes[layer], 1).pixels();
    let full = network.stages.iter().map(|stage| pixels(stage.head)).max().unwrap_or(0);
    let mut found = vec![false; bytes.len()];
    for stage in network.stages.iter().filter(|stage| pixels(stage.head) < full) {
        stage.body().for_each(|layer| found[layer] = bytes[layer] > least);
    }
    found
}

/// Bytes of a layer's weights of which the first slabs were fetched: as if there were no others.
pub(super) fn fetched_bytes(layout: &ConvLayout, slabs: u64, costs: &dyn Costs) -> u64 {
    costs.weight_bytes(&ConvLayout { slabs, ..*layout })
}

/// Bytes of a network's weights.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WeightBytes {
    /// Of the block on the device.
    pub block: u64,
    /// In host memory, and what the device takes to reach that.
    pub host: u64,
    mapping: u64,
}

impl WeightBytes {
    /// `away`: of each layer, whether its weights wait in host memory.
    pub fn new(network: &Network, away: &[bool], costs: &dyn Costs) -> WeightBytes {
        let (mut near, mut host) = (0, 0);
        for (layer, away) in network.layers.iter().zip(away) {
            *(if *away { &mut host } else { &mut near }) += costs.weight_bytes(&layer.layout);
        }
        WeightBytes { block: costs.block_bytes(near), host, mapping: costs.mapping_bytes(host) }
    }

    pub fn device(&self) -> u64 {
        self.block + self.mapping
    }
}

/// The weights that a clip has fetched, and those that come next.
#[derive(Debug, Default)]
pub(super) struct Fetching {
    /// Of the current chunk, in the order of their layers.
    waiting: VecDeque<LayerId>,
    there: Vec<(LayerId, Fetched)>,
    /// The frames of the chunk.
    frames: Range<u64>,
    /// The layer that computes.
    current: Option<LayerId>,
}

impl Clip {
    /// A chunk of a stage begins.
    pub(super) fn fetch_first(&mut self, stage: usize, frames: Range<u64>, to: &mut Schedule) {
        self.fetching.frames = frames;
        let away = &self.cut.weights_away;
        self.fetching.waiting = self.network.stages[stage].body().filter(|layer| away[*layer]).collect();
        (0..AHEAD).for_each(|_| self.fetch_next(to));
    }

    fn fetch_next(&mut self, to: &mut Schedule) {
        let Some(layer) = self.fetching.waiting.pop_front() else { return };
        let time = self.network.layers[layer].time;
        let recipes = self.fetching.frames.clone().map(|frame| time.recipe(frame));
        let last = recipes.flat_map(|recipe| recipe.terms().iter().map(|(_, slab)| *slab).max()).max();
        let slabs = last.map_or(0, |slab| u64::from(slab) + 1);
        let bytes = self.shapes.weights[layer][slabs as usize];
        let into = Fetched { slot: to.pools.frames.take(bytes, Life::Scheduled), slabs };
        self.fetching.there.push((layer, into));
        to.steps.push_back(Step::Fetch { layer, into });
    }

    /// Where a layer finds its weights, if they have been fetched. While it computes, others are.
    pub(super) fn weights_of(&mut self, layer: LayerId, to: &mut Schedule) -> Option<Fetched> {
        let (_, fetched) = *self.fetching.there.iter().find(|(there, _)| *there == layer)?;
        if self.fetching.current.replace(layer) != Some(layer) {
            self.fetch_next(to);
        }
        Some(fetched)
    }

    /// A layer has made its frames up to `end`.
    pub(super) fn done_with_weights(&mut self, layer: LayerId, end: u64, to: &mut Schedule) {
        if end < self.chunk_end {
            return;
        }
        if let Some(at) = self.fetching.there.iter().position(|(there, _)| *there == layer) {
            to.pools.frames.drop(self.fetching.there.swap_remove(at).1.slot);
        }
    }
}
