//! GPUs of every vendor through Vulkan, by kernels of our own and nothing but the driver. `driver` talks to the device,
//! `launch` launches kernels, `api` puts both below the GPU layer, and this file makes it a backend.

mod api;
mod driver;
mod launch;
mod rates;
mod sizes;
mod weights;

pub use sizes::VulkanSizes;
pub use weights::{PackBuffers, PreparedConv, WeightStore};

use std::sync::Arc;

use ash::vk;

use self::driver::{Context, DeviceBlock, HostMemory, Instance, VulkanQueue};
use self::launch::Launcher;
use self::weights::WeightOrder;
use super::gpu::{GpuBackend, LaunchLimit, Queue};
use super::uuid::dashed;
use super::{DeviceAllocator, DeviceFacts, DeviceInfo, Precision, Residency, WeightStorage};
use crate::error::{Error, Result};
use crate::ir::{ConvLayout, ConvSource, DeviceProfile, Rates, Sizes, TensorDevice, WeightPart};

/// Pixels of the frames of a launch that keep a GPU busy.
const BUSY_PIXELS: u64 = 1 << 18;
/// More frames of a chunk gain nothing.
const CHUNK_FRAMES: u64 = 8;
/// Tiles begin at multiples of this many columns.
const COLUMN_STEP: u64 = 32;

/// One GPU, in one precision.
pub struct Vulkan {
    launcher: Launcher,
    rates: Rates,
}

impl Vulkan {
    pub fn new(index: u32, precision: Precision, allocator: DeviceAllocator) -> Result<Vulkan> {
        if allocator != DeviceAllocator::System {
            return Err(Error::Device(format!(
                "device_alloc: vulkan:{index} takes no memory of an allocator of the host's; leave device_alloc and \
                 device_free empty"
            )));
        }
        let context = Context::shared(index)?;
        let rates = estimated_rates(&context, precision);
        let (queue, limit) = (VulkanQueue::new(&context)?, LaunchLimit::new(&rates));
        let is_gpu = context.device.physical.kind != vk::PhysicalDeviceType::CPU;
        let launcher = Launcher { sizes: VulkanSizes { precision }, context, queue, limit };
        let mut gpu = Vulkan { launcher, rates };
        if is_gpu {
            gpu.rates = rates::measured_once(&gpu)?;
        }
        Ok(gpu)
    }

    fn context(&self) -> &Arc<Context> {
        &self.launcher.context
    }
}

impl Drop for Vulkan {
    /// Blocks of handles that are gone were the last to wait for the queue.
    fn drop(&mut self) {
        let _ = self.launcher.queue.synchronise();
    }
}

/// What a device of its type has at least: what launches are limited by, and plans where nothing can be measured.
fn estimated_rates(context: &Context, precision: Precision) -> Rates {
    let kind = context.device.physical.kind;
    let has_matrices = context.device.matrices.shape(precision).is_some();
    let (products, memory, copies) = match kind {
        vk::PhysicalDeviceType::DISCRETE_GPU | vk::PhysicalDeviceType::VIRTUAL_GPU => (4e12, 3e11, 1.2e10),
        vk::PhysicalDeviceType::CPU => (4e9, 5e9, 5e9),
        _ => (5e11, 4e10, 2e10),
    };
    let is_gpu = kind != vk::PhysicalDeviceType::CPU;
    // Cards with matrix units have several times as many products with them.
    let products = if has_matrices && is_gpu { 5.0 * products } else { products };
    Rates { products, memory, copies, copy_contention: 0.1 }
}

/// The devices that can be used, without those that are the CPU: they are opened by name alone.
pub fn devices() -> Vec<DeviceInfo> {
    let all = Instance::get().and_then(Instance::physical_devices).unwrap_or_default();
    let usable =
        (0..).zip(all).filter(|(_, device)| device.kind != vk::PhysicalDeviceType::CPU && device.check().is_ok());
    usable
        .map(|(index, device)| {
            let (memory_total, memory_free) = device.heap_bytes().unwrap_or((0, 0));
            DeviceInfo {
                place: TensorDevice::Vulkan(index),
                memory_total,
                memory_free,
                uuid: format!("GPU-{}", dashed(device.uuid)),
                compute_capability: (0, 0),
                suits_auto: device.kind == vk::PhysicalDeviceType::DISCRETE_GPU && device.features.matrices,
                name: device.name,
            }
        })
        .collect()
}

