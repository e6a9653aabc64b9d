//! One operation a file: what its kernel is told, and how it is launched on a stream.
//! Works on device memory alone; knows nothing of host memory, bands in flight or plans.

mod attention;
mod conv;
mod conv_out;
mod conv_params;
mod copy;
mod frame_stride;
mod graph;
#[cfg(test)]
mod kernel_contract;
mod kernels;
mod launcher;
mod levels;
mod norm;
mod params;
mod pixels;
mod queue;
mod sizes;
mod tensor_map;
pub mod tiling;

pub use kernels::{Kernels, checksum};
pub use launcher::Launcher;
pub use params::ConvParams;
#[cfg(test)]
pub use queue::testing;
pub use queue::{JobBlock, LaunchQueue};
pub use sizes::CudaSizes;
