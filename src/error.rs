//! The crate's error type. Each variant has a status code of the C ABI.

use thiserror::Error;

pub type Result<T> = std::result::Result<T, Error>;

/// Every message names the argument, its value, and the remedy.
#[derive(Debug, Clone, PartialEq, Error)]
pub enum Error {
    /// An argument is null, out of range, or contradicts another one.
    #[error("{0}")]
    Argument(String),
    /// A tensor's shape, strides, type or device do not fit the call.
    #[error("{0}")]
    Tensor(String),
    /// A file cannot be read or written, or is not a checkpoint or saved state of this model.
    #[error("{0}")]
    Checkpoint(String),
    /// The device named does not exist or cannot be used.
    #[error("{0}")]
    Device(String),
    /// The job does not fit in the limit or in the machine's memory.
    #[error("{0}")]
    Memory(String),
    /// Host memory ran out. Planning again with less device memory would take more of it.
    #[error("{0}")]
    HostMemory(String),
    /// The host asked to stop, by `vvae_cancel` or by its progress callback.
    #[error("cancelled by the host")]
    Cancelled,
    /// The call is not allowed now: the handle is busy or closed, or the stream has ended.
    #[error("{0}")]
    State(String),
    /// A bug in this library, caught at the boundary. The handle refuses further work.
    #[error("{0}")]
    Internal(String),
}

impl Error {
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
