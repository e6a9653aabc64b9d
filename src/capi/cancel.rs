//! Cancel requests, one slot per handle. Signal handlers write them: no lock, no allocation.

use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering::SeqCst};

/// No handle has these numbers.
const FREE: usize = 0;
const CLOSED: usize = usize::MAX;

struct CancelEntry {
    /// The number of the handle, `CLOSED` or `FREE`.
    handle: AtomicUsize,
    /// Requests that are using the slot. It is not given to another handle meanwhile.
    readers: AtomicUsize,
    requested: AtomicBool,
}

const BLOCK_SLOTS: usize = 64;

/// Blocks are never freed, so that they can be read without a lock.
struct CancelBlock {
    slots: [CancelEntry; BLOCK_SLOTS],
    next: AtomicPtr<CancelBlock>,
}

impl CancelBlock {
    const fn new() -> CancelBlock {
        CancelBlock { slots: [const { CancelEntry::free() }; BLOCK_SLOTS], next: AtomicPtr::new(ptr::null_mut()) }
    }

    fn next(&self) -> Option<&'static CancelBlock> {
        // SAFETY: null, or a block that was leaked.
        unsafe { self.next.load(SeqCst).as_ref() }
    }
}

static FIRST: CancelBlock = CancelBlock::new();

fn slots() -> impl Iterator<Item = &'static CancelEntry> {
    std::iter::successors(Some(&FIRST), |block| block.next()).flat_map(|block| &block.slots)
}

/// Asks the running call of a handle to stop. `false` if there is no such handle. Safe in a signal handler.
pub(super) fn request(handle: usize) -> bool {
    handle != FREE && handle != CLOSED && slots().any(|slot| slot.request(handle))
}

impl CancelEntry {
    const fn free() -> CancelEntry {
        CancelEntry { handle: AtomicUsize::new(FREE), readers: AtomicUsize::new(0), requested: AtomicBool::new(false) }
    }

    fn request(&self, handle: usize) -> bool {
        if self.handle.load(SeqCst) != handle {
            return false;
        }
        self.readers.fetch_add(1, SeqCst);
        // Again: the handle may have been freed, and the slot given to another, before it was counted.
        let same = self.handle.load(SeqCst) == handle;
        if same {
            self.requested.store(true, SeqCst);
        }
        self.readers.fetch_sub(1, SeqCst);
        same
    }
}

/// The slot of a handle, given back when dropped.
pub(super) struct CancelSlot(&'static CancelEntry);

impl CancelSlot {
    /// A slot that no request finds yet.
    pub fn claim() -> CancelSlot {
        let free = |slot: &&CancelEntry| {
            let claimed = slot.handle.compare_exchange(FREE, CLOSED, SeqCst, SeqCst).is_ok();
            let used = claimed && slot.readers.load(SeqCst) != 0;
            if used {
                slot.handle.store(FREE, SeqCst);
            }
            claimed && !used
        };
        loop {
            if let Some(slot) = slots().find(free) {
                return CancelSlot(slot);
            }
            add_block();
        }
    }

    pub fn open(&self, handle: usize) {
        self.0.handle.store(handle, SeqCst);
    }

    /// Requests no longer find the handle.
    pub fn close(&self) {
        self.0.handle.store(CLOSED, SeqCst);
    }

    pub fn requested(&self) -> &AtomicBool {
        &self.0.requested
    }
}

impl Drop for CancelSlot {
    fn drop(&mut self) {
        self.0.handle.store(FREE, SeqCst);
    }
}

fn add_block() {
    let new = Box::leak(Box::new(CancelBlock::new()));
    let mut last = &FIRST;
    // Another thread may add one too; then this one goes after it.
    while last.next.compare_exchange(ptr::null_mut(), new, SeqCst, SeqCst).is_err() {
        last = last.next().expect("it was not null");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_finds_its_handle_only() {
        let numbers = 1 << 40..(1 << 40) + 3 * BLOCK_SLOTS;
        let claimed: Vec<_> = numbers.clone().map(|n| (n, CancelSlot::claim())).collect();
        for (n, slot) in &claimed {
            assert!(!request(*n), "not open yet");
            slot.open(*n);
        }
        for (n, _) in claimed.iter().step_by(2) {
            assert!(request(*n));
        }
        for (index, (n, slot)) in claimed.iter().enumerate() {
            assert_eq!(slot.requested().load(SeqCst), index % 2 == 0, "{n}");
        }
        claimed[0].1.close();
        assert!(!request(numbers.start) && !request(FREE) && !request(CLOSED));
        drop(claimed);
        assert!(!request(numbers.start + 1));
    }
}
