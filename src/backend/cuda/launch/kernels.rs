//! Kernels from the PTX that is embedded in the library, and how they are launched.

use std::ffi::{CStr, CString, c_void};
use std::sync::Arc;

use cudarc::driver::sys::{self, CUfunction, CUmodule, CUstream};

use crate::backend::Precision;
use crate::backend::cuda::driver::context::Context;
use crate::backend::cuda::driver::device::{Gpu, check};
use crate::backend::cuda::driver::stream::Stream;
use crate::backend::cuda::launch::graph::{self, Launch};
use crate::error::Result;
use crate::tensor::Rates;

/// Of a block that runs beside one of `conv_wgmma`, with no more registers each than `kernels/norm.cu` allows.
pub const BESIDE_THREADS: u32 = 128;

/// PTX, assembled for the GPU by its driver.
struct Module {
    context: Arc<Context>,
    handle: CUmodule,
}

// SAFETY: modules may be used from any thread.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Module {
    fn new(context: &Arc<Context>, ptx: &str) -> Result<Module> {
        let _current = context.enter()?;
        let text = CString::new(ptx).expect("PTX has no NUL");
        let mut handle = std::ptr::null_mut();
        // SAFETY: the text ends with a NUL.
        check("loading our kernels", unsafe { sys::cuModuleLoadData(&mut handle, text.as_ptr().cast()) })?;
        Ok(Module { context: Arc::clone(context), handle })
    }

    /// One that finds room on a multiprocessor beside a convolution, in blocks of [`BESIDE_THREADS`]: it has the memory there divided
    /// as that one does.
    fn kernel_beside(&self, name: &CStr) -> Result<Kernel> {
        let kernel = self.kernel(name, 0)?;
        let _current = self.context.enter()?;
        let which = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
        // SAFETY: the function lives as long as its module.
        check("sizing a kernel", unsafe { sys::cuFuncSetAttribute(kernel.function, which, 100) })?;
        Ok(kernel)
    }

    fn kernel(&self, name: &CStr, shared_bytes: u32) -> Result<Kernel> {
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
    /// Puts a launch into the stream. The context has to be current.
    ///
    /// # Safety
    /// `Params` is the kernel's one parameter in its own layout, and what it points at lives until the stream has
    /// passed the launch.
    pub unsafe fn launch<Params>(&self, stream: &Stream, grid: [u32; 2], threads: u32, params: &Params) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.put(stream.handle(), grid, threads, std::ptr::from_ref(params).cast()) }
    }

    /// Like [`Kernel::launch`], but a small operation's launches may wait for those that come after it.
    ///
    /// # Safety
    /// As for `launch`; what the parameter points at also lives until the launch is in the stream.
    pub unsafe fn collect<P>(&self, stream: &Stream, grid: [u32; 2], threads: u32, params: &P) -> Result<()>
    where
        P: graph::Params + Copy,
    {
        if stream.is_collecting() {
            stream.collect(Launch { kernel: *self, grid, threads, params: Box::new(*params) });
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { self.launch(stream, grid, threads, params) }
    }

    pub fn function(&self) -> CUfunction {
        self.function
    }

    pub fn shared_bytes(&self) -> u32 {
        self.shared_bytes
    }

    /// # Safety
    /// As for `launch`, with the address of the parameter and a stream that lives.
    pub unsafe fn put(&self, stream: CUstream, grid: [u32; 2], threads: u32, params: *const c_void) -> Result<()> {
        let mut arguments = [params.cast_mut()];
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
                stream,
                arguments.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        check("launching a kernel", answer)
    }
}

/// A convolution, and the same with sums that may come from another launch or be left for one.
#[derive(Clone, Copy)]
pub struct ConvKernels {
    pub plain: Kernel,
    pub sums: Kernel,
}

/// Every kernel of a precision, loaded.
pub struct Kernels {
    /// The convolution of many channels for compute capability 9.0, which has the copy engine and warpgroup products.
    pub conv_hopper: Option<ConvKernels>,
    /// The same for every GPU from compute capability 8.0 on.
    pub conv_ampere: ConvKernels,
    pub conv_in: Kernel,
    /// The same with the norm of the layer that comes next.
    pub conv_in_norm: Kernel,
    pub conv_in_silu: Kernel,
    pub conv_out: Kernel,
    pub norm_apply: Kernel,
    pub norm_silu: Kernel,
    pub norm_finalize: Kernel,
    pub norm_statistics: Kernel,
    pub copy_rows: Kernel,
    pub attention: Kernel,
    pub load: Kernel,
    pub store: Kernel,
    pub blend: Kernel,
    pub rates: Rates,
    _modules: Vec<Module>,
}

