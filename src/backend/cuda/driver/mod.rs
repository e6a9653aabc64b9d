//! The NVIDIA driver: devices, contexts, streams and memory.

pub mod context;
pub mod device;
pub mod memory;
pub mod pinned;
pub mod stream;
