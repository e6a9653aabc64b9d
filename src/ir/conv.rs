//! The shape of a convolution, and of the weights it needs. Model and backend meet here.

use std::ops::Range;

use super::FrameShape;
use crate::error::Result;

/// Index of a layer in its network, and of its weights.
pub type LayerId = usize;

/// Which pixels of the input an output pixel of a convolution sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Window {
    /// The pixel itself.
    Point,
    /// 3 x 3 around it, zeros outside the image.
    Same,
    /// 3 x 3 at every second pixel, from (2y, 2x) on; one row of zeros below the image, one column right of it.
    Down,
    /// Four interleaved convolutions with 2 x 2 taps each make an output twice as high and wide. Output pixel
    /// (2y + r, 2x + s) is phase 2r + s; its tap (i, j) sees input pixel (y + r + i - 1, x + s + j - 1), zeros outside.
    Up,
}

impl Window {
    pub const fn phases(self) -> u64 {
        if matches!(self, Window::Up) { 4 } else { 1 }
    }

    /// Taps of one phase, in rows and columns alike.
    pub const fn side(self) -> u64 {
        match self {
            Window::Point => 1,
            Window::Same | Window::Down => 3,
            Window::Up => 2,
        }
    }

    /// Taps of all phases together.
    pub const fn taps(self) -> u64 {
        self.phases() * self.side() * self.side()
    }

    /// Rows and columns of the output for an input of this size.
    pub const fn output(self, input: FrameShape, channels: u64) -> FrameShape {
        match self {
            Window::Point | Window::Same => FrameShape::new(input.height, input.width, channels),
            Window::Down => FrameShape::new(input.height / 2, input.width / 2, channels),
            Window::Up => FrameShape::new(input.height * 2, input.width * 2, channels),
        }
    }
}

/// What happens to an input on its way into a convolution.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Prologue {
    None,
    /// The layout's [`Norm`], by the statistics stored with the frame if it has some.
    Norm,
    /// The norm, then SiLU.
    NormSilu,
}

/// The kind of a network's norms.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Norm {
    /// GroupNorm with statistics of each frame, which its producer gathers.
    Group { groups: u64 },
    /// Each pixel by the length of its channels, `x / max(|x|, 1e-12) * weight`. It needs no statistics and has no bias.
    Pixel,
}

impl Norm {
    /// Groups whose statistics a frame carries.
    pub const fn groups(self) -> u64 {
        match self {
            Norm::Group { groups } => groups,
            Norm::Pixel => 0,
        }
    }
}

/// Slabs of pairs of output frames that share products. A frame of a pair has three terms, oldest first. Two of them
/// have the shared slabs, and the same inputs in both frames. The third has the frame's own slab.
///
/// With d1 and d2 the shared inputs, d0 the oldest and d3 the newest, the first frame is the sum of shared slab 0
/// (d1 + d2), shared slab 1 (d2 - d1) and its own (d0 - d2); the second of (d1 + d2), (d1 - d2) and its own (d1 - d3).
/// With [`Window::Up`] frames are not normalised, and their sums might leave the range of a 16-bit float. So each sum
/// and difference is halved there, and the slabs are twice as large.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PairSlabs {
    pub shared: [u8; 2],
    /// Of a pair's first frame, whose first term it is; of its second frame, whose last term it is.
    pub own: [u8; 2],
}

impl PairSlabs {
    pub fn contains(self, slab: u64) -> bool {
        self.shared.into_iter().chain(self.own).any(|own| u64::from(own) == slab)
    }
}

