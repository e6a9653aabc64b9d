//! The state of a stream as bytes: a header that says what it belongs to and how far it is, then the frames that it
//! remembers, and checksums over both. Everything that is read is taken for a stranger's until it is checked.

mod header;
mod sealed;

pub use header::{Numbers, StateHeader, StateOwner};
pub use sealed::{SEAL, SealedReader, SealedWriter};

use crate::error::Error;

/// Frames are moved in pieces of this many bytes, so that a state is never whole in our own memory.
pub const PIECE: u64 = 4 << 20;

pub fn refuse(why: impl std::fmt::Display) -> Error {
    Error::Checkpoint(format!("state: {why}"))
}
