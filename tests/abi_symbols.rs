//! The library exports exactly the committed list of symbols.

mod common;

use std::collections::BTreeSet;
use std::process::Command;

#[test]
fn exported_symbols_match_the_committed_list() {
    let list = include_str!("c/symbols.txt");
    let committed: BTreeSet<&str> = list.lines().collect();
    assert_eq!(committed, common::Api::NAMES.iter().copied().collect(), "tests/common has every function");
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
    assert_eq!(exported, committed, "if intended, update tests/c/symbols.txt");
}
