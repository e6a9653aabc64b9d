//! What every launch needs. Each operation adds its method in a file of its own.

use std::sync::Arc;

use super::kernels::Kernels;
use super::queue::LaunchQueue;
use super::sizes::CudaSizes;
use crate::backend::cuda::driver::Context;
use crate::backend::gpu::LaunchLimit;

/// The kernels of a precision on a GPU, and the queue that operations go to.
pub struct Launcher {
    pub sizes: CudaSizes,
    pub context: Arc<Context>,
    pub kernels: Arc<Kernels>,
    pub queue: LaunchQueue,
    pub limit: LaunchLimit,
}
