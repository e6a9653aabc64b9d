//! Words of host memory that kernels set, so that the host learns of them without a copy.

use std::sync::Arc;

use cudarc::driver::sys::{self, CUdeviceptr};

use super::context::Context;
use super::error::check;
use super::stream;
use crate::backend::gpu::{NonFiniteFlag, NonFiniteFlags};
use crate::error::Result;

const WORDS: usize = 2;

pub struct HostFlags {
    context: Arc<Context>,
    host: *mut [u32; WORDS],
    device: CUdeviceptr,
}

// SAFETY: it owns the words; kernels and [`HostFlags::take`] access them whole.
unsafe impl Send for HostFlags {}

impl HostFlags {
    pub fn new(context: &Arc<Context>) -> Result<HostFlags> {
        let _current = context.enter()?;
        let mut words = std::ptr::null_mut();
        let mapped = sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: a context is current.
        let answer = unsafe { sys::cuMemHostAlloc(&mut words, size_of::<[u32; WORDS]>(), mapped) };
        check("allocating flags in host memory", answer)?;
        let mut flags = HostFlags { context: Arc::clone(context), host: words.cast(), device: 0 };
        // SAFETY: allocated above, for these words.
        unsafe { flags.host.write_volatile([0; WORDS]) };
        // SAFETY: mapped memory of this context.
        let answer = unsafe { sys::cuMemHostGetDevicePointer_v2(&mut flags.device, words, 0) };
        check("mapping flags in host memory", answer)?;
        Ok(flags)
    }

    /// The address of a word for kernels.
    pub fn at(&self, flag: NonFiniteFlag) -> u64 {
        self.device + flag as u64 * size_of::<u32>() as u64
    }
}

impl NonFiniteFlags for HostFlags {
    fn take(&mut self, flag: NonFiniteFlag) -> bool {
        let word = self.host.cast::<u32>().wrapping_add(flag as usize);
        // SAFETY: a word of ours. Volatile, as kernels write it too.
        unsafe {
            let set = word.read_volatile() != 0;
            word.write_volatile(0);
            set
        }
    }
}

impl Drop for HostFlags {
    fn drop(&mut self) {
        if let Ok(_current) = self.context.enter() {
            // A call on a host's stream may have left kernels behind that write the words.
            stream::synchronise_all(self.context.gpu.index);
            // SAFETY: allocated in `new`, and no kernel writes it any more.
            unsafe { sys::cuMemFreeHost(self.host.cast()) };
        }
    }
}
