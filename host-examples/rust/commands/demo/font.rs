//! Capital letters, three dots wide and five high: enough to label a picture and to have something to read in it.

/// Rows from the top, five octal digits, the left dot being the 4 of each.
const GLYPHS: [u16; 26] = [
    0o25755, 0o65656, 0o34443, 0o65556, 0o74647, 0o74644, 0o34553, 0o55755, 0o72227, 0o11152, 0o55655, 0o44447,
    0o57755, 0o65555, 0o25552, 0o65644, 0o25573, 0o65655, 0o34216, 0o72222, 0o55557, 0o55552, 0o55775, 0o55255,
    0o55222, 0o71247,
];

/// Calls `dot` with the column and row of every dot of the text, counted from its upper left corner.
pub fn dots(text: &str, mut dot: impl FnMut(usize, usize)) {
    for (place, letter) in text.bytes().enumerate().filter(|(_, letter)| letter.is_ascii_uppercase()) {
        let glyph = GLYPHS[usize::from(letter - b'A')];
        for (row, column) in (0..5).flat_map(|row| (0..3).map(move |column| (row, column))) {
            if glyph >> (3 * (4 - row) + 2 - column) & 1 == 1 {
                dot(4 * place + column, row);
            }
        }
    }
}
