//! Memory that queues use: of the device, and of the host.

use std::ops::Deref;
use std::sync::Arc;

use ash::vk;

use super::context::Context;
use super::memory::{Buffer, MappedMemory};
use crate::backend::gpu::{AddressedBlock, HostBlock};
use crate::error::{Error, Result};
use crate::ir::DeviceOffset;

/// Its drop waits for all queues, then frees the memory.
pub struct Shared<M> {
    memory: M,
    context: Arc<Context>,
}

pub type DeviceBlock = Shared<Buffer>;
/// Host memory that the device reaches.
pub type HostMemory = Shared<MappedMemory>;

impl<M> Deref for Shared<M> {
    type Target = M;

    fn deref(&self) -> &M {
        &self.memory
    }
}

impl<M> Drop for Shared<M> {
    fn drop(&mut self) {
        self.context.wait_idle();
    }
}

impl DeviceBlock {
    pub fn new(context: &Arc<Context>, bytes: u64) -> Result<DeviceBlock> {
        let physical = &context.device.physical;
        let doing = format!("allocating {bytes} bytes on {}", physical.name);
        let memory = Buffer::new(&context.device, bytes, &[vk::MemoryPropertyFlags::DEVICE_LOCAL], &doing);
        let memory = memory.map_err(|why| match why {
            Error::Memory(text) if !physical.features.sparse && bytes > physical.largest_allocation => {
                let most = physical.largest_allocation;
                Error::Memory(format!("{text}. The device allocates at most {most} bytes at a time"))
            }
            other => other,
        })?;
        Ok(Shared { memory, context: Arc::clone(context) })
    }
}

impl AddressedBlock for DeviceBlock {
    fn bytes(&self) -> u64 {
        self.memory.bytes
    }

    fn address(&self, at: DeviceOffset) -> u64 {
        self.memory.address.wrapping_add(at.0)
    }

    /// Other memory of a lost device is in use by nobody.
    fn check_alive(&self) -> Result<()> {
        if self.context.device.is_lost() {
            return Err(Error::Device("the GPU was lost. Free all handles on it and open new ones".into()));
        }
        Ok(())
    }
}

impl HostMemory {
    pub fn new(context: &Arc<Context>, bytes: u64) -> Result<HostMemory> {
        Ok(Shared { memory: MappedMemory::new(&context.device, bytes)?, context: Arc::clone(context) })
    }
}

impl HostBlock for HostMemory {
    fn at(&self, offset: u64, bytes: u64) -> Result<*mut u8> {
        self.memory.at(offset, bytes)
    }

    /// Vulkan has no other.
    fn is_pinned(&self) -> bool {
        true
    }
}
