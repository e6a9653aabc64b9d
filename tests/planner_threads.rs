//! Planning keeps to the setting `threads`. Alone in its process, as it counts the threads of that.
#![cfg(target_os = "linux")]

mod common;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::thread;

use common::process::{threads_at_rest, threads_now};
use common::{Vae, demo};

#[test]
fn one_thread_plans_alone() {
    let vae = Vae::open(&demo()).unwrap();
    vae.configure("threads", "1").unwrap();
    let expected = threads_at_rest() + 1;
    let [counts, most] = [const { AtomicUsize::new(0) }; 2];
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(SeqCst) {
                most.fetch_max(threads_now(), SeqCst);
                counts.fetch_add(1, SeqCst);
            }
        });
        // Each of another size, so that none is known from before; and until many counts fell into planning.
        for frames in 1.. {
            vae.plan("decode", [1, 16, frames, 60, 80]).unwrap();
            if frames >= 30 && counts.load(SeqCst) > 100 {
                break;
            }
        }
        done.store(true, SeqCst);
    });
    assert_eq!(most.load(SeqCst), expected, "threads were started");
}
