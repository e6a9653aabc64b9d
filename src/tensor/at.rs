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
    /// Nowhere: layers that work in bands have it made anew, each band as they come to it. It is number `index` of those that
    /// an operation has made for it.
    Anew {
        index: usize,
        statistics: D,
    },
}

impl<D, H> At<D, H> {
    pub fn is_away(&self) -> bool {
        matches!(self, At::Host { .. })
    }

    pub fn is_anew(&self) -> bool {
        matches!(self, At::Anew { .. })
    }
}

/// Where a frame of the past lies: the left of its rows on the device, the rest in host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PastAt<D, H> {
    pub near: Option<D>,
    pub far: Option<H>,
}

/// The frames of a convolution in bands.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct BandFrames {
    /// Fresh ones, but for those that are made anew, and past ones that are not whole on the device. None where the input is no part of the band,
    /// as it needs no norm.
    pub inputs: u64,
    /// Inputs that are made anew.
    pub anew: u64,
    pub outputs: u64,
    /// Inputs of shortcuts that are not on the device.
    pub shortcuts: u64,
    /// Outputs that do not stay on the device. Those that are made for their statistics alone count as one.
    pub outs: u64,
}

impl BandFrames {
    /// `past`: how many are not whole on the device. `frames`: where each output's shortcut comes from, if it has one, and where it
    /// goes itself.
    pub fn new<D, H>(
        layout: &ConvLayout,
        past: usize,
        fresh: &[At<D, H>],
        frames: impl Iterator<Item = (Option<At<D, H>>, At<D, H>)>,
    ) -> BandFrames {
        let mut band = BandFrames::default();
        if layout.prologue != Prologue::None {
            band.anew = fresh.iter().filter(|at| at.is_anew()).count() as u64;
            band.inputs = (past + fresh.len()) as u64 - band.anew;
        }
        let mut for_statistics = 0;
        for (shortcut, out) in frames {
            band.outputs += 1;
            band.shortcuts += u64::from(shortcut.is_some_and(|at| at.is_away() || at.is_anew()));
            band.outs += u64::from(out.is_away());
            for_statistics |= u64::from(out.is_anew());
        }
        BandFrames { outs: band.outs + for_statistics, ..band }
    }
}
