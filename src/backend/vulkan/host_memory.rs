//! Host memory that the device reaches, and words there that kernels set.

use std::sync::Arc;

use super::driver::{Context, MappedMemory};
use crate::backend::gpu::{HostBlock, NonFiniteFlag, NonFiniteFlags};
use crate::error::Result;

/// A block of host memory that the device reaches. Its drop waits for all queues.
pub struct HostMemory {
    context: Arc<Context>,
    /// There until the drop.
    memory: Option<MappedMemory>,
}

impl HostMemory {
    pub fn new(context: &Arc<Context>, bytes: u64) -> Result<HostMemory> {
        Ok(HostMemory { memory: Some(MappedMemory::new(&context.device, bytes)?), context: Arc::clone(context) })
    }

    pub fn memory(&self) -> &MappedMemory {
        self.memory.as_ref().expect("there until the drop")
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        self.context.wait_idle();
        if let Some(memory) = self.memory.take() {
            memory.free(&self.context.device);
        }
    }
}

impl HostBlock for HostMemory {
    fn at(&self, offset: u64, bytes: u64) -> Result<*mut u8> {
        self.memory().at(offset, bytes)
    }

    /// Vulkan has no other.
    fn is_pinned(&self) -> bool {
        true
    }
}

/// Words of host memory that kernels set.
pub struct HostFlags(HostMemory);

impl HostFlags {
    const WORDS: usize = 2;

    pub fn new(context: &Arc<Context>) -> Result<HostFlags> {
        let memory = HostMemory::new(context, (Self::WORDS * size_of::<u32>()) as u64)?;
        let words = memory.at(0, (Self::WORDS * size_of::<u32>()) as u64)?;
        // SAFETY: as many bytes, which no kernel knows yet.
        unsafe { words.cast::<[u32; HostFlags::WORDS]>().write_volatile([0; HostFlags::WORDS]) };
        Ok(HostFlags(memory))
    }

    /// The address of a word for kernels.
    pub fn address(&self, flag: NonFiniteFlag) -> u64 {
        self.0.memory().address() + flag as u64 * size_of::<u32>() as u64
    }
}

impl NonFiniteFlags for HostFlags {
    fn take(&mut self, flag: NonFiniteFlag) -> bool {
        let Ok(words) = self.0.at(0, (Self::WORDS * size_of::<u32>()) as u64) else { return false };
        let word = words.cast::<u32>().wrapping_add(flag as usize);
        // SAFETY: a word of ours. Volatile, as kernels write it too.
        unsafe {
            let is_set = word.read_volatile() != 0;
            word.write_volatile(0);
            is_set
        }
    }
}
