//! How a clip is cut in time, and where what is remembered of it lies. Every cut gives the same numbers.

use super::Costs;
use crate::model::{Block, Layer, LayerId, Network, Time};
use crate::tensor::{Columns, FrameShape, Prologue, Window};

/// Where a layer finds its input frames of the past: the causal cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Past {
    /// In the device's memory, where they were computed.
    Device,
    /// The layer works in bands. About so many [shares](Past::SHARES) of each row, from the left, are in the device's memory too, where
    /// its fresh input then needs no second place; the rest is in the host's, from where it comes and to where it goes meanwhile. As
    /// all rows are shared alike, no band has more to wait for than the others.
    Bands { near: u8 },
    /// Nowhere: the head of the stage makes them again, band by band, from its own, smaller input.
    Again,
}

impl Past {
    /// Of a row.
    pub const SHARES: u8 = 64;
    pub const NEAR: Past = Past::Bands { near: Past::SHARES };
    pub const HOST: Past = Past::Bands { near: 0 };

    /// Whether any of it is in host memory.
    pub fn moves(self) -> bool {
        matches!(self, Past::Bands { near } if near < Past::SHARES)
    }

    /// Which columns of a frame are on the device.
    pub fn columns(self, width: u64) -> Columns {
        match self {
            Past::Bands { near } => Columns::new(width, width * u64::from(near) / u64::from(Past::SHARES)),
            Past::Device | Past::Again => Columns::all_near(width),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cut {
    /// Input frames per slice. The first slice has one more.
    pub slice: u64,
    /// Frames that each stage computes at a time.
    pub chunks: Vec<u64>,
    /// Of these, how many the head of the stage leaves on the device. It makes the others anew for each layer that reads them.
    pub stored: Vec<u64>,
    /// Where each layer's past lies.
    pub past: Vec<Past>,
    /// Of each layer, whether what it makes waits in host memory for those that read it, which then work in bands. Only in
    /// still images: these have no past that could be moved instead.
    pub away: Vec<bool>,
    /// Of each layer, whether its weights wait in host memory.
    pub weights_away: Vec<bool>,
}

impl Cut {
    /// With everything on the device.
    pub fn new(network: &Network, slice: u64, chunks: Vec<u64>) -> Cut {
        let layers = network.layers.len();
        Cut {
            slice,
            stored: chunks.clone(),
            chunks,
            past: vec![Past::Device; layers],
            away: vec![false; layers],
            weights_away: vec![false; layers],
        }
    }
}

/// Frames of the past that a causal layer's next frame sees.
pub const PAST_FRAMES: u64 = 2;

/// Layers that can do without their past on the device, with the stage they belong to. Heads cannot: frames wait there for
/// their chunk. Nor is there anything to move where what is carried on stands for the past.
pub fn movable(network: &Network, costs: &dyn Costs) -> Vec<(usize, LayerId)> {
    let mut found = Vec::new();
    for (index, stage) in network.stages.iter().enumerate() {
        found.extend(stage.body().map(|layer| (index, layer)));
    }
    found.retain(|(_, layer)| {
        let Layer { layout, time, .. } = &network.layers[*layer];
        let carries = costs.carry_bytes(layout, FrameShape::new(1, 1, layout.cin)).is_some();
        *time == Time::Causal && layout.window == Window::Same && layout.prologue != Prologue::None && !carries
    });
    found
}

/// The layer of a stage that reads what the head makes and nothing else, if that may cost more to move than to make: the head
/// makes much of little.
pub fn repeatable(network: &Network, stage: usize) -> Option<LayerId> {
    let head = &network.layers[network.stages[stage].head].layout;
    let widens = match head.window {
        Window::Up => true,
        Window::Same => head.cin < head.cout,
        Window::Down | Window::Point => false,
    };
    match network.stages[stage].blocks.first() {
        Some(Block::Residual { first, .. }) if widens => Some(*first),
        _ => None,
    }
}

/// Whether nobody needs what the head of a stage makes but the two layers of its first block: it does not flow on as the sum
/// of the blocks.
pub fn is_passing(network: &Network, stage: usize) -> bool {
    let [head, second] = [network.stages[stage].head, network.stages[stage].blocks[0].layers()[1]];
    network.layers[head].layout.window == Window::Up && network.layers[second].layout.shortcut.is_some()
}

/// Layers whose output can wait in host memory: nobody reads it but layers that can work in bands.
pub fn leavable(network: &Network) -> Vec<LayerId> {
    let residual = |block: &Block| matches!(block, Block::Residual { .. });
    let in_stage = |stage: usize| {
        let blocks = &network.stages[stage].blocks;
        let firsts = blocks.iter().filter(|block| residual(block)).map(|block| block.layers()[0]);
        let head = is_passing(network, stage).then_some(network.stages[stage].head);
        head.into_iter().chain(firsts).collect::<Vec<_>>()
    };
    (0..network.stages.len()).flat_map(in_stage).collect()
}
