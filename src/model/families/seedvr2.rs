//! SeedVR2: a causal video autoencoder with group norms. The first frame is repeated before the clip.

use std::borrow::Cow;

use super::{Family, LatentScaling, Model};
use crate::model::checkpoint::FileTensors;
use crate::model::geometry::Geometry;
use crate::model::graph::{Conv, FirstFrame, Graph, GraphBuilder, NodeId, NormKind, SpaceAxis, TimeAxis};
use crate::safetensors::Check;

pub static FAMILY: Family = Family { name: "seedvr2", canonical, model: |tensors| Ok(Sizes::of(tensors)?.model()) };

const PIXEL_CHANNELS: u64 = 3;
const EPSILON: f64 = 1e-6;
const DEFAULT_GROUPS: u64 = 32;
/// Bounds of what a file may ask for.
const MAX_LEVELS: u64 = 8;
const MAX_LAYERS: u64 = 16;
const MAX_CHANNELS: u64 = 16384;
const MAX_LATENT: u64 = 1024;

const CAUSAL: TimeAxis = TimeAxis::causal(FirstFrame::Repeated);

/// Older and current names of attention's tensors.
const RENAMED: [(&str, &str); 4] = [("query", "to_q"), ("key", "to_k"), ("value", "to_v"), ("proj_attn", "to_out.0")];

/// The current name of a tensor that may have its older name in a file.
fn canonical(name: &str) -> Cow<'_, str> {
    let renamed = || {
        let (tensor, kind) = name.rsplit_once('.')?;
        let (attention, older) = tensor.rsplit_once('.')?;
        let (_, newer) = RENAMED.iter().find(|(o, _)| *o == older)?;
        attention.contains(".attentions.").then(|| format!("{attention}.{newer}.{kind}"))
    };
    renamed().map_or(Cow::Borrowed(name), Cow::Owned)
}

/// The sizes that differ between checkpoints of the family.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sizes {
    /// Channels of each level, from full resolution down.
    pub channels: Vec<u64>,
    /// Residual blocks of an encoder level. A decoder level has one more.
    pub layers: u64,
    /// Groups of every norm.
    pub groups: u64,
    /// Channels of a latent.
    pub latent: u64,
    /// Changes of resolution that also change the frame rate: the innermost ones.
    pub temporal_levels: u64,
}

impl Sizes {
    /// Those of the published checkpoint.
    pub fn published() -> Sizes {
        Sizes { channels: vec![128, 256, 512, 512], layers: 2, groups: 32, latent: 16, temporal_levels: 2 }
    }

    /// The sizes that the tensors imply. Reads only the shapes that it needs; the comparison with the graphs checks all
    /// of them.
    fn of(tensors: &FileTensors) -> Check<Sizes> {
        let (groups, source) = match tensors.metadata_number("norm_num_groups")? {
            Some(groups) => (groups, "in the file's metadata"),
            None => (DEFAULT_GROUPS, "assumed, as the file's metadata has none"),
        };
        let levels = tensors.count("encoder.down_blocks.", ".resnets.", "resolution levels", MAX_LEVELS)?;
        let layers = tensors.count("encoder.down_blocks.0.resnets.", ".", "residual blocks a level", MAX_LAYERS)?;
        let channels = |level: u64| {
            let name = format!("encoder.down_blocks.{level}.resnets.0.conv1.weight");
            tensors.dimension(&name, 0, "output channels", MAX_CHANNELS)
        };
        let channels = (0..levels).map(channels).collect::<Check<Vec<u64>>>()?;
        let latent =
            tensors.dimension("decoder.conv_in.weight", 1, "input channels (those of a latent)", MAX_LATENT)?;
        let temporal_levels = temporal_levels(tensors, levels)?;
        match channels.iter().position(|c| groups == 0 || c % groups != 0) {
            None => Ok(Sizes { channels, layers, groups, latent, temporal_levels }),
            Some(level) => Err(format!(
                "norm_num_groups is {groups} ({source}), expected a divisor of every level's channels; level {level} has {}",
                channels[level]
            )),
        }
    }

