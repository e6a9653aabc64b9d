//! Fetches offloaded weights while the layers before them compute. Their slots add nothing to the peak: wide frames are
//! live at other times.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use super::item_facts::{Chunk, ItemFacts};
use super::sink::Sink;
use crate::ir::{FetchOp, FetchedWeights, LayerId, Op};
use crate::plan::arena::{SlotKind, Slots};
use crate::plan::policy::Memory;
use crate::plan::spec::ScheduleSpec;

/// Layers whose weights are fetched ahead. One is not enough: cache traffic occupies the copy engine within a layer.
const AHEAD: usize = 2;

/// The fetched weights of a work item, and those that come next.
#[derive(Debug, Clone)]
pub struct WeightFetcher {
    facts: Arc<ItemFacts>,
    /// The frames of the current chunk, and its layers whose weights are still to be fetched.
    frames: Range<u64>,
    queue: VecDeque<LayerId>,
    fetched: BTreeMap<LayerId, FetchedWeights<Slots>>,
    /// The layer that computes.
    current: Option<LayerId>,
}

impl WeightFetcher {
    pub fn new(facts: Arc<ItemFacts>) -> WeightFetcher {
        WeightFetcher { facts, frames: 0..0, queue: VecDeque::new(), fetched: BTreeMap::new(), current: None }
    }

    /// A chunk begins.
    pub fn begin(&mut self, chunk: &Chunk, to: &mut Sink) {
        let ScheduleSpec { network, cone, policy, .. } = &self.facts.spec;
        let is_needed = |layer: &LayerId| {
            policy.layers[*layer].weights == Memory::Host && !cone.outputs(*layer, &chunk.frames).is_empty()
        };
        self.queue.clear();
        self.queue.extend(network.stages[chunk.stage].body().filter(is_needed));
        self.frames = chunk.frames.clone();
        (0..AHEAD).for_each(|_| self.fetch_next(to));
    }

    fn fetch_next(&mut self, to: &mut Sink) {
        let Some(layer) = self.queue.pop_front() else { return };
        let ScheduleSpec { network, cone, .. } = &self.facts.spec;
        let time = &network.layers[layer].time;
        let recipes = cone.outputs(layer, &self.frames).map(|frame| time.recipe(frame));
        let last = recipes.flat_map(|recipe| recipe.terms().iter().map(|term| term.slab).max()).max();
        let slabs = last.map_or(0, |slab| time.slabs_up_to(slab));
        let bytes = self.facts.sizes.layers[layer].weights[slabs as usize];
        let into = FetchedWeights { at: to.arenas.device.take(bytes, SlotKind::Packed), slabs };
        self.fetched.insert(layer, into);
        to.ops.push_back(Op::Fetch(FetchOp { layer, into }));
    }

    /// A layer's fetched weights, if they are offloaded. While it computes, the next are fetched.
    pub fn of(&mut self, layer: LayerId, to: &mut Sink) -> Option<FetchedWeights<Slots>> {
        let fetched = *self.fetched.get(&layer)?;
        if self.current.replace(layer) != Some(layer) {
            self.fetch_next(to);
        }
        Some(fetched)
    }

    /// A layer has computed its frames of the chunk.
    pub fn done(&mut self, layer: LayerId, to: &mut Sink) {
        if let Some(fetched) = self.fetched.remove(&layer) {
            to.arenas.device.drop(fetched.at);
        }
    }
}
