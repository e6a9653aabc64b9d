//! Pictures to look at: frames of both clips and their difference, beside each other.

use super::font;
use crate::tensor::{FrameKind, Frames};

/// How much the difference is made stronger, so that it can be seen; its label says so.
const GAIN: f32 = 4.0;
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

/// Pictures beside each other, each with what stands above it.
pub type Row = Vec<(String, Vec<u8>)>;

/// One row below the other. `picture`: of all of them, interleaved and of 8 bits.
pub fn grid(picture: FrameKind, rows: &[Row]) -> (FrameKind, Vec<u8>) {
    let mut canvas = Canvas::new(picture, rows.iter().map(Vec::len).max().unwrap_or(0), rows.len());
    for (row, pictures) in rows.iter().enumerate() {
        for (column, (label, pixels)) in pictures.iter().enumerate() {
            canvas.picture(picture, column, row, pixels);
            canvas.label(picture, column, row, label);
        }
    }
    (canvas.kind, canvas.pixels)
}

/// Rows of input, output and difference, for some frames from the first to the last.
pub fn contact_sheet(input: &Frames, output: &Frames) -> (FrameKind, Vec<u8>) {
    let (kind, count) = (input.kind, input.count());
    let columns = COLUMNS.min(count);
    let row = |label: &str, picture: &dyn Fn(usize) -> Vec<u8>| -> Row {
        let above = |column| if column == 0 { label.to_owned() } else { String::new() };
        let frame = |column| column * (count - 1) / (columns - 1).max(1);
        (0..columns).map(|column| (above(column), picture(frame(column)))).collect()
    };
    let wide = |frames: &Frames, i| frames.frame(i).iter().map(|value| f32::from(*value)).collect::<Vec<_>>();
    let rows = [
        row("INPUT", &|i| input.frame(i).to_vec()),
        row("OUTPUT", &|i| output.frame(i).to_vec()),
        row("DIFFERENCE TIMES FOUR", &|i| difference(&wide(input, i), &wide(output, i), GAIN)),
    ];
    grid(kind, &rows)
}

/// Grey where they agree.
pub fn difference(a: &[f32], b: &[f32], gain: f32) -> Vec<u8> {
    a.iter().zip(b).map(|(a, b)| (128.0 + gain * (b - a)).clamp(0.0, 255.0).round() as u8).collect()
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Dtype;

    #[test]
    fn a_grid_has_every_picture_in_its_place() {
        let kind = FrameKind::pixels(Dtype::U8, 20, 10);
        let picture = |value: u8| (String::from("A1"), vec![value; kind.bytes()]);
        let (whole, pixels) = grid(kind, &[vec![picture(50), picture(60)], vec![picture(70)]]);
        assert_eq!((whole.width, whole.height), (2 * 34 + 14, 2 * 24 + 14));
        let at = |x: usize, y: usize| pixels[3 * (y * whole.width + x)];
        for (left, top, value) in [(14, 14, 50), (48, 14, 60), (14, 38, 70)] {
            assert_eq!([at(left, top), at(left + 19, top + 9), at(left + 20, top)], [value, value, 24]);
            // The foot of the digit stands above the picture; the letter is 4 dots wide, a dot 2 pixels.
            assert_eq!([at(left + 8, top - 3), at(left + 13, top - 3)], [230, 230]);
        }
        assert_eq!(at(48, 38), 24);
    }

    #[test]
    fn differences_are_amplified_around_grey() {
        let after = [100.0, 100.5, 99.0, 200.0, 0.0];
        assert_eq!(difference(&[100.0; 5], &after, 8.0), [128, 132, 120, 255, 0]);
    }
}
