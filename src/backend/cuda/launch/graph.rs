//! Collects launches of small operations into a CUDA graph: launching one alone costs as much as running it. The first
//! batch of some kernels and grids is launched plainly, the second becomes a graph, later ones update its parameters.
//! Whatever fails, the batch is launched plainly instead.

use std::any::Any;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUgraph, CUgraphExec, CUgraphNode};

use crate::backend::cuda::driver::{Context, CudaStream, Kernel, check};
use crate::error::{Error, Result};

/// Operations of at most so many output elements are collected; they take a fraction of a millisecond.
const SMALL: u64 = 1 << 22;
/// The most operations of a batch: a few milliseconds, so that a cancel acts soon.
const MOST_OPERATIONS: usize = 16;
/// The fewest launches that are worth a graph.
const LEAST_LAUNCHES: usize = 4;
/// The most kinds of batches that are remembered. A slice of a clip has about a dozen.
const MOST_BATCHES: usize = 64;

/// A kernel's one parameter, kept until the launch.
pub trait KernelParams: Any + Send {
    fn same(&self, other: &dyn KernelParams) -> bool;
}

impl<T: PartialEq + Send + 'static> KernelParams for T {
    fn same(&self, other: &dyn KernelParams) -> bool {
        (other as &dyn Any).downcast_ref::<T>() == Some(self)
    }
}

pub struct RecordedLaunch {
    pub kernel: Kernel,
    pub grid: [u32; 2],
    pub threads: u32,
    pub params: Box<dyn KernelParams>,
}

impl RecordedLaunch {
    /// Whether the same node of a graph can launch either.
    fn is_like(&self, other: &RecordedLaunch) -> bool {
        self.kernel == other.kernel && (self.grid, self.threads) == (other.grid, other.threads)
    }

    fn launch(&self, stream: &CudaStream) -> Result<()> {
        // SAFETY: the caller that recorded the launch vouched for its parameter.
        unsafe { self.kernel.launch(stream, self.grid, self.threads, &*self.params) }
    }
}

/// Launches that are not in the stream yet, and the batches seen before.
#[derive(Default)]
pub struct LaunchRecorder {
    recording: bool,
    pending: Vec<RecordedLaunch>,
    operations: usize,
    /// Least recently used first.
    known: Vec<KnownBatch>,
    /// A failure that was not reported yet.
    failed: Option<Error>,
    /// Set once the driver has refused a graph.
    plain_only: bool,
}

impl LaunchRecorder {
    pub fn is_recording(&self) -> bool {
        self.recording
    }

    pub fn record(&mut self, launch: RecordedLaunch) {
        self.pending.push(launch);
    }

    /// Begins an operation of so many output elements; `None` for one that is not collected.
    pub fn begin(&mut self, elements: Option<u64>) {
        self.recording = elements.is_some_and(|elements| elements <= SMALL);
        #[cfg(test)]
        if testing::OFF.get() {
            self.recording = false;
        }
    }

    /// Ends the operation. Whether the batch has to be flushed.
    pub fn end(&mut self) -> bool {
        self.operations += 1;
        let recording = std::mem::take(&mut self.recording);
        !recording || self.operations >= MOST_OPERATIONS
    }

    /// Puts everything recorded into the stream; keeps a failure for `outcome`. The context has to be current.
    pub fn flush(&mut self, stream: &CudaStream) {
        let batch = std::mem::take(&mut self.pending);
        self.operations = 0;
        if !batch.is_empty()
            && let Err(error) = self.launch(batch, stream)
        {
            self.failed.get_or_insert(error);
        }
    }

    /// The first failure since the last call.
    pub fn outcome(&mut self) -> Result<()> {
        self.failed.take().map_or(Ok(()), Err)
    }

    /// Drops graphs, and launches that were not flushed.
    pub fn forget(&mut self) {
        self.pending.clear();
        self.known.clear();
        self.operations = 0;
    }

    fn launch(&mut self, batch: Vec<RecordedLaunch>, stream: &CudaStream) -> Result<()> {
        if self.plain_only || batch.len() < LEAST_LAUNCHES {
            return batch.iter().try_for_each(|launch| launch.launch(stream));
        }
        let Some(at) = self.known.iter().position(|known| known.is_like(&batch)) else {
            if self.known.len() == MOST_BATCHES {
                self.known.remove(0);
            }
            let launched = batch.iter().try_for_each(|launch| launch.launch(stream));
            self.known.push(KnownBatch { batch, graph: None });
            return launched;
        };
        let mut known = self.known.remove(at);
        if known.launch(&batch, stream).is_ok() {
            self.known.push(KnownBatch { batch, ..known });
            return Ok(());
        }
        // If the GPU itself has failed, plain launches say so.
        self.plain_only = true;
        batch.iter().try_for_each(|launch| launch.launch(stream))
    }
}

/// A batch as it was launched last.
struct KnownBatch {
    batch: Vec<RecordedLaunch>,
    graph: Option<LaunchGraph>,
}

impl KnownBatch {
    fn is_like(&self, batch: &[RecordedLaunch]) -> bool {
        self.batch.len() == batch.len() && self.batch.iter().zip(batch).all(|(a, b)| a.is_like(b))
    }

