//! The nodes for ComfyUI, by their own tests: stand-ins for ComfyUI, and the library that was built for this one.

mod common;
#[path = "../host-examples/python/tests/pytest.rs"]
mod pytest;

#[test]
fn the_nodes_pass_their_tests() {
    pytest::passes(&common::root().join("host-examples/comfyui"), &common::library_path());
}
