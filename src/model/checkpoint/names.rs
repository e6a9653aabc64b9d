//! Names and shapes of a checkpoint's tensors, and the configuration that follows from them.

use std::borrow::Cow;
use std::collections::BTreeMap;

use crate::model::config::Config;
use crate::model::network::{Direction, Layer, NamedWeights, Network};
use crate::safetensors::Check;

pub(super) type ShapesByName<'a> = BTreeMap<&'a str, &'a [u64]>;

const MAX_LEVELS: u64 = 8;
const MAX_LAYERS: u64 = 16;
const MAX_CHANNELS: u64 = 16384;
const MAX_LATENT: u64 = 1024;
const DEFAULT_GROUPS: u64 = 32;

/// Older and current names of attention's tensors.
const RENAMED: [(&str, &str); 4] = [("query", "to_q"), ("key", "to_k"), ("value", "to_v"), ("proj_attn", "to_out.0")];

/// The current name of a tensor that may have its older name in a file.
pub(super) fn canonical(name: &str) -> Cow<'_, str> {
    let renamed = || {
        let (tensor, kind) = name.rsplit_once('.')?;
        let (attention, older) = tensor.rsplit_once('.')?;
        let (_, newer) = RENAMED.iter().find(|(o, _)| *o == older)?;
        attention.contains(".attentions.").then(|| format!("{attention}.{newer}.{kind}"))
    };
    renamed().map_or(Cow::Borrowed(name), Cow::Owned)
}

/// Whether a tensor of shape `expected` may have shape `found` in a file. Older files have attention's matrices, the
/// only tensors of two dimensions, as convolutions with kernel 1.
pub(super) fn same_shape(expected: &[u64], found: &[u64]) -> bool {
    let matrix = expected.len() == 2 && found.len() <= 5;
    found == expected || matrix && found.starts_with(expected) && found[2..].iter().all(|dim| *dim == 1)
}

/// Name and shape of every tensor of a checkpoint.
pub fn tensors_of(config: &Config) -> Vec<(String, Vec<u64>)> {
    let networks = Direction::ALL.map(|direction| Network::new(config, direction));
    let affine = networks.iter().flat_map(|network| &network.layers).flat_map(Layer::affine);
    affine.flat_map(NamedWeights::tensors).map(|(name, shape)| (name, shape.to_vec())).collect()
}

/// The configuration that the shapes imply, with `groups` from the file's metadata. Reads only the shapes that it
/// needs; the comparison with the table checks all of them.
pub(super) fn config_of(shapes: &ShapesByName, groups: Option<u64>) -> Check<Config> {
    let levels = count(shapes, "encoder.down_blocks.", ".resnets.", "resolution levels", MAX_LEVELS)?;
    let layers = count(shapes, "encoder.down_blocks.0.resnets.", ".", "residual blocks a level", MAX_LAYERS)?;
    let channels = (0..levels)
        .map(|level| {
            let name = format!("encoder.down_blocks.{level}.resnets.0.conv1.weight");
            dimension(shapes, &name, 0, "output channels", MAX_CHANNELS)
        })
        .collect::<Check<Vec<u64>>>()?;
    let latent = dimension(shapes, "decoder.conv_in.weight", 1, "input channels (those of a latent)", MAX_LATENT)?;
    let temporal_levels = temporal_levels(shapes, levels)?;
    let (value, source) = match groups {
        Some(groups) => (groups, "in the file's metadata"),
        None => (DEFAULT_GROUPS, "assumed, as the file's metadata has none"),
    };
    match channels.iter().position(|c| value == 0 || c % value != 0) {
        None => Ok(Config { channels, layers, groups: value, latent, temporal_levels }),
        Some(level) => Err(format!(
            "norm_num_groups is {value} ({source}), expected a divisor of every level's channels; level {level} has {}",
            channels[level]
        )),
    }
}

