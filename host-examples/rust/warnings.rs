//! Warnings of the library: what a call logs although it does not fail. A failure is logged too, but is told by whoever
//! made the call.

use std::ffi::{CStr, c_char, c_void};
use std::sync::{Mutex, PoisonError};

use crate::api::VVAE_LOG_WARNING;
use crate::say;

/// Those of one handle.
#[derive(Default)]
pub struct Warnings {
    /// Of the running call.
    heard: Mutex<Vec<String>>,
    /// Of all calls before. A line is told once.
    told: Mutex<Vec<String>>,
}

impl Warnings {
    /// A call has ended.
    pub fn call_ended(&self, failed: bool) {
        let heard = std::mem::take(&mut *self.heard.lock().unwrap_or_else(PoisonError::into_inner));
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        for line in heard.into_iter().filter(|_| !failed) {
            if !told.contains(&line) {
                say::warn(format_args!("{line}"));
                told.push(line);
            }
        }
    }
}

/// The log of a handle.
///
/// # Safety
/// `user` points to `Warnings` that outlive the handle.
pub unsafe extern "C" fn hear(user: *mut c_void, level: i32, message: *const c_char) {
    if level < VVAE_LOG_WARNING {
        return;
    }
    // SAFETY: the caller's promise; the library's text is valid until this returns.
    let (warnings, message) = unsafe { (&*user.cast::<Warnings>(), CStr::from_ptr(message)) };
    let mut heard = warnings.heard.lock().unwrap_or_else(PoisonError::into_inner);
    heard.push(message.to_string_lossy().into_owned());
}
