//! Tiles: parts of the image that run on their own and are faded into each other. Never exact, because norms and
//! attention see a tile instead of the image; so tiles are the last resort, unless the host asks for them.

use std::iter::repeat_n;
use std::sync::Arc;

use crate::model::{Direction, Geometry};

/// Where tiles begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Spacing {
    /// One stride after the other, as in the Python implementations; the last tile is the rest.
    Strided,
    /// All tiles of an axis have the same size and share at least the overlap.
    Even,
}

/// Tiles as asked for, in pixels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TileSize {
    pub height: u64,
    pub width: u64,
    pub overlap: u64,
    pub spacing: Spacing,
}

/// A run of rows or columns, in latent pixels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    pub start: u64,
    pub end: u64,
}

impl Span {
    pub fn len(&self) -> u64 {
        self.end - self.start
    }
}

/// The tiles of one axis.
#[derive(Debug, Clone, PartialEq)]
pub struct TileAxis {
    pub spans: Vec<Span>,
    /// The weight of each output row (or column) of each span. Inner spans share theirs, as there may be thousands.
    pub fades: Vec<Arc<[f32]>>,
    /// The sum of the weights of all spans, for each output row of the image.
    pub weight: Vec<f32>,
}

/// The tiles of an image: every row span with every column span.
#[derive(Debug, Clone, PartialEq)]
pub struct Grid {
    pub size: TileSize,
    pub rows: TileAxis,
    pub columns: TileAxis,
}

impl Grid {
    /// `rows` and `columns` of the whole latent. `None` where one tile covers it.
    pub fn new(size: TileSize, rows: u64, columns: u64, geometry: &Geometry, direction: Direction) -> Option<Grid> {
        let [height, width] = [size.height, size.width].map(|pixels| (pixels / geometry.space).max(1));
        if rows <= height && columns <= width {
            return None;
        }
        let axis = |length: u64, side: u64| {
            let shared = (size.overlap / geometry.space).min(side - 1);
            let spans = match size.spacing {
                Spacing::Strided => strided(length, side, shared),
                Spacing::Even => even(length, side, shared),
            };
            match direction {
                Direction::Encode => TileAxis::new(spans, 1, shared),
                // Tiles that share no whole latent pixel have nothing to fade into.
                Direction::Decode if shared == 0 => TileAxis::new(spans, geometry.scale(), 0),
                Direction::Decode => TileAxis::new(spans, geometry.scale(), size.overlap / geometry.patch),
            }
        };
        Some(Grid { size, rows: axis(rows, height), columns: axis(columns, width) })
    }

    pub fn tiles(&self) -> usize {
        self.rows.spans.len() * self.columns.spans.len()
    }

    /// Rows and columns of tiles.
    pub fn sides(&self) -> (usize, usize) {
        (self.rows.spans.len(), self.columns.spans.len())
    }

    /// Whether all tiles have the same size.
    pub fn is_uniform(&self) -> bool {
        let same = |axis: &TileAxis| axis.spans.first().map(Span::len) == axis.spans.last().map(Span::len);
        same(&self.rows) && same(&self.columns)
    }

    /// Row and column of a tile.
    pub fn position(&self, tile: usize) -> (usize, usize) {
        (tile / self.columns.spans.len(), tile % self.columns.spans.len())
    }

    pub fn spans(&self, tile: usize) -> (Span, Span) {
        let (row, column) = self.position(tile);
        (self.rows.spans[row], self.columns.spans[column])
    }
}

impl TileAxis {
    /// `scale`: rows of output for each row of latent. `fade`: rows of output in which a tile fades.
    fn new(spans: Vec<Span>, scale: u64, fade: u64) -> TileAxis {
        let length = spans[spans.len() - 1].end;
        let of_span = |span: Span| -> Arc<[f32]> {
            fades((span.len() * scale) as usize, fade as usize, span.start > 0, span.end < length).into()
        };
        let kinds = first_inner_last(spans.len()).into_iter();
        let fades: Vec<_> = kinds.flat_map(|(span, like)| repeat_n(of_span(spans[span]), like)).collect();
        let mut weight = vec![0.0; (length * scale) as usize];
        for (span, weights) in spans.iter().zip(&fades) {
            let sums = weight[(span.start * scale) as usize..].iter_mut();
            sums.zip(&**weights).for_each(|(sum, weight)| *sum += weight);
        }
        TileAxis { spans, fades, weight }
    }
}

/// Of `count` rows or columns of tiles the first, the second for all inner ones, and the last, each with how many it
/// stands for. Only the last one may be narrower.
pub fn first_inner_last(count: usize) -> Vec<(usize, usize)> {
    match count {
        0..=2 => (0..count).map(|i| (i, 1)).collect(),
        _ => vec![(0, 1), (1, count - 2), (count - 1, 1)],
    }
}

