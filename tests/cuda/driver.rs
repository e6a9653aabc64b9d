//! The CUDA driver for a test's own memory, streams and contexts. Safe to call: every object knows its size and frees
//! itself.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::time::Duration;

type Context = *mut c_void;
type HostFunction = unsafe extern "C" fn(*mut c_void);

macro_rules! driver {
    ($($name:ident($($arg:ty),*);)*) => {
        #[allow(non_snake_case, reason = "the driver's own names")]
        struct Calls {
            $($name: unsafe extern "C" fn($($arg),*) -> i32,)*
            _library: libloading::Library,
        }

        impl Calls {
            #[allow(non_snake_case, reason = "the driver's own names")]
            fn load() -> Result<Calls, libloading::Error> {
                let name = if cfg!(windows) { "nvcuda.dll" } else { "libcuda.so.1" };
                // SAFETY: the driver does nothing before cuInit. The signatures match its header.
                unsafe {
                    let library = libloading::Library::new(name)?;
                    $(let $name = *library.get::<unsafe extern "C" fn($($arg),*) -> i32>(
                        concat!(stringify!($name), "\0"))?;)*
                    Ok(Calls { $($name,)* _library: library })
                }
            }
        }
    };
}

driver! {
    cuInit(u32);
    cuDeviceGet(*mut i32, i32);
    cuDevicePrimaryCtxRetain(*mut Context, i32);
    cuCtxCreate_v2(*mut Context, u32, i32);
    cuCtxDestroy_v2(Context);
    cuCtxPushCurrent_v2(Context);
    cuCtxPopCurrent_v2(*mut Context);
    cuCtxGetCurrent(*mut Context);
    cuCtxSynchronize();
    cuMemGetInfo_v2(*mut usize, *mut usize);
    cuMemAlloc_v2(*mut u64, usize);
    cuMemFree_v2(u64);
    cuMemHostAlloc(*mut *mut c_void, usize, u32);
    cuMemFreeHost(*mut c_void);
    cuMemcpyHtoD_v2(u64, *const c_void, usize);
    cuMemcpyDtoH_v2(*mut c_void, u64, usize);
    cuMemcpyHtoDAsync_v2(u64, *const c_void, usize, *mut c_void);
    cuMemcpyDtoHAsync_v2(*mut c_void, u64, usize, *mut c_void);
    cuMemsetD8Async(u64, u8, usize, *mut c_void);
    cuStreamCreate(*mut *mut c_void, u32);
    cuStreamDestroy_v2(*mut c_void);
    cuStreamSynchronize(*mut c_void);
    cuStreamQuery(*mut c_void);
    cuStreamBeginCapture_v2(*mut c_void, u32);
    cuStreamEndCapture(*mut c_void, *mut *mut c_void);
    cuGraphGetNodes(*mut c_void, *mut *mut c_void, *mut usize);
    cuGraphDestroy(*mut c_void);
    cuLaunchHostFunc(*mut c_void, HostFunction, *mut c_void);
}

const NON_BLOCKING: u32 = 1;
const NOT_READY: i32 = 600;

#[track_caller]
fn ok(answer: i32) {
    assert_eq!(answer, 0, "the driver's answer");
}

struct Host {
    calls: Calls,
    device: i32,
    /// Retained for the whole process, as by most hosts, so that its memory is not counted as the library's.
    primary: Context,
}

// SAFETY: a context may be used from any thread.
unsafe impl Send for Host {}
// SAFETY: as above.
unsafe impl Sync for Host {}

fn start() -> Result<Host, String> {
    let calls = Calls::load().map_err(|why| why.to_string())?;
    let (mut device, mut primary) = (0, null_mut());
    // SAFETY: the pointers are valid.
    let answers = unsafe {
        [(calls.cuInit)(0), (calls.cuDeviceGet)(&mut device, 0), (calls.cuDevicePrimaryCtxRetain)(&mut primary, device)]
    };
    if answers != [0; 3] {
        return Err(format!("the driver answers {answers:?}"));
    }
    Ok(Host { calls, device, primary })
}

/// The first GPU, for one test at a time: tests measure its memory.
pub struct Gpu {
    host: &'static Host,
    _alone: MutexGuard<'static, ()>,
}

impl Gpu {
    /// `None` without a GPU. With VVAE_REQUIRE_CUDA that is a failure.
    pub fn open() -> Option<Gpu> {
        static HOST: OnceLock<Result<Host, String>> = OnceLock::new();
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        match HOST.get_or_init(start) {
            Ok(host) => Some(Gpu { host, _alone: alone }),
            Err(why) => {
                assert!(std::env::var_os("VVAE_REQUIRE_CUDA").is_none(), "{why}");
                println!("skipped: {why}");
                None
            }
        }
    }

