//! A network as a paper draws it: nodes and edges, with the names of tensors. Families build graphs, `lower` compiles
//! them, the tests' oracle interprets them. Knows no layer, no plan and no device.

use crate::ir::Norm;

/// Index of a node in its graph. A node stands for the value that it computes.
pub type NodeId = usize;

/// Nodes in an order in which they can be computed. The first is the input, the last one the output.
#[derive(Debug, Clone, PartialEq)]
pub struct Graph {
    nodes: Vec<Node>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Node {
    pub op: NodeOp,
    /// The nodes whose values it reads.
    pub inputs: Vec<NodeId>,
    /// Channels of its value.
    pub channels: u64,
}

/// What a node computes. `C` is the number of channels of its value.
#[derive(Debug, Clone, PartialEq)]
pub enum NodeOp {
    Input,
    Conv(Conv),
    Norm {
        /// The tensor without its last part.
        tensor: String,
        kind: NormKind,
    },
    /// `x * sigmoid(x)`.
    Silu,
    /// The sum of two values of one shape.
    Add,
    /// Softmax attention over the pixels of each frame, with one head. The input has q, k and v side by side, in 3 C
    /// channels. Scores are divided by the square root of C.
    Attention,
    /// Channels become pixels and frames: channel `((row * side + column) * frames + frame) * C + c` becomes channel `c`.
    /// Frame 0 becomes frame 0, by the channels of the first new frame; frame t becomes the last of `frames * t + 1`.
    Unfold {
        frames: u64,
        side: u64,
    },
    /// Each pixel becomes `side` x `side` equal ones.
    Nearest {
        side: u64,
    },
    /// Blocks of `frames` x `side` x `side` are folded into channels, the mean of each run of equally many of which is a
    /// channel of the result. Folded channel: `((c * frames + frame) * side + row) * side + column`. Before the clip
    /// come `frames - 1` frames of zeros.
    FoldMean(Folding),
    /// The inverse shape: channel `((c * frames + frame) * side + row) * side + column`, divided by the number of
    /// repetitions, is the channel that is copied. The first `frames - 1` new frames are dropped.
    RepeatUnfold(Folding),
    /// Pixels are unshuffled into channels: `(c * side + column) * side + row`.
    Patch {
        side: u64,
    },
    /// The inverse of [`NodeOp::Patch`].
    Unpatch {
        side: u64,
    },
}

/// Blocks of pixels that stand for channels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Folding {
    pub frames: u64,
    pub side: u64,
    /// Whether each frame is a clip of its own, so that the frame rate stays.
    pub still: bool,
}

/// A convolution over time, rows and columns.
#[derive(Debug, Clone, PartialEq)]
pub struct Conv {
    /// Tensors without `.weight` and `.bias`. Several are stacked along the output channels.
    pub tensors: Vec<String>,
    pub time: TimeAxis,
    pub space: SpaceAxis,
    /// Axes of a weight in the checkpoint: 5, 4 without time, 2 for a matrix.
    pub weight_axes: usize,
}

/// A convolution's axis of time. Output frame f ends with input frame `stride * f`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TimeAxis {
    pub kernel: u64,
    pub stride: u64,
    pub first: FirstFrame,
}

/// What stands before a clip, and what becomes of its first frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FirstFrame {
    /// The first frame is repeated before the clip.
    Repeated,
    /// Zeros come before the clip.
    AfterZeros,
    /// Frame 0 is not convolved. Where the output has more channels than the input, they are those of frame 0 again, in
    /// the same order. Later frames read frame 0, and zeros before it.
    PassedAndRead,
    /// The same, but later frames read zeros in its place.
    PassedAndHidden,
}

/// A convolution's axes of rows and columns, which are alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SpaceAxis {
    pub kernel: u64,
    pub stride: u64,
    /// Zeros before the first pixel and after the last.
    pub padding: [u64; 2],
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum NormKind {
    /// GroupNorm with statistics of each frame; tensors `.weight` and `.bias`.
    Group { groups: u64, epsilon: f64 },
    /// `x / max(|x|, 1e-12) * sqrt(C) * gamma`, with the length of a pixel's channels; tensor `.gamma`, which has so many
    /// axes of length 1 after the channels.
    Pixel { trailing_axes: usize },
}

/// A tensor that a checkpoint must have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorShape {
    pub name: String,
    pub shape: Vec<u64>,
}

impl NormKind {
    pub const fn without_parameters(self) -> Norm {
        match self {
            NormKind::Group { groups, .. } => Norm::Group { groups },
            NormKind::Pixel { .. } => Norm::Pixel,
        }
    }
}

impl Folding {
    /// Frames of the clip that a block has.
    pub const fn rate(self) -> u64 {
        if self.still { 1 } else { self.frames }
    }
}

impl TimeAxis {
    /// Kernel 1: a frame sees itself.
    pub const POINT: TimeAxis = TimeAxis { kernel: 1, stride: 1, first: FirstFrame::Repeated };

    /// Kernel 3: a frame sees itself and the two before it.
    pub const fn causal(first: FirstFrame) -> TimeAxis {
        TimeAxis { kernel: 3, stride: 1, first }
    }

    /// Kernel 3, every second frame.
    pub const fn halving(first: FirstFrame) -> TimeAxis {
        TimeAxis { kernel: 3, stride: 2, first }
    }
}

impl SpaceAxis {
    pub const POINT: SpaceAxis = SpaceAxis { kernel: 1, stride: 1, padding: [0, 0] };
    /// 3 around each pixel.
    pub const SAME: SpaceAxis = SpaceAxis { kernel: 3, stride: 1, padding: [1, 1] };
    /// 3 at every second pixel, with a zero behind the last.
    pub const HALVING: SpaceAxis = SpaceAxis { kernel: 3, stride: 2, padding: [0, 1] };
}

