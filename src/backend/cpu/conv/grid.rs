//! How a convolution's output is divided into areas, and whether it is computed by Winograd's algorithm.
//! Depends on shapes and precision alone. Statistics are summed area by area, the same for any number of threads.

use super::square::{GROUP, Square};
use crate::backend::Precision;
use crate::backend::cpu::element::block_channels;
use crate::backend::cpu::simd::{BLOCK, DOT_CHANNELS, MOST_TILES, PANEL, TILE, panel_count};
use crate::ir::{ConvLayout, FrameShape, Window};

/// Input frames that a pair of output frames reads.
pub const PAIR_INPUTS: usize = 4;

/// The input of an area in one component of columns: one component of rows should fit in the second-level cache beside
/// its weights. The more squares there are, the fewer times weights are read.
const COMPONENT_BYTES: usize = 2 << 20;
/// With more squares, patches and sums leave the second-level cache. Half as many large ones where there are several
/// patches.
const AREA_SQUARES: usize = 128;
/// Fewest channels in and out of large squares. With fewer, their transforms take too much of the time.
const LARGE_CHANNELS: u64 = 128;
/// Most weights of a tap with which all slabs have large squares, which more than double the weights' memory. With more
/// weights only the slab of the first frame has them, or a slab that is the only one.
const LARGE_WEIGHTS: u64 = 256 * 256;

/// A patch should fit in the second-level cache, together with a panel of weights.
const PATCH_BYTES: usize = 1 << 20;
/// Frames that a task in bf16 computes together.
pub const RUN: usize = 3;
/// Patches that a task in bf16 keeps: those of a run and of two frames before, and the run's shortcuts. A pair has six,
/// and two shortcuts.
pub const PATCHES: usize = 2 * RUN + 2;
/// In bf16 the patches of a run, of two frames before, and a panel of weights should fit in the second-level cache.
const BF16_CACHE_BYTES: usize = 1400 << 10;
/// Keeps the output of an area in cache too, where the input has few channels.
const AREA_PIXELS: usize = 2048;
/// Fixed cost of a tile of the microkernel, in pixels.
const TILE_COST: f64 = 1.0;
/// Costs in bf16, in tiles of positions: of reading weights for up to [`MOST_TILES`], and for a whole area.
const BF16_READ_COST: f64 = 1.5;
const BF16_AREA_COST: f64 = 2.0;
/// Cost of the prologue on one vector, in multiplications of the microkernel.
const PROLOGUE_COST: f64 = 40.0;
const BF16_PROLOGUE_COST: f64 = 250.0;

/// Whether a convolution is computed by Winograd's algorithm along rows and columns. With few channels the sums are too
/// short to pay for it, but in f32 only this algorithm computes pairs. AMX multiplies faster than vectors transform, so
/// bf16 does without.
pub fn uses_winograd(layout: &ConvLayout, precision: Precision) -> bool {
    let rest = layout.cout as usize % PANEL;
    let pays = layout.cin as usize >= BLOCK && (rest == 0 || rest > DOT_CHANNELS);
    precision == Precision::Fp32 && layout.window == Window::Same && (pays || layout.pairs.is_some())
}

/// The squares of the first frame of a clip, or of others, where a convolution uses Winograd's algorithm. They depend
/// on nothing else, so that a frame has the same bits however the work is cut.
pub fn square_of(layout: &ConvLayout, precision: Precision, first: bool) -> Option<Square> {
    let alone = first || layout.slabs == 1;
    let large = layout.cin.min(layout.cout) >= LARGE_CHANNELS && (alone || layout.cin * layout.cout <= LARGE_WEIGHTS);
    uses_winograd(layout, precision).then_some(if large { Square::Large } else { Square::Small })
}

/// The part of the counted products that is computed, in whole squares. `first`: of the first frame of a clip.
pub fn product_share(layout: &ConvLayout, precision: Precision, first: bool) -> f64 {
    let side = |square: Square| square.components() as f64 / square.side() as f64 / layout.window.side() as f64;
    square_of(layout, precision, first).map_or(1.0, |square| side(square).powi(2))
}

/// Products that are computed for an output pixel and a term of a later frame, in whole squares.
#[cfg(test)]
pub fn products_per_pixel(layout: &ConvLayout, precision: Precision) -> u64 {
    let side = layout.window.side() as usize;
    let (taps, pixels) =
        square_of(layout, precision, false).map_or((side * side, 1), |s| (s.components().pow(2), s.side().pow(2)));
    taps as u64 * layout.cin * layout.cout / pixels as u64
}

