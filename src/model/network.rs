//! The layers of encoder and decoder, in order, and their tensors. Both are chains of stages of one resolution and
//! frame rate each. The head of a stage changes to them: the first convolution, a downsampler or a folded upsampler.

use super::causal::Time;
use super::config::Config;
use crate::ir::{CacheFormat, ConvLayout, DeviceProfile, FrameShape, LayerId, Prologue, Shape, Window};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    Encode,
    Decode,
}

impl Direction {
    pub const ALL: [Direction; 2] = [Direction::Encode, Direction::Decode];

    pub const fn name(self) -> &'static str {
        match self {
            Direction::Encode => "encode",
            Direction::Decode => "decode",
        }
    }
}

/// A weight and its bias in a checkpoint.
#[derive(Debug, Clone)]
pub struct NamedWeights {
    /// Without `.weight` and `.bias`.
    pub name: String,
    /// Shape of the weight. The bias has its first dimension.
    pub shape: Vec<u64>,
}

impl NamedWeights {
    fn new(name: String, shape: &[u64]) -> NamedWeights {
        NamedWeights { name, shape: shape.into() }
    }

    /// Names and shapes of both tensors.
    pub fn tensors(&self) -> [(String, &[u64]); 2] {
        [(format!("{}.weight", self.name), &self.shape), (format!("{}.bias", self.name), &self.shape[..1])]
    }
}

#[derive(Debug, Clone)]
pub struct Layer {
    pub layout: ConvLayout,
    pub time: Time,
    /// The norm before it.
    pub norm: Option<NamedWeights>,
    /// What it is folded from. [`Window::Point`]: matrices, side by side. [`Window::Up`]: a 1x1x1 convolution to 4 or 8
    /// times the channels, unfolded into space and time, then a 3x3x3 one. Others: the convolution and its shortcut.
    pub weights: Vec<NamedWeights>,
    /// Whether a norm reads this layer's output.
    pub statistics: bool,
    /// [`CacheFormat::U8`]: outputs of a [pair](super::pair_of) read the input frames of earlier pairs in 8 bits.
    pub cache: CacheFormat,
}

impl Layer {
    /// From now on by Winograd F(2,3) in time.
    fn compute_pairs(&mut self) {
        (self.time, self.layout.pairs) = (Time::Paired, true);
        self.layout.slabs = Time::Paired.slabs().len() as u64;
    }

    pub fn affine(&self) -> impl Iterator<Item = &NamedWeights> {
        self.norm.iter().chain(&self.weights)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Block {
    /// `x + second(first(x))`, or `shortcut(x) + ...` where the second layer has a shortcut.
    Residual { first: LayerId, second: LayerId },
    /// `x + project(attention(qkv(x)))`.
    Attention { qkv: LayerId, project: LayerId },
}

#[derive(Debug, Clone)]
pub struct Stage {
    pub head: LayerId,
    pub blocks: Vec<Block>,
    /// The last convolution of the network, in its last stage.
    pub tail: Option<LayerId>,
}

impl Block {
    pub fn layers(&self) -> [LayerId; 2] {
        match *self {
            Block::Residual { first, second } => [first, second],
            Block::Attention { qkv, project } => [qkv, project],
        }
    }
}

impl Stage {
    /// The layers after the head. All have as many frames as its output.
    pub fn body(&self) -> impl Iterator<Item = LayerId> + '_ {
        self.blocks.iter().flat_map(Block::layers).chain(self.tail)
    }
}

#[derive(Debug, Clone)]
pub struct Network {
    pub direction: Direction,
    pub config: Config,
    pub layers: Vec<Layer>,
    pub stages: Vec<Stage>,
}

impl Network {
    pub fn new(config: &Config, direction: Direction) -> Network {
        let network = Network { direction, config: config.clone(), layers: Vec::new(), stages: Vec::new() };
        match direction {
            Direction::Encode => network.encoder(),
            Direction::Decode => network.decoder(),
        }
    }

    /// The same in the form that a device computes: with [`Time::Paired`] where its kernels share products.
    pub fn for_device(self, profile: &DeviceProfile) -> Network {
        let network = if profile.pairs.is_some() { self.with_pairs() } else { self };
        if profile.upsampler_pairs { network.with_upsampler_pairs() } else { network }
    }

