//! The autoencoder of Wan 2.1, which Qwen-Image and others share. The graphs have its authors' tensor names.

use std::borrow::Cow;

use super::wan::{LAYERS, Sizes, authors_name, level};
use super::{Family, LatentFormat, LatentScaling, Model, PublishedModel};
use crate::model::graph::{Graph, GraphBuilder};

pub static FAMILY: Family = Family {
    name: "wan21",
    canonical: |names| names.iter().map(|name| canonical(name)).collect(),
    is_unread: |_| false,
    model: |tensors| Ok(model(&Sizes::of(tensors, encoder_block, decoder_block)?)),
    published: &[
        PublishedModel { name: "wan21", model: || model(&published()) },
        PublishedModel { name: "qwen-image", model: || model(&published()) },
    ],
};

const LATENTS: LatentFormat = LatentFormat {
    name: FAMILY.name,
    scaling: LatentScaling::Standardised {
        mean: &[
            -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508, 0.4134, -0.0715, 0.5517, -0.3632,
            -0.1922, -0.9497, 0.2503, -0.2921,
        ],
        deviation: &[
            2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743, 3.2687, 2.1526, 2.8652, 1.5579, 1.6382,
            1.1253, 2.8251, 1.9160,
        ],
    },
};
const LATENT_CHANNELS: u64 = 16;

fn canonical(name: &str) -> Cow<'_, str> {
    authors_name(up_block(name).map_or(Cow::Borrowed(name), Cow::Owned), name)
}

/// diffusers numbers the decoder's blocks level by level.
fn up_block(name: &str) -> Option<String> {
    let (level, rest) = name.strip_prefix("decoder.up_blocks.")?.split_once('.')?;
    let level: u64 = level.parse().ok().filter(|level| *level < 1 << 32)?;
    if let Some(rest) = rest.strip_prefix("upsamplers.0.") {
        return Some(format!("{}.{rest}", decoder_block(level, LAYERS + 1)));
    }
    let (block, rest) = rest.strip_prefix("resnets.")?.split_once('.')?;
    let block = block.parse().ok().filter(|block| *block <= LAYERS)?;
    Some(format!("{}.{rest}", decoder_block(level, block)))
}

// Blocks are numbered through all levels. A level has a change of resolution behind its residual blocks.

fn encoder_block(level: u64, block: u64) -> String {
    format!("encoder.downsamples.{}", level * (LAYERS + 1) + block)
}

fn decoder_block(level: u64, block: u64) -> String {
    format!("decoder.upsamples.{}", level * (LAYERS + 2) + block)
}

fn published() -> Sizes {
    Sizes {
        pixel_channels: [3, 3],
        latent_channels: LATENT_CHANNELS,
        time_kernel: 3,
        encoder: vec![
            level(96, Some((96, false))),
            level(192, Some((192, true))),
            level(384, Some((384, true))),
            level(384, None),
        ],
        decoder: vec![
            level(384, Some((192, true))),
            level(384, Some((192, true))),
            level(192, Some((96, false))),
            level(96, None),
        ],
    }
}

pub fn model(sizes: &Sizes) -> Model {
    Model {
        family: &FAMILY,
        sizes: sizes.description(),
        geometry: sizes.geometry(1),
        latents: if sizes.latent_channels == LATENT_CHANNELS { vec![LATENTS] } else { Vec::new() },
        encoder: encoder(sizes),
        decoder: decoder(sizes),
    }
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
