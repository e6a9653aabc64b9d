//! Checkpoints: safetensors files, checked as a whole before use and read in parts.
//! May read files. Must not know devices.

mod contents;
mod file_tensor;
mod header;
mod identity;
mod names;
mod open;
mod source;
#[cfg(test)]
pub mod testing;
#[cfg(test)]
mod tests;

pub use contents::Watch;
pub use file_tensor::FileTensor;
pub use identity::FileIdentity;
pub use names::FileTensors;
pub use open::{Checkpoint, CheckpointFile};
