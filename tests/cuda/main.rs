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
mod stream_state;
mod strided_tensor;

use std::ffi::{CStr, CString};
use std::path::Path;

use common::{Buffer, Failure, Random, Vae, create_info};
use video_vae::capi::*;

pub fn open_on(device: &CStr, weights: &Path) -> Result<Vae, Failure> {
    let weights = CString::new(weights.to_str().unwrap()).unwrap();
    Vae::create(&vvae_create_info { device: device.as_ptr(), ..create_info(&weights) })
}

/// A handle on the first GPU.
pub fn open(weights: &Path) -> Vae {
    open_on(c"cuda:0", weights).unwrap_or_else(|why| panic!("{}", why.text))
}

pub fn latent(frames: i64, rows: i64, columns: i64) -> Buffer {
    let mut random = Random(21);
    let mut buffer = Buffer::new(VVAE_DTYPE_F32, [1, 16, frames, rows, columns]);
    buffer.f32_mut().iter_mut().for_each(|v| *v = random.below(2000) as f32 / 1000.0 - 1.0);
    buffer
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

/// Encodes or decodes tensors.
pub fn run(
    vae: &Vae,
    node: &str,
    input: &vvae_tensor,
    output: &vvae_tensor,
    info: &vvae_run_info,
) -> Result<i32, Failure> {
    let api = common::api();
    let call = if node == "encode" { api.vvae_encode } else { api.vvae_decode };
    // SAFETY: every test passes valid tensors whose memory outlives the work.
    common::outcome(vae.0, unsafe { call(vae.0, input, output, info) })
}
