//! How a clip is cut in time, and where what is remembered of it lies. Every cut gives the same numbers.

use crate::model::{Block, LayerId, Network, Time};
use crate::tensor::{Prologue, Window};

/// Where a layer finds its input frames of the past: the causal cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Past {
    /// In the device's memory, where they were computed.
    Device,
    /// In the host's memory, from where they come and to where they go while the layer works.
    Host,
    /// Nowhere: the head of the stage computes them again from its own, smaller input.
    Again,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cut {
    /// Input frames per slice. The first slice has one more.
    pub slice: u64,
    /// Frames that each stage computes at a time.
    pub chunks: Vec<u64>,
    /// Where each layer's past lies.
    pub past: Vec<Past>,
}

impl Cut {
    /// With everything on the device.
    pub fn new(network: &Network, slice: u64, chunks: Vec<u64>) -> Cut {
        Cut { slice, chunks, past: vec![Past::Device; network.layers.len()] }
    }
}

/// Frames of the past that a causal layer's next frame sees.
pub const PAST_FRAMES: u64 = 2;

/// Layers that can do without their past on the device, with the stage they belong to. Heads cannot: frames wait there for
/// their chunk.
pub fn movable(network: &Network) -> Vec<(usize, LayerId)> {
    let mut found = Vec::new();
    for (index, stage) in network.stages.iter().enumerate() {
        let in_blocks = stage.blocks.iter().flat_map(|block| match *block {
            Block::Residual { first, second } => [Some(first), Some(second)],
            Block::Attention { .. } => [None, None],
        });
        found.extend(in_blocks.chain([stage.tail]).flatten().map(|layer| (index, layer)));
    }
    found.retain(|(_, layer)| {
        let layer = &network.layers[*layer];
        layer.time == Time::Causal && layer.layout.window == Window::Same && layer.layout.prologue != Prologue::None
    });
    found
}

/// The layer of a stage that reads what the head makes and nothing else, if the head's output costs more to move than to
/// make: that of an upsampler.
pub fn repeatable(network: &Network, stage: usize) -> Option<LayerId> {
    let head = &network.layers[network.stages[stage].head];
    match network.stages[stage].blocks.first() {
        Some(Block::Residual { first, .. }) if head.layout.window == Window::Up => Some(*first),
        _ => None,
    }
}
