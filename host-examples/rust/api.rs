//! The library, opened at run time, and its functions, looked up by name.

use std::ffi::{CStr, c_char};
use std::path::PathBuf;
use std::sync::OnceLock;

// Only types and constants: what the header says, in Rust. Every function comes from the opened library.
pub use video_vae::capi::{
    VVAE_ABI_MAJOR, VVAE_ABI_MINOR, VVAE_ABI_VERSION, VVAE_AGAIN, VVAE_DEVICE_CPU, VVAE_DEVICE_CUDA,
    VVAE_DEVICE_VULKAN, VVAE_DTYPE_BF16, VVAE_DTYPE_F16, VVAE_DTYPE_F32, VVAE_DTYPE_U8, VVAE_DTYPE_U16, VVAE_END,
    VVAE_LOG_WARNING, VVAE_OK, VVAE_PARAM_BOOL, VVAE_PARAM_BYTES, VVAE_PARAM_CHOICE, VVAE_PARAM_FLOAT,
    VVAE_PARAM_HAS_AUTO, VVAE_PARAM_HAS_RANGE, VVAE_PARAM_INT, VVAE_PARAM_TEXT, VVAE_PORT_INPUT, vvae,
    vvae_create_info, vvae_device_desc, vvae_handle_device_info, vvae_memory_info, vvae_model_desc, vvae_node_desc,
    vvae_param_desc, vvae_plan_info, vvae_port_desc, vvae_run_info, vvae_run_report, vvae_stream, vvae_tensor,
};

use crate::Result;

macro_rules! functions {
    ($($name:ident: fn($($argument:ty),*) -> $result:ty;)*) => {
        /// The functions this command uses, each under its own name.
        pub struct Api {
            $(pub $name: unsafe extern "C" fn($($argument),*) -> $result,)*
            /// Where they come from.
            pub path: PathBuf,
        }

        impl Api {
            fn resolve(library: &'static libloading::Library, path: PathBuf) -> Result<Api> {
                Ok(Api {
                    $($name: {
                        // SAFETY: the signatures are those of include/video_vae.h, which never change.
                        let found = unsafe { library.get(concat!(stringify!($name), "\0")) };
                        *found.map_err(|_| {
                            let name = stringify!($name);
                            format!("{} has no {name}; put a newer video-vae there", path.display())
                        })?
                    },)*
                    path,
                })
            }
        }
    };
}

functions! {
    vvae_create: fn(*const vvae_create_info, *mut *mut vvae) -> i32;
    vvae_configure: fn(*mut vvae, *const c_char, *const c_char) -> i32;
    vvae_free: fn(*mut vvae) -> i32;
    vvae_model_info: fn(*mut vvae, *mut vvae_model_desc) -> i32;
    vvae_cancel: fn(*mut vvae) -> i32;
    vvae_error: fn(*mut vvae, *mut c_char, u64) -> i64;
    vvae_handle_device: fn(*mut vvae, u32, *mut vvae_handle_device_info) -> i32;
    vvae_memory: fn(*mut vvae, *mut vvae_memory_info) -> i32;
    vvae_encode: fn(*mut vvae, *const vvae_tensor, *const vvae_tensor, *const vvae_run_info) -> i32;
    vvae_decode: fn(*mut vvae, *const vvae_tensor, *const vvae_tensor, *const vvae_run_info) -> i32;
    vvae_plan: fn(*mut vvae, *const c_char, *const i64, *mut vvae_plan_info, *mut c_char, u64) -> i32;
    vvae_plan_timeline: fn(*mut vvae, *const c_char, *const i64, *mut c_char, u64, *mut u64) -> i32;
    vvae_range_inputs: fn(*mut vvae, *const c_char, i64, i64, i64, *mut i64, *mut i64) -> i32;
    vvae_last_run: fn(*mut vvae, *mut vvae_run_report, *mut c_char, u64) -> i32;
    vvae_stream_open_at: fn(*mut vvae, *const c_char, *const i64, i64, *mut *mut vvae_stream) -> i32;
    vvae_stream_push: fn(*mut vvae_stream, *const vvae_tensor, *mut i64) -> i32;
    vvae_stream_pull: fn(*mut vvae_stream, *const vvae_tensor, *const vvae_run_info, *mut i64) -> i32;
    vvae_stream_close: fn(*mut vvae_stream) -> i32;
    vvae_abi_version: fn() -> u32;
    vvae_version: fn() -> *const c_char;
    vvae_device_count: fn() -> u32;
    vvae_device_info: fn(u32, *mut vvae_device_desc) -> i32;
    vvae_node_count: fn() -> u32;
    vvae_node_info: fn(u32, *mut vvae_node_desc) -> i32;
    vvae_port_count: fn(u32) -> u32;
    vvae_port_info: fn(u32, u32, *mut vvae_port_desc) -> i32;
    vvae_param_count: fn(u32) -> u32;
    vvae_param_info: fn(u32, u32, *mut vvae_param_desc) -> i32;
    vvae_choice_count: fn(u32, u32) -> u32;
    vvae_choice: fn(u32, u32, u32) -> *const c_char;
}

