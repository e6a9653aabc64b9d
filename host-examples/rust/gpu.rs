//! A GPU as a host of its own sees it: memory and time, by the driver alone, which is opened at run time.

use std::ffi::c_void;
use std::ptr::null_mut;

use crate::Result;

macro_rules! functions {
    ($($name:ident($($argument:ty),*);)*) => {
        #[allow(non_snake_case, reason = "the driver's own names")]
        struct Driver {
            $($name: unsafe extern "C" fn($($argument),*) -> i32,)*
            _library: libloading::Library,
        }

        impl Driver {
            #[allow(non_snake_case, reason = "the driver's own names")]
            fn open() -> std::result::Result<Driver, libloading::Error> {
                let name = if cfg!(windows) { "nvcuda.dll" } else { "libcuda.so.1" };
                // SAFETY: the driver; it does nothing before cuInit. The signatures are those of its header.
                unsafe {
                    let library = libloading::Library::new(name)?;
                    $(let $name = *library
                        .get::<unsafe extern "C" fn($($argument),*) -> i32>(concat!(stringify!($name), "\0"))?;)*
                    Ok(Driver { $($name,)* _library: library })
                }
            }
        }
    };
}

functions! {
    cuInit(u32);
    cuDeviceGet(*mut i32, i32);
    cuDevicePrimaryCtxRetain(*mut *mut c_void, i32);
    cuDevicePrimaryCtxRelease_v2(i32);
    cuCtxPushCurrent_v2(*mut c_void);
    cuCtxPopCurrent_v2(*mut *mut c_void);
    cuCtxSynchronize();
    cuMemAlloc_v2(*mut u64, usize);
    cuMemFree_v2(u64);
    cuMemcpyHtoD_v2(u64, *const c_void, usize);
    cuEventCreate(*mut *mut c_void, u32);
    cuEventDestroy_v2(*mut c_void);
    cuEventRecord(*mut c_void, *mut c_void);
    cuEventSynchronize(*mut c_void);
    cuEventElapsedTime(*mut f32, *mut c_void, *mut c_void);
}

fn check(doing: &str, answer: i32) -> Result<()> {
    if answer == 0 { Ok(()) } else { Err(format!("{doing}: the NVIDIA driver answers {answer}")) }
}

/// A GPU whose primary context is current on this thread for as long as this lives.
pub struct Gpu {
    driver: Driver,
    device: i32,
}

impl Gpu {
    pub fn open(index: i32) -> Result<Gpu> {
        let driver = Driver::open().map_err(|why| format!("the NVIDIA driver cannot be opened: {why}"))?;
        let (mut device, mut context) = (0, null_mut());
        // SAFETY: each writes where it is told.
        unsafe {
            check("starting", (driver.cuInit)(0))?;
            check("opening the GPU", (driver.cuDeviceGet)(&mut device, index))?;
            check("opening the GPU", (driver.cuDevicePrimaryCtxRetain)(&mut context, device))?;
        }
        // From here on dropping it undoes both.
        let gpu = Gpu { driver, device };
        // SAFETY: the context is retained.
        check("using the GPU", unsafe { (gpu.driver.cuCtxPushCurrent_v2)(context) })?;
        Ok(gpu)
    }

    pub fn memory(&self, bytes: usize) -> Result<Memory<'_>> {
        let mut address = 0;
        // SAFETY: a context is current.
        check("allocating", unsafe { (self.driver.cuMemAlloc_v2)(&mut address, bytes.max(1)) })?;
        Ok(Memory { gpu: self, address, bytes })
    }

    /// Seconds that the GPU takes for what `work` puts into stream 0.
    pub fn time(&self, work: impl FnOnce() -> Result<()>) -> Result<f64> {
        let (start, end) = (Event::new(self)?, Event::new(self)?);
        start.record()?;
        work()?;
        end.record()?;
        let mut milliseconds = 0.0;
        // SAFETY: both events live and were recorded.
        unsafe {
            check("waiting for the GPU", (self.driver.cuEventSynchronize)(end.handle))?;
            let answer = (self.driver.cuEventElapsedTime)(&mut milliseconds, start.handle, end.handle);
            check("measuring", answer)?;
        }
        Ok(f64::from(milliseconds) / 1e3)
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // SAFETY: pushed and retained in `open`, where the first failure leaves nothing to pop, which does no harm.
        unsafe {
            (self.driver.cuCtxPopCurrent_v2)(&mut null_mut());
            (self.driver.cuDevicePrimaryCtxRelease_v2)(self.device);
        }
    }
}

/// A block of device memory.
pub struct Memory<'a> {
    gpu: &'a Gpu,
    pub address: u64,
    bytes: usize,
}

impl Memory<'_> {
    /// The bytes are there when this returns, whichever stream asks.
    pub fn write(&self, from: &[u8]) -> Result<()> {
        if from.len() > self.bytes {
            return Err(format!("{} bytes do not fit into {}", from.len(), self.bytes));
        }
        // SAFETY: both regions are that long, and a context is current.
        unsafe {
            let driver = &self.gpu.driver;
            check("copying", (driver.cuMemcpyHtoD_v2)(self.address, from.as_ptr().cast(), from.len()))?;
            check("copying", (driver.cuCtxSynchronize)())
        }
    }
}

impl Drop for Memory<'_> {
    fn drop(&mut self) {
        // SAFETY: allocated in `memory`.
        unsafe { (self.gpu.driver.cuMemFree_v2)(self.address) };
    }
}

struct Event<'a> {
    gpu: &'a Gpu,
    handle: *mut c_void,
}

impl Event<'_> {
    fn new(gpu: &Gpu) -> Result<Event<'_>> {
        let mut handle = null_mut();
        // SAFETY: a context is current.
        check("measuring", unsafe { (gpu.driver.cuEventCreate)(&mut handle, 0) })?;
        Ok(Event { gpu, handle })
    }

    fn record(&self) -> Result<()> {
        // SAFETY: the event lives; null is stream 0.
        check("measuring", unsafe { (self.gpu.driver.cuEventRecord)(self.handle, null_mut()) })
    }
}

impl Drop for Event<'_> {
    fn drop(&mut self) {
        // SAFETY: made in `new`.
        unsafe { (self.gpu.driver.cuEventDestroy_v2)(self.handle) };
    }
}
