//! SeedVR2: a causal video autoencoder with group norms. The first frame is repeated before the clip.

use std::borrow::Cow;

use super::blocks::{AttentionStyle, MAX_CHANNELS, MAX_LATENT, MAX_LAYERS, MAX_LEVELS, Style, norm_groups};
use super::{Family, LatentFormat, LatentScaling, Model, PublishedModel};
use crate::model::checkpoint::FileTensors;
use crate::model::geometry::Geometry;
use crate::model::graph::{Conv, FirstFrame, Graph, GraphBuilder, NodeId, NormKind, SpaceAxis, TimeAxis};
use crate::safetensors::Check;

pub static FAMILY: Family = Family {
    name: "seedvr2",
    canonical: |names| names.iter().map(|name| canonical(name)).collect(),
    is_unread: |_| false,
    model: |tensors| Ok(Sizes::of(tensors)?.model()),
    published: &[PublishedModel { name: "seedvr2", model: || Sizes::published().model() }],
};

const PIXEL_CHANNELS: u64 = 3;

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
        let groups = norm_groups(tensors, &channels)?;
        Ok(Sizes { channels, layers, groups, latent, temporal_levels })
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
                patch: 1,
                packing: 1,
            },
            latents: vec![LatentFormat {
                name: FAMILY.name,
                scaling: LatentScaling::Scaled { scale: 0.9152, shift: 0.0 },
            }],
            encoder: self.encoder(),
            decoder: self.decoder(),
        }
    }

    fn style(&self) -> Style {
        let norm = NormKind::Group { groups: self.groups, epsilon: 1e-6 };
        Style {
            norm,
            time: TimeAxis::causal(FirstFrame::Repeated),
            weight_axes: 5,
            residual: ["norm1", "conv1", "norm2", "conv2", "conv_shortcut"],
            attention: AttentionStyle {
                norm,
                weight_axes: 2,
                names: ["group_norm", "to_out.0"],
                qkv: &["to_q", "to_k", "to_v"],
            },
            middle: ["resnets.0", "attentions.0", "resnets.1"],
        }
    }

    fn encoder(&self) -> Graph {
        let (last, style) = (self.channels.len() - 1, self.style());
        let mut graph = GraphBuilder::new(PIXEL_CHANNELS);
        let mut x = style.conv3(&mut graph, GraphBuilder::INPUT, "encoder.conv_in", self.channels[0]);
        for (level, &channels) in self.channels.iter().enumerate() {
            for layer in 0..self.layers {
                x = style.residual(&mut graph, x, &format!("encoder.down_blocks.{level}.resnets.{layer}"), channels);
            }
            if level < last {
                let halves_time = level as u64 + self.temporal_levels >= last as u64;
                let time = if halves_time { TimeAxis::halving(FirstFrame::Repeated) } else { TimeAxis::POINT };
                let tensors = vec![format!("encoder.down_blocks.{level}.downsamplers.0.conv")];
                x = graph.conv(x, Conv { tensors, time, space: SpaceAxis::HALVING, weight_axes: 5 }, channels);
            }
        }
        x = style.middle(&mut graph, x, "encoder.mid_block");
        style.norm_silu_conv3(&mut graph, x, ["encoder.conv_norm_out", "encoder.conv_out"], 2 * self.latent);
        graph.finish()
    }

    fn decoder(&self) -> Graph {
        let (last, style) = (self.channels.len() - 1, self.style());
        let mut graph = GraphBuilder::new(self.latent);
        let mut x = style.conv3(&mut graph, GraphBuilder::INPUT, "decoder.conv_in", self.channels[last]);
        x = style.middle(&mut graph, x, "decoder.mid_block");
        for (level, &channels) in self.channels.iter().rev().enumerate() {
            for layer in 0..=self.layers {
                x = style.residual(&mut graph, x, &format!("decoder.up_blocks.{level}.resnets.{layer}"), channels);
            }
            if level < last {
                let frames = if (level as u64) < self.temporal_levels { 2 } else { 1 };
                x = upsampler(&style, &mut graph, x, &format!("decoder.up_blocks.{level}.upsamplers.0"), frames);
            }
        }
        style.norm_silu_conv3(&mut graph, x, ["decoder.conv_norm_out", "decoder.conv_out"], PIXEL_CHANNELS);
        graph.finish()
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

/// A convolution to `4 * frames` times the channels, unfolded into 2 x 2 pixels and `frames` frames.
fn upsampler(style: &Style, graph: &mut GraphBuilder, x: NodeId, name: &str, frames: u64) -> NodeId {
    let channels = graph.channels(x);
    let wide = style.conv1(graph, x, format!("{name}.upscale_conv"), 4 * frames * channels);
    let unfolded = graph.unfold(wide, frames, 2);
    style.conv3(graph, unfolded, format!("{name}.conv"), channels)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::graph::TensorShape;

    fn of(tensors: &[TensorShape]) -> Check<Sizes> {
        let shapes = tensors.iter().map(|tensor| (tensor.name.as_str().into(), tensor.shape.as_slice()));
        Sizes::of(&FileTensors::new(shapes, &[], None))
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
