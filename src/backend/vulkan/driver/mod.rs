//! Vulkan itself: the loader, devices, memory, queues, pipelines. Knows no frames.

mod context;
mod error;
mod instance;
mod memory;
mod pipeline;
mod queue;

pub use context::Context;
pub use instance::{Instance, PhysicalDevice};
pub use memory::{DeviceBlock, MappedMemory};
pub use pipeline::Shader;
pub use queue::{Event, LaunchSize, VulkanQueue};
