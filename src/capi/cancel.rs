//! Cancel requests, one entry per handle. Signal handlers write them: no lock, no allocation.

use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering::SeqCst};

/// No handle has these numbers.
const FREE: usize = 0;
const CLOSED: usize = usize::MAX;

/// Entries are never freed, so that they can be read without a lock. They are used again.
struct CancelEntry {
    /// The number of the handle, `CLOSED` or `FREE`.
    handle: AtomicUsize,
    /// Requests that are using the entry. It is not given to another handle meanwhile.
    readers: AtomicUsize,
    requested: AtomicBool,
    next: AtomicPtr<CancelEntry>,
}

static FIRST: AtomicPtr<CancelEntry> = AtomicPtr::new(ptr::null_mut());

fn entries() -> impl Iterator<Item = &'static CancelEntry> {
    // SAFETY: null, or an entry that was leaked.
    let load = |at: &AtomicPtr<CancelEntry>| unsafe { at.load(SeqCst).as_ref::<'static>() };
    std::iter::successors(load(&FIRST), move |entry| load(&entry.next))
}

/// Asks the running call of a handle to stop. `false` if there is no such handle. Safe in a signal handler.
pub(super) fn request(handle: usize) -> bool {
    handle != FREE && handle != CLOSED && entries().any(|entry| entry.request(handle))
}

impl CancelEntry {
    fn request(&self, handle: usize) -> bool {
        if self.handle.load(SeqCst) != handle {
            return false;
        }
        self.readers.fetch_add(1, SeqCst);
        // Again: the handle may have been freed, and the entry given to another, before it was counted.
        let same = self.handle.load(SeqCst) == handle;
        if same {
            self.requested.store(true, SeqCst);
        }
        self.readers.fetch_sub(1, SeqCst);
        same
    }
}

/// The entry of a handle, given back when dropped.
pub(super) struct CancelSlot(&'static CancelEntry);

impl CancelSlot {
    /// An entry that no request finds yet.
    pub fn claim() -> CancelSlot {
        let is_free = |entry: &&CancelEntry| {
            let claimed = entry.handle.compare_exchange(FREE, CLOSED, SeqCst, SeqCst).is_ok();
            let used = claimed && entry.readers.load(SeqCst) != 0;
            if used {
                entry.handle.store(FREE, SeqCst);
            }
            claimed && !used
        };
        CancelSlot(entries().find(is_free).unwrap_or_else(add_entry))
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

/// Adds a closed entry at the front.
fn add_entry() -> &'static CancelEntry {
    let new = Box::leak(Box::new(CancelEntry {
        handle: AtomicUsize::new(CLOSED),
        readers: AtomicUsize::new(0),
        requested: AtomicBool::new(false),
        next: AtomicPtr::default(),
    }));
    let linked = |first| {
        new.next.store(first, SeqCst);
        Some(ptr::from_ref(new).cast_mut())
    };
    FIRST.fetch_update(SeqCst, SeqCst, linked).expect("it always gives one");
    new
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_finds_its_handle_only() {
        let numbers = 1 << 40..(1 << 40) + if cfg!(miri) { 20 } else { 200 };
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
