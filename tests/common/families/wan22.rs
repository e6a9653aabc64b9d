//! The autoencoder of Wan 2.2 5B, with the tensor names of its authors. Levels have shortcuts without parameters.

use super::{Latent, Model, Shapes};
use std::borrow::Cow;
use video_vae::internals::model::checkpoint::FileTensors;
use video_vae::internals::model::families::wan::{Level, Sizes};
use video_vae::internals::model::graph::{Folding, Graph, GraphBuilder, NodeId};

pub const LATENT: Latent = Latent::Standardised {
    mean: &[
        -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542, 0.2813, 0.0891, 0.1570,
        -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502, -0.2055,
        -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230, -0.0313, -0.1649, 0.0117, 0.0723, -0.2839, -0.2083,
        -0.0520, 0.3748, 0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
    ],
    deviation: &[
        0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894, 1.0901, 0.6885, 0.6165,
        0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659, 0.7069, 0.5338, 0.4889, 0.4917,
        0.4069, 0.4999, 0.6866, 0.4093, 0.5709, 0.6065, 0.6415, 0.4944, 0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.0600,
        0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
    ],
};

/// Pixels of video in a row of a patch.
const PATCH: u64 = 2;

/// None: the tensors are of another family.
pub fn model(shapes: &Shapes) -> Option<Model> {
    let sizes = read(shapes).filter(|sizes| sizes.time_kernel > 1)?;
    Some(Model { encoder: encoder(&sizes, PATCH), decoder: decoder(&sizes, PATCH), latent: LATENT })
}

pub(super) fn read(shapes: &Shapes) -> Option<Sizes> {
    let tensors = shapes.iter().map(|(name, shape)| (Cow::Borrowed(name.as_str()), shape.as_slice()));
    Sizes::of(&FileTensors::new(tensors, &[], None), encoder_block, decoder_block).ok()
}

fn encoder_block(level: u64, block: u64) -> String {
    format!("encoder.downsamples.{level}.downsamples.{block}")
}

fn decoder_block(level: u64, block: u64) -> String {
    format!("decoder.upsamples.{level}.upsamples.{block}")
}

/// `patch` 1: pixels as they are.
pub(super) fn encoder(sizes: &Sizes, patch: u64) -> Graph {
    let mut graph = GraphBuilder::new(sizes.pixel_channels[0] / (patch * patch));
    let pixels = if patch == 1 { GraphBuilder::INPUT } else { graph.patch(GraphBuilder::INPUT, patch) };
    let mut x = sizes.style().conv3(&mut graph, pixels, "encoder.conv1", sizes.encoder[0].channels);
    for (number, level) in (0..).zip(&sizes.encoder) {
        let inner = sizes.down(&mut graph, x, number, encoder_block);
        let around = mean_shortcut(&mut graph, x, level);
        x = graph.add(inner, around);
    }
    sizes.finish_encoder(graph, x)
}

/// `patch` 1: pixels as they are. The last level has no shortcut.
pub(super) fn decoder(sizes: &Sizes, patch: u64) -> Graph {
    let (mut graph, mut x) = sizes.start_decoder();
    for (number, level) in (0..).zip(&sizes.decoder) {
        let inner = sizes.up(&mut graph, x, number, decoder_block);
        x = match level.resampling {
            Some(resampling) => {
                let frames = if resampling.time { 2 } else { 1 };
                let around = graph.repeat_unfold(x, Folding { frames, side: 2, still: false }, resampling.channels);
                graph.add(inner, around)
            }
            None => inner,
        };
    }
    x = sizes.decoder_head(&mut graph, x);
    if patch > 1 {
        graph.unpatch(x, patch);
    }
    graph.finish()
}

fn mean_shortcut(graph: &mut GraphBuilder, x: NodeId, level: &Level) -> NodeId {
    match level.resampling {
        Some(resampling) => {
            let frames = if resampling.time { 2 } else { 1 };
            graph.fold_mean(x, Folding { frames, side: 2, still: false }, resampling.channels)
        }
        None => x,
    }
}
