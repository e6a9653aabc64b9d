//! How a convolution is cut into areas. A function of shapes alone, so that the statistics, which are summed area by
//! area, come out the same on any number of threads.

use super::kernel::{BLOCK, PANEL};
use super::{pack, pairs};
use crate::backend::{ConvLayout, Window};
use crate::tensor::FrameShape;

/// A band is to stay in the second-level cache, beside a panel of weights.
const BAND_BYTES: usize = 1 << 20;
/// Keeps the output of an area near as well, where the input has few channels.
const AREA_PIXELS: usize = 2048;
/// What a tile of the kernel costs beyond its pixels, in pixels.
const TILE_COST: f64 = 1.0;
/// Vector instructions of the prologue on one vector, against one multiplication of the kernel.
const PROLOGUE_COST: f64 = 40.0;

/// The output as a grid of `height` x `width` pixels: all of it, or those of one phase.
#[derive(Debug, Clone, Copy)]
pub(super) struct Geometry {
    pub height: usize,
    pub width: usize,
    /// Input pixels from one output pixel to the next.
    pub stride: usize,
    /// Rows and columns of input that an output pixel sees, all phases together.
    pub reach: usize,
    /// How far the first of them lies before the pixel.
    pub before: usize,
    /// Output pixels from one pixel of the grid to the next.
    pub spread: usize,
    /// Whether output pixels are computed in pairs, see [`pairs`].
    pub paired: bool,
    /// Areas in a column and in a row.
    pub rows: usize,
    pub columns: usize,
}

/// A rectangle of the grid.
#[derive(Debug, Clone, Copy)]
pub(super) struct Area {
    pub top: usize,
    pub left: usize,
    pub height: usize,
    pub width: usize,
}

impl Geometry {
    pub fn new(layout: &ConvLayout, input: FrameShape) -> Geometry {
        let (height, width) = (input.height as usize, input.width as usize);
        let grid = |height, width, stride, reach, before, spread| Geometry {
            height,
            width,
            stride,
            reach,
            before,
            spread,
            paired: pairs::paired(layout),
            rows: height,
            columns: width,
        };
        let mut geometry = match layout.window {
            Window::Point => grid(height, width, 1, 1, 0, 1),
            Window::Same => grid(height, width, 1, 3, 1, 1),
            Window::Down => grid(height / 2, width / 2, 2, 3, 0, 1),
            Window::Up => grid(height, width, 1, 3, 1, 2),
        };
        geometry.divide(layout);
        geometry
    }

    /// The number of areas that makes the least work: wide ones for the kernel, square ones for the halo.
    fn divide(&mut self, layout: &ConvLayout) {
        let cin = layout.cin.max(layout.shortcut.unwrap_or(0)) as usize;
        let pixels = BAND_BYTES / (cin.next_multiple_of(BLOCK) * 4);
        let prologue = PROLOGUE_COST / (layout.window.taps() * layout.cout) as f64;
        let mut best = f64::INFINITY;
        let (height, width) = (self.height, self.width);
        for columns in 1..=width {
            let w = width.div_ceil(columns);
            let fits = pixels / self.columns_of_band(w);
            let h = if fits < self.reach { 1 } else { (fits - self.reach) / self.stride + 1 };
            let h = h.min((AREA_PIXELS / w).max(1)).min(height);
            let rows = height.div_ceil(h);
            let h = height.div_ceil(rows);
            let halo = (self.extent(h) * self.extent(w)) as f64 / (h * w) as f64;
            let tiles = match self.paired {
                true => (pairs::PARTS * (h * w.div_ceil(2)).div_ceil(14)) as f64 / (h * w) as f64,
                false => w.div_ceil(14) as f64 / w as f64,
            };
            let cost = halo * prologue + tiles * TILE_COST;
            // A single row too wide for the cache is taken only where nothing narrower is left.
            let spills = fits < self.reach && w > 1;
            if !spills && cost < best {
                (best, self.rows, self.columns) = (cost, rows, columns);
            }
        }
    }

    /// Input pixels that a run of output pixels sees.
    pub fn extent(&self, run: usize) -> usize {
        (run - 1) * self.stride + self.reach
    }

    /// Pixels of a band for a run of output pixels in a row.
    fn columns_of_band(&self, run: usize) -> usize {
        if self.paired { pairs::PARTS * run.div_ceil(2) } else { self.extent(run) }
    }

    pub fn areas(&self) -> usize {
        self.rows * self.columns
    }

    pub fn area(&self, index: usize) -> Area {
        let (top, bottom) = part(self.height, self.rows, index / self.columns);
        let (left, right) = part(self.width, self.columns, index % self.columns);
        Area { top, left, height: bottom - top, width: right - left }
    }

    /// Floats of the products of all parts for one panel of the largest area.
    pub fn products(&self) -> usize {
        let (h, w) = (self.height.div_ceil(self.rows), self.width.div_ceil(self.columns));
        if self.paired { pairs::PARTS * h * w.div_ceil(2) * PANEL } else { 0 }
    }

    /// Floats of the band of the largest area, of the main input or the shortcut.
    pub fn band(&self, layout: &ConvLayout) -> usize {
        let (h, w) = (self.height.div_ceil(self.rows), self.width.div_ceil(self.columns));
        let main = self.extent(h) * self.columns_of_band(w) * (layout.cin as usize).next_multiple_of(BLOCK);
        main.max(h * w * (layout.shortcut.unwrap_or(0) as usize).next_multiple_of(BLOCK))
    }
}

/// The `index`th of `parts` nearly equal parts of `whole`.
pub(super) fn part(whole: usize, parts: usize, index: usize) -> (usize, usize) {
    (whole * index / parts, whole * (index + 1) / parts)
}

/// In how many groups to deal out the panels of `units` areas, so that the threads finish together. Each group
/// prepares the band anew, which is why fewer are better.
pub(super) fn groups(layout: &ConvLayout, units: usize, threads: usize) -> usize {
    let panels = pack::panels(layout.cout as usize) * layout.window.phases() as usize;
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
    use crate::backend::Prologue;

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
                    let g = Geometry::new(&layout, FrameShape::new(h, w, cin));
                    let mut covered = 0;
                    for index in 0..g.areas() {
                        let a = g.area(index);
                        assert!(a.height > 0 && a.width > 0 && a.top + a.height <= g.height);
                        assert!(a.left + a.width <= g.width);
                        covered += a.height * a.width;
                        let band = g.extent(a.height) * g.extent(a.width) * (cin as usize).next_multiple_of(BLOCK);
                        assert!(band <= g.band(&layout));
                    }
                    assert_eq!(covered, g.height * g.width);
                    assert!(g.band(&layout) * 4 <= BAND_BYTES, "{window:?} {h}x{w}x{cin}: {g:?}");
                }
            }
        }
    }

    #[test]
    fn panels_are_dealt_out_only_where_areas_are_few() {
        let layout = layout(512, 512, Window::Same);
        assert_eq!(groups(&layout, 1000, 2), 1);
        assert_eq!(groups(&layout, 1, 1), 1);
        assert_eq!(groups(&layout, 1, 16), 16);
        assert_eq!(groups(&layout, 2, 2), 1);
        assert_eq!(groups(&layout, 1, 2), 2);
    }
}
