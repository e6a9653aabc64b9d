//! The library's allocator: the system's, and a reserve for when that has nothing left.
//!
//! Rust aborts the process if a small allocation fails. The reserve serves such allocations instead, until the call
//! notices by [`check`] and ends with an error. What is larger than [`LARGEST`] must be allocated fallibly, by [`vec`].

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::error::{Error, Result};

/// Pages of it take memory once they are used.
const BYTES: usize = if cfg!(miri) { 1 << 17 } else { 16 << 20 };
/// A block of the reserve takes whole units.
const UNIT: usize = 64;
/// The largest block that comes from the reserve.
const LARGEST: usize = BYTES / 8;
/// Calls end when this much is in use. The rest is for their way out.
const ENOUGH: usize = BYTES / 2;

/// An empty vector with room for `count` elements.
pub fn vec<T>(what: &str, count: usize) -> Result<Vec<T>> {
    let mut vec = Vec::new();
    let reserved = vec.try_reserve_exact(count);
    reserved.map_err(|_| {
        let bytes = count.saturating_mul(size_of::<T>());
        Error::HostMemory(format!("the host has no {bytes} bytes of memory left for {what}"))
    })?;
    Ok(vec)
}

/// A vector of zeros, or of another value.
pub fn filled<T: Clone>(what: &str, value: T, count: usize) -> Result<Vec<T>> {
    let mut filled = vec(what, count)?;
    filled.resize(count, value);
    Ok(filled)
}

/// The first `count` elements of a buffer that is used again and again. What they hold is left from the last use.
pub fn grown<'a, T: Copy + Default>(what: &str, buffer: &'a mut Vec<T>, count: usize) -> Result<&'a mut [T]> {
    if buffer.len() < count {
        // A new one, because growing would copy what nobody needs and take both at once.
        *buffer = Vec::new();
        *buffer = filled(what, T::default(), count)?;
    }
    Ok(&mut buffer[..count])
}

/// Fails if small allocations have failed for some time. Asked before and within calls.
pub fn check() -> Result<()> {
    RESERVE.check()
}

/// How often the reserve has become low. Work that cannot fail at once compares it with the number at its start.
pub fn times_low() -> usize {
    RESERVE.times_low.load(Ordering::Relaxed)
}

/// Whether a thread can be started. The standard library asks the system for its handle, and aborts if that has none.
pub fn has_room_for_a_thread() -> bool {
    let layout = Layout::new::<[u64; 512]>();
    // SAFETY: the layout has a size.
    // Or the compiler would leave the allocation out.
    let probe = std::hint::black_box(unsafe { System.alloc(layout) });
    if !probe.is_null() {
        // SAFETY: allocated above.
        unsafe { System.dealloc(probe, layout) };
    }
    !probe.is_null()
}

pub const EXHAUSTED: &str = "the host has no memory left; end other work, or other programs";

pub fn exhausted() -> Error {
    Error::HostMemory(EXHAUSTED.into())
}

#[cfg_attr(test, allow(dead_code, reason = "tests count allocations with another one"))]
pub struct ReserveAllocator;

// SAFETY: blocks are the system's, or units of the reserve that nobody else has. No function unwinds.
unsafe impl GlobalAlloc for ReserveAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        let block = unsafe { System.alloc(layout) };
        if block.is_null() { RESERVE.take(layout) } else { block }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        let mut block = unsafe { System.alloc_zeroed(layout) };
        if block.is_null() {
            block = RESERVE.take(layout);
            if !block.is_null() {
                // SAFETY: a block of this size.
                unsafe { block.write_bytes(0, layout.size()) };
            }
        }
        block
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        if RESERVE.contains(block) {
            RESERVE.give_back(block, layout);
        } else {
            // SAFETY: the system allocated it.
            unsafe { System.dealloc(block, layout) };
        }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if !RESERVE.contains(block) {
            // SAFETY: the system allocated it.
            let moved = unsafe { System.realloc(block, layout, size) };
            if !moved.is_null() {
                return moved;
            }
        }
        // SAFETY: the caller promises that the size is valid for the alignment.
        let new = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
        // SAFETY: as above; both blocks are as large as what is copied.
        unsafe {
            let moved = self.alloc(new);
            if !moved.is_null() {
                moved.copy_from_nonoverlapping(block, layout.size().min(size));
                self.dealloc(block, layout);
            }
            moved
        }
    }
}

static RESERVE: Reserve = Reserve::new();

#[repr(C, align(4096))]
struct Reserve {
    memory: UnsafeCell<[u8; BYTES]>,
    /// One bit for each unit. Read and written by whoever has set `busy`.
    taken: UnsafeCell<[u64; BYTES / UNIT / 64]>,
    busy: AtomicBool,
    /// Bytes.
    used: AtomicUsize,
    times_low: AtomicUsize,
}

// SAFETY: `busy` guards `taken`, and who has units of the memory has them alone.
unsafe impl Sync for Reserve {}