    /// Runs with the primary context current, and restores the thread's context.
    fn within<T>(&self, body: impl FnOnce(&Calls) -> T) -> T {
        let calls = &self.host.calls;
        let mut popped = null_mut();
        // SAFETY: the context is retained.
        ok(unsafe { (calls.cuCtxPushCurrent_v2)(self.host.primary) });
        let result = body(calls);
        // SAFETY: pushed above.
        ok(unsafe { (calls.cuCtxPopCurrent_v2)(&mut popped) });
        assert_eq!(popped, self.host.primary, "the pushed context is popped");
        result
    }

    /// Bytes that the driver has free.
    pub fn free_bytes(&self) -> i64 {
        self.within(|calls| {
            let (mut free, mut total) = (0, 0);
            // SAFETY: a context is current.
            ok(unsafe { (calls.cuMemGetInfo_v2)(&mut free, &mut total) });
            free as i64
        })
    }

    /// The context that is current on this thread, as a number.
    pub fn current(&self) -> usize {
        let mut context = null_mut();
        // SAFETY: the pointer is valid.
        ok(unsafe { (self.host.calls.cuCtxGetCurrent)(&mut context) });
        context as usize
    }

    pub fn primary(&self) -> usize {
        self.host.primary as usize
    }

    /// Runs with a context of the host's own, which is not the primary one.
    pub fn with_own_context(&self, body: impl FnOnce(usize)) {
        let calls = &self.host.calls;
        let mut own = null_mut();
        // SAFETY: the device exists. Creating pushes the context, destroying pops it.
        ok(unsafe { (calls.cuCtxCreate_v2)(&mut own, 0, self.host.device) });
        body(own as usize);
        // SAFETY: created above.
        ok(unsafe { (calls.cuCtxDestroy_v2)(own) });
    }

    /// Runs with the primary context current, as in a host that uses the runtime API.
    pub fn with_primary_context(&self, body: impl FnOnce(usize)) {
        self.within(|_| body(self.primary()));
    }

    pub fn memory(&self, bytes: usize) -> Memory<'_> {
        let mut address = 0;
        // SAFETY: a context is current.
        self.within(|calls| ok(unsafe { (calls.cuMemAlloc_v2)(&mut address, bytes.max(1)) }));
        Memory { gpu: self, address, bytes }
    }

    /// Device memory with these bytes in it.
    pub fn copy_of(&self, bytes: &[u8]) -> Memory<'_> {
        let memory = self.memory(bytes.len());
        memory.write(bytes);
        memory
    }

    pub fn pinned(&self, bytes: &[u8]) -> Pinned<'_> {
        let mut start = null_mut();
        // SAFETY: a context is current.
        self.within(|calls| ok(unsafe { (calls.cuMemHostAlloc)(&mut start, bytes.len().max(1), 0) }));
        // SAFETY: the block is new and has that length.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), start.cast(), bytes.len()) };
        Pinned { gpu: self, start: start.cast(), bytes: bytes.len() }
    }

    /// A non-blocking stream.
    pub fn stream(&self) -> Stream<'_> {
        let mut handle = null_mut();
        // SAFETY: a context is current.
        self.within(|calls| ok(unsafe { (calls.cuStreamCreate)(&mut handle, NON_BLOCKING) }));
        Stream { gpu: self, handle }
    }

    /// Stream 0.
    pub fn default_stream(&self) -> Stream<'_> {
        Stream { gpu: self, handle: null_mut() }
    }
}

pub struct Memory<'a> {
    gpu: &'a Gpu,
    pub address: u64,
    pub bytes: usize,
}

impl Memory<'_> {
    /// Synchronous: the bytes are visible to every stream on return.
    pub fn write(&self, from: &[u8]) {
        assert_eq!(from.len(), self.bytes);
        self.gpu.within(|calls| {
            // SAFETY: both regions have that length.
            ok(unsafe { (calls.cuMemcpyHtoD_v2)(self.address, from.as_ptr().cast(), from.len()) });
            // SAFETY: a context is current.
            ok(unsafe { (calls.cuCtxSynchronize)() });
        });
    }

    /// The contents after all work on the GPU.
    pub fn read(&self) -> Vec<u8> {
        let mut into = vec![0; self.bytes];
        self.gpu.within(|calls| {
            // SAFETY: a context is current.
            ok(unsafe { (calls.cuCtxSynchronize)() });
            // SAFETY: both regions have that length.
            ok(unsafe { (calls.cuMemcpyDtoH_v2)(into.as_mut_ptr().cast(), self.address, self.bytes) });
        });
        into
    }
}

