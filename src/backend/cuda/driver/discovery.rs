//! The GPUs of this machine, as a host shows them to its user.

use cudarc::driver::sys;

use super::context::Context;
use super::device::Gpu;
use super::error::check;
use crate::backend::device::DeviceInfo;
use crate::backend::uuid::dashed;
use crate::error::Result;
use crate::ir::TensorDevice;

/// As nvidia-smi prints it and CUDA_VISIBLE_DEVICES takes it.
pub fn uuid(gpu: &Gpu) -> Result<String> {
    let mut uuid = sys::CUuuid { bytes: [0; 16] };
    // SAFETY: the device came from the driver.
    check("asking for a GPU's UUID", unsafe { sys::cuDeviceGetUuid_v2(&mut uuid, gpu.handle) })?;
    // A part of a GPU has a UUID of its own.
    let kind = if gpu.name.contains(" MIG ") { "MIG" } else { "GPU" };
    Ok(format!("{kind}-{}", dashed(uuid.bytes.map(|byte| byte as u8))))
}

/// Only a context can tell. Where none is active, none is created just to ask: then all memory counts as free.
fn free_bytes(index: u32, gpu: &Gpu) -> u64 {
    let (mut flags, mut active) = (0, 0);
    // SAFETY: the device came from the driver.
    let answer = unsafe { sys::cuDevicePrimaryCtxGetState(gpu.handle, &mut flags, &mut active) };
    let free = match check("asking whether the GPU is in use", answer) {
        Ok(()) if active != 0 => Context::new(index, None).and_then(|context| context.free_bytes()),
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
            place: TensorDevice::Cuda(index),
            memory_total: gpu.memory_total,
            memory_free: free_bytes(index, &gpu),
            uuid: uuid(&gpu).unwrap_or_default(),
            compute_capability: (gpu.capability.major as u32, gpu.capability.minor as u32),
            suits_auto: true,
            name: gpu.name,
        })
        .collect()
}
