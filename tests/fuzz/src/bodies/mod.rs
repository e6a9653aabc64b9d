//! The bodies of the fuzz targets: any bytes give an error or a right result, in time. A body panics if not.
//! Crashes, overruns and growth are found by the sanitizer and libFuzzer.

#![allow(dead_code, unused_imports, reason = "each test uses some of it")]

mod bytes;
mod calls;
mod checkpoint;
mod configure;
mod plan;
mod structs;

use std::cell::Cell;
use std::time::{Duration, Instant};

use crate::common::process::processor_time;

pub use bytes::Bytes;
pub use calls::{VIDEOS, World};

type Body = fn(&[u8]);

pub const TARGETS: [(&str, Body); 5] = [
    ("checkpoint", checkpoint::run),
    ("configure", configure::run),
    ("plan", plan::run),
    ("structs", structs::run),
    ("calls", calls::run),
];

pub fn run(target: &str, data: &[u8]) {
    let (_, body) = TARGETS.iter().find(|(name, _)| *name == target).expect("a target");
    body(data);
}

thread_local! {
    /// The time of the slowest call of the input.
    static SLOWEST: Cell<Duration> = const { Cell::new(Duration::ZERO) };
}

/// A call that takes longer hangs. It is long because instrumented code is about ten times as slow.
const HANG: Duration = Duration::from_secs(20);

/// Runs an input, and returns the time of its slowest call.
pub fn slowest_call(target: &str, data: &[u8]) -> Duration {
    SLOWEST.set(Duration::ZERO);
    run(target, data);
    SLOWEST.get()
}

/// Times a call, and panics if it hung. Other programs may hold the cores, so processor time must be long too.
fn timed<R>(what: &str, call: impl FnOnce() -> R) -> R {
    let (start, processor) = (Instant::now(), processor_time());
    let result = call();
    let took = start.elapsed().min(processor_time().saturating_sub(processor));
    assert!(took < HANG, "{what} took {took:?}");
    SLOWEST.set(SLOWEST.get().max(took));
    result
}
