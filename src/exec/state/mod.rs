//! The state of a stream as bytes: a header, the persisted regions, and checksums over both. Nothing that is read is
//! trusted before it is checked.

mod header;
mod sealed;

pub use header::{Numbers, StateHeader, StateOwner};
pub use sealed::{SEAL, SealedReader, SealedWriter};

use crate::error::Error;

/// Bytes of a piece: a state is never whole in the library's memory.
pub const PIECE: u64 = 4 << 20;

pub fn refuse(why: impl std::fmt::Display) -> Error {
    Error::Checkpoint(format!("state: {why}"))
}