/// The pixels of the output, or of one phase of it, as a grid of `height` x `width`.
#[derive(Debug, Clone, Copy)]
pub struct OutputGrid {
    pub precision: Precision,
    pub height: usize,
    pub width: usize,
    /// Input pixels from one output pixel to the next.
    pub stride: usize,
    /// Rows and columns of input that the phases of an output pixel read together.
    pub reach: usize,
    /// How far the first of these lies before the pixel.
    pub before: usize,
    /// Output pixels from one pixel of the grid to the next.
    pub spread: usize,
    /// Of Winograd's algorithm, if it is used.
    pub square: Option<Square>,
    /// Patches that a thread has room for. In the Winograd domain, output frames that it computes together.
    pub patches: usize,
    pub frames: usize,
    /// Areas in a column and in a row.
    pub rows: usize,
    pub columns: usize,
}

/// A rectangle of the grid.
#[derive(Debug, Clone, Copy)]
pub struct OutputArea {
    pub top: usize,
    pub left: usize,
    pub height: usize,
    pub width: usize,
}

impl OutputArea {
    /// With whole squares of pixels.
    pub fn in_squares(self, square: Square) -> OutputArea {
        let whole = |length: usize| length.next_multiple_of(square.side());
        OutputArea { height: whole(self.height), width: whole(self.width), ..self }
    }

    pub fn pixels(&self) -> usize {
        self.height * self.width
    }
}

impl OutputGrid {
    /// Of the `first` frame of a clip, or of others. The first one has one term, so there is room for larger areas.
    pub fn new(layout: &ConvLayout, input: FrameShape, precision: Precision, first: bool) -> OutputGrid {
        let (height, width) = (input.height as usize, input.width as usize);
        let square = square_of(layout, precision, first);
        let (patches, frames) = match square {
            Some(_) if first => (1, 1),
            Some(_) if layout.pairs.is_some() => (PAIR_INPUTS, 2),
            Some(_) => (layout.slabs.min(3) as usize, 1),
            None => (if precision == Precision::Bf16 { PATCHES } else { 1 }, 1),
        };
        let grid = |height, width, stride, reach, before, spread| OutputGrid {
            precision,
            height,
            width,
            stride,
            reach,
            before,
            spread,
            square,
            patches,
            frames,
            rows: height,
            columns: width,
        };
        let mut grid = match layout.window {
            Window::Point => grid(height, width, 1, 1, 0, 1),
            Window::Same => grid(height, width, 1, 3, 1, 1),
            Window::Down => grid(height / 2, width / 2, 2, 3, 0, 1),
            Window::Up => grid(height, width, 1, 3, 1, 2),
        };
        grid.divide(layout);
        grid
    }

    /// Chooses the cheapest division: wide areas fill tiles, square areas have the smallest halo.
    fn divide(&mut self, layout: &ConvLayout) {
        let cin = layout.cin.max(layout.shortcut.unwrap_or(0)) as usize;
        let (patch, prologue) = match self.precision {
            Precision::Bf16 => {
                let panel = (layout.window.side() * layout.window.side()) as usize * 64 * self.blocks(cin) * PANEL;
                (BF16_CACHE_BYTES.saturating_sub(panel) / (RUN + 2), BF16_PROLOGUE_COST)
            }
            _ => (PATCH_BYTES, PROLOGUE_COST),
        };
        let pixels = patch / (64 * self.blocks(cin));
        let prologue = prologue / (layout.window.taps() * layout.cout) as f64;
        let winograd = self.square.is_some();
        let components = self.components();
        let squares = COMPONENT_BYTES / (components * self.patches * 64 * self.blocks(layout.cin as usize));
        let most = match self.square {
            None => AREA_PIXELS,
            Some(Square::Large) if self.patches > 1 => AREA_SQUARES / 2,
            Some(_) => AREA_SQUARES,
        };
        let mut best = f64::INFINITY;
        // In units of pixels, or of squares.
        let side = self.side();
        let (height, width) = (self.height.div_ceil(side), self.width.div_ceil(side));
        for columns in 1..=width {
            let w = width.div_ceil(columns);
            let fits = if winograd { squares / w } else { pixels / self.input_span(w) };
            let (least, halo) = if winograd { (1, 1) } else { (self.reach, self.reach) };
            let h = if fits < least { 1 } else { (fits - halo) / self.stride + 1 };
            let h = h.min((most / w).max(1)).min(height);
            let rows = height.div_ceil(h);
            let (h, w) = (side * height.div_ceil(rows), side * w);
            let halo = (self.input_span(h) * self.input_span(w)) as f64 / (h * w) as f64;
            let tiles = if self.precision == Precision::Bf16 {
                let tiles = self.sum_tiles(h, w).tiles;
                let reads = BF16_READ_COST * tiles.div_ceil(MOST_TILES) as f64 + BF16_AREA_COST;
                (tiles as f64 + reads) * TILE as f64 / (h * w) as f64
            } else if winograd {
                (components * components * (h * w / (side * side)).div_ceil(14)) as f64 / (h * w) as f64
            } else {
                w.div_ceil(14) as f64 / w as f64
            };
            let cost = halo * prologue + tiles * TILE_COST;
            // A single row that exceeds the cache is taken only if it cannot be narrower.
            let spills = fits < least && w > side;
            if !spills && cost < best {
                (best, self.rows, self.columns) = (cost, rows, columns);
            }
        }
    }

