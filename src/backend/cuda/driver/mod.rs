//! The NVIDIA driver API: devices, contexts, streams, memory, modules, and what its answers mean.
//! Knows bytes and kernels; knows no tensor, no layer and no CUDA graph.

pub mod context;
pub mod device;
pub mod discovery;
pub mod error;
pub mod event;
pub mod memory;
pub mod module;
pub mod pinned;
pub mod stream;
