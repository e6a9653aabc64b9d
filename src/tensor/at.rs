use super::{ConvLayout, Prologue};

/// Where a frame of activations lies between the layer that makes it and those that read it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum At<D, H> {
    Device(D),
    /// In host memory, where layers that work in bands reach it. The statistics of its norm stay on the device.
    Host {
        frame: H,
        statistics: D,
    },
}

impl<D, H> At<D, H> {
    pub fn is_away(&self) -> bool {
        matches!(self, At::Host { .. })
    }
}

/// The frames of a convolution in bands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BandFrames {
    /// Past ones included. None where the input is no part of the band, as it needs no norm.
    pub inputs: u64,
    pub outputs: u64,
    /// Whether the shortcut's input comes from host memory, and whether the output goes there.
    pub shortcut_away: bool,
    pub out_away: bool,
}

impl BandFrames {
    /// `frames`: where each output's shortcut comes from, if it has one, and where it goes itself.
    pub fn new<D, H>(
        layout: &ConvLayout,
        inputs: usize,
        frames: impl Iterator<Item = (Option<At<D, H>>, At<D, H>)>,
    ) -> BandFrames {
        let inputs = if layout.prologue == Prologue::None { 0 } else { inputs as u64 };
        let mut band = BandFrames { inputs, outputs: 0, shortcut_away: false, out_away: false };
        for (shortcut, out) in frames {
            band.outputs += 1;
            band.shortcut_away |= shortcut.is_some_and(|at| at.is_away());
            band.out_away |= out.is_away();
        }
        band
    }
}