/// One more than the largest N in names that begin with `before`, then N, then `after`.
fn count(shapes: &ShapesByName, before: &str, after: &str, what: &str, most: u64) -> Check<u64> {
    let number = |name: &&str| -> Option<u64> {
        let rest = name.strip_prefix(before)?;
        let digits = rest.find(|c: char| !c.is_ascii_digit())?;
        rest[digits..].starts_with(after).then(|| rest[..digits].parse().ok())?
    };
    let found = shapes.keys().filter_map(number).max().map_or(0, |n| n.saturating_add(1));
    match found {
        0 => Err(format!("tensor \"{before}0{after}...\" is missing, so this is not a checkpoint of this autoencoder")),
        n if n > most => Err(format!("the names \"{before}N{after}...\" imply {n} {what}, expected 1 to {most}")),
        n => Ok(n),
    }
}

fn shape_of<'a>(shapes: &ShapesByName<'a>, name: &str) -> Check<&'a [u64]> {
    shapes.get(name).copied().ok_or_else(|| format!("tensor {name:?} is missing"))
}

fn dimension(shapes: &ShapesByName, name: &str, axis: usize, what: &str, most: u64) -> Check<u64> {
    let shape = shape_of(shapes, name)?;
    match shape.get(axis) {
        Some(size) if (1..=most).contains(size) => Ok(*size),
        Some(size) => Err(format!("tensor {name:?}: shape is {shape:?}, with {size} {what}; expected 1 to {most}")),
        None => Err(format!("tensor {name:?}: shape is {shape:?}, expected five dimensions")),
    }
}

fn temporal_levels(shapes: &ShapesByName, levels: u64) -> Check<u64> {
    let mut temporal = 0;
    for level in 0..levels - 1 {
        let name = format!("encoder.down_blocks.{level}.downsamplers.0.conv.weight");
        let shape = shape_of(shapes, &name)?;
        match shape {
            [_, _, 3, _, _] => temporal += 1,
            [_, _, 1, _, _] if temporal == 0 => {}
            [_, _, 1, _, _] => {
                return Err(format!(
                    "tensor {name:?}: shape is {shape:?}, so the frame rate is halved before level {level} but not at it; \
                     expected the downsamplers with temporal kernel 3 to be the innermost ones"
                ));
            }
            _ => {
                return Err(format!("tensor {name:?}: shape is {shape:?}, expected five dimensions, the third 1 or 3"));
            }
        }
    }
    Ok(temporal)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn published() -> Config {
        Config { channels: vec![128, 256, 512, 512], layers: 2, groups: 32, latent: 16, temporal_levels: 2 }
    }

    fn shapes(table: &[(String, Vec<u64>)]) -> ShapesByName<'_> {
        table.iter().map(|(name, shape)| (name.as_str(), shape.as_slice())).collect()
    }

    #[test]
    fn table_of_the_published_model_has_its_tensors_and_parameters() {
        let table = tensors_of(&published());
        assert_eq!(table.len(), 250);
        assert_eq!(shapes(&table).len(), 250, "names are unique");
        assert_eq!(table.iter().map(|(_, shape)| shape.iter().product::<u64>()).sum::<u64>(), 250_648_227);
    }

    #[test]
    fn configuration_round_trips_through_its_table() {
        let one_level = Config { channels: vec![64], temporal_levels: 0, ..published() };
        let every_level = Config { temporal_levels: 3, ..published() };
        for config in [published(), one_level, every_level] {
            assert_eq!(config_of(&shapes(&tensors_of(&config)), None).unwrap(), config);
        }
    }

    #[test]
    fn only_attention_has_older_names() {
        assert_eq!(canonical("a.attentions.0.query.bias"), "a.attentions.0.to_q.bias");
        assert_eq!(canonical("a.attentions.0.proj_attn.weight"), "a.attentions.0.to_out.0.weight");
        for name in ["a.resnets.0.query.bias", "query.weight", "key", "", ".", "a.attentions.0.to_q.bias"] {
            assert_eq!(canonical(name), name);
        }
    }

    #[test]
    fn only_matrices_may_have_trailing_ones() {
        assert!(same_shape(&[4, 4], &[4, 4, 1, 1]) && same_shape(&[4, 4], &[4, 4, 1, 1, 1]));
        assert!(!same_shape(&[4, 4], &[4, 4, 1, 2]) && !same_shape(&[4, 4], &[4, 4, 1, 1, 1, 1]));
        assert!(!same_shape(&[4], &[4, 1]) && !same_shape(&[4, 4], &[4]) && !same_shape(&[4, 4], &[]));
    }
}
