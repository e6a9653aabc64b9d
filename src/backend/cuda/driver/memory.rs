//! Blocks of device memory, from the driver or from the host's allocator.

use std::sync::Arc;

use cudarc::driver::sys::{self, CUdeviceptr};

use super::context::Context;
use super::error::check;
use super::stream::{self, CudaStream};
use crate::backend::allocator::{self, DeviceAllocFn, DeviceFreeFn};
use crate::backend::gpu::{AddressedBlock, Queue};
use crate::backend::{Callbacks, DeviceAllocator};
use crate::error::{Error, Result};
use crate::ir::DeviceOffset;

/// What the driver aligns blocks to, and a host's allocator has to.
pub const BLOCK_ALIGN: u64 = 256;

/// A block of device memory, given back to its allocator when dropped.
pub struct DeviceBlock {
    context: Arc<Context>,
    allocator: DeviceAllocator,
    address: CUdeviceptr,
    bytes: u64,
}

impl DeviceBlock {
    pub fn new(context: &Arc<Context>, allocator: DeviceAllocator, bytes: u64) -> Result<DeviceBlock> {
        let _current = context.enter()?;
        let address = match allocator {
            _ if bytes == 0 => 0,
            DeviceAllocator::System => allocate_from_driver(bytes)?,
            DeviceAllocator::Host(host) => allocate_from_host(&host, context.gpu.index, bytes)?,
        };
        let block = DeviceBlock { context: Arc::clone(context), allocator, address, bytes };
        if !address.is_multiple_of(BLOCK_ALIGN) {
            return Err(Error::Argument(format!(
                "device_alloc: the host's allocator gave {bytes} bytes that are not aligned to {BLOCK_ALIGN}"
            )));
        }
        Ok(block)
    }

    /// Copies from host memory and waits.
    pub fn write<T: Copy>(&self, stream: &CudaStream, offset: u64, from: &[T]) -> Result<()> {
        self.write_all(stream, std::iter::once((offset, from)))
    }

    /// Copies pieces from host memory, each to its offset, and waits once. On a stream, because the plain copy would
    /// wait for the host's default stream, and may return before the last bytes have landed.
    pub fn write_all<'a, T: Copy + 'a>(
        &self,
        stream: &CudaStream,
        mut pieces: impl Iterator<Item = (u64, &'a [T])>,
    ) -> Result<()> {
        let _current = self.context.enter()?;
        let begun = pieces.try_for_each(|(offset, from)| {
            let bytes = size_of_val(from);
            let to = self.at(offset, bytes as u64)?;
            // SAFETY: both regions are that long, and live until the copy has ended.
            unsafe { stream.upload("copying to the GPU", from.as_ptr().cast(), to, bytes) }
        });
        // Also after a failure: the copies before it may still read.
        begun.and(stream.synchronise())
    }

    /// Copies to host memory and waits, after everything in the stream.
    pub fn read(&self, stream: &CudaStream, offset: u64, into: &mut [u8]) -> Result<()> {
        let from = self.at(offset, into.len() as u64)?;
        let _current = self.context.enter()?;
        // SAFETY: both regions are that long, and live until the copy has ended.
        unsafe { stream.download("copying from the GPU", from, into.as_mut_ptr(), into.len()) }?;
        stream.synchronise()
    }
}

impl AddressedBlock for DeviceBlock {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn address(&self, at: DeviceOffset) -> u64 {
        self.address.wrapping_add(at.0)
    }
}

fn allocate_from_driver(bytes: u64) -> Result<CUdeviceptr> {
    let mut address = 0;
    // SAFETY: a context is current.
    let answer = unsafe { sys::cuMemAlloc_v2(&mut address, bytes as usize) };
    check(&format!("allocating {bytes} bytes on the GPU"), answer)?;
    Ok(address)
}

fn allocate_from_host(host: &Callbacks<DeviceAllocFn, DeviceFreeFn>, device: u32, bytes: u64) -> Result<CUdeviceptr> {
    // SAFETY: the maker of the callbacks vouches that they may be called with these arguments.
    let block = allocator::call(|| unsafe { (host.alloc)(host.user, device as i32, bytes) });
    if block.is_null() {
        return Err(Error::Memory(format!(
            "the host's allocator refused {bytes} bytes on the GPU; lower memory_limit"
        )));
    }
    Ok(block.addr() as u64)
}

impl Drop for DeviceBlock {
    fn drop(&mut self) {
        if self.bytes == 0 {
            return;
        }
        let (current, device) = (self.context.enter(), self.context.gpu.index);
        // Handles share weights, so any of our streams may still use the block. The next owner may write at once.
        stream::synchronise_all(device);
        match self.allocator {
            DeviceAllocator::System if current.is_ok() => {
                // SAFETY: allocated in `new`, and nothing of ours touches it any more.
                unsafe { sys::cuMemFree_v2(self.address) };
            }
            DeviceAllocator::System => {}
            DeviceAllocator::Host(Callbacks { free, user, .. }) => {
                let block = std::ptr::without_provenance_mut(self.address as usize);
                // SAFETY: as above, from the same allocator.
                allocator::call(|| unsafe { free(user, device as i32, block, self.bytes) });
            }
        }
    }
}
