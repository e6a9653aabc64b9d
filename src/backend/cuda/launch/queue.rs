//! The compute stream that operations go to. Launches of small operations are collected and go to the GPU as a CUDA
//! graph; no other file knows of graphs.

use std::borrow::Borrow;
use std::ops::Deref;
use std::sync::Arc;

use parking_lot::Mutex;

#[cfg(test)]
pub use super::graph::testing;
use super::graph::{KernelParams, LaunchRecorder, RecordedLaunch};
use crate::backend::cuda::driver::{Context, CudaStream, DeviceBlock, Kernel};
use crate::backend::gpu::Queue;
use crate::error::Result;

/// Every method but `new` wants the context to be current.
pub struct LaunchQueue {
    stream: CudaStream,
    recorder: Arc<Mutex<LaunchRecorder>>,
}

impl LaunchQueue {
    pub fn new(context: &Arc<Context>) -> Result<LaunchQueue> {
        Ok(LaunchQueue { stream: CudaStream::new(context)?, recorder: Arc::default() })
    }

    /// The stream, with everything collected in it, so that later work keeps the order. A failure is reported by the
    /// next `end` or `flush`.
    pub fn stream(&self) -> &CudaStream {
        self.recorder.lock().flush(&self.stream);
        &self.stream
    }

    /// Begins an operation of so many output elements; `None` for one that is not collected.
    pub fn begin(&self, elements: Option<u64>) {
        self.recorder.lock().begin(elements);
    }

    /// Ends the operation. `false` if its launches are still being collected.
    pub fn end(&self) -> Result<bool> {
        let mut recorder = self.recorder.lock();
        let complete = recorder.end();
        if complete {
            recorder.flush(&self.stream);
        }
        recorder.outcome().map(|()| complete)
    }

    /// Launches a kernel, or collects the launch if the operation is small.
    ///
    /// # Safety
    /// `Params` is the kernel's one parameter in its own layout. Everything it points at lives until the stream has
    /// passed the launch, which may enter the stream later.
    pub unsafe fn launch<Params>(&self, kernel: &Kernel, grid: [u32; 2], threads: u32, params: &Params) -> Result<()>
    where
        Params: KernelParams + Copy,
    {
        let mut recorder = self.recorder.lock();
        if recorder.is_recording() {
            recorder.record(RecordedLaunch { kernel: kernel.clone(), grid, threads, params: Box::new(*params) });
            return Ok(());
        }
        recorder.flush(&self.stream);
        // SAFETY: the caller's promise.
        unsafe { kernel.launch(&self.stream, grid, threads, params) }
    }

    /// Puts everything collected into the stream.
    pub fn flush(&self) -> Result<()> {
        let mut recorder = self.recorder.lock();
        recorder.flush(&self.stream);
        recorder.outcome()
    }

    /// Blocks the calling thread until everything has run.
    pub fn synchronise(&self) -> Result<()> {
        self.flush()?;
        self.stream.synchronise()
    }

    /// For the owner of the memory that launches work in: drops their graphs with it.
    pub fn graph_guard(&self) -> GraphGuard {
        GraphGuard(Arc::clone(&self.recorder))
    }
}

/// A job's block. Graphs of launches in it are dropped with it.
pub struct JobBlock {
    pub _graphs: GraphGuard,
    pub block: DeviceBlock,
}

impl Deref for JobBlock {
    type Target = DeviceBlock;

    fn deref(&self) -> &DeviceBlock {
        &self.block
    }
}

impl Borrow<DeviceBlock> for JobBlock {
    fn borrow(&self) -> &DeviceBlock {
        &self.block
    }
}

/// Drops all graphs, and launches that were collected and not flushed, when dropped.
pub struct GraphGuard(Arc<Mutex<LaunchRecorder>>);

impl Drop for GraphGuard {
    fn drop(&mut self) {
        self.0.lock().forget();
    }
}
