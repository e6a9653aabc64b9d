//! NVIDIA GPUs, by kernels of our own and nothing but the driver. This file implements [`Backend`]; `driver` talks to
//! the device, `launch` launches kernels, `offload` moves what lies in host memory.

mod driver;
mod launch;
mod offload;
mod profile;

pub use driver::{KernelArch, devices, ready};
pub use launch::CudaSizes;
pub use offload::weights::{PreparedConv, WeightStore};

use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use self::driver::{ARCH_VARIABLE, BLOCK_ALIGN, Context, DeviceBlock, Event};
use self::launch::tiling::{FRAME_ALIGN, MAX_FRAMES};
use self::launch::{GraphGuard, Kernels, LaunchQueue, Launcher, tiling};
use self::offload::bands::BandPipeline;
use self::offload::staging::Staging;
use self::offload::weights::HostWeights;
use super::{
    AttentionOp, Backend, BandedOp, BlendOp, CarryOp, ConvLayout, ConvOp, ConvSource, DeviceAllocator, Frame,
    HostMemory, HostStream, Kept, LoadOp, NormOp, Precision, Stop, StoreOp,
};
use crate::error::{Error, Result};
use crate::tensor::{BandFrames, FrameShape, Rates};

/// The most operations in the stream. Enough to keep the GPU busy, few enough that a cancel acts soon.
const OPERATIONS_AHEAD: usize = 8;
/// In place of a number of elements: the operation is never collected with others, as it copies, or never repeats.
const NOT_COLLECTED: u64 = u64::MAX;

const _: () = assert!(BLOCK_ALIGN.is_multiple_of(FRAME_ALIGN), "frames in a block are aligned");

/// One GPU, in one precision.
pub struct Cuda {
    launcher: Launcher,
    rates: Rates,
    allocator: DeviceAllocator,
}