impl Reserve {
    const fn new() -> Reserve {
        Reserve {
            memory: UnsafeCell::new([0; BYTES]),
            taken: UnsafeCell::new([0; BYTES / UNIT / 64]),
            busy: AtomicBool::new(false),
            used: AtomicUsize::new(0),
            times_low: AtomicUsize::new(0),
        }
    }

    fn check(&self) -> Result<()> {
        if self.used.load(Ordering::Relaxed) > ENOUGH { Err(exhausted()) } else { Ok(()) }
    }

    fn contains(&self, block: *mut u8) -> bool {
        block.addr().wrapping_sub(self.memory.get().addr()) < BYTES
    }

    /// Null if there is no room.
    fn take(&self, layout: Layout) -> *mut u8 {
        let (units, step) = (layout.size().div_ceil(UNIT), layout.align().div_ceil(UNIT));
        if layout.size() > LARGEST || layout.align() > 4096 {
            return std::ptr::null_mut();
        }
        self.with_units(|taken| {
            let mut first = 0;
            'search: while first + units <= BYTES / UNIT {
                for unit in (first..first + units).rev() {
                    if taken[unit / 64] >> (unit % 64) & 1 == 1 {
                        first = (unit + 1).next_multiple_of(step);
                        continue 'search;
                    }
                }
                (first..first + units).for_each(|unit| taken[unit / 64] |= 1 << (unit % 64));
                let before = self.used.fetch_add(units * UNIT, Ordering::Relaxed);
                if before <= ENOUGH && before + units * UNIT > ENOUGH {
                    self.times_low.fetch_add(1, Ordering::Relaxed);
                }
                return self.memory.get().cast::<u8>().wrapping_add(first * UNIT);
            }
            std::ptr::null_mut()
        })
    }

    fn give_back(&self, block: *mut u8, layout: Layout) {
        let first = (block.addr() - self.memory.get().addr()) / UNIT;
        let units = layout.size().div_ceil(UNIT);
        self.with_units(|taken| (first..first + units).for_each(|unit| taken[unit / 64] &= !(1 << (unit % 64))));
        self.used.fetch_sub(units * UNIT, Ordering::Relaxed);
    }

    fn with_units<R>(&self, body: impl FnOnce(&mut [u64; BYTES / UNIT / 64]) -> R) -> R {
        // Held for microseconds, and rarely. Sleeping locks may allocate.
        while self.busy.swap(true, Ordering::Acquire) {
            std::thread::yield_now();
        }
        // SAFETY: `busy` was not set, so nobody else has it. `body` does not unwind: indices are within the reserve.
        let done = body(unsafe { &mut *self.taken.get() });
        self.busy.store(false, Ordering::Release);
        done
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    static TEST: Reserve = Reserve::new();

    #[test]
    fn blocks_of_the_reserve_are_aligned_apart_and_given_back() {
        let layouts = [(1, 1), (64, 64), (65, 8), (4096, 4096), (LARGEST, 16), (100, 256)]
            .map(|(size, align)| Layout::from_size_align(size, align).unwrap());
        for round in 0..3 {
            let mut blocks: Vec<_> = layouts.iter().map(|layout| (TEST.take(*layout), *layout)).collect();
            for (index, (block, layout)) in blocks.iter().enumerate() {
                assert!(TEST.contains(*block) && block.addr() % layout.align() == 0, "round {round}");
                // SAFETY: a block of this size.
                unsafe { block.write_bytes(index as u8 + 1, layout.size()) };
            }
            for (index, (block, layout)) in blocks.iter().enumerate() {
                // SAFETY: as above, and initialised.
                let bytes = unsafe { std::slice::from_raw_parts(*block, layout.size()) };
                assert!(bytes.iter().all(|byte| *byte == index as u8 + 1));
            }
            blocks.rotate_left(round);
            blocks.into_iter().for_each(|(block, layout)| TEST.give_back(block, layout));
        }
        assert!(TEST.take(Layout::from_size_align(LARGEST + 1, 1).unwrap()).is_null());
        let layout = Layout::from_size_align(LARGEST, 16).unwrap();
        let all: Vec<_> = std::iter::repeat_with(|| TEST.take(layout)).take_while(|block| !block.is_null()).collect();
        assert_eq!(all.len(), BYTES / LARGEST);
        assert!(TEST.check().is_err() && TEST.times_low.load(Ordering::Relaxed) == 1);
        all.into_iter().for_each(|block| TEST.give_back(block, layout));
        assert!(TEST.check().is_ok());
    }

    #[test]
    fn vectors_that_are_too_large_are_an_error() {
        let refused = filled("a test", 0u64, usize::MAX / 16).unwrap_err();
        assert!(matches!(&refused, Error::HostMemory(text) if text.contains("a test")), "{refused}");
        assert_eq!(filled("a test", 7u8, 3), Ok(vec![7; 3]));
    }
}
