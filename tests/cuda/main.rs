//! Tests that need a CUDA device: device tensors, the host's streams and contexts, the driver's memory figures.
//! Other tests run on every device, in the files of the parent folder.

#[path = "../common/mod.rs"]
mod common;

mod current_context;
mod device_tensors;
mod driver;
mod fleet;
mod host_streams;
mod large_frames;
mod memory_figures;
mod memory_limits;
mod ranges;
mod run_results;
mod strided_tensor;
mod trace;

use std::path::Path;

use common::{Buffer, Random, Vae};
use video_vae::capi::*;

/// A handle on the first GPU.
pub fn open(weights: &Path) -> Vae {
    Vae::open_on(c"cuda:0", weights).unwrap_or_else(|why| panic!("{}", why.text))
}

pub fn latent(frames: i64, rows: i64, columns: i64) -> Buffer {
    Buffer::random(&mut Random(21), [1, 16, frames, rows, columns])
}

/// A buffer for the decoded latent.
pub fn video(latent: &Buffer, dtype: u32) -> Buffer {
    let [b, _, t, h, w] = latent.shape;
    Buffer::new(dtype, [b, 3, 4 * t - 3, 8 * h, 8 * w])
}

/// The tensor, with its elements in device memory.
pub fn on_device(like: &Buffer, memory: &driver::Memory) -> vvae_tensor {
    vvae_tensor {
        data: std::ptr::without_provenance_mut(memory.address as usize),
        device_type: VVAE_DEVICE_CUDA,
        ..like.tensor()
    }
}
