//! Launches kernels: fills parameters, and checks every address against its block.

mod attention;
mod conv;
mod copies;
mod levels;
mod norm;
mod params;
mod pixels;

use std::sync::Arc;

use super::driver::{Context, MatrixShape, VulkanQueue};
use super::sizes::{MAX_FRAMES, VulkanSizes};
use crate::backend::gpu::LaunchLimit;
use crate::error::{Error, Result};

/// What launches need.
pub struct Launcher {
    pub context: Arc<Context>,
    pub sizes: VulkanSizes,
    /// The main queue.
    pub queue: VulkanQueue,
    pub limit: LaunchLimit,
}

impl Launcher {
    /// How convolutions and attention use the matrix unit, if they do.
    pub fn matrix(&self) -> Option<MatrixShape> {
        self.context.device.matrices.shape(self.sizes.precision)
    }
}

/// An array for as many frames as a launch has.
fn per_frame<T: Copy + Default>(items: impl ExactSizeIterator<Item = Result<T>>) -> Result<[T; MAX_FRAMES]> {
    let count = items.len();
    if count > MAX_FRAMES {
        return Err(Error::Internal(format!("{count} frames are in one launch; the most is {MAX_FRAMES}")));
    }
    let mut array = [T::default(); MAX_FRAMES];
    for (place, item) in array.iter_mut().zip(items) {
        *place = item?;
    }
    Ok(array)
}

/// Workgroups of 256 threads, as many as any device takes in one direction.
fn workgroups(threads: u64) -> u32 {
    threads.div_ceil(256).clamp(1, 65_535) as u32
}
