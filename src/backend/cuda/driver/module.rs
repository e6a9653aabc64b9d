//! PTX modules, assembled by the driver, and handles to the kernels in them.

use std::ffi::{CStr, CString, c_void};
use std::sync::Arc;

use cudarc::driver::sys::{self, CUfunction, CUmodule};

use super::context::Context;
use super::error::check;
use super::stream::CudaStream;
use crate::error::Result;

/// Has to outlive its kernels.
pub struct Module {
    context: Arc<Context>,
    handle: CUmodule,
}

// SAFETY: modules may be used from any thread.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Module {
    pub fn new(context: &Arc<Context>, ptx: &str) -> Result<Module> {
        let _current = context.enter()?;
        let text = CString::new(ptx).expect("PTX has no NUL");
        let mut handle = std::ptr::null_mut();
        // SAFETY: the text ends with a NUL.
        check("loading our kernels", unsafe { sys::cuModuleLoadData(&mut handle, text.as_ptr().cast()) })?;
        Ok(Module { context: Arc::clone(context), handle })
    }

    /// `shared_bytes`: dynamic shared memory of a launch.
    pub fn kernel(&self, name: &CStr, shared_bytes: u32) -> Result<Kernel> {
        use sys::CUfunction_attribute as A;
        let _current = self.context.enter()?;
        let mut function = std::ptr::null_mut();
        // SAFETY: the module lives as long as its kernels; the name ends with a NUL.
        unsafe {
            check("finding a kernel", sys::cuModuleGetFunction(&mut function, self.handle, name.as_ptr()))?;
            let which = A::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            check("sizing a kernel", sys::cuFuncSetAttribute(function, which, shared_bytes as i32))?;
        }
        Ok(Kernel { function, shared_bytes })
    }

    /// A kernel without shared memory that may run on a multiprocessor together with a convolution: it asks for the
    /// same shared-memory carveout, which the multiprocessor cannot change while the convolution runs.
    pub fn co_resident_kernel(&self, name: &CStr) -> Result<Kernel> {
        let kernel = self.kernel(name, 0)?;
        let _current = self.context.enter()?;
        let which = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
        // SAFETY: the function lives as long as its module.
        check("sizing a kernel", unsafe { sys::cuFuncSetAttribute(kernel.function, which, 100) })?;
        Ok(kernel)
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if let Ok(_current) = self.context.enter() {
            // SAFETY: loaded in `new`; its kernels are dropped with it.
            unsafe { sys::cuModuleUnload(self.handle) };
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Kernel {
    function: CUfunction,
    shared_bytes: u32,
}

// SAFETY: functions may be launched from any thread.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

impl Kernel {
    pub fn function(&self) -> CUfunction {
        self.function
    }

    pub fn shared_bytes(&self) -> u32 {
        self.shared_bytes
    }

    /// Puts a launch into the stream. The context has to be current.
    ///
    /// # Safety
    /// `Params` is the kernel's one parameter in its own layout, and everything it points at lives until the stream has
    /// passed the launch.
    pub unsafe fn launch<Params: ?Sized>(
        &self,
        stream: &CudaStream,
        grid: [u32; 2],
        threads: u32,
        params: &Params,
    ) -> Result<()> {
        let mut arguments = [std::ptr::from_ref(params).cast::<c_void>().cast_mut()];
        // SAFETY: one parameter, as the caller vouches; the driver copies it before it returns.
        let answer = unsafe {
            sys::cuLaunchKernel(
                self.function,
                grid[0],
                grid[1],
                1,
                threads,
                1,
                1,
                self.shared_bytes,
                stream.handle(),
                arguments.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        check("launching a kernel", answer)
    }
}
