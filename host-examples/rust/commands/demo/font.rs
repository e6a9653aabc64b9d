//! Capital letters and digits, three dots wide and five high: enough to label a picture, and to have something to
//! read in it.

/// Rows from the top, five octal digits, the left dot being the 4 of each.
const GLYPHS: [u16; 26] = [
    0o25755, 0o65656, 0o34443, 0o65556, 0o74647, 0o74644, 0o34553, 0o55755, 0o72227, 0o11152, 0o55655, 0o44447,
    0o57755, 0o65555, 0o25552, 0o65644, 0o25573, 0o65655, 0o34216, 0o72222, 0o55557, 0o55552, 0o55775, 0o55255,
    0o55222, 0o71247,
];

const DIGITS: [u16; 10] = [0o75557, 0o26227, 0o71747, 0o71717, 0o55711, 0o74717, 0o74757, 0o71122, 0o75757, 0o75717];

fn glyph(letter: u8) -> Option<u16> {
    match letter {
        b'A'..=b'Z' => Some(GLYPHS[usize::from(letter - b'A')]),
        b'0'..=b'9' => Some(DIGITS[usize::from(letter - b'0')]),
        b'=' => Some(0o07070),
        b'-' => Some(0o00700),
        b'.' => Some(0o00002),
        b'_' => Some(0o00007),
        _ => None,
    }
}

/// Calls `dot` with the column and row of every dot of the text, counted from its upper left corner.
pub fn dots(text: &str, mut dot: impl FnMut(usize, usize)) {
    for (place, letter) in text.bytes().enumerate() {
        let Some(glyph) = glyph(letter) else { continue };
        for (row, column) in (0..5).flat_map(|row| (0..3).map(move |column| (row, column))) {
            if glyph >> (3 * (4 - row) + 2 - column) & 1 == 1 {
                dot(4 * place + column, row);
            }
        }
    }
}
