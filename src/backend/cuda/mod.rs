//! NVIDIA GPUs, by kernels of our own and nothing but the driver. `driver` talks to the device, `launch` launches
//! kernels, `api` puts both below the GPU layer, and this file makes it a backend.

mod api;
mod autotune;
mod cards;
mod driver;
mod launch;
mod pack;
mod profile;
mod rate_table;
mod weights;

pub use cards::card;
pub use driver::{HostCopies, KernelArch, devices, ready};
pub use launch::CudaSizes;
pub use pack::PackBuffers;
pub use profile::device_profile;
pub use weights::{PreparedConv, WeightStore};

use std::path::Path;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use self::driver::{ARCH_VARIABLE, BLOCK_ALIGN, Context, DeviceBlock, PinnedMemory};
use self::launch::tiling::{self, FRAME_ALIGN};
use self::launch::{JobBlock, Kernels, LaunchQueue, Launcher};
use super::gpu::{GpuBackend, HostBlock, JobMemory, LaunchLimit};
use super::{DeviceAllocator, DeviceFacts, Note, Precision, Residency, Stop, WeightStorage};
use crate::error::Result;
use crate::ir::{ConvLayout, ConvSource, DeviceProfile, PinnedBytes, Rates, Sizes, WeightPart};

const _: () = assert!(BLOCK_ALIGN.is_multiple_of(FRAME_ALIGN), "frames in a block are aligned");

/// One GPU, in one precision.
pub struct Cuda {
    launcher: Launcher,
    rates: Rates,
    allocator: DeviceAllocator,
}

impl Cuda {
    pub fn new(index: u32, precision: Precision, allocator: DeviceAllocator) -> Result<Cuda> {
        let requested = std::env::var_os(ARCH_VARIABLE);
        Cuda::with_kernel_arch(index, precision, allocator, requested.map(|arch| arch.to_string_lossy().into_owned()))
    }

    fn with_kernel_arch(
        index: u32,
        precision: Precision,
        allocator: DeviceAllocator,
        requested: Option<String>,
    ) -> Result<Cuda> {
        let context = Context::new(index, requested.as_deref())?;
        let (kernels, rates) = shared_kernels(&context, precision)?;
        let (queue, limit) = (LaunchQueue::new(&context)?, LaunchLimit::new(&rates));
        let sizes = CudaSizes::new(precision, context.gpu.kernel_arch());
        let launcher = Launcher { sizes, context, kernels, queue, limit };
        Ok(Cuda { launcher, rates, allocator })
    }

    /// Its kernels are of this architecture: the GPU's own, unless `VVAE_ARCH` names an older one.
    pub fn kernel_arch(&self) -> KernelArch {
        self.context().gpu.kernel_arch()
    }

    fn context(&self) -> &Arc<Context> {
        &self.launcher.context
    }

    /// Device memory for a job, and its pinned memory.
    fn job_memory(&self, allocator: DeviceAllocator, bytes: u64, host: PinnedBytes) -> Result<JobMemory<Launcher>> {
        JobMemory::new(&self.launcher, self.job_block(allocator, bytes)?, host)
    }

    fn job_block(&self, allocator: DeviceAllocator, bytes: u64) -> Result<JobBlock> {
        let context = self.context();
        // Modules take device memory of the driver's own. No job is left without it once its memory is allocated.
        context.enter().and_then(|_current| self.launcher.kernels.load_common())?;
        let block = DeviceBlock::new(context, allocator, bytes)?;
        Ok(JobBlock { _graphs: self.launcher.queue.graph_guard(), block })
    }
}

impl Drop for Cuda {
    /// A call on the host's stream may have left work behind; kernels and memory must outlive it.
    fn drop(&mut self) {
        if let Ok(_current) = self.context().enter() {
            let _ = self.launcher.queue.synchronise();
            // Graphs go before the kernels they are made of.
            drop(self.launcher.queue.graph_guard());
        }
    }
}

