//! Vulkan itself: the loader, devices, memory, queues, pipelines. Knows no frames.

mod context;
mod error;
mod instance;
mod matrix;
mod memory;
mod pipeline;
mod queue;
mod spans;

pub use context::{Context, Role};
pub use instance::Instance;
pub use matrix::MatrixShape;
pub use memory::{DeviceBlock, MappedMemory};
pub use pipeline::Shader;
pub use queue::{Event, LaunchSize, VulkanQueue};
pub use spans::SpanRecorder;
