//! What a tensor is to this crate: an element type, a five-dimensional shape, and a strided view of somebody's memory.

mod at;
mod conv;
mod dtype;
mod host_memory;
mod rates;
mod shape;
mod sums;
mod view;

pub use at::{At, BandFrames, Columns, PastAt};
pub use conv::{ConvLayout, ConvSource, Prologue, Window};
pub use dtype::DType;
pub use host_memory::HostMemory;
pub use rates::Rates;
pub use shape::{AXES, FrameShape, Shape};
pub use sums::{Onward, Sums};
pub use view::{Place, View};
