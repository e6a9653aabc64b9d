//! video-vae: video autoencoders behind a stable C ABI.
//!
//! The map, from the boundary inwards; each part knows only those after it:
//!
//! - [`capi`]: the only `extern "C"`. Null checks, sized structs, handles, the panic boundary.
//! - `node`: what a host sees. One table of nodes, ports and parameters drives discovery, parsing and docs.
//! - `exec`: runs a schedule on a backend. Sessions, streams, progress, cancel.
//! - `report`: plans in words and as timelines.
//! - `plan`: from a shape and a limit to a schedule and its bytes. Knows no device.
//! - `model`: families and their graphs, the compiler to layers, checkpoints, and the algebra done once at load time.
//! - `backend`: the arithmetic. Knows no model.
//! - `ir`: shapes, operations and device profiles, the words that plan, exec and backend share.
//! - `error`, `checksum`, `safetensors`, `file`, `float_mode`, `reserve`, `thread_pool`: used by all of them.
//!
//! The C ABI is the only interface. A Rust program links it, or loads the library, through [`capi`].
//! Everything else may change with every version.

// Unit tests include files of `tests/`, which name the library.
#[cfg(test)]
extern crate self as video_vae;

mod backend;
pub mod capi;
mod checksum;
mod error;
mod exec;
mod file;
mod float_mode;
mod ir;
mod model;
mod node;
mod plan;
mod report;
mod reserve;
mod safetensors;
#[cfg(test)]
mod testing;
mod thread_pool;

/// What the tests and the examples of this repository reach. No interface: it changes without notice.
#[doc(hidden)]
pub mod internals {
    macro_rules! reach {
        ($($module:ident)*) => {
            $(pub mod $module { pub use crate::$module::*; })*
        };
    }
    reach! { backend checksum error exec ir model node plan report safetensors }
}

// Tests of this crate count allocations with one of their own.
#[cfg(not(test))]
#[global_allocator]
static ALLOCATOR: reserve::ReserveAllocator = reserve::ReserveAllocator;
