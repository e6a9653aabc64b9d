//! One operation a file: what its kernel is told, and how it is launched on a stream.
//! Works on device memory alone; knows nothing of host memory, bands in flight or plans.

pub mod attention;
pub mod conv;
pub mod conv_out;
mod conv_params;
pub mod copy;
mod graph;
pub mod kernels;
pub mod launcher;
pub mod norm;
pub mod params;
pub mod pixels;
pub mod queue;
pub mod sizes;
mod slots;
mod tensor_map;
pub mod tiling;
