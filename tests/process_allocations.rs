//! The library when allocations fail: an error or a right result, and a handle that works once there is memory again.
//! VVAE_FAILING_PLACES sets how many places are tried.

#![cfg(all(target_os = "linux", target_env = "gnu"))]

mod common;

use std::path::Path;
use std::process::Command;

use common::safetensors::Folder;
use common::{library_path, root, small};

/// Runs the C program over `places` places. Its last line, as numbers: answered, completed, aborted, wrong.
fn count(program: &Path, folder: &Folder, how: &str, places: &str) -> [u64; 4] {
    let state = folder.0.join("state");
    let run = Command::new(program).args([&library_path(), &small(), &state]).args([how, places]).output().unwrap();
    let said = String::from_utf8_lossy(&run.stdout).into_owned();
    println!("{how}: {said}");
    let last = said.lines().last().unwrap_or_default();
    let of = |key: &str| last.split_once(&format!("{key} ")).and_then(|(_, rest)| rest.split(' ').next()?.parse().ok());
    ["answered", "completed", "aborted", "wrong"].map(|key| of(key).unwrap_or_else(|| panic!("{said}")))
}

#[test]
fn failing_allocations_are_survived() {
    let folder = Folder::new("allocations");
    let program = folder.0.join("failing_allocations");
    let mut compile = Command::new(std::env::var_os("CC").unwrap_or("cc".into()));
    compile.args(["-std=gnu11", "-O1", "-w", "-rdynamic", "-ldl", "-o"]).arg(&program);
    compile.arg(root().join("tests/c/failing_allocations.c")).arg("-I").arg(root().join("include"));
    match compile.output() {
        Err(why) if std::env::var_os("CI").is_none() => return println!("skipped: no C compiler: {why}"),
        built => {
            let built = built.expect("a C compiler");
            assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        }
    }
    let places = std::env::var("VVAE_FAILING_PLACES").unwrap_or("24".into());
    // The standard library aborts if the handle of a new thread cannot be allocated: rarely a place is that one.
    let [_, completed, aborted, wrong] = count(&program, &folder, "once", &places);
    assert!(completed > 0 && aborted <= completed / 20 && wrong == 0, "a single failure");
    let [answered, _, aborted, wrong] = count(&program, &folder, "after", &places);
    assert!(answered > 0 && aborted <= answered / 20 && wrong == 0, "no memory from a place on");
}
