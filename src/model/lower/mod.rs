//! The compiler: lowers a family's graph to the layers that backends compute. One pass a file; each can be tested
//! alone.
//!
//!     shapes    resolution and frame rate of every node
//!     fuse      norm, SiLU, attention, unfolding, addition and shortcut into the convolution beside them
//!     recipes   which frames and slabs make an output frame
//!     stages    runs of layers of one resolution and rate
//!     pairs     output frames that share products, as a rewrite of layers
//!
//! Must not know a family, plans and devices. What no backend computes yet is refused with a text that names the node.

mod fuse;
mod pairs;
pub(super) mod recipes;
mod shapes;
mod stages;
#[cfg(test)]
mod tests;

#[cfg(test)]
pub use recipes::PAIR_SLABS;
pub use recipes::{Pairs, Product, Recipe, RecipeTerm, Recipes, Slab, TimeRule, pair_of};

use super::families::Model;
use super::geometry::{Direction, Geometry};
use super::graph::Graph;
use super::network::{Network, NetworkFacts};
use crate::error::{self, Error};
use crate::ir::{CacheFormat, Norm, PairedLayers};

/// A graph as layers, or why it cannot be computed.
pub fn lower(graph: &Graph, direction: Direction, geometry: Geometry) -> Result<Network, String> {
    let norm = graph.norm().unwrap_or(Norm::Group { groups: 1 });
    let shapes = shapes::infer(graph)?;
    let fused = fuse::fuse(graph, norm, geometry.patch)?;
    let stages = stages::divide(&fused, &shapes)?;
    let layers = fused.into_iter().map(|fused| fused.layer).collect();
    Ok(Network::of_layers(layers, stages, NetworkFacts { direction, geometry, norm }))
}

impl Network {
    /// One direction of a model, lowered.
    pub fn new(model: &Model, direction: Direction) -> error::Result<Network> {
        lower(model.graph(direction), direction, model.geometry).map_err(|why| {
            let (family, direction) = (model.family.name, direction.name());
            Error::Checkpoint(format!("a model of family {family} ({direction}) cannot be computed: {why}"))
        })
    }

    /// The same in the form that a device computes: with pairs where its kernels share products.
    pub fn for_device(self, paired: PairedLayers) -> Network {
        let network = if paired.normalised { self.with_pairs() } else { self };
        if paired.upsamplers { network.with_upsampler_pairs() } else { network }
    }

    /// The same with [pairs](Pairs) in the layers whose inputs are normalised.
    pub fn with_pairs(mut self) -> Network {
        pairs::pair_layers(&mut self);
        self
    }

    /// The same with pairs in upsamplers that do not double time.
    pub fn with_upsampler_pairs(mut self) -> Network {
        pairs::pair_upsamplers(&mut self);
        self
    }

    /// The same with [`CacheFormat::U8`] in the layers that may compute pairs. What follows a norm and SiLU loses
    /// little in 8 bits.
    pub fn with_u8_caches(mut self) -> Network {
        for layer in pairs::pairable_layers(&self) {
            self.layers[layer].cache = CacheFormat::U8;
        }
        self
    }
}
