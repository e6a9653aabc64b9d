//! The 2D AutoencoderKL of SD 1.x and 2.x, SDXL, SD3, FLUX.1 and FLUX.2, with the tensor names of LDM.

use super::blocks::{AttentionStyle, Style, frame_conv};
use super::{Latent, Model, Shapes, axis};
use video_vae::model::graph::{Graph, GraphBuilder, NormKind, SpaceAxis, TimeAxis};

// SD and SDXL have the same tensors, and so have SD3 and FLUX.1: a file does not say whose latents it has.
pub const SD: Latent = Latent::Scaled { scale: 0.18215, shift: 0.0 };
pub const SDXL: Latent = Latent::Scaled { scale: 0.13025, shift: 0.0 };
pub const SD3: Latent = Latent::Scaled { scale: 1.5305, shift: 0.0609 };
pub const FLUX1: Latent = Latent::Scaled { scale: 0.3611, shift: 0.1159 };
pub const FLUX2: Latent =
    Latent::Packed { side: 2, mean: "bn.running_mean", variance: "bn.running_var", epsilon: 1e-4 };

/// Of FLUX.2's batch norm: it counts the steps of its training.
pub const UNREAD: &str = "bn.num_batches_tracked";

const NORM: NormKind = NormKind::Group { groups: 32, epsilon: 1e-6 };

const STYLE: Style = Style {
    norm: NORM,
    time: TimeAxis::POINT,
    weight_axes: 4,
    residual: ["norm1", "conv1", "norm2", "conv2", "nin_shortcut"],
    attention: AttentionStyle { norm: NORM, weight_axes: 4, names: ["norm", "proj_out"], qkv: &["q", "k", "v"] },
    middle: ["block_1", "attn_1", "block_2"],
};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sizes {
    pub pixel_channels: u64,
    pub latent_channels: u64,
    /// Channels of each level of the encoder, from full resolution down.
    pub encoder: Vec<u64>,
    /// Those of the decoder, in the same order. FLUX.2 may have a narrower decoder.
    pub decoder: Vec<u64>,
    /// Residual blocks of an encoder level. A decoder level has one more.
    pub layers: usize,
    /// The 1x1 convolutions behind the encoder and before the decoder, where a model has them.
    pub quant: Option<[&'static str; 2]>,
}

impl Sizes {
    /// None: the tensors are of another family.
    pub fn read(shapes: &Shapes) -> Option<Sizes> {
        let widths = |levels: &str| -> Option<Vec<u64>> {
            let first = |level: usize| axis(shapes, &format!("{levels}.{level}.block.0.conv1"), 0);
            let widths: Vec<u64> = (0..).map_while(first).collect();
            (!widths.is_empty()).then_some(widths)
        };
        let is_layer = |block: &usize| axis(shapes, &format!("encoder.down.0.block.{block}.conv1"), 0).is_some();
        let quants = [["quant_conv", "post_quant_conv"], ["encoder.quant_conv", "decoder.post_quant_conv"]];
        Some(Sizes {
            pixel_channels: axis(shapes, "encoder.conv_in", 1)?,
            latent_channels: axis(shapes, "decoder.conv_in", 1)?,
            encoder: widths("encoder.down")?,
            decoder: widths("decoder.up")?,
            layers: (0..).take_while(is_layer).count(),
            quant: quants.into_iter().find(|names| axis(shapes, names[0], 0).is_some()),
        })
    }

    pub fn model(&self, latent: Latent) -> Model {
        Model { encoder: self.encoder(), decoder: self.decoder(), latent }
    }

    fn encoder(&self) -> Graph {
        let mut graph = GraphBuilder::new(self.pixel_channels);
        let mut x = STYLE.conv3(&mut graph, GraphBuilder::INPUT, "encoder.conv_in", self.encoder[0]);
        for (level, channels) in self.encoder.iter().enumerate() {
            let name = format!("encoder.down.{level}");
            for block in 0..self.layers {
                x = STYLE.residual(&mut graph, x, &format!("{name}.block.{block}"), *channels);
            }
            if level + 1 < self.encoder.len() {
                x = graph.conv(x, frame_conv(format!("{name}.downsample.conv"), SpaceAxis::HALVING), *channels);
            }
        }
        let x = STYLE.middle(&mut graph, x, "encoder.mid");
        let outputs = 2 * self.latent_channels;
        let x = STYLE.norm_silu_conv3(&mut graph, x, ["encoder.norm_out", "encoder.conv_out"], outputs);
        if let Some([quant, _]) = self.quant {
            STYLE.conv1(&mut graph, x, quant, outputs);
        }
        graph.finish()
    }

    fn decoder(&self) -> Graph {
        let mut graph = GraphBuilder::new(self.latent_channels);
        let latent = match self.quant {
            Some([_, post_quant]) => STYLE.conv1(&mut graph, GraphBuilder::INPUT, post_quant, self.latent_channels),
            None => GraphBuilder::INPUT,
        };
        let deepest = self.decoder[self.decoder.len() - 1];
        let x = STYLE.conv3(&mut graph, latent, "decoder.conv_in", deepest);
        let mut x = STYLE.middle(&mut graph, x, "decoder.mid");
        for (level, channels) in self.decoder.iter().enumerate().rev() {
            let name = format!("decoder.up.{level}");
            for block in 0..=self.layers {
                x = STYLE.residual(&mut graph, x, &format!("{name}.block.{block}"), *channels);
            }
            if level > 0 {
                let large = graph.nearest(x, 2);
                x = graph.conv(large, frame_conv(format!("{name}.upsample.conv"), SpaceAxis::SAME), *channels);
            }
        }
        STYLE.norm_silu_conv3(&mut graph, x, ["decoder.norm_out", "decoder.conv_out"], self.pixel_channels);
        graph.finish()
    }
}
