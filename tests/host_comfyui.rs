//! The ComfyUI nodes: runs their own tests with the library under test and stand-ins for ComfyUI.

mod common;
#[path = "../host-examples/python/tests/pytest.rs"]
mod pytest;

#[test]
fn nodes_pass_their_tests() {
    pytest::passes(&common::root().join("host-examples/comfyui"), &common::library_path());
}
