//! Where frames lie: a slot in a plan, an offset in a run.

use std::fmt::Debug;
use std::hash::Hash;
use std::ops::Range;

/// Names a frame in device memory and in host memory. Plans use slots; runs use [`Offsets`].
pub trait Location: Copy + Debug + PartialEq + Eq + 'static {
    type Device: Copy + Debug + PartialEq + Eq + Hash;
    type Host: Copy + Debug + PartialEq + Eq + Hash;
}

/// Bytes from the start of a job's device block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DeviceOffset(pub u64);

/// Bytes from the start of a job's pinned host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct HostOffset(pub u64);

/// The locations of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Offsets {}

impl Location for Offsets {
    type Device = DeviceOffset;
    type Host = HostOffset;
}

/// Where a frame lies between the layer that writes it and the layers that read it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FrameRef<L: Location> {
    Resident(L::Device),
    /// In host memory; banded convolutions stream it. Its norm statistics stay on the device.
    Offloaded {
        frame: L::Host,
        statistics: L::Device,
    },
    /// Nowhere: banded convolutions compute it again, band by band. It is frame `index` of their
    /// [`Rematerialise`](super::Rematerialise).
    Rematerialised {
        index: usize,
        statistics: L::Device,
    },
}

impl<L: Location> FrameRef<L> {
    pub fn is_offloaded(&self) -> bool {
        matches!(self, FrameRef::Offloaded { .. })
    }

    pub fn is_rematerialised(&self) -> bool {
        matches!(self, FrameRef::Rematerialised { .. })
    }
}

/// How causal caches store frames.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum CacheFormat {
    /// As they are.
    #[default]
    Exact,
    /// In 8 bits, with a scale for each [block](CacheFormat::block) of channels of a pixel. Frames are rounded by their
    /// numbers in the clip, whether or not a cache stores them.
    U8,
}

impl CacheFormat {
    pub const fn name(self) -> &'static str {
        match self {
            CacheFormat::Exact => "exact",
            CacheFormat::U8 => "u8",
        }
    }

    /// Channels that share a scale: at most 64, and a power of two if `channels` is a multiple of one.
    pub fn block(channels: u64) -> u64 {
        (1u64 << channels.trailing_zeros()).min(64)
    }
}

/// A frame of an offloaded causal cache: its left columns on the device, the others in host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CachedFrame<L: Location> {
    pub resident: Option<L::Device>,
    pub host: Option<L::Host>,
}

/// Splits the columns of a cached frame: the left ones on the device, the others in host memory. Both parts hold the
/// columns next to the split, so every tile of a convolution reads one part only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SplitColumns {
    width: u64,
    split: u64,
}

impl SplitColumns {
    /// About `resident` columns on the device. The split is a multiple of `step`, or the width.
    pub fn new(width: u64, resident: u64, step: u64) -> SplitColumns {
        SplitColumns { width, split: if resident >= width { width } else { resident / step * step } }
    }

    pub fn all_resident(width: u64) -> SplitColumns {
        SplitColumns { width, split: width }
    }

    /// The first column whose tile reads the host part.
    pub fn split(self) -> u64 {
        self.split
    }

    pub fn resident(self) -> Range<u64> {
        0..if self.split == 0 { 0 } else { (self.split + 1).min(self.width) }
    }

    pub fn host(self) -> Range<u64> {
        if self.split == self.width { self.width..self.width } else { self.split.saturating_sub(1)..self.width }
    }

    pub fn resident_width(self) -> u64 {
        self.resident().end
    }

    pub fn host_width(self) -> u64 {
        self.width - self.host().start
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn split_columns_give_every_tile_all_it_reads_in_one_part() {
        for width in [1, 31, 32, 33, 64, 65, 100, 1920] {
            for resident in 0..=width + 1 {
                let columns = SplitColumns::new(width, resident, 32);
                assert!(columns.resident().end <= resident + 1 && columns.resident().end <= width);
                for tile in [16, 32] {
                    for x in (0..width).step_by(tile as usize) {
                        let read = x.saturating_sub(1)..(x + tile + 1).min(width);
                        let part = if x < columns.split() { columns.resident() } else { columns.host() };
                        assert!(part.start <= read.start && read.end <= part.end, "{width} {resident} {tile} {x}");
                    }
                }
            }
        }
    }
}
