//! Memory that queued work reads and writes by offset, long after it was asked to.

use std::sync::Arc;

use crate::backend::gpu::HostBlock;
use crate::error::{Error, Result};

/// A block of bytes. Clones are the same block.
#[derive(Clone)]
pub struct SharedBytes(Arc<Bytes>);

struct Bytes {
    start: *mut u8,
    len: usize,
}

// SAFETY: an address and a length. All that touches the bytes runs on one thread, by `queues`.
unsafe impl Send for Bytes {}
// SAFETY: as above.
unsafe impl Sync for Bytes {}

impl Drop for Bytes {
    fn drop(&mut self) {
        // SAFETY: leaked in `SharedBytes::new` with this length.
        drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(self.start, self.len)) });
    }
}

impl SharedBytes {
    /// Filled with NaN, so that reads of what nobody wrote show.
    pub fn new(bytes: u64) -> SharedBytes {
        let memory = Box::leak(vec![0xff_u8; bytes as usize].into_boxed_slice());
        SharedBytes(Arc::new(Bytes { start: memory.as_mut_ptr(), len: memory.len() }))
    }

    fn check(&self, offset: u64, bytes: u64) -> Result<*mut u8> {
        if offset.checked_add(bytes).is_none_or(|end| end > self.0.len as u64) {
            return Err(Error::Internal(format!("{bytes} bytes at {offset} are not in a block of {}", self.0.len)));
        }
        Ok(self.0.start.wrapping_add(offset as usize))
    }

    pub fn read(&self, offset: u64, into: &mut [u8]) {
        let from = self.check(offset, into.len() as u64).expect("work stays in its block");
        // SAFETY: that long, and nothing else runs meanwhile.
        unsafe { from.copy_to(into.as_mut_ptr(), into.len()) };
    }

    pub fn write(&self, offset: u64, from: &[u8]) {
        let to = self.check(offset, from.len() as u64).expect("work stays in its block");
        // SAFETY: as above.
        unsafe { to.copy_from(from.as_ptr(), from.len()) };
    }

    pub fn floats(&self, offset: u64, count: u64) -> Vec<f32> {
        let mut bytes = vec![0; count as usize * 4];
        self.read(offset, &mut bytes);
        bytes.as_chunks().0.iter().map(|bytes| f32::from_ne_bytes(*bytes)).collect()
    }

    pub fn write_floats(&self, offset: u64, values: &[f32]) {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
        self.write(offset, &bytes);
    }
}

impl HostBlock for SharedBytes {
    fn at(&self, offset: u64, bytes: u64) -> Result<*mut u8> {
        self.check(offset, bytes)
    }

    fn is_pinned(&self) -> bool {
        true
    }
}
