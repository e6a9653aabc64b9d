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
    /// Whether it is a card of its own with units for products of matrices, or the CPU.
    pub suits_auto: bool,
}

/// All devices that can be used here. The first is what `auto` means. A card that both APIs list is listed once.
pub fn devices() -> Vec<DeviceInfo> {
    in_order(cuda_devices(), cpu(), vulkan_devices())
}

/// What `auto` means: the first CUDA device. Without one, the first of these that can be opened: cards through Vulkan,
/// then the CPU. Vulkan's loader is opened in this case alone.
pub fn auto_devices() -> Vec<TensorDevice> {
    match cuda_devices().first() {
        Some(first) => vec![first.place],
        None => auto_of(vulkan_devices()),
    }
}

fn auto_of(vulkan: Vec<DeviceInfo>) -> Vec<TensorDevice> {
    let cards = vulkan.into_iter().filter(|info| info.suits_auto).map(|info| info.place);
    cards.chain([TensorDevice::Cpu]).collect()
}

fn in_order(cuda: Vec<DeviceInfo>, cpu: DeviceInfo, vulkan: Vec<DeviceInfo>) -> Vec<DeviceInfo> {
    let others = vulkan.into_iter().filter(|info| cuda.iter().all(|known| known.uuid != info.uuid));
    let (before, after): (Vec<_>, Vec<_>) = others.partition(|info| info.suits_auto);
    cuda.into_iter().chain(before).chain([cpu]).chain(after).collect()
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
        suits_auto: true,
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
        let (compute_capability, suits_auto) = ((0, 0), false);
        DeviceInfo { place, name, memory_total: 0, memory_free: 0, uuid, compute_capability, suits_auto }
    }

    fn cuda(index: u32, uuid: &str) -> DeviceInfo {
        device(TensorDevice::Cuda(index), uuid)
    }

    fn vulkan(index: u32, uuid: &str) -> DeviceInfo {
        device(TensorDevice::Vulkan(index), uuid)
    }

    fn places(cuda: Vec<DeviceInfo>, vulkan: Vec<DeviceInfo>) -> Vec<TensorDevice> {
        in_order(cuda, device(TensorDevice::Cpu, ""), vulkan).into_iter().map(|info| info.place).collect()
    }

    #[test]
    fn cuda_comes_first_and_devices_of_vulkan_last() {
        use TensorDevice::{Cpu, Cuda, Vulkan};
        let found = || vec![vulkan(0, "a"), vulkan(1, "b")];
        assert_eq!(places(Vec::new(), Vec::new()), [Cpu]);
        assert_eq!(places(Vec::new(), found()), [Cpu, Vulkan(0), Vulkan(1)]);
        assert_eq!(places(vec![cuda(0, "c")], found()), [Cuda(0), Cpu, Vulkan(0), Vulkan(1)]);
    }

    #[test]
    fn auto_takes_cards_of_vulkan_before_the_cpu_and_other_devices_of_vulkan_never() {
        use TensorDevice::{Cpu, Cuda, Vulkan};
        let card = DeviceInfo { suits_auto: true, ..vulkan(1, "b") };
        let found = || vec![vulkan(0, "a"), card.clone(), vulkan(2, "c")];
        assert_eq!(auto_of(found()), [Vulkan(1), Cpu]);
        assert_eq!(auto_of(vec![vulkan(0, "a")]), [Cpu]);
        assert_eq!(places(Vec::new(), found()), [Vulkan(1), Cpu, Vulkan(0), Vulkan(2)]);
        assert_eq!(places(vec![cuda(0, "b")], found()), [Cuda(0), Cpu, Vulkan(0), Vulkan(2)]);
    }

    #[test]
    fn a_card_of_both_apis_is_listed_once() {
        use TensorDevice::{Cpu, Cuda, Vulkan};
        assert_eq!(places(vec![cuda(0, "a")], vec![vulkan(0, "a"), vulkan(1, "b")]), [Cuda(0), Cpu, Vulkan(1)]);
    }
}
