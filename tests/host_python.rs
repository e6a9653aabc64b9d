//! The Python package, by its own tests, with the library that was built for this one.

mod common;
#[path = "../host-examples/python/tests/pytest.rs"]
mod pytest;

#[test]
fn the_package_passes_its_tests() {
    pytest::passes(&common::root().join("host-examples/python"), &common::library_path());
}