    /// The same with [`Time::Paired`] in the residual blocks of stages with two or more frames a latent. Their inputs
    /// are normalised, so sums of two frames stay in the range of a 16-bit float.
    pub fn with_pairs(mut self) -> Network {
        for layer in self.pairable_layers() {
            self.layers[layer].compute_pairs();
        }
        self
    }

    /// The same with [`Time::Paired`] in upsamplers that do not double time, in stages with two or more frames a
    /// latent.
    pub fn with_upsampler_pairs(mut self) -> Network {
        for head in self.stages_of_pairs().map(|stage| stage.head).collect::<Vec<LayerId>>() {
            let layer = &mut self.layers[head];
            if layer.layout.window == Window::Up && layer.time == Time::Causal {
                layer.compute_pairs();
            }
        }
        self
    }

    /// The same with [`CacheFormat::U8`] in the residual blocks of these stages. What follows a norm and SiLU loses
    /// little in 8 bits.
    pub fn with_u8_caches(mut self) -> Network {
        self.pairable_layers().into_iter().for_each(|layer| self.layers[layer].cache = CacheFormat::U8);
        self
    }

    /// The residual blocks' layers in stages with two or more frames a latent.
    fn pairable_layers(&self) -> Vec<LayerId> {
        let blocks = self.stages_of_pairs().flat_map(|stage| &stage.blocks);
        blocks.filter(|block| matches!(block, Block::Residual { .. })).flat_map(Block::layers).collect()
    }

    /// Stages with two or more frames a latent.
    fn stages_of_pairs(&self) -> impl Iterator<Item = &Stage> {
        let rates = self.later_stage_frames(self.latent_rate());
        self.stages.iter().zip(rates).filter(|(_, frames)| *frames > 1).map(|(stage, _)| stage)
    }

    /// Whether frames of a stage share products by pairs.
    pub fn has_pairs(&self, stage: usize) -> bool {
        self.stages[stage].blocks.iter().any(|block| self.layers[block.layers()[0]].layout.pairs)
    }

    /// Whether chunks of a stage must not cut pairs: a cache in 8 bits holds whole pairs.
    pub fn needs_pairs(&self, stage: usize) -> bool {
        self.stages[stage].blocks.iter().any(|block| self.layers[block.layers()[0]].cache == CacheFormat::U8)
    }

    pub fn input_channels(&self) -> u64 {
        match self.direction {
            Direction::Encode => Config::PIXEL_CHANNELS,
            Direction::Decode => self.config.latent,
        }
    }

    /// Channels of the output activations. The encoder's are mean and log-variance.
    pub fn output_channels(&self) -> u64 {
        match self.direction {
            Direction::Encode => 2 * self.config.latent,
            Direction::Decode => Config::PIXEL_CHANNELS,
        }
    }

    /// Channels of each attention block.
    pub fn attention_channels(&self) -> Vec<u64> {
        let blocks = self.stages.iter().flat_map(|stage| &stage.blocks);
        let width = |block: &Block| match *block {
            Block::Residual { .. } => None,
            Block::Attention { project, .. } => Some(self.layers[project].layout.cin),
        };
        blocks.filter_map(width).collect()
    }

    /// The shape of an output frame for an input frame of this shape.
    pub fn output_shape(&self, input: FrameShape) -> FrameShape {
        let scale = self.config.spatial_scale();
        match self.direction {
            Direction::Encode => FrameShape::new(input.height / scale, input.width / scale, self.output_channels()),
            Direction::Decode => FrameShape::new(input.height * scale, input.width * scale, self.output_channels()),
        }
    }

    /// The shape of each layer's input, for network inputs of this shape.
    pub fn input_shapes(&self, input: FrameShape) -> Vec<FrameShape> {
        let mut shapes = vec![input; self.layers.len()];
        let mut x = input;
        for stage in &self.stages {
            shapes[stage.head] = x;
            x = self.output_of(stage.head, x);
            for block in &stage.blocks {
                let [first, second] = block.layers();
                shapes[first] = x;
                x = x.with_channels(self.layers[second].layout.cin);
                shapes[second] = x;
                x = self.output_of(second, x);
            }
            if let Some(tail) = stage.tail {
                shapes[tail] = x;
                x = self.output_of(tail, x);
            }
        }
        shapes
    }

