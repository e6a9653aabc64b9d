//! Planning ends soon after a cancel, and its arithmetic does not overflow.

mod common;

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

use common::{Vae, small};
use video_vae::capi::*;

/// A cancel in the middle of planning. `planner_grid.rs` measures it at any point of any plan.
#[test]
fn planner_obeys_a_cancel() {
    let vae = Vae::open(&small()).unwrap();
    for (key, value) in [("decode_tiled", "true"), ("decode_tile_size", "64"), ("decode_tile_overlap", "32")] {
        vae.configure(key, value).unwrap();
    }
    // Each of another length, so that none is known from before.
    let mut lengths = 1000..;
    let mut plan = || vae.plan("decode", [1, 16, lengths.next().unwrap(), 128, 128]);
    let start = Instant::now();
    plan().unwrap();
    let mut whole = start.elapsed();
    let mut soonest = Duration::MAX;
    // Other programs may hold the cores: the soonest of many counts. Some cancels come after the end.
    for turn in 0..200 {
        let begun = AtomicBool::new(false);
        let (status, since) = thread::scope(|scope| {
            let canceller = scope.spawn(|| {
                while !begun.load(SeqCst) {
                    std::hint::spin_loop();
                }
                thread::sleep(whole * (1 + turn % 8) / 10);
                let now = Instant::now();
                vae.cancel().unwrap();
                now
            });
            begun.store(true, SeqCst);
            let status = plan().err().map(|failure| failure.status);
            let ended = Instant::now();
            (status, ended.saturating_duration_since(canceller.join().unwrap()))
        });
        if status.is_some() {
            assert_eq!(status, Some(VVAE_ERROR_CANCELLED));
            soonest = soonest.min(since);
            if soonest < Duration::from_millis(50) {
                break;
            }
        } else if turn % 8 == 0 {
            // The first plan was held up: a tenth of its time is more than a plan takes.
            whole /= 2;
        }
    }
    assert!(soonest < Duration::from_millis(50), "{soonest:?} of {whole:?}");
    plan().unwrap();
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
