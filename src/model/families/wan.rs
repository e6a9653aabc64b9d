//! What the families of Wan share: sizes, blocks, and the change of resolution and frame rate. Graphs have the authors'
//! tensor names.

use std::borrow::Cow;

use super::blocks::{AttentionStyle, MAX_CHANNELS, MAX_LATENT, MAX_LEVELS, Style, frame_conv};
use crate::model::checkpoint::FileTensors;
use crate::model::geometry::Geometry;
use crate::model::graph::{Conv, FirstFrame, Graph, GraphBuilder, NodeId, NormKind, SpaceAxis, TimeAxis};
use crate::safetensors::Check;

/// The parts of names in diffusers' scheme, and what the authors have for them.
const RENAMED: [(&str, &str); 9] = [
    ("coder.mid_block.resnets.0.", "coder.middle.0."),
    ("coder.mid_block.attentions.0.", "coder.middle.1."),
    ("coder.mid_block.resnets.1.", "coder.middle.2."),
    ("encoder.down_blocks.", "encoder.downsamples."),
    ("coder.conv_in.", "coder.conv1."),
    ("coder.norm_out.", "coder.head.0."),
    ("coder.conv_out.", "coder.head.2."),
    ("post_quant_conv.", "conv2."),
    ("quant_conv.", "conv1."),
];
/// Those of a residual block.
const RENAMED_IN_BLOCK: [(&str, &str); 5] = [
    (".norm1.", ".residual.0."),
    (".conv1.", ".residual.2."),
    (".norm2.", ".residual.3."),
    (".conv2.", ".residual.6."),
    (".conv_shortcut.", ".shortcut."),
];

/// The authors' name of a tensor. `found`: it, where the level that a block is in is said already.
pub fn authors_name<'a>(mut found: Cow<'a, str>, name: &str) -> Cow<'a, str> {
    let in_block = ["_blocks.", ".mid_block.resnets."].iter().any(|block| name.contains(block));
    let renamed = RENAMED_IN_BLOCK.iter().filter(|_| in_block).chain(&RENAMED);
    for (from, to) in renamed {
        if found.contains(from) {
            found = Cow::Owned(found.replacen(from, to, 1));
        }
    }
    found
}

/// Residual blocks of an encoder level. A decoder level has one more.
pub const LAYERS: u64 = 2;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sizes {
    /// Channels that the encoder's first convolution reads and the decoder's last one gives.
    pub pixel_channels: [u64; 2],
    pub latent_channels: u64,
    /// Frames that a convolution over time sees. With one, each frame is an image of its own.
    pub time_kernel: u64,
    /// Both in the order of computation.
    pub encoder: Vec<Level>,
    pub decoder: Vec<Level>,
}

/// Residual blocks, then a change of resolution in all levels but the last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Level {
    pub channels: u64,
    pub resampling: Option<Resampling>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resampling {
    /// Channels of the result.
    pub channels: u64,
    /// Whether it also changes the frame rate.
    pub time: bool,
}

/// `into`: channels behind the change of resolution, and whether it changes the frame rate.
pub fn level(channels: u64, into: Option<(u64, bool)>) -> Level {
    Level { channels, resampling: into.map(|(channels, time)| Resampling { channels, time }) }
}

/// The name of a level's block. The one behind the residual blocks is the change of resolution.
pub type BlockName = fn(level: u64, block: u64) -> String;

impl Sizes {
    /// The sizes that the tensors imply. Reads only the shapes that it needs; the comparison with the graphs checks all
    /// of them.
    pub fn of(tensors: &FileTensors, encoder_block: BlockName, decoder_block: BlockName) -> Check<Sizes> {
        let (encoder, decoder) = (levels(tensors, encoder_block, LAYERS)?, levels(tensors, decoder_block, LAYERS + 1)?);
        let [down, up] = [&encoder, &decoder].map(|levels| (levels.len(), time_scale(levels)));
        if down != up {
            return Err(format!(
                "the encoder has {} resolution levels and {} frames a latent, the decoder {} and {}; expected the same",
                down.0, down.1, up.0, up.1
            ));
        }
        let pixels = tensors.dimension("encoder.conv1.weight", 1, "input channels (those of a pixel)", MAX_PIXEL)?;
        Ok(Sizes {
            pixel_channels: [pixels, outputs(tensors, "decoder.head.2", MAX_PIXEL)?],
            latent_channels: outputs(tensors, "conv2", MAX_LATENT)?,
            // Without an axis of time it is a convolution of images.
            time_kernel: match tensors.shape("decoder.head.2.weight")? {
                [_, _, _, _] => 1,
                _ => tensors.dimension("decoder.head.2.weight", 2, "frames", 3)?,
            },
            encoder,
            decoder,
        })
    }

    /// Whether each frame is an image of its own. Convolutions over time then never run.
    pub fn is_still(&self) -> bool {
        self.time_kernel == 1
    }

    pub fn geometry(&self, patch: u64) -> Geometry {
        Geometry {
            pixel_channels: self.pixel_channels[0] / (patch * patch),
            latent_channels: self.latent_channels,
            space: patch << (self.encoder.len() - 1),
            time: if self.is_still() { 1 } else { time_scale(&self.encoder) },
            patch,
            packing: 1,
        }
    }

    /// In words.
    pub fn description(&self) -> String {
        let channels = |levels: &[Level]| levels.iter().map(|level| level.channels).collect::<Vec<u64>>();
        let [down, up] = [&self.encoder, &self.decoder].map(|levels| channels(levels));
        let ([from, to], latent) = (self.pixel_channels, self.latent_channels);
        format!("channels {down:?} and {up:?}, {from} and {to} pixel channels, {latent} latent channels")
    }