    fn output_of(&self, layer: LayerId, input: FrameShape) -> FrameShape {
        let layout = &self.layers[layer].layout;
        layout.window.output(input, layout.cout)
    }

    /// `inputs` frames, padded by repeating the last until the encoder ends on a whole latent frame.
    pub fn padded_frames(&self, inputs: u64) -> u64 {
        match self.direction {
            Direction::Encode => self.config.video_frames(self.config.latent_frames(inputs)),
            Direction::Decode => inputs,
        }
    }

    /// Rows of input per row of latent, and columns alike.
    pub fn latent_scale(&self) -> u64 {
        match self.direction {
            Direction::Encode => self.config.spatial_scale(),
            Direction::Decode => 1,
        }
    }

    /// The frames of an input of this shape, padded to whole latent pixels.
    pub fn input_frame(&self, input: Shape) -> FrameShape {
        let whole = |length: u64| length.next_multiple_of(self.latent_scale());
        FrameShape::new(whole(input.height), whole(input.width), self.input_channels())
    }

    /// Input frames per latent frame.
    pub fn latent_rate(&self) -> u64 {
        match self.direction {
            Direction::Encode => self.config.time_scale(),
            Direction::Decode => 1,
        }
    }

    /// Frames that each stage computes for `inputs` frames.
    pub fn stage_frames(&self, inputs: u64) -> Vec<u64> {
        let mut count = self.padded_frames(inputs);
        let computed = self.stages.iter().map(|stage| {
            count = self.layers[stage.head].time.outputs(count);
            count
        });
        computed.collect()
    }

    /// Frames that each stage computes for `inputs` frames after the first.
    pub fn later_stage_frames(&self, inputs: u64) -> Vec<u64> {
        let [first, all] = [1, 1 + inputs].map(|frames| self.stage_frames(frames));
        all.iter().zip(first).map(|(all, first)| all - first).collect()
    }

    pub fn output_frames(&self, inputs: u64) -> u64 {
        *self.stage_frames(inputs).last().expect("a network has stages")
    }

    fn encoder(mut self) -> Network {
        let channels = self.config.channels.clone();
        let last = channels.len() - 1;
        let mut head = self.conv("encoder.conv_in", Config::PIXEL_CHANNELS, channels[0], Window::Same, Time::Causal);
        let mut cin = channels[0];
        for (level, &cout) in channels.iter().enumerate() {
            let mut blocks = Vec::new();
            for j in 0..self.config.layers {
                blocks.push(self.residual(&format!("encoder.down_blocks.{level}.resnets.{j}"), cin, cout));
                cin = cout;
            }
            if level < last {
                self.end_stage(head, blocks);
                let time = if self.config.halves_time(level) { Time::Halve } else { Time::Still };
                let name = format!("encoder.down_blocks.{level}.downsamplers.0.conv");
                head = self.conv(&name, cin, cin, Window::Down, time);
            } else {
                blocks.extend(self.middle("encoder.mid_block", cin));
                self.end_network(head, blocks, "encoder", cin);
            }
        }
        self
    }

    fn decoder(mut self) -> Network {
        let channels: Vec<u64> = self.config.channels.iter().rev().copied().collect();
        let last = channels.len() - 1;
        let mut head = self.conv("decoder.conv_in", self.config.latent, channels[0], Window::Same, Time::Causal);
        let mut cin = channels[0];
        for (level, &cout) in channels.iter().enumerate() {
            let mut blocks = if level == 0 { self.middle("decoder.mid_block", cin) } else { Vec::new() };
            for j in 0..=self.config.layers {
                blocks.push(self.residual(&format!("decoder.up_blocks.{level}.resnets.{j}"), cin, cout));
                cin = cout;
            }
            if level < last {
                self.end_stage(head, blocks);
                head = self.upsampler(&format!("decoder.up_blocks.{level}.upsamplers.0"), cin, level);
            } else {
                self.end_network(head, blocks, "decoder", cin);
            }
        }
        self
    }

    fn push(
        &mut self,
        layout: ConvLayout,
        time: Time,
        norm: Option<NamedWeights>,
        weights: Vec<NamedWeights>,
    ) -> LayerId {
        self.layers.push(Layer { layout, time, norm, weights, statistics: true, cache: CacheFormat::Exact });
        self.layers.len() - 1
    }

