//! A backend above any GPU API: how it allocates, runs and tells of jobs.

use super::api::{GpuApi, GpuMemory};
use super::job::JobMemory;
use crate::backend::{
    DeviceSpan, Diagnosis, Execution, HostStream, JobAllocation, NonFinite, RunArgs, Stop, WeightStorage,
};
use crate::error::Result;
use crate::ir::{BlendTile, Buffers, LoadTensor, Offsets, Op, PinnedBytes, StoreTensor};

/// A device with a GPU API. It states its facts and stores its weights itself; the rest is the same for all.
pub trait GpuBackend: WeightStorage<Conv = <Self::Api as GpuApi>::Conv> {
    type Api: GpuApi;
    fn api(&self) -> &Self::Api;
    /// Device memory for a job.
    fn block(&self, bytes: u64) -> Result<<Self::Api as GpuMemory>::Block>;
}

impl<B: GpuBackend> JobAllocation for B {
    type Memory = JobMemory<B::Api>;

    fn allocate(&self, bytes: u64, host: PinnedBytes) -> Result<JobMemory<B::Api>> {
        JobMemory::new(self.api(), self.block(bytes)?, host)
    }

    fn is_pageable(&self, memory: &JobMemory<B::Api>) -> bool {
        memory.is_pageable()
    }
}

impl<B: GpuBackend> Execution for B {
    fn check_stream(&self, host: HostStream) -> Result<()> {
        let _current = self.api().enter()?;
        self.api().check_stream(host)
    }

    fn begin(&self, memory: &mut Self::Memory, host: Option<HostStream>) -> Result<()> {
        memory.begin(self.api(), host)
    }

    fn finish(&self, memory: &mut Self::Memory, host: Option<HostStream>) -> Result<()> {
        memory.finish(self.api(), host)
    }

    fn run(
        &self,
        memory: &mut Self::Memory,
        op: &Op<Offsets>,
        args: &RunArgs<Self::Conv>,
        stop: &mut Stop,
    ) -> Result<()> {
        memory.run(self.api(), op, args, stop)
    }

    fn load(&self, memory: &mut Self::Memory, op: &LoadTensor, buffers: &Buffers, stop: &mut Stop) -> Result<()> {
        memory.load(self.api(), op, buffers, stop)
    }

    fn blend(&self, memory: &mut Self::Memory, op: &BlendTile, buffers: &Buffers) -> Result<()> {
        memory.blend(self.api(), op, buffers)
    }

    fn store(&self, memory: &mut Self::Memory, op: &StoreTensor, buffers: &Buffers) -> Result<()> {
        memory.store(self.api(), op, buffers)
    }
}

impl<B: GpuBackend> Diagnosis for B {
    fn take_nonfinite(&self, memory: &mut Self::Memory) -> NonFinite {
        memory.take_nonfinite()
    }

    fn trace(&self, memory: &mut Self::Memory, op: Option<u64>) -> Result<bool> {
        memory.trace(self.api(), op).map(|()| true)
    }

    fn take_spans(&self, memory: &mut Self::Memory) -> Result<Vec<DeviceSpan>> {
        memory.take_spans(self.api())
    }
}
