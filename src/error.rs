//! The crate's error type. Each variant has a status code of the C ABI.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};

pub type Result<T> = std::result::Result<T, Error>;

/// Every message names the argument, its value, and the remedy.
#[derive(Debug, Clone, PartialEq)]
pub enum Error {
    /// An argument is null, out of range, or contradicts another one.
    Argument(String),
    /// A tensor's shape, strides, type or device do not fit the call.
    Tensor(String),
    /// A file cannot be read or written, or is not a checkpoint of this model.
    Checkpoint(String),
    /// The device named does not exist or cannot be used.
    Device(String),
    /// The job does not fit in the limit or in the machine's memory.
    Memory(String),
    /// Host memory ran out. Planning again with less device memory would take more of it.
    HostMemory(String),
    /// The host asked to stop, by `vvae_cancel` or by its progress callback.
    Cancelled,
    /// The call is not allowed now: the handle is busy or closed, or the stream has ended.
    State(String),
    /// A bug in this library, caught at the boundary. The handle refuses further work.
    Internal(String),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Error::Argument(text) | Error::Tensor(text) | Error::Checkpoint(text) | Error::Device(text) => {
                f.write_str(text)
            }
            Error::Memory(text) | Error::HostMemory(text) | Error::State(text) | Error::Internal(text) => {
                f.write_str(text)
            }
            Error::Cancelled => f.write_str("cancelled by the host"),
        }
    }
}

impl std::error::Error for Error {}

/// Fails if the host has asked to stop.
pub fn check_cancel(cancel: &AtomicBool) -> Result<()> {
    if cancel.load(Ordering::Relaxed) { Err(Error::Cancelled) } else { Ok(()) }
}

impl Error {
    /// The same with another text, if it is about a device.
    pub fn map_device(self, change: impl FnOnce(String) -> String) -> Error {
        match self {
            Error::Device(text) => Error::Device(change(text)),
            other => other,
        }
    }

    /// The status code that crosses the C ABI.
    pub const fn status(&self) -> i32 {
        match self {
            Error::Argument(_) => -1,
            Error::Tensor(_) => -2,
            Error::Checkpoint(_) => -3,
            Error::Device(_) => -4,
            Error::Memory(_) | Error::HostMemory(_) => -5,
            Error::Cancelled => -6,
            Error::State(_) => -7,
            Error::Internal(_) => -8,
        }
    }
}
