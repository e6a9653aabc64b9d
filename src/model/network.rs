//! A lowered network: layers and edges. A layer is a convolution with what is fused into it; an edge leads from a layer
//! to its readers. A stage is a run of layers of one resolution and frame rate. Knows no tensor's name by itself, no
//! plan and no device.

use std::ops::Range;
use std::sync::Arc;

use super::geometry::{Direction, Geometry};
use super::lower::recipes::Recipes;
use crate::ir::{CacheFormat, ConvLayout, FrameShape, LayerId, Norm, Prologue, Shape, Window};

/// A weight and its bias in a checkpoint.
#[derive(Debug, Clone, PartialEq)]
pub struct NamedWeights {
    /// Without `.weight` and `.bias`.
    pub name: String,
    /// Shape of the weight. The bias has its first dimension.
    pub shape: Vec<u64>,
    /// How many of the first outputs are multiplied by `scale`, with their biases.
    pub scaled: u64,
    pub scale: f64,
}

impl NamedWeights {
    /// Names and shapes of both tensors.
    pub fn tensors(&self) -> [(String, &[u64]); 2] {
        [(format!("{}.weight", self.name), &self.shape), (format!("{}.bias", self.name), &self.shape[..1])]
    }
}

/// The tensors of a norm in a checkpoint.
#[derive(Debug, Clone, PartialEq)]
pub enum NormTensors {
    WeightAndBias(NamedWeights),
    /// A weight alone, under its whole name.
    Gamma {
        name: String,
        shape: Vec<u64>,
    },
}

/// Where a layer's input comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Source {
    /// The network's input.
    Input,
    Layer(LayerId),
}

impl Source {
    pub fn layer(self) -> Option<LayerId> {
        if let Source::Layer(layer) = self { Some(layer) } else { None }
    }
}

/// What a layer's weights are folded from.
#[derive(Debug, Clone, PartialEq)]
pub enum LayerTensors {
    /// A convolution, and the 1x1x1 convolution of its addend.
    Conv { conv: NamedWeights, shortcut: Option<NamedWeights> },
    /// A convolution, and the 1x1x1 convolution of its output.
    Projected { conv: NamedWeights, projection: NamedWeights },
    /// Matrices whose outputs lie side by side.
    Matrices(Vec<NamedWeights>),
    /// A 1x1x1 convolution whose channels are unfolded into 2 x 2 pixels and into frames, then a convolution.
    Unfolded { upscale: NamedWeights, conv: NamedWeights },
    /// A convolution of pixels that were repeated 2 x 2 times.
    Nearest { conv: NamedWeights },
}

/// A value from before a level that is added behind it, without weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LevelShortcut {
    pub from: LayerId,
    pub map: LevelMap,
    /// Frames of the larger side that one frame of the smaller side stands for.
    pub parts: u64,
    /// Whether each frame is a clip of its own, so that the frame rate stays.
    pub still: bool,
}

/// What becomes of the value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LevelMap {
    /// The mean of 2 x 2 pixels. With `parts` times the channels: see [`crate::ir::PoolOp`].
    Mean,
    /// Each pixel becomes `side` x `side`: see [`crate::ir::AddOp`]. With side 1 it is the value as it is.
    Repeat { side: u64 },
}

impl LevelShortcut {
    /// Which part of its smaller frame a frame of the larger side is. The first of a clip is the last part.
    pub fn part(&self, frame: u64) -> u64 {
        if self.still { self.parts - 1 } else { (frame + self.parts - 1) % self.parts }
    }

    /// The frame of the smaller side that a frame of the larger side belongs to.
    pub fn smaller(&self, frame: u64) -> u64 {
        if self.still { frame } else { frame.div_ceil(self.parts) }
    }

    /// The number, among the frames that wait, of the one that is added to a frame: its own if they are means.
    pub fn waiting(&self, frame: u64) -> u64 {
        if self.map == LevelMap::Mean { frame } else { self.smaller(frame) }
    }

