//! What the families of Wan share: sizes, blocks, and the change of resolution and frame rate.

use super::{Shapes, axis};
use video_vae::internals::model::families::blocks::{AttentionStyle, Style, frame_conv};
use video_vae::internals::model::graph::{
    Conv, FirstFrame, Graph, GraphBuilder, NodeId, NormKind, SpaceAxis, TimeAxis,
};

/// Residual blocks of an encoder level. A decoder level has one more.
pub const LAYERS: u64 = 2;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sizes {
    /// Channels that the encoder's first convolution reads and the decoder's last one gives.
    pub pixel_channels: [u64; 2],
    pub latent_channels: u64,
    /// Frames that a convolution over time sees.
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

/// The name of a level's block. The one behind the residual blocks is the change of resolution.
pub type BlockName = fn(level: u64, block: u64) -> String;

impl Sizes {
    /// None: the tensors are of another family.
    pub fn read(shapes: &Shapes, encoder_block: BlockName, decoder_block: BlockName) -> Option<Sizes> {
        let levels = |block_name: BlockName, layers: u64| -> Option<Vec<Level>> {
            let level = |level: u64| {
                let last = block_name(level, layers);
                let time = axis(shapes, &format!("{last}.time_conv"), 0).is_some();
                let resampled = axis(shapes, &format!("{last}.resample.1"), 0);
                let channels = axis(shapes, &format!("{}.residual.2", block_name(level, 0)), 0)?;
                Some(Level { channels, resampling: resampled.map(|channels| Resampling { channels, time }) })
            };
            let levels: Vec<Level> = (0..).map_while(level).collect();
            (!levels.is_empty()).then_some(levels)
        };
        Some(Sizes {
            pixel_channels: [axis(shapes, "encoder.conv1", 1)?, axis(shapes, "decoder.head.2", 0)?],
            latent_channels: axis(shapes, "conv2", 1)?,
            time_kernel: axis(shapes, "decoder.head.2", 2)?,
            encoder: levels(encoder_block, LAYERS)?,
            decoder: levels(decoder_block, LAYERS + 1)?,
        })
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
        if !resampling.time {
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
        if resampling.time {
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
