//! A job on a GPU: its memory, the order of its operations, and how far the main queue may run ahead of the host. Makes
//! a backend of any GPU API.

use super::api::{
    Event, GpuApi, GpuConv, GpuMemory, LaunchPixels, NonFiniteFlag, NonFiniteFlags, NormOf, Queue, Spans,
};
use super::bands::BandPipeline;
use super::limit::{attention_products, conv_products};
use super::rows::tile_grid;
use super::staging::Staging;
use crate::backend::{
    DeviceSpan, Diagnosis, Execution, HostStream, JobAllocation, NonFinite, RunArgs, Stop, WeightStorage,
};
use crate::error::{Error, Result};
use crate::ir::{
    AddOp, AttentionOp, BandedConvOp, BlendTile, Buffers, ConvLayout, ConvOp, FetchOp, FetchedWeights, FrameShape,
    LayerId, LoadTensor, NormaliseOp, Offsets, Op, PinnedBytes, PoolOp, PooledFrame, StoreTensor,
};

/// An event is recorded after so many operations, or after a long one. A kernel behind an event begins when all before
/// it has ended, and not while it ends.
const OPERATIONS_A_MARK: usize = 4;
/// Operations that wait in the main queue, to a run of them. Enough to keep the GPU busy, few enough that a cancel acts
/// soon.
const OPERATIONS_AHEAD: usize = 8;

/// How much an operation is.
#[derive(Clone, Copy, Default)]
struct OpSize {
    /// Of the output; `None` if it is never collected with others, as it copies, or never repeats.
    elements: Option<u64>,
    /// Multiplications, where they decide how long it takes.
    products: u64,
}

/// The memory of a job, and the copies and bands in flight in it.
pub struct JobMemory<G: GpuApi> {
    /// Its drop waits for all queues, so it is dropped before them.
    pub block: G::Block,
    staging: Staging<G>,
    bands: BandPipeline<G>,
    /// Recorded after a run of operations, in turn.
    marks: Vec<G::Event>,
    next_mark: usize,
    /// Operations behind the last mark.
    unmarked: usize,
    /// Whether the call is ordered on a queue of the host's, and must not block.
    on_host_stream: bool,
    /// For a trace.
    spans: Option<G::Spans>,
}

impl<G: GpuApi> JobMemory<G> {
    pub fn new(gpu: &G, block: G::Block, host: PinnedBytes) -> Result<JobMemory<G>> {
        Ok(JobMemory {
            block,
            staging: Staging::new(gpu, host)?,
            bands: BandPipeline::new(gpu, host.offloaded)?,
            marks: (0..OPERATIONS_AHEAD / OPERATIONS_A_MARK).map(|_| gpu.event()).collect::<Result<_>>()?,
            next_mark: 0,
            unmarked: 0,
            on_host_stream: false,
            spans: None,
        })
    }

    /// Waits for everything in the memory of a job. A call on the host's queue may have returned before its work has
    /// ended, also one of another job that used the memory.
    pub fn synchronise(&self, gpu: &G) -> Result<()> {
        let main = gpu.flush().and_then(|()| gpu.main_queue().synchronise());
        main.and(self.bands.synchronise()).and(self.staging.synchronise())
    }

    /// Runs one operation: asks whether to stop, and keeps the main queue short. A call on the host's queue fills it
    /// instead.
    fn operate(
        &mut self,
        gpu: &G,
        size: OpSize,
        stop: &mut Stop,
        launch: impl FnOnce(&mut JobMemory<G>) -> Result<()>,
    ) -> Result<()> {
        if stop() {
            return Err(Error::Cancelled);
        }
        let _current = gpu.enter()?;
        let spans = self.spans.clone();
        let is_long = gpu.limit().is_long(size.products);
        gpu.begin_operation(size.elements.filter(|_| !is_long && spans.is_none()));
        let launched = match spans {
            Some(spans) => gpu.record_span(&spans, "operations", || launch(self)),
            None => launch(self),
        };
        let complete = gpu.end_operation();
        launched?;
        if !complete? || self.on_host_stream {
            return Ok(());
        }
        self.unmarked += 1;
        if self.unmarked < OPERATIONS_A_MARK && !is_long {
            return Ok(());
        }
        self.unmarked = 0;
        let at = self.next_mark;
        self.next_mark = (at + 1) % self.marks.len();
        self.marks[at].synchronise()?;
        gpu.main_queue().record(&self.marks[at])?;
        // At most one long operation waits behind the one that runs.
        if is_long { self.marks[(at + self.marks.len() - 1) % self.marks.len()].synchronise() } else { Ok(()) }
    }

