//! The library exports what the committed list says, and nothing else.

mod common;

use std::collections::BTreeSet;
use std::process::Command;

#[test]
fn exported_symbols_are_those_committed() {
    let list = include_str!("c/symbols.txt");
    let committed: BTreeSet<&str> = list.lines().collect();
    assert_eq!(committed, common::Api::NAMES.iter().copied().collect(), "tests/common knows every function");
    if !cfg!(target_os = "linux") {
        return;
    }
    let output = match Command::new("nm").args(["-D", "--defined-only"]).arg(common::library_path()).output() {
        Ok(output) => output,
        Err(why) if std::env::var_os("CI").is_some() => panic!("nm: {why}"),
        Err(why) => return println!("skipped: nm: {why}"),
    };
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    let exported: BTreeSet<&str> = text.lines().filter_map(|line| line.split_whitespace().last()).collect();
    assert_eq!(exported, committed, "if this is meant, change tests/c/symbols.txt");
}
