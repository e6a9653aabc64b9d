//! A host for tests: loads the built library as any host does, and looks up its functions by name.

#![allow(dead_code, reason = "each test uses a part of it")]

pub mod network;
pub mod safetensors;

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_void};
use std::path::{Path, PathBuf};
use std::ptr::{null, null_mut};
use std::sync::OnceLock;

use video_vae::capi::*;

macro_rules! api {
    ($($name:ident($($arg:ty),*) -> $result:ty;)*) => {
        /// Every function of the library, by its own name.
        pub struct Api {
            $(pub $name: unsafe extern "C" fn($($arg),*) -> $result,)*
            _library: libloading::Library,
        }

        impl Api {
            fn load(path: &Path) -> Api {
                // SAFETY: the library is ours; its initialisers do nothing of note.
                let library = unsafe { libloading::Library::new(path) }
                    .unwrap_or_else(|why| panic!("cannot load {}: {why}", path.display()));
                $(
                    // SAFETY: the signatures are those of the header; `abi_header.rs` compiles against it.
                    let $name = *unsafe {
                        library.get::<unsafe extern "C" fn($($arg),*) -> $result>(concat!(stringify!($name), "\0"))
                    }
                    .unwrap_or_else(|why| panic!("{why}"));
                )*
                Api { $($name,)* _library: library }
            }

            /// The names of all functions that tests know.
            pub const NAMES: &[&str] = &[$(stringify!($name)),*];
        }
    };
}

api! {
    vvae_create(*const vvae_create_info, *mut *mut vvae) -> i32;
    vvae_configure(*mut vvae, *const c_char, *const c_char) -> i32;
    vvae_free(*mut vvae) -> i32;
    vvae_model_info(*mut vvae, *mut vvae_model_desc) -> i32;
    vvae_cancel(*mut vvae) -> i32;
    vvae_error(*mut vvae, *mut c_char, u64) -> i64;
    vvae_memory(*mut vvae, *mut vvae_memory_info) -> i32;
    vvae_trim(*mut vvae, u32) -> i32;
    vvae_encode(*mut vvae, *const vvae_tensor, *const vvae_tensor, *const vvae_run_info) -> i32;
    vvae_decode(*mut vvae, *const vvae_tensor, *const vvae_tensor, *const vvae_run_info) -> i32;
    vvae_plan(*mut vvae, *const c_char, *const i64, *mut vvae_plan_info, *mut c_char, u64) -> i32;
    vvae_stream_open(*mut vvae, *const c_char, *const i64, *mut *mut vvae_stream) -> i32;
    vvae_stream_push(*mut vvae_stream, *const vvae_tensor, *mut i64) -> i32;
    vvae_stream_pull(*mut vvae_stream, *const vvae_tensor, *const vvae_run_info, *mut i64) -> i32;
    vvae_stream_close(*mut vvae_stream) -> i32;
    vvae_stream_save(*mut vvae_stream, *mut c_void, u64, *mut u64) -> i32;
    vvae_stream_save_file(*mut vvae_stream, *const c_char) -> i32;
    vvae_stream_restore(*mut vvae, *const c_void, u64, *mut *mut vvae_stream) -> i32;
    vvae_stream_restore_file(*mut vvae, *const c_char, *mut *mut vvae_stream) -> i32;
    vvae_abi_version() -> u32;
    vvae_version() -> *const c_char;
    vvae_device_count() -> u32;
    vvae_device_info(u32, *mut vvae_device_desc) -> i32;
    vvae_node_count() -> u32;
    vvae_node_info(u32, *mut vvae_node_desc) -> i32;
    vvae_port_count(u32) -> u32;
    vvae_port_info(u32, u32, *mut vvae_port_desc) -> i32;
    vvae_param_count(u32) -> u32;
    vvae_param_info(u32, u32, *mut vvae_param_desc) -> i32;
    vvae_choice_count(u32, u32) -> u32;
    vvae_choice(u32, u32, u32) -> *const c_char;
}

