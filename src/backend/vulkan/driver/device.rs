//! A device that is open: its queues, and what its answers mean. Knows nothing that is made of it.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use ash::{khr, vk};
use parking_lot::{Mutex, MutexGuard};

use super::bfloat16::{self, Bfloat16Features};
use super::error::check;
use super::instance::{Instance, PhysicalDevice};
use super::matrix::Matrices;
use crate::backend::Precision;
use crate::error::{Error, Result};

/// What a queue of the device is used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    Compute,
    Copy,
}

/// Queues of the device of one family.
pub struct DeviceQueues {
    pub family: u32,
    /// Whether they note times.
    pub has_clock: bool,
    queues: Vec<Mutex<vk::Queue>>,
}

/// "off": kernels use no matrix unit, as on devices that have none.
const MATRICES_VARIABLE: &str = "VVAE_VULKAN_MATRICES";

/// At most so many queues of a family: two bands compute beside each other, and two copies run each way.
const MOST_QUEUES: u32 = 2;

pub struct Device {
    pub raw: ash::Device,
    pub physical: PhysicalDevice,
    compute: DeviceQueues,
    /// Of copies alone, if the device has a family for them.
    copy: Option<DeviceQueues>,
    /// How kernels use its matrix unit, if they do.
    pub matrices: Matrices,
    lost: AtomicBool,
    next_queue: AtomicUsize,
}

impl Device {
    pub fn open(index: u32) -> Result<Device> {
        let instance = Instance::get()?;
        let mut all = instance.physical_devices()?;
        if index as usize >= all.len() {
            return Err(Error::Device(format!("there are {} Vulkan devices, from 0 on", all.len())));
        }
        let mut physical = all.swap_remove(index as usize);
        physical.check()?;
        // SAFETY: the device is of this instance.
        let families = unsafe { instance.raw.get_physical_device_queue_family_properties(physical.handle) };
        let (compute, copy) = queue_families(&families)
            .ok_or_else(|| Error::Device(format!("{} has no Vulkan queue that computes", physical.name)))?;
        // Blocks are bound in the queue that computes.
        physical.features.sparse &= families[compute as usize].queue_flags.contains(vk::QueueFlags::SPARSE_BINDING);
        let chosen: Vec<(u32, u32)> = [Some(compute), copy]
            .into_iter()
            .flatten()
            .map(|f| (f, families[f as usize].queue_count.min(MOST_QUEUES)))
            .collect();
        let uses_matrices =
            physical.features.matrices && std::env::var_os(MATRICES_VARIABLE).is_none_or(|set| set != "off");
        let matrices = if uses_matrices { Matrices::of(instance, &physical)? } else { Matrices::default() };
        let raw = open_device(&instance.raw, &physical, &chosen, &matrices)?;
        let queues = |family: u32, count: u32| DeviceQueues {
            family,
            has_clock: families[family as usize].timestamp_valid_bits > 0,
            // SAFETY: as many were asked for.
            queues: (0..count).map(|i| Mutex::new(unsafe { raw.get_device_queue(family, i) })).collect(),
        };
        Ok(Device {
            compute: queues(chosen[0].0, chosen[0].1),
            copy: chosen.get(1).map(|(family, count)| queues(*family, *count)),
            raw,
            physical,
            matrices,
            lost: AtomicBool::new(false),
            next_queue: AtomicUsize::new(0),
        })
    }

    /// Turns an answer of the device into an error, and notes if it is lost.
    pub fn check<T>(&self, doing: &str, answer: std::result::Result<T, vk::Result>) -> Result<T> {
        if matches!(answer, Err(vk::Result::ERROR_DEVICE_LOST)) {
            self.lost.store(true, Ordering::Relaxed);
        }
        check(doing, answer)
    }

    pub fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    pub fn queues(&self, role: Role) -> &DeviceQueues {
        self.copy.as_ref().filter(|_| role == Role::Copy).unwrap_or(&self.compute)
    }

    /// Numbers queues of ours, so that they take turns with those of the device.
    pub fn number_queue(&self) -> usize {
        self.next_queue.fetch_add(1, Ordering::Relaxed)
    }

    fn all_queues(&self) -> impl Iterator<Item = &DeviceQueues> {
        std::iter::once(&self.compute).chain(&self.copy)
    }

