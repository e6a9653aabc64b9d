//! The parameters as a table for docs/abi.md.

use std::fmt::Write;

use super::{NODES, PARAMS, parse, ports::utf8};

/// A Markdown table with one row per parameter. `tests/repository/readme.rs` compares it.
pub fn markdown() -> String {
    let mut out = String::from("| key | default | takes | node | |\n|---|---|---|---|---|\n");
    for param in PARAMS {
        let nodes: Vec<_> = NODES.iter().filter(|n| param.applies_to(n.direction)).map(|n| n.id()).collect();
        let (key, default, help) = (param.key(), param.default(), utf8(param.help));
        let accepted = parse::accepted(&param.kind);
        writeln!(out, "| `{key}` | `{default}` | {accepted} | {} | {help} |", nodes.join(", "))
            .expect("a String takes all");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_row_a_parameter_and_five_cells_a_row() {
        let table = markdown();
        assert_eq!(table.lines().count(), 2 + PARAMS.len());
        assert!(table.lines().all(|line| line.matches('|').count() == 6), "{table}");
    }
}