/// The shape of a convolution's weights.
///
/// A convolution over time is a sum of convolutions of single frames, each with a *slab* of weights of its own. Which
/// frames and slabs make an output frame is up to the caller, so repeated first frames and unfolded time cost
/// nothing here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ConvLayout {
    pub cin: u64,
    pub cout: u64,
    pub window: Window,
    pub prologue: Prologue,
    /// Number of slabs. Slab order in memory: phase, tap row, tap column, input channel, output channel.
    pub slabs: u64,
    /// Input channels of the shortcut, a [`Window::Point`] slab without prologue that comes after the others.
    pub shortcut: Option<u64>,
    /// Number of bias vectors a frame can choose from. With [`Window::Up`] each is 4 phases x 4 edges x `cout`;
    /// edge 0 is inside, 1 in the phase's outer row, 2 in its outer column, 3 in both.
    pub biases: u64,
    /// The prologue's norm, and that of whoever reads the output.
    pub norm: Norm,
    /// The slabs of pairs, if pairs of output frames share products.
    pub pairs: Option<PairSlabs>,
    /// The slab of a clip's first frame, where that has one of its own: the sum of all temporal taps. The frame has one
    /// term, and no other frame has the slab.
    pub first_frame_slab: Option<u8>,
}

impl ConvLayout {
    /// Elements of one bias vector with all its phases and edges.
    pub const fn bias_elements(&self) -> u64 {
        self.cout * if matches!(self.window, Window::Up) { 16 } else { 1 }
    }
}

/// A block of a convolution's weights: some input and some output channels of every slab, or of the shortcut.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WeightBlock {
    pub shortcut: bool,
    pub inputs: Range<u64>,
    pub outputs: Range<u64>,
}

impl WeightBlock {
    pub const fn rows(&self) -> u64 {
        self.inputs.end - self.inputs.start
    }

    pub const fn columns(&self) -> u64 {
        self.outputs.end - self.outputs.start
    }

    /// The same input channels, and output channels that are so many later.
    pub fn later_outputs(&self, by: u64) -> WeightBlock {
        WeightBlock { outputs: self.outputs.start + by..self.outputs.end + by, ..self.clone() }
    }

    /// The slabs that it is a block of.
    pub const fn slabs(&self, layout: &ConvLayout) -> Range<u64> {
        if self.shortcut { layout.slabs..layout.slabs + 1 } else { 0..layout.slabs }
    }

    /// Taps of a slab, of all phases together.
    pub const fn taps(&self, layout: &ConvLayout) -> u64 {
        if self.shortcut { 1 } else { layout.window.taps() }
    }

    pub const fn slab_elements(&self, layout: &ConvLayout) -> u64 {
        self.taps(layout) * self.rows() * self.columns()
    }

    /// A convolution's weights in blocks of at most so many channels.
    pub fn all(layout: &ConvLayout, inputs: u64, outputs: u64) -> Vec<WeightBlock> {
        let cut = |all: u64, step: u64| (0..all).step_by(step as usize).map(move |at| at..all.min(at + step));
        let mut blocks = Vec::new();
        for (shortcut, cin) in [(false, layout.cin), (true, layout.shortcut.unwrap_or(0))] {
            for outputs in cut(layout.cout, outputs) {
                blocks.extend(cut(cin, inputs).map(|inputs| WeightBlock {
                    shortcut,
                    inputs,
                    outputs: outputs.clone(),
                }));
            }
        }
        blocks
    }
}

/// What is written at a time when a convolution's weights are prepared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WeightPart {
    Block(WeightBlock),
    /// Biases, and weight and bias of the norm.
    Vectors,
}

/// Gives weights block by block, so that no more than one of them need exist in plain form. Fails where memory runs out
/// or the file cannot be read.
pub trait ConvSource {
    /// Calls `each` with every slab's number and its block, slab after slab. Order: that of a slab.
    fn block(&mut self, block: &WeightBlock, each: &mut EachSlab) -> Result<()>;
    /// All bias vectors.
    fn biases(&mut self, into: &mut [f32]) -> Result<()>;
    /// Weight and bias of the norm in the prologue; not called when there is none. A bias that the norm lacks is 0.
    fn norm(&mut self, gamma: &mut [f32], beta: &mut [f32]) -> Result<()>;
}

pub type EachSlab<'a> = dyn FnMut(u64, &[f32]) -> Result<()> + 'a;
