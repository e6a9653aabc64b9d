//! The C ABI: the only `extern "C"` of the crate, and with the backends the only place that trusts a pointer.
//!
//! `types`, `handle`, `run`, `stream`, `state` and `discovery` become `include/video_vae.h`, in this order; their comments are the
//! header's. Everything a host can do wrong and we can notice ends as an error here: `guard` is the way in, `table`
//! knows the handles, `sized`, `tensor` and `text` read what the host passes.

#![allow(clippy::missing_safety_doc, reason = "the header's own comments are the contract, for C as for Rust")]

mod discovery;
mod guard;
mod handle;
mod log;
mod run;
mod sized;
mod state;
mod stream;
mod table;
mod tensor;
mod text;
mod types;

#[cfg(test)]
mod tests;

pub use discovery::*;
pub use handle::*;
pub use run::*;
pub use state::*;
pub use stream::*;
pub use types::*;
