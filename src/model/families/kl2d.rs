//! The 2D AutoencoderKL of SD 1.x and 2.x, SDXL, SD3, FLUX.1 and FLUX.2. The graphs have the tensor names of LDM.

use std::borrow::Cow;
use std::ffi::CStr;

use super::blocks::{AttentionStyle, MAX_CHANNELS, MAX_LATENT, MAX_LAYERS, MAX_LEVELS, Style, frame_conv, norm_groups};
use super::{Family, LatentFormat, LatentScaling, Model, PublishedModel};
use crate::model::checkpoint::FileTensors;
use crate::model::geometry::Geometry;
use crate::model::graph::{Graph, GraphBuilder, NormKind, SpaceAxis, TimeAxis};
use crate::safetensors::Check;

pub static FAMILY: Family = Family {
    name: "kl2d",
    canonical,
    is_unread,
    model: |tensors| Ok(Sizes::of(tensors)?.model()),
    published: &[
        PublishedModel { name: "sd", model: || Sizes::published(SD).model() },
        PublishedModel { name: "sdxl", model: || Sizes::published(SDXL).model() },
        PublishedModel { name: "sd3", model: || Sizes::published(SD3).model() },
        PublishedModel { name: "flux", model: || Sizes::published(FLUX).model() },
        PublishedModel { name: "flux2", model: || Sizes::published(FLUX2).model() },
    ],
};

/// A published model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Published {
    format: LatentFormat,
    latent_channels: u64,
    quant: bool,
    /// How the name of a tensor of its diffusion model begins, in a checkpoint that has both.
    beside: &'static str,
}

/// The models of [`SCALED`], as a host names them.
pub const SCALED_NAMES: [&CStr; 4] = [c"sd", c"sdxl", c"sd3", c"flux"];

const fn scaled(model: usize, scale: f64, shift: f64) -> LatentFormat {
    let Ok(name) = SCALED_NAMES[model].to_str() else { panic!("the names are ASCII") };
    LatentFormat { name, scaling: LatentScaling::Scaled { scale, shift } }
}

pub const SD: Published =
    Published { format: scaled(0, 0.18215, 0.0), latent_channels: 4, quant: true, beside: "cond_stage_model." };
pub const SDXL: Published =
    Published { format: scaled(1, 0.13025, 0.0), latent_channels: 4, quant: true, beside: "conditioner." };
pub const SD3: Published = Published {
    format: scaled(2, 1.5305, 0.0609),
    latent_channels: 16,
    quant: false,
    beside: "model.diffusion_model.joint_blocks.",
};
pub const FLUX: Published = Published {
    format: scaled(3, 0.3611, 0.1159),
    latent_channels: 16,
    quant: false,
    beside: "model.diffusion_model.double_blocks.",
};
pub const FLUX2: Published = Published {
    format: LatentFormat {
        name: "flux2",
        scaling: LatentScaling::Packed { side: 2, mean: "bn.running_mean", variance: "bn.running_var", epsilon: 1e-4 },
    },
    latent_channels: 32,
    quant: true,
    beside: "model.diffusion_model.double_stream_modulation_img.",
};
const SCALED: [Published; 4] = [SD, SDXL, SD3, FLUX];

/// The parts of names in diffusers' schemes, current and older, and what LDM has for them.
const RENAMED: [(&str, &str); 20] = [
    ("mid_block.resnets.0.", "mid.block_1."),
    ("mid_block.resnets.1.", "mid.block_2."),
    ("mid_block.attentions.0.", "mid.attn_1."),
    ("attn_1.group_norm.", "attn_1.norm."),
    ("attn_1.to_q.", "attn_1.q."),
    ("attn_1.to_k.", "attn_1.k."),
    ("attn_1.to_v.", "attn_1.v."),
    ("attn_1.to_out.0.", "attn_1.proj_out."),
    ("attn_1.query.", "attn_1.q."),
    ("attn_1.key.", "attn_1.k."),
    ("attn_1.value.", "attn_1.v."),
    ("attn_1.proj_attn.", "attn_1.proj_out."),
    ("encoder.down_blocks.", "encoder.down."),
    (".resnets.", ".block."),
    (".conv_shortcut.", ".nin_shortcut."),
    (".downsamplers.0.", ".downsample."),
    (".upsamplers.0.", ".upsample."),
    ("coder.conv_norm_out.", "coder.norm_out."),
    // FLUX.2 has them below the two halves.
    ("encoder.quant_conv.", "quant_conv."),
    ("decoder.post_quant_conv.", "post_quant_conv."),
];