    /// Input pixels, in one direction, that a run of output pixels reads.
    pub fn input_span(&self, run: usize) -> usize {
        (run - 1) * self.stride + self.reach
    }

    /// Output pixels in one direction that are computed together.
    fn side(&self) -> usize {
        self.square.map_or(1, Square::side)
    }

    /// Components of the Winograd domain in one dimension.
    fn components(&self) -> usize {
        self.square.map_or(1, Square::components)
    }

    /// Squares of the largest area.
    fn squares(&self) -> usize {
        let (h, w) = self.largest();
        self.square.map_or(0, |square| (h / square.side()) * (w / square.side()))
    }

    pub fn areas(&self) -> usize {
        self.rows * self.columns
    }

    pub fn area(&self, index: usize) -> OutputArea {
        let side = self.side();
        let split = |whole: usize, parts, index| {
            let (first, end) = split_evenly(whole.div_ceil(side), parts, index);
            (first * side, whole.min(end * side))
        };
        let (top, bottom) = split(self.height, self.rows, index / self.columns);
        let (left, right) = split(self.width, self.columns, index % self.columns);
        OutputArea { top, left, height: bottom - top, width: right - left }
    }

    /// Blocks that `channels` input channels make in a patch.
    fn blocks(&self, channels: usize) -> usize {
        channels.div_ceil(block_channels(self.precision))
    }

    /// The sums of one panel over an area of this size, in bf16.
    pub fn sum_tiles(&self, height: usize, width: usize) -> SumTiles {
        let (row, columns) = (width.next_multiple_of(TILE), self.input_span(width));
        let by_row = SumTiles { pitch: row, tiles: height * row / TILE };
        let through = SumTiles { pitch: columns, tiles: ((height - 1) * columns + width).div_ceil(TILE) };
        if self.stride == 1 && through.tiles < by_row.tiles { through } else { by_row }
    }

    /// Height and width of the largest area, in whole squares.
    fn largest(&self) -> (usize, usize) {
        let side = self.side();
        let largest = |whole: usize, parts| side * whole.div_ceil(side).div_ceil(parts);
        (largest(self.height, self.rows), largest(self.width, self.columns))
    }

    /// Floats of the sums of one panel of the largest area: of a group of components of columns, or in bf16 of all
    /// tiles.
    pub fn sum_floats(&self) -> usize {
        let (h, w) = self.largest();
        match self.precision {
            Precision::Bf16 => self.sum_tiles(h, w).tiles * TILE * PANEL,
            _ => GROUP * self.components() * self.squares() * PANEL,
        }
    }

    /// Bytes of the input of the largest area in one component of columns, of all patches.
    pub fn component_bytes(&self, layout: &ConvLayout) -> usize {
        self.components() * self.patches * self.squares() * 64 * self.blocks(layout.cin as usize)
    }

    /// Bytes of the patch of the largest area, of the main input or the shortcut.
    pub fn patch_bytes(&self, layout: &ConvLayout) -> usize {
        let (h, w) = self.largest();
        let main = self.input_span(h) * self.input_span(w) * self.blocks(layout.cin as usize);
        // In bf16 a shortcut's patch is as wide as the sums, and a tile may read past the last position.
        let (columns, more) = match self.precision {
            Precision::Bf16 => (self.input_span(w).max(w.next_multiple_of(TILE)), TILE * self.stride),
            _ => (w, 0),
        };
        64 * (main.max(h * columns * self.blocks(layout.shortcut.unwrap_or(0) as usize)) + more)
    }
}

