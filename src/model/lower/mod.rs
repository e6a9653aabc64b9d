//! The compiler: lowers a family's graph to the layers that backends compute. One pass a file; each can be tested
//! alone.
//!
//!     shapes    resolution and frame rate of every node
//!     fuse      norm, SiLU, attention, unfolding, addition and shortcut into the convolution beside them
//!     recipes   which frames and slabs make an output frame
//!     stages    runs of layers of one resolution and rate
//!     pairs     output frames that share products, as a rewrite of layers
//!
//! Must not know families, plans and devices. What no backend computes yet is refused with a text that names the node.

mod fuse;
mod pairs;
mod recipes;
mod shapes;
mod stages;
#[cfg(test)]
mod tests;

pub use pairs::{pair_layers, pair_upsamplers, pairable_layers};
#[cfg(test)]
pub use recipes::PAIR_SLABS;
pub use recipes::{Pairs, Product, Recipe, RecipeTerm, Recipes, Slab, TimeRule, pair_of};

use super::geometry::{Direction, Geometry};
use super::graph::Graph;
use super::network::{Network, NetworkFacts};
use crate::ir::Norm;

/// A graph as layers, or why it cannot be computed.
pub fn lower(graph: &Graph, direction: Direction, geometry: Geometry) -> Result<Network, String> {
    let norm = graph.norm().unwrap_or(Norm::Group { groups: 1 });
    let shapes = shapes::infer(graph)?;
    let fused = fuse::fuse(graph, norm, geometry.patch)?;
    let stages = stages::divide(&fused, &shapes)?;
    let layers = fused.into_iter().map(|fused| fused.layer).collect();
    Ok(Network::of_layers(layers, stages, NetworkFacts { direction, geometry, norm }))
}
