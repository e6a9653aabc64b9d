//! The C ABI: the only `extern "C"` of the crate. `types`, `handle`, `run`, `range`, `stream`, `state` and `discovery`
//! become `include/video_vae.h`. `guard` wraps every call, `table` and `cancel` own the handles. `facts` keeps what a
//! checkpoint says. `sized`, `tensor`, `text` and `number` check what the host passes. Must not compute.

#![allow(clippy::missing_safety_doc, reason = "the header's own comments are the contract, for C as for Rust")]

mod cancel;
mod discovery;
mod facts;
mod guard;
mod handle;
mod log;
mod number;
mod range;
mod run;
mod sized;
mod stream;
mod table;
mod tensor;
mod text;
mod types;

#[cfg(test)]
mod tests;

pub use discovery::*;
pub use handle::*;
pub use range::*;
pub use run::*;
pub use stream::*;
pub use types::*;