/// LDM counts the decoder's levels from the output, diffusers in the order in which they run.
fn canonical<'a>(names: &[&'a str]) -> Vec<Cow<'a, str>> {
    const UP: &str = "decoder.up_blocks.";
    let level = |name: &str| name.strip_prefix(UP)?.split('.').next()?.parse::<u64>().ok();
    let last = names.iter().filter_map(|name| level(name)).max().unwrap_or(0);
    let replaced = |name: Cow<'a, str>, from: &str, to: &str| {
        if name.contains(from) { Cow::Owned(name.replacen(from, to, 1)) } else { name }
    };
    let renamed = |name: &&'a str| {
        let level = level(name);
        let name = RENAMED.iter().fold(Cow::Borrowed(*name), |name, (from, to)| replaced(name, from, to));
        match level {
            Some(found) => replaced(name, &format!("{UP}{found}."), &format!("decoder.up.{}.", last - found)),
            None => name,
        }
    };
    names.iter().map(renamed).collect()
}

/// A counter of training steps, and what was trained beside the autoencoder.
fn is_unread(name: &str) -> bool {
    name == "bn.num_batches_tracked" || name.starts_with("loss.") || name.starts_with("model_ema.")
}

/// The sizes that differ between checkpoints of the family.
#[derive(Debug, Clone, PartialEq)]
pub struct Sizes {
    pub pixel_channels: u64,
    pub latent_channels: u64,
    /// Channels of each level of the encoder, from full resolution down.
    pub encoder: Vec<u64>,
    /// Those of the decoder, in the same order. FLUX.2 may have a narrower decoder.
    pub decoder: Vec<u64>,
    /// Residual blocks of an encoder level. A decoder level has one more.
    pub layers: u64,
    /// Groups of every norm.
    pub groups: u64,
    /// Whether a 1x1 convolution follows the encoder, and another precedes the decoder.
    pub quant: bool,
    /// Of each model that it may be.
    pub latents: Vec<LatentFormat>,
}

impl Sizes {
    pub fn published(model: Published) -> Sizes {
        let channels = vec![128, 256, 512, 512];
        Sizes {
            pixel_channels: 3,
            latent_channels: model.latent_channels,
            encoder: channels.clone(),
            decoder: channels,
            layers: 2,
            groups: 32,
            quant: model.quant,
            latents: vec![model.format],
        }
    }

    /// The sizes that the tensors imply. Reads only the shapes that it needs; the comparison with the graphs checks all
    /// of them.
    fn of(tensors: &FileTensors) -> Check<Sizes> {
        let widths = |side: &str| {
            let levels = tensors.count(&format!("{side}."), ".block.", "resolution levels", MAX_LEVELS)?;
            let channels = |level: u64| {
                let name = format!("{side}.{level}.block.0.conv1.weight");
                tensors.dimension(&name, 0, "output channels", MAX_CHANNELS)
            };
            (0..levels).map(channels).collect::<Check<Vec<u64>>>()
        };
        let (encoder, decoder) = (widths("encoder.down")?, widths("decoder.up")?);
        if encoder.len() != decoder.len() {
            let [down, up] = [&encoder, &decoder].map(Vec::len);
            return Err(format!(
                "the encoder has {down} resolution levels and the decoder {up}, expected equally many"
            ));
        }
        let latent_channels =
            tensors.dimension("decoder.conv_in.weight", 1, "input channels (those of a latent)", MAX_LATENT)?;
        let quant = tensors.has("quant_conv.weight");
        Ok(Sizes {
            pixel_channels: tensors.dimension("encoder.conv_in.weight", 1, "input channels (those of a pixel)", 4)?,
            latent_channels,
            layers: tensors.count("encoder.down.0.block.", ".", "residual blocks a level", MAX_LAYERS)?,
            groups: norm_groups(tensors, &[&encoder[..], &decoder].concat())?,
            encoder,
            decoder,
            quant,
            latents: formats(tensors, latent_channels, quant),
        })
    }

