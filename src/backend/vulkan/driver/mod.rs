//! Vulkan itself: the loader, devices, memory, queues, pipelines. Knows no frames.

mod bfloat16;
mod block;
mod cache;
mod context;
mod device;
mod error;
mod flags;
mod instance;
mod matrix;
mod memory;
mod pipeline;
mod queue;
mod spans;

pub use block::{DeviceBlock, HostMemory};
pub use context::Context;
pub use device::Role;
pub use flags::HostFlags;
pub use instance::Instance;
#[cfg(test)]
pub use matrix::MatrixElement;
pub use matrix::MatrixShape;
pub use pipeline::Shader;
pub use queue::{Event, LaunchSize, VulkanQueue};
pub use spans::SpanRecorder;