    /// The first frame of the value that frame `frame` of the sum reads.
    pub fn oldest(&self, frame: u64) -> u64 {
        match self.map {
            LevelMap::Mean if !self.still => (self.parts * frame).saturating_sub(self.parts - 1),
            LevelMap::Mean => frame,
            LevelMap::Repeat { .. } => self.smaller(frame),
        }
    }
}

#[derive(Debug, Clone)]
pub struct Layer {
    pub layout: ConvLayout,
    pub time: Arc<Recipes>,
    pub input: Source,
    /// Whether attention over a frame's pixels comes between its input and its convolution.
    pub attends: bool,
    /// What is added to its sum: as it is, or through a shortcut if the layout has one.
    pub addend: Option<Source>,
    /// What is added to its output, by an operation of its own.
    pub level: Option<LevelShortcut>,
    /// The norm before it.
    pub norm: Option<NormTensors>,
    pub tensors: LayerTensors,
    /// Whether a norm reads this layer's output.
    pub statistics: bool,
    /// [`CacheFormat::U8`]: outputs of a [pair](super::pair_of) read the input frames of earlier pairs in 8 bits.
    pub cache: CacheFormat,
}

impl Layer {
    /// What it is called in timelines and traces: by its first tensor.
    pub fn name(&self) -> &str {
        self.weights().next().map_or("", |first| &first.name)
    }

    /// Everything that its weights are folded from, but the norm.
    pub fn weights(&self) -> impl Iterator<Item = &NamedWeights> {
        let (first, second, parts): (_, _, &[NamedWeights]) = match &self.tensors {
            LayerTensors::Conv { conv, shortcut } => (Some(conv), shortcut.as_ref(), &[]),
            LayerTensors::Projected { conv, projection } => (Some(conv), Some(projection), &[]),
            LayerTensors::Matrices(parts) => (None, None, parts),
            LayerTensors::Unfolded { upscale, conv } => (Some(upscale), Some(conv), &[]),
            LayerTensors::Nearest { conv } => (Some(conv), None, &[]),
        };
        first.into_iter().chain(second).chain(parts)
    }

    /// The layers whose outputs it reads: as input, as residual, through a shortcut.
    pub fn sources(&self) -> impl Iterator<Item = LayerId> {
        [Some(self.input), self.addend].into_iter().flatten().filter_map(Source::layer)
    }

    /// The layer whose output it adds, as it is.
    pub fn residual(&self) -> Option<Source> {
        self.addend.filter(|_| self.layout.shortcut.is_none())
    }

    /// Whether it can run in bands, with its causal cache, if it has one, elsewhere than on the device.
    pub fn runs_in_bands(&self) -> bool {
        self.time.keeps_rate() && self.layout.window == Window::Same && self.layout.prologue != Prologue::None
    }

    /// Whether it can write its output band by band: it runs in bands, or each band of its larger output reads few rows
    /// of its input.
    fn writes_in_bands(&self) -> bool {
        self.layout.window == Window::Up || self.runs_in_bands()
    }

    /// Whether its output is larger than its input.
    pub fn expands(&self) -> bool {
        match self.layout.window {
            Window::Up => true,
            Window::Same => self.layout.cin < self.layout.cout,
            Window::Down | Window::Point => false,
        }
    }

    pub fn output_shape(&self, input: FrameShape) -> FrameShape {
        self.layout.window.output(input, self.layout.cout)
    }

    /// Multiplications for one output frame, away from the start of the clip.
    pub fn steady_work(&self, input: FrameShape) -> u64 {
        self.work(input, self.time.steady_products())
    }

    /// The same for an output frame of so many terms.
    pub fn work(&self, input: FrameShape, terms: u64) -> u64 {
        let layout = &self.layout;
        let shortcut = layout.shortcut.unwrap_or(0) * layout.window.output(input, 1).pixels();
        let taps = layout.window.taps() * layout.cin * terms;
        let pixels = input.pixels() / if layout.window == Window::Down { 4 } else { 1 };
        taps.saturating_mul(pixels).saturating_add(shortcut).saturating_mul(layout.cout)
    }
}

