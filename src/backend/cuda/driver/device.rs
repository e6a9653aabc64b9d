//! The NVIDIA driver: whether there is one, what its answers mean, and its devices.

use cudarc::driver::sys::{self, CUdevice, CUresult};
use once_cell::sync::OnceCell;
use std::ffi::CStr;

use crate::backend::cuda::driver::context::Context;
use crate::backend::device::DeviceInfo;
use crate::error::{Error, Result};

/// The oldest driver that takes our PTX and has every function we call.
const OLDEST: i32 = 12_000;

/// Says why CUDA cannot be used, if it cannot. Looks once.
pub fn ready() -> Result<()> {
    static READY: OnceCell<Result<()>> = OnceCell::new();
    READY.get_or_init(look).clone()
}

fn look() -> Result<()> {
    // SAFETY: opens a library by name, which is what loading the driver is.
    if !unsafe { sys::is_culib_present() } {
        return Err(Error::Device("no NVIDIA driver was found on this machine".into()));
    }
    let mut version = 0;
    // SAFETY: the library is there; both functions are as old as CUDA.
    unsafe {
        check("starting the NVIDIA driver", sys::cuInit(0))?;
        check("asking the NVIDIA driver for its version", sys::cuDriverGetVersion(&mut version))?;
    }
    if version < OLDEST {
        let (major, minor) = (version / 1000, version % 1000 / 10);
        return Err(Error::Device(format!(
            "the NVIDIA driver is for CUDA {major}.{minor}; CUDA 12.0 or newer is needed: update the driver"
        )));
    }
    Ok(())
}

/// Turns an answer of the driver into words. `doing` is what we were about.
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

/// What we need to know of a GPU.
#[derive(Debug, Clone)]
pub struct Gpu {
    /// As in its name, `cuda:0`.
    pub index: u32,
    pub handle: CUdevice,
    pub name: String,
    pub capability: (i32, i32),
    pub multiprocessors: u32,
    /// Shared memory that a block may have.
    pub shared_bytes: u32,
    pub memory_total: u64,
    /// Cycles a second, of the multiprocessors and of the memory, and the bytes that its bus is wide.
    pub cycles: f64,
    pub memory_cycles: f64,
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
        let kilohertz = |which| attribute(handle, which).map(|khz| f64::from(khz) * 1e3);
        Ok(Gpu {
            index,
            handle,
            name,
            capability: (major, minor),
            multiprocessors,
            shared_bytes,
            memory_total: total as u64,
            cycles: kilohertz(A::CU_DEVICE_ATTRIBUTE_CLOCK_RATE)?,
            memory_cycles: kilohertz(A::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE)?,
            memory_bus_bytes: f64::from(attribute(handle, A::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH)?) / 8.0,
        })
    }

    /// Kernels need the tensor cores of this generation.
    pub fn check_capability(&self) -> Result<()> {
        if self.capability >= (8, 0) {
            return Ok(());
        }
        let (major, minor) = self.capability;
        Err(Error::Device(format!(
            "{} has compute capability {major}.{minor}; 8.0 or newer (RTX 30, A100) is needed: use device \"cpu\"",
            self.name
        )))
    }
}

/// As nvidia-smi prints it and CUDA_VISIBLE_DEVICES takes it.
fn uuid(gpu: &Gpu) -> Result<String> {
    let mut uuid = sys::CUuuid { bytes: [0; 16] };
    // SAFETY: the device came from the driver.
    check("asking for a GPU's UUID", unsafe { sys::cuDeviceGetUuid_v2(&mut uuid, gpu.handle) })?;
    // A part of a GPU has a UUID of its own.
    let kind = if gpu.name.contains(" MIG ") { "MIG" } else { "GPU" };
    Ok(format!("{kind}-{}", dashed(&uuid.bytes.map(|byte| byte as u8))))
}

fn dashed(uuid: &[u8; 16]) -> String {
    let mut text = String::with_capacity(36);
    for (at, byte) in uuid.iter().enumerate() {
        if matches!(at, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text += &format!("{byte:02x}");
    }
    text
}

/// Only a context knows what is free. Where nobody has one, none is made just to ask: then all of it is.
fn free_bytes(index: u32, gpu: &Gpu) -> u64 {
    let (mut flags, mut active) = (0, 0);
    // SAFETY: the device came from the driver.
    let answer = unsafe { sys::cuDevicePrimaryCtxGetState(gpu.handle, &mut flags, &mut active) };
    let free = match check("asking whether the GPU is in use", answer) {
        Ok(()) if active != 0 => Context::new(index).and_then(|context| context.free_bytes()),
        _ => Ok(gpu.memory_total),
    };
    free.unwrap_or(gpu.memory_total)
}

/// The GPUs that can be used, in the driver's order.
pub fn devices() -> Vec<DeviceInfo> {
    let gpus = (0..Gpu::count().unwrap_or(0)).filter_map(|index| Some((index, Gpu::new(index).ok()?)));
    let usable = gpus.filter(|(_, gpu)| gpu.check_capability().is_ok());
    usable
        .map(|(index, gpu)| DeviceInfo {
            id: format!("cuda:{index}"),
            memory_total: gpu.memory_total,
            memory_free: free_bytes(index, &gpu),
            uuid: uuid(&gpu).unwrap_or_default(),
            compute_capability: (gpu.capability.0 as u32, gpu.capability.1 as u32),
            name: gpu.name,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_uuid_is_written_in_five_parts() {
        let bytes = std::array::from_fn(|i| 0xe0 + i as u8);
        assert_eq!(super::dashed(&bytes), "e0e1e2e3-e4e5-e6e7-e8e9-eaebecedeeef");
    }
}