/// The PTX of a precision.
struct Sources {
    conv_mma: &'static str,
    /// For those precisions that have it.
    conv_wgmma: Option<&'static str>,
    conv_in: &'static str,
    conv_out: &'static str,
    norm: &'static str,
    attention: &'static str,
    pixels: &'static str,
}

macro_rules! ptx {
    ($precision:literal, $name:literal) => {
        include_str!(concat!("../kernels/ptx/", $precision, "/", $name, ".ptx"))
    };
}

macro_rules! sources {
    ($precision:literal, $wgmma:expr) => {
        Sources {
            conv_mma: ptx!($precision, "conv_mma"),
            conv_wgmma: $wgmma,
            conv_in: ptx!($precision, "conv_in"),
            conv_out: ptx!($precision, "conv_out"),
            norm: ptx!($precision, "norm"),
            attention: ptx!($precision, "attention"),
            pixels: ptx!($precision, "pixels"),
        }
    };
}

impl Sources {
    fn of(precision: Precision) -> Sources {
        match precision {
            Precision::Fp16 => sources!("fp16", Some(ptx!("fp16", "conv_wgmma"))),
            Precision::Bf16 => sources!("bf16", Some(ptx!("bf16", "conv_wgmma"))),
            Precision::Fp32 => sources!("fp32", None),
        }
    }
}

impl Kernels {
    /// The best there are for a GPU like `like`, which is the context's own but in tests.
    pub fn new(context: &Arc<Context>, like: &Gpu, precision: Precision) -> Result<Kernels> {
        let module = |ptx| Module::new(context, ptx);
        let ptx = Sources::of(precision);
        let (conv_in, conv_out) = (module(ptx.conv_in)?, module(ptx.conv_out)?);
        let (norm, attention, pixels) = (module(ptx.norm)?, module(ptx.attention)?, module(ptx.pixels)?);
        let conv = module(ptx.conv_mma)?;
        // PTX for 9.0a runs on 9.0 alone.
        let hopper = match (like.capability, ptx.conv_wgmma) {
            ((9, 0), Some(ptx)) => Some(module(ptx)?),
            _ => None,
        };
        let both = |module: &Module, [plain, sums]: [&CStr; 2], shared: u32| {
            Ok(ConvKernels { plain: module.kernel(plain, shared)?, sums: module.kernel(sums, shared)? })
        };
        // Nothing runs beside the others, which take turns on a multiprocessor anyway.
        let beside = |name| if hopper.is_some() { norm.kernel_beside(name) } else { norm.kernel(name, 0) };
        let hopper_names = [c"conv_wgmma", c"conv_wgmma_sums"];
        let conv_hopper =
            hopper.as_ref().map(|module| both(module, hopper_names, crate::backend::cuda::launch::conv::HOPPER_SHARED));
        Ok(Kernels {
            conv_hopper: conv_hopper.transpose()?,
            conv_ampere: both(
                &conv,
                [c"conv_mma", c"conv_mma_sums"],
                crate::backend::cuda::launch::conv::AMPERE_SHARED,
            )?,
            conv_in: conv_in.kernel(c"conv_in", crate::backend::cuda::launch::conv::in_shared(precision))?,
            conv_in_norm: conv_in.kernel(c"conv_in_norm", crate::backend::cuda::launch::conv::in_shared(precision))?,
            conv_in_silu: conv_in.kernel(c"conv_in_silu", crate::backend::cuda::launch::conv::in_shared(precision))?,
            conv_out: conv_out.kernel(c"conv_out", crate::backend::cuda::launch::conv_out::shared(precision))?,
            norm_apply: norm.kernel(c"norm_apply", 0)?,
            norm_silu: beside(c"norm_silu")?,
            norm_finalize: norm.kernel(c"norm_finalize", 0)?,
            norm_statistics: norm.kernel(c"norm_statistics", 0)?,
            copy_rows: beside(c"copy_rows")?,
            // Data-centre cards have the shared memory for twice the keys at a time.
            attention: match like.shared_bytes >= crate::backend::cuda::launch::attention::SHARED_128 {
                true => attention.kernel(c"attention_128", crate::backend::cuda::launch::attention::SHARED_128)?,
                false => attention.kernel(c"attention_64", crate::backend::cuda::launch::attention::SHARED_64)?,
            },
            load: pixels.kernel(c"load", 0)?,
            store: pixels.kernel(c"store", 0)?,
            blend: pixels.kernel(c"blend", 0)?,
            rates: crate::backend::cuda::profile::measure(context, precision)?,
            _modules: [conv_in, conv_out, norm, attention, pixels, conv].into_iter().chain(hopper).collect(),
        })
    }
}
