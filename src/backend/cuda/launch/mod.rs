//! Launches: what each kernel is told, and how work is cut into tiles.

pub mod attention;
pub mod conv;
pub mod conv_out;
pub mod graph;
pub mod kernels;
pub mod limits;
pub mod norm;
pub mod params;
pub mod pixels;
pub mod tiling;