/// Multiplications of attention over the pixels of a frame.
pub fn attention_work(shape: FrameShape) -> u64 {
    shape.pixels().saturating_mul(shape.pixels()).saturating_mul(2 * shape.channels)
}

/// A run of layers of one resolution and frame rate. The first one changes to them, and is the only one that reads
/// another stage: the last layer of the stage before, or the network's input. Shortcuts around levels cross stages too.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stage {
    pub layers: Range<LayerId>,
}

impl Stage {
    /// The first layer.
    pub fn head(&self) -> LayerId {
        self.layers.start
    }

    /// The layers after the first. All have as many frames as its output.
    pub fn body(&self) -> Range<LayerId> {
        self.layers.start + 1..self.layers.end
    }

    pub fn last(&self) -> LayerId {
        self.layers.end - 1
    }
}

/// A layer that reads another one's output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reader {
    pub layer: LayerId,
    pub role: Role,
}

/// What a value is to the layer that reads it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    Input,
    /// Added as it is.
    Residual,
    /// Added through the 1x1x1 convolution of a shortcut.
    Shortcut,
}

/// Whether chunks of a stage have whole pairs of frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChunkPairs {
    None,
    /// Frames of a pair share products. Single frames are allowed: they take the least memory.
    Preferred,
    /// A cache in 8 bits holds whole pairs.
    Required,
}

impl ChunkPairs {
    /// Whether chunks of so many frames are changed to have whole pairs.
    pub fn are_kept(self, frames: u64) -> bool {
        match self {
            ChunkPairs::None => false,
            ChunkPairs::Preferred => frames > 1,
            ChunkPairs::Required => true,
        }
    }
}

/// What a network is told beside its layers.
pub(super) struct NetworkFacts {
    pub direction: Direction,
    pub geometry: Geometry,
    pub norm: Norm,
}

#[derive(Debug, Clone)]
pub struct Network {
    pub direction: Direction,
    pub geometry: Geometry,
    pub layers: Vec<Layer>,
    pub stages: Vec<Stage>,
    /// Of each layer, who reads its output, in the order of the layers.
    readers: Vec<Vec<Reader>>,
    /// Of each layer, the layers behind levels that its output is added to.
    levels: Vec<Vec<LayerId>>,
    /// The kind of every norm.
    pub norm: Norm,
}

impl Network {
    /// A network of these layers.
    pub(super) fn of_layers(layers: Vec<Layer>, stages: Vec<Stage>, facts: NetworkFacts) -> Network {
        let NetworkFacts { direction, geometry, norm } = facts;
        let (mut readers, mut levels) = (vec![Vec::new(); layers.len()], vec![Vec::new(); layers.len()]);
        for (id, layer) in layers.iter().enumerate() {
            let added = if layer.layout.shortcut.is_some() { Role::Shortcut } else { Role::Residual };
            for (source, role) in [(Some(layer.input), Role::Input), (layer.addend, added)] {
                if let Some(Source::Layer(from)) = source {
                    readers[from].push(Reader { layer: id, role });
                }
            }
            layer.level.iter().for_each(|level| levels[level.from].push(id));
        }
        Network { direction, geometry, layers, stages, readers, levels, norm }
    }

    /// How chunks of a stage treat pairs of frames.
    pub fn chunk_pairs(&self, stage: usize) -> ChunkPairs {
        let any = |is: fn(&Layer) -> bool| self.stages[stage].body().any(|layer| is(&self.layers[layer]));
        if any(|layer| layer.cache == CacheFormat::U8) {
            ChunkPairs::Required
        } else if any(|layer| layer.layout.pairs.is_some()) {
            ChunkPairs::Preferred
        } else {
            ChunkPairs::None
        }
    }

    /// The layers that read a layer's output, in their order.
    pub fn readers(&self, layer: LayerId) -> &[Reader] {
        &self.readers[layer]
    }

    /// The layers that a layer's output is added to around levels.
    pub fn added_around(&self, layer: LayerId) -> &[LayerId] {
        &self.levels[layer]
    }

    /// Whether a layer's output is that of its convolution alone, which only its readers read.
    fn is_plain(&self, layer: LayerId) -> bool {
        self.layers[layer].level.is_none() && self.levels[layer].is_empty()
    }

