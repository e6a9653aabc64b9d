//! Modules and the kernels in them. Both are loaded when they are first used.

use std::ffi::{CStr, c_void};
use std::sync::Arc;

use cudarc::driver::sys::{self, CUfunction, CUmodule, CUresult};
use once_cell::sync::OnceCell;

use super::arch::KernelArch;
use super::bundle::Bundle;
use super::context::Context;
use super::error::{check, is_device_lost};
use super::stream::CudaStream;
use crate::error::Result;

pub struct Module {
    context: Arc<Context>,
    bundle: Bundle,
    loaded: OnceCell<LoadedModule>,
}

#[derive(Clone, Copy)]
struct LoadedModule {
    handle: CUmodule,
    /// Whether its kernels wait for the launch before by themselves (`begin_launch` in `kernels/common.cuh`).
    waits: bool,
}

// SAFETY: modules may be used from any thread.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Module {
    pub fn new(context: &Arc<Context>, bundle: Bundle) -> Arc<Module> {
        Arc::new(Module { context: Arc::clone(context), bundle, loaded: OnceCell::new() })
    }

    /// `shared_bytes`: dynamic shared memory of a launch.
    pub fn kernel(self: &Arc<Module>, name: &'static CStr, shared_bytes: u32) -> Kernel {
        self.with_carveout(name, shared_bytes, false)
    }

    /// A kernel without shared memory that may run on a multiprocessor together with a convolution: it asks for the
    /// same shared-memory carveout, which the multiprocessor cannot change while the convolution runs.
    pub fn co_resident_kernel(self: &Arc<Module>, name: &'static CStr) -> Kernel {
        self.with_carveout(name, 0, true)
    }

    fn with_carveout(self: &Arc<Module>, name: &'static CStr, shared_bytes: u32, co_resident: bool) -> Kernel {
        let (module, function) = (Arc::clone(self), OnceCell::new());
        Kernel(Arc::new(LazyKernel { module, name, shared_bytes, co_resident, function }))
    }

    /// The context has to be current.
    fn load(&self) -> Result<LoadedModule> {
        let load = || {
            let gpu = self.context.gpu.capability;
            load_first(&self.bundle, gpu, |image, kind| {
                let mut handle = std::ptr::null_mut();
                // SAFETY: a whole image; PTX ends with a NUL.
                let answer = unsafe { sys::cuModuleLoadData(&mut handle, image.as_ptr().cast()) };
                (answer, LoadedModule { handle, waits: kind == Image::MachineCode && gpu == KernelArch::HOPPER })
            })
        };
        self.loaded.get_or_try_init(load).copied()
    }
}

/// Of a bundle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Image {
    MachineCode,
    Ptx,
}

/// Loads the machine code for the GPU, or the PTX where there is none or the driver refuses it. Machine code of any
/// CUDA 12 is for all drivers from 12.0 on, so a refusal is not expected.
fn load_first<T>(bundle: &Bundle, gpu: KernelArch, mut load: impl FnMut(&[u8], Image) -> (CUresult, T)) -> Result<T> {
    let doing = format!("loading the kernels of {}", bundle.name);
    if let Some(code) = bundle.machine_code(gpu)? {
        let (answer, module) = load(&code, Image::MachineCode);
        if matches!(answer, CUresult::CUDA_SUCCESS | CUresult::CUDA_ERROR_OUT_OF_MEMORY) || is_device_lost(answer) {
            return check(&doing, answer).map(|()| module);
        }
    }
    let (answer, module) = load(&bundle.ptx()?, Image::Ptx);
    check(&doing, answer).map(|()| module)
}

impl Drop for Module {
    fn drop(&mut self) {
        if let (Some(loaded), Ok(_current)) = (self.loaded.get(), self.context.enter()) {
            // SAFETY: loaded in `load`; its kernels are gone, as each holds the module.
            unsafe { sys::cuModuleUnload(loaded.handle) };
        }
    }
}

struct LazyKernel {
    module: Arc<Module>,
    name: &'static CStr,
    shared_bytes: u32,
    co_resident: bool,
    function: OnceCell<LoadedKernel>,
}

#[derive(Clone, Copy)]
struct LoadedKernel {
    function: CUfunction,
    /// As in [`LoadedModule`].
    waits: bool,
}

// SAFETY: functions may be launched from any thread.
unsafe impl Send for LazyKernel {}
// SAFETY: as above.
unsafe impl Sync for LazyKernel {}

/// A kernel of a module. Clones are the same kernel.
#[derive(Clone)]
pub struct Kernel(Arc<LazyKernel>);

