//! Marks a thread that is inside an allocator of the host. The library's own locks may be held there.

use std::cell::Cell;

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

pub fn is_inside() -> bool {
    INSIDE.get()
}

/// Runs an allocator of the host.
pub(super) fn call<T>(callback: impl FnOnce() -> T) -> T {
    let before = INSIDE.replace(true);
    let result = callback();
    INSIDE.set(before);
    result
}
