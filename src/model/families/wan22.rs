//! The autoencoders of Wan 2.2 5B and of Qwen-Image 2.1. Levels have shortcuts without weights around them. That of Wan
//! 2.2 unshuffles pixels; that of Qwen-Image 2.1 is the same graph for still images, with an alpha channel.

use std::borrow::Cow;

use super::wan::{LAYERS, Level, Sizes, authors_name, level};
use super::{Family, LatentFormat, LatentScaling, Model, PublishedModel};
use crate::model::checkpoint::FileTensors;
use crate::model::graph::{Folding, Graph, GraphBuilder};
use crate::safetensors::Check;

pub static FAMILY: Family = Family {
    name: "wan22",
    canonical: |names| names.iter().map(|name| canonical(name)).collect(),
    is_unread: |_| false,
    model: |tensors| {
        let sizes = read(tensors)?;
        match sizes.pixel_channels.map(|channels| channels % (PATCH * PATCH)) {
            [0, 0] if !sizes.is_still() => Ok(model(&sizes)),
            [0, 0] => Err("its convolutions see one frame, expected three".into()),
            _ => Err(format!(
                "it has {:?} pixel channels, expected multiples of 4: patches of 2 x 2",
                sizes.pixel_channels
            )),
        }
    },
    published: &[PublishedModel { name: "wan22", model: || model(&published()) }],
};

/// An image never runs the convolutions over time that its files have.
pub static QWEN_IMAGE: Family = Family {
    name: "qwen21",
    canonical: FAMILY.canonical,
    is_unread: |name| name.contains(".time_conv."),
    model: |tensors| match read(tensors)? {
        sizes if sizes.is_still() => Ok(image_model(&with_time_of_channels(sizes))),
        _ => Err("its convolutions see three frames, expected one".into()),
    },
    published: &[PublishedModel { name: "qwen-image-2.1", model: || image_model(&published_image()) }],
};

/// Pixels of video in a row that are unshuffled into one.
const PATCH: u64 = 2;

const LATENTS: LatentFormat = LatentFormat {
    name: FAMILY.name,
    scaling: LatentScaling::Standardised {
        mean: &[
            -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542, 0.2813, 0.0891,
            0.1570, -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502,
            -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230, -0.0313, -0.1649, 0.0117, 0.0723,
            -0.2839, -0.2083, -0.0520, 0.3748, 0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
        ],
        deviation: &[
            0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894, 1.0901, 0.6885,
            0.6165, 0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659, 0.7069, 0.5338,
            0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093, 0.5709, 0.6065, 0.6415, 0.4944, 0.5726, 1.2042, 0.5458,
            1.6887, 0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
        ],
    },
};

#[expect(clippy::approx_constant, reason = "a mean that is near pi / 6")]
const IMAGE_LATENTS: LatentFormat = LatentFormat {
    name: QWEN_IMAGE.name,
    scaling: LatentScaling::Standardised {
        mean: &[
            0.5126, 0.7721, -0.0631, 1.3506, -0.7855, -2.1025, -0.3458, 1.3722, 1.8873, -1.7177, -0.6510, 0.2732,
            0.7562, -0.6163, -1.0277, 3.8363, 2.0210, 0.0472, 0.9320, 2.0087, 2.4954, -0.1391, -1.4249, 1.8464,
            -0.5236, 1.2826, 3.7046, -1.3035, 2.7286, -1.4518, -1.9036, -1.9955, -0.0342, -1.0265, -0.7636, 3.0555,
            0.0746, -3.0751, -0.1076, 1.7376, -1.0914, -1.9435, -0.2784, -1.3680, 0.4809, -0.4433, 0.3764, 0.5729,
            -2.0595, 1.0960, -1.3260, -2.0211, -5.0179, 0.5275, 4.0162, 1.8505, 0.3026, 1.9373, 1.4937, 0.2632, 0.5547,
            -1.7121, -0.1562, 0.0304,
        ],
        deviation: &[
            3.2001, 3.2936, 3.4321, 3.0091, 3.1061, 4.0379, 4.0705, 3.7910, 3.0785, 3.6500, 3.9308, 3.0904, 2.8778,
            3.7675, 3.7320, 5.0756, 3.2864, 4.0397, 3.1317, 4.0443, 2.9249, 3.9454, 3.0988, 4.2489, 3.4896, 3.8513,
            3.9323, 3.4719, 3.7498, 4.2830, 3.5694, 4.2467, 3.9037, 3.2947, 5.0770, 3.5075, 3.2700, 3.4767, 2.8063,
            5.1125, 3.5327, 4.7833, 3.1286, 4.1819, 3.8527, 3.8312, 3.5605, 4.3875, 3.9624, 4.0168, 3.5643, 4.0550,
            5.5614, 4.2963, 4.4080, 3.4959, 3.8747, 3.7608, 3.5735, 3.1490, 3.7662, 3.6746, 3.4563, 3.8161,
        ],
    },
};

