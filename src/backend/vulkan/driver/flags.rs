//! Words of host memory that kernels set.

use std::sync::Arc;

use super::block::HostMemory;
use super::context::Context;
use crate::backend::gpu::{HostBlock, NonFiniteFlag, NonFiniteFlags};
use crate::error::Result;

const WORD_BYTES: u64 = size_of::<u32>() as u64;

pub struct HostFlags(HostMemory);

impl HostFlags {
    pub fn new(context: &Arc<Context>) -> Result<HostFlags> {
        let mut flags = HostFlags(HostMemory::new(context, 2 * WORD_BYTES)?);
        // A word that was taken is zero.
        flags.take(NonFiniteFlag::Loaded);
        flags.take(NonFiniteFlag::Stored);
        Ok(flags)
    }

    /// The address of a word for kernels.
    pub fn address(&self, flag: NonFiniteFlag) -> u64 {
        self.0.address() + flag as u64 * WORD_BYTES
    }
}

impl NonFiniteFlags for HostFlags {
    fn take(&mut self, flag: NonFiniteFlag) -> bool {
        let Ok(word) = self.0.at(flag as u64 * WORD_BYTES, WORD_BYTES) else { return false };
        let word = word.cast::<u32>();
        // SAFETY: a word of ours. Volatile, as kernels write it too.
        unsafe {
            let is_set = word.read_volatile() != 0;
            word.write_volatile(0);
            is_set
        }
    }
}
