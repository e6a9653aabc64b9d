//! NVIDIA GPUs, by kernels of our own and nothing but the driver. This file implements [`Backend`]; `driver` talks to
//! the device, `launch` launches kernels, `offload` moves what lies in host memory.

mod autotune;
mod driver;
mod launch;
mod offload;
mod profile;
mod rate_table;

pub use driver::{HostCopies, KernelArch, devices, ready};
pub use launch::CudaSizes;
pub use offload::pack::PackBuffers;
pub use offload::weights::{PreparedConv, WeightStore};
pub use profile::device_profile;

use std::path::Path;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use self::driver::{ARCH_VARIABLE, BLOCK_ALIGN, Context, DeviceBlock, Event, PinnedMemory, SpanRecorder};
use self::launch::tiling::{ConvKernel, FRAME_ALIGN, MAX_FRAMES};
use self::launch::{
    ConvLaunch, GraphGuard, Kernels, LaunchLimit, LaunchQueue, Launcher, WeightPointers, attention_products,
    conv_products, tiling,
};
use self::offload::bands::BandPipeline;
use self::offload::pack;
use self::offload::staging::Staging;
use super::{Backend, DeviceAllocator, DeviceSpan, HostStream, NonFinite, Note, Precision, Residency, RunArgs, Stop};
use crate::error::{Error, Result};
use crate::ir::{
    AttentionOp, BandedConvOp, BlendTile, Buffers, ConvLayout, ConvOp, ConvSource, DeviceProfile, FetchOp,
    FetchedWeights, FrameShape, LayerId, LoadTensor, NormaliseOp, Offsets, Op, PinnedBytes, Rates, Sizes, StoreTensor,
    WeightPart,
};
use crate::thread_pool::Pool;

/// The most operations in the stream. Enough to keep the GPU busy, few enough that a cancel acts soon.
const OPERATIONS_AHEAD: usize = 8;
/// Of an operation that is never collected with others, as it copies, or never repeats.
const NOT_COLLECTED: OpSize = OpSize { elements: u64::MAX, products: 0 };
/// Rows that a launch of several frames has at least: of the tallest tiles.
const LEAST_ROWS: u64 = 16;

const _: () = assert!(BLOCK_ALIGN.is_multiple_of(FRAME_ALIGN), "frames in a block are aligned");

/// One GPU, in one precision.
pub struct Cuda {
    launcher: Launcher,
    rates: Rates,
    allocator: DeviceAllocator,
}

type Args<'a> = RunArgs<'a, PreparedConv>;

/// How much an operation is.
#[derive(Clone, Copy)]
struct OpSize {
    /// Of the output.
    elements: u64,
    /// Multiplications, where they decide how long it takes.
    products: u64,
}