impl Drop for Memory<'_> {
    fn drop(&mut self) {
        // SAFETY: allocated in `memory`.
        self.gpu.within(|calls| ok(unsafe { (calls.cuMemFree_v2)(self.address) }));
    }
}

pub struct Pinned<'a> {
    gpu: &'a Gpu,
    start: *mut u8,
    bytes: usize,
}

impl Pinned<'_> {
    /// The contents. Wait for copies first.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the block has that length.
        unsafe { std::slice::from_raw_parts(self.start, self.bytes) }
    }
}

impl Drop for Pinned<'_> {
    fn drop(&mut self) {
        // SAFETY: allocated in `pinned`.
        self.gpu.within(|calls| ok(unsafe { (calls.cuMemFreeHost)(self.start.cast()) }));
    }
}

pub struct Stream<'a> {
    gpu: &'a Gpu,
    /// Null for stream 0.
    pub handle: *mut c_void,
}

impl<'a> Stream<'a> {
    /// Delays later work in the stream.
    pub fn delay(&self, time: Duration) {
        unsafe extern "C" fn sleep(milliseconds: *mut c_void) {
            std::thread::sleep(Duration::from_millis(milliseconds as u64));
        }
        let milliseconds = time.as_millis() as usize as *mut c_void;
        // SAFETY: the function takes a number and calls no driver.
        self.gpu.within(|calls| ok(unsafe { (calls.cuLaunchHostFunc)(self.handle, sleep, milliseconds) }));
    }

    pub fn write(&self, to: &Memory<'a>, from: &Pinned<'a>) {
        assert_eq!(to.bytes, from.bytes);
        self.gpu.within(|calls| {
            // SAFETY: both regions have that length, and tests wait for the stream before they drop either.
            ok(unsafe { (calls.cuMemcpyHtoDAsync_v2)(to.address, from.start.cast(), from.bytes, self.handle) });
        });
    }

    pub fn read(&self, from: &Memory<'a>, to: &Pinned<'a>) {
        assert_eq!(to.bytes, from.bytes);
        self.gpu.within(|calls| {
            // SAFETY: as in `write`.
            ok(unsafe { (calls.cuMemcpyDtoHAsync_v2)(to.start.cast(), from.address, from.bytes, self.handle) });
        });
    }

    pub fn fill(&self, memory: &Memory<'a>, byte: u8) {
        // SAFETY: as in `write`.
        self.gpu
            .within(|calls| ok(unsafe { (calls.cuMemsetD8Async)(memory.address, byte, memory.bytes, self.handle) }));
    }

    pub fn wait(&self) {
        // SAFETY: the stream lives.
        self.gpu.within(|calls| ok(unsafe { (calls.cuStreamSynchronize)(self.handle) }));
    }

    /// Captures later work into a graph, in the strictest mode.
    pub fn begin_capture(&self) {
        const GLOBAL: u32 = 0;
        // SAFETY: the stream lives.
        self.gpu.within(|calls| ok(unsafe { (calls.cuStreamBeginCapture_v2)(self.handle, GLOBAL) }));
    }

    /// Ends a capture that is intact. The number of nodes of its graph.
    pub fn end_capture(&self) -> usize {
        self.gpu.within(|calls| {
            let (mut graph, mut nodes) = (null_mut(), 0);
            // SAFETY: the stream lives, and the pointers are valid; without an array, only the count is written.
            unsafe {
                ok((calls.cuStreamEndCapture)(self.handle, &mut graph));
                ok((calls.cuGraphGetNodes)(graph, null_mut(), &mut nodes));
                ok((calls.cuGraphDestroy)(graph));
            }
            nodes
        })
    }

    /// Whether all its work is done.
    pub fn is_idle(&self) -> bool {
        // SAFETY: the stream lives.
        let answer = self.gpu.within(|calls| unsafe { (calls.cuStreamQuery)(self.handle) });
        assert!(answer == 0 || answer == NOT_READY, "{answer}");
        answer == 0
    }
}

impl Drop for Stream<'_> {
    fn drop(&mut self) {
        self.wait();
        if !self.handle.is_null() {
            // SAFETY: made in `stream`.
            self.gpu.within(|calls| ok(unsafe { (calls.cuStreamDestroy_v2)(self.handle) }));
        }
    }
}