    pub fn model(&self) -> Model {
        let Sizes { channels, layers, groups, latent, temporal_levels } = self;
        Model {
            family: &FAMILY,
            sizes: format!("channels {channels:?}, {layers} layers a level, {groups} groups, {latent} latent channels"),
            geometry: Geometry {
                pixel_channels: PIXEL_CHANNELS,
                latent_channels: *latent,
                space: 1 << (channels.len() - 1),
                time: 1 << temporal_levels,
            },
            latent_scaling: LatentScaling::Scaled { scale: 0.9152, shift: 0.0 },
            encoder: self.encoder(),
            decoder: self.decoder(),
        }
    }

    fn encoder(&self) -> Graph {
        let last = self.channels.len() - 1;
        let mut blocks = Blocks { graph: GraphBuilder::new(PIXEL_CHANNELS), groups: self.groups };
        let mut x = blocks.conv(GraphBuilder::INPUT, "encoder.conv_in", self.channels[0]);
        for (level, &channels) in self.channels.iter().enumerate() {
            for layer in 0..self.layers {
                x = blocks.residual(x, &format!("encoder.down_blocks.{level}.resnets.{layer}"), channels);
            }
            if level < last {
                let halves_time = level as u64 + self.temporal_levels >= last as u64;
                x = blocks.downsampler(x, &format!("encoder.down_blocks.{level}.downsamplers.0"), halves_time);
            }
        }
        x = blocks.middle(x, "encoder.mid_block");
        blocks.finish(x, "encoder", 2 * self.latent)
    }

    fn decoder(&self) -> Graph {
        let last = self.channels.len() - 1;
        let mut blocks = Blocks { graph: GraphBuilder::new(self.latent), groups: self.groups };
        let mut x = blocks.conv(GraphBuilder::INPUT, "decoder.conv_in", self.channels[last]);
        x = blocks.middle(x, "decoder.mid_block");
        for (level, &channels) in self.channels.iter().rev().enumerate() {
            for layer in 0..=self.layers {
                x = blocks.residual(x, &format!("decoder.up_blocks.{level}.resnets.{layer}"), channels);
            }
            if level < last {
                let frames = if (level as u64) < self.temporal_levels { 2 } else { 1 };
                x = blocks.upsampler(x, &format!("decoder.up_blocks.{level}.upsamplers.0"), frames);
            }
        }
        blocks.finish(x, "decoder", PIXEL_CHANNELS)
    }
}