/// A span that lies inside its neighbour's overlap is left out.
fn strided(length: u64, side: u64, shared: u64) -> Vec<Span> {
    let starts = (0..length).step_by((side - shared) as usize);
    let spans = starts.map(|start| Span { start, end: (start + side).min(length) });
    spans.filter(|span| span.start == 0 || span.len() > shared).collect()
}

fn even(length: u64, side: u64, shared: u64) -> Vec<Span> {
    let side = side.min(length);
    let count = (length - shared.min(length)).div_ceil(side - shared.min(side - 1)).max(1);
    let start = |i: u64| if count > 1 { i * (length - side) / (count - 1) } else { 0 };
    (0..count).map(|i| Span { start: start(i), end: start(i) + side }).collect()
}

/// A cosine from 0 to 1 at the inner edges, 1 elsewhere. Where both fades meet, the one at the end wins.
fn fades(length: usize, fade: usize, at_start: bool, at_end: bool) -> Vec<f32> {
    let mut weights = vec![1.0; length];
    let reach = fade.min(length - 1);
    let ramp = |i: usize| {
        let x = if fade > 1 { i as f64 / (fade - 1) as f64 } else { 0.0 };
        (0.5 - 0.5 * (x * std::f64::consts::PI).cos()) as f32
    };
    if at_start {
        (0..reach).for_each(|i| weights[i] = ramp(i));
    }
    if at_end {
        (0..reach).for_each(|i| weights[length - reach + i] = 1.0 - ramp(i));
    }
    weights
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grid(size: u64, overlap: u64, rows: u64, columns: u64, direction: Direction) -> Option<Grid> {
        let size = TileSize { height: size, width: size, overlap, spacing: Spacing::Strided };
        let geometry = Geometry { pixel_channels: 3, latent_channels: 16, space: 8, time: 4, patch: 1, packing: 1 };
        Grid::new(size, rows, columns, &geometry, direction)
    }

    #[test]
    fn an_image_no_larger_than_a_tile_is_not_cut() {
        assert_eq!(grid(64, 16, 8, 8, Direction::Decode), None);
        assert_eq!(grid(64, 16, 8, 9, Direction::Decode).unwrap().tiles(), 2);
    }

    #[test]
    fn tiles_cover_the_image_and_share_the_overlap() {
        let grid = grid(64, 16, 12, 15, Direction::Decode).unwrap();
        assert_eq!(grid.rows.spans, [Span { start: 0, end: 8 }, Span { start: 6, end: 12 }]);
        assert_eq!(
            grid.columns.spans,
            [Span { start: 0, end: 8 }, Span { start: 6, end: 14 }, Span { start: 12, end: 15 }]
        );
        assert_eq!(grid.spans(4), (grid.rows.spans[1], grid.columns.spans[1]));
    }

    #[test]
    fn a_tile_inside_its_neighbours_overlap_is_left_out() {
        // The third span would be 12..14, no longer than the overlap.
        assert_eq!(grid(64, 16, 14, 8, Direction::Encode).unwrap().rows.spans.len(), 2);
    }

    #[test]
    fn an_overlap_of_less_than_a_latent_pixel_leaves_no_seam() {
        for overlap in 0..8 {
            let grid = grid(64, overlap, 20, 20, Direction::Decode).unwrap();
            assert!(grid.rows.weight.iter().all(|weight| *weight == 1.0), "{overlap}: {:?}", grid.rows.weight);
        }
    }

    #[test]
    fn even_tiles_are_all_of_one_size_and_share_the_overlap() {
        for (length, side, shared) in [(60, 10, 2), (41, 13, 4), (9, 8, 0), (100, 7, 6), (5, 8, 2)] {
            let spans = even(length, side, shared);
            assert!(spans.iter().all(|span| span.len() == side.min(length)), "{spans:?}");
            assert_eq!((spans[0].start, spans[spans.len() - 1].end), (0, length));
            assert!(spans.windows(2).all(|pair| pair[0].end >= pair[1].start + shared), "{spans:?}");
        }
    }

    #[test]
    fn fades_are_complementary_and_only_at_inner_edges() {
        let grid = grid(64, 16, 12, 8, Direction::Decode).unwrap();
        let (upper, lower) = (&grid.rows.fades[0], &grid.rows.fades[1]);
        assert_eq!((upper[0], lower[lower.len() - 1]), (1.0, 1.0));
        assert!(grid.rows.weight.iter().all(|w| (w - 1.0).abs() < 1e-6), "{:?}", grid.rows.weight);
        assert_eq!((upper[63], lower[0]), (0.0, 0.0));
        assert!(grid.columns.fades[0].iter().all(|w| *w == 1.0));
    }
}