/// The library under test.
pub fn api() -> &'static Api {
    static API: OnceLock<Api> = OnceLock::new();
    API.get_or_init(|| Api::load(&library_path()))
}

/// Cargo puts the library beside the test's own executable, or one folder up.
pub fn library_path() -> PathBuf {
    let name = format!("{}video_vae{}", std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    let exe = std::env::current_exe().expect("a test has a path");
    let found = exe.ancestors().skip(1).take(2).map(|folder| folder.join(&name)).find(|path| path.exists());
    found.unwrap_or_else(|| panic!("no {name} near {}", exe.display()))
}

pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

pub fn golden(name: &str) -> PathBuf {
    root().join("tests/golden").join(name)
}

/// A checkpoint of 16 to 32 channels and 16 groups: quick.
pub fn small() -> PathBuf {
    golden("small.safetensors")
}

/// The trained model of the demo.
pub fn demo() -> PathBuf {
    root().join("host-examples/assets/demo.safetensors")
}

/// A failed call.
#[derive(Debug, Clone, PartialEq)]
pub struct Failure {
    pub status: i32,
    pub text: String,
}

impl Failure {
    /// Asserts the status and words of the text.
    #[track_caller]
    pub fn says(&self, status: i32, words: &[&str]) {
        assert_eq!(self.status, status, "{}", self.text);
        for word in words {
            assert!(self.text.contains(word), "\"{word}\" is not in: {}", self.text);
        }
    }
}

/// The text of the last failure; of the thread, if `v` is null.
pub fn error_text(v: *mut vvae) -> String {
    let mut text = [0 as c_char; 4096];
    // SAFETY: the buffer is as long as said.
    let len = unsafe { (api().vvae_error)(v, text.as_mut_ptr(), text.len() as u64) };
    // SAFETY: it always ends with a NUL.
    let text = unsafe { CStr::from_ptr(text.as_ptr()) }.to_str().expect("texts are UTF-8").to_owned();
    assert_eq!(len as usize, text.len(), "{text}");
    text
}

/// `Ok` with the status if there was no failure. `v` as in [`error_text`].
pub fn outcome(v: *mut vvae, status: i32) -> Result<i32, Failure> {
    if status >= 0 { Ok(status) } else { Err(Failure { status, text: error_text(v) }) }
}

thread_local! {
    /// The device that handles of this test are opened on.
    static DEVICE: RefCell<CString> = RefCell::new(c"cpu".to_owned());
}

/// The devices of this machine, as `vvae_create` takes them. A machine without a GPU is tested without one, unless
/// VVAE_REQUIRE_CUDA is set.
pub fn devices() -> Vec<String> {
    // SAFETY: takes nothing.
    let count = unsafe { (api().vvae_device_count)() };
    let names = (0..count).map(|index| {
        let mut info = sized::<vvae_device_desc>();
        // SAFETY: the struct is as long as it says.
        assert_eq!(unsafe { (api().vvae_device_info)(index, &mut info) }, VVAE_OK);
        // SAFETY: the text ends with a NUL.
        unsafe { CStr::from_ptr(info.id.as_ptr()) }.to_str().expect("UTF-8").to_owned()
    });
    let names: Vec<String> = names.collect();
    let gpu = names.iter().any(|name| name.starts_with("cuda"));
    assert!(gpu || std::env::var_os("VVAE_REQUIRE_CUDA").is_none(), "no CUDA device, but VVAE_REQUIRE_CUDA is set");
    names
}

/// Runs a test once for each device, which [`Vae::open`] then opens on.
pub fn on_every_device(test: impl Fn(&str)) {
    for device in devices() {
        DEVICE.set(CString::new(device.as_str()).expect("no NUL"));
        test(&device);
    }
    DEVICE.set(c"cpu".to_owned());
}

pub fn create_info(weights: &CStr) -> vvae_create_info {
    vvae_create_info {
        struct_size: size_of::<vvae_create_info>() as u32,
        abi_version: VVAE_ABI_VERSION,
        weights: weights.as_ptr(),
        device: c"cpu".as_ptr(),
        log: None,
        log_user: null_mut(),
        alloc: None,
        free: None,
        alloc_user: null_mut(),
        device_alloc: None,
        device_free: None,
        device_alloc_user: null_mut(),
    }
}

pub fn run_info() -> vvae_run_info {
    vvae_run_info {
        struct_size: size_of::<vvae_run_info>() as u32,
        flags: 0,
        cuda_stream: null_mut(),
        progress: None,
        progress_user: null_mut(),
        logvar: null(),
    }
}

/// An empty struct of the ABI with its size set.
pub fn sized<T: Copy>() -> T {
    let mut value = std::mem::MaybeUninit::<T>::zeroed();
    // SAFETY: every struct of the ABI begins with its size and may be zero otherwise.
    unsafe {
        value.as_mut_ptr().cast::<u32>().write(size_of::<T>() as u32);
        value.assume_init()
    }
}

/// A tensor with its memory, shape and strides.
#[derive(Clone)]
pub struct Buffer {
    /// Wide elements, so that the memory is aligned for every element type.
    memory: Vec<u64>,
    pub dtype: u32,
    pub shape: [i64; 5],
    /// `None`: compact.
    pub strides: Option<[i64; 5]>,
}

impl Buffer {
    pub fn new(dtype: u32, shape: [i64; 5]) -> Buffer {
        let bytes = shape.iter().product::<i64>() as usize * (dtype >> 8 & 0xff) as usize / 8;
        Buffer { memory: vec![0; bytes.div_ceil(8)], dtype, shape, strides: None }
    }

    /// Channels innermost in memory, as [B, T, H, W, C].
    pub fn interleaved(dtype: u32, shape: [i64; 5]) -> Buffer {
        let [_, c, t, h, w] = shape;
        Buffer { strides: Some([t * h * w * c, 1, h * w * c, w * c, c]), ..Buffer::new(dtype, shape) }
    }

    pub fn from_f32(shape: [i64; 5], values: &[f32]) -> Buffer {
        let mut buffer = Buffer::new(VVAE_DTYPE_F32, shape);
        buffer.f32_mut().copy_from_slice(values);
        buffer
    }

    pub fn elements(&self) -> usize {
        self.shape.iter().product::<i64>() as usize
    }

    pub fn tensor(&self) -> vvae_tensor {
        vvae_tensor {
            data: self.memory.as_ptr().cast_mut().cast::<c_void>(),
            device_type: VVAE_DEVICE_CPU,
            device_id: 0,
            ndim: 5,
            dtype: self.dtype,
            shape: self.shape.as_ptr(),
            strides: self.strides.as_ref().map_or(null(), |s| s.as_ptr()),
            byte_offset: 0,
        }
    }

    pub fn bytes(&self) -> &[u8] {
        let bytes = self.elements() * (self.dtype >> 8 & 0xff) as usize / 8;
        // SAFETY: `new` made at least as many.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr().cast(), bytes) }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let bytes = self.bytes().len();
        // SAFETY: as in `bytes`.
        unsafe { std::slice::from_raw_parts_mut(self.memory.as_mut_ptr().cast(), bytes) }
    }

    pub fn f32(&self) -> &[f32] {
        assert_eq!(self.dtype, VVAE_DTYPE_F32);
        // SAFETY: the memory is aligned, holds this many, and any bits are a float.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr().cast(), self.elements()) }
    }

    pub fn f32_mut(&mut self) -> &mut [f32] {
        assert_eq!(self.dtype, VVAE_DTYPE_F32);
        // SAFETY: as in `f32`.
        unsafe { std::slice::from_raw_parts_mut(self.memory.as_mut_ptr().cast(), self.elements()) }
    }
}

/// A handle that frees itself.
pub struct Vae(pub *mut vvae);

// SAFETY: a handle may be used from any thread, one at a time, and says so if it is not.
unsafe impl Send for Vae {}
// SAFETY: as above.
unsafe impl Sync for Vae {}

impl Vae {
    pub fn open(weights: &Path) -> Result<Vae, Failure> {
        let weights = CString::new(weights.to_str().expect("UTF-8")).expect("no NUL");
        let device = DEVICE.with_borrow(CString::clone);
        Vae::create(&vvae_create_info { device: device.as_ptr(), ..create_info(&weights) })
    }

    pub fn create(info: &vvae_create_info) -> Result<Vae, Failure> {
        let mut v = null_mut();
        // SAFETY: `info` was made by `create_info`, and what the test put in is valid.
        let status = unsafe { (api().vvae_create)(info, &mut v) };
        assert_eq!(status == VVAE_OK, !v.is_null(), "a handle if and only if it went well");
        outcome(null_mut(), status).map(|_| Vae(v))
    }

    pub fn configure(&self, key: &str, value: &str) -> Result<i32, Failure> {
        let (key, value) = (CString::new(key).expect("no NUL"), CString::new(value).expect("no NUL"));
        // SAFETY: two texts.
        outcome(self.0, unsafe { (api().vvae_configure)(self.0, key.as_ptr(), value.as_ptr()) })
    }

    pub fn encode(&self, video: &Buffer, latent: &mut Buffer) -> Result<i32, Failure> {
        self.encode_with(video, latent, &run_info())
    }

    pub fn encode_with(&self, video: &Buffer, latent: &mut Buffer, run: &vvae_run_info) -> Result<i32, Failure> {
        // SAFETY: buffers hold what their tensors say.
        outcome(self.0, unsafe { (api().vvae_encode)(self.0, &video.tensor(), &latent.tensor(), run) })
    }

    pub fn decode(&self, latent: &Buffer, video: &mut Buffer) -> Result<i32, Failure> {
        self.decode_with(latent, video, &run_info())
    }

    pub fn decode_with(&self, latent: &Buffer, video: &mut Buffer, run: &vvae_run_info) -> Result<i32, Failure> {
        // SAFETY: buffers hold what their tensors say.
        outcome(self.0, unsafe { (api().vvae_decode)(self.0, &latent.tensor(), &video.tensor(), run) })
    }

    pub fn plan(&self, node: &str, shape: [i64; 5]) -> Result<(vvae_plan_info, String), Failure> {
        let node = CString::new(node).expect("no NUL");
        let (mut info, mut text) = (sized::<vvae_plan_info>(), [0 as c_char; 4096]);
        // SAFETY: every pointer is valid, the buffer as long as said.
        let status = unsafe {
            (api().vvae_plan)(self.0, node.as_ptr(), shape.as_ptr(), &mut info, text.as_mut_ptr(), text.len() as u64)
        };
        // SAFETY: a NUL is there from the start.
        let text = unsafe { CStr::from_ptr(text.as_ptr()) }.to_str().expect("UTF-8").to_owned();
        outcome(self.0, status).map(|_| (info, text))
    }

    pub fn stream(&self, node: &str, shape: [i64; 5]) -> Result<Stream<'_>, Failure> {
        let node = CString::new(node).expect("no NUL");
        let mut s = null_mut();
        // SAFETY: every pointer is valid.
        let status = unsafe { (api().vvae_stream_open)(self.0, node.as_ptr(), shape.as_ptr(), &mut s) };
        outcome(self.0, status).map(|_| Stream { vae: self, s })
    }

    pub fn restore(&self, state: &[u8]) -> Result<Stream<'_>, Failure> {
        let mut s = null_mut();
        // SAFETY: every pointer is valid.
        let status = unsafe { (api().vvae_stream_restore)(self.0, state.as_ptr().cast(), state.len() as u64, &mut s) };
        assert_eq!(status == VVAE_OK, !s.is_null(), "a stream if and only if it went well");
        outcome(self.0, status).map(|_| Stream { vae: self, s })
    }

    pub fn restore_file(&self, path: &Path) -> Result<Stream<'_>, Failure> {
        let path = CString::new(path.to_str().expect("UTF-8")).expect("no NUL");
        let mut s = null_mut();
        // SAFETY: every pointer is valid.
        let status = unsafe { (api().vvae_stream_restore_file)(self.0, path.as_ptr(), &mut s) };
        assert_eq!(status == VVAE_OK, !s.is_null(), "a stream if and only if it went well");
        outcome(self.0, status).map(|_| Stream { vae: self, s })
    }

    pub fn memory(&self) -> vvae_memory_info {
        let mut info = sized();
        // SAFETY: the struct is as long as it says.
        let status = unsafe { (api().vvae_memory)(self.0, &mut info) };
        outcome(self.0, status).expect("memory figures");
        info
    }

    pub fn trim(&self, what: u32) -> Result<i32, Failure> {
        // SAFETY: a handle and a number.
        outcome(self.0, unsafe { (api().vvae_trim)(self.0, what) })
    }

    pub fn cancel(&self) -> Result<i32, Failure> {
        // SAFETY: a handle.
        outcome(self.0, unsafe { (api().vvae_cancel)(self.0) })
    }

    /// Frees it now, and says how that went.
    pub fn free(self) -> i32 {
        let v = self.0;
        std::mem::forget(self);
        // SAFETY: a handle.
        unsafe { (api().vvae_free)(v) }
    }
}

