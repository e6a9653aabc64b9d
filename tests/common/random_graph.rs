//! Random models of the node kinds that backends compute. No family has such graphs: levels, widths, kernels, strides,
//! shortcuts and attention come in any order. Unit tests of the planner include this file too.

use std::borrow::Cow;

use super::random::Random;
use video_vae::internals::model::families::{Family, Model};
use video_vae::internals::model::geometry::Geometry;
use video_vae::internals::model::graph::{
    Conv, FirstFrame, Folding, Graph, GraphBuilder, NodeId, NormKind, SpaceAxis, TimeAxis,
};

/// Only what these models need of a family.
static RANDOM: Family = Family {
    name: "random",
    canonical: |names| names.iter().map(|name| Cow::Borrowed(*name)).collect(),
    is_unread: |_| false,
    model: |_| Err("a random model is no checkpoint's".into()),
    published: &[],
};

const CAUSAL: TimeAxis = TimeAxis::causal(FirstFrame::Repeated);
const AFTER_ZEROS: TimeAxis = TimeAxis::causal(FirstFrame::AfterZeros);
const PIXEL_CHANNELS: u64 = 3;

/// A model whose widths are multiples of `width`, which all groups divide.
pub fn random_model(seed: u64, width: u64) -> Model {
    let mut random = Random(seed);
    let groups = random.pick(&[1, 2, width]);
    let norm = match seed % 8 {
        1..=3 => NormKind::Pixel { trailing_axes: 3 },
        _ => NormKind::Group { groups, epsilon: 1e-6 },
    };
    let latent = random.pick(&[2, 4]);
    // Of each change of resolution, whether it also changes the frame rate. Both directions have their own order.
    let levels = random.below(3) as usize;
    let temporal = random.below(levels as u64 + 1);
    // Some networks see one frame at a time, as those of image autoencoders do. Some see zeros before the clip, and
    // change the frame rate by convolutions over time alone.
    let causal = match seed % 4 {
        1 => AFTER_ZEROS,
        3 => TimeAxis::POINT,
        _ => CAUSAL,
    };
    let temporal = if causal == TimeAxis::POINT { 0 } else { temporal };
    let order = |random: &mut Random| {
        let mut changes: Vec<bool> = (0..levels).map(|level| (level as u64) < temporal).collect();
        (1..levels).for_each(|at| changes.swap(at, random.below(at as u64 + 1) as usize));
        changes
    };
    let (down, up) = (order(&mut random), order(&mut random));
    // Some have patches of pixels at one end.
    let patch = if seed % 16 == 2 { 2 } else { 1 };
    let mut side = |side, changes: &[bool], inputs, outputs| {
        let graph = GraphBuilder::new(inputs);
        Builder { side, random: &mut random, graph, norm, width, causal, patch, convs: 0 }.graph(changes, outputs)
    };
    let encoder = side("encoder", &down, PIXEL_CHANNELS, 2 * latent);
    let decoder = side("decoder", &up, latent, PIXEL_CHANNELS);
    Model {
        family: &RANDOM,
        sizes: format!("random model {seed}"),
        geometry: Geometry {
            pixel_channels: PIXEL_CHANNELS,
            latent_channels: latent,
            space: patch << levels,
            time: 1 << temporal,
            patch,
            packing: 1,
        },
        latents: Vec::new(),
        encoder,
        decoder,
    }
}

struct Builder<'a> {
    /// What the names of its tensors begin with.
    side: &'static str,
    random: &'a mut Random,
    graph: GraphBuilder,
    norm: NormKind,
    width: u64,
    /// What its convolutions over time see.
    causal: TimeAxis,
    /// Of the pixels.
    patch: u64,
    convs: u64,
}

