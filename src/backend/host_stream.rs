//! The CUDA stream that a host passes. Without CUDA nothing looks at it.

/// A CUDA stream of the host's. Work is ordered after what it holds, and it goes on after the work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostStream(pub *mut std::ffi::c_void);

// SAFETY: the driver takes the handle from any thread.
unsafe impl Send for HostStream {}
// SAFETY: as above; it is a number to everybody else.
unsafe impl Sync for HostStream {}
