//! What an answer of the driver means: one place turns it into an [`Error`].

use std::ffi::CStr;

use cudarc::driver::sys::{self, CUresult};

use crate::error::{Error, Result};

/// Turns an answer of the driver into an error. `doing` names the call for the user.
pub fn check(doing: &str, result: CUresult) -> Result<()> {
    use CUresult as R;
    let hint = match result {
        R::CUDA_SUCCESS => return Ok(()),
        R::CUDA_ERROR_OUT_OF_MEMORY => {
            return Err(Error::Memory(format!("{doing}: the GPU has no memory left; lower memory_limit")));
        }
        R::CUDA_ERROR_NO_DEVICE => "there is no NVIDIA GPU, or none is visible to this process",
        R::CUDA_ERROR_NO_BINARY_FOR_GPU | R::CUDA_ERROR_INVALID_PTX | R::CUDA_ERROR_UNSUPPORTED_PTX_VERSION => {
            "the driver cannot run our kernels on this GPU; a newer driver may"
        }
        R::CUDA_ERROR_ILLEGAL_ADDRESS | R::CUDA_ERROR_LAUNCH_FAILED | R::CUDA_ERROR_MISALIGNED_ADDRESS => {
            "a kernel failed; every CUDA user of this process has to start again. Please report this"
        }
        R::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH => "the driver's parts do not fit together; restart after a driver update",
        _ => "",
    };
    let separator = if hint.is_empty() { "" } else { ": " };
    Err(Error::Device(format!("{doing}: {}{separator}{hint}", name_of(result))))
}

fn name_of(result: CUresult) -> String {
    let mut name = std::ptr::null();
    // SAFETY: the driver was loaded, else there would be no answer to name; it points the name at static text.
    unsafe {
        if sys::cuGetErrorName(result, &mut name) == CUresult::CUDA_SUCCESS && !name.is_null() {
            return CStr::from_ptr(name).to_string_lossy().into_owned();
        }
    }
    format!("CUDA error {}", result as u32)
}
