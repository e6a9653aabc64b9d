//! NVIDIA GPUs, by kernels of our own and nothing but the driver.

mod driver;
mod kept;
mod launch;
mod offload;
mod profile;

pub use driver::device::{devices, ready};
pub use offload::weights::{Conv, Store};

use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use self::driver::context::Context;
use self::driver::memory;
use self::driver::memory::Block;
use self::driver::stream::{Event, Stream};
use self::launch::graph::Forget;
use self::launch::kernels::Kernels;
use self::launch::params::MAX_FRAMES;
use self::launch::{limits, tiling as geometry};
use self::offload::bands::Bands;
use self::offload::staging::Transfers;
use self::offload::weights::HostWeights;
use self::offload::{bands as banded, weights};
use super::{
    AttentionOp, Backend, BandedOp, BlendOp, CarryOp, ConvLayout, ConvOp, ConvSource, DeviceAllocator, Frame,
    HostMemory, HostStream, Kept, LoadOp, NormOp, Precision, Stop, StoreOp,
};
use crate::error::{Error, Result};
use crate::tensor::{BandFrames, FrameShape, Rates};

/// Of the norms' variance.
const EPS: f32 = 1e-6;
/// Operations that may wait in the stream. Enough to keep the GPU busy, few enough that a cancel acts soon.
const AHEAD: usize = 8;
/// In place of a number of elements: the operation is not collected, as it copies, or is never the same twice.
const ALONE: u64 = u64::MAX;

/// One GPU, in one precision.
pub struct Cuda {
    precision: Precision,
    context: Arc<Context>,
    kernels: Arc<Kernels>,
    stream: Stream,
    allocator: DeviceAllocator,
}

/// The memory of a job and what is under way in it.
pub struct Memory {
    _graphs: Forget,
    transfers: Transfers,
    bands: Bands,
    marks: Vec<Event>,
    next: usize,
    /// Whether the call under way is ordered on a stream of the host's, and must not wait.
    on_host_stream: bool,
    block: Block,
}

impl Cuda {
    pub fn new(index: u32, precision: Precision, allocator: DeviceAllocator) -> Result<Cuda> {
        let context = Context::new(index)?;
        let kernels = shared_kernels(index, precision, &context)?;
        Ok(Cuda { precision, stream: Stream::new(&context)?, kernels, context, allocator })
    }