/// The memory of a job, and the copies and bands in flight in it.
pub struct JobMemory {
    _graphs: GraphGuard,
    /// Waits for all streams when it is dropped, so it is dropped before them.
    block: DeviceBlock,
    staging: Staging,
    bands: BandPipeline,
    /// Recorded after each operation, in turn.
    operations: Vec<Event>,
    next_operation: usize,
    /// Whether the call is ordered on a stream of the host's, and must not block.
    on_host_stream: bool,
    /// For a trace.
    spans: Option<Arc<SpanRecorder>>,
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
        let launcher = Launcher { sizes: CudaSizes { precision }, context, kernels, queue, limit };
        Ok(Cuda { launcher, rates, allocator })
    }

    /// Its kernels are of this architecture: the GPU's own, unless `VVAE_ARCH` names an older one.
    pub fn kernel_arch(&self) -> KernelArch {
        self.context().gpu.kernel_arch()
    }

    fn context(&self) -> &Arc<Context> {
        &self.launcher.context
    }

    fn job_memory(&self, allocator: DeviceAllocator, bytes: u64, host: PinnedBytes) -> Result<JobMemory> {
        let context = self.context();
        // Modules take device memory of the driver's own. No job is left without it once its memory is allocated.
        context.enter().and_then(|_current| self.launcher.kernels.load_common())?;
        let block = DeviceBlock::new(context, allocator, bytes)?;
        let operations = (0..OPERATIONS_AHEAD).map(|_| Event::new(context)).collect::<Result<_>>()?;
        let staging = Staging::new(context, host)?;
        let bands = BandPipeline::new(context, host.offloaded)?;
        Ok(JobMemory {
            _graphs: self.launcher.queue.graph_guard(),
            block,
            staging,
            bands,
            operations,
            next_operation: 0,
            on_host_stream: false,
            spans: None,
        })
    }

    /// Runs one operation: asks whether to stop, makes the context current, and keeps the stream short. A call on the
    /// host's stream fills it instead.
    fn operate(
        &self,
        memory: &mut JobMemory,
        size: OpSize,
        stop: &mut Stop,
        launch: impl FnOnce(&mut JobMemory) -> Result<()>,
    ) -> Result<()> {
        if stop() {
            return Err(Error::Cancelled);
        }
        let _current = self.context().enter()?;
        let queue = &self.launcher.queue;
        let spans = memory.spans.clone();
        let long = self.launcher.limit.is_long(size.products);
        queue.begin(if long || spans.is_some() { NOT_COLLECTED.elements } else { size.elements });
        let launched = match spans {
            Some(spans) => spans.record("operations", queue.stream().handle(), || launch(memory)),
            None => launch(memory),
        };
        let complete = queue.end();
        launched?;
        if !complete? || memory.on_host_stream {
            return Ok(());
        }
        let (at, operations) = (memory.next_operation, &memory.operations);
        memory.next_operation = (at + 1) % OPERATIONS_AHEAD;
        operations[at].synchronise()?;
        queue.stream().record(&operations[at])?;
        // At most one long operation waits behind the one that runs.
        if long { operations[(at + OPERATIONS_AHEAD - 1) % OPERATIONS_AHEAD].synchronise() } else { Ok(()) }
    }

    /// Waits for everything in the memory of a job. A call on the host's stream may have returned before its work has
    /// ended, also one of another job that used the memory.
    fn synchronise(&self, memory: &JobMemory) -> Result<()> {
        let _current = self.context().enter()?;
        self.launcher.queue.synchronise().and(memory.bands.synchronise()).and(memory.staging.synchronise())
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

/// The operations.
impl Cuda {
    fn fetch(&self, memory: &mut JobMemory, op: &FetchOp<Offsets>, args: &Args) -> Result<()> {
        let _current = self.context().enter()?;
        let offloaded = args.weights[op.layer].offloaded(op.into.slabs)?;
        let to = memory.block.at(op.into.at.0, offloaded.map(<[u8]>::len).iter().sum::<usize>() as u64)?;
        memory.staging.fetch_weights(offloaded, to, self.launcher.queue.stream())
    }

    /// The weights of a layer: resident, or fetched. Later work waits for fetched weights.
    fn weights(
        &self,
        memory: &mut JobMemory,
        layer: LayerId,
        fetched: Option<FetchedWeights<Offsets>>,
        args: &Args,
    ) -> Result<WeightPointers> {
        let weights = &args.weights[layer];
        let Some(FetchedWeights { at, slabs }) = fetched else { return weights.pointers() };
        let _current = self.context().enter()?;
        let address = memory.block.address(at);
        memory.staging.await_weights(address, self.launcher.queue.stream())?;
        Ok(weights.fetched(slabs, address))
    }

    fn conv(&self, memory: &mut JobMemory, op: &ConvOp<Offsets>, args: &Args, stop: &mut Stop) -> Result<()> {
        let output = op.layout.window.output(op.input, op.layout.cout);
        let size = OpSize {
            elements: output.elements() * op.frames.len() as u64,
            products: self.conv_products(&op.layout, op.input, op.frames.len()),
        };
        let weights = self.weights(memory, op.layer, op.weights, args)?;
        if ConvKernel::of(&op.layout)? == ConvKernel::Out {
            return self.operate(memory, size, stop, |memory| self.launcher.conv_out(&memory.block, &weights, op));
        }
        let sums = !op.partial_sums.is_none();
        if sums && (op.frames.len() >= MAX_FRAMES || !tiling::passes_partial_sums(&op.layout)) {
            let count = op.frames.len();
            return Err(Error::Internal(format!("partial sums of {count} frames of {:?} were planned", op.layout)));
        }
        let conv = ConvLaunch {
            layout: &op.layout,
            input: op.input,
            statistics: op.statistics,
            scratch: args.buffers.scratch,
            partial_sums: &op.partial_sums,
        };
        let most = self.launcher.limit.pieces(conv_products(&op.layout, op.input, LEAST_ROWS)) as usize;
        self.operate(memory, size, stop, |memory| {
            let mut launches = op.frames.chunks(if sums { MAX_FRAMES } else { most.min(MAX_FRAMES) });
            launches.try_for_each(|frames| self.launcher.conv(&memory.block, &weights, &conv, frames))
        })
    }

    fn conv_products(&self, layout: &ConvLayout, input: FrameShape, frames: usize) -> u64 {
        let rows = tiling::tile_grid(layout, input).height;
        conv_products(layout, input, rows).saturating_mul(frames as u64)
    }

    /// Frames that are too much for one launch are operations of their own.
    fn attention(&self, memory: &mut JobMemory, op: &AttentionOp<Offsets>, stop: &mut Stop) -> Result<()> {
        let frame = OpSize { elements: op.shape.elements(), products: attention_products(op.shape, op.shape.pixels()) };
        let most = self.launcher.limit.pieces(frame.products).min(MAX_FRAMES as u64) as usize;
        op.frames.chunks(most).try_for_each(|frames| {
            let count = frames.len() as u64;
            let size = OpSize { elements: frame.elements * count, products: frame.products.saturating_mul(count) };
            let op = AttentionOp { shape: op.shape, frames: frames.to_vec() };
            self.operate(memory, size, stop, |memory| self.launcher.attention(&memory.block, &op))
        })
    }

    fn banded_conv(
        &self,
        memory: &mut JobMemory,
        op: &BandedConvOp<Offsets>,
        args: &Args,
        stop: &mut Stop,
    ) -> Result<()> {
        if op.frames.len() > MAX_FRAMES {
            return Err(Error::Internal(format!("{} frames at a time were planned", op.frames.len())));
        }
        let weights = self.weights(memory, op.layer, op.weights, args)?;
        let products = self.conv_products(&op.layout, op.input, op.frames.len());
        self.operate(memory, OpSize { products, ..NOT_COLLECTED }, stop, |memory| {
            memory.bands.run(&self.launcher, &memory.block, op, weights, args)
        })
    }

    fn normalise(&self, memory: &mut JobMemory, op: &NormaliseOp<Offsets>, args: &Args, stop: &mut Stop) -> Result<()> {
        let size = OpSize { elements: op.shape.elements() * op.frames.len() as u64, products: 0 };
        let weights = self.weights(memory, op.layer, op.weights, args)?;
        self.operate(memory, size, stop, |memory| {
            let what = (&op.layout, op.shape);
            let mut launches = op.frames.chunks(MAX_FRAMES);
            launches.try_for_each(|frames| self.launcher.norm(&memory.block, &weights, what, frames, None))
        })
    }
}

impl Backend for Cuda {
    const HOST_MEMORY: bool = false;
    const MAPS_CHANNELS: bool = false;

    type Memory = JobMemory;
    type Store = WeightStore;
    type Conv = PreparedConv;
    type PackBuffers = PackBuffers;

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

    fn pool(&self) -> Option<&Arc<Pool>> {
        None
    }

    fn check_layers(&self, layouts: &[ConvLayout], attention: &[u64]) -> Result<()> {
        tiling::check_layers(self.precision(), layouts, attention)
    }

    /// All of it where the driver does not say, as on a lost device: then allocating fails with the reason.
    fn free_bytes(&self) -> u64 {
        self.context().free_bytes().unwrap_or(self.context().gpu.memory_total)
    }

    fn allocate(&self, bytes: u64, host: PinnedBytes) -> Result<JobMemory> {
        self.job_memory(self.allocator, bytes, host)
    }

    fn is_pageable(&self, memory: &JobMemory) -> bool {
        memory.bands.host.is_pageable()
    }

    fn check_stream(&self, host: HostStream) -> Result<()> {
        let _current = self.context().enter()?;
        driver::check_not_captured(host.0.cast())
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
            None => self.synchronise(memory),
        })
    }

    fn allocate_weights(&self, bytes: u64, residency: Residency) -> Result<WeightStore> {
        let context = self.context();
        Ok(match residency {
            Residency::Device => WeightStore::Device(Arc::new(DeviceBlock::new(context, self.allocator, bytes)?)),
            Residency::Host => WeightStore::Host(Arc::new(PinnedMemory::new(context, bytes)?)),
        })
    }

    fn is_pageable_store(&self, store: &WeightStore) -> bool {
        matches!(store, WeightStore::Host(memory) if !memory.is_pinned())
    }

    fn allocate_conv(&self, store: &WeightStore, offset: u64, layout: &ConvLayout) -> Result<PreparedConv> {
        let _current = self.context().enter()?;
        // As in `allocate`: weights are prepared before a job's memory is allocated.
        self.launcher.load_conv(layout)?;
        let order = self.launcher.weight_order(layout);
        Ok(PreparedConv::new(store, offset, self.launcher.sizes, order, layout))
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

    fn run(&self, memory: &mut JobMemory, op: &Op<Offsets>, args: &Args, stop: &mut Stop) -> Result<()> {
        match op {
            Op::Fetch(op) => self.fetch(memory, op, args),
            Op::Conv(op) => self.conv(memory, op, args, stop),
            Op::BandedConv(op) => self.banded_conv(memory, op, args, stop),
            Op::Normalise(op) => self.normalise(memory, op, args, stop),
            Op::Attention(op) => self.attention(memory, op, stop),
            Op::Load(_) | Op::Blend(_) | Op::Store(_) => {
                Err(Error::Internal("an operation on host tensors was given to run".into()))
            }
        }
    }

    fn load(&self, memory: &mut JobMemory, op: &LoadTensor, buffers: &Buffers, stop: &mut Stop) -> Result<()> {
        self.operate(memory, NOT_COLLECTED, stop, |memory| {
            memory.staging.load(&self.launcher, &memory.block, op, buffers.staging[0])
        })
    }

    fn blend(&self, memory: &mut JobMemory, op: &BlendTile, buffers: &Buffers) -> Result<()> {
        self.operate(memory, NOT_COLLECTED, &mut || false, |memory| {
            self.launcher.blend(&memory.block, op, buffers.scratch)
        })
    }

    fn store(&self, memory: &mut JobMemory, op: &StoreTensor, buffers: &Buffers) -> Result<()> {
        self.operate(memory, NOT_COLLECTED, &mut || false, |memory| {
            memory.staging.store(&self.launcher, &memory.block, op, buffers)
        })
    }

    fn trace(&self, memory: &mut JobMemory, op: Option<u64>) -> Result<bool> {
        let _current = self.context().enter()?;
        if op.is_some() != memory.spans.is_some() {
            let stream = || self.launcher.queue.stream().handle();
            memory.spans = op.map(|_| SpanRecorder::new(self.context(), stream()).map(Arc::new)).transpose()?;
            memory.staging.set_spans(memory.spans.as_ref());
            memory.bands.host.set_spans(memory.spans.as_ref());
        }
        memory.spans.iter().zip(op).for_each(|(spans, op)| spans.set_op(op));
        Ok(true)
    }

    fn take_spans(&self, memory: &mut JobMemory) -> Result<Vec<DeviceSpan>> {
        let _current = self.context().enter()?;
        memory.spans.as_ref().map_or(Ok(Vec::new()), |spans| spans.take())
    }

    fn take_nonfinite(&self, memory: &mut JobMemory) -> NonFinite {
        memory.staging.take_nonfinite()
    }
}

#[cfg(test)]
mod tests;
