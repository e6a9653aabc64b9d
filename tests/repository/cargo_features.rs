//! `cargo build` and `cargo run --example vvae` share one build of the library: dev-dependencies, which only the second
//! has, add no feature to a crate that the library depends on.

use std::collections::BTreeSet;
use std::process::Command;

/// Every crate that `edges` lead to, with its features.
fn crates(edges: &str) -> BTreeSet<String> {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["tree", "--offline", "--locked", "--no-dedupe", "--prefix", "none", "-f", "{p} {f}", "-e", edges]);
    let output = cargo.current_dir(crate::common::root()).output().expect("cargo starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
}

#[test]
fn dev_dependencies_add_no_feature() {
    let (library, all) = (crates("normal"), crates("normal,dev"));
    assert!(library.len() > 10 && library.len() < all.len());
    let changed: Vec<_> = library.difference(&all).collect();
    assert!(changed.is_empty(), "list their features of `cargo tree -e normal,dev` in Cargo.toml too: {changed:?}");
}
