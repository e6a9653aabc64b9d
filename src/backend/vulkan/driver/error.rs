//! What an answer of the driver means: the one place that turns it into an [`Error`].

use ash::vk;

use crate::error::{Error, Result};

/// Turns an answer of the driver into an error. `doing` names the call for the user.
pub fn check<T>(doing: &str, answer: std::result::Result<T, vk::Result>) -> Result<T> {
    answer.map_err(|why| match why {
        vk::Result::ERROR_OUT_OF_DEVICE_MEMORY => {
            Error::Memory(format!("{doing}: the GPU has no memory left; lower memory_limit"))
        }
        // Not `Error::Memory`: that makes a session plan again with less device memory.
        vk::Result::ERROR_OUT_OF_HOST_MEMORY => Error::HostMemory(format!(
            "host_memory_limit: the host has no memory left ({doing}); lower host_memory_limit"
        )),
        vk::Result::ERROR_DEVICE_LOST => {
            Error::Device(format!("{doing}: the GPU is lost to this handle. Free it and open a new one"))
        }
        vk::Result::ERROR_INITIALIZATION_FAILED | vk::Result::ERROR_INCOMPATIBLE_DRIVER => {
            Error::Device(format!("{doing}: {why}: the Vulkan driver does not start; a newer driver may"))
        }
        _ => Error::Device(format!("{doing}: {why}")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn check_tells_full_and_lost_devices_apart() {
        assert_eq!(check("x", Ok(7)), Ok(7));
        let fails = |why| check::<()>("allocating", Err(why)).unwrap_err();
        assert!(matches!(fails(vk::Result::ERROR_OUT_OF_DEVICE_MEMORY), Error::Memory(_)));
        assert!(matches!(fails(vk::Result::ERROR_OUT_OF_HOST_MEMORY), Error::HostMemory(_)));
        let lost = fails(vk::Result::ERROR_DEVICE_LOST);
        assert!(matches!(&lost, Error::Device(text) if text.contains("open a new one")), "{lost}");
    }
}
