//! The loader, which is opened at run time, and the devices that it knows.

use std::ffi::CStr;
use std::sync::OnceLock;

use ash::{ext, khr, vk};

use super::bfloat16::{self, Bfloat16Features};
use super::error::check;
use crate::error::{Error, Result};

/// Of the loader and of devices: synchronization2 and maintenance4 are a part of it.
const LEAST_VERSION: u32 = vk::API_VERSION_1_3;

/// The loader. It lives as long as the process: drivers do not like to be opened and closed.
pub struct Instance {
    pub raw: ash::Instance,
    pub entry: ash::Entry,
}

impl Instance {
    /// Opened by the first call that asks for a Vulkan device.
    pub fn get() -> Result<&'static Instance> {
        static INSTANCE: OnceLock<Result<Instance>> = OnceLock::new();
        INSTANCE.get_or_init(Instance::open).as_ref().map_err(Clone::clone)
    }

    fn open() -> Result<Instance> {
        // SAFETY: the system's Vulkan loader. Its initialisers are those of every Vulkan program.
        let entry = unsafe { ash::Entry::load() };
        let entry = entry.map_err(|why| Error::Device(format!("the Vulkan loader cannot be opened: {why}")))?;
        let application = vk::ApplicationInfo::default().application_name(c"video-vae").api_version(LEAST_VERSION);
        let info = vk::InstanceCreateInfo::default().application_info(&application);
        // SAFETY: the structures live during the call.
        let raw = check("opening Vulkan", unsafe { entry.create_instance(&info, None) })?;
        Ok(Instance { raw, entry })
    }

    /// All devices, in the loader's order. Their place in it is their index.
    pub fn physical_devices(&self) -> Result<Vec<PhysicalDevice>> {
        // SAFETY: the instance is never destroyed.
        let all = check("listing Vulkan devices", unsafe { self.raw.enumerate_physical_devices() })?;
        Ok(all.into_iter().map(|handle| PhysicalDevice::new(&self.raw, handle)).collect())
    }
}

/// A device, and what is known of it without opening it.
#[derive(Clone)]
pub struct PhysicalDevice {
    pub handle: vk::PhysicalDevice,
    pub name: String,
    /// The driver's name and version, as it prints them.
    pub driver: String,
    pub uuid: [u8; 16],
    /// What compiled kernels depend on: card, driver and its version.
    pub cache_key: Vec<u8>,
    pub kind: vk::PhysicalDeviceType,
    pub memory: vk::PhysicalDeviceMemoryProperties,
    version: u32,
    /// Whether it tells how much of its memory is free.
    has_budget: bool,
    pub features: Features,
    /// Nanoseconds of a tick of its clock.
    pub tick_nanoseconds: f32,
    /// Bytes that one allocation may have for certain.
    pub largest_allocation: u64,
}

fn text(chars: &[std::ffi::c_char]) -> String {
    // SAFETY: the driver ends its texts with a NUL.
    unsafe { CStr::from_ptr(chars.as_ptr()) }.to_string_lossy().into_owned()
}

impl PhysicalDevice {
    fn new(instance: &ash::Instance, handle: vk::PhysicalDevice) -> PhysicalDevice {
        let (mut id, mut driver) =
            (vk::PhysicalDeviceIDProperties::default(), vk::PhysicalDeviceDriverProperties::default());
        let mut limits = vk::PhysicalDeviceMaintenance3Properties::default();
        let mut all =
            vk::PhysicalDeviceProperties2::default().push_next(&mut id).push_next(&mut driver).push_next(&mut limits);
        // SAFETY: the device is of this instance.
        unsafe { instance.get_physical_device_properties2(handle, &mut all) };
        let properties = all.properties;
        // SAFETY: as above.
        let extensions = unsafe { instance.enumerate_device_extension_properties(handle) }.unwrap_or_default();
        let has = |name: &CStr| extensions.iter().any(|one| one.extension_name_as_c_str() == Ok(name));
        let driver_name = format!("{} {}", text(&driver.driver_name), text(&driver.driver_info));
        let cache_key = [
            &properties.pipeline_cache_uuid[..],
            &properties.vendor_id.to_le_bytes(),
            &properties.device_id.to_le_bytes(),
            &properties.driver_version.to_le_bytes(),
            driver_name.as_bytes(),
        ]
        .concat();
        PhysicalDevice {
            handle,
            name: text(&properties.device_name),
            driver: driver_name,
            cache_key,
            uuid: id.device_uuid,
            kind: properties.device_type,
            // SAFETY: as above.
            memory: unsafe { instance.get_physical_device_memory_properties(handle) },
            version: properties.api_version,
            has_budget: has(ext::memory_budget::NAME),
            features: Features::of(instance, handle, &has),
            tick_nanoseconds: properties.limits.timestamp_period,
            largest_allocation: limits.max_memory_allocation_size,
        }
    }

