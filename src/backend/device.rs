//! The devices of this machine, and how much memory the host has.

#[cfg(not(windows))]
mod linux_memory;

use crate::ir::TensorDevice;

/// What a host shows its user to choose from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    pub place: TensorDevice,
    pub name: String,
    pub memory_total: u64,
    pub memory_free: u64,
    /// What the driver knows a GPU by, as NVIDIA's tools print it; empty for the CPU.
    pub uuid: String,
    /// Major and minor of CUDA; zeros for other devices.
    pub compute_capability: (u32, u32),
}

/// A device that Vulkan lists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VulkanDeviceInfo {
    pub info: DeviceInfo,
    /// A card of its own with a matrix unit that kernels use. Others have to be named.
    pub is_for_auto: bool,
}

/// All devices that can be used here. The first is what `auto` means. A card that both APIs list is listed once.
pub fn devices() -> Vec<DeviceInfo> {
    in_order(cuda_devices(), vulkan_devices(), cpu())
}

/// What `auto` means. Vulkan is not asked where there is a CUDA device.
pub fn best_device() -> TensorDevice {
    let cuda = cuda_devices();
    let vulkan = if cuda.is_empty() { vulkan_devices() } else { Vec::new() };
    in_order(cuda, vulkan, cpu())[0].place
}

/// CUDA devices, those of Vulkan that `auto` may take, the CPU, and the others of Vulkan.
fn in_order(cuda: Vec<DeviceInfo>, mut vulkan: Vec<VulkanDeviceInfo>, cpu: DeviceInfo) -> Vec<DeviceInfo> {
    vulkan.retain(|device| cuda.iter().all(|known| known.uuid != device.info.uuid));
    let (for_auto, named): (Vec<_>, Vec<_>) = vulkan.into_iter().partition(|device| device.is_for_auto);
    let infos = |devices: Vec<VulkanDeviceInfo>| devices.into_iter().map(|device| device.info);
    cuda.into_iter().chain(infos(for_auto)).chain([cpu]).chain(infos(named)).collect()
}

#[cfg(feature = "cuda")]
pub fn cuda_devices() -> Vec<DeviceInfo> {
    super::cuda::devices()
}

/// There are none without the feature.
#[cfg(not(feature = "cuda"))]
pub fn cuda_devices() -> Vec<DeviceInfo> {
    Vec::new()
}

#[cfg(feature = "vulkan")]
fn vulkan_devices() -> Vec<VulkanDeviceInfo> {
    super::vulkan::devices()
}

#[cfg(not(feature = "vulkan"))]
fn vulkan_devices() -> Vec<VulkanDeviceInfo> {
    Vec::new()
}

fn cpu() -> DeviceInfo {
    let memory = host_memory();
    DeviceInfo {
        place: TensorDevice::Cpu,
        name: processor_name(),
        memory_total: memory.total,
        memory_free: memory.available,
        uuid: String::new(),
        compute_capability: (0, 0),
    }
}

/// Bytes of host memory. `u64::MAX` where the system does not say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostMemory {
    pub total: u64,
    pub available: u64,
}

#[cfg(not(windows))]
pub fn host_memory() -> HostMemory {
    linux_memory::memory(std::path::Path::new("/"))
}

#[cfg(windows)]
pub fn host_memory() -> HostMemory {
    #[repr(C)]
    #[derive(Default)]
    struct MemoryStatusEx {
        length: u32,
        load: u32,
        total: u64,
        available: u64,
        of_page_file_and_addresses: [u64; 5],
    }
    #[link(name = "kernel32")]
    unsafe extern "system" {
        fn GlobalMemoryStatusEx(status: *mut MemoryStatusEx) -> i32;
    }
    let mut status = MemoryStatusEx { length: size_of::<MemoryStatusEx>() as u32, ..MemoryStatusEx::default() };
    // SAFETY: the struct is the system's, and as long as it says.
    match unsafe { GlobalMemoryStatusEx(&mut status) } {
        0 => HostMemory { total: u64::MAX, available: u64::MAX },
        _ => HostMemory { total: status.total, available: status.available },
    }
}

fn processor_name() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model =
        text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':').map(|(_, name)| name.trim()));
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    format!("{}, {cores} cores", model.unwrap_or("CPU"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(place: TensorDevice, uuid: &str) -> DeviceInfo {
        let (name, uuid) = (format!("{place:?}"), uuid.to_owned());
        DeviceInfo { place, name, memory_total: 0, memory_free: 0, uuid, compute_capability: (0, 0) }
    }

    fn cuda(index: u32, uuid: &str) -> DeviceInfo {
        device(TensorDevice::Cuda(index), uuid)
    }

    fn vulkan(index: u32, uuid: &str, is_for_auto: bool) -> VulkanDeviceInfo {
        VulkanDeviceInfo { info: device(TensorDevice::Vulkan(index), uuid), is_for_auto }
    }

    fn places(cuda: Vec<DeviceInfo>, vulkan: Vec<VulkanDeviceInfo>) -> Vec<TensorDevice> {
        in_order(cuda, vulkan, device(TensorDevice::Cpu, "")).into_iter().map(|info| info.place).collect()
    }

    #[test]
    fn auto_takes_cuda_then_a_card_with_matrices_then_the_cpu() {
        use TensorDevice::{Cpu, Cuda, Vulkan};
        let integrated_and_card = || vec![vulkan(0, "a", false), vulkan(1, "b", true)];
        assert_eq!(places(Vec::new(), Vec::new()), [Cpu]);
        assert_eq!(places(Vec::new(), vec![vulkan(0, "a", false)]), [Cpu, Vulkan(0)]);
        assert_eq!(places(Vec::new(), integrated_and_card()), [Vulkan(1), Cpu, Vulkan(0)]);
        assert_eq!(places(vec![cuda(0, "c")], integrated_and_card()), [Cuda(0), Vulkan(1), Cpu, Vulkan(0)]);
    }

    #[test]
    fn a_card_of_both_apis_is_listed_once() {
        use TensorDevice::{Cpu, Cuda, Vulkan};
        let (found, listed) = (vec![cuda(0, "a")], vec![vulkan(0, "a", true), vulkan(1, "b", true)]);
        assert_eq!(places(found, listed), [Cuda(0), Vulkan(1), Cpu]);
    }
}