    fn fetch(&mut self, gpu: &G, op: &FetchOp<Offsets>, args: &RunArgs<G::Conv>) -> Result<()> {
        let _current = gpu.enter()?;
        let (host, parts) = args.weights[op.layer].offloaded(op.into.slabs)?;
        self.staging.fetch_weights(gpu, &self.block, host, parts, op.into.at)
    }

    /// The weights of a layer: resident, or fetched. Later work waits for fetched weights.
    fn weights(
        &self,
        gpu: &G,
        layer: LayerId,
        fetched: Option<FetchedWeights<Offsets>>,
        args: &RunArgs<G::Conv>,
    ) -> Result<G::Weights> {
        let weights = &args.weights[layer];
        let Some(FetchedWeights { at, slabs }) = fetched else { return weights.resident() };
        let _current = gpu.enter()?;
        self.staging.await_weights(at, gpu.main_queue())?;
        Ok(weights.fetched(&self.block, slabs, at))
    }

    fn conv(&mut self, gpu: &G, op: &ConvOp<Offsets>, args: &RunArgs<G::Conv>, stop: &mut Stop) -> Result<()> {
        let output = op.layout.window.output(op.input, op.layout.cout);
        let elements = Some(output.elements() * op.frames.len() as u64);
        let size = OpSize { elements, products: all_products(&op.layout, op.input, op.frames.len()) };
        let weights = self.weights(gpu, op.layer, op.weights, args)?;
        self.operate(gpu, size, stop, |memory| gpu.conv(&memory.block, &weights, op, args.buffers.scratch))
    }

    /// Frames that are too much for one launch are operations of their own.
    fn attention(&mut self, gpu: &G, op: &AttentionOp<Offsets>, stop: &mut Stop) -> Result<()> {
        let products = attention_products(op.shape, op.shape.pixels());
        let most = gpu.limit().pieces(products).min(G::MAX_FRAMES as u64) as usize;
        op.frames.chunks(most).try_for_each(|frames| {
            let count = frames.len() as u64;
            let elements = Some(op.shape.elements() * count);
            let size = OpSize { elements, products: products.saturating_mul(count) };
            let op = AttentionOp { shape: op.shape, frames: frames.to_vec() };
            self.operate(gpu, size, stop, |memory| gpu.attention(&memory.block, &op))
        })
    }

    fn banded_conv(
        &mut self,
        gpu: &G,
        op: &BandedConvOp<Offsets>,
        args: &RunArgs<G::Conv>,
        stop: &mut Stop,
    ) -> Result<()> {
        if op.frames.len() > G::MAX_FRAMES {
            return Err(Error::Internal(format!("{} frames at a time were planned", op.frames.len())));
        }
        let weights = self.weights(gpu, op.layer, op.weights, args)?;
        let size = OpSize { elements: None, products: all_products(&op.layout, op.input, op.frames.len()) };
        self.operate(gpu, size, stop, |memory| memory.bands.run(gpu, &memory.block, op, weights, args))
    }

    fn pool(&mut self, gpu: &G, op: &PoolOp<Offsets>, stop: &mut Stop) -> Result<()> {
        let (input, parts) = (op.input, op.parts);
        let size = OpSize { elements: Some(input.elements() * op.frames.len() as u64), products: 0 };
        self.operate(gpu, size, stop, |memory| {
            let mut launches = pooled_launches(&op.frames, G::MAX_FRAMES).into_iter();
            launches.try_for_each(|frames| gpu.pool(&memory.block, &PoolOp { input, parts, frames }))
        })
    }