    pub fn model(&self) -> Model {
        let Sizes { encoder, decoder, layers, groups, latent_channels, .. } = self;
        let channels = if encoder == decoder {
            format!("channels {encoder:?}")
        } else {
            format!("channels {encoder:?} and {decoder:?}")
        };
        Model {
            family: &FAMILY,
            sizes: format!("{channels}, {layers} layers a level, {groups} groups, {latent_channels} latent channels"),
            geometry: Geometry {
                pixel_channels: self.pixel_channels,
                latent_channels: *latent_channels,
                space: 1 << (encoder.len() - 1),
                time: 1,
                patch: 1,
                packing: 1,
            },
            latents: self.latents.clone(),
            encoder: self.encoder(),
            decoder: self.decoder(),
        }
    }

    fn style(&self) -> Style {
        let norm = NormKind::Group { groups: self.groups, epsilon: 1e-6 };
        Style {
            norm,
            time: TimeAxis::POINT,
            weight_axes: 4,
            residual: ["norm1", "conv1", "norm2", "conv2", "nin_shortcut"],
            // LDM's files have 1x1 convolutions.
            attention: AttentionStyle { norm, weight_axes: 2, names: ["norm", "proj_out"], qkv: &["q", "k", "v"] },
            middle: ["block_1", "attn_1", "block_2"],
        }
    }

    fn encoder(&self) -> Graph {
        let (style, mut graph) = (self.style(), GraphBuilder::new(self.pixel_channels));
        let mut x = style.conv3(&mut graph, GraphBuilder::INPUT, "encoder.conv_in", self.encoder[0]);
        for (level, channels) in self.encoder.iter().enumerate() {
            let name = format!("encoder.down.{level}");
            for block in 0..self.layers {
                x = style.residual(&mut graph, x, &format!("{name}.block.{block}"), *channels);
            }
            if level + 1 < self.encoder.len() {
                x = graph.conv(x, frame_conv(format!("{name}.downsample.conv"), SpaceAxis::HALVING), *channels);
            }
        }
        let x = style.middle(&mut graph, x, "encoder.mid");
        let outputs = 2 * self.latent_channels;
        let x = style.norm_silu_conv3(&mut graph, x, ["encoder.norm_out", "encoder.conv_out"], outputs);
        if self.quant {
            style.conv1(&mut graph, x, "quant_conv", outputs);
        }
        graph.finish()
    }

    fn decoder(&self) -> Graph {
        let (style, mut graph) = (self.style(), GraphBuilder::new(self.latent_channels));
        let latent = if self.quant {
            style.conv1(&mut graph, GraphBuilder::INPUT, "post_quant_conv", self.latent_channels)
        } else {
            GraphBuilder::INPUT
        };
        let deepest = self.decoder[self.decoder.len() - 1];
        let x = style.conv3(&mut graph, latent, "decoder.conv_in", deepest);
        let mut x = style.middle(&mut graph, x, "decoder.mid");
        for (level, channels) in self.decoder.iter().enumerate().rev() {
            let name = format!("decoder.up.{level}");
            for block in 0..=self.layers {
                x = style.residual(&mut graph, x, &format!("{name}.block.{block}"), *channels);
            }
            if level > 0 {
                let large = graph.nearest(x, 2);
                x = graph.conv(large, frame_conv(format!("{name}.upsample.conv"), SpaceAxis::SAME), *channels);
            }
        }
        style.norm_silu_conv3(&mut graph, x, ["decoder.norm_out", "decoder.conv_out"], self.pixel_channels);
        graph.finish()
    }
}

/// The models that a file may be of. SD and SDXL have the same tensors, and so have SD3 and FLUX.1; only a checkpoint
/// that has the diffusion model too says which it is.
fn formats(tensors: &FileTensors, latent_channels: u64, quant: bool) -> Vec<LatentFormat> {
    if tensors.has("bn.running_mean") {
        return vec![FLUX2.format];
    }
    let is_beside = |model: &&Published| tensors.beside.iter().any(|name| name.starts_with(model.beside));
    let fits = |model: &&Published| model.latent_channels == latent_channels && model.quant == quant;
    let fitting: Vec<&Published> = SCALED.iter().filter(fits).collect();
    let told = fitting.iter().find(|model| is_beside(model));
    told.map_or_else(|| fitting.iter().map(|model| model.format).collect(), |model| vec![model.format])
}