    /// Whether all is there that the kernels need. If not, the error names what is missing.
    pub fn check(&self) -> Result<()> {
        let (found, least) = (self.version, LEAST_VERSION);
        if found < least {
            let dotted = |v| format!("{}.{}", vk::api_version_major(v), vk::api_version_minor(v));
            let (found, least) = (dotted(found), dotted(least));
            return Err(Error::Device(format!(
                "{} has Vulkan {found}, {least} is needed; a newer driver may have it",
                self.name
            )));
        }
        match self.features.missing {
            Some(missing) => Err(Error::Device(format!(
                "{} lacks the Vulkan feature {missing}; a newer driver may have it",
                self.name
            ))),
            None => Ok(()),
        }
    }

    /// Total and free bytes of the device's largest heap, as far as the driver tells.
    pub fn heap_bytes(&self) -> Result<(u64, u64)> {
        let instance = &Instance::get()?.raw;
        let heaps = &self.memory.memory_heaps[..self.memory.memory_heap_count as usize];
        let local = |heap: &vk::MemoryHeap| heap.flags.contains(vk::MemoryHeapFlags::DEVICE_LOCAL);
        let largest = (0..heaps.len()).filter(|i| local(&heaps[*i])).max_by_key(|i| heaps[*i].size).unwrap_or(0);
        let total = heaps[largest].size;
        if !self.has_budget {
            return Ok((total, total));
        }
        let mut budget = vk::PhysicalDeviceMemoryBudgetPropertiesEXT::default();
        let mut all = vk::PhysicalDeviceMemoryProperties2::default().push_next(&mut budget);
        // SAFETY: the device is of this instance.
        unsafe { instance.get_physical_device_memory_properties2(self.handle, &mut all) };
        let free = budget.heap_budget[largest].saturating_sub(budget.heap_usage[largest]);
        Ok((total, free.min(total)))
    }
}

/// What a device can do beside what every device can.
#[derive(Clone)]
pub struct Features {
    /// The first that the kernels need and the device lacks.
    missing: Option<&'static str>,
    /// Whether it can bind memory in pieces.
    pub sparse: bool,
    /// Whether the host may reset queries.
    pub resets_queries: bool,
    /// Whether kernels may use its matrix unit.
    pub matrices: bool,
    /// Whether that unit may multiply bf16.
    pub bfloat16_matrices: bool,
}

impl Features {
    fn of(instance: &ash::Instance, handle: vk::PhysicalDevice, has_extension: &dyn Fn(&CStr) -> bool) -> Features {
        let mut v11 = vk::PhysicalDeviceVulkan11Features::default();
        let mut v12 = vk::PhysicalDeviceVulkan12Features::default();
        let mut v13 = vk::PhysicalDeviceVulkan13Features::default();
        let mut matrices = vk::PhysicalDeviceCooperativeMatrixFeaturesKHR::default();
        let mut all =
            vk::PhysicalDeviceFeatures2::default().push_next(&mut v11).push_next(&mut v12).push_next(&mut v13);
        if has_extension(khr::cooperative_matrix::NAME) {
            all = all.push_next(&mut matrices);
        }
        let mut bfloat16 = Bfloat16Features::default();
        if has_extension(bfloat16::NAME) {
            all = all.push_next(&mut bfloat16);
        }
        // SAFETY: the device is of this instance.
        unsafe { instance.get_physical_device_features2(handle, &mut all) };
        let base = all.features;
        let mut floats = vk::PhysicalDeviceFloatControlsProperties::default();
        let mut properties = vk::PhysicalDeviceProperties2::default().push_next(&mut floats);
        // SAFETY: as above.
        unsafe { instance.get_physical_device_properties2(handle, &mut properties) };
        let required = [
            ("shaderInt64", base.shader_int64),
            ("shaderFloat16", v12.shader_float16),
            ("shaderRoundingModeRTEFloat16", floats.shader_rounding_mode_rte_float16),
            ("storageBuffer16BitAccess", v11.storage_buffer16_bit_access),
            ("storageBuffer8BitAccess", v12.storage_buffer8_bit_access),
            ("bufferDeviceAddress", v12.buffer_device_address),
            ("scalarBlockLayout", v12.scalar_block_layout),
            ("timelineSemaphore", v12.timeline_semaphore),
            ("vulkanMemoryModel", v12.vulkan_memory_model),
            ("synchronization2", v13.synchronization2),
            ("maintenance4", v13.maintenance4),
        ];
        let matrices = [matrices.cooperative_matrix, v13.subgroup_size_control, v13.compute_full_subgroups];
        let matrices = matrices.iter().all(|has| *has == vk::TRUE);
        Features {
            missing: required.iter().find(|(_, has)| *has != vk::TRUE).map(|(name, _)| *name),
            sparse: base.sparse_binding == vk::TRUE,
            resets_queries: v12.host_query_reset == vk::TRUE,
            matrices,
            bfloat16_matrices: matrices && bfloat16.has_needed(),
        }
    }
}
