//! The Python package and the ComfyUI nodes: their own tests run with the library under test.

use super::pytest;
use crate::common::{library_path, root};

#[test]
fn package_passes_its_tests() {
    pytest::passes(&root().join("host-examples/python"), &library_path());
}

#[test]
fn nodes_pass_their_tests() {
    pytest::passes(&root().join("host-examples/comfyui"), &library_path());
}
