//! The blocks that families share. A family's style says which norm, which axis of time and which names they have.

use crate::model::checkpoint::FileTensors;
use crate::model::graph::{Conv, GraphBuilder, NodeId, NormKind, SpaceAxis, TimeAxis};
use crate::safetensors::Check;

/// Bounds of what a file may ask for.
pub(super) const MAX_LEVELS: u64 = 8;
pub(super) const MAX_LAYERS: u64 = 16;
pub(super) const MAX_CHANNELS: u64 = 16384;
pub(super) const MAX_LATENT: u64 = 1024;

const DEFAULT_GROUPS: u64 = 32;

/// Groups of every norm, which must divide the channels of every level.
pub(super) fn norm_groups(tensors: &FileTensors, channels: &[u64]) -> Check<u64> {
    let (groups, source) = match tensors.metadata_number("norm_num_groups")? {
        Some(groups) => (groups, "in the file's metadata"),
        None => (DEFAULT_GROUPS, "assumed, as the file's metadata has none"),
    };
    match channels.iter().position(|c| groups == 0 || c % groups != 0) {
        None => Ok(groups),
        Some(level) => Err(format!(
            "norm_num_groups is {groups} ({source}), expected a divisor of every level's channels; level {level} has {}",
            channels[level]
        )),
    }
}

/// What differs between families in blocks that are otherwise the same. Names are parts of a block's tensor names.
#[derive(Debug, Clone, Copy)]
pub struct Style {
    pub norm: NormKind,
    /// Of 3x3 convolutions.
    pub time: TimeAxis,
    /// Of the weights of 3x3 and 1x1 convolutions.
    pub weight_axes: usize,
    /// Of a residual block: norm, convolution, norm, convolution, shortcut.
    pub residual: [&'static str; 5],
    pub attention: AttentionStyle,
    /// Residual block, attention, residual block.
    pub middle: [&'static str; 3],
}

#[derive(Debug, Clone, Copy)]
pub struct AttentionStyle {
    pub norm: NormKind,
    pub weight_axes: usize,
    /// The norm and the last matrix.
    pub names: [&'static str; 2],
    /// q, k and v: three matrices, or one with all.
    pub qkv: &'static [&'static str],
}

impl Style {
    /// 3x3, or 3x3x3 where the style has such a kernel in time.
    pub fn conv3(&self, graph: &mut GraphBuilder, x: NodeId, name: impl Into<String>, channels: u64) -> NodeId {
        let (time, weight_axes) = (self.time, self.weight_axes);
        graph.conv(x, Conv { tensors: vec![name.into()], time, space: SpaceAxis::SAME, weight_axes }, channels)
    }

    /// 1x1, or 1x1x1.
    pub fn conv1(&self, graph: &mut GraphBuilder, x: NodeId, name: impl Into<String>, channels: u64) -> NodeId {
        graph.conv(x, matrix(vec![name.into()], self.weight_axes), channels)
    }

    /// Norm, SiLU and [`Style::conv3`].
    pub fn norm_silu_conv3(&self, graph: &mut GraphBuilder, x: NodeId, names: [&str; 2], channels: u64) -> NodeId {
        let normed = graph.norm(x, names[0], self.norm);
        let active = graph.silu(normed);
        self.conv3(graph, active, names[1], channels)
    }

    pub fn residual(&self, graph: &mut GraphBuilder, x: NodeId, name: &str, channels: u64) -> NodeId {
        let [norm1, conv1, norm2, conv2, shortcut] = self.residual.map(|part| format!("{name}.{part}"));
        let inner = self.norm_silu_conv3(graph, x, [&norm1, &conv1], channels);
        let inner = self.norm_silu_conv3(graph, inner, [&norm2, &conv2], channels);
        let around = if graph.channels(x) == channels { x } else { self.conv1(graph, x, shortcut, channels) };
        graph.add(around, inner)
    }

    pub fn attention(&self, graph: &mut GraphBuilder, x: NodeId, name: &str) -> NodeId {
        let AttentionStyle { norm: kind, weight_axes, names, qkv } = self.attention;
        let [norm, last] = names.map(|part| format!("{name}.{part}"));
        let tensors = qkv.iter().map(|part| format!("{name}.{part}")).collect();
        let channels = graph.channels(x);
        let normed = graph.norm(x, norm, kind);
        let qkv = graph.conv(normed, matrix(tensors, weight_axes), 3 * channels);
        let mixed = graph.attention(qkv);
        let inner = graph.conv(mixed, matrix(vec![last], weight_axes), channels);
        graph.add(x, inner)
    }

    /// Residual block, attention, residual block.
    pub fn middle(&self, graph: &mut GraphBuilder, x: NodeId, name: &str) -> NodeId {
        let [before, attention, after] = self.middle.map(|part| format!("{name}.{part}"));
        let channels = graph.channels(x);
        let x = self.residual(graph, x, &before, channels);
        let x = self.attention(graph, x, &attention);
        self.residual(graph, x, &after, channels)
    }
}

fn matrix(tensors: Vec<String>, weight_axes: usize) -> Conv {
    Conv { tensors, time: TimeAxis::POINT, space: SpaceAxis::POINT, weight_axes }
}

/// 3x3 in each frame. The weight has no axis of time.
pub fn frame_conv(name: String, space: SpaceAxis) -> Conv {
    Conv { tensors: vec![name], time: TimeAxis::POINT, space, weight_axes: 4 }
}
