//! The Python package and the ComfyUI nodes: their own tests run with the library under test.

use super::pytest;
use crate::common::{library_path, root};

/// Batches take as long as all else, so that both run at the same time.
#[test]
fn package_passes_its_tests_of_batches() {
    pytest::passes(&root().join("host-examples/python"), "batch", &library_path());
}

#[test]
fn package_passes_its_other_tests() {
    pytest::passes(&root().join("host-examples/python"), "not batch", &library_path());
}

#[test]
fn nodes_pass_their_tests() {
    pytest::passes(&root().join("host-examples/comfyui"), "", &library_path());
}
