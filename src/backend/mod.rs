//! The arithmetic: memory, weights, and operations on frames of activations.
//!
//! A result depends on the input frames only; not on how many frames share a call, nor on the number of threads. That
//! makes bits independent of how a clip is cut. Knows no model, no plan and no clip.

mod absent;
pub mod allocator;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod device;
pub mod gpu;
mod host_stream;
mod precision;
mod tensor_copy;
#[cfg(test)]
pub mod tests;
#[cfg(any(feature = "cuda", feature = "vulkan"))]
mod uuid;
#[cfg(feature = "vulkan")]
pub mod vulkan;

pub use absent::AbsentDevice;
pub use allocator::{Allocator, Callbacks, DeviceAllocator, HostAllocator};
pub use device::{DeviceInfo, auto_devices, cuda_devices, devices, host_memory};
pub use host_stream::HostStream;
pub use precision::Precision;
pub use tensor_copy::copy as copy_tensor;

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use crate::error::Result;
use crate::ir::{
    BlendTile, Buffers, ConvLayout, ConvSource, DeviceProfile, LoadTensor, Offsets, Op, PinnedBytes, Sizes,
    StoreTensor, WeightPart,
};
use crate::thread_pool::Pool;

pub use crate::thread_pool::Stop;

/// What operations of a job share.
#[derive(Clone, Copy)]
pub struct RunArgs<'a, C> {
    /// Weights by layer.
    pub weights: &'a [C],
    pub buffers: Buffers,
}

/// Whether loads met, and stores wrote, values that are NaN or infinite.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NonFinite {
    pub loaded: bool,
    pub stored: bool,
}

/// When a part of an operation ran, in one of the device's lanes.
#[derive(Debug, Clone, Copy)]
pub struct DeviceSpan {
    pub op: u64,
    pub lane: &'static str,
    pub start: Instant,
    pub end: Instant,
}

/// What the host should know of a backend or its rates, for the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Note {
    pub is_warning: bool,
    pub text: String,
}

/// Where prepared weights live.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Residency {
    Device,
    /// Pinned host memory, from where [`Op::Fetch`] copies them.
    Host,
}

/// What loading and planning ask of a device.
pub trait DeviceFacts {
    /// Whether the device's memory is the host's.
    const HOST_MEMORY: bool;

    fn precision(&self) -> Precision;
    /// The architecture and instruction set. With equal texts and equal precisions, bits are equal.
    fn arithmetic(&self) -> String;
    /// What it did to the process, or could not do.
    fn notes(&self) -> Vec<Note> {
        Vec::new()
    }
    fn profile(&self) -> DeviceProfile;
    /// The profile with rates that were measured: those in the table at a path, which the backend chooses for `None`.
    /// What is not there is measured and stored. Fails if stopped, and only then.
    fn tuned_profile(&self, _table: Option<&Path>, _stop: &mut Stop) -> Result<(DeviceProfile, Vec<Note>)> {
        Ok((self.profile(), Vec::new()))
    }
    fn sizes(&self) -> &dyn Sizes;
    /// The threads that it computes with, for loading and planning too.
    fn pool(&self) -> Option<&Arc<Pool>> {
        None
    }
    /// Whether kernels exist for these layouts and for attention over these numbers of channels. If not, the error says
    /// which is missing and what to use instead. Asked once, before anything is loaded.
    fn check_layers(&self, _layouts: &[ConvLayout], _attention: &[u64]) -> Result<()> {
        Ok(())
    }
    /// Free device memory, as far as the device can tell.
    fn free_bytes(&self) -> u64;
}

/// Memory of jobs.
pub trait JobAllocation {
    /// A job's memory, freed when dropped.
    type Memory: Send;

    /// `bytes` of device memory, and pinned host memory beside it.
    fn allocate(&self, bytes: u64, host: PinnedBytes) -> Result<Self::Memory>;
    /// Whether some of the host memory could not be pinned. Copies then take longer than planned.
    fn is_pageable(&self, _memory: &Self::Memory) -> bool {
        false
    }
}

