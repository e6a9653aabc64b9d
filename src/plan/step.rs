//! The steps of a schedule, in the vocabulary of layers, frames and slots.

use super::slots::{Slot, Worker};
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

/// One output frame of a [`Banded`] convolution.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BandedFrame {
    /// (input, slab), in the order of the sum. Inputs are counted: first the past, then the fresh ones.
    pub terms: Vec<(usize, u8)>,
    /// Input and slab of the shortcut, which comes last in the sum.
    pub shortcut: Option<(Slot, u8)>,
    pub bias: u8,
    pub residual: Option<Slot>,
    pub out: Slot,
}

/// A convolution that goes through its frames in bands of rows: past frames come from the host's memory and the newest
/// go there band by band, so that neither they nor the normalised input ever lie whole on the device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Banded {
    pub layer: LayerId,
    pub input: FrameShape,
    /// Normalised frames in the pool of the past.
    pub past: Vec<Slot>,
    /// Frames that are normalised on the way.
    pub fresh: Vec<Slot>,
    /// Which of the fresh frames go to the pool of the past once normalised, and where. None of these slots is in `past`.
    pub keep: Vec<(usize, Slot)>,
    pub frames: Vec<BandedFrame>,
}

/// Steps run one after the other; a slot may be used again by any later step once its last reader has run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// What comes now is for this worker. With `waits` it waits for what the other one marked last.
    Turn {
        worker: Worker,
        waits: bool,
    },
    /// The current worker has come so far that the other one may go on.
    Mark,
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
    Banded(Banded),
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
