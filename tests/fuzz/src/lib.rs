//! What the fuzz targets do with their bytes. `tests/fuzz.rs` has the same bodies without instrumentation.

pub mod bodies;
#[path = "../../common/mod.rs"]
pub mod common;

/// Runs the body of a target on the library that is linked here.
pub fn run(target: &str, data: &[u8]) {
    common::use_linked_library();
    bodies::run(target, data);
}
