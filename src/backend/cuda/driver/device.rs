//! A GPU and its properties, and whether the driver can be used at all.

use std::ffi::CStr;

use cudarc::driver::sys::{self, CUdevice};
use once_cell::sync::OnceCell;

use super::arch::KernelArch;
use super::error::check;
use crate::error::{Error, Result};

/// The oldest driver that takes our PTX and machine code, and has every function we call.
const OLDEST_DRIVER: i32 = 12_000;

/// Says why CUDA cannot be used, if it cannot. The driver is asked once.
pub fn ready() -> Result<()> {
    static READY: OnceCell<Result<()>> = OnceCell::new();
    READY.get_or_init(start_driver).clone()
}

fn start_driver() -> Result<()> {
    // SAFETY: opens a library by name, which is what loading the driver is.
    if !unsafe { sys::is_culib_present() } {
        return Err(Error::Device("no NVIDIA driver was found on this machine".into()));
    }
    // SAFETY: the library is there; the function is as old as CUDA.
    check("starting the NVIDIA driver", unsafe { sys::cuInit(0) })?;
    check_version(driver_version()?)
}

/// The newest CUDA that the driver knows: 12090 is 12.9. The driver has started.
pub fn driver_version() -> Result<i32> {
    let mut version = 0;
    // SAFETY: the library is there; the function is as old as CUDA.
    check("asking the NVIDIA driver for its version", unsafe { sys::cuDriverGetVersion(&mut version) })?;
    Ok(version)
}

fn check_version(version: i32) -> Result<()> {
    if version >= OLDEST_DRIVER {
        return Ok(());
    }
    let (major, minor) = (version / 1000, version % 1000 / 10);
    Err(Error::Device(format!(
        "the NVIDIA driver is for CUDA {major}.{minor}, and CUDA 12.0 or newer is needed: update the driver to version \
         525 or newer (528 on Windows)"
    )))
}

/// The properties of a GPU that launches and estimates depend on.
#[derive(Debug, Clone)]
pub struct Gpu {
    /// As in its name, `cuda:0`.
    pub index: u32,
    pub handle: CUdevice,
    pub name: String,
    pub capability: KernelArch,
    /// Kernels and rates are those of this architecture.
    kernel_arch: KernelArch,
    pub multiprocessors: u32,
    /// The most shared memory of a thread block.
    pub shared_bytes: u32,
    pub memory_total: u64,
    pub clock_hz: f64,
    pub memory_clock_hz: f64,
    pub memory_bus_bytes: f64,
}

fn attribute(gpu: CUdevice, which: sys::CUdevice_attribute) -> Result<i32> {
    let mut value = 0;
    // SAFETY: `gpu` came from the driver.
    check("asking about a GPU", unsafe { sys::cuDeviceGetAttribute(&mut value, which, gpu) })?;
    Ok(value)
}

impl Gpu {
    pub fn count() -> Result<u32> {
        ready()?;
        let mut count = 0;
        // SAFETY: the driver has started.
        check("counting GPUs", unsafe { sys::cuDeviceGetCount(&mut count) })?;
        Ok(count as u32)
    }

    pub fn new(index: u32) -> Result<Gpu> {
        use sys::CUdevice_attribute as A;
        let count = Gpu::count()?;
        if index >= count {
            return Err(Error::Device(format!(
                "device: there is no cuda:{index}; this machine has {count} CUDA devices"
            )));
        }
        let (mut handle, mut total, mut text) = (0, 0usize, [0; 128]);
        // SAFETY: the index exists, and the buffer is as long as said.
        unsafe {
            check("opening a GPU", sys::cuDeviceGet(&mut handle, index as i32))?;
            check("asking for a GPU's name", sys::cuDeviceGetName(text.as_mut_ptr(), text.len() as i32, handle))?;
            check("asking for a GPU's memory", sys::cuDeviceTotalMem_v2(&mut total, handle))?;
        }
        // SAFETY: the driver ends the name with a NUL.
        let name = unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned();
        let major = attribute(handle, A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(handle, A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let multiprocessors = attribute(handle, A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32;
        let shared_bytes = attribute(handle, A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as u32;
        let hertz = |which| attribute(handle, which).map(|khz| f64::from(khz) * 1e3);
        Ok(Gpu {
            index,
            handle,
            name,
            capability: KernelArch::new(major, minor),
            kernel_arch: KernelArch::new(major, minor),
            multiprocessors,
            shared_bytes,
            memory_total: total as u64,
            clock_hz: hertz(A::CU_DEVICE_ATTRIBUTE_CLOCK_RATE)?,
            memory_clock_hz: hertz(A::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE)?,
            memory_bus_bytes: f64::from(attribute(handle, A::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH)?) / 8.0,
        })
    }

    pub fn kernel_arch(&self) -> KernelArch {
        self.kernel_arch
    }

    /// The same GPU, used like an older one.
    pub fn with_kernel_arch(mut self, requested: &str) -> Result<Gpu> {
        (self.kernel_arch, self.shared_bytes) = KernelArch::select(requested, self.capability, self.shared_bytes)?;
        Ok(self)
    }

    /// Our kernels need the tensor cores of compute capability 8.0.
    pub fn check_capability(&self) -> Result<()> {
        if self.capability >= KernelArch::new(8, 0) {
            return Ok(());
        }
        Err(Error::Device(format!(
            "{} has compute capability {}; 8.0 or newer (RTX 30, A100) is needed: use device \"cpu\"",
            self.name, self.capability
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn older_drivers_are_refused_in_one_sentence() {
        for version in [12_000, 12_020, 12_090, 13_000] {
            assert_eq!(check_version(version), Ok(()));
        }
        for (version, says) in [(11_080, "CUDA 11.8"), (11_040, "CUDA 11.4"), (10_020, "CUDA 10.2")] {
            let error = check_version(version).unwrap_err().to_string();
            assert!(error.contains(says) && error.contains("525") && !error.contains(". "), "{error}");
        }
    }
}
