//! Small operations are collected and put into the stream together, as a CUDA graph: what a launch costs on its own is as
//! much as a small kernel runs.
//!
//! A batch is known by its kernels and their grids. The first of a kind is launched plainly and remembered; with the second
//! it becomes a graph; from then on the graph is told which parameters have changed (a slice of a clip uses other slots
//! than the one before) and launched as a whole. Whatever goes wrong with a graph, the batch is launched plainly instead.

use std::any::Any;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUgraph, CUgraphExec, CUgraphNode, CUstream};
use parking_lot::Mutex;

use crate::backend::cuda::driver::context::Context;
use crate::backend::cuda::driver::device::check;
use crate::backend::cuda::launch::kernels::Kernel;
use crate::error::{Error, Result};

/// Operations of at most so many output elements are collected; these take a fraction of a millisecond. 0 is never.
pub const SMALL: u64 = 1 << 22;
/// Operations of a batch: some milliseconds at most, so that a cancel acts soon.
const BATCH: usize = 16;
/// Launches that are worth a graph.
const LEAST: usize = 4;
/// Kinds of batches that are remembered. A slice of a clip has about a dozen.
const MOST: usize = 64;

/// A kernel's one parameter, kept until the launch.
pub trait Params: Any + Send {
    fn same(&self, other: &dyn Params) -> bool;
    fn address(&self) -> *const std::ffi::c_void;
}

impl<T: PartialEq + Send + 'static> Params for T {
    fn same(&self, other: &dyn Params) -> bool {
        (other as &dyn Any).downcast_ref::<T>() == Some(self)
    }

    fn address(&self) -> *const std::ffi::c_void {
        std::ptr::from_ref(self).cast()
    }
}

pub struct Launch {
    pub kernel: Kernel,
    pub grid: [u32; 2],
    pub threads: u32,
    pub params: Box<dyn Params>,
}

impl Launch {
    /// Whether a node of a graph can be either.
    fn is_like(&self, other: &Launch) -> bool {
        (self.kernel, self.grid, self.threads) == (other.kernel, other.grid, other.threads)
    }

    fn put(&self, stream: CUstream) -> Result<()> {
        // SAFETY: whoever collected the launch vouched for its parameter and for what that points at.
        unsafe { self.kernel.put(stream, self.grid, self.threads, self.params.address()) }
    }
}

/// What was collected for a stream and is not in it yet, and the batches seen before.
#[derive(Default)]
pub struct Launches {
    collecting: bool,
    pending: Vec<Launch>,
    operations: usize,
    /// Least recently used first.
    known: Vec<Known>,
    /// A failure that nobody could be told of yet.
    failed: Option<Error>,
    /// Set once the driver has refused a graph.
    plain_only: bool,
}

impl Launches {
    pub fn is_collecting(&self) -> bool {
        self.collecting
    }

    pub fn collect(&mut self, launch: Launch) {
        self.pending.push(launch);
    }

    /// An operation of so many elements begins.
    pub fn begin(&mut self, elements: u64) {
        self.collecting = elements <= SMALL;
        #[cfg(test)]
        if testing::OFF.get() {
            self.collecting = false;
        }
    }

    /// The operation ended; whether the batch is complete and has to go.
    pub fn end(&mut self) -> bool {
        self.operations += 1;
        let collecting = std::mem::take(&mut self.collecting);
        !collecting || self.operations >= BATCH
    }

    /// Puts everything collected into the stream; a failure is kept for [`Launches::outcome`]. The context has to be current.
    pub fn flush(&mut self, context: &Arc<Context>, stream: CUstream) {
        let batch = std::mem::take(&mut self.pending);
        self.operations = 0;
        if !batch.is_empty()
            && let Err(error) = self.put(batch, context, stream)
        {
            self.failed.get_or_insert(error);
        }
    }

    /// How everything flushed since the last time went.
    pub fn outcome(&mut self) -> Result<()> {
        self.failed.take().map_or(Ok(()), Err)
    }

    /// Drops graphs, and launches that nobody will wait for.
    pub fn forget(&mut self) {
        self.pending.clear();
        self.known.clear();
        self.operations = 0;
    }

    fn put(&mut self, batch: Vec<Launch>, context: &Arc<Context>, stream: CUstream) -> Result<()> {
        if self.plain_only || batch.len() < LEAST {
            return batch.iter().try_for_each(|launch| launch.put(stream));
        }
        let Some(at) = self.known.iter().position(|known| known.is_like(&batch)) else {
            if self.known.len() == MOST {
                self.known.remove(0);
            }
            let launched = batch.iter().try_for_each(|launch| launch.put(stream));
            self.known.push(Known { batch, graph: None });
            return launched;
        };
        let mut known = self.known.remove(at);
        if known.launch(&batch, context, stream).is_ok() {
            self.known.push(Known { batch, ..known });
            return Ok(());
        }
        // If the GPU itself has failed, plain launches say so.
        self.plain_only = true;
        batch.iter().try_for_each(|launch| launch.put(stream))
    }
}

