//! The autoencoder of Wan 2.1 and of Qwen-Image, with the tensor names of its authors.

use super::wan::{LAYERS, Sizes};
use super::{Latent, Model, Shapes};
use video_vae::internals::model::graph::{Graph, GraphBuilder};

pub const LATENT: Latent = Latent::Standardised {
    mean: &[
        -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508, 0.4134, -0.0715, 0.5517, -0.3632, -0.1922,
        -0.9497, 0.2503, -0.2921,
    ],
    deviation: &[
        2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743, 3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253,
        2.8251, 1.9160,
    ],
};

/// None: the tensors are of another family.
pub fn model(shapes: &Shapes) -> Option<Model> {
    let sizes = Sizes::read(shapes, encoder_block, decoder_block)?;
    Some(Model { encoder: encoder(&sizes), decoder: decoder(&sizes), latent: LATENT })
}

// Blocks are numbered through all levels. A level has a change of resolution behind its residual blocks.

fn encoder_block(level: u64, block: u64) -> String {
    format!("encoder.downsamples.{}", level * (LAYERS + 1) + block)
}

fn decoder_block(level: u64, block: u64) -> String {
    format!("decoder.upsamples.{}", level * (LAYERS + 2) + block)
}

fn encoder(sizes: &Sizes) -> Graph {
    let mut graph = GraphBuilder::new(sizes.pixel_channels[0]);
    let mut x = sizes.style().conv3(&mut graph, GraphBuilder::INPUT, "encoder.conv1", sizes.encoder[0].channels);
    for level in 0..sizes.encoder.len() as u64 {
        x = sizes.down(&mut graph, x, level, encoder_block);
    }
    sizes.finish_encoder(graph, x)
}

fn decoder(sizes: &Sizes) -> Graph {
    let (mut graph, mut x) = sizes.start_decoder();
    for level in 0..sizes.decoder.len() as u64 {
        x = sizes.up(&mut graph, x, level, decoder_block);
    }
    sizes.decoder_head(&mut graph, x);
    graph.finish()
}