impl GpuBackend for Vulkan {
    type Api = Launcher;

    fn api(&self) -> &Launcher {
        &self.launcher
    }

    fn block(&self, bytes: u64) -> Result<DeviceBlock> {
        DeviceBlock::new(self.context(), bytes)
    }
}

impl DeviceFacts for Vulkan {
    const HOST_MEMORY: bool = false;

    fn precision(&self) -> Precision {
        self.launcher.sizes.precision
    }

    /// Division and square root are the driver's.
    fn arithmetic(&self) -> String {
        let physical = &self.context().device.physical;
        let matrix = self.launcher.matrix();
        let unit =
            matrix.map_or(String::new(), |shape| format!(" with matrices of {} x {} x {}", shape.m, shape.n, shape.k));
        format!("Vulkan on {} by {}{unit}", physical.name, physical.driver)
    }

    fn profile(&self) -> DeviceProfile {
        DeviceProfile {
            rates: self.rates,
            busy_pixels: BUSY_PIXELS,
            chunk_frames: CHUNK_FRAMES,
            column_step: COLUMN_STEP,
            fuses_norm: false,
            pairs: None,
            upsampler_pairs: false,
            // Scores and results are plain multiply-adds, with as many exponentials as keys for each thread of a query.
            attention_cost: 2.0,
            adds_in_place: true,
            offloads: true,
        }
    }

    fn sizes(&self) -> &dyn Sizes {
        &self.launcher.sizes
    }

    fn check_layers(&self, _: &[ConvLayout], attention: &[u64]) -> Result<()> {
        match attention.iter().find(|channels| !channels.is_multiple_of(8)) {
            Some(channels) => Err(Error::Device(format!(
                "no kernel on the GPU does attention over {channels} channels (a multiple of 8); use device \"cpu\" \
                 for this checkpoint"
            ))),
            None => Ok(()),
        }
    }

    /// All of it where the driver does not say.
    fn free_bytes(&self) -> u64 {
        let physical = &self.context().device.physical;
        let free = physical.heap_bytes().map_or(0, |(_, free)| free);
        // A block is one allocation where memory cannot be bound in pieces.
        if physical.features.sparse { free } else { free.min(physical.largest_allocation) }
    }
}

impl WeightStorage for Vulkan {
    type Store = Arc<WeightStore>;
    type Conv = PreparedConv;
    type PackBuffers = PackBuffers;

    fn allocate_weights(&self, bytes: u64, residency: Residency) -> Result<Arc<WeightStore>> {
        let context = self.context();
        Ok(Arc::new(match residency {
            Residency::Device => WeightStore::Device(DeviceBlock::new(context, bytes)?),
            Residency::Host => WeightStore::Host(HostMemory::new(context, bytes)?),
        }))
    }

    fn allocate_conv(&self, store: &Arc<WeightStore>, offset: u64, conv: &ConvLayout) -> Result<PreparedConv> {
        let order = match self.launcher.matrix() {
            Some(_) => WeightOrder::Matrices,
            None => WeightOrder::Plain,
        };
        let (store, layout) = (Arc::clone(store), self.launcher.sizes.weight_layout(conv));
        Ok(PreparedConv { store, offset, conv: *conv, layout, precision: self.precision(), order })
    }

    fn weight_parts(&self, layout: &ConvLayout) -> Vec<WeightPart> {
        weights::parts(layout)
    }

    fn write_part(
        &self,
        conv: &PreparedConv,
        part: &WeightPart,
        source: &mut dyn ConvSource,
        buffers: &mut PackBuffers,
    ) -> Result<()> {
        conv.write(self.context(), part, source, buffers)
    }
}

#[cfg(test)]
mod tests;
