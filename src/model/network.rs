//! The layers of encoder and decoder, in order, and their tensors. Both are chains of stages. A stage has one
//! resolution and one frame rate. Its head is the convolution that changes to them: the first one, a downsampler or a
//! folded upsampler.

use super::causal::Time;
use super::config::Config;
use crate::ir::{ConvLayout, FrameShape, LayerId, Prologue, Window};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    Encode,
    Decode,
}

/// The checkpoint tensors of a layer, by the name before `.weight` and `.bias`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Tensors {
    /// A convolution, the norm before it, and the 1x1x1 shortcut added to it.
    Conv { conv: String, norm: Option<String>, shortcut: Option<String> },
    /// A 1x1x1 convolution to 4 or 8 times the channels, unfolded into space and time, then a 3x3x3 convolution.
    Upsampler { upscale: String, conv: String },
    /// The concatenated projections `.to_q`, `.to_k` and `.to_v`, after `.group_norm`.
    Qkv { attention: String },
    /// The projection after attention.
    Project { attention: String },
}

#[derive(Debug, Clone)]
pub struct Layer {
    pub layout: ConvLayout,
    pub time: Time,
    pub tensors: Tensors,
    /// Whether a norm reads this layer's output.
    pub statistics: bool,
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

    /// Channels of the input activations.
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

    /// Output frames of `inputs` frames.
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

    fn push(&mut self, layout: ConvLayout, time: Time, tensors: Tensors) -> LayerId {
        self.layers.push(Layer { layout, time, tensors, statistics: true });
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
        }
    }

    fn conv(&mut self, name: &str, cin: u64, cout: u64, window: Window, time: Time) -> LayerId {
        let tensors = Tensors::Conv { conv: name.into(), norm: None, shortcut: None };
        self.push(self.layout(cin, cout, window, time, Prologue::None), time, tensors)
    }

    fn residual(&mut self, name: &str, cin: u64, cout: u64) -> Block {
        let layout = |cin| self.layout(cin, cout, Window::Same, Time::Causal, Prologue::NormSilu);
        let tensors = |conv: &str, norm: &str, shortcut: Option<String>| Tensors::Conv {
            conv: format!("{name}.{conv}"),
            norm: Some(format!("{name}.{norm}")),
            shortcut,
        };
        let shortcut = (cin != cout).then_some(cin);
        let (one, two) = (layout(cin), ConvLayout { shortcut, ..layout(cout) });
        let shortcut = shortcut.map(|_| format!("{name}.conv_shortcut"));
        let first = self.push(one, Time::Causal, tensors("conv1", "norm1", None));
        let second = self.push(two, Time::Causal, tensors("conv2", "norm2", shortcut));
        Block::Residual { first, second }
    }

    fn middle(&mut self, name: &str, channels: u64) -> Vec<Block> {
        let before = self.residual(&format!("{name}.resnets.0"), channels, channels);
        let attention = format!("{name}.attentions.0");
        let layout = |cout, prologue| self.layout(channels, cout, Window::Point, Time::Still, prologue);
        let (into, out) = (layout(3 * channels, Prologue::Norm), layout(channels, Prologue::None));
        let qkv = self.push(into, Time::Still, Tensors::Qkv { attention: attention.clone() });
        self.layers[qkv].statistics = false;
        let project = self.push(out, Time::Still, Tensors::Project { attention });
        let after = self.residual(&format!("{name}.resnets.1"), channels, channels);
        vec![before, Block::Attention { qkv, project }, after]
    }

    fn upsampler(&mut self, name: &str, channels: u64, level: usize) -> LayerId {
        let time = if self.config.doubles_time(level) { Time::Double } else { Time::Causal };
        let tensors = Tensors::Upsampler { upscale: format!("{name}.upscale_conv"), conv: format!("{name}.conv") };
        self.push(self.layout(channels, channels, Window::Up, time, Prologue::None), time, tensors)
    }

    /// The next head has no norm before it, so the statistics of this stage's last layer are not needed.
    fn end_stage(&mut self, head: LayerId, blocks: Vec<Block>) {
        let last = match blocks.last() {
            None => head,
            Some(Block::Residual { second, .. }) => *second,
            Some(Block::Attention { project, .. }) => *project,
        };
        self.layers[last].statistics = false;
        self.stages.push(Stage { head, blocks, tail: None });
    }

    fn end_network(&mut self, head: LayerId, blocks: Vec<Block>, name: &str, cin: u64) {
        let layout = self.layout(cin, self.output_channels(), Window::Same, Time::Causal, Prologue::NormSilu);
        let tensors = Tensors::Conv {
            conv: format!("{name}.conv_out"),
            norm: Some(format!("{name}.conv_norm_out")),
            shortcut: None,
        };
        let tail = self.push(layout, Time::Causal, tensors);
        self.layers[tail].statistics = false;
        self.stages.push(Stage { head, blocks, tail: Some(tail) });
    }
}
