//! The steps of a schedule, in the vocabulary of layers, frames and slots.

use super::slots::Slot;
use crate::model::LayerId;
use crate::tensor::{At, BandFrames, Columns, ConvLayout, FrameShape, PastAt, Sums};

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
    pub shortcut: Option<(SlotAt, u8)>,
    pub bias: u8,
    pub residual: Option<Slot>,
    pub out: SlotAt,
}

/// Weights that were fetched from host memory: the first slabs, which are all that frames need but for the first of a clip.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fetched {
    pub slot: Slot,
    pub slabs: u64,
}

/// A slot of the device's memory; or one of the host's, or none, with a slot of the device's for the statistics.
pub type SlotAt = At<Slot, Slot>;
/// Slots of the device's memory and of the host's.
pub type PastSlots = PastAt<Slot, Slot>;

/// A convolution that goes through its frames in bands of rows, so that its normalised input never lies whole on the device;
/// nor do frames that come from host memory, or go there, band by band.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Banded {
    pub layer: LayerId,
    /// Where its weights were fetched to, if they wait in host memory.
    pub weights: Option<Fetched>,
    pub input: FrameShape,
    /// Normalised frames.
    pub past: Vec<PastSlots>,
    /// Frames that are normalised on the way, if the layer has a norm.
    pub fresh: Vec<SlotAt>,
    /// Which of the fresh frames to keep once normalised, and where: in a slot of `past` only if that is on the device.
    pub keep: Vec<(usize, PastSlots)>,
    /// Which columns of past and kept frames are on the device.
    pub columns: Columns,
    /// Which of the fresh frames, that are on the device, will be made anew: where their statistics are to be kept.
    pub keep_statistics: Vec<(usize, Slot)>,
    pub frames: Vec<BandedFrame>,
    /// What makes the frames that are made anew.
    pub anew: Option<Anew>,
}

/// Frames that one layer has another make for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Anew {
    pub layer: LayerId,
    pub input: FrameShape,
    /// (input, slab) of each frame in the order of the sum, and its bias.
    pub frames: Vec<(Vec<(Slot, u8)>, u8)>,
}

/// A convolution that remembers what its frames add to the next two outputs instead of the frames.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Carrying {
    pub layer: LayerId,
    pub input: FrameShape,
    pub frames: Vec<CarryFrame>,
    /// What earlier frames carried on, if there are any.
    pub before: Option<Slot>,
    /// Where it goes with these frames, if there are later ones.
    pub after: Option<Slot>,
}

/// An input frame of a [`Carrying`] convolution and the output frame of the same number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CarryFrame {
    pub input: Slot,
    /// For the output frame of the same number, and for the next two.
    pub slabs: [u8; 3],
    pub bias: u8,
    pub out: Slot,
}

impl Banded {
    pub(super) fn frames_in_band(&self, layout: &ConvLayout) -> BandFrames {
        let frames = self.frames.iter().map(|frame| (frame.shortcut.map(|(at, _)| at), frame.out));
        let past = self.past.iter().filter(|past| past.far.is_some()).count();
        BandFrames::new(layout, (past, self.columns), &self.fresh, frames)
    }

    /// How often a frame is made anew for it.
    pub(super) fn frames_made_anew(&self) -> usize {
        let shortcuts = self.frames.iter().filter_map(|frame| frame.shortcut.map(|(at, _)| at));
        self.fresh.iter().copied().chain(shortcuts).filter(|at| at.is_anew()).count()
    }
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
    /// Brings a layer's weights from host memory.
    Fetch {
        layer: LayerId,
        into: Fetched,
    },
    Conv {
        layer: LayerId,
        /// Where they were fetched to, if they wait in host memory.
        weights: Option<Fetched>,
        input: FrameShape,
        frames: Vec<ConvFrame>,
        sums: Sums<Slot>,
    },
    Carrying(Carrying),
    Banded(Banded),
    /// What goes into `layer` is normalised: (from, to), which may be the same.
    Normalise {
        layer: LayerId,
        weights: Option<Fetched>,
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
