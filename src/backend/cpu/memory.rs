//! Blocks of host memory, from the operating system or the host's own allocator.
//! All large memory of this backend comes from here.

use std::ptr::NonNull;

use memmap2::MmapMut;

use crate::backend::allocator::{self, AllocFn, Callbacks, FreeFn};
use crate::backend::{HostAllocator, NonFinite};
use crate::error::{Error, Result};

/// A cache line, and the widest vector.
pub(super) const ALIGN: u64 = 64;

impl HostAllocator {
    /// Blocks of the system are mappings, so that a dropped one is returned to it.
    pub(super) fn block(&self, bytes: u64) -> Result<HostBlock> {
        let len = usize::try_from(bytes).ok().filter(|len| *len <= isize::MAX as usize);
        let Some(len) = len else {
            return Err(Error::Memory(format!("{bytes} bytes of host memory are more than can be addressed")));
        };
        if len == 0 {
            return Ok(HostBlock { start: NonNull::<CacheLine>::dangling().cast(), len, owner: BlockOwner::Nobody });
        }
        match self {
            HostAllocator::System => map(len),
            HostAllocator::Host(callbacks) => ask(*callbacks, len),
        }
    }
}

#[repr(align(64))]
struct CacheLine(#[allow(dead_code)] [u8; ALIGN as usize]);

fn map(len: usize) -> Result<HostBlock> {
    /// Below this, whole huge pages would be mostly empty.
    #[cfg(target_os = "linux")]
    const HUGE: usize = 4 << 20;
    let mut map = MmapMut::map_anon(len)
        .map_err(|why| Error::Memory(format!("the system refused {len} bytes of host memory: {why}")))?;
    #[cfg(target_os = "linux")]
    if len >= HUGE {
        // Advice only: without it there are more misses in the page tables.
        let _ = map.advise(memmap2::Advice::HugePage);
    }
    let start = NonNull::new(map.as_mut_ptr()).ok_or_else(|| Error::Internal("a mapping at address 0".into()))?;
    Ok(HostBlock { start, len, owner: BlockOwner::System(map) })
}

fn ask(callbacks: Callbacks<AllocFn, FreeFn>, len: usize) -> Result<HostBlock> {
    // SAFETY: the maker of the callbacks guarantees that they take these arguments.
    let start = allocator::call(|| unsafe { (callbacks.alloc)(callbacks.user, len as u64, ALIGN) });
    let Some(start) = NonNull::new(start.cast::<u8>()) else {
        return Err(Error::Memory(format!("the host's allocator refused {len} bytes")));
    };
    let block = HostBlock { start, len, owner: BlockOwner::Host(callbacks) };
    if !(start.addr().get() as u64).is_multiple_of(ALIGN) {
        return Err(Error::Memory(format!("the host's allocator returned {len} bytes not aligned to {ALIGN}")));
    }
    Ok(block)
}

enum BlockOwner {
    Nobody,
    System(#[allow(dead_code, reason = "owns the mapping")] MmapMut),
    Host(Callbacks<AllocFn, FreeFn>),
}

/// One aligned block of bytes, freed when dropped. Its initial contents are unspecified.
pub(super) struct HostBlock {
    start: NonNull<u8>,
    len: usize,
    owner: BlockOwner,
}

// SAFETY: a block owns its bytes and belongs to no thread.
unsafe impl Send for HostBlock {}
// SAFETY: shared access gives an address and a length only.
unsafe impl Sync for HostBlock {}

impl HostBlock {
    pub fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    pub fn bytes(&self) -> u64 {
        self.len as u64
    }

    /// The address of `bytes` bytes at `offset`, if they are inside the block and aligned for a frame.
    pub fn region(&self, what: &str, offset: u64, bytes: u64) -> Result<*mut f32> {
        let inside = offset.checked_add(bytes).is_some_and(|end| end <= self.bytes());
        if !inside || !offset.is_multiple_of(ALIGN) {
            return Err(Error::Internal(format!(
                "{what}: {bytes} bytes at offset {offset} of a block of {}; must lie inside, aligned to {ALIGN}",
                self.bytes()
            )));
        }
        // SAFETY: `offset` is at most the block's length.
        Ok(unsafe { self.start().add(offset as usize) }.cast())
    }
}

impl Drop for HostBlock {
    fn drop(&mut self) {
        if let BlockOwner::Host(callbacks) = &self.owner {
            // SAFETY: this block came from `alloc` of the same callbacks, with the same size, and is freed once.
            allocator::call(|| unsafe { (callbacks.free)(callbacks.user, self.start().cast(), self.len as u64) });
        }
    }
}

/// The block that holds a job's activations.
pub struct CpuMemory {
    pub(super) block: HostBlock,
    pub(super) nonfinite: NonFinite,
}

impl CpuMemory {
    pub fn bytes(&self) -> u64 {
        self.block.bytes()
    }

    #[cfg(test)]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the block is that long, mapped memory is initialised, and nobody else uses it.
        unsafe { std::slice::from_raw_parts_mut(self.block.start(), self.block.bytes() as usize) }
    }

    #[cfg(test)]
    pub fn read(&self, from: crate::ir::DeviceOffset, into: &mut [u8]) {
        let from = self.block.region("frame", from.0, into.len() as u64).unwrap().cast::<u8>();
        // SAFETY: the region is inside the block, which nobody else uses.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
    }
}

/// An address that the threads of one operation share. They write disjoint parts of its memory.
#[derive(Clone, Copy)]
pub(super) struct SharedPointer(*mut f32);

// SAFETY: an address; each use of it says why that use is sound.
unsafe impl Send for SharedPointer {}
// SAFETY: as above.
unsafe impl Sync for SharedPointer {}

impl SharedPointer {
    pub fn new(address: *mut f32) -> SharedPointer {
        SharedPointer(address)
    }

    pub fn get(self) -> *mut f32 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::c_void;
    use std::sync::atomic::{AtomicI64, Ordering};

    unsafe extern "C" fn refuse(_: *mut c_void, _: u64, _: u64) -> *mut c_void {
        std::ptr::null_mut()
    }

    unsafe extern "C" fn counted(user: *mut c_void, bytes: u64, align: u64) -> *mut c_void {
        // SAFETY: the test passes its counter.
        unsafe { &*user.cast::<AtomicI64>() }.fetch_add(bytes as i64, Ordering::SeqCst);
        let layout = std::alloc::Layout::from_size_align(bytes as usize, align as usize).unwrap();
        // SAFETY: blocks are never empty.
        unsafe { std::alloc::alloc(layout) }.cast()
    }

    unsafe extern "C" fn uncounted(user: *mut c_void, block: *mut c_void, bytes: u64) {
        // SAFETY: the test passes its counter.
        unsafe { &*user.cast::<AtomicI64>() }.fetch_sub(bytes as i64, Ordering::SeqCst);
        let layout = std::alloc::Layout::from_size_align(bytes as usize, ALIGN as usize).unwrap();
        // SAFETY: `counted` made it with the same layout.
        unsafe { std::alloc::dealloc(block.cast(), layout) };
    }

    #[test]
    fn refusals_name_the_requested_bytes() {
        let refusing = HostAllocator::Host(Callbacks { alloc: refuse, free: uncounted, user: std::ptr::null_mut() });
        let error = refusing.block(12345).err().unwrap();
        assert!(matches!(&error, Error::Memory(text) if text.contains("12345")), "{error}");
        let error = HostAllocator::System.block(1 << 60).err().unwrap();
        assert!(matches!(&error, Error::Memory(text) if text.contains(&(1u64 << 60).to_string())), "{error}");
        assert!(matches!(HostAllocator::System.block(u64::MAX), Err(Error::Memory(_))));
    }

    #[test]
    fn host_blocks_are_freed_by_the_host() {
        let count = AtomicI64::new(0);
        let user = (&raw const count).cast_mut().cast();
        let host = HostAllocator::Host(Callbacks { alloc: counted, free: uncounted, user });
        assert_ne!(host, HostAllocator::System);
        let block = host.block(1000).unwrap();
        assert_eq!(count.load(Ordering::SeqCst), 1000);
        assert_eq!(block.start().addr() % 64, 0);
        drop(block);
        assert_eq!(count.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn regions_lie_inside() {
        let block = HostAllocator::System.block(256).unwrap();
        assert!(block.region("frame", 64, 192).is_ok());
        assert!(block.region("frame", 64, 193).is_err());
        assert!(block.region("frame", 32, 4).is_err());
        assert!(block.region("frame", u64::MAX - 63, 64).is_err());
        assert_eq!(HostAllocator::System.block(0).unwrap().bytes(), 0);
    }
}
