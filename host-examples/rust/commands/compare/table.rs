//! Columns as wide as what stands in them.

/// The first column begins at the left, all others end at the right.
pub fn lines<const N: usize>(rows: &[[String; N]]) -> Vec<String> {
    let widths: [usize; N] = std::array::from_fn(|column| rows.iter().map(|row| row[column].len()).max().unwrap_or(0));
    let line = |row: &[String; N]| {
        let cells = row.iter().zip(widths).enumerate().map(|(column, (cell, width))| match column {
            0 => format!("{cell:<width$}"),
            _ => format!("{cell:>width$}"),
        });
        cells.collect::<Vec<_>>().join("  ")
    };
    rows.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn columns_are_aligned() {
        let rows = [["name", "seconds"], ["longer", "1"]].map(|row| row.map(str::to_owned));
        assert_eq!(super::lines(&rows), ["name    seconds", "longer        1"]);
    }
}
