//! The bodies of the fuzz targets: any bytes give an error or a right result, soon. A body panics if not.
//! Crashes, overruns and growth are found by the sanitizer and libFuzzer.

#![allow(dead_code, unused_imports, reason = "each test uses some of it")]

mod bytes;
mod calls;
mod checkpoint;
mod configure;
mod plan;
mod state;
mod structs;

use std::time::{Duration, Instant};

use crate::common::is_library_linked;

pub use bytes::Bytes;
pub use calls::{VIDEOS, World};

type Body = fn(&[u8]);

pub const TARGETS: [(&str, Body); 6] = [
    ("checkpoint", checkpoint::run),
    ("state", state::run),
    ("configure", configure::run),
    ("plan", plan::run),
    ("structs", structs::run),
    ("calls", calls::run),
];

pub fn run(target: &str, data: &[u8]) {
    let (_, body) = TARGETS.iter().find(|(name, _)| *name == target).expect("a target");
    body(data);
}

/// No call may take longer.
const MOST_TIME: Duration = Duration::from_secs(2);
/// For instrumented code, which is about ten times as slow. What is slow there is tried without.
const MOST_TIME_INSTRUMENTED: Duration = Duration::from_secs(20);

/// Runs a call and panics if it was slow. Other programs may hold the cores, so processor time must be long too.
fn soon<R>(what: &str, call: impl FnOnce() -> R) -> R {
    let (start, processor) = (Instant::now(), processor_time());
    let result = call();
    let took = start.elapsed().min(processor_time().saturating_sub(processor));
    let most = if is_library_linked() { MOST_TIME_INSTRUMENTED } else { MOST_TIME };
    assert!(took < most, "{what} took {took:?}");
    result
}

/// Processor time of this process; where the system does not tell, the time.
fn processor_time() -> Duration {
    #[cfg(target_os = "linux")]
    {
        unsafe extern "C" {
            fn clock_gettime(clock: i32, time: *mut [i64; 2]) -> i32;
        }
        const PROCESS: i32 = 2;
        let mut time = [0; 2];
        // SAFETY: a timespec is two 64-bit numbers on 64-bit Linux.
        assert_eq!(unsafe { clock_gettime(PROCESS, &mut time) }, 0);
        Duration::new(time[0] as u64, time[1] as u32)
    }
    #[cfg(not(target_os = "linux"))]
    {
        static START: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
        START.get_or_init(Instant::now).elapsed()
    }
}