/// How many downsamplers also halve the frame rate.
fn temporal_levels(tensors: &FileTensors, levels: u64) -> Check<u64> {
    let mut temporal = 0;
    for level in 0..levels - 1 {
        let name = format!("encoder.down_blocks.{level}.downsamplers.0.conv.weight");
        let shape = tensors.shape(&name)?;
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

/// The blocks of the family.
struct Blocks {
    graph: GraphBuilder,
    groups: u64,
}

impl Blocks {
    fn norm(&mut self, x: NodeId, tensor: String) -> NodeId {
        self.graph.norm(x, tensor, NormKind::Group { groups: self.groups, epsilon: EPSILON })
    }

    fn conv_of(&mut self, x: NodeId, tensor: &str, channels: u64, time: TimeAxis, space: SpaceAxis) -> NodeId {
        self.graph.conv(x, Conv { tensors: vec![tensor.into()], time, space, weight_axes: 5 }, channels)
    }

    fn conv(&mut self, x: NodeId, tensor: &str, channels: u64) -> NodeId {
        self.conv_of(x, tensor, channels, CAUSAL, SpaceAxis::SAME)
    }

    fn point(&mut self, x: NodeId, tensor: &str, channels: u64) -> NodeId {
        self.conv_of(x, tensor, channels, TimeAxis::POINT, SpaceAxis::POINT)
    }

    fn norm_silu_conv(&mut self, x: NodeId, [norm, conv]: [String; 2], channels: u64) -> NodeId {
        let normalised = self.norm(x, norm);
        let activated = self.graph.silu(normalised);
        self.conv(activated, &conv, channels)
    }

    fn residual(&mut self, x: NodeId, name: &str, channels: u64) -> NodeId {
        let hidden = self.norm_silu_conv(x, ["norm1", "conv1"].map(|part| format!("{name}.{part}")), channels);
        let out = self.norm_silu_conv(hidden, ["norm2", "conv2"].map(|part| format!("{name}.{part}")), channels);
        let shortcut = match self.graph.channels(x) == channels {
            true => x,
            false => self.point(x, &format!("{name}.conv_shortcut"), channels),
        };
        self.graph.add(shortcut, out)
    }

    fn attention(&mut self, x: NodeId, name: &str) -> NodeId {
        let channels = self.graph.channels(x);
        let matrices = |parts: &[&str]| Conv {
            tensors: parts.iter().map(|part| format!("{name}.{part}")).collect(),
            time: TimeAxis::POINT,
            space: SpaceAxis::POINT,
            weight_axes: 2,
        };
        let normalised = self.norm(x, format!("{name}.group_norm"));
        let qkv = self.graph.conv(normalised, matrices(&["to_q", "to_k", "to_v"]), 3 * channels);
        let mixed = self.graph.attention(qkv);
        let out = self.graph.conv(mixed, matrices(&["to_out.0"]), channels);
        self.graph.add(x, out)
    }

    fn middle(&mut self, x: NodeId, name: &str) -> NodeId {
        let channels = self.graph.channels(x);
        let x = self.residual(x, &format!("{name}.resnets.0"), channels);
        let x = self.attention(x, &format!("{name}.attentions.0"));
        self.residual(x, &format!("{name}.resnets.1"), channels)
    }

    fn downsampler(&mut self, x: NodeId, name: &str, halves_time: bool) -> NodeId {
        let time = if halves_time { TimeAxis::halving(FirstFrame::Repeated) } else { TimeAxis::POINT };
        self.conv_of(x, &format!("{name}.conv"), self.graph.channels(x), time, SpaceAxis::HALVING)
    }

    /// A convolution to `4 * frames` times the channels, unfolded into 2 x 2 pixels and `frames` frames.
    fn upsampler(&mut self, x: NodeId, name: &str, frames: u64) -> NodeId {
        let channels = self.graph.channels(x);
        let wide = self.point(x, &format!("{name}.upscale_conv"), 4 * frames * channels);
        let unfolded = self.graph.unfold(wide, frames, 2);
        self.conv(unfolded, &format!("{name}.conv"), channels)
    }

    fn finish(mut self, x: NodeId, name: &str, channels: u64) -> Graph {
        let names = ["conv_norm_out", "conv_out"].map(|part| format!("{name}.{part}"));
        self.norm_silu_conv(x, names, channels);
        self.graph.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::graph::TensorShape;

    fn of(tensors: &[TensorShape]) -> Check<Sizes> {
        let shapes = tensors.iter().map(|tensor| (tensor.name.as_str().into(), tensor.shape.as_slice())).collect();
        Sizes::of(&FileTensors { shapes, metadata: None })
    }

    #[test]
    fn the_published_model_has_its_tensors_and_parameters() {
        let tensors = Sizes::published().model().tensors();
        let names: std::collections::BTreeSet<_> = tensors.iter().map(|tensor| &tensor.name).collect();
        assert_eq!((tensors.len(), names.len()), (250, 250), "names are unique");
        assert_eq!(tensors.iter().map(|tensor| tensor.shape.iter().product::<u64>()).sum::<u64>(), 250_648_227);
    }

    #[test]
    fn sizes_follow_from_their_tensors() {
        let one_level = Sizes { channels: vec![64], temporal_levels: 0, ..Sizes::published() };
        let every_level = Sizes { temporal_levels: 3, ..Sizes::published() };
        for sizes in [Sizes::published(), one_level, every_level] {
            assert_eq!(of(&sizes.model().tensors()), Ok(sizes));
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
}