impl PartialEq for Kernel {
    fn eq(&self, other: &Kernel) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Kernel {
    /// Loads it and its module, if that was not done yet. The context has to be current.
    pub fn function(&self) -> Result<CUfunction> {
        self.loaded().map(|kernel| kernel.function)
    }

    fn loaded(&self) -> Result<LoadedKernel> {
        self.0.function.get_or_try_init(|| self.load()).copied()
    }

    fn load(&self) -> Result<LoadedKernel> {
        use sys::CUfunction_attribute as A;
        let LazyKernel { module, name, shared_bytes, co_resident, .. } = &*self.0;
        let doing = |what: &str| format!("{what} {} of {}", name.to_string_lossy(), module.bundle.name);
        let (LoadedModule { handle, waits }, mut function) = (module.load()?, std::ptr::null_mut());
        // SAFETY: the module lives as long as its kernels; the name ends with a NUL.
        let answer = unsafe { sys::cuModuleGetFunction(&mut function, handle, name.as_ptr()) };
        check(&doing("finding"), answer)?;
        let shared = (A::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, *shared_bytes as i32);
        let carveout = co_resident.then_some((A::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100));
        for (which, value) in [Some(shared), carveout].into_iter().flatten() {
            // SAFETY: the function was found above.
            check(&doing("sizing"), unsafe { sys::cuFuncSetAttribute(function, which, value) })?;
        }
        Ok(LoadedKernel { function, waits })
    }

    pub fn shared_bytes(&self) -> u32 {
        self.0.shared_bytes
    }

    /// Puts a launch into the stream. The context has to be current. Behind another kernel, its blocks may begin before
    /// that one has ended: all kernels that wait by themselves do so before they touch memory, so the order is kept.
    /// Behind anything else it begins when that has ended.
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
        let LoadedKernel { function, waits } = self.loaded()?;
        let mut arguments = [std::ptr::from_ref(params).cast::<c_void>().cast_mut()];
        let (handle, behind_kernel) = stream.begin_kernel();
        let is_dependent = waits && behind_kernel;
        #[cfg(test)]
        let is_dependent = is_dependent && testing::may_depend();
        let mut attribute = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: grid[0],
            gridDimY: grid[1],
            gridDimZ: 1,
            blockDimX: threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: self.shared_bytes(),
            hStream: handle,
            attrs: &mut attribute,
            numAttrs: u32::from(is_dependent),
        };
        // SAFETY: one parameter, as the caller vouches; the driver copies it and the attribute before it returns.
        let answer = unsafe { sys::cuLaunchKernelEx(&config, function, arguments.as_mut_ptr(), std::ptr::null_mut()) };
        check("launching a kernel", answer)
    }
}

/// For tests: how many launches might begin before the one before had ended, and a switch that turns that off. Per
/// thread.
#[cfg(test)]
pub mod testing {
    use std::cell::Cell;

    thread_local! {
        pub static DEPENDENT: Cell<u64> = const { Cell::new(0) };
        pub static PLAIN: Cell<bool> = const { Cell::new(false) };
    }

    /// Asked for each launch that might.
    pub fn may_depend() -> bool {
        DEPENDENT.set(DEPENDENT.get() + u64::from(!PLAIN.get()));
        !PLAIN.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;
    use CUresult as R;

    const BUNDLE: Bundle = Bundle::new("norm", include_bytes!("../kernels/bundles/fp16/norm.bundle"));

    /// The kinds of images that a driver is given which answers like this, and what becomes of them.
    fn load_with(gpu: (i32, i32), answers: &[R]) -> (Vec<&'static str>, Result<usize>) {
        let mut given = Vec::new();
        let loaded = load_first(&BUNDLE, KernelArch::new(gpu.0, gpu.1), |image, kind| {
            given.push(if image.starts_with(b"\x7fELF") { "machine code" } else { "PTX" });
            assert!(given.last() == Some(&"machine code") || image.ends_with(b"\0"));
            assert_eq!(kind == Image::MachineCode, given.last() == Some(&"machine code"));
            (answers[given.len() - 1], given.len())
        });
        (given, loaded)
    }

    #[test]
    fn machine_code_is_loaded_where_there_is_any_else_ptx() {
        for known in [(8, 0), (8, 6), (8, 9), (9, 0), (12, 0)] {
            assert_eq!(load_with(known, &[R::CUDA_SUCCESS]), (vec!["machine code"], Ok(1)));
        }
        for other in [(8, 7), (10, 0), (10, 3), (12, 1), (13, 0)] {
            assert_eq!(load_with(other, &[R::CUDA_SUCCESS]), (vec!["PTX"], Ok(1)));
        }
    }

    #[test]
    fn ptx_is_loaded_where_the_driver_refuses_machine_code() {
        for refusal in [R::CUDA_ERROR_NO_BINARY_FOR_GPU, R::CUDA_ERROR_INVALID_IMAGE, R::CUDA_ERROR_INVALID_SOURCE] {
            assert_eq!(load_with((8, 6), &[refusal, R::CUDA_SUCCESS]), (vec!["machine code", "PTX"], Ok(2)));
        }
    }

    #[test]
    fn failed_loads_name_the_module_and_the_cause() {
        let (given, loaded) = load_with((8, 6), &[R::CUDA_ERROR_INVALID_IMAGE, R::CUDA_ERROR_UNSUPPORTED_PTX_VERSION]);
        let error = loaded.unwrap_err().to_string();
        assert_eq!(given.len(), 2);
        assert!(error.contains("kernels of norm: CUDA_ERROR_UNSUPPORTED_PTX_VERSION"), "{error}");
        // A full or lost GPU does not take PTX either.
        let (given, loaded) = load_with((9, 0), &[R::CUDA_ERROR_OUT_OF_MEMORY]);
        assert!(given.len() == 1 && matches!(loaded, Err(Error::Memory(_))));
        let (given, loaded) = load_with((9, 0), &[R::CUDA_ERROR_ILLEGAL_ADDRESS]);
        assert!(given.len() == 1 && loaded.unwrap_err().to_string().contains("is lost"));
    }
}