impl Builder<'_> {
    /// Levels with a few blocks each, and a change of resolution between them.
    fn graph(mut self, changes: &[bool], outputs: u64) -> Graph {
        let expands = self.side == "decoder";
        let width = self.any_width();
        let packs = self.patch > 1;
        let input = GraphBuilder::INPUT;
        let first = if packs && !expands { self.graph.patch(input, self.patch) } else { input };
        let mut x = self.conv(first, width, self.causal, SpaceAxis::SAME);
        for level in 0..=changes.len() {
            x = self.level(x, expands, changes.get(level).copied());
        }
        let x = if self.random.one_in(4) { x } else { self.norm_silu(x) };
        let outputs = if packs && expands { outputs * self.patch * self.patch } else { outputs };
        let x = self.conv(x, outputs, self.causal, SpaceAxis::SAME);
        if self.causal == TimeAxis::POINT && self.side == "encoder" {
            // A convolution of the output's channels, which is folded.
            self.conv(x, outputs, TimeAxis::POINT, SpaceAxis::POINT);
        }
        if packs && expands {
            self.graph.unpatch(x, self.patch);
        }
        self.graph.finish()
    }

    /// A few blocks, a change of resolution behind them if there is one, and a shortcut around both in some.
    fn level(&mut self, before: NodeId, expands: bool, change: Option<bool>) -> NodeId {
        let mut x = before;
        for _ in 0..self.random.below(4) {
            x = self.block(x);
        }
        let has_shortcut = matches!(self.norm, NormKind::Pixel { .. }) && self.random.one_in(2);
        let Some(changes_time) = change else {
            let fits = has_shortcut && x != before && self.graph.channels(x) == self.graph.channels(before);
            return if fits { self.graph.add(x, before) } else { x };
        };
        // Networks of images have the channels of blocks in time too.
        let still = self.causal == TimeAxis::POINT;
        let frames = if changes_time || still && self.random.one_in(2) { 2 } else { 1 };
        let (folding, channels) = (Folding { frames, side: 2, still }, self.graph.channels(before));
        match (expands, has_shortcut) {
            (true, false) => self.upsampler(x, changes_time, None),
            (false, false) => self.downsampler(x, changes_time, None),
            (true, true) => {
                let half = if channels.is_multiple_of(2) { channels / 2 } else { channels };
                let channels = self.random.pick(&[channels, 2 * channels, half]);
                let large = self.upsampler(x, changes_time, Some(channels));
                let around = self.graph.repeat_unfold(before, folding, channels);
                self.graph.add(large, around)
            }
            (false, true) => {
                let small = self.downsampler(x, changes_time, Some(channels * frames));
                let around = self.graph.fold_mean(before, folding, channels * frames);
                self.graph.add(around, small)
            }
        }
    }

    fn any_width(&mut self) -> u64 {
        self.width * (1 + self.random.below(3))
    }

    fn name(&mut self) -> String {
        self.convs += 1;
        format!("{}.layer{}", self.side, self.convs)
    }

    fn conv(&mut self, x: NodeId, channels: u64, time: TimeAxis, space: SpaceAxis) -> NodeId {
        let tensors = vec![self.name()];
        self.graph.conv(x, Conv { tensors, time, space, weight_axes: 5 }, channels)
    }

    fn norm_silu(&mut self, x: NodeId) -> NodeId {
        let norm = self.norm(x);
        self.graph.silu(norm)
    }

    fn norm(&mut self, x: NodeId) -> NodeId {
        let tensor = format!("{}.norm", self.name());
        self.graph.norm(x, tensor, self.norm)
    }

    fn time(&mut self) -> TimeAxis {
        if self.random.one_in(4) { TimeAxis::POINT } else { self.causal }
    }

    fn block(&mut self, x: NodeId) -> NodeId {
        match self.random.below(6) {
            // Another width, through a shortcut.
            0 => {
                let (width, hidden) = (self.any_width(), self.any_width());
                let out = self.hidden(x, hidden, width);
                let shortcut = self.conv(x, width, TimeAxis::POINT, SpaceAxis::POINT);
                self.graph.add(shortcut, out)
            }
            1 => self.attention(x),
            // One convolution that adds its own input.
            2 => {
                let (activated, time) = (self.norm_silu(x), self.time());
                let out = self.conv(activated, self.graph.channels(x), time, SpaceAxis::SAME);
                self.graph.add(x, out)
            }
            // A plain convolution.
            3 => {
                let (width, time) = (self.any_width(), self.time());
                self.conv(x, width, time, SpaceAxis::SAME)
            }
            _ => {
                let hidden = self.any_width();
                let out = self.hidden(x, hidden, self.graph.channels(x));
                self.graph.add(x, out)
            }
        }
    }

    /// Two convolutions behind norms.
    fn hidden(&mut self, x: NodeId, hidden: u64, channels: u64) -> NodeId {
        let first = self.norm_silu(x);
        let time = self.time();
        let first = self.conv(first, hidden, time, SpaceAxis::SAME);
        let second = self.norm_silu(first);
        let time = self.time();
        self.conv(second, channels, time, SpaceAxis::SAME)
    }

    fn attention(&mut self, x: NodeId) -> NodeId {
        let channels = self.graph.channels(x);
        let norm = self.norm(x);
        let tensors = match self.causal {
            AFTER_ZEROS => vec![self.name()],
            _ => vec![self.name(), self.name(), self.name()],
        };
        let point = |tensors| Conv { tensors, time: TimeAxis::POINT, space: SpaceAxis::POINT, weight_axes: 2 };
        let qkv = self.graph.conv(norm, point(tensors), 3 * channels);
        let mixed = self.graph.attention(qkv);
        let tensors = vec![self.name()];
        let out = self.graph.conv(mixed, point(tensors), channels);
        self.graph.add(x, out)
    }

    /// A convolution over time that passes the first frame on.
    fn time_conv(&mut self, x: NodeId, channels: u64, stride: u64, first: FirstFrame) -> NodeId {
        self.conv(x, channels, TimeAxis { kernel: 3, stride, first }, SpaceAxis::POINT)
    }

    /// `channels`: of the result; any if none are given.
    fn downsampler(&mut self, x: NodeId, halves_time: bool, channels: Option<u64>) -> NodeId {
        let channels = channels.unwrap_or(self.graph.channels(x));
        if halves_time && self.causal == AFTER_ZEROS {
            let small = self.conv(x, channels, TimeAxis::POINT, SpaceAxis::HALVING);
            return self.time_conv(small, channels, 2, FirstFrame::PassedAndRead);
        }
        let time = if halves_time { TimeAxis::halving(FirstFrame::Repeated) } else { TimeAxis::POINT };
        self.conv(x, channels, time, SpaceAxis::HALVING)
    }

    /// `given`: channels of the result; any if none are given.
    fn upsampler(&mut self, mut x: NodeId, doubles_time: bool, given: Option<u64>) -> NodeId {
        let (channels, frames) = (self.graph.channels(x), if doubles_time { 2 } else { 1 });
        if doubles_time && self.causal == AFTER_ZEROS {
            let both = self.time_conv(x, 2 * channels, 1, FirstFrame::PassedAndHidden);
            x = self.graph.unfold(both, 2, 1);
        }
        let by_nearest = self.causal == AFTER_ZEROS || !doubles_time && self.causal == TimeAxis::POINT;
        if by_nearest || !doubles_time && self.random.one_in(2) {
            let (nearest, channels, time) = (self.graph.nearest(x, 2), self.any_width(), self.time());
            return self.conv(nearest, given.unwrap_or(channels), time, SpaceAxis::SAME);
        }
        let wide = self.conv(x, 4 * frames * channels, TimeAxis::POINT, SpaceAxis::POINT);
        let unfolded = self.graph.unfold(wide, frames, 2);
        let channels = if self.random.one_in(3) { self.any_width() } else { channels };
        self.conv(unfolded, given.unwrap_or(channels), CAUSAL, SpaceAxis::SAME)
    }
}
