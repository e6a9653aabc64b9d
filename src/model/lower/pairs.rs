//! Pairs of output frames that share products, as a rewrite of layers: [`Pairs`].

use std::sync::Arc;

use super::recipes::{PAIR_SLABS, Pairs, Recipes, TimeRule};
use crate::ir::{LayerId, Window};
use crate::model::network::{Layer, Network};

/// The layers whose inputs are normalised, in stages with two or more frames a latent: sums of two frames stay in the
/// range of a 16-bit float. Not the last layer of a network: its few output channels have kernels of their own.
pub fn pairable_layers(network: &Network) -> Vec<LayerId> {
    let last = network.layers.len() - 1;
    let bodies = stages_of_pairs(network).into_iter().flat_map(|stage| network.stages[stage].body());
    let has_three_taps = |layer: &Layer| layer.runs_in_bands() && layer.time.rule.axis.kernel == 3;
    bodies.filter(|layer| *layer != last && has_three_taps(&network.layers[*layer])).collect()
}

/// Rewrites these layers.
pub fn pair_layers(network: &mut Network) {
    for layer in pairable_layers(network) {
        rewrite(&mut network.layers[layer], Pairs::Plain);
    }
}

/// Rewrites upsamplers that keep the frame rate, in stages with two or more frames a latent.
pub fn pair_upsamplers(network: &mut Network) {
    for stage in stages_of_pairs(network) {
        let layer = &mut network.layers[network.stages[stage].head()];
        if layer.layout.window == Window::Up && layer.time.is_causal() {
            rewrite(layer, Pairs::Halved);
        }
    }
}

fn rewrite(layer: &mut Layer, pairs: Pairs) {
    layer.time = Arc::new(Recipes::new(TimeRule { pairs, ..layer.time.rule }));
    layer.layout.pairs = Some(PAIR_SLABS);
    layer.layout.slabs = layer.time.slabs().len() as u64;
    layer.layout.first_frame_slab = layer.time.first_frame_slab();
}

/// Stages with two or more frames a latent.
fn stages_of_pairs(network: &Network) -> Vec<usize> {
    let rates = network.later_stage_frames(network.latent_rate());
    (0..rates.len()).filter(|stage| rates[*stage] > 1).collect()
}