    fn add(&mut self, gpu: &G, op: &AddOp<Offsets>, stop: &mut Stop) -> Result<()> {
        let (shape, repeat) = (op.shape, op.repeat);
        let size = OpSize { elements: Some(shape.elements() * op.frames.len() as u64), products: 0 };
        self.operate(gpu, size, stop, |memory| {
            let mut launches = op.frames.chunks(G::MAX_FRAMES);
            launches.try_for_each(|frames| gpu.add(&memory.block, &AddOp { shape, repeat, frames: frames.to_vec() }))
        })
    }

    fn normalise(
        &mut self,
        gpu: &G,
        op: &NormaliseOp<Offsets>,
        args: &RunArgs<G::Conv>,
        stop: &mut Stop,
    ) -> Result<()> {
        let size = OpSize { elements: Some(op.shape.elements() * op.frames.len() as u64), products: 0 };
        let weights = self.weights(gpu, op.layer, op.weights, args)?;
        self.operate(gpu, size, stop, |memory| {
            let norm = NormOf { weights: &weights, layout: &op.layout, shape: op.shape };
            let mut launches = op.frames.chunks(G::MAX_FRAMES);
            launches.try_for_each(|frames| gpu.norm(&memory.block, &norm, frames, None))
        })
    }
}

/// The entries of a [`PoolOp`] for one launch after the other: at most `most`, and the parts of a frame in turn.
fn pooled_launches(frames: &[PooledFrame<Offsets>], most: usize) -> Vec<Vec<PooledFrame<Offsets>>> {
    let mut launches: Vec<Vec<PooledFrame<Offsets>>> = Vec::new();
    for frame in frames {
        let is_free = |launch: &&mut Vec<PooledFrame<Offsets>>| {
            launch.len() < most && launch.iter().all(|other| other.into != frame.into)
        };
        match launches.last_mut().filter(is_free) {
            Some(launch) => launch.push(*frame),
            None => launches.push(vec![*frame]),
        }
    }
    launches
}

/// A device with a GPU API. It states its facts and stores its weights itself; the rest is the same for all.
pub trait GpuBackend: WeightStorage<Conv = <Self::Api as GpuApi>::Conv> {
    type Api: GpuApi;
    fn api(&self) -> &Self::Api;
    /// Device memory for a job.
    fn block(&self, bytes: u64) -> Result<<Self::Api as GpuMemory>::Block>;
    /// As of [`JobAllocation`].
    fn kept_host_bytes(&self) -> u64 {
        0
    }
    fn keep_host_bytes(&self, _most: u64, _wanted: u64) {}
}

impl<B: GpuBackend> JobAllocation for B {
    type Memory = JobMemory<B::Api>;

    fn allocate(&self, bytes: u64, host: PinnedBytes) -> Result<JobMemory<B::Api>> {
        JobMemory::new(self.api(), self.block(bytes)?, host)
    }

    fn is_pageable(&self, memory: &JobMemory<B::Api>) -> bool {
        memory.bands.host.is_pageable()
    }

    fn kept_host_bytes(&self) -> u64 {
        GpuBackend::kept_host_bytes(self)
    }

    fn keep_host_bytes(&self, most: u64, wanted: u64) {
        GpuBackend::keep_host_bytes(self, most, wanted);
    }
}

impl<B: GpuBackend> Execution for B {
    fn check_stream(&self, host: HostStream) -> Result<()> {
        let _current = self.api().enter()?;
        self.api().check_stream(host)
    }

    fn begin(&self, memory: &mut Self::Memory, host: Option<HostStream>) -> Result<()> {
        let Some(host) = host else { return Ok(()) };
        let _current = self.api().enter()?;
        self.api().wait_for_host(host)?;
        memory.on_host_stream = true;
        Ok(())
    }

