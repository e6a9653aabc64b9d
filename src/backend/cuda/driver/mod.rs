//! The NVIDIA driver API: devices, contexts, streams, memory, modules, and what its answers mean.
//! Knows bytes and kernels; knows no tensor, no layer and no CUDA graph.

mod arch;
mod bundle;
mod context;
mod device;
mod discovery;
mod error;
mod event;
mod flags;
mod host_copies;
mod memory;
mod module;
mod pinned;
mod spans;
mod stream;

pub use arch::{ARCH_VARIABLE, KernelArch};
pub use bundle::Bundle;
pub use context::{Context, Current};
pub use device::{Gpu, driver_version, ready};
pub use discovery::{devices, uuid};
pub use error::check;
pub use event::Event;
pub use flags::HostFlags;
pub use host_copies::{CopySide, HostCopies, MAX_PITCH, pitched_copy};
pub use memory::{BLOCK_ALIGN, DeviceBlock};
#[cfg(test)]
pub use module::testing;
pub use module::{Kernel, Module};
pub use pinned::{PART, PinnedMemory, keep_at_most, kept_bytes};
pub use spans::SpanRecorder;
pub use stream::{CudaStream, check_not_captured};
