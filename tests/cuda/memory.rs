//! What we say we hold is what the driver has given, and all of it is given back.

use crate::common::small;
use crate::driver::Gpu;
use crate::{latent, open, video};
use video_vae::capi::*;

/// The driver gives memory in pieces of this size, in which small blocks share one.
const PIECE: i64 = 2 << 20;

fn decode_once() {
    let vae = open(&small());
    let latent = latent(2, 3, 4);
    vae.decode(&latent, &mut video(&latent, VVAE_DTYPE_F32)).unwrap();
}

#[test]
fn two_hundred_rounds_leave_the_drivers_free_memory_where_it_was() {
    let Some(gpu) = Gpu::open() else { return };
    // The first rounds bring what the context itself keeps.
    (0..3).for_each(|_| decode_once());
    let before = gpu.free_bytes();
    (0..200).for_each(|_| decode_once());
    let after = gpu.free_bytes();
    println!("free before: {before}, after 200 rounds: {after}");
    assert!((before - after).abs() <= PIECE, "{} bytes are missing", before - after);
}

#[test]
fn trim_gives_back_to_the_driver_and_the_figures_are_the_drivers() {
    let Some(gpu) = Gpu::open() else { return };
    decode_once();
    let vae = open(&small());
    let latent = latent(2, 64, 80);
    let mut out = video(&latent, VVAE_DTYPE_U8);
    // Once before the baseline, so that kernels and what the context keeps for them are there.
    vae.decode(&latent, &mut out).unwrap();
    vae.trim(VVAE_TRIM_WORKSPACE | VVAE_TRIM_WEIGHTS).unwrap();
    assert_eq!(vae.memory().now, 0);
    let empty = gpu.free_bytes();

    vae.decode(&latent, &mut out).unwrap();
    let plan = vae.plan("decode", latent.shape).unwrap().0;
    let (held, taken) = (vae.memory().now as i64, empty - gpu.free_bytes());
    let weights = plan.weight_bytes as i64;
    println!("held {held}, of it weights {weights}; the driver has given {taken}");
    // Weights are many small blocks, which do not fill the pieces they share.
    assert!(taken >= held - 4 * PIECE && taken <= held + weights / 2 + 8 * PIECE, "held {held}, given {taken}");

    vae.trim(VVAE_TRIM_WORKSPACE).unwrap();
    let given_back = gpu.free_bytes() - (empty - taken);
    let workspace = held - vae.memory().now as i64;
    assert!((given_back - workspace).abs() <= 4 * PIECE, "workspace {workspace}, given back {given_back}");

    vae.trim(VVAE_TRIM_WEIGHTS).unwrap();
    let missing = empty - gpu.free_bytes();
    assert!(missing.abs() <= PIECE, "{missing} bytes are missing");
}

#[test]
fn handles_share_weights_on_the_device() {
    let Some(gpu) = Gpu::open() else { return };
    let latent = latent(1, 4, 4);
    let one = open(&small());
    one.decode(&latent, &mut video(&latent, VVAE_DTYPE_F32)).unwrap();
    let (plan, before) = (one.plan("decode", latent.shape).unwrap().0, gpu.free_bytes());
    let two = open(&small());
    two.decode(&latent, &mut video(&latent, VVAE_DTYPE_F32)).unwrap();
    let taken = before - gpu.free_bytes();
    let most = plan.workspace_bytes as i64 + 4 * PIECE;
    assert!(taken <= most && most < plan.weight_bytes as i64 + PIECE, "{taken} bytes for the second handle");
}