/// The library. Opened at the first call, and never closed: its threads may outlive any handle of ours.
pub fn api() -> Result<&'static Api> {
    static API: OnceLock<Result<Api>> = OnceLock::new();
    API.get_or_init(open).as_ref().map_err(Clone::clone)
}

fn open() -> Result<Api> {
    let path = find()?;
    // SAFETY: whoever names a library trusts it to run; ours does nothing when it is opened.
    let library = unsafe { libloading::Library::new(&path) }
        .map_err(|why| format!("{} cannot be opened ({why}); build it with: cargo build --release", path.display()))?;
    let api = Api::resolve(Box::leak(Box::new(library)), path)?;
    // SAFETY: takes nothing.
    let version = unsafe { (api.vvae_abi_version)() };
    let (major, minor) = (version >> 16, version & 0xFFFF);
    if major != VVAE_ABI_MAJOR || minor < VVAE_ABI_MINOR {
        return Err(format!(
            "{} has ABI {major}.{minor}; this command needs {VVAE_ABI_MAJOR}.{VVAE_ABI_MINOR} or a later \
             {VVAE_ABI_MAJOR}.x; build both from one source",
            api.path.display()
        ));
    }
    Ok(api)
}

/// $VIDEO_VAE_LIBRARY, else in Cargo's deps, beside the executable, one folder up, or in the lib folder of the prefix
/// it is installed in. Deps come first: `cargo run --example` leaves an older library above them as it is.
fn find() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("VIDEO_VAE_LIBRARY") {
        return Ok(PathBuf::from(path));
    }
    let name = libloading::library_filename("video_vae");
    let executable = std::env::current_exe().map_err(|why| format!("cannot tell where this command lies: {why}"))?;
    let folders: Vec<_> = executable.ancestors().skip(1).take(2).collect();
    let within = |name: &'static str| folders.iter().map(move |folder| folder.join(name));
    let places = within("deps").chain(within("")).chain(within("lib"));
    places.map(|folder| folder.join(&name)).find(|path| path.exists()).ok_or_else(|| {
        let place = folders.first().map(|f| f.display().to_string()).unwrap_or_default();
        let name = name.to_string_lossy();
        format!("{name} is not near {place}; run: cargo build --release, or set VIDEO_VAE_LIBRARY to its path")
    })
}

/// An empty struct of the ABI with its size set.
pub fn sized<T: Copy>() -> T {
    let mut value = std::mem::MaybeUninit::<T>::zeroed();
    // SAFETY: every struct this is used for begins with its size, and zero is a value of every other field.
    unsafe {
        value.as_mut_ptr().cast::<u32>().write(size_of::<T>() as u32);
        value.assume_init()
    }
}

/// A text of the library's that is valid for ever, such as those of discovery. Empty for NULL.
pub fn text(pointer: *const c_char) -> &'static str {
    if pointer.is_null() {
        return "";
    }
    // SAFETY: the header says so of every text that comes here.
    unsafe { CStr::from_ptr(pointer) }.to_str().unwrap_or("?")
}

/// The versions of the library and its ABI.
pub fn version() -> Result<(&'static str, String)> {
    let api = api()?;
    // SAFETY: these take nothing.
    let (version, abi) = unsafe { (text((api.vvae_version)()), (api.vvae_abi_version)()) };
    Ok((version, format!("{}.{}", abi >> 16, abi & 0xffff)))
}

/// The same in words, and where the library was found.
pub fn versions() -> Result<String> {
    let (version, abi) = version()?;
    Ok(format!("video-vae {version}, ABI {abi}, {}", api()?.path.display()))
}

/// A text in an array of a struct.
pub fn fixed_text(bytes: &[c_char]) -> String {
    let bytes: Vec<u8> = bytes.iter().take_while(|b| **b != 0).map(|b| *b as u8).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}