    /// Whether a layer's output need not exist whole: it is written and read band by band. An output that is written over
    /// a residual exists anyway. So does one at either end of a shortcut around a level.
    pub fn may_stream(&self, layer: LayerId) -> bool {
        let (facts, readers) = (&self.layers[layer], self.readers(layer));
        let in_bands = |reader: &Reader| reader.role != Role::Residual && self.layers[reader.layer].runs_in_bands();
        facts.writes_in_bands()
            && self.is_plain(layer)
            && facts.residual().is_none()
            && !readers.is_empty()
            && readers.iter().all(in_bands)
    }

    /// Whether no layer reads the value of `from` after `reader`.
    pub fn is_last_reader(&self, from: LayerId, reader: LayerId) -> bool {
        self.readers(from).last().is_some_and(|last| last.layer == reader)
    }

    /// Whether a layer is the last one that reads its input, so it may write over it.
    pub fn consumes_input(&self, layer: LayerId) -> bool {
        let own = &self.layers[layer];
        own.addend != Some(own.input) && own.input.layer().is_some_and(|from| self.is_last_reader(from, layer))
    }

    /// The stage that a layer belongs to.
    pub fn stage_of(&self, layer: LayerId) -> usize {
        self.stages.partition_point(|stage| stage.layers.end <= layer)
    }

    /// Whether a layer is the first one of its stage.
    pub fn is_head(&self, layer: LayerId) -> bool {
        self.stages[self.stage_of(layer)].head() == layer
    }

    /// The layer that can compute the input of `layer` again from the stage's own input: the first one of the stage, if
    /// it expands that input. So the causal cache of `layer` can be recomputed.
    pub fn recomputed_by(&self, layer: LayerId) -> Option<LayerId> {
        let head = self.stages[self.stage_of(layer)].head();
        let reads_head = layer != head && self.layers[layer].input == Source::Layer(head);
        let has_cache = self.layers[layer].time.is_causal();
        (reads_head
            && self.layers[head].level.is_none()
            && has_cache
            && self.layers[layer].runs_in_bands()
            && self.layers[head].expands())
        .then_some(head)
    }

    /// The layer that can compute hidden frames again for `layer`: the one that makes its input and nothing else, if
    /// `layer` adds what that one reads, so it is still there.
    pub fn hidden_by(&self, layer: LayerId) -> Option<LayerId> {
        let Source::Layer(first) = self.layers[layer].input else { return None };
        let keeps_input = self.layers[layer].residual() == Some(self.layers[first].input);
        let is_alone = self.readers(first).len() == 1 && self.is_plain(first) && self.layers[first].addend.is_none();
        let in_bands = [first, layer].iter().all(|layer| self.layers[*layer].runs_in_bands());
        (keeps_input && is_alone && in_bands).then_some(first)
    }

    pub fn input_channels(&self) -> u64 {
        match self.direction {
            Direction::Encode => self.geometry.patch_channels(),
            Direction::Decode => self.geometry.latent_channels,
        }
    }

    /// Channels of the output activations. The encoder's are mean and log-variance.
    pub fn output_channels(&self) -> u64 {
        self.layers.last().map_or(0, |layer| layer.layout.cout)
    }

    /// Channels of the decoder's video.
    pub fn video_channels(&self) -> u64 {
        self.output_channels() / (self.geometry.patch * self.geometry.patch)
    }

    /// Whether video of so many channels is that of the model, or lacks its alpha channel alone.
    pub fn is_video(&self, channels: u64) -> bool {
        let own = match self.direction {
            Direction::Encode => self.geometry.pixel_channels,
            Direction::Decode => self.video_channels(),
        };
        channels == own || (channels, own) == (3, 4)
    }

    /// Channels of each attention block.
    pub fn attention_channels(&self) -> Vec<u64> {
        self.layers.iter().filter(|layer| layer.attends).map(|layer| layer.layout.cin).collect()
    }

