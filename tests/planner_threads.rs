//! Planning keeps to the setting `threads`. Alone in its process, as it counts the threads of that.
#![cfg(target_os = "linux")]

mod common;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::thread;

use common::{Vae, demo};

fn threads_now() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

#[test]
fn one_thread_plans_alone() {
    let vae = Vae::open(&demo()).unwrap();
    vae.configure("threads", "1").unwrap();
    let (done, most) = (AtomicBool::new(false), AtomicUsize::new(0));
    let before = thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(SeqCst) {
                most.fetch_max(threads_now(), SeqCst);
            }
        });
        let before = threads_now();
        // Each of another size, so that none is known from before.
        for frames in 1..30 {
            vae.plan("decode", [1, 16, frames, 60, 80]).unwrap();
        }
        done.store(true, SeqCst);
        before
    });
    assert_eq!(most.load(SeqCst), before, "threads were started");
}
