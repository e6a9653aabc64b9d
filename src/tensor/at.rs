use std::ops::Range;

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

/// How the columns of a frame of the past are parted: those to the left on the device, the others in host memory. Both have the column
/// on either side of the parting, so that no tile of a convolution has to look for what it sees in two places.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Columns {
    width: u64,
    parting: u64,
}

impl Columns {
    /// Tiles of every kernel begin at multiples of this, and so do partings.
    const STEP: u64 = 32;

    /// About `near` columns on the device, and no more but one; or all of them.
    pub fn new(width: u64, near: u64) -> Columns {
        Columns { width, parting: if near >= width { width } else { near / Columns::STEP * Columns::STEP } }
    }

    pub fn all_near(width: u64) -> Columns {
        Columns { width, parting: width }
    }

    /// The first column whose tile looks in host memory.
    pub fn parting(self) -> u64 {
        self.parting
    }

    pub fn is_parted(self) -> bool {
        (1..self.width).contains(&self.parting)
    }

    pub fn near(self) -> Range<u64> {
        0..if self.parting == 0 { 0 } else { (self.parting + 1).min(self.width) }
    }

    pub fn near_width(self) -> u64 {
        self.near().end
    }

    pub fn far_width(self) -> u64 {
        self.width - self.far().start
    }

    pub fn far(self) -> Range<u64> {
        if self.parting == self.width { self.width..self.width } else { self.parting.saturating_sub(1)..self.width }
    }
}

/// The frames of a convolution in bands.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct BandFrames {
    /// Fresh ones, but for those that are made anew. None where the input is no part of the band, as it needs no norm.
    pub inputs: u64,
    /// Past ones that are not whole on the device, and how many of their columns are not.
    pub past: u64,
    pub far_columns: u64,
    /// Inputs that are made anew.
    pub anew: u64,
    pub outputs: u64,
    /// Inputs of shortcuts that are not on the device.
    pub shortcuts: u64,
    /// Outputs that do not stay on the device. Those that are made for their statistics alone count as one.
    pub outs: u64,
}

impl BandFrames {
    /// `past`: how many are not whole on the device, and their columns. `frames`: where each output's shortcut comes from, if it has one, and where it
    /// goes itself.
    pub fn new<D, H>(
        layout: &ConvLayout,
        (past, columns): (usize, Columns),
        fresh: &[At<D, H>],
        frames: impl Iterator<Item = (Option<At<D, H>>, At<D, H>)>,
    ) -> BandFrames {
        let mut band = BandFrames::default();
        if layout.prologue != Prologue::None {
            band.anew = fresh.iter().filter(|at| at.is_anew()).count() as u64;
            band.inputs = fresh.len() as u64 - band.anew;
        }
        if past > 0 {
            (band.past, band.far_columns) = (past as u64, columns.far_width());
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_tile_looks_in_two_places_for_a_parted_frame() {
        for width in [1, 31, 32, 33, 64, 65, 100, 1920] {
            for near in 0..=width + 1 {
                let columns = Columns::new(width, near);
                assert!(columns.near().end <= near + 1 && columns.near().end <= width);
                for tile in [16, 32] {
                    for x in (0..width).step_by(tile as usize) {
                        let seen = x.saturating_sub(1)..(x + tile + 1).min(width);
                        let place = if x < columns.parting() { columns.near() } else { columns.far() };
                        assert!(place.start <= seen.start && seen.end <= place.end, "{width} {near} {tile} {x}");
                    }
                }
            }
        }
    }
}
