//! What a host is told of plans and operations: plans in numbers and in words, timelines and traces as JSON, names of
//! operations.
//!
//! Reads plans; decides nothing and changes nothing.

mod numbers;
mod operations;
mod text;
mod timeline;
mod trace;

pub use numbers::{DeviceDivision, DeviceReport, Part, PlanReport};
pub use operations::{op_frames, op_name};
pub use text::Bytes;
pub use timeline::{PlanLimits, timeline};
pub use trace::{Trace, TracedDevice, TracedOp};