    /// The shape of an output frame for an input frame of this shape.
    pub fn output_shape(&self, input: FrameShape) -> FrameShape {
        let scale = self.geometry.scale();
        match self.direction {
            Direction::Encode => FrameShape::new(input.height / scale, input.width / scale, self.output_channels()),
            Direction::Decode => FrameShape::new(input.height * scale, input.width * scale, self.output_channels()),
        }
    }

    /// The shape of each layer's input, for network inputs of this shape.
    pub fn input_shapes(&self, input: FrameShape) -> Vec<FrameShape> {
        let mut shapes: Vec<FrameShape> = Vec::with_capacity(self.layers.len());
        for layer in &self.layers {
            let from = match layer.input {
                Source::Input => input,
                Source::Layer(from) => self.layers[from].output_shape(shapes[from]),
            };
            shapes.push(from.with_channels(layer.layout.cin));
        }
        shapes
    }

    /// Pixels of a frame at each stage, for network inputs of this shape.
    pub fn stage_pixels(&self, input: FrameShape) -> Vec<u64> {
        let shapes = self.input_shapes(input);
        self.stages.iter().map(|stage| self.layers[stage.head()].output_shape(shapes[stage.head()]).pixels()).collect()
    }

    /// Whether no stage has more pixels a frame.
    pub fn is_largest(&self, stage: usize) -> bool {
        // The input of one latent pixel: the answer is the same for all sizes.
        let side = self.latent_scale();
        let pixels = self.stage_pixels(FrameShape::new(side, side, self.input_channels()));
        pixels.iter().all(|other| *other <= pixels[stage])
    }

    /// The first stage that no other has more pixels than.
    pub fn largest_stage(&self) -> usize {
        (0..self.stages.len()).find(|stage| self.is_largest(*stage)).unwrap_or(0)
    }

    /// `inputs` frames, padded by repeating the last until the encoder ends on a whole latent frame.
    pub fn padded_frames(&self, inputs: u64) -> u64 {
        match self.direction {
            Direction::Encode => self.geometry.video_frames(self.geometry.latent_frames(inputs)),
            Direction::Decode => inputs,
        }
    }

    /// Rows of input per row of latent, and columns alike.
    pub fn latent_scale(&self) -> u64 {
        match self.direction {
            Direction::Encode => self.geometry.scale(),
            Direction::Decode => 1,
        }
    }

    /// A frame of the host's input, unpacked, and padded to whole latent pixels of the host.
    pub fn input_frame(&self, image: impl Into<FrameShape>) -> FrameShape {
        let image = image.into();
        let whole = |length: u64| match self.direction {
            Direction::Encode => length.next_multiple_of(self.geometry.packed_space()) / self.geometry.patch,
            Direction::Decode => length * self.geometry.packing,
        };
        FrameShape::new(whole(image.height), whole(image.width), self.input_channels())
    }

    /// The shape of what comes out of a clip of this shape, as the host has it: whole pixels of the host's latents.
    pub fn output(&self, input: Shape) -> Shape {
        let (geometry, space) = (&self.geometry, self.geometry.packed_space());
        let Shape { batch, channels: _, frames, height, width } = input;
        match self.direction {
            Direction::Encode => {
                let (frames, channels) = (geometry.latent_frames(frames), geometry.packed_channels());
                Shape::new(batch, channels, frames, height.div_ceil(space), width.div_ceil(space))
            }
            Direction::Decode => {
                let (frames, channels) = (geometry.video_frames(frames), self.video_channels());
                Shape::new(batch, channels, frames, height * space, width * space)
            }
        }
    }

    /// Input frames per latent frame.
    pub fn latent_rate(&self) -> u64 {
        match self.direction {
            Direction::Encode => self.geometry.time,
            Direction::Decode => 1,
        }
    }

    /// Frames that each stage computes for `inputs` frames.
    pub fn stage_frames(&self, inputs: u64) -> Vec<u64> {
        let mut count = self.padded_frames(inputs);
        let computed = self.stages.iter().map(|stage| {
            count = self.layers[stage.head()].time.outputs(count);
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
        self.stage_frames(inputs).last().copied().unwrap_or(0)
    }
}