impl Drop for Vae {
    fn drop(&mut self) {
        // SAFETY: a handle, or none any more.
        unsafe { (api().vvae_free)(self.0) };
    }
}

/// A stream that closes itself.
pub struct Stream<'a> {
    vae: &'a Vae,
    pub s: *mut vvae_stream,
}

impl Stream<'_> {
    /// Status and number of frames taken; `None` ends the clip.
    pub fn push(&self, frames: Option<&vvae_tensor>) -> Result<(i32, i64), Failure> {
        let mut taken = 0;
        let frames = frames.map_or(null(), |f| f as *const vvae_tensor);
        // SAFETY: the test's tensor is valid or null.
        let status = unsafe { (api().vvae_stream_push)(self.s, frames, &mut taken) };
        outcome(self.vae.0, status).map(|status| (status, taken))
    }

    /// Status and number of frames written.
    pub fn pull(&self, out: &vvae_tensor, run: Option<&vvae_run_info>) -> Result<(i32, i64), Failure> {
        let mut written = 0;
        let run = run.map_or(null(), |r| r as *const vvae_run_info);
        // SAFETY: the test's tensor and run info are valid.
        let status = unsafe { (api().vvae_stream_pull)(self.s, out, run, &mut written) };
        outcome(self.vae.0, status).map(|status| (status, written))
    }
}