/// Weights in the form that kernels read.
pub trait WeightStorage {
    /// Memory for the weights of a network.
    type Store: Send + Sync;
    /// The prepared weights of one convolution. Shared between handles.
    type Conv: Send + Sync;
    /// What a thread that writes weights keeps from part to part.
    type PackBuffers: Default;

    /// Memory for `bytes` of weights. Where the device's memory is the host's, each convolution allocates its own.
    fn allocate_weights(&self, bytes: u64, residency: Residency) -> Result<Self::Store>;
    /// Whether offloaded weights could not be pinned.
    fn is_pageable_store(&self, _store: &Self::Store) -> bool {
        false
    }
    /// Memory for the weights of a convolution, `offset` bytes into `store`, with nothing in it yet.
    fn allocate_conv(&self, store: &Self::Store, offset: u64, layout: &ConvLayout) -> Result<Self::Conv>;
    /// The parts that the weights of a convolution are written in. Small enough to stay in cache.
    fn weight_parts(&self, layout: &ConvLayout) -> Vec<WeightPart>;
    /// Brings a part into the kernels' form. Called once for each part, by several threads at a time.
    fn write_part(
        &self,
        conv: &Self::Conv,
        part: &WeightPart,
        source: &mut dyn ConvSource,
        buffers: &mut Self::PackBuffers,
    ) -> Result<()>;
}

/// Operations. A method may return before its result exists; the next method is ordered after it, and
/// [`Execution::finish`] waits for all. Memory and weights must live until then.
pub trait Execution: JobAllocation + WeightStorage {
    /// Whether work may be put in order with the host's stream. Asked before anything else is done for it.
    fn check_stream(&self, _host: HostStream) -> Result<()> {
        Ok(())
    }
    /// Orders what follows after the host's stream. The calling thread then waits for nothing until
    /// [`Execution::finish`].
    fn begin(&self, _memory: &mut Self::Memory, _host: Option<HostStream>) -> Result<()> {
        Ok(())
    }
    /// With a host's stream: orders it after everything. Without one: waits until every host tensor is written.
    fn finish(&self, _memory: &mut Self::Memory, _host: Option<HostStream>) -> Result<()> {
        Ok(())
    }
    /// Runs an operation that touches no host tensor.
    fn run(
        &self,
        memory: &mut Self::Memory,
        op: &Op<Offsets>,
        args: &RunArgs<Self::Conv>,
        stop: &mut Stop,
    ) -> Result<()>;
    /// Host tensor to activations.
    fn load(&self, memory: &mut Self::Memory, op: &LoadTensor, buffers: &Buffers, stop: &mut Stop) -> Result<()>;
    /// Adds a tile to its whole frame.
    fn blend(&self, memory: &mut Self::Memory, op: &BlendTile, buffers: &Buffers) -> Result<()>;
    /// Activations to host tensor.
    fn store(&self, memory: &mut Self::Memory, op: &StoreTensor, buffers: &Buffers) -> Result<()>;
}

/// What a job tells beside its results.
pub trait Diagnosis: JobAllocation {
    /// What loads and stores have met since the last answer. Complete after [`Execution::finish`] without a stream.
    fn take_nonfinite(&self, memory: &mut Self::Memory) -> NonFinite;
    /// For a trace: what follows belongs to operation number `op`; `None` ends it. `true` if the device notes times
    /// itself, for [`Diagnosis::take_spans`]; `false` if every method returns when its work is done.
    fn trace(&self, _memory: &mut Self::Memory, _op: Option<u64>) -> Result<bool> {
        Ok(false)
    }
    /// When operations and copies ran that were traced since the last answer. Waits for them.
    fn take_spans(&self, _memory: &mut Self::Memory) -> Result<Vec<DeviceSpan>> {
        Ok(Vec::new())
    }
}

/// One device, for whoever runs jobs on it.
pub trait Backend: DeviceFacts + Execution + Diagnosis + Send + Sync + 'static {}

impl<B: DeviceFacts + Execution + Diagnosis + Send + Sync + 'static> Backend for B {}