    fn layout(&self, cin: u64, cout: u64, window: Window, time: Time, prologue: Prologue) -> ConvLayout {
        ConvLayout {
            cin,
            cout,
            window,
            prologue,
            slabs: time.slabs().len() as u64,
            shortcut: None,
            biases: time.biases().len() as u64,
            groups: self.config.groups,
            pairs: false,
        }
    }

    fn conv(&mut self, name: &str, cin: u64, cout: u64, window: Window, time: Time) -> LayerId {
        let depth = if time == Time::Still { 1 } else { 3 };
        let weights = vec![NamedWeights::new(name.into(), &[cout, cin, depth, 3, 3])];
        self.push(self.layout(cin, cout, window, time, Prologue::None), time, None, weights)
    }

    /// A causal convolution after a norm.
    fn norm_conv(&mut self, [norm, conv]: [String; 2], cin: u64, cout: u64) -> LayerId {
        let layout = self.layout(cin, cout, Window::Same, Time::Causal, Prologue::NormSilu);
        let (norm, weights) = (NamedWeights::new(norm, &[cin]), vec![NamedWeights::new(conv, &[cout, cin, 3, 3, 3])]);
        self.push(layout, Time::Causal, Some(norm), weights)
    }

    fn residual(&mut self, name: &str, cin: u64, cout: u64) -> Block {
        let first = self.norm_conv(["norm1", "conv1"].map(|part| format!("{name}.{part}")), cin, cout);
        let second = self.norm_conv(["norm2", "conv2"].map(|part| format!("{name}.{part}")), cout, cout);
        if cin != cout {
            let layer = &mut self.layers[second];
            layer.layout.shortcut = Some(cin);
            layer.weights.push(NamedWeights::new(format!("{name}.conv_shortcut"), &[cout, cin, 1, 1, 1]));
        }
        Block::Residual { first, second }
    }

    fn middle(&mut self, name: &str, channels: u64) -> Vec<Block> {
        let before = self.residual(&format!("{name}.resnets.0"), channels, channels);
        let layout = |cout, prologue| self.layout(channels, cout, Window::Point, Time::Still, prologue);
        let (into, out) = (layout(3 * channels, Prologue::Norm), layout(channels, Prologue::None));
        let part = |part: &str| format!("{name}.attentions.0.{part}");
        let matrix = |name: &str| NamedWeights::new(part(name), &[channels, channels]);
        let norm = NamedWeights::new(part("group_norm"), &[channels]);
        let qkv = self.push(into, Time::Still, Some(norm), ["to_q", "to_k", "to_v"].map(matrix).into());
        self.layers[qkv].statistics = false;
        let project = self.push(out, Time::Still, None, vec![matrix("to_out.0")]);
        let after = self.residual(&format!("{name}.resnets.1"), channels, channels);
        vec![before, Block::Attention { qkv, project }, after]
    }

    fn upsampler(&mut self, name: &str, channels: u64, level: usize) -> LayerId {
        let (time, frames) = if self.config.doubles_time(level) { (Time::Double, 2) } else { (Time::Causal, 1) };
        let upscale = NamedWeights::new(format!("{name}.upscale_conv"), &[4 * frames * channels, channels, 1, 1, 1]);
        let conv = NamedWeights::new(format!("{name}.conv"), &[channels, channels, 3, 3, 3]);
        self.push(self.layout(channels, channels, Window::Up, time, Prologue::None), time, None, vec![upscale, conv])
    }

    /// The next head has no norm before it, so the statistics of this stage's last layer are not needed.
    fn end_stage(&mut self, head: LayerId, blocks: Vec<Block>) {
        let last = blocks.last().map_or(head, |block| block.layers()[1]);
        self.layers[last].statistics = false;
        self.stages.push(Stage { head, blocks, tail: None });
    }

    fn end_network(&mut self, head: LayerId, blocks: Vec<Block>, name: &str, cin: u64) {
        let names = ["conv_norm_out", "conv_out"].map(|part| format!("{name}.{part}"));
        let tail = self.norm_conv(names, cin, self.output_channels());
        self.layers[tail].statistics = false;
        self.stages.push(Stage { head, blocks, tail: Some(tail) });
    }
}
