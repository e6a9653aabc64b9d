//! A block of device memory, and whether regions lie in it.

use std::sync::Arc;

use ash::vk;

use super::context::Context;
use super::memory::{Buffer, check_region};
use crate::error::{Error, Result};

/// A block of device memory. Its drop waits for all queues.
pub struct DeviceBlock {
    context: Arc<Context>,
    buffer: Buffer,
    bytes: u64,
}

impl DeviceBlock {
    pub fn new(context: &Arc<Context>, bytes: u64) -> Result<DeviceBlock> {
        let doing = format!("allocating {bytes} bytes on {}", context.device.physical.name);
        let kinds = [vk::MemoryPropertyFlags::DEVICE_LOCAL];
        let buffer = Buffer::new(&context.device, bytes, &kinds, &doing).map_err(|why| match why {
            Error::Memory(text)
                if !context.device.physical.sparse && bytes > context.device.physical.largest_allocation =>
            {
                let most = context.device.physical.largest_allocation;
                Error::Memory(format!("{text}. The device allocates at most {most} bytes at a time"))
            }
            other => other,
        })?;
        Ok(DeviceBlock { context: Arc::clone(context), buffer, bytes })
    }

    pub fn buffer(&self) -> vk::Buffer {
        self.buffer.handle
    }

    /// The address of an offset, which may lie outside.
    pub fn address(&self, offset: u64) -> u64 {
        self.buffer.address.wrapping_add(offset)
    }

    /// The address of a region, checked to lie in the block.
    pub fn at(&self, offset: u64, bytes: u64) -> Result<u64> {
        self.check_region(offset, bytes)?;
        Ok(self.address(offset))
    }

    pub fn check_region(&self, offset: u64, bytes: u64) -> Result<()> {
        check_region(self.bytes, offset, bytes)
    }

    /// An error once the device is lost: other memory of it is in use by nobody.
    pub fn check_alive(&self) -> Result<()> {
        if self.context.device.is_lost() {
            return Err(Error::Device("the GPU was lost. Free all handles on it and open new ones".into()));
        }
        Ok(())
    }
}

impl Drop for DeviceBlock {
    fn drop(&mut self) {
        self.context.wait_idle();
        self.buffer.free(&self.context.device);
    }
}
