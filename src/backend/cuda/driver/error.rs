//! What an answer of the driver means: the one place that turns it into an [`Error`].

use std::fmt::Display;

use cudarc::driver::sys::CUresult;

use crate::error::{Error, Result};

/// Turns an answer of the driver into an error. `doing` names the call for the user.
pub fn check(doing: &str, result: CUresult) -> Result<()> {
    use CUresult as R;
    let hint = match result {
        R::CUDA_SUCCESS => return Ok(()),
        R::CUDA_ERROR_OUT_OF_MEMORY => {
            return Err(Error::Memory(format!("{doing}: the GPU has no memory left; lower memory_limit")));
        }
        _ if is_device_lost(result) => {
            ": the GPU is lost to this process. Free this handle; if a new one fails too, restart the process"
        }
        R::CUDA_ERROR_NO_DEVICE => ": there is no NVIDIA GPU, or none is visible to this process",
        R::CUDA_ERROR_NO_BINARY_FOR_GPU | R::CUDA_ERROR_INVALID_PTX | R::CUDA_ERROR_UNSUPPORTED_PTX_VERSION => {
            ": the driver cannot run our kernels on this GPU; a newer driver may"
        }
        R::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH => {
            ": the driver's parts do not fit together; restart after a driver update"
        }
        _ => "",
    };
    Err(Error::Device(format!("{doing}: {result:?}{hint}")))
}

/// Whether nothing works in this context any more: a kernel or the hardware failed, or the context is gone.
pub fn is_device_lost(result: CUresult) -> bool {
    use CUresult as R;
    matches!(
        result,
        R::CUDA_ERROR_DEINITIALIZED
            | R::CUDA_ERROR_DEVICE_UNAVAILABLE
            | R::CUDA_ERROR_ECC_UNCORRECTABLE
            | R::CUDA_ERROR_NVLINK_UNCORRECTABLE
            | R::CUDA_ERROR_ILLEGAL_ADDRESS
            | R::CUDA_ERROR_LAUNCH_TIMEOUT
            | R::CUDA_ERROR_CONTEXT_IS_DESTROYED
            | R::CUDA_ERROR_ASSERT
            | R::CUDA_ERROR_HARDWARE_STACK_ERROR
            | R::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | R::CUDA_ERROR_MISALIGNED_ADDRESS
            | R::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | R::CUDA_ERROR_INVALID_PC
            | R::CUDA_ERROR_LAUNCH_FAILED
    )
}

/// Not [`Error::Memory`]: that makes a session plan again with less device memory.
pub fn host_memory_exhausted(bytes: u64, why: impl Display) -> Error {
    Error::HostMemory(format!("host_memory_limit: the host has no {bytes} bytes left ({why}); lower host_memory_limit"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use CUresult as R;

    #[test]
    fn check_tells_full_lost_and_unusable_devices_apart() {
        assert_eq!(check("x", R::CUDA_SUCCESS), Ok(()));
        let full = check("allocating", R::CUDA_ERROR_OUT_OF_MEMORY).unwrap_err();
        assert!(matches!(&full, Error::Memory(text) if text.contains("lower memory_limit")), "{full}");
        for lost in [R::CUDA_ERROR_ILLEGAL_ADDRESS, R::CUDA_ERROR_LAUNCH_FAILED, R::CUDA_ERROR_ECC_UNCORRECTABLE] {
            let error = check("waiting", lost).unwrap_err();
            let Error::Device(text) = &error else { panic!("{error}") };
            assert!(
                text.contains(&format!("{lost:?}")) && text.contains("is lost") && text.contains("Free this handle")
            );
            assert!(!text.contains("memory_limit"), "{text}");
        }
        let other = check("loading", R::CUDA_ERROR_INVALID_PTX).unwrap_err();
        assert!(
            matches!(&other, Error::Device(text) if text.contains("newer driver") && !text.contains("lost")),
            "{other}"
        );
    }

    #[test]
    fn host_memory_exhausted_is_not_taken_for_a_full_device() {
        let error = host_memory_exhausted(5, "no space");
        assert!(!matches!(error, Error::Memory(_)));
        assert_eq!(error.status(), Error::Memory(String::new()).status());
        assert!(error.to_string().contains("lower host_memory_limit"), "{error}");
    }
}
