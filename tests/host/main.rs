//! The hosts in C, C++, C# and Python, each with the library under test.

#[path = "../common/mod.rs"]
mod common;
#[path = "../../host-examples/python/tests/pytest.rs"]
mod pytest;

mod cpp;
mod csharp;
mod python;
