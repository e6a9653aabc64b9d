//! Tiles: parts of the image that run on their own and are faded into each other. Never exact, because norms and
//! attention see a tile instead of the image; so tiles are the last resort, unless the host asks for them.

use std::sync::Arc;

use crate::model::Direction;

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

impl TileSize {
    /// Rows and columns of tiles in a latent of this size, of so many pixels a side.
    pub fn count(&self, rows: u64, columns: u64, scale: u64) -> (u64, u64) {
        let count = |length: u64, pixels: u64| self.spans(length, (pixels / scale).max(1), scale).len() as u64;
        (count(rows, self.height), count(columns, self.width))
    }

    /// The tiles of an axis of `length` latent pixels, each `side` long.
    fn spans(&self, length: u64, side: u64, scale: u64) -> Vec<Span> {
        let shared = (self.overlap / scale).min(side - 1);
        match self.spacing {
            Spacing::Strided => strided(length, side, shared),
            Spacing::Even => even(length, side, shared),
        }
    }
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

/// Rows of video per row of latent, and per row of activations at the side of the video; columns alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PixelScale {
    pub latent: u64,
    pub patch: u64,
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
    pub fn new(size: TileSize, rows: u64, columns: u64, scale: PixelScale, direction: Direction) -> Option<Grid> {
        let side = |pixels: u64| (pixels / scale.latent).max(1);
        if rows <= side(size.height) && columns <= side(size.width) {
            return None;
        }
        let axis = |length, pixels| TileAxis::new(length, side(pixels), size, scale, direction);
        Some(Grid { size, rows: axis(rows, size.height), columns: axis(columns, size.width) })
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

/// Length of a tile, and whether it fades at its start and at its end.
type FadeKind = (u64, bool, bool);

impl TileAxis {
    fn new(length: u64, side: u64, size: TileSize, scale: PixelScale, direction: Direction) -> TileAxis {
        let shared = (size.overlap / scale.latent).min(side - 1);
        let (factor, fade) = match direction {
            Direction::Encode => (1, shared),
            // Tiles that share no whole latent pixel have nothing to fade into.
            Direction::Decode => (scale.latent / scale.patch, if shared == 0 { 0 } else { size.overlap / scale.patch }),
        };
        let spans = size.spans(length, side, scale.latent);
        let mut weight = vec![0.0; (length * factor) as usize];
        let mut known: Vec<(FadeKind, Arc<[f32]>)> = Vec::new();
        let fades = spans.iter().map(|span| {
            let kind: FadeKind = (span.len(), span.start > 0, span.end < length);
            let same = known.iter().find(|(known, _)| *known == kind).map(|(_, weights)| Arc::clone(weights));
            let weights = same.unwrap_or_else(|| {
                let weights = fades((span.len() * factor) as usize, fade as usize, kind.1, kind.2);
                known.push((kind, Arc::from(weights)));
                Arc::clone(&known[known.len() - 1].1)
            });
            for (sum, weight) in weight[(span.start * factor) as usize..].iter_mut().zip(&*weights) {
                *sum += weight;
            }
            weights
        });
        TileAxis { fades: fades.collect(), spans, weight }
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

    const EIGHT: PixelScale = PixelScale { latent: 8, patch: 1 };

    fn grid(size: u64, overlap: u64, rows: u64, columns: u64, direction: Direction) -> Option<Grid> {
        Grid::new(
            TileSize { height: size, width: size, overlap, spacing: Spacing::Strided },
            rows,
            columns,
            EIGHT,
            direction,
        )
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
