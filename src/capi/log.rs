//! The host's log.

use std::ffi::{CString, c_void};
use std::fmt;

use super::types::*;
use crate::error::Error;
use crate::exec::{LogLevel, LogSink};

pub(super) struct Log {
    pub callback: vvae_log_fn,
    pub user: *mut c_void,
}

// SAFETY: the header requires a callback that works on every thread that calls the library.
unsafe impl Send for Log {}
// SAFETY: as above.
unsafe impl Sync for Log {}

impl LogSink for Log {
    fn log(&self, level: LogLevel, message: fmt::Arguments) {
        let level = match level {
            LogLevel::Debug => VVAE_LOG_DEBUG,
            LogLevel::Info => VVAE_LOG_INFO,
            LogLevel::Warning => VVAE_LOG_WARNING,
        };
        self.write(level, message);
    }
}

impl Log {
    pub fn write(&self, level: i32, message: fmt::Arguments) {
        if let Some(callback) = self.callback {
            let message = message.to_string().replace('\0', "?");
            let message = CString::new(message).unwrap_or_default();
            // SAFETY: the host vouches for its callback and user pointer; the message lives until it returns.
            unsafe { callback(self.user, level, message.as_ptr()) };
        }
    }

    pub fn failure(&self, error: &Error) {
        let level = match error {
            Error::Cancelled => VVAE_LOG_INFO,
            Error::Internal(_) => VVAE_LOG_ERROR,
            _ => VVAE_LOG_WARNING,
        };
        self.write(level, format_args!("{error}"));
    }
}
