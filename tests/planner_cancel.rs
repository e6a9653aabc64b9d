//! Planning ends soon after a cancel, and its arithmetic does not overflow.

mod common;

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

use common::{Vae, small};
use video_vae::capi::*;

#[test]
fn planner_obeys_a_cancel() {
    let vae = Vae::open(&small()).unwrap();
    // A slice of thousands of frames takes many seconds to rehearse.
    vae.configure("slice_frames", "4096").unwrap();
    let (begun, done) = (AtomicBool::new(false), AtomicBool::new(false));
    let (status, took) = thread::scope(|scope| {
        scope.spawn(|| {
            while !begun.load(SeqCst) {
                std::hint::spin_loop();
            }
            thread::sleep(Duration::from_millis(100));
            // A cancel between two plans has no effect.
            while !done.load(SeqCst) {
                vae.cancel().unwrap();
                thread::sleep(Duration::from_millis(1));
            }
        });
        let start = Instant::now();
        begun.store(true, SeqCst);
        // Each of another length, so that none is known from before.
        let failure = (20_000..20_100).find_map(|frames| vae.plan("decode", [1, 16, frames, 32, 32]).err());
        done.store(true, SeqCst);
        (failure.map(|failure| failure.status), start.elapsed())
    });
    assert_eq!(status, Some(VVAE_ERROR_CANCELLED));
    // 50 ms after the cancel on a quiet machine; other programs may hold the cores.
    assert!(took < Duration::from_millis(1500), "{took:?}");
    vae.configure("slice_frames", "1").unwrap();
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
