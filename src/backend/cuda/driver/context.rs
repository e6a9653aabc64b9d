//! The device's primary context, which every CUDA user of the process shares. It is current only during our calls: the
//! host's own context is restored when we return.

use std::sync::Arc;

use cudarc::driver::sys::{self, CUcontext};
use parking_lot::Mutex;

use super::device::Gpu;
use super::error::check;
use super::pinned;
use crate::error::Result;

pub struct Context {
    pub gpu: Gpu,
    primary: PrimaryContext,
}

/// The driver's context of a GPU: the same for all that use it while one [`Context`] of the GPU lives.
#[derive(Clone, Copy)]
pub struct PrimaryContext(CUcontext);

// SAFETY: a context may be made current on any thread.
unsafe impl Send for PrimaryContext {}
// SAFETY: as above; the driver locks what it must.
unsafe impl Sync for PrimaryContext {}

/// The GPUs of all that live.
static LIVE: Mutex<Vec<u32>> = Mutex::new(Vec::new());

/// Keeps the context current until dropped.
pub struct Current<'a>(#[allow(dead_code, reason = "ties the guard to its context")] &'a PrimaryContext);

impl PrimaryContext {
    /// The context is retained.
    pub fn enter(&self) -> Result<Current<'_>> {
        // SAFETY: the caller vouches for the context.
        check("using the GPU", unsafe { sys::cuCtxPushCurrent_v2(self.0) })?;
        Ok(Current(self))
    }
}

impl Context {
    /// `kernel_arch`: an older architecture to use the GPU like.
    pub fn new(index: u32, kernel_arch: Option<&str>) -> Result<Arc<Context>> {
        let mut gpu = Gpu::new(index)?;
        gpu.check_capability()?;
        if let Some(requested) = kernel_arch {
            gpu = gpu.with_kernel_arch(requested)?;
        }
        let mut handle = std::ptr::null_mut();
        // SAFETY: the device exists; retained once, released in drop.
        check("opening the GPU", unsafe { sys::cuDevicePrimaryCtxRetain(&mut handle, gpu.handle) })?;
        LIVE.lock().push(gpu.index);
        Ok(Arc::new(Context { gpu, primary: PrimaryContext(handle) }))
    }

    pub fn enter(&self) -> Result<Current<'_>> {
        self.primary.enter()
    }

    /// For what may outlive this one, but not the GPU's last one.
    pub fn primary(&self) -> PrimaryContext {
        self.primary
    }

    pub fn free_bytes(&self) -> Result<u64> {
        let _current = self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: a context is current.
        check("asking for free memory", unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) })?;
        Ok(free as u64)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        let mut live = LIVE.lock();
        if let Some(at) = live.iter().position(|gpu| *gpu == self.gpu.index) {
            live.swap_remove(at);
        }
        if !live.contains(&self.gpu.index) {
            pinned::keep_at_most(self.gpu.index, 0, 0);
        }
        // SAFETY: retained in `new`.
        unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.gpu.handle) };
    }
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        let mut ours = std::ptr::null_mut();
        // SAFETY: pushed in `enter` on this thread, and everything pushed since has been popped.
        unsafe { sys::cuCtxPopCurrent_v2(&mut ours) };
    }
}