    fn finish(&self, memory: &mut Self::Memory, host: Option<HostStream>) -> Result<()> {
        memory.on_host_stream = false;
        let gpu = self.api();
        let _current = gpu.enter()?;
        let flushed = gpu.flush();
        let arrived = memory.staging.finish();
        flushed.and(arrived).and(match host {
            Some(host) => {
                let joined = memory.bands.join(gpu).and(memory.staging.join(gpu));
                // Even after a failure, the host's queue continues after all work that was begun.
                let waits = gpu.host_waits(host);
                joined.and(waits)
            }
            None => memory.synchronise(gpu),
        })
    }

    fn run(
        &self,
        memory: &mut Self::Memory,
        op: &Op<Offsets>,
        args: &RunArgs<Self::Conv>,
        stop: &mut Stop,
    ) -> Result<()> {
        match op {
            Op::Fetch(op) => memory.fetch(self.api(), op, args),
            Op::Conv(op) => memory.conv(self.api(), op, args, stop),
            Op::BandedConv(op) => memory.banded_conv(self.api(), op, args, stop),
            Op::Normalise(op) => memory.normalise(self.api(), op, args, stop),
            Op::Attention(op) => memory.attention(self.api(), op, stop),
            Op::Pool(op) => memory.pool(self.api(), op, stop),
            Op::Add(op) => memory.add(self.api(), op, stop),
            Op::Load(_) | Op::Blend(_) | Op::Store(_) => {
                Err(Error::Internal("an operation on host tensors was given to run".into()))
            }
        }
    }

    fn load(&self, memory: &mut Self::Memory, op: &LoadTensor, buffers: &Buffers, stop: &mut Stop) -> Result<()> {
        let gpu = self.api();
        memory.operate(gpu, OpSize::default(), stop, |memory| {
            memory.staging.load(gpu, &memory.block, op, buffers.staging[0])
        })
    }

    fn blend(&self, memory: &mut Self::Memory, op: &BlendTile, buffers: &Buffers) -> Result<()> {
        let gpu = self.api();
        memory.operate(gpu, OpSize::default(), &mut || false, |memory| gpu.blend(&memory.block, op, buffers.scratch))
    }

    fn store(&self, memory: &mut Self::Memory, op: &StoreTensor, buffers: &Buffers) -> Result<()> {
        let gpu = self.api();
        memory.operate(gpu, OpSize::default(), &mut || false, |memory| {
            memory.staging.store(gpu, &memory.block, op, buffers)
        })
    }
}

impl<B: GpuBackend> Diagnosis for B {
    fn take_nonfinite(&self, memory: &mut Self::Memory) -> NonFinite {
        let flags = &mut memory.staging.flags;
        NonFinite { loaded: flags.take(NonFiniteFlag::Loaded), stored: flags.take(NonFiniteFlag::Stored) }
    }

    /// What follows belongs to operation number `op`; `None` ends the trace.
    fn trace(&self, memory: &mut Self::Memory, op: Option<u64>) -> Result<bool> {
        let _current = self.api().enter()?;
        if op.is_some() != memory.spans.is_some() {
            memory.spans = op.map(|_| self.api().spans()).transpose()?;
            memory.staging.set_spans(memory.spans.as_ref());
            memory.bands.host.set_spans(memory.spans.as_ref());
        }
        memory.spans.iter().zip(op).for_each(|(spans, op)| spans.set_op(op));
        Ok(true)
    }

    fn take_spans(&self, memory: &mut Self::Memory) -> Result<Vec<DeviceSpan>> {
        let _current = self.api().enter()?;
        memory.spans.as_ref().map_or(Ok(Vec::new()), Spans::take)
    }
}

fn all_products(layout: &ConvLayout, input: FrameShape, frames: usize) -> u64 {
    conv_products(layout, input, tile_grid(layout, input).height).saturating_mul(frames as u64)
}
