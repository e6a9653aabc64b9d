//! Plans of shapes at the ends of what is accepted: an answer or an error, never a number that wrapped.

use std::ffi::{c_char, c_void};

use crate::common::{Buffer, Vae, run_info, small};
use video_vae::capi::*;

const MOST_FRAMES: i64 = 1 << 32;

#[test]
fn seconds_rise_with_frames() {
    let vae = Vae::open(&small()).unwrap();
    for (node, channels, scale) in [("encode", 3, 1), ("decode", 16, 8)] {
        for side in [8, 4096, 1 << 17] {
            for limit in ["18446744073709551615", "4611686018427387904"] {
                vae.configure("memory_limit", limit).unwrap();
                let mut before = 0.0;
                for frames in [1, 5, 1001, 1_000_001, MOST_FRAMES / 16 + 1, MOST_FRAMES] {
                    let shape = [1, channels, frames, side / scale, side / scale];
                    match vae.plan(node, shape) {
                        Ok((plan, text)) => {
                            assert!(plan.seconds > before && plan.seconds.is_finite(), "{node} {shape:?}: {text}");
                            assert!(plan.device_bytes >= plan.workspace_bytes && plan.device_bytes > 0, "{text}");
                            before = plan.seconds;
                        }
                        Err(failure) => failure.says(VVAE_ERROR_MEMORY, &["memory_limit"]),
                    }
                }
            }
        }
    }
}

#[test]
fn the_largest_shapes_get_an_answer() {
    let vae = Vae::open(&small()).unwrap();
    let side = 1 << 17;
    vae.configure("memory_limit", "18446744073709551615").unwrap();
    for (node, shape) in [
        ("encode", [1 << 16, 3, 1, side, side]),
        ("encode", [1 << 16, 3, MOST_FRAMES, side, side]),
        ("encode", [2, 3, 0, side, side]),
        ("decode", [1 << 16, 16, 1, side / 8, side / 8]),
        ("decode", [1 << 16, 16, MOST_FRAMES, side / 8, side / 8]),
        ("decode", [2, 16, 0, side / 8, side / 8]),
    ] {
        let (plan, text) = vae.plan(node, shape).unwrap();
        assert!(plan.device_bytes > 1 << 40 && plan.device_bytes < 1 << 62, "{text}");
    }
    for (node, shape) in [("decode", [i64::MAX; 5]), ("encode", [i64::MAX, 3, i64::MAX, i64::MAX, i64::MAX])] {
        vae.plan(node, shape).unwrap_err().says(VVAE_ERROR_TENSOR, &["is 9223372036854775807"]);
    }
}

/// A clip of 2^32 frames that are all the same memory, so that the run itself can be begun.
#[test]
fn the_progress_total_of_the_longest_clip_does_not_wrap() {
    struct Told {
        calls: u32,
        done: u64,
    }
    unsafe extern "C" fn tell(user: *mut c_void, done: u64, total: u64, _: *const c_char) -> i32 {
        // SAFETY: the test passes its own.
        let told = unsafe { &mut *user.cast::<Told>() };
        if total > 0 {
            assert!(done <= total && done >= told.done, "{done} of {total}");
            // 2^32 frames of 64 x 64 take far more than 2^50 multiplications.
            assert!(total > 1 << 50, "{total}");
            told.done = done;
            told.calls += 1;
        }
        i32::from(told.calls > 20)
    }

    let vae = Vae::open(&small()).unwrap();
    let (one, latent) = (Buffer::new(VVAE_DTYPE_F32, [1, 3, 1, 64, 64]), Buffer::new(VVAE_DTYPE_F32, [1, 16, 1, 8, 8]));
    let frames = MOST_FRAMES - 3;
    let (shape, strides) = ([1, 3, frames, 64, 64], [0, 64 * 64, 0, 64, 1]);
    let video = vvae_tensor { shape: shape.as_ptr(), strides: strides.as_ptr(), ..one.tensor() };
    // An output that is never reached: the run is stopped before its first frame. Its terabytes lie where nothing else
    // of the process does, or they would overlap the input.
    let latent_shape = [1, 16, (frames + 2) / 4 + 1, 8, 8];
    let nowhere = std::ptr::without_provenance_mut(1 << 44);
    let latents = vvae_tensor { data: nowhere, shape: latent_shape.as_ptr(), ..latent.tensor() };
    let mut told = Told { calls: 0, done: 0 };
    let run = vvae_run_info { progress: Some(tell), progress_user: (&raw mut told).cast(), ..run_info() };
    // SAFETY: the input's frames share their memory; the output is not written before the callback stops the run.
    let status = unsafe { (crate::common::api().vvae_encode)(vae.0, &video, &latents, &run) };
    crate::common::outcome(vae.0, status).unwrap_err().says(VVAE_ERROR_CANCELLED, &[]);
    assert!(told.calls > 20);
}
