//! How a convolution's output is divided into areas, and whether it is computed by Winograd's algorithm.
//! Depends on shapes alone: statistics are summed area by area, and must be the same on any number of threads.

use crate::backend::cpu::simd::{BLOCK, DOT_CHANNELS, PANEL, panel_count};
use crate::ir::FrameShape;
use crate::ir::{ConvLayout, Window};

/// Components of the Winograd domain, see [`super::winograd`].
pub const COMPONENTS: usize = 4;

/// A band should fit in the second-level cache, together with a panel of weights.
const BAND_BYTES: usize = 1 << 20;
/// Keeps the output of an area in cache too, where the input has few channels.
const AREA_PIXELS: usize = 2048;
/// Fixed cost of a tile of the microkernel, in pixels.
const TILE_COST: f64 = 1.0;
/// Cost of the prologue on one vector, in multiplications of the microkernel.
const PROLOGUE_COST: f64 = 40.0;

/// Whether a convolution is computed by Winograd's algorithm. With few channels the sums are too short to pay for it.
pub fn uses_winograd(layout: &ConvLayout) -> bool {
    let rest = layout.cout as usize % PANEL;
    layout.window == Window::Same && layout.cin as usize >= BLOCK && (rest == 0 || rest > DOT_CHANNELS)
}

/// The pixels of the output, or of one phase of it, as a grid of `height` x `width`.
#[derive(Debug, Clone, Copy)]
pub struct OutputGrid {
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
    pub winograd: bool,
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
    pub fn pixels(&self) -> usize {
        self.height * self.width
    }
}

impl OutputGrid {
    pub fn new(layout: &ConvLayout, input: FrameShape) -> OutputGrid {
        let (height, width) = (input.height as usize, input.width as usize);
        let grid = |height, width, stride, reach, before, spread| OutputGrid {
            height,
            width,
            stride,
            reach,
            before,
            spread,
            winograd: uses_winograd(layout),
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
        let pixels = BAND_BYTES / (cin.next_multiple_of(BLOCK) * 4);
        let prologue = PROLOGUE_COST / (layout.window.taps() * layout.cout) as f64;
        let mut best = f64::INFINITY;
        let (height, width) = (self.height, self.width);
        for columns in 1..=width {
            let w = width.div_ceil(columns);
            let fits = pixels / self.band_columns(w);
            let h = if fits < self.reach { 1 } else { (fits - self.reach) / self.stride + 1 };
            let h = h.min((AREA_PIXELS / w).max(1)).min(height);
            let rows = height.div_ceil(h);
            let h = height.div_ceil(rows);
            let halo = (self.input_span(h) * self.input_span(w)) as f64 / (h * w) as f64;
            let tiles = match self.winograd {
                true => (COMPONENTS * (h * w.div_ceil(2)).div_ceil(14)) as f64 / (h * w) as f64,
                false => w.div_ceil(14) as f64 / w as f64,
            };
            let cost = halo * prologue + tiles * TILE_COST;
            // A single row that exceeds the cache is taken only if it cannot be narrower.
            let spills = fits < self.reach && w > 1;
            if !spills && cost < best {
                (best, self.rows, self.columns) = (cost, rows, columns);
            }
        }
    }

    /// Input pixels, in one direction, that a run of output pixels reads.
    pub fn input_span(&self, run: usize) -> usize {
        (run - 1) * self.stride + self.reach
    }

    /// Columns of the band of a run of output pixels, of all components.
    fn band_columns(&self, run: usize) -> usize {
        if self.winograd { COMPONENTS * run.div_ceil(2) } else { self.input_span(run) }
    }

    pub fn areas(&self) -> usize {
        self.rows * self.columns
    }

    pub fn area(&self, index: usize) -> OutputArea {
        let (top, bottom) = split_evenly(self.height, self.rows, index / self.columns);
        let (left, right) = split_evenly(self.width, self.columns, index % self.columns);
        OutputArea { top, left, height: bottom - top, width: right - left }
    }

    /// Floats of all components' products for one panel of the largest area.
    pub fn product_floats(&self) -> usize {
        let (h, w) = (self.height.div_ceil(self.rows), self.width.div_ceil(self.columns));
        if self.winograd { COMPONENTS * h * w.div_ceil(2) * PANEL } else { 0 }
    }

    /// Floats of the band of the largest area, of the main input or the shortcut.
    pub fn band_floats(&self, layout: &ConvLayout) -> usize {
        let (h, w) = (self.height.div_ceil(self.rows), self.width.div_ceil(self.columns));
        let main = self.input_span(h) * self.band_columns(w) * (layout.cin as usize).next_multiple_of(BLOCK);
        main.max(h * w * (layout.shortcut.unwrap_or(0) as usize).next_multiple_of(BLOCK))
    }
}

/// Begin and end of part `index` of `parts` nearly equal parts of `whole`.
pub fn split_evenly(whole: usize, parts: usize, index: usize) -> (usize, usize) {
    (whole * index / parts, whole * (index + 1) / parts)
}

/// Groups that the panels of each of `units` areas are divided into, so that all threads finish together. Every group
/// prepares its own copy of the band, so fewer are better.
pub fn panel_groups(layout: &ConvLayout, units: usize, threads: usize) -> usize {
    let panels = panel_count(layout.cout as usize) * layout.window.phases() as usize;
    let band = PROLOGUE_COST / (layout.window.side() * layout.window.side()) as f64 / PANEL as f64;
    let time = |groups: usize| {
        let rounds = (units * groups).div_ceil(threads);
        rounds as f64 * (panels.div_ceil(groups) as f64 + band)
    };
    (1..=panels).min_by(|a, b| time(*a).total_cmp(&time(*b))).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::Prologue;

    fn layout(cin: u64, cout: u64, window: Window) -> ConvLayout {
        let prologue = Prologue::NormSilu;
        ConvLayout { cin, cout, window, prologue, slabs: 3, shortcut: None, biases: 1, groups: 1 }
    }

    #[test]
    fn areas_cover_the_grid_once_and_their_bands_fit() {
        for window in [Window::Point, Window::Same, Window::Down, Window::Up] {
            for (h, w) in [(2, 2), (4, 6), (34, 58), (270, 482), (1080, 1920), (2, 20_000), (20_000, 2)] {
                for cin in [3, 16, 128, 512] {
                    let layout = layout(cin, 128, window);
                    let g = OutputGrid::new(&layout, FrameShape::new(h, w, cin));
                    let mut covered = 0;
                    for index in 0..g.areas() {
                        let a = g.area(index);
                        assert!(a.height > 0 && a.width > 0 && a.top + a.height <= g.height);
                        assert!(a.left + a.width <= g.width);
                        covered += a.height * a.width;
                        let band =
                            g.input_span(a.height) * g.input_span(a.width) * (cin as usize).next_multiple_of(BLOCK);
                        assert!(band <= g.band_floats(&layout));
                    }
                    assert_eq!(covered, g.height * g.width);
                    assert!(g.band_floats(&layout) * 4 <= BAND_BYTES, "{window:?} {h}x{w}x{cin}: {g:?}");
                }
            }
        }
    }

    #[test]
    fn panels_are_divided_only_where_areas_are_few() {
        let layout = layout(512, 512, Window::Same);
        assert_eq!(panel_groups(&layout, 1000, 2), 1);
        assert_eq!(panel_groups(&layout, 1, 1), 1);
        assert_eq!(panel_groups(&layout, 1, 16), 16);
        assert_eq!(panel_groups(&layout, 2, 2), 1);
        assert_eq!(panel_groups(&layout, 1, 2), 2);
    }
}
