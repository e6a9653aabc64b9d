//! NVIDIA GPUs, by kernels of our own and nothing but the driver.

mod aside;
mod attention;
mod banded;
mod context;
mod conv;
mod driver;
mod geometry;
mod graph;
mod kernel;
mod limits;
mod memory;
mod norm;
mod pack;
mod params;
mod pinned;
mod pixels;
mod rates;
mod stream;
mod weights;

pub use driver::{devices, ready};
pub use weights::Conv;

use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use self::aside::Aside;
use self::banded::Bands;
use self::context::Context;
use self::graph::Forget;
use self::kernel::Kernels;
use self::memory::Block;
use self::params::MAX_FRAMES;
use self::pinned::Pinned;
use self::pixels::Transfers;
use self::stream::{Event, Stream};
use super::{
    AttentionOp, Backend, BandedOp, BlendOp, ConvLayout, ConvOp, ConvSource, HostMemory, HostStream, LoadOp, NormOp,
    Precision, Stop, StoreOp,
};
use crate::error::{Error, Result};
use crate::tensor::{FrameShape, Rates};

/// Of the norms' variance.
const EPS: f32 = 1e-6;
/// Operations that may wait in the stream. Enough to keep the GPU busy, few enough that a cancel acts soon.
const AHEAD: usize = 6;
/// In place of a number of elements: the operation is not collected, as it copies, or is never the same twice.
const ALONE: u64 = u64::MAX;

/// One GPU, in one precision.
pub struct Cuda {
    precision: Precision,
    context: Arc<Context>,
    kernels: Arc<Kernels>,
    stream: Stream,
}

/// The memory of a job and what is under way in it.
pub struct Memory {
    _graphs: Forget,
    transfers: Transfers,
    bands: Bands,
    queue: Queue,
    /// The other side, once there was something to compute apart, and whether it is its turn.
    aside: Option<Aside>,
    is_aside: bool,
    /// Where the main side marked its progress.
    passed: Event,
    past: Arc<Pinned>,
    block: Block,
}

/// Where an operation runs.
struct On<'a> {
    block: &'a Block,
    stream: &'a Stream,
    /// Whether somebody else's work is more urgent.
    gives_way: bool,
}

/// Keeps a stream short: the places of the last operations in it.
struct Queue {
    marks: Vec<Event>,
    next: usize,
}

impl Queue {
    fn new(context: &Arc<Context>, length: usize) -> Result<Queue> {
        Ok(Queue { marks: (0..length).map(|_| Event::new(context)).collect::<Result<_>>()?, next: 0 })
    }

    /// An operation is in the stream; waits for the one that was too long ago.
    fn pass(&mut self, stream: &Stream) -> Result<()> {
        let mark = &self.marks[self.next];
        self.next = (self.next + 1) % self.marks.len();
        mark.wait()?;
        mark.record(stream)
    }
}

impl Cuda {
    pub fn new(index: u32, precision: Precision) -> Result<Cuda> {
        let context = Context::new(index)?;
        let kernels = shared_kernels(index, precision, &context)?;
        Ok(Cuda { precision, stream: Stream::new(&context)?, kernels, context })
    }

    /// Runs one operation: asks whether to stop, makes the context current, and keeps the stream short. `elements` is the
    /// size of its output, by which small operations are told.
    fn operate(
        &self,
        memory: &mut Memory,
        elements: u64,
        stop: &mut Stop,
        launch: impl FnOnce(&On, &mut Transfers, &mut Bands) -> Result<()>,
    ) -> Result<()> {
        if stop() {
            return Err(Error::Cancelled);
        }
        let _current = self.context.enter()?;
        let Memory { transfers, bands, queue, aside, is_aside, block, .. } = memory;
        let gives_way = aside.is_some() && !*is_aside;
        let (stream, bands, queue) = match aside.as_mut().filter(|_| *is_aside) {
            Some(aside) => (&aside.stream, &mut aside.bands, &mut aside.queue),
            None => (&self.stream, bands, queue),
        };
        stream.begin(elements);
        let launched = launch(&On { block, stream, gives_way }, transfers, bands);
        let complete = stream.end();
        launched?;
        if complete? { queue.pass(stream) } else { Ok(()) }
    }
}