/// diffusers numbers blocks level by level too, and names the change of resolution.
fn canonical(name: &str) -> Cow<'_, str> {
    let block = |prefix: &str, change: &str, of: fn(u64, u64) -> String, layers: u64| {
        let (level, rest) = name.strip_prefix(prefix)?.split_once('.')?;
        let level: u64 = level.parse().ok()?;
        if let Some(rest) = rest.strip_prefix(change) {
            return Some(format!("{}.{rest}", of(level, layers)));
        }
        let (block, rest) = rest.strip_prefix("resnets.")?.split_once('.')?;
        Some(format!("{}.{rest}", of(level, block.parse().ok()?)))
    };
    let found = block("encoder.down_blocks.", "downsampler.", encoder_block, LAYERS)
        .or_else(|| block("decoder.up_blocks.", "upsampler.", decoder_block, LAYERS + 1));
    authors_name(found.map_or(Cow::Borrowed(name), Cow::Owned), name)
}

fn encoder_block(level: u64, block: u64) -> String {
    format!("encoder.downsamples.{level}.downsamples.{block}")
}

fn decoder_block(level: u64, block: u64) -> String {
    format!("decoder.upsamples.{level}.upsamples.{block}")
}

fn read(tensors: &FileTensors) -> Check<Sizes> {
    Sizes::of(tensors, encoder_block, decoder_block)
}

/// A file of an image model may lack the convolutions over time. The channels then say which levels had one: a mean of
/// frames doubles them. The decoder has the encoder's levels in reverse.
fn with_time_of_channels(mut sizes: Sizes) -> Sizes {
    let mut before = sizes.encoder[0].channels;
    let mut times = Vec::new();
    for change in sizes.encoder.iter_mut().filter_map(|level| level.resampling.as_mut()) {
        change.time = change.channels == 2 * before;
        before = change.channels;
        times.push(change.time);
    }
    let changes = sizes.decoder.iter_mut().filter_map(|level| level.resampling.as_mut());
    changes.zip(times.into_iter().rev()).for_each(|(change, time)| change.time = time);
    sizes
}

fn published() -> Sizes {
    Sizes {
        pixel_channels: [12, 12],
        latent_channels: 48,
        time_kernel: 3,
        encoder: vec![
            level(160, Some((160, false))),
            level(320, Some((320, true))),
            level(640, Some((640, true))),
            level(640, None),
        ],
        decoder: vec![
            level(1024, Some((1024, true))),
            level(1024, Some((1024, true))),
            level(512, Some((512, false))),
            level(256, None),
        ],
    }
}

fn published_image() -> Sizes {
    Sizes {
        pixel_channels: [4, 4],
        latent_channels: 64,
        time_kernel: 1,
        encoder: vec![
            level(96, Some((96, false))),
            level(192, Some((192, true))),
            level(384, Some((384, true))),
            level(768, Some((768, true))),
            level(768, None),
        ],
        decoder: vec![
            level(1152, Some((1152, true))),
            level(1152, Some((1152, true))),
            level(576, Some((576, true))),
            level(288, Some((288, false))),
            level(144, None),
        ],
    }
}

pub fn model(sizes: &Sizes) -> Model {
    of_family(&FAMILY, sizes, PATCH, LATENTS)
}

pub fn image_model(sizes: &Sizes) -> Model {
    of_family(&QWEN_IMAGE, sizes, 1, IMAGE_LATENTS)
}

fn of_family(family: &'static Family, sizes: &Sizes, patch: u64, latents: LatentFormat) -> Model {
    let LatentScaling::Standardised { mean, .. } = latents.scaling else { unreachable!("both are standardised") };
    Model {
        family,
        sizes: sizes.description(),
        geometry: sizes.geometry(patch),
        latents: if sizes.latent_channels == mean.len() as u64 { vec![latents] } else { Vec::new() },
        encoder: encoder(sizes, patch),
        decoder: decoder(sizes, patch),
    }
}

/// `patch` 1: pixels as they are.
fn encoder(sizes: &Sizes, patch: u64) -> Graph {
    let mut graph = GraphBuilder::new(sizes.pixel_channels[0] / (patch * patch));
    let pixels = if patch == 1 { GraphBuilder::INPUT } else { graph.patch(GraphBuilder::INPUT, patch) };
    let mut x = sizes.style().conv3(&mut graph, pixels, "encoder.conv1", sizes.encoder[0].channels);
    for (number, level) in (0..).zip(&sizes.encoder) {
        let inner = sizes.down(&mut graph, x, number, encoder_block);
        let around = match level.resampling {
            Some(resampling) => graph.fold_mean(x, folding(sizes, level), resampling.channels),
            None => x,
        };
        x = graph.add(inner, around);
    }
    sizes.finish_encoder(graph, x)
}

/// The last level has no shortcut.
fn decoder(sizes: &Sizes, patch: u64) -> Graph {
    let (mut graph, mut x) = sizes.start_decoder();
    for (number, level) in (0..).zip(&sizes.decoder) {
        let inner = sizes.up(&mut graph, x, number, decoder_block);
        x = match level.resampling {
            Some(resampling) => {
                let around = graph.repeat_unfold(x, folding(sizes, level), resampling.channels);
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

/// The blocks of a level's shortcut.
fn folding(sizes: &Sizes, level: &Level) -> Folding {
    let frames = if level.resampling.is_some_and(|change| change.time) { 2 } else { 1 };
    Folding { frames, side: 2, still: sizes.is_still() }
}
