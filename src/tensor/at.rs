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

/// The frames of a convolution in bands.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BandFrames {
    /// Fresh ones, but for those that are made anew, and past ones in host memory. None where the input is no part of the band,
    /// as it needs no norm.
    pub inputs: u64,
    /// Inputs that are made anew, and how many of these are frames of the past.
    pub anew: u64,
    pub again: u64,
    pub outputs: u64,
    /// Inputs of shortcuts that are not on the device.
    pub shortcuts: u64,
    /// Outputs that do not stay on the device. Those that are made for their statistics alone count as one.
    pub outs: u64,
}

impl BandFrames {
    /// `past`: how many come from host memory. `frames`: where each output's shortcut comes from, if it has one, and where it
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
        // There are as many fresh frames as outputs; what comes before them is of the past.
        band.again = if band.anew > 0 { (fresh.len() as u64).saturating_sub(band.outputs) } else { 0 };
        BandFrames { outs: band.outs + for_statistics, ..band }
    }

    /// The same convolution of `outputs` frames, which are no more than these. Those made anew are the last ones, or the past.
    pub fn fewer(self, outputs: u64) -> BandFrames {
        let fewer = self.outputs - outputs;
        let fewer_anew = fewer.min(self.anew - self.again);
        BandFrames {
            inputs: self.inputs.saturating_sub(fewer - fewer_anew),
            anew: self.anew - fewer_anew,
            again: self.again,
            outputs,
            shortcuts: self.shortcuts.min(outputs),
            outs: self.outs.min(outputs),
        }
    }
}