impl Drop for Cuda {
    /// A call on the host's stream may have left work behind; kernels and memory must outlive it.
    fn drop(&mut self) {
        if let Ok(_current) = self.context.enter() {
            let _ = self.stream.wait();
            // Graphs go before the kernels they are made of.
            drop(self.stream.forget_with());
        }
    }
}

/// Kernels are assembled once for all handles on a GPU that compute in the same precision.
fn shared_kernels(index: u32, precision: Precision, context: &Arc<Context>) -> Result<Arc<Kernels>> {
    type Key = (u32, Precision);
    static LOADED: Mutex<Vec<(Key, Weak<Kernels>)>> = Mutex::new(Vec::new());
    let (mut loaded, key) = (LOADED.lock(), (index, precision));
    if let Some(kernels) = loaded.iter().find(|(known, _)| *known == key).and_then(|(_, kernels)| kernels.upgrade()) {
        return Ok(kernels);
    }
    let kernels = Arc::new(Kernels::new(context, &context.gpu, precision)?);
    loaded.retain(|(_, kernels)| kernels.strong_count() > 0);
    loaded.push((key, Arc::downgrade(&kernels)));
    Ok(kernels)
}

impl Backend for Cuda {
    const HOST_MEMORY: bool = false;

    type Memory = Memory;
    type Store = Arc<Block>;
    type Conv = Conv;

    fn precision(&self) -> Precision {
        self.precision
    }

    fn check_layers(&self, layouts: &[ConvLayout], attention: &[u64]) -> Result<()> {
        limits::check(self.precision, layouts, attention)
    }

    fn busy_pixels(&self) -> u64 {
        1 << 18
    }

    fn frame_bytes(&self, shape: FrameShape, groups: u64) -> u64 {
        self.precision.frame_bytes(shape, groups)
    }

    fn conv_scratch(&self, layout: &ConvLayout, input: FrameShape, frames: u64) -> u64 {
        self.conv_scratch_bytes(layout, input, frames)
    }

    fn attention_scratch(&self, _: FrameShape, _: u64) -> u64 {
        0
    }

    fn weight_bytes(&self, layout: &ConvLayout) -> u64 {
        weights::bytes(self.precision, layout)
    }

    fn block_bytes(&self, bytes: u64) -> u64 {
        memory::block_bytes(bytes)
    }

    fn free_bytes(&self) -> u64 {
        self.context.free_bytes().unwrap_or(0)
    }

    fn staging_bytes(&self, shape: FrameShape) -> u64 {
        geometry::staging_bytes(shape)
    }

    fn rates(&self) -> Rates {
        self.kernels.rates
    }

    fn band_bytes(&self, layout: &ConvLayout, input: FrameShape, inputs: u64, outputs: u64) -> Option<u64> {
        let bytes = inputs * self.precision.band_frame_bytes(layout, input, outputs);
        Some(geometry::BANDS * bytes.next_multiple_of(geometry::ALIGN))
    }

    fn mapping_bytes(&self, host: u64) -> u64 {
        // A page table: 8 bytes for each page of 4 KiB.
        self.block_bytes(host / 4096 * 8)
    }

    fn allocate(&self, bytes: u64, host: HostMemory) -> Result<Memory> {
        let context = &self.context;
        let block = Block::new(context, bytes)?;
        let past = Arc::new(Pinned::new(context, host.past)?);
        Ok(Memory {
            _graphs: self.stream.forget_with(),
            transfers: Transfers::new(context, host)?,
            bands: Bands::new(context, &past)?,
            queue: Queue::new(context, AHEAD)?,
            aside: None,
            is_aside: false,
            passed: Event::new(context)?,
            past,
            block,
        })
    }

    fn is_pageable(&self, memory: &Memory) -> bool {
        memory.past.is_pageable()
    }

    fn begin(&self, memory: &mut Memory, host: Option<HostStream>) -> Result<()> {
        let _current = self.context.enter()?;
        if let Some(host) = host {
            Event::new(&self.context)?.between(host.0.cast(), self.stream.handle())?;
        }
        self.order_aside(memory)
    }

