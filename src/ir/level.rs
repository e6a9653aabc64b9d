//! Operations of shortcuts around whole levels: values without weights, added behind a change of resolution and rate.
//! Frames are whole and resident, and carry no statistics.

use super::op::relocate_frame;
use super::{Access, FrameShape, Location, Relocate};
use crate::error::Result;

/// Means of 2 x 2 pixels. Channel c of the input becomes channel `c * parts + part` of an output with
/// `parts` times as many channels. A mean is that of the first row, then of the second: `(((a + b) + c) + d) / 4` in f32.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolOp<L: Location> {
    /// Shape of the input frames.
    pub input: FrameShape,
    pub parts: u64,
    pub frames: Vec<PooledFrame<L>>,
}

/// One input frame. The parts of an output frame may come from several, one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PooledFrame<L: Location> {
    pub from: L::Device,
    pub into: L::Device,
    pub part: u64,
    /// Whether the channels of all other parts become 0. Otherwise they stay.
    pub clear: bool,
}

/// Adds to each frame a smaller one, whose channels are repeated in pixels and frames. Channel `o` of pixel (y, x) adds
/// channel `(((o * parts + part) * side + y % side) * side + x % side) / repeats` of pixel (y / side, x / side).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AddOp<L: Location> {
    /// Shape of an output frame.
    pub shape: FrameShape,
    pub repeat: Repeat,
    pub frames: Vec<AddedFrame<L>>,
}

/// How the channels of an addend are repeated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Repeat {
    /// Channels of the addend.
    pub channels: u64,
    pub side: u64,
    /// Frames that one frame of the addend serves, after the first frame of a clip.
    pub parts: u64,
}

/// `out = x + addend`. `out` is `x`, or overlaps neither.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AddedFrame<L: Location> {
    pub x: L::Device,
    pub addend: L::Device,
    pub part: u64,
    pub out: L::Device,
}

impl<L: Location> PoolOp<L> {
    /// Shape of the output frames.
    pub fn output(&self) -> FrameShape {
        FrameShape::new(self.input.height / 2, self.input.width / 2, self.input.channels * self.parts)
    }

    pub(super) fn relocate<M: Location>(&self, to: &mut impl Relocate<L, M>) -> Result<PoolOp<M>> {
        let frames = self.frames.iter().map(|frame| {
            // What stays of the output is read.
            let access = if frame.clear { Access::Write } else { Access::Read };
            let from = relocate_frame(frame.from, Access::Read, to)?;
            let into = relocate_frame(frame.into, access, to)?;
            Ok(PooledFrame { from, into, part: frame.part, clear: frame.clear })
        });
        Ok(PoolOp { input: self.input, parts: self.parts, frames: frames.collect::<Result<_>>()? })
    }
}

impl<L: Location> AddOp<L> {
    /// Shape of an addend.
    pub fn addend(&self) -> FrameShape {
        let Repeat { channels, side, .. } = self.repeat;
        FrameShape::new(self.shape.height / side, self.shape.width / side, channels)
    }

    /// Elements of the output that an element of the addend is added to, with all parts.
    pub fn repeats(&self) -> u64 {
        let Repeat { channels, side, parts } = self.repeat;
        self.shape.channels * parts * side * side / channels
    }

    pub(super) fn relocate<M: Location>(&self, to: &mut impl Relocate<L, M>) -> Result<AddOp<M>> {
        let frames = self.frames.iter().map(|frame| {
            let x = relocate_frame(frame.x, Access::Read, to)?;
            let addend = relocate_frame(frame.addend, Access::Read, to)?;
            Ok(AddedFrame { x, addend, part: frame.part, out: relocate_frame(frame.out, Access::Write, to)? })
        });
        Ok(AddOp { shape: self.shape, repeat: self.repeat, frames: frames.collect::<Result<_>>()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::Offsets;

    #[test]
    fn channels_are_repeated_as_published() {
        let of = |channels, shape, parts| {
            let repeat = Repeat { channels, side: 2, parts };
            AddOp::<Offsets> { shape: FrameShape::new(4, 6, shape), repeat, frames: Vec::new() }
        };
        assert_eq!([of(8, 8, 2), of(8, 4, 1), of(8, 4, 2)].map(|op| op.repeats()), [8, 2, 4]);
        assert_eq!(of(8, 4, 2).addend(), FrameShape::new(2, 3, 8));
        let pool = PoolOp::<Offsets> { input: FrameShape::new(4, 6, 8), parts: 2, frames: Vec::new() };
        assert_eq!(pool.output(), FrameShape::new(2, 3, 16));
    }
}