/// Sums of one panel in bf16: tiles of [`TILE`] positions. A row begins every `pitch` positions.
#[derive(Debug, Clone, Copy)]
pub struct SumTiles {
    /// The columns of the patch, so that tiles may span rows, or the width of the area in whole tiles.
    pub pitch: usize,
    pub tiles: usize,
}

/// Begin and end of part `index` of `parts` nearly equal parts of `whole`.
pub fn split_evenly(whole: usize, parts: usize, index: usize) -> (usize, usize) {
    (whole * index / parts, whole * (index + 1) / parts)
}

/// Divides the work of an operation: `units` of frames over `areas` areas. A task has one area, some units, and some of
/// the panels: (parts of the units, parts of the panels). Fewer parts prepare fewer patches.
pub fn division(
    layout: &ConvLayout,
    precision: Precision,
    units: usize,
    areas: usize,
    threads: usize,
) -> (usize, usize) {
    let panels = panel_count(layout.cout as usize) * layout.window.phases() as usize;
    let prologue = if precision == Precision::Bf16 { BF16_PROLOGUE_COST } else { PROLOGUE_COST };
    // The patches of a task, in products of a panel: those of its units. Frames share them with two frames before,
    // pairs with one pair.
    let patch = prologue / (layout.window.side() * layout.window.side()) as f64 / PANEL as f64;
    let before = match layout.pairs {
        _ if uses_winograd(layout, precision) => 0,
        Some(_) => 1,
        None => 2,
    };
    let time = |(parts, groups): (usize, usize)| {
        let (run, rounds) = (units.div_ceil(parts), (areas * parts * groups).div_ceil(threads));
        rounds as f64 * (run as f64 * panels.div_ceil(groups) as f64 + (run + before) as f64 * patch)
    };
    let all = (1..=units.max(1)).flat_map(|parts| (1..=panels).map(move |groups| (parts, groups)));
    all.min_by(|a, b| time(*a).total_cmp(&time(*b))).unwrap_or((1, 1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::{Norm, Prologue};

    fn layout(cin: u64, cout: u64, window: Window) -> ConvLayout {
        let prologue = Prologue::NormSilu;
        ConvLayout {
            cin,
            cout,
            window,
            prologue,
            slabs: 3,
            shortcut: None,
            biases: 1,
            norm: Norm::Group { groups: 1 },
            pairs: None,
            first_frame_slab: None,
        }
    }

    #[test]
    fn areas_cover_the_grid_once_and_their_patches_fit() {
        for window in [Window::Point, Window::Same, Window::Down, Window::Up] {
            for (h, w) in [(2, 2), (4, 6), (34, 58), (270, 482), (1080, 1920), (2, 20_000), (20_000, 2)] {
                for (cin, first) in [3, 16, 128, 512].into_iter().flat_map(|cin| [(cin, false), (cin, true)]) {
                    let layout = layout(cin, 128, window);
                    let g = OutputGrid::new(&layout, FrameShape::new(h, w, cin), Precision::Fp32, first);
                    let mut covered = 0;
                    for index in 0..g.areas() {
                        let a = g.area(index);
                        assert!(a.height > 0 && a.width > 0 && a.top + a.height <= g.height);
                        assert!(a.left + a.width <= g.width);
                        covered += a.height * a.width;
                        let in_squares = g.square.map_or(a, |square| a.in_squares(square));
                        let patch = g.input_span(in_squares.height)
                            * g.input_span(in_squares.width)
                            * (cin as usize).next_multiple_of(BLOCK);
                        assert!(patch * 4 <= g.patch_bytes(&layout));
                    }
                    assert_eq!(covered, g.height * g.width);
                    let fits = if g.square.is_some() {
                        g.component_bytes(&layout) <= COMPONENT_BYTES
                    } else {
                        g.patch_bytes(&layout) <= PATCH_BYTES
                    };
                    assert!(fits, "{window:?} {h}x{w}x{cin}: {g:?}");
                }
            }
        }
    }

    #[test]
    fn panels_are_divided_only_where_areas_are_few() {
        let layout = layout(512, 512, Window::Same);
        let groups = |areas, threads| division(&layout, Precision::Fp32, 1, areas, threads).1;
        assert_eq!(groups(1000, 2), 1);
        assert_eq!(groups(1, 1), 1);
        assert_eq!(groups(1, 16), 16);
        assert_eq!(groups(2, 2), 1);
        assert_eq!(groups(1, 2), 2);
    }
}
