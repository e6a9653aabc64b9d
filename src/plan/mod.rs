//! From a request and a memory limit to a plan: a schedule with its bytes and its estimated time.
//!
//! A plan is a rehearsal: the run later emits the same operations into the same slots, so it takes what was planned, to
//! the byte. Knows a [`DeviceProfile`](crate::ir::DeviceProfile) and sizes, never a device.

mod arena;
mod cost;
mod exclusions;
#[allow(clippy::module_inception)]
mod plan;
mod policy;
mod repeats;
mod request;
mod schedule;
mod search;
mod spec;
mod tiles;

pub use arena::{Arena, Arenas, Slot, Slots};
pub use cost::{CostModel, Estimate, Moved, Target, WeightArrivals, WeightBytes, op_work, work};
pub use plan::Plan;
pub use policy::{Form, LayerPolicy, MAX_SLICE_LATENTS, Memory, Placement, SchedulePolicy};
pub use request::{PlanError, Request};
pub use schedule::{Next, Schedule};
pub use search::search;
pub use spec::ScheduleSpec;
pub use tiles::{Spacing, TileSize};