    fn finish(&self, memory: &mut Memory, host: Option<HostStream>) -> Result<()> {
        let _current = self.context.enter()?;
        let flushed = self.stream.flush();
        let arrived = memory.transfers.finish();
        flushed.and(arrived).and(match host {
            Some(host) => {
                memory.bands.join(&self.stream)?;
                self.join_aside(memory)?;
                Event::new(&self.context)?.between(self.stream.handle(), host.0.cast())
            }
            None => {
                let aside = memory.aside.as_ref().map_or(Ok(()), Aside::wait);
                self.stream.wait().and(memory.bands.wait()).and(aside)
            }
        })
    }

    fn turn(&self, memory: &mut Memory, apart: bool, waits: bool) -> Result<()> {
        self.take_turn(memory, apart, waits)
    }

    fn mark(&self, memory: &mut Memory) -> Result<()> {
        self.mark_passed(memory)
    }

    fn allocate_weights(&self, bytes: u64) -> Result<Arc<Block>> {
        Block::new(&self.context, bytes).map(Arc::new)
    }

    fn prepare(
        &self,
        store: &Arc<Block>,
        offset: u64,
        layout: &ConvLayout,
        source: &mut dyn ConvSource,
    ) -> Result<Conv> {
        Conv::prepare(store, offset, &self.stream, self.precision, layout, source)
    }

    fn load(&self, memory: &mut Memory, op: &LoadOp, stop: &mut Stop) -> Result<()> {
        self.operate(memory, ALONE, stop, |on, transfers, _| self.launch_load(on, transfers, op))
    }

    fn fuses_norm(&self, _: &ConvLayout) -> bool {
        false
    }

    fn normalise(&self, memory: &mut Memory, weights: &Conv, op: &NormOp, stop: &mut Stop) -> Result<()> {
        let elements = op.shape.elements() * op.frames.len() as u64;
        self.operate(memory, elements, stop, |on, _, _| {
            let parts = op.frames.chunks(MAX_FRAMES);
            let what = (op.layout, op.shape);
            parts.into_iter().try_for_each(|frames| self.launch_norm(on, weights, what, frames, None))
        })
    }

    fn conv(&self, memory: &mut Memory, weights: &Conv, op: &ConvOp, stop: &mut Stop) -> Result<()> {
        let output = op.layout.window.output(op.input, op.layout.cout);
        let elements = output.elements() * op.frames.len() as u64;
        self.operate(memory, elements, stop, |on, _, _| {
            let parts = op.frames.chunks(MAX_FRAMES);
            parts.into_iter().try_for_each(|frames| self.launch_conv(on, weights, op, frames))
        })
    }

    fn adds_in_place(&self) -> bool {
        true
    }

    fn banded(&self, memory: &mut Memory, weights: &Conv, op: &BandedOp, stop: &mut Stop) -> Result<()> {
        if op.frames.len() > MAX_FRAMES {
            return Err(Error::Internal(format!("{} frames at a time were planned", op.frames.len())));
        }
        // Copies come in between, so launches could not be collected.
        self.operate(memory, u64::MAX, stop, |on, _, bands| self.launch_banded(on, bands, weights, op))
    }

    fn attention(&self, memory: &mut Memory, op: &AttentionOp, stop: &mut Stop) -> Result<()> {
        let elements = op.shape.elements() * op.frames.len() as u64;
        self.operate(memory, elements, stop, |on, _, _| self.launch_attention(on, op))
    }

    fn blend(&self, memory: &mut Memory, op: &BlendOp, stop: &mut Stop) -> Result<()> {
        self.operate(memory, ALONE, stop, |on, _, _| self.launch_blend(on, op))
    }

    fn store(&self, memory: &mut Memory, op: &StoreOp, stop: &mut Stop) -> Result<()> {
        self.operate(memory, ALONE, stop, |on, transfers, _| self.launch_store(on, transfers, op))
    }
}

#[cfg(test)]
mod tests;
