//! The steps of a schedule, in the vocabulary of layers, frames and slots.

use super::slots::Slot;
use crate::model::LayerId;
use crate::tensor::FrameShape;

/// One output frame of a convolution.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConvFrame {
    /// (input, slab), in the order of the sum.
    pub terms: Vec<(Slot, u8)>,
    pub bias: u8,
    pub residual: Option<Slot>,
    pub out: Slot,
}

/// Steps run one after the other; a slot may be used again by any later step once its last reader has run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Input frame `frame` of clip `batch`, the part of it that `lane` works on.
    Load {
        lane: usize,
        batch: u64,
        frame: u64,
        into: Slot,
    },
    Conv {
        layer: LayerId,
        input: FrameShape,
        frames: Vec<ConvFrame>,
    },
    /// What goes into `layer` is normalised: (from, to), which may be the same.
    Normalise {
        layer: LayerId,
        shape: FrameShape,
        frames: Vec<(Slot, Slot)>,
    },
    Attention {
        shape: FrameShape,
        frames: Vec<(Slot, Slot)>,
    },
    /// A finished frame of a tile joins the whole frame.
    Blend {
        lane: usize,
        from: Slot,
        into: Slot,
        clear: bool,
    },
    /// A finished frame goes to the host.
    Store {
        batch: u64,
        frame: u64,
        from: Slot,
    },
}