impl Node {
    /// The tensors that it reads. `cin`: channels of its input.
    fn tensors(&self, cin: u64) -> Vec<TensorShape> {
        let tensor = |name: String, shape: &[u64]| TensorShape { name, shape: shape.to_vec() };
        match &self.op {
            NodeOp::Conv(conv) => {
                let cout = self.channels / conv.tensors.len() as u64;
                let weight = conv.weight_shape(cin, cout);
                let both = |name: &String| {
                    [tensor(format!("{name}.weight"), &weight), tensor(format!("{name}.bias"), &[cout])]
                };
                conv.tensors.iter().flat_map(both).collect()
            }
            NodeOp::Norm { tensor: name, kind: NormKind::Group { .. } } => {
                ["weight", "bias"].map(|part| tensor(format!("{name}.{part}"), &[cin])).into()
            }
            NodeOp::Norm { tensor: name, kind: NormKind::Pixel { trailing_axes } } => {
                let shape: Vec<u64> = [cin].into_iter().chain(std::iter::repeat_n(1, *trailing_axes)).collect();
                vec![tensor(format!("{name}.gamma"), &shape)]
            }
            _ => Vec::new(),
        }
    }
}

impl Conv {
    /// Of one of its tensors, in a checkpoint.
    pub fn weight_shape(&self, cin: u64, cout: u64) -> Vec<u64> {
        let kernel = [self.time.kernel, self.space.kernel, self.space.kernel];
        let kernel = &kernel[5usize.saturating_sub(self.weight_axes).min(3)..];
        [&[cout, cin], kernel].concat()
    }
}

impl Graph {
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    pub fn output(&self) -> NodeId {
        self.nodes.len() - 1
    }

    /// Every tensor that it reads, node by node.
    pub fn tensors(&self) -> Vec<TensorShape> {
        let of = |node: &Node| node.tensors(node.inputs.first().map_or(0, |input| self.nodes[*input].channels));
        self.nodes.iter().flat_map(of).collect()
    }

    /// The kind of the first norm, which all share.
    pub fn norm(&self) -> Option<Norm> {
        self.nodes.iter().find_map(|node| match node.op {
            NodeOp::Norm { kind, .. } => Some(kind.without_parameters()),
            _ => None,
        })
    }

    /// How many nodes read each value. The network's output counts as one more reader.
    pub fn readers(&self) -> Vec<usize> {
        let mut readers = vec![0; self.nodes.len()];
        self.nodes.iter().flat_map(|node| &node.inputs).for_each(|input| readers[*input] += 1);
        readers[self.output()] += 1;
        readers
    }
}

/// Builds a graph by calls that return the new node.
#[derive(Debug)]
pub struct GraphBuilder {
    nodes: Vec<Node>,
}

impl GraphBuilder {
    /// A graph whose only node is the input, [`GraphBuilder::INPUT`].
    pub fn new(channels: u64) -> GraphBuilder {
        GraphBuilder { nodes: vec![Node { op: NodeOp::Input, inputs: Vec::new(), channels }] }
    }

    pub const INPUT: NodeId = 0;

    pub fn channels(&self, node: NodeId) -> u64 {
        self.nodes[node].channels
    }

    fn push(&mut self, op: NodeOp, inputs: &[NodeId], channels: u64) -> NodeId {
        self.nodes.push(Node { op, inputs: inputs.to_vec(), channels });
        self.nodes.len() - 1
    }

    pub fn conv(&mut self, x: NodeId, conv: Conv, channels: u64) -> NodeId {
        self.push(NodeOp::Conv(conv), &[x], channels)
    }

    pub fn norm(&mut self, x: NodeId, tensor: impl Into<String>, kind: NormKind) -> NodeId {
        self.push(NodeOp::Norm { tensor: tensor.into(), kind }, &[x], self.channels(x))
    }

    pub fn silu(&mut self, x: NodeId) -> NodeId {
        self.push(NodeOp::Silu, &[x], self.channels(x))
    }

    pub fn add(&mut self, x: NodeId, y: NodeId) -> NodeId {
        assert_eq!(self.channels(x), self.channels(y), "an addition of two shapes");
        self.push(NodeOp::Add, &[x, y], self.channels(x))
    }

    pub fn attention(&mut self, qkv: NodeId) -> NodeId {
        self.push(NodeOp::Attention, &[qkv], self.channels(qkv) / 3)
    }

    pub fn unfold(&mut self, x: NodeId, frames: u64, side: u64) -> NodeId {
        self.push(NodeOp::Unfold { frames, side }, &[x], self.channels(x) / (frames * side * side))
    }

    pub fn nearest(&mut self, x: NodeId, side: u64) -> NodeId {
        self.push(NodeOp::Nearest { side }, &[x], self.channels(x))
    }

    pub fn fold_mean(&mut self, x: NodeId, folding: Folding, channels: u64) -> NodeId {
        self.push(NodeOp::FoldMean(folding), &[x], channels)
    }

    pub fn repeat_unfold(&mut self, x: NodeId, folding: Folding, channels: u64) -> NodeId {
        self.push(NodeOp::RepeatUnfold(folding), &[x], channels)
    }

    pub fn patch(&mut self, x: NodeId, side: u64) -> NodeId {
        self.push(NodeOp::Patch { side }, &[x], self.channels(x) * side * side)
    }

    pub fn unpatch(&mut self, x: NodeId, side: u64) -> NodeId {
        self.push(NodeOp::Unpatch { side }, &[x], self.channels(x) / (side * side))
    }

    /// The node that was added last is the output.
    pub fn finish(self) -> Graph {
        Graph { nodes: self.nodes }
    }
}
