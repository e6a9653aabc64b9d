//! Pictures to look at: frames of both clips and their difference, beside each other.

use super::font;
use crate::tensor::{FrameKind, Frames};

/// How much the difference is made stronger, so that it can be seen; its label says so.
const GAIN: i32 = 4;
const COLUMNS: usize = 5;
/// Pixels around every picture; the label stands in it.
const MARGIN: usize = 14;

struct Canvas {
    kind: FrameKind,
    pixels: Vec<u8>,
}

impl Canvas {
    /// Room for so many pictures.
    fn new(picture: FrameKind, columns: usize, rows: usize) -> Canvas {
        let width = columns * (picture.width + MARGIN) + MARGIN;
        let height = rows * (picture.height + MARGIN) + MARGIN;
        let kind = FrameKind { width, height, ..picture };
        Canvas { kind, pixels: vec![24; kind.bytes()] }
    }

    fn picture(&mut self, picture: FrameKind, column: usize, row: usize, pixels: &[u8]) {
        let left = MARGIN + column * (picture.width + MARGIN);
        let top = MARGIN + row * (picture.height + MARGIN);
        for (y, line) in pixels.chunks_exact(3 * picture.width).enumerate() {
            self.pixels[3 * ((top + y) * self.kind.width + left)..][..line.len()].copy_from_slice(line);
        }
    }

    /// Above the picture of that column and row.
    fn label(&mut self, picture: FrameKind, column: usize, row: usize, text: &str) {
        let left = MARGIN + column * (picture.width + MARGIN);
        let top = row * (picture.height + MARGIN) + 2;
        let kind = self.kind;
        font::dots(text, |x, y| {
            for (dx, dy) in [(0, 0), (1, 0), (0, 1), (1, 1)] {
                let (x, y) = (left + 2 * x + dx, top + 2 * y + dy);
                if x < kind.width && y < kind.height {
                    self.pixels[3 * (y * kind.width + x)..][..3].fill(230);
                }
            }
        });
    }
}

/// Rows of input, output and difference, for some frames from the first to the last.
pub fn contact_sheet(input: &Frames, output: &Frames) -> (FrameKind, Vec<u8>) {
    let (kind, count) = (input.kind, input.count());
    let columns = COLUMNS.min(count);
    let mut canvas = Canvas::new(kind, columns, 3);
    for (row, label) in ["INPUT", "OUTPUT", "DIFFERENCE TIMES FOUR"].into_iter().enumerate() {
        canvas.label(kind, 0, row, label);
    }
    for column in 0..columns {
        let frame = column * (count - 1) / (columns - 1).max(1);
        let (a, b) = (input.frame(frame), output.frame(frame));
        canvas.picture(kind, column, 0, a);
        canvas.picture(kind, column, 1, b);
        canvas.picture(kind, column, 2, &difference(a, b));
    }
    (canvas.kind, canvas.pixels)
}

/// Grey where they agree.
fn difference(a: &[u8], b: &[u8]) -> Vec<u8> {
    a.iter().zip(b).map(|(a, b)| (128 + GAIN * (i32::from(*b) - i32::from(*a))).clamp(0, 255) as u8).collect()
}

/// Every frame, the input left and the output right.
pub fn side_by_side(input: &Frames, output: &Frames) -> (FrameKind, Vec<Vec<u8>>) {
    let kind = input.kind;
    let frame = |index| {
        let mut canvas = Canvas::new(kind, 2, 1);
        for (column, (label, clip)) in [("INPUT", input), ("OUTPUT", output)].into_iter().enumerate() {
            canvas.label(kind, column, 0, label);
            canvas.picture(kind, column, 0, clip.frame(index));
        }
        canvas.pixels
    };
    (Canvas::new(kind, 2, 1).kind, (0..input.count()).map(frame).collect())
}
