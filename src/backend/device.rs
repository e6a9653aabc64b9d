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

/// All devices that can be used here. The first is what `auto` means. A card that both APIs list is listed once.
pub fn devices() -> Vec<DeviceInfo> {
    let mut found = cuda_devices();
    let others = vulkan_devices().into_iter().filter(|info| found.iter().all(|gpu| gpu.uuid != info.uuid));
    let others: Vec<_> = others.collect();
    found.push(cpu());
    found.extend(others);
    found
}

/// What `auto` means: a CUDA device, else the CPU. A device of Vulkan has to be named: no card's speed is known.
pub fn best_device() -> TensorDevice {
    cuda_devices().first().map_or(TensorDevice::Cpu, |info| info.place)
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
fn vulkan_devices() -> Vec<DeviceInfo> {
    super::vulkan::devices()
}

#[cfg(not(feature = "vulkan"))]
fn vulkan_devices() -> Vec<DeviceInfo> {
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
