//! Tiles: parts of the image that run on their own and are faded into each other. Never exact, because norms and
//! attention see a tile instead of the image; so tiles are the last resort, unless the host asks for them.

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

/// The tiles of an image: every row span with every column span.
#[derive(Debug, Clone, PartialEq)]
pub struct Grid {
    pub size: TileSize,
    pub rows: Vec<Span>,
    pub columns: Vec<Span>,
}

impl Grid {
    /// `rows` and `columns` of the whole latent, whose pixels have `scale` pixels a side. `None` where one tile covers it.
    pub fn new(size: TileSize, rows: u64, columns: u64, scale: u64) -> Option<Grid> {
        let [height, width] = [size.height, size.width].map(|pixels| (pixels / scale).max(1));
        if rows <= height && columns <= width {
            return None;
        }
        Some(Grid { size, rows: size.spans(rows, height, scale), columns: size.spans(columns, width, scale) })
    }

    pub fn tiles(&self) -> usize {
        self.rows.len() * self.columns.len()
    }

    /// Rows and columns of tiles.
    pub fn sides(&self) -> (usize, usize) {
        (self.rows.len(), self.columns.len())
    }

    /// Whether all tiles have the same size.
    pub fn is_uniform(&self) -> bool {
        let same = |spans: &[Span]| spans.first().map(Span::len) == spans.last().map(Span::len);
        same(&self.rows) && same(&self.columns)
    }

    /// Row and column of a tile.
    pub fn position(&self, tile: usize) -> (usize, usize) {
        (tile / self.columns.len(), tile % self.columns.len())
    }

    pub fn spans(&self, tile: usize) -> (Span, Span) {
        let (row, column) = self.position(tile);
        (self.rows[row], self.columns[column])
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Square tiles, with 8 pixels for each of latent.
    fn grid(size: u64, overlap: u64, rows: u64, columns: u64) -> Option<Grid> {
        Grid::new(TileSize { height: size, width: size, overlap, spacing: Spacing::Strided }, rows, columns, 8)
    }

    #[test]
    fn an_image_no_larger_than_a_tile_is_not_cut() {
        assert_eq!(grid(64, 16, 8, 8), None);
        assert_eq!(grid(64, 16, 8, 9).unwrap().tiles(), 2);
    }

    #[test]
    fn tiles_cover_the_image_and_share_the_overlap() {
        let grid = grid(64, 16, 12, 15).unwrap();
        assert_eq!(grid.rows, [Span { start: 0, end: 8 }, Span { start: 6, end: 12 }]);
        assert_eq!(grid.columns, [Span { start: 0, end: 8 }, Span { start: 6, end: 14 }, Span { start: 12, end: 15 }]);
        assert_eq!(grid.spans(4), (grid.rows[1], grid.columns[1]));
    }

    #[test]
    fn a_tile_inside_its_neighbours_overlap_is_left_out() {
        // The third span would be 12..14, no longer than the overlap.
        assert_eq!(grid(64, 16, 14, 8).unwrap().rows.len(), 2);
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
}
