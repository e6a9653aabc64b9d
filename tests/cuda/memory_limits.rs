//! Planned bytes against the driver's figures, and memory that others take during a run.

use std::cell::RefCell;
use std::ffi::{c_char, c_void};

use crate::common::{Random, Vae, golden, run_info, small};
use crate::driver::{Gpu, Memory};
use crate::{latent, open, video};
use video_vae::capi::*;

const EVERYTHING: u32 = VVAE_TRIM_WORKSPACE | VVAE_TRIM_WEIGHTS;

#[test]
fn planned_bytes_match_the_driver_in_random_jobs() {
    let Some(gpu) = Gpu::open() else { return };
    let mut random = Random(44);
    // Kernels stay loaded while a handle exists.
    let _loaded = open(&small());
    let (mut least, mut most, mut offloaded, mut tiled) = (f64::MAX, 0.0f64, 0, 0);
    for round in 0..200 {
        let vae = open(&golden(random.pick(&["small.safetensors", "medium.safetensors"])));
        let latent = latent(1 + random.below(6) as i64, 16 + random.below(40) as i64, 16 + random.below(48) as i64);
        vae.configure("slice_frames", random.pick(&["auto", "auto", "1", "3"])).unwrap();
        vae.configure("chunk_frames", random.pick(&["auto", "auto", "1", "4"])).unwrap();
        let whole = vae.plan("decode", latent.shape).unwrap().0.device_bytes;
        let limit = whole * (25 + random.below(90)) / 100;
        vae.configure("memory_limit", &limit.to_string()).unwrap();
        let Ok((plan, text)) = vae.plan("decode", latent.shape) else { continue };
        let mut out = video(&latent, random.pick(&[VVAE_DTYPE_U8, VVAE_DTYPE_F16, VVAE_DTYPE_F32]));
        // Once before, so that the context has its memory for kernels, streams and graphs.
        vae.decode(&latent, &mut out).unwrap();
        vae.trim(EVERYTHING).unwrap();
        let before = gpu.free_bytes();
        vae.decode(&latent, &mut out).unwrap();
        let taken = before - gpu.free_bytes();
        let memory = vae.memory();
        let what = format!("round {round}: the driver gave {taken} bytes\n{text}");
        assert_eq!((memory.now, memory.host), (plan.device_bytes, plan.host_bytes), "{what}");
        assert!(plan.device_bytes <= limit, "{what}");
        assert!(taken <= plan.device_bytes as i64, "{what}");
        assert!(taken * 100 >= plan.device_bytes as i64 * 85, "{what}");
        let share = taken as f64 / plan.device_bytes as f64;
        (least, most) = (least.min(share), most.max(share));
        offloaded += u32::from(plan.offloaded_frame_bytes > 0);
        tiled += u32::from(plan.exact == 0);
    }
    println!(
        "driver's bytes per planned bytes: {least:.3} to {most:.3}; {offloaded} with offloaded caches, {tiled} tiled"
    );
    assert!(offloaded > 20 && tiled > 5, "{offloaded} {tiled}");
}

/// Allocates all but `bytes` bytes of the GPU.
fn leave(gpu: &Gpu, bytes: i64) -> Memory<'_> {
    gpu.memory((gpu.free_bytes() - bytes) as usize)
}

fn decode(vae: &Vae, info: &vvae_run_info) -> Vec<u8> {
    let latent = latent(6, 90, 120);
    let mut out = video(&latent, VVAE_DTYPE_F16);
    vae.decode_with(&latent, &mut out, info).unwrap();
    out.bytes().to_vec()
}

#[test]
fn job_is_replanned_with_the_same_bits_when_memory_is_taken() {
    let Some(gpu) = Gpu::open() else { return };
    let vae = open(&small());
    let expected = decode(&vae, &run_info());
    let plan = vae.plan("decode", latent(6, 90, 120).shape).unwrap().0;
    vae.trim(EVERYTHING).unwrap();
    // A limit that no longer fits when the job starts.
    vae.configure("memory_limit", &plan.device_bytes.to_string()).unwrap();
    for percent in [80, 55] {
        let _taken = leave(&gpu, plan.device_bytes as i64 * percent / 100);
        assert!(decode(&vae, &run_info()) == expected, "with {percent} %");
        assert!(vae.memory().peak <= plan.device_bytes);
        vae.trim(EVERYTHING).unwrap();
    }
    let _taken = leave(&gpu, 8 << 20);
    let input = latent(6, 90, 120);
    let refused = vae.decode(&input, &mut video(&input, VVAE_DTYPE_F16)).unwrap_err();
    refused.says(VVAE_ERROR_MEMORY, &["memory_limit", "smallest plan", "without tiles"]);
}

#[test]
fn memory_taken_during_a_run_changes_no_bit() {
    struct Taker {
        gpu: *const Gpu,
        taken: RefCell<Option<Memory<'static>>>,
    }

    unsafe extern "C" fn take(user: *mut c_void, done: u64, total: u64, _: *const c_char) -> i32 {
        // SAFETY: the taker outlives the call, and the GPU the taker.
        let (taker, gpu) = unsafe { (&*user.cast::<Taker>(), &*(*user.cast::<Taker>()).gpu) };
        if done * 3 > total && taker.taken.borrow().is_none() {
            *taker.taken.borrow_mut() = Some(leave(gpu, 4 << 20));
        }
        0
    }

    let Some(gpu) = Gpu::open() else { return };
    let vae = open(&small());
    let expected = decode(&vae, &run_info());
    let whole = vae.plan("decode", latent(6, 90, 120).shape).unwrap().0.device_bytes;
    for percent in [100, 50] {
        vae.trim(EVERYTHING).unwrap();
        vae.configure("memory_limit", &(whole * percent / 100).to_string()).unwrap();
        let taker = Taker { gpu: &gpu, taken: RefCell::new(None) };
        let user = std::ptr::from_ref(&taker).cast_mut().cast();
        let info = vvae_run_info { progress: Some(take), progress_user: user, ..run_info() };
        assert!(decode(&vae, &info) == expected, "within {percent} %");
        assert!(taker.taken.borrow().is_some());
    }
}
