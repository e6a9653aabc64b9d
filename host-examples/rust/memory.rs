//! Memory whose size comes from a file. Where it cannot be had, Rust would abort; here that is an error like any other.

use std::alloc::{Layout, alloc_zeroed};
use std::fmt::Display;

use crate::{Result, units};

/// Types whose zero is a value.
///
/// # Safety
/// Zero bytes are a value of the type.
pub unsafe trait Zero: Copy {}

// SAFETY: numbers.
unsafe impl Zero for u8 {}
// SAFETY: numbers.
unsafe impl Zero for u16 {}
// SAFETY: numbers.
unsafe impl Zero for u64 {}
// SAFETY: numbers.
unsafe impl Zero for f32 {}
// SAFETY: numbers.
unsafe impl Zero for [f32; 2] {}

/// `count` zeros for `what`. Pages that nobody touches take no memory.
pub fn zeroed<T: Zero>(count: usize, what: impl Display) -> Result<Vec<T>> {
    let layout = Layout::array::<T>(count).map_err(|_| too_much(&what, u64::MAX))?;
    if layout.size() == 0 {
        return Ok(Vec::new());
    }
    // SAFETY: the size is not zero.
    let memory = unsafe { alloc_zeroed(layout) };
    if memory.is_null() {
        return Err(too_much(&what, layout.size() as u64));
    }
    // SAFETY: `count` zeros, allocated as vectors are.
    Ok(unsafe { Vec::from_raw_parts(memory.cast(), count, count) })
}

/// `count` values of an iterator.
pub fn collected<T>(count: usize, values: impl Iterator<Item = T>, what: impl Display) -> Result<Vec<T>> {
    let mut vec = Vec::new();
    let bytes = count.saturating_mul(size_of::<T>()) as u64;
    vec.try_reserve_exact(count).map_err(|_| too_much(&what, bytes))?;
    vec.extend(values.take(count));
    Ok(vec)
}

/// Fails unless so much can be had at once. For work that allocates in many places, asked before it begins.
pub fn spare(bytes: usize, what: impl Display) -> Result<()> {
    // Or the compiler would leave the allocation out.
    zeroed::<u8>(bytes, what).map(|memory| drop(std::hint::black_box(memory)))
}

fn too_much(what: &impl Display, bytes: u64) -> String {
    format!("{what} takes {} of memory, which cannot be had; take a smaller clip", units::bytes(bytes))
}
