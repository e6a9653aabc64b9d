//! Where large blocks of memory come from: the system, or an allocator of the host. Marks threads that are inside one,
//! where locks of the library may be held.

use std::cell::Cell;
use std::ffi::c_void;

pub type AllocFn = unsafe extern "C" fn(user: *mut c_void, bytes: u64, align: u64) -> *mut c_void;
pub type FreeFn = unsafe extern "C" fn(user: *mut c_void, block: *mut c_void, bytes: u64);
pub type DeviceAllocFn = unsafe extern "C" fn(user: *mut c_void, device: i32, bytes: u64) -> *mut c_void;
pub type DeviceFreeFn = unsafe extern "C" fn(user: *mut c_void, device: i32, block: *mut c_void, bytes: u64);

/// An allocator of the host. Its maker guarantees that both functions may be called with `user` from any thread, as
/// long as anything allocated through it lives.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Callbacks<Alloc, Free> {
    pub alloc: Alloc,
    pub free: Free,
    pub user: *mut c_void,
}

// SAFETY: the maker guarantees calls from any thread.
unsafe impl<Alloc: Send, Free: Send> Send for Callbacks<Alloc, Free> {}
// SAFETY: as above.
unsafe impl<Alloc: Sync, Free: Sync> Sync for Callbacks<Alloc, Free> {}

#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub enum Allocator<Alloc, Free> {
    /// The operating system, or the driver of the device.
    #[default]
    System,
    Host(Callbacks<Alloc, Free>),
}

pub type HostAllocator = Allocator<AllocFn, FreeFn>;
pub type DeviceAllocator = Allocator<DeviceAllocFn, DeviceFreeFn>;

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Whether the calling thread is inside an allocator of the host.
pub fn is_inside() -> bool {
    INSIDE.get()
}

/// Runs a function of an allocator of the host.
pub(super) fn call<T>(callback: impl FnOnce() -> T) -> T {
    let before = INSIDE.replace(true);
    let result = callback();
    INSIDE.set(before);
    result
}
