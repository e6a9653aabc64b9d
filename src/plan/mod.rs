//! From a shape and a limit to a schedule and its bytes. Knows no device: what things cost is told by [`Costs`].
//!
//! A plan is made by rehearsing the schedule: the run later takes the same steps with the same slots, so what it takes
//! is what was planned, to the byte.

mod anew;
mod banded;
mod blueprint;
mod clip;
mod cut;
mod estimate;
mod job;
mod layers;
mod report;
mod search;
mod slots;
mod step;
mod tiles;
mod weights;
mod work;

pub use blueprint::Blueprint;
pub use cut::{Cut, Past};
pub use job::{Job, Layout, Order, Region, Remembered, Wait};
pub use report::{Bytes, Plan};
pub use search::{Request, Unplannable, Way};
pub use slots::{Pools, Slot, SlotPool};
pub use step::{Anew, Banded, BandedFrame, CarryFrame, Carrying, ConvFrame, Fetched, PastSlots, SlotAt, Step};
pub use tiles::{Grid, Spacing, TileSize};
pub use weights::WeightBytes;

use crate::tensor::{BandFrames, ConvLayout, FrameShape, Rates};

/// What frames and steps cost.
pub trait Costs: Sync {
    /// Pixels that keep the device busy; chunks of more take memory and gain nothing.
    fn busy_pixels(&self) -> u64;
    /// Bytes of a frame of activations.
    fn frame_bytes(&self, shape: FrameShape) -> u64;
    /// Bytes of a convolution's weights.
    fn weight_bytes(&self, layout: &ConvLayout) -> u64;
    fn conv_scratch(&self, layout: &ConvLayout, input: FrameShape, frames: u64) -> u64;
    fn attention_scratch(&self, shape: FrameShape, frames: u64) -> u64;
    /// Whether a convolution takes its input as it is and normalises on the way. If not, a step before it does.
    fn fuses_norm(&self, layout: &ConvLayout) -> bool;
    /// Whether a convolution may write its output over the frame that it adds to it.
    fn adds_in_place(&self) -> bool;
    /// Bytes that the bands of a convolution of such frames take: the more output frames, the fewer rows. It will do for fewer frames
    /// in bands of as many rows. `None` where these cannot lie anywhere but on the device.
    fn band_bytes(&self, layout: &ConvLayout, input: FrameShape, frames: BandFrames) -> Option<u64>;
    /// Bytes of the sums that a convolution leaves for its next frame, where these stand for its past.
    fn sums_bytes(&self, _: &ConvLayout, _: FrameShape) -> Option<u64> {
        None
    }

    /// Bytes of what a convolution carries on to its next frames, where that stands for its past.
    fn carry_bytes(&self, _: &ConvLayout, _: FrameShape) -> Option<u64> {
        None
    }
    /// Bytes that have to lie before the bands in a job's memory, where frames of this shape are made in parts.
    fn bytes_above_parts(&self, _: FrameShape) -> u64 {
        0
    }
    /// What a frame of the host's passes through, on the device and on the host alike.
    fn staging_bytes(&self, shape: FrameShape) -> u64;
    /// Scratch for the fades of tiles that are blended into a frame.
    fn fade_bytes(&self, _: FrameShape) -> u64 {
        0
    }
    /// What a device gives for a block of `bytes`, if it rounds up.
    fn block_bytes(&self, bytes: u64) -> u64 {
        bytes
    }
    /// What it takes on the device to reach so much memory of the host's.
    fn mapping_bytes(&self, _: u64) -> u64 {
        0
    }
    fn rates(&self) -> Rates;
}
