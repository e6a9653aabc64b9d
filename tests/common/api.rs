//! The library's functions by name, and its structs with their defaults.

use std::ffi::{CStr, c_char, c_void};
use std::path::{Path, PathBuf};
use std::ptr::{null, null_mut};
use std::sync::OnceLock;

use video_vae::capi::*;

macro_rules! api {
    ($($name:ident($($arg:ty),*) -> $result:ty;)*) => {
        /// Every function of the library.
        pub struct Api {
            $(pub $name: unsafe extern "C" fn($($arg),*) -> $result,)*
            /// `None` if the functions are linked.
            _library: Option<libloading::Library>,
        }

        impl Api {
            fn load(path: &Path) -> Api {
                // SAFETY: the library under test. It has no initialisers with effects.
                let library = unsafe { libloading::Library::new(path) }
                    .unwrap_or_else(|why| panic!("cannot load {}: {why}", path.display()));
                $(
                    // SAFETY: the signatures are those of the header; `abi_header.rs` compiles against it.
                    let $name = *unsafe {
                        library.get::<unsafe extern "C" fn($($arg),*) -> $result>(concat!(stringify!($name), "\0"))
                    }
                    .unwrap_or_else(|why| panic!("{why}"));
                )*
                Api { $($name,)* _library: Some(library) }
            }

            /// The functions that are linked into this program.
            fn linked() -> Api {
                Api { $($name: video_vae::capi::$name,)* _library: None }
            }

            /// The names of all functions.
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
    vvae_handle_device(*mut vvae, u32, *mut vvae_handle_device_info) -> i32;
    vvae_trim(*mut vvae, u32) -> i32;
    vvae_encode(*mut vvae, *const vvae_tensor, *const vvae_tensor, *const vvae_run_info) -> i32;
    vvae_decode(*mut vvae, *const vvae_tensor, *const vvae_tensor, *const vvae_run_info) -> i32;
    vvae_plan(*mut vvae, *const c_char, *const i64, *mut vvae_plan_info, *mut c_char, u64) -> i32;
    vvae_plan_timeline(*mut vvae, *const c_char, *const i64, *mut c_char, u64, *mut u64) -> i32;
    vvae_range_inputs(*mut vvae, *const c_char, i64, i64, i64, *mut i64, *mut i64) -> i32;
    vvae_encode_range(*mut vvae, *const vvae_tensor, i64, i64, *const vvae_tensor, *const vvae_run_info) -> i32;
    vvae_decode_range(*mut vvae, *const vvae_tensor, i64, i64, *const vvae_tensor, *const vvae_run_info) -> i32;
    vvae_plan_range(*mut vvae, *const c_char, *const i64, i64, i64, *mut vvae_plan_info, *mut c_char, u64) -> i32;
    vvae_last_run(*mut vvae, *mut vvae_run_report, *mut c_char, u64) -> i32;
    vvae_stream_open(*mut vvae, *const c_char, *const i64, *mut *mut vvae_stream) -> i32;
    vvae_stream_open_at(*mut vvae, *const c_char, *const i64, i64, *mut *mut vvae_stream) -> i32;
    vvae_stream_push(*mut vvae_stream, *const vvae_tensor, *mut i64) -> i32;
    vvae_stream_pull(*mut vvae_stream, *const vvae_tensor, *const vvae_run_info, *mut i64) -> i32;
    vvae_stream_close(*mut vvae_stream) -> i32;
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

static API: OnceLock<Api> = OnceLock::new();

/// The library under test.
pub fn api() -> &'static Api {
    API.get_or_init(|| Api::load(&library_path()))
}

/// Makes the linked library the one under test. Fuzz targets need it: coverage is that of linked code.
pub fn use_linked_library() {
    API.get_or_init(Api::linked);
}

/// Cargo puts the library next to the test's executable, or one folder up.
pub fn library_path() -> PathBuf {
    let name = format!("{}video_vae{}", std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    let exe = std::env::current_exe().expect("a test has a path");
    let found = exe.ancestors().skip(1).take(2).map(|folder| folder.join(&name)).find(|path| path.exists());
    found.unwrap_or_else(|| panic!("no {name} near {}", exe.display()))
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
        progress: None,
        progress_user: null_mut(),
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
