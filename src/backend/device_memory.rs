//! Where blocks of device memory come from: the driver, or the host's own allocator.

use std::ffi::c_void;

pub type DeviceAllocFn = unsafe extern "C" fn(user: *mut c_void, device: i32, bytes: u64) -> *mut c_void;
pub type DeviceFreeFn = unsafe extern "C" fn(user: *mut c_void, device: i32, block: *mut c_void, bytes: u64);

/// The host's own allocator. Whoever makes one vouches that both functions may be called from any thread, with `user`,
/// for as long as anything allocated through it lives.
#[derive(Debug, Clone, Copy)]
pub struct DeviceCallbacks {
    pub alloc: DeviceAllocFn,
    pub free: DeviceFreeFn,
    pub user: *mut c_void,
}

// SAFETY: the maker vouches for calls from any thread.
unsafe impl Send for DeviceCallbacks {}
// SAFETY: as above.
unsafe impl Sync for DeviceCallbacks {}

impl PartialEq for DeviceCallbacks {
    fn eq(&self, other: &DeviceCallbacks) -> bool {
        std::ptr::fn_addr_eq(self.alloc, other.alloc)
            && std::ptr::fn_addr_eq(self.free, other.free)
            && self.user == other.user
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub enum DeviceAllocator {
    #[default]
    Driver,
    Host(DeviceCallbacks),
}
