//! The library when the system or the GPU's driver fails: an error or a right result, and a handle that works once they
//! do again.
//! VVAE_FAILING_PLACES sets how many places of each kind are tried; 0: one for each distinct stack of calls.

#![cfg(all(target_os = "linux", target_env = "gnu"))]

mod common;

use std::path::Path;
use std::process::Command;

#[cfg(feature = "cuda")]
use common::golden;
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
fn count(folder: &Folder, weights: &Path, [kind, how, places]: [&str; 3]) -> Counts {
    let (library, trace) = (library_path(), folder.0.join("trace"));
    let mut run = Command::new(folder.0.join("failing_calls"));
    // Only kinds that fail calls of the driver load one.
    run.env("LD_LIBRARY_PATH", &folder.0).args([library.as_path(), weights, &trace]).args([kind, how, places]);
    let run = run.output().unwrap();
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

/// Compiles a program of `tests/c`. Whether there is a compiler.
fn compile(source: &str, into: &Path, flags: &[&str]) -> bool {
    let mut compile = Command::new(std::env::var_os("CC").unwrap_or("cc".into()));
    compile.args(["-std=gnu11", "-O1", "-w", "-pthread", "-ldl"]).args(flags).arg("-o").arg(into);
    compile.arg(root().join("tests/c").join(source)).arg("-I").arg(root().join("include"));
    match compile.output() {
        Err(why) if std::env::var_os("CI").is_none() => println!("skipped: no C compiler: {why}"),
        built => {
            let built = built.expect("a C compiler");
            assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
            return true;
        }
    }
    false
}

/// Fails calls of these kinds, `driver`: also those of a simulated driver.
fn survives(kinds: &[(&str, &str)], name: &str, weights: &Path, driver: bool) {
    let folder = Folder::new(name);
    let library = ["-fPIC", "-shared"];
    if !compile("failing_calls.c", &folder.0.join("failing_calls"), &["-rdynamic"])
        || driver && !compile("simulated_driver.c", &folder.0.join("libcuda.so"), &library)
    {
        return;
    }
    let places = std::env::var("VVAE_FAILING_PLACES").unwrap_or("8".into());
    for (kind, how) in kinds {
        let found = count(&folder, weights, [kind, how, &places]);
        let survived = found.answered + found.completed;
        assert!(survived > 0 && found.hung == 0 && found.wrong == 0, "{kind} {how}: {found:?}");
        // The standard library aborts if the handle of a new thread cannot be allocated: rarely a place is that one.
        let most = if *kind == "memory" { survived / 20 } else { 0 };
        assert!(found.aborted <= most, "{kind} {how}: {found:?}");
    }
}

#[test]
fn failing_calls_to_the_system_are_survived() {
    let kinds = ["memory", "threads", "files", "host"].map(|kind| [(kind, "once"), (kind, "after")]);
    survives(kinds.as_flattened(), "failing", tiny(), false);
}

/// A simulated driver: there is memory, and nothing is computed.
#[test]
#[cfg(feature = "cuda")]
fn a_failing_driver_is_survived() {
    let kinds = ["device", "pinned", "launch", "taken", "driver"].map(|kind| [(kind, "once"), (kind, "after")]);
    let kinds = [kinds.as_flattened(), &[("lost", "after"), ("member", "after")]].concat();
    survives(&kinds, "failing-driver", &golden("small.safetensors"), true);
}