    /// Runs one operation: asks whether to stop, makes the context current, and keeps the stream short; a call on the
    /// host's stream fills it instead. `elements` is the size of the output, for operations that may wait for the next
    /// ones.
    fn operate(
        &self,
        memory: &mut Memory,
        elements: u64,
        stop: &mut Stop,
        launch: impl FnOnce(&mut Memory) -> Result<()>,
    ) -> Result<()> {
        if stop() {
            return Err(Error::Cancelled);
        }
        let _current = self.context.enter()?;
        self.stream.begin(elements);
        let launched = launch(memory);
        let complete = self.stream.end();
        launched?;
        if !complete? || memory.on_host_stream {
            return Ok(());
        }
        let mark = &memory.marks[memory.next];
        memory.next = (memory.next + 1) % AHEAD;
        mark.wait()?;
        mark.record(&self.stream)
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
    type Store = Store;
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

    fn fade_bytes(&self, shape: FrameShape) -> u64 {
        geometry::fade_bytes(shape)
    }

    fn rates(&self) -> Rates {
        self.kernels.rates
    }

    fn band_bytes(&self, layout: &ConvLayout, input: FrameShape, frames: BandFrames) -> Option<u64> {
        banded::bytes(self.precision, layout, input, frames)
    }

    fn sums_bytes(&self, layout: &ConvLayout, input: FrameShape) -> Option<u64> {
        geometry::sums_bytes(layout, input)
    }

    fn carry_bytes(&self, layout: &ConvLayout, input: FrameShape) -> Option<u64> {
        launch::conv_out::bytes(layout, input)
    }

    /// Parts are addressed by where their frame would begin, and that has to be in the block: it is the base of a tensor map.
    fn bytes_above_parts(&self, shape: FrameShape) -> u64 {
        self.precision.data_bytes(shape)
    }

    fn mapping_bytes(&self, host: u64) -> u64 {
        // A page table: 8 bytes for each page of 4 KiB.
        self.block_bytes(host / 4096 * 8)
    }

    fn allocate(&self, bytes: u64, host: HostMemory) -> Result<Memory> {
        let block = Block::new(&self.context, self.allocator, bytes)?;
        let marks = (0..AHEAD).map(|_| Event::new(&self.context)).collect::<Result<_>>()?;
        let transfers = Transfers::new(&self.context, host)?;
        let bands = Bands::new(&self.context, host.past)?;
        Ok(Memory {
            _graphs: self.stream.forget_with(),
            transfers,
            bands,
            marks,
            next: 0,
            on_host_stream: false,
            block,
        })
    }

    fn is_pageable(&self, memory: &Memory) -> bool {
        memory.bands.is_pageable()
    }

    fn begin(&self, memory: &mut Memory, host: Option<HostStream>) -> Result<()> {
        let Some(host) = host else { return Ok(()) };
        let _current = self.context.enter()?;
        Event::new(&self.context)?.between(host.0.cast(), self.stream.handle())?;
        memory.on_host_stream = true;
        Ok(())
    }

    fn finish(&self, memory: &mut Memory, host: Option<HostStream>) -> Result<()> {
        memory.on_host_stream = false;
        let _current = self.context.enter()?;
        let flushed = self.stream.flush();
        let arrived = memory.transfers.finish();
        flushed.and(arrived).and(match host {
            Some(host) => {
                let joined = memory.bands.join(&self.stream).and(memory.transfers.join(&self.stream));
                // Whatever failed, the host's stream goes on after all that was begun.
                let event = Event::new(&self.context);
                joined.and(event.and_then(|event| event.between(self.stream.handle(), host.0.cast())))
            }
            None => self.stream.wait().and(memory.bands.wait()).and(memory.transfers.wait()),
        })
    }

    fn allocate_weights(&self, bytes: u64) -> Result<Store> {
        Ok(Store::Device(Arc::new(Block::new(&self.context, self.allocator, bytes)?)))
    }

    fn allocate_host_weights(&self, bytes: u64) -> Result<Store> {
        Ok(Store::Host(Arc::new(HostWeights::new(&self.context, bytes)?)))
    }

    fn is_pageable_store(&self, store: &Store) -> bool {
        matches!(store, Store::Host(weights) if !weights.is_pinned())
    }

    fn prepare(&self, store: &Store, offset: u64, layout: &ConvLayout, source: &mut dyn ConvSource) -> Result<Conv> {
        Conv::prepare(store, offset, &self.stream, self.precision, layout, source)
    }

    fn fetch_weights(&self, memory: &mut Memory, weights: &Conv, slabs: u64, into: Frame) -> Result<()> {
        let _current = self.context.enter()?;
        let waiting = weights.waiting(slabs)?;
        let to = memory.block.at(into.0, waiting.map(<[u8]>::len).iter().sum::<usize>() as u64)?;
        memory.transfers.fetch(waiting, to, &self.stream)
    }

    fn fetched_weights(&self, memory: &mut Memory, weights: &Conv, slabs: u64, at: Frame) -> Result<Conv> {
        let _current = self.context.enter()?;
        let address = memory.block.address(at);
        memory.transfers.await_fetched(address, &self.stream)?;
        Ok(weights.fetched(slabs, address))
    }

    fn load(&self, memory: &mut Memory, op: &LoadOp, stop: &mut Stop) -> Result<()> {
        self.operate(memory, ALONE, stop, |memory| self.launch_load(&memory.block, &mut memory.transfers, op))
    }

    fn fuses_norm(&self, _: &ConvLayout) -> bool {
        false
    }

    fn normalise(&self, memory: &mut Memory, weights: &Conv, op: &NormOp, stop: &mut Stop) -> Result<()> {
        let elements = op.shape.elements() * op.frames.len() as u64;
        self.operate(memory, elements, stop, |memory| {
            let parts = op.frames.chunks(MAX_FRAMES);
            let what = (op.layout, op.shape);
            parts.into_iter().try_for_each(|frames| self.launch_norm(&memory.block, weights, what, frames, None))
        })
    }

    fn conv(&self, memory: &mut Memory, weights: &Conv, op: &ConvOp, stop: &mut Stop) -> Result<()> {
        let output = op.layout.window.output(op.input, op.layout.cout);
        let elements = output.elements() * op.frames.len() as u64;
        if !op.sums.is_none() && (op.frames.len() >= MAX_FRAMES || !geometry::keeps_sums(op.layout)) {
            return Err(Error::Internal(format!("sums of {} frames of {:?} were planned", op.frames.len(), op.layout)));
        }
        self.operate(memory, elements, stop, |memory| {
            let parts = op.frames.chunks(MAX_FRAMES);
            parts.into_iter().try_for_each(|frames| self.launch_conv(&memory.block, weights, op, frames))
        })
    }

    fn conv_carrying(&self, memory: &mut Memory, weights: &Conv, op: &CarryOp, stop: &mut Stop) -> Result<()> {
        let output = op.layout.window.output(op.input, op.layout.cout);
        let elements = output.elements() * op.frames.len() as u64;
        self.operate(memory, elements, stop, |memory| self.launch_carrying(&memory.block, weights, op))
    }

    fn adds_in_place(&self) -> bool {
        true
    }

    fn banded(&self, memory: &mut Memory, op: &BandedOp<Conv>, stop: &mut Stop) -> Result<()> {
        if op.frames.len() > MAX_FRAMES {
            return Err(Error::Internal(format!("{} frames at a time were planned", op.frames.len())));
        }
        // Copies come in between, so launches could not be collected.
        self.operate(memory, ALONE, stop, |memory| self.launch_banded(&memory.block, &mut memory.bands, op))
    }

    fn attention(&self, memory: &mut Memory, op: &AttentionOp, stop: &mut Stop) -> Result<()> {
        let elements = op.shape.elements() * op.frames.len() as u64;
        self.operate(memory, elements, stop, |memory| self.launch_attention(&memory.block, op))
    }

    fn blend(&self, memory: &mut Memory, op: &BlendOp, stop: &mut Stop) -> Result<()> {
        self.operate(memory, ALONE, stop, |memory| self.launch_blend(&memory.block, op))
    }

    fn store(&self, memory: &mut Memory, op: &StoreOp, stop: &mut Stop) -> Result<()> {
        self.operate(memory, ALONE, stop, |memory| self.launch_store(&memory.block, &mut memory.transfers, op))
    }

    fn read(&self, memory: &mut Memory, from: Kept, into: &mut [u8]) -> Result<()> {
        self.read_kept(memory, from, into)
    }

    fn write(&self, memory: &mut Memory, to: Kept, from: &[u8]) -> Result<()> {
        self.write_kept(memory, to, from)
    }
}

#[cfg(test)]
mod tests;
