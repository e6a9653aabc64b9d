//! Programs that tests run.

use std::process::{Command, Output};

/// Reports a skipped test; in CI it fails.
pub fn skip(why: &str) {
    assert!(std::env::var_os("CI").is_none(), "{why}");
    println!("skipped: {why}");
}

/// Whether a tool is installed. Without one the test is skipped.
pub fn has(tool: &str) -> bool {
    let there = Command::new(tool).arg("--version").output().is_ok_and(|output| output.status.success());
    if !there {
        skip(&format!("{tool} is not installed"));
    }
    there
}

pub fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// Runs a program that has to succeed, and returns what it said.
#[track_caller]
pub fn succeeds(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|why| panic!("{command:?}: {why}"));
    assert!(output.status.success(), "{command:?}\n{}", said(&output));
    said(&output)
}
