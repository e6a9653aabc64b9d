//! The Python package: runs its own tests with the library under test.

mod common;
#[path = "../host-examples/python/tests/pytest.rs"]
mod pytest;

#[test]
fn package_passes_its_tests() {
    pytest::passes(&common::root().join("host-examples/python"), &common::library_path());
}
