//! A progress callback that records its calls.

use std::ffi::{CStr, c_char, c_void};

use video_vae::capi::vvae_run_info;

use super::run_info;

/// Progress calls, and where they stop.
#[derive(Default)]
pub struct ProgressLog {
    pub calls: u64,
    pub stop_at: u64,
    pub last: (u64, u64),
    /// Whether a stage went back, or its total changed.
    pub fell: bool,
    pub stages: Vec<String>,
}

unsafe extern "C" fn record(user: *mut c_void, done: u64, total: u64, stage: *const c_char) -> i32 {
    // SAFETY: the tests pass a `ProgressLog`, and a stage is a C string.
    let (log, stage) = unsafe { (&mut *user.cast::<ProgressLog>(), CStr::from_ptr(stage)) };
    let stage = stage.to_str().unwrap().to_owned();
    if !log.stages.contains(&stage) {
        log.stages.push(stage);
    } else {
        log.fell |= done < log.last.0 || total != log.last.1 || done > total;
    }
    (log.last, log.calls) = ((done, total), log.calls + 1);
    i32::from(log.calls == log.stop_at)
}

pub fn with_progress(log: &mut ProgressLog) -> vvae_run_info {
    vvae_run_info { progress: Some(record), progress_user: std::ptr::from_mut(log).cast(), ..run_info() }
}
