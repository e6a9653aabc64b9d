//! Planning ends soon after a cancel, and its arithmetic does not overflow.

mod common;

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

use common::{Vae, small};
use video_vae::capi::*;

/// Takes tens of seconds to plan: thousands of small tiles of a long clip.
const SLOW: [i64; 5] = [1, 16, 1000, 128, 128];

#[test]
fn planner_obeys_a_cancel() {
    let vae = Vae::open(&small()).unwrap();
    for (key, value) in [("decode_tiled", "true"), ("decode_tile_size", "64"), ("decode_tile_overlap", "16")] {
        vae.configure(key, value).unwrap();
    }
    let begun = AtomicBool::new(false);
    let (status, ended) = thread::scope(|scope| {
        let planned = scope.spawn(|| {
            begun.store(true, SeqCst);
            let failure = vae.plan("decode", SLOW).unwrap_err();
            (failure.status, Instant::now())
        });
        while !begun.load(SeqCst) {
            std::hint::spin_loop();
        }
        thread::sleep(Duration::from_millis(400));
        vae.cancel().unwrap();
        let cancelled = Instant::now();
        let (status, ended) = planned.join().unwrap();
        (status, ended.saturating_duration_since(cancelled))
    });
    assert_eq!(status, VVAE_ERROR_CANCELLED);
    // 50 ms on a quiet machine; other tests may hold the cores.
    assert!(ended < Duration::from_millis(500), "{ended:?}");
    vae.configure("decode_tiled", "false").unwrap();
    vae.plan("decode", [1, 16, 3, 8, 8]).unwrap();
}

/// Estimated seconds rise with the number of frames, also where multiplications pass 2^64.
#[test]
fn planner_estimates_rise_with_the_frames() {
    let vae = Vae::open(&small()).unwrap();
    let seconds = |frames: i64| vae.plan("decode", [1, 16, frames, 128, 128]).unwrap().0.seconds;
    let estimates: Vec<f64> = (4..=9).map(|power| seconds(10i64.pow(power))).collect();
    for pair in estimates.windows(2) {
        let ratio = pair[1] / pair[0];
        assert!((9.5..10.5).contains(&ratio), "{estimates:?}");
    }
}
