//! Vulkan itself: the loader, devices, memory, queues, pipelines. Knows no frames.

mod block;
mod cache;
mod context;
mod device;
mod error;
mod instance;
mod matrix;
mod memory;
mod pipeline;
mod queue;
mod spans;

pub use block::DeviceBlock;
pub use context::Context;
pub use device::Role;
pub use instance::Instance;
pub use matrix::MatrixShape;
pub use memory::MappedMemory;
pub use pipeline::Shader;
pub use queue::{Event, LaunchSize, VulkanQueue};
pub use spans::SpanRecorder;