impl Stream<'_> {
    pub fn save(&self) -> Result<Vec<u8>, Failure> {
        let mut size = 0;
        // SAFETY: without a buffer only the size is told.
        let status = unsafe { (api().vvae_stream_save)(self.s, null_mut(), 0, &mut size) };
        outcome(self.vae.0, status)?;
        let mut state = vec![0xa5; size as usize];
        // SAFETY: the buffer is as long as said.
        let status = unsafe { (api().vvae_stream_save)(self.s, state.as_mut_ptr().cast(), size, &mut size) };
        assert_eq!(size as usize, state.len());
        outcome(self.vae.0, status).map(|_| state)
    }

    pub fn save_file(&self, path: &Path) -> Result<i32, Failure> {
        let path = CString::new(path.to_str().expect("UTF-8")).expect("no NUL");
        // SAFETY: every pointer is valid.
        outcome(self.vae.0, unsafe { (api().vvae_stream_save_file)(self.s, path.as_ptr()) })
    }
}

impl Drop for Stream<'_> {
    fn drop(&mut self) {
        // SAFETY: a stream, or none any more.
        unsafe { (api().vvae_stream_close)(self.s) };
    }
}

/// Numbers for tests: the same on every machine and in every run. (A linear congruence, its upper bits mixed.)
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (self.0 ^ self.0 >> 31).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 16
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    /// One in `n`.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }
}
