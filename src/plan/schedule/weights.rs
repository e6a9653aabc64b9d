//! Fetches offloaded weights while the layers before them compute. Their slots are free then: wide frames are live at
//! other times.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use super::sink::Sink;
use crate::ir::{FetchOp, FetchedWeights, LayerId, Op};
use crate::model::Network;
use crate::plan::arena::{SlotKind, Slots};
use crate::plan::cost::FrameSizes;

/// Layers whose weights are fetched ahead. One is not enough: cache traffic occupies the copy engine within a layer.
const AHEAD: usize = 2;

/// Weights that a layer of the current chunk will need.
#[derive(Debug, Clone)]
pub struct NeededWeights {
    pub layer: LayerId,
    /// The frames that it computes.
    pub frames: Range<u64>,
}

/// The fetched weights of a work item, and those that come next.
#[derive(Debug, Clone)]
pub struct WeightFetcher {
    network: Arc<Network>,
    sizes: Arc<FrameSizes>,
    /// Those of the current chunk that are still to be fetched.
    queue: VecDeque<NeededWeights>,
    fetched: Vec<(LayerId, FetchedWeights<Slots>)>,
    /// The layer that computes.
    current: Option<LayerId>,
}

impl WeightFetcher {
    pub fn new(network: Arc<Network>, sizes: Arc<FrameSizes>) -> WeightFetcher {
        WeightFetcher { network, sizes, queue: VecDeque::new(), fetched: Vec::new(), current: None }
    }

    /// A chunk begins whose offloaded layers are `layers`.
    pub fn begin(&mut self, layers: impl Iterator<Item = NeededWeights>, to: &mut Sink) {
        self.queue.clear();
        self.queue.extend(layers);
        (0..AHEAD).for_each(|_| self.fetch_next(to));
    }

    fn fetch_next(&mut self, to: &mut Sink) {
        let Some(NeededWeights { layer, frames }) = self.queue.pop_front() else { return };
        let time = &self.network.layers[layer].time;
        let recipes = frames.map(|frame| time.recipe(frame));
        let last = recipes.flat_map(|recipe| recipe.terms().iter().map(|term| term.slab).max()).max();
        let slabs = last.map_or(0, |slab| time.slabs_up_to(slab));
        let bytes = self.sizes.layers[layer].weights[slabs as usize];
        let into = FetchedWeights { at: to.arenas.device.take(bytes, SlotKind::Packed), slabs };
        self.fetched.push((layer, into));
        to.ops.push_back(Op::Fetch(FetchOp { layer, into }));
    }

    /// A layer's fetched weights, if they are offloaded. While it computes, the next are fetched.
    pub fn of(&mut self, layer: LayerId, to: &mut Sink) -> Option<FetchedWeights<Slots>> {
        let (_, fetched) = *self.fetched.iter().find(|(there, _)| *there == layer)?;
        if self.current.replace(layer) != Some(layer) {
            self.fetch_next(to);
        }
        Some(fetched)
    }

    /// A layer has computed its frames of the chunk.
    pub fn done(&mut self, layer: LayerId, to: &mut Sink) {
        if let Some(at) = self.fetched.iter().position(|(there, _)| *there == layer) {
            to.arenas.device.drop(self.fetched.swap_remove(at).1.at);
        }
    }
}