/// The memory of a job, and the copies and bands in flight in it.
pub struct JobMemory {
    _graphs: GraphGuard,
    staging: Staging,
    bands: BandPipeline,
    /// Recorded after each operation, in turn.
    operations: Vec<Event>,
    next_operation: usize,
    /// Whether the call is ordered on a stream of the host's, and must not block.
    on_host_stream: bool,
    block: DeviceBlock,
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
        let queue = LaunchQueue::new(&context)?;
        Ok(Cuda { launcher: Launcher { sizes: CudaSizes { precision }, context, kernels, queue }, rates, allocator })
    }

    /// Its kernels are of this architecture: the GPU's own, unless `VVAE_ARCH` names an older one.
    pub fn kernel_arch(&self) -> KernelArch {
        self.context().gpu.kernel_arch()
    }

    fn context(&self) -> &Arc<Context> {
        &self.launcher.context
    }

    /// Runs one operation: asks whether to stop, makes the context current, and keeps the stream short. A call on the
    /// host's stream fills it instead. `elements`: of the output.
    fn operate(
        &self,
        memory: &mut JobMemory,
        elements: u64,
        stop: &mut Stop,
        launch: impl FnOnce(&mut JobMemory) -> Result<()>,
    ) -> Result<()> {
        if stop() {
            return Err(Error::Cancelled);
        }
        let _current = self.context().enter()?;
        let queue = &self.launcher.queue;
        queue.begin(elements);
        let launched = launch(memory);
        let complete = queue.end();
        launched?;
        if !complete? || memory.on_host_stream {
            return Ok(());
        }
        let oldest = &memory.operations[memory.next_operation];
        memory.next_operation = (memory.next_operation + 1) % OPERATIONS_AHEAD;
        oldest.synchronise()?;
        queue.stream().record(oldest)
    }

    /// Waits for everything in the memory of a job. A call on the host's stream may have returned before its work has
    /// ended, also one of another job that used the memory.
    fn synchronise(&self, memory: &JobMemory) -> Result<()> {
        let _current = self.context().enter()?;
        self.launcher.queue.synchronise()?;
        memory.bands.synchronise()?;
        memory.staging.synchronise()
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

/// Loads kernels, and measures rates, once for all handles on a GPU with the same precision and kernel architecture.
fn shared_kernels(context: &Arc<Context>, precision: Precision) -> Result<(Arc<Kernels>, Rates)> {
    type Loaded = ((u32, KernelArch, Precision), Weak<Kernels>, Rates);
    static LOADED: Mutex<Vec<Loaded>> = Mutex::new(Vec::new());
    let (mut loaded, key) = (LOADED.lock(), (context.gpu.index, context.gpu.kernel_arch(), precision));
    let known = loaded.iter().find(|(known, ..)| *known == key);
    if let Some(found) = known.and_then(|(_, kernels, rates)| Some((kernels.upgrade()?, *rates))) {
        return Ok(found);
    }
    let kernels = Arc::new(Kernels::new(context, precision)?);
    let rates = profile::measure_rates(context, precision)?;
    loaded.retain(|(_, kernels, _)| kernels.strong_count() > 0);
    loaded.push((key, Arc::downgrade(&kernels), rates));
    Ok((kernels, rates))
}

impl Backend for Cuda {
    const HOST_MEMORY: bool = false;

    type Memory = JobMemory;
    type Store = WeightStore;
    type Conv = PreparedConv;

    fn precision(&self) -> Precision {
        self.launcher.sizes.precision
    }

    fn check_layers(&self, layouts: &[ConvLayout], attention: &[u64]) -> Result<()> {
        tiling::check_layers(self.precision(), layouts, attention)
    }

    fn busy_pixels(&self) -> u64 {
        tiling::BUSY_PIXELS
    }

    fn frame_bytes(&self, shape: FrameShape, groups: u64) -> u64 {
        self.launcher.sizes.frame_bytes(shape, groups)
    }

    fn conv_scratch(&self, layout: &ConvLayout, input: FrameShape, frames: u64) -> u64 {
        self.launcher.sizes.conv_scratch(layout, input, frames)
    }

    fn attention_scratch(&self, _: FrameShape, _: u64) -> u64 {
        0
    }

    fn weight_bytes(&self, layout: &ConvLayout) -> u64 {
        self.launcher.sizes.weight_bytes(layout)
    }

    fn block_bytes(&self, bytes: u64) -> u64 {
        self.launcher.sizes.block_bytes(bytes)
    }

    /// All of it where the driver does not say, as on a lost device: then allocating fails with the reason.
    fn free_bytes(&self) -> u64 {
        self.context().free_bytes().unwrap_or(self.context().gpu.memory_total)
    }

    fn staging_bytes(&self, shape: FrameShape) -> u64 {
        self.launcher.sizes.staging_bytes(shape)
    }

    fn fade_bytes(&self, shape: FrameShape) -> u64 {
        self.launcher.sizes.fade_bytes(shape)
    }

    fn rates(&self) -> Rates {
        self.rates
    }

    fn band_bytes(&self, layout: &ConvLayout, input: FrameShape, frames: BandFrames) -> Option<u64> {
        self.launcher.sizes.band_bytes(layout, input, frames)
    }

    fn sums_bytes(&self, layout: &ConvLayout, input: FrameShape) -> Option<u64> {
        self.launcher.sizes.down_partial_sums_bytes(layout, input)
    }

    fn carry_bytes(&self, layout: &ConvLayout, input: FrameShape) -> Option<u64> {
        self.launcher.sizes.conv_out_partial_sums_bytes(layout, input)
    }

    fn bytes_above_parts(&self, shape: FrameShape) -> u64 {
        self.launcher.sizes.tensor_map_headroom(shape)
    }

    fn mapping_bytes(&self, host: u64) -> u64 {
        self.launcher.sizes.mapping_bytes(host)
    }

    fn allocate(&self, bytes: u64, host: HostMemory) -> Result<JobMemory> {
        let context = self.context();
        let block = DeviceBlock::new(context, self.allocator, bytes)?;
        let operations = (0..OPERATIONS_AHEAD).map(|_| Event::new(context)).collect::<Result<_>>()?;
        let staging = Staging::new(context, host)?;
        let bands = BandPipeline::new(context, self.launcher.sizes, host.past)?;
        Ok(JobMemory {
            _graphs: self.launcher.queue.graph_guard(),
            staging,
            bands,
            operations,
            next_operation: 0,
            on_host_stream: false,
            block,
        })
    }

    fn is_pageable(&self, memory: &JobMemory) -> bool {
        memory.bands.host.is_pageable()
    }

    fn begin(&self, memory: &mut JobMemory, host: Option<HostStream>) -> Result<()> {
        let Some(host) = host else { return Ok(()) };
        let _current = self.context().enter()?;
        let ours = self.launcher.queue.stream().handle();
        Event::new(self.context())?.order(host.0.cast(), ours)?;
        memory.on_host_stream = true;
        Ok(())
    }

    fn finish(&self, memory: &mut JobMemory, host: Option<HostStream>) -> Result<()> {
        memory.on_host_stream = false;
        let _current = self.context().enter()?;
        let queue = &self.launcher.queue;
        let flushed = queue.flush();
        let arrived = memory.staging.finish();
        flushed.and(arrived).and(match host {
            Some(host) => {
                let stream = queue.stream();
                let joined = memory.bands.join(stream).and(memory.staging.join(stream));
                // Even after a failure, the host's stream continues after all work that was begun.
                let event = Event::new(self.context());
                joined.and(event.and_then(|event| event.order(stream.handle(), host.0.cast())))
            }
            None => queue.synchronise().and(memory.bands.synchronise()).and(memory.staging.synchronise()),
        })
    }

    fn allocate_weights(&self, bytes: u64) -> Result<WeightStore> {
        Ok(WeightStore::Device(Arc::new(DeviceBlock::new(self.context(), self.allocator, bytes)?)))
    }

    fn allocate_host_weights(&self, bytes: u64) -> Result<WeightStore> {
        Ok(WeightStore::Host(Arc::new(HostWeights::new(self.context(), bytes)?)))
    }

    fn is_pageable_store(&self, store: &WeightStore) -> bool {
        matches!(store, WeightStore::Host(weights) if !weights.is_pinned())
    }

    fn prepare(
        &self,
        store: &WeightStore,
        offset: u64,
        layout: &ConvLayout,
        source: &mut dyn ConvSource,
    ) -> Result<PreparedConv> {
        let _current = self.context().enter()?;
        let stream = self.launcher.queue.stream();
        PreparedConv::prepare(store, offset, stream, self.launcher.sizes, layout, source)
    }

    fn fetch_weights(&self, memory: &mut JobMemory, weights: &PreparedConv, slabs: u64, into: Frame) -> Result<()> {
        let _current = self.context().enter()?;
        let offloaded = weights.offloaded(slabs)?;
        let to = memory.block.at(into.0, offloaded.map(<[u8]>::len).iter().sum::<usize>() as u64)?;
        memory.staging.fetch_weights(offloaded, to, self.launcher.queue.stream())
    }

    fn fetched_weights(
        &self,
        memory: &mut JobMemory,
        weights: &PreparedConv,
        slabs: u64,
        at: Frame,
    ) -> Result<PreparedConv> {
        let _current = self.context().enter()?;
        let address = memory.block.address(at);
        memory.staging.await_weights(address, self.launcher.queue.stream())?;
        Ok(weights.fetched(slabs, address))
    }

    fn load(&self, memory: &mut JobMemory, op: &LoadOp, stop: &mut Stop) -> Result<()> {
        self.operate(memory, NOT_COLLECTED, stop, |memory| memory.staging.load(&self.launcher, &memory.block, op))
    }

    fn fuses_norm(&self, _: &ConvLayout) -> bool {
        false
    }

    fn normalise(&self, memory: &mut JobMemory, weights: &PreparedConv, op: &NormOp, stop: &mut Stop) -> Result<()> {
        let elements = op.shape.elements() * op.frames.len() as u64;
        self.operate(memory, elements, stop, |memory| {
            let (weights, what) = (weights.pointers()?, (op.layout, op.shape));
            let mut launches = op.frames.chunks(MAX_FRAMES);
            launches.try_for_each(|frames| self.launcher.norm(&memory.block, &weights, what, frames, None))
        })
    }

    fn conv(&self, memory: &mut JobMemory, weights: &PreparedConv, op: &ConvOp, stop: &mut Stop) -> Result<()> {
        let output = op.layout.window.output(op.input, op.layout.cout);
        let elements = output.elements() * op.frames.len() as u64;
        if !op.sums.is_none() && (op.frames.len() >= MAX_FRAMES || !tiling::passes_partial_sums(op.layout)) {
            let count = op.frames.len();
            return Err(Error::Internal(format!("partial sums of {count} frames of {:?} were planned", op.layout)));
        }
        self.operate(memory, elements, stop, |memory| {
            let weights = weights.pointers()?;
            let mut launches = op.frames.chunks(MAX_FRAMES);
            launches.try_for_each(|frames| self.launcher.conv(&memory.block, &weights, op, frames))
        })
    }

    fn conv_carrying(
        &self,
        memory: &mut JobMemory,
        weights: &PreparedConv,
        op: &CarryOp,
        stop: &mut Stop,
    ) -> Result<()> {
        let output = op.layout.window.output(op.input, op.layout.cout);
        let elements = output.elements() * op.frames.len() as u64;
        self.operate(memory, elements, stop, |memory| self.launcher.conv_out(&memory.block, &weights.pointers()?, op))
    }

    fn adds_in_place(&self) -> bool {
        true
    }

    fn banded(&self, memory: &mut JobMemory, op: &BandedOp<PreparedConv>, stop: &mut Stop) -> Result<()> {
        if op.frames.len() > MAX_FRAMES {
            return Err(Error::Internal(format!("{} frames at a time were planned", op.frames.len())));
        }
        self.operate(memory, NOT_COLLECTED, stop, |memory| memory.bands.run(&self.launcher, &memory.block, op))
    }

    fn attention(&self, memory: &mut JobMemory, op: &AttentionOp, stop: &mut Stop) -> Result<()> {
        let elements = op.shape.elements() * op.frames.len() as u64;
        self.operate(memory, elements, stop, |memory| self.launcher.attention(&memory.block, op))
    }

    fn blend(&self, memory: &mut JobMemory, op: &BlendOp, stop: &mut Stop) -> Result<()> {
        self.operate(memory, NOT_COLLECTED, stop, |memory| self.launcher.blend(&memory.block, op))
    }

    fn store(&self, memory: &mut JobMemory, op: &StoreOp, stop: &mut Stop) -> Result<()> {
        self.operate(memory, NOT_COLLECTED, stop, |memory| memory.staging.store(&self.launcher, &memory.block, op))
    }

    fn read(&self, memory: &mut JobMemory, from: Kept, into: &mut [u8]) -> Result<()> {
        self.synchronise(memory)?;
        match from {
            Kept::Device(Frame(offset)) => memory.block.read(self.launcher.queue.stream(), offset, into),
            Kept::Host(frame) => memory.bands.host.read(frame, into),
        }
    }

    fn write(&self, memory: &mut JobMemory, to: Kept, from: &[u8]) -> Result<()> {
        self.synchronise(memory)?;
        match to {
            Kept::Device(Frame(offset)) => memory.block.write(self.launcher.queue.stream(), offset, from),
            Kept::Host(frame) => memory.bands.host.write(frame, from),
        }
    }
}

#[cfg(test)]
mod tests;