/// A batch as it was launched last.
struct Known {
    batch: Vec<Launch>,
    graph: Option<Graph>,
}

impl Known {
    fn is_like(&self, batch: &[Launch]) -> bool {
        self.batch.len() == batch.len() && self.batch.iter().zip(batch).all(|(a, b)| a.is_like(b))
    }

    /// Launches a batch like this one as a graph.
    fn launch(&mut self, batch: &[Launch], context: &Arc<Context>, stream: CUstream) -> Result<()> {
        match &self.graph {
            None => self.graph = Some(Graph::new(context, batch)?),
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
struct Graph {
    context: Arc<Context>,
    graph: CUgraph,
    ready: CUgraphExec,
    nodes: Vec<CUgraphNode>,
}

// SAFETY: a graph may be used from any thread, one at a time.
unsafe impl Send for Graph {}

/// Calls `with` with a launch as the driver wants it in a graph.
fn described<T>(launch: &Launch, with: impl FnOnce(&sys::CUDA_KERNEL_NODE_PARAMS) -> T) -> T {
    let mut arguments = [launch.params.address().cast_mut()];
    with(&sys::CUDA_KERNEL_NODE_PARAMS {
        func: launch.kernel.function(),
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
    })
}

impl Graph {
    fn new(context: &Arc<Context>, batch: &[Launch]) -> Result<Graph> {
        let (graph, ready) = (std::ptr::null_mut(), std::ptr::null_mut());
        let mut made = Graph { context: Arc::clone(context), graph, ready, nodes: Vec::new() };
        // SAFETY: writes where it is told.
        check("making a graph", unsafe { sys::cuGraphCreate(&mut made.graph, 0) })?;
        for launch in batch {
            let (mut node, before) = (std::ptr::null_mut(), made.nodes.last());
            let (first, count) = before.map_or((std::ptr::null(), 0), |node| (std::ptr::from_ref(node), 1));
            // SAFETY: the graph and the node before live; the driver copies the parameter before it returns.
            let answer = described(launch, |params| unsafe {
                sys::cuGraphAddKernelNode_v2(&mut node, made.graph, first, count, params)
            });
            check("adding to a graph", answer)?;
            made.nodes.push(node);
        }
        // SAFETY: the graph lives.
        let answer = unsafe { sys::cuGraphInstantiateWithFlags(&mut made.ready, made.graph, 0) };
        check("instantiating a graph", answer)?;
        Ok(made)
    }

    /// Changes a node's parameter for the next launch; launches under way keep theirs.
    fn update(&self, node: CUgraphNode, launch: &Launch) -> Result<()> {
        // SAFETY: the node is of this graph, and of the same kernel; the driver copies the parameter before it returns.
        let answer =
            described(launch, |params| unsafe { sys::cuGraphExecKernelNodeSetParams_v2(self.ready, node, params) });
        check("changing a graph", answer)
    }

    fn launch(&self, stream: CUstream) -> Result<()> {
        #[cfg(test)]
        testing::LAUNCHED.set(testing::LAUNCHED.get() + 1);
        // SAFETY: both live; whoever collected the launches vouched for their parameters.
        check("launching a graph", unsafe { sys::cuGraphLaunch(self.ready, stream) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let Ok(_current) = self.context.enter() else { return };
        // SAFETY: made in `new`, as far as that came. A graph under way is freed when it has ended.
        unsafe {
            if !self.ready.is_null() {
                sys::cuGraphExecDestroy(self.ready);
            }
            if !self.graph.is_null() {
                sys::cuGraphDestroy(self.graph);
            }
        }
    }
}

/// Ends with the memory that graphs were made for: what they hold of the driver's memory goes with it.
pub struct Forget(pub Arc<Mutex<Launches>>);

impl Drop for Forget {
    fn drop(&mut self) {
        self.0.lock().forget();
    }
}

/// What tests look at and turn off, each on its own thread.
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
    use super::*;
    use crate::backend::cuda::launch::params::{FinalizeParams, NormParams};

    #[test]
    fn parameters_are_compared_by_their_kind_and_all_their_fields() {
        let params = FinalizeParams { eps: 1e-6, ..FinalizeParams::default() };
        let (mut other, kind) = (params, NormParams::default());
        assert!(params.same(&other));
        other.slot[31] = 1;
        assert!(!params.same(&other) && !params.same(&kind));
    }

    #[test]
    fn small_operations_wait_for_each_other_but_not_for_long() {
        let mut launches = Launches::default();
        let mut operation = |elements| {
            launches.begin(elements);
            let collecting = launches.is_collecting();
            let complete = launches.end();
            if complete {
                launches.forget();
            }
            (collecting, complete)
        };
        for _ in 0..3 {
            for _ in 1..BATCH {
                assert_eq!(operation(SMALL), (true, false));
            }
            assert_eq!(operation(1), (true, true));
        }
        assert_eq!(operation(1), (true, false));
        assert_eq!(operation(SMALL + 1), (false, true), "a large one takes along what was collected");
    }
}
