//! Memory for frames of activations: which slot a frame gets, and where slots lie.
//!
//! Owns slots, lifetimes and offsets. Knows bytes and the order of takes and drops; knows no layer and no device.

mod pack;
mod pool;
mod size_class;
mod trace;

pub use pack::PackedLayout;
pub use pool::{Arena, Arenas, Slot, SlotKind, Slots};