    /// Launches a batch like this one as a graph.
    fn launch(&mut self, batch: &[RecordedLaunch], stream: &CudaStream) -> Result<()> {
        match &self.graph {
            None => self.graph = Some(LaunchGraph::new(stream.context(), batch)?),
            Some(graph) => {
                for (node, (before, now)) in graph.nodes.iter().zip(self.batch.iter().zip(batch)) {
                    if !before.params.same(&*now.params) {
                        graph.update(*node, now)?;
                    }
                }
            }
        }
        self.graph.as_ref().map_or(Ok(()), |graph| graph.launch(stream))
    }
}

/// A chain of kernels, ready to be launched.
struct LaunchGraph {
    context: Arc<Context>,
    graph: CUgraph,
    executable: CUgraphExec,
    nodes: Vec<CUgraphNode>,
}

// SAFETY: a graph may be used from any thread, one at a time.
unsafe impl Send for LaunchGraph {}

fn with_node_params<T>(launch: &RecordedLaunch, with: impl FnOnce(&sys::CUDA_KERNEL_NODE_PARAMS) -> T) -> Result<T> {
    let func = launch.kernel.function()?;
    let mut arguments = [std::ptr::from_ref(&*launch.params).cast::<std::ffi::c_void>().cast_mut()];
    Ok(with(&sys::CUDA_KERNEL_NODE_PARAMS {
        func,
        gridDimX: launch.grid[0],
        gridDimY: launch.grid[1],
        gridDimZ: 1,
        blockDimX: launch.threads,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: launch.kernel.shared_bytes(),
        kernelParams: arguments.as_mut_ptr(),
        extra: std::ptr::null_mut(),
        kern: std::ptr::null_mut(),
        ctx: std::ptr::null_mut(),
    }))
}

impl LaunchGraph {
    fn new(context: &Arc<Context>, batch: &[RecordedLaunch]) -> Result<LaunchGraph> {
        let (graph, executable) = (std::ptr::null_mut(), std::ptr::null_mut());
        let mut made = LaunchGraph { context: Arc::clone(context), graph, executable, nodes: Vec::new() };
        // SAFETY: writes where it is told.
        check("creating a graph", unsafe { sys::cuGraphCreate(&mut made.graph, 0) })?;
        for launch in batch {
            let (mut node, before) = (std::ptr::null_mut(), made.nodes.last());
            let (first, count) = before.map_or((std::ptr::null(), 0), |node| (std::ptr::from_ref(node), 1));
            // SAFETY: the graph and the node before live; the driver copies the parameter before it returns.
            let answer = with_node_params(launch, |params| unsafe {
                sys::cuGraphAddKernelNode_v2(&mut node, made.graph, first, count, params)
            });
            check("adding to a graph", answer?)?;
            made.nodes.push(node);
        }
        // SAFETY: the graph lives.
        let answer = unsafe { sys::cuGraphInstantiateWithFlags(&mut made.executable, made.graph, 0) };
        check("instantiating a graph", answer)?;
        Ok(made)
    }

    /// Changes a node's parameter for the next launch; launches in flight keep theirs.
    fn update(&self, node: CUgraphNode, launch: &RecordedLaunch) -> Result<()> {
        // SAFETY: the node is of this graph, and of the same kernel; the driver copies the parameter before it returns.
        let answer = with_node_params(launch, |params| unsafe {
            sys::cuGraphExecKernelNodeSetParams_v2(self.executable, node, params)
        });
        check("changing a graph", answer?)
    }

    fn launch(&self, stream: &CudaStream) -> Result<()> {
        #[cfg(test)]
        testing::LAUNCHED.set(testing::LAUNCHED.get() + 1);
        // SAFETY: both live; the callers that recorded the launches vouched for their parameters.
        check("launching a graph", unsafe { sys::cuGraphLaunch(self.executable, stream.handle()) })
    }
}

impl Drop for LaunchGraph {
    fn drop(&mut self) {
        let Ok(_current) = self.context.enter() else { return };
        // SAFETY: created in `new`, as far as that came. A graph in flight is freed when it has ended.
        unsafe {
            if !self.executable.is_null() {
                sys::cuGraphExecDestroy(self.executable);
            }
            if !self.graph.is_null() {
                sys::cuGraphDestroy(self.graph);
            }
        }
    }
}

/// For tests: how many graphs were launched, and a switch that turns them off. Per thread.
#[cfg(test)]
pub mod testing {
    use std::cell::Cell;

    thread_local! {
        pub static LAUNCHED: Cell<u64> = const { Cell::new(0) };
        pub static OFF: Cell<bool> = const { Cell::new(false) };
    }
}

#[cfg(test)]
mod tests {
    use super::super::params::{FinalizeParams, NormParams};
    use super::*;

    #[test]
    fn same_compares_the_type_and_all_fields() {
        let params = FinalizeParams { eps: 1e-6, ..FinalizeParams::default() };
        let (mut other, other_type) = (params, NormParams::default());
        assert!(params.same(&other));
        other.slot[31] = 1;
        assert!(!params.same(&other) && !params.same(&other_type));
    }

    #[test]
    fn recorder_batches_small_operations_up_to_a_limit() {
        let mut recorder = LaunchRecorder::default();
        let mut operation = |elements| {
            recorder.begin(Some(elements));
            let recording = recorder.is_recording();
            let complete = recorder.end();
            if complete {
                recorder.forget();
            }
            (recording, complete)
        };
        for _ in 0..3 {
            for _ in 1..MOST_OPERATIONS {
                assert_eq!(operation(SMALL), (true, false));
            }
            assert_eq!(operation(1), (true, true));
        }
        assert_eq!(operation(1), (true, false));
        assert_eq!(operation(SMALL + 1), (false, true), "a large one flushes the batch");
    }
}