    /// The families that buffers are shared between.
    pub fn families(&self) -> Vec<u32> {
        self.all_queues().map(|queues| queues.family).collect()
    }

    /// Waits for everything that was submitted.
    pub fn wait_idle(&self) {
        let queues = self.all_queues().flat_map(|queues| &queues.queues);
        let _held: Vec<MutexGuard<vk::Queue>> = queues.map(|queue| queue.lock()).collect();
        // SAFETY: no other thread uses a queue now.
        let _ = self.check("waiting for the GPU", unsafe { self.raw.device_wait_idle() });
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: whatever was made of the device holds it, so it is gone.
        unsafe {
            let _ = self.raw.device_wait_idle();
            self.raw.destroy_device(None);
        }
    }
}

impl DeviceQueues {
    /// A queue of the device for a queue of ours.
    pub fn of(&self, number: usize) -> &Mutex<vk::Queue> {
        &self.queues[number % self.queues.len()]
    }
}

/// The family that computes, and one that only copies, if there is one.
fn queue_families(families: &[vk::QueueFamilyProperties]) -> Option<(u32, Option<u32>)> {
    let find = |has: &dyn Fn(vk::QueueFlags) -> bool| {
        families.iter().position(|family| family.queue_count > 0 && has(family.queue_flags)).map(|at| at as u32)
    };
    let (compute, graphics) = (vk::QueueFlags::COMPUTE, vk::QueueFlags::GRAPHICS);
    let computes = find(&|flags| flags.contains(compute) && !flags.contains(graphics));
    let computes = computes.or_else(|| find(&|flags| flags.contains(compute)))?;
    // Families for video have the flag too, and more of their own.
    let copies = find(&|flags| {
        let video = vk::QueueFlags::VIDEO_DECODE_KHR | vk::QueueFlags::VIDEO_ENCODE_KHR;
        flags.contains(vk::QueueFlags::TRANSFER) && !flags.intersects(compute | graphics | video)
    });
    Some((computes, copies))
}

fn open_device(
    instance: &ash::Instance,
    physical: &PhysicalDevice,
    queues: &[(u32, u32)],
    matrices: &Matrices,
) -> Result<ash::Device> {
    let uses_matrices = !matrices.is_none();
    let base = vk::PhysicalDeviceFeatures::default().shader_int64(true).sparse_binding(physical.features.sparse);
    let mut v11 = vk::PhysicalDeviceVulkan11Features::default().storage_buffer16_bit_access(true);
    let mut v12 = vk::PhysicalDeviceVulkan12Features::default()
        .storage_buffer8_bit_access(true)
        .buffer_device_address(true)
        .scalar_block_layout(true)
        .timeline_semaphore(true)
        .vulkan_memory_model(true)
        .host_query_reset(physical.features.resets_queries)
        .shader_float16(true);
    let mut v13 = vk::PhysicalDeviceVulkan13Features::default()
        .synchronization2(true)
        .maintenance4(true)
        .subgroup_size_control(uses_matrices)
        .compute_full_subgroups(uses_matrices);
    let mut matrix = vk::PhysicalDeviceCooperativeMatrixFeaturesKHR::default().cooperative_matrix(true);
    let mut bfloat16 = Bfloat16Features::needed();
    let mut extensions = Vec::new();
    let priorities = [1.0; MOST_QUEUES as usize];
    let family = |(family, count): &(u32, u32)| {
        let first = &priorities[..*count as usize];
        vk::DeviceQueueCreateInfo::default().queue_family_index(*family).queue_priorities(first)
    };
    let wanted: Vec<_> = queues.iter().map(family).collect();
    let mut info = vk::DeviceCreateInfo::default()
        .queue_create_infos(&wanted)
        .enabled_features(&base)
        .push_next(&mut v11)
        .push_next(&mut v12)
        .push_next(&mut v13);
    if uses_matrices {
        extensions.push(khr::cooperative_matrix::NAME.as_ptr());
        info = info.push_next(&mut matrix);
    }
    if matrices.shape(Precision::Bf16).is_some() {
        extensions.push(bfloat16::NAME.as_ptr());
        info = info.push_next(&mut bfloat16);
    }
    info = info.enabled_extension_names(&extensions);
    // SAFETY: the structures live during the call.
    check(&format!("opening {}", physical.name), unsafe { instance.create_device(physical.handle, &info, None) })
}
