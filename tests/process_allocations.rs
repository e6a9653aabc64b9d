//! The library when the system fails: an error or a right result, and a handle that works once the system does again.
//! VVAE_FAILING_PLACES sets how many places of each kind are tried; 0: one for each distinct stack of calls.

#![cfg(all(target_os = "linux", target_env = "gnu"))]

mod common;

use std::path::Path;
use std::process::Command;

use common::safetensors::Folder;
use common::{library_path, root, tiny};

#[derive(Debug)]
struct Counts {
    /// Ended with an error.
    answered: u64,
    /// Gave the right result.
    completed: u64,
    aborted: u64,
    hung: u64,
    /// Another result, or an error that does not fit.
    wrong: u64,
}

/// Runs the C program over `places` places.
fn count(program: &Path, folder: &Folder, kind: &str, how: &str, places: &str) -> Counts {
    let (library, state) = (library_path(), folder.0.join("state"));
    let run =
        Command::new(program).args([library.as_path(), tiny(), &state]).args([kind, how, places]).output().unwrap();
    let said = String::from_utf8_lossy(&run.stdout).into_owned();
    println!("{kind} {how}: {said}");
    let last = said.lines().last().unwrap_or_default();
    let of = |key: &str| {
        let found = last.split_once(&format!("{key} ")).and_then(|(_, rest)| rest.split(' ').next()?.parse().ok());
        found.unwrap_or_else(|| panic!("{said}"))
    };
    let [answered, completed, aborted] = ["answered", "completed", "aborted"].map(of);
    Counts { answered, completed, aborted, hung: of("hung"), wrong: of("wrong") }
}

#[test]
fn failing_calls_to_the_system_are_survived() {
    let folder = Folder::new("failing");
    let program = folder.0.join("failing_calls");
    let mut compile = Command::new(std::env::var_os("CC").unwrap_or("cc".into()));
    compile.args(["-std=gnu11", "-O1", "-w", "-rdynamic", "-pthread", "-ldl", "-o"]).arg(&program);
    compile.arg(root().join("tests/c/failing_calls.c")).arg("-I").arg(root().join("include"));
    match compile.output() {
        Err(why) if std::env::var_os("CI").is_none() => return println!("skipped: no C compiler: {why}"),
        built => {
            let built = built.expect("a C compiler");
            assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        }
    }
    let places = std::env::var("VVAE_FAILING_PLACES").unwrap_or("8".into());
    for kind in ["memory", "threads", "files", "host"] {
        for how in ["once", "after"] {
            let found = count(&program, &folder, kind, how, &places);
            assert!(
                found.answered + found.completed > 0 && found.hung == 0 && found.wrong == 0,
                "{kind} {how}: {found:?}"
            );
            // The standard library aborts if the handle of a new thread cannot be allocated: rarely a place is that one.
            let most = if kind == "memory" { (found.answered + found.completed) / 20 } else { 0 };
            assert!(found.aborted <= most, "{kind} {how}: {found:?}");
        }
    }
}
