//! Pinned host memory, which the copy engines reach directly.

use std::sync::Arc;

use cudarc::driver::sys;
use memmap2::MmapMut;

use super::context::Context;
use super::error::{check, host_memory_exhausted, is_device_lost};
use super::stream::synchronise_all;
use crate::backend::gpu::{HostBlock, check_region};
use crate::error::Result;
use crate::thread_pool::{at_once, for_each, threads_for};

/// The part of a block that is faulted in before the driver begins to pin: one in so many.
const PART_AHEAD: usize = 4;

/// A block of pinned host memory; or of pageable memory, where the system allows no more to be pinned. It has to be
/// dropped before the streams that copy from and to it.
pub struct PinnedMemory {
    context: Arc<Context>,
    memory: MmapMut,
    pinned: bool,
}

impl PinnedMemory {
    pub fn new(context: &Arc<Context>, bytes: u64) -> Result<PinnedMemory> {
        let mapped = MmapMut::map_anon(bytes.max(1) as usize);
        let mut memory = mapped.map_err(|why| host_memory_exhausted(bytes, why))?;
        let answer = populate_and_register(context, &mut memory)?;
        // Everything but a lost device means that the system pins no more, and pageable memory will do.
        if is_device_lost(answer) {
            check("pinning host memory", answer)?;
        }
        Ok(PinnedMemory { context: Arc::clone(context), memory, pinned: answer == sys::CUresult::CUDA_SUCCESS })
    }
}

impl HostBlock for PinnedMemory {
    fn at(&self, offset: u64, bytes: u64) -> Result<*mut u8> {
        check_region(self.memory.len() as u64, offset, bytes)?;
        Ok(self.memory.as_ptr().cast_mut().wrapping_add(offset as usize))
    }

    fn is_pinned(&self) -> bool {
        self.pinned
    }
}

impl Drop for PinnedMemory {
    /// Waits for copies in flight. Handles share weights, so any of our streams may have some.
    fn drop(&mut self) {
        let Ok(_current) = self.context.enter() else { return };
        synchronise_all(self.context.gpu.index);
        if self.pinned {
            // SAFETY: registered in `new`.
            unsafe { sys::cuMemHostUnregister(self.memory.as_mut_ptr().cast()) };
        }
    }
}

/// Pins the memory. The driver pins pages in order. It would fault missing ones in one by one, which takes seconds for
/// the gigabytes that a tight limit offloads. So all cores fault a part in, in large pages, and the rest ahead of the
/// driver.
fn populate_and_register(context: &Arc<Context>, memory: &mut MmapMut) -> Result<sys::CUresult> {
    #[cfg(target_os = "linux")]
    let _ = memory.advise(memmap2::Advice::HugePage);
    let (address, bytes) = (memory.as_ptr().expose_provenance(), memory.len());
    let register = || {
        let _current = context.enter()?;
        // SAFETY: the block is that long, and lives until it is unregistered in drop.
        Ok(unsafe { sys::cuMemHostRegister_v2(std::ptr::with_exposed_provenance_mut(address), bytes, 0) })
    };
    let (ahead, rest) = memory.split_at_mut(bytes / PART_AHEAD);
    populate(ahead);
    let registered = at_once(vec![()], |()| register(), || populate(rest)).pop();
    // Without a thread, it is pinned now.
    registered.and_then(Result::ok).unwrap_or_else(register)
}

/// Touches every page on several threads.
fn populate(memory: &mut [u8]) {
    const PART: usize = 64 << 20;
    const PAGE: usize = 4096;
    let threads = threads_for(memory.len() / PAGE);
    for_each(
        threads,
        memory.chunks_mut(PART).collect(),
        || (),
        |(), part| {
            part.chunks_mut(PAGE).for_each(|page| {
                // SAFETY: a byte of ours. Volatile, so that writing a zero over a zero is not optimised away.
                unsafe { std::ptr::from_mut(&mut page[0]).write_volatile(0) }
            });
        },
    );
}