    pub fn style(&self) -> Style {
        Style {
            norm: NormKind::Pixel { trailing_axes: 3 },
            time: TimeAxis { kernel: self.time_kernel, stride: 1, first: FirstFrame::AfterZeros },
            weight_axes: 5,
            residual: ["residual.0", "residual.2", "residual.3", "residual.6", "shortcut"],
            attention: AttentionStyle {
                norm: NormKind::Pixel { trailing_axes: 2 },
                weight_axes: 4,
                names: ["norm", "proj"],
                qkv: &["to_qkv"],
            },
            middle: ["0", "1", "2"],
        }
    }
    /// The encoder behind its levels.
    pub fn finish_encoder(&self, mut graph: GraphBuilder, x: NodeId) -> Graph {
        let (style, outputs) = (self.style(), 2 * self.latent_channels);
        let x = style.middle(&mut graph, x, "encoder.middle");
        let x = style.norm_silu_conv3(&mut graph, x, ["encoder.head.0", "encoder.head.2"], outputs);
        style.conv1(&mut graph, x, "conv1", outputs);
        graph.finish()
    }

    /// The decoder before its levels.
    pub fn start_decoder(&self) -> (GraphBuilder, NodeId) {
        let style = self.style();
        let mut graph = GraphBuilder::new(self.latent_channels);
        let x = style.conv1(&mut graph, GraphBuilder::INPUT, "conv2", self.latent_channels);
        let x = style.conv3(&mut graph, x, "decoder.conv1", self.decoder[0].channels);
        let x = style.middle(&mut graph, x, "decoder.middle");
        (graph, x)
    }

    /// The decoder's last convolution.
    pub fn decoder_head(&self, graph: &mut GraphBuilder, x: NodeId) -> NodeId {
        self.style().norm_silu_conv3(graph, x, ["decoder.head.0", "decoder.head.2"], self.pixel_channels[1])
    }

    /// A level of the encoder. Its change halves the resolution, then the frame rate.
    pub fn down(&self, graph: &mut GraphBuilder, mut x: NodeId, level: u64, block_name: BlockName) -> NodeId {
        let Level { channels, resampling } = self.encoder[level as usize];
        for block in 0..LAYERS {
            x = self.style().residual(graph, x, &block_name(level, block), channels);
        }
        let Some(resampling) = resampling else { return x };
        let name = block_name(level, LAYERS);
        let half = graph.conv(x, frame_conv(format!("{name}.resample.1"), SpaceAxis::HALVING), resampling.channels);
        if !resampling.time || self.is_still() {
            return half;
        }
        graph.conv(half, self.time_conv(&name, 2, FirstFrame::PassedAndRead), resampling.channels)
    }

    /// A level of the decoder. Its change doubles the frame rate, then the resolution.
    pub fn up(&self, graph: &mut GraphBuilder, mut x: NodeId, level: u64, block_name: BlockName) -> NodeId {
        let Level { channels, resampling } = self.decoder[level as usize];
        for block in 0..=LAYERS {
            x = self.style().residual(graph, x, &block_name(level, block), channels);
        }
        let Some(resampling) = resampling else { return x };
        let name = block_name(level, LAYERS + 1);
        if resampling.time && !self.is_still() {
            let pairs = graph.conv(x, self.time_conv(&name, 1, FirstFrame::PassedAndHidden), 2 * channels);
            x = graph.unfold(pairs, 2, 1);
        }
        let large = graph.nearest(x, 2);
        graph.conv(large, frame_conv(format!("{name}.resample.1"), SpaceAxis::SAME), resampling.channels)
    }

    fn time_conv(&self, name: &str, stride: u64, first: FirstFrame) -> Conv {
        Conv {
            tensors: vec![format!("{name}.time_conv")],
            time: TimeAxis { kernel: self.time_kernel, stride, first },
            space: SpaceAxis::POINT,
            weight_axes: 5,
        }
    }
}

/// The levels of a side. Another one follows where its first block is there.
fn levels(tensors: &FileTensors, block: BlockName, layers: u64) -> Check<Vec<Level>> {
    let mut levels = vec![level_of(tensors, block, layers, 0)?];
    while levels[levels.len() - 1].resampling.is_some() && levels.len() < MAX_LEVELS as usize {
        levels.push(level_of(tensors, block, layers, levels.len() as u64)?);
    }
    Ok(levels)
}

fn level_of(tensors: &FileTensors, block: BlockName, layers: u64, level: u64) -> Check<Level> {
    let convolution = |level: u64| format!("{}.residual.2", block(level, 0));
    let change = block(level, layers);
    let resampling = if tensors.has(&format!("{}.weight", convolution(level + 1))) {
        let channels = outputs(tensors, &format!("{change}.resample.1"), MAX_CHANNELS)?;
        Some(Resampling { channels, time: tensors.has(&format!("{change}.time_conv.weight")) })
    } else {
        None
    };
    Ok(Level { channels: outputs(tensors, &convolution(level), MAX_CHANNELS)?, resampling })
}

/// Output channels of a convolution.
fn outputs(tensors: &FileTensors, name: &str, most: u64) -> Check<u64> {
    tensors.dimension(&format!("{name}.weight"), 0, "output channels", most)
}

/// Channels of a pixel at most: of 2 x 2 unshuffled pixels with an alpha channel.
const MAX_PIXEL: u64 = 16;

/// Frames of video per latent frame.
fn time_scale(levels: &[Level]) -> u64 {
    1 << levels.iter().filter(|level| level.resampling.is_some_and(|change| change.time)).count()
}