/// Kernels are shared by all handles on a GPU with the same precision and kernel architecture. Rates are measured
/// once for all handles that the process ever has, so that those make the same plans.
fn shared_kernels(context: &Arc<Context>, precision: Precision) -> Result<(Arc<Kernels>, Rates)> {
    type Loaded = ((u32, KernelArch, Precision), Weak<Kernels>, Rates);
    static LOADED: Mutex<Vec<Loaded>> = Mutex::new(Vec::new());
    let (mut loaded, key) = (LOADED.lock(), (context.gpu.index, context.gpu.kernel_arch(), precision));
    let known = loaded.iter().find(|(known, ..)| *known == key);
    let measured = known.map(|(.., rates)| *rates);
    if let (Some(kernels), Some(rates)) = (known.and_then(|(_, kernels, _)| kernels.upgrade()), measured) {
        return Ok((kernels, rates));
    }
    let kernels = Arc::new(Kernels::new(context, precision));
    let rates = measured.map_or_else(|| profile::measure_rates(context, precision), Ok)?;
    loaded.retain(|(known, ..)| *known != key);
    loaded.push((key, Arc::downgrade(&kernels), rates));
    Ok((kernels, rates))
}

impl GpuBackend for Cuda {
    type Api = Launcher;

    fn api(&self) -> &Launcher {
        &self.launcher
    }

    fn block(&self, bytes: u64) -> Result<JobBlock> {
        self.job_block(self.allocator, bytes)
    }
}

impl DeviceFacts for Cuda {
    const HOST_MEMORY: bool = false;

    fn precision(&self) -> Precision {
        self.launcher.sizes.precision
    }

    fn arithmetic(&self) -> String {
        format!("compute capability {} with kernels of {}", self.context().gpu.capability, self.kernel_arch())
    }

    fn profile(&self) -> DeviceProfile {
        profile::device_profile(self.rates, self.precision(), self.kernel_arch())
    }

    fn tuned_profile(&self, table: Option<&Path>, stop: &mut Stop) -> Result<(DeviceProfile, Vec<Note>)> {
        let (measured, notes) = autotune::measured(self, table, stop)?;
        let derived = self.profile();
        let tuned = measured.map(|found| {
            // Whether there are pairs is not the table's to say.
            let pairs = derived.pairs.map(|own| found.pairs.unwrap_or(own));
            DeviceProfile { rates: found.rates, pairs, ..derived }
        });
        Ok((tuned.unwrap_or(derived), notes))
    }

    fn sizes(&self) -> &dyn Sizes {
        &self.launcher.sizes
    }

    fn check_layers(&self, layouts: &[ConvLayout], attention: &[u64]) -> Result<()> {
        tiling::check_layers(self.precision(), layouts, attention)
    }

    /// All of it where the driver does not say, as on a lost device: then allocating fails with the reason.
    fn free_bytes(&self) -> u64 {
        self.context().free_bytes().unwrap_or(self.context().gpu.memory_total)
    }
}

impl WeightStorage for Cuda {
    type Store = Arc<WeightStore>;
    type Conv = PreparedConv;
    type PackBuffers = PackBuffers;

    fn allocate_weights(&self, bytes: u64, residency: Residency) -> Result<Arc<WeightStore>> {
        let context = self.context();
        Ok(Arc::new(match residency {
            Residency::Device => WeightStore::Device(DeviceBlock::new(context, self.allocator, bytes)?),
            Residency::Host => WeightStore::Host(PinnedMemory::new(context, bytes)?),
        }))
    }

    fn is_pageable_store(&self, store: &Arc<WeightStore>) -> bool {
        matches!(&**store, WeightStore::Host(memory) if !memory.is_pinned())
    }

    fn allocate_conv(&self, store: &Arc<WeightStore>, offset: u64, conv: &ConvLayout) -> Result<PreparedConv> {
        let _current = self.context().enter()?;
        // As in `allocate`: weights are prepared before a job's memory is allocated.
        self.launcher.load_conv(conv)?;
        let (layout, order) = (self.launcher.sizes.weight_layout(conv), self.launcher.sizes.weight_order(conv));
        let (store, precision) = (Arc::clone(store), self.precision());
        Ok(PreparedConv { store, offset, conv: *conv, layout, precision, order })
    }

    fn weight_parts(&self, layout: &ConvLayout) -> Vec<WeightPart> {
        pack::parts(layout)
    }

    fn write_part(
        &self,
        conv: &PreparedConv,
        part: &WeightPart,
        source: &mut dyn ConvSource,
        buffers: &mut PackBuffers,
    ) -> Result<()> {
        let _current = self.context().enter()?;
        conv.write(self.launcher.queue.stream(), part, source, buffers)
    }
}

#[cfg(test)]
mod tests;
