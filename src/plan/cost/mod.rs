//! What things take: bytes of frames and buffers, multiplications, seconds.
//!
//! Owns all arithmetic over [`DeviceProfile`](crate::ir::DeviceProfile) and [`Sizes`](crate::ir::Sizes). Decides
//! nothing.

mod buffers;
mod estimate;
mod sizes;
mod work;

pub use buffers::BufferBytes;
pub use estimate::{CostModel, Estimate, Moved, OffloadCost, WeightArrivals};
pub use sizes::{FrameSizes, Target, WeightBytes, fetchable_weights};
pub use work::{op_work, work};
