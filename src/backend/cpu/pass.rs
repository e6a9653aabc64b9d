//! One panel of a convolution over one area: the tiles of a term, and the rows after the last one.

use super::band::Extent;
use super::conv::Job;
use super::geometry::{Area, part};
use super::kernel::{BLOCK, FEW, FEW_PIXELS, PANEL, Tile, dots};
use super::norm::{Moments, Row};
use super::pack;
use super::pairs::{Join, PARTS};
use super::simd::Simd;
use crate::backend::{ConvFrame, Term, Window};

/// What a term is computed from.
#[derive(Clone, Copy)]
pub(super) struct Input {
    pub band: *const f32,
    pub extent: Extent,
    /// Room for the products of a panel, where pixels are computed in pairs.
    pub products: *mut f32,
}

/// One panel of one phase over one area.
pub(super) struct Pass<'a> {
    pub job: &'a Job<'a>,
    pub frame: &'a ConvFrame,
    pub area: Area,
    pub phase: usize,
    pub panel: usize,
}

impl Pass<'_> {
    /// Adds a term; after the last one, which has `finish`, each row is finished as soon as its sums are.
    ///
    /// # Safety
    /// As [`Job::area`], and the band is that of the term.
    pub unsafe fn term<S: Simd>(&self, term: &Term, add: bool, input: Input, finish: Option<*mut Moments>) {
        let layout = self.job.op.layout;
        let shortcut = u64::from(term.slab) == layout.slabs;
        if self.job.geometry.paired && !shortcut {
            // SAFETY: as the caller vouches.
            return unsafe { self.pairs::<S>(term, add, input, finish) };
        }
        let Input { band, extent, .. } = input;
        let side = if shortcut { 1 } else { layout.window.side() as usize };
        let stride = if shortcut { 1 } else { self.job.geometry.stride };
        let (r, s) = if shortcut { (0, 0) } else { (self.phase / 2, self.phase % 2) };
        let mut taps = [0; 9];
        for i in 0..side {
            for j in 0..side {
                taps[i * side + j] = ((r + i) * extent.columns + s + j) * BLOCK;
            }
        }
        let (channels, width) = pack::panel(layout.cout as usize, self.panel);
        let mut tile = Tile {
            band,
            block: extent.block(),
            step: stride * BLOCK,
            taps: &taps[..side * side],
            cin: if shortcut { layout.shortcut.unwrap_or(0) } else { layout.cin } as usize,
            weights: self.job.conv.weights(usize::from(term.slab), self.phase, self.panel, 0),
            width,
            out: std::ptr::null_mut(),
            out_step: self.step(),
            add,
        };
        let few = width <= FEW;
        let tiles = self.area.width.div_ceil(if few { FEW_PIXELS } else { S::PIXELS });
        for y in 0..self.area.height {
            // SAFETY: tiles lie inside the area, and their taps inside its band.
            unsafe {
                let out = self.row(y, self.frame.out.0);
                for index in 0..tiles {
                    let (left, right) = part(self.area.width, tiles, index);
                    tile.band = band.add((y * extent.columns + left) * stride * BLOCK);
                    tile.out = out.add(left * self.step());
                    if few {
                        dots::<S>(&tile, right - left);
                    } else if channels == width {
                        S::tile(&tile, right - left);
                    } else {
                        narrow::<S>(&tile, right - left, channels);
                    }
                }
                if let Some(moments) = finish {
                    self.finish::<S>(y, moments);
                }
            }
        }
    }

    /// A term in pairs of pixels: part by part, so that the weights of one stay near for the whole area.
    ///
    /// # Safety
    /// As [`Pass::term`].
    unsafe fn pairs<S: Simd>(&self, term: &Term, add: bool, input: Input, finish: Option<*mut Moments>) {
        let layout = self.job.op.layout;
        let Input { band, extent, products } = input;
        let (channels, width) = pack::panel(layout.cout as usize, self.panel);
        let taps = [0, 1, 2].map(|row| row * extent.columns * BLOCK);
        let planes = (layout.cin as usize).div_ceil(BLOCK) * extent.block();
        let pairs = self.area.height * extent.columns;
        let tiles = pairs.div_ceil(S::PIXELS);
        // SAFETY: tiles lie inside the area, and their taps inside its band; there is room for the products of all pairs.
        unsafe {
            for (number, index) in (0..PARTS).flat_map(|number| (0..tiles).map(move |index| (number, index))) {
                let (first, end) = part(pairs, tiles, index);
                let tile = Tile {
                    band: band.add(number * planes + first * BLOCK),
                    block: extent.block(),
                    step: BLOCK,
                    taps: &taps,
                    cin: layout.cin as usize,
                    weights: self.job.conv.weights(usize::from(term.slab), self.phase, self.panel, number),
                    width,
                    out: products.add((number * pairs + first) * PANEL),
                    out_step: PANEL,
                    add: false,
                };
                S::tile(&tile, end - first);
            }
            for y in 0..self.area.height {
                S::enter(Join {
                    products: products.add(y * extent.columns * PANEL),
                    part: pairs * PANEL,
                    out: self.row(y, self.frame.out.0),
                    step: self.step(),
                    pixels: self.area.width,
                    channels,
                    add,
                });
                if let Some(moments) = finish {
                    self.finish::<S>(y, moments);
                }
            }
        }
    }

    /// A sum without summands.
    ///
    /// # Safety
    /// As [`Job::area`].
    pub unsafe fn nothing<S: Simd>(&self, moments: *mut Moments) {
        let (channels, _) = pack::panel(self.job.op.layout.cout as usize, self.panel);
        for y in 0..self.area.height {
            // SAFETY: inside the area.
            unsafe {
                for x in 0..self.area.width {
                    self.row(y, self.frame.out.0).add(x * self.step()).write_bytes(0, channels);
                }
                self.finish::<S>(y, moments);
            }
        }
    }

    /// # Safety
    /// As [`Job::area`].
    unsafe fn finish<S: Simd>(&self, y: usize, moments: *mut Moments) {
        let layout = self.job.op.layout;
        let geometry = &self.job.geometry;
        let (channels, _) = pack::panel(layout.cout as usize, self.panel);
        let bias = |edge| {
            let bias = self.job.conv.bias(usize::from(self.frame.bias), self.phase, edge);
            bias.wrapping_add(self.panel * PANEL)
        };
        let (mut inner, mut edge) = (0, None);
        if layout.window == Window::Up {
            let outer = |phase, length: usize| if phase == 0 { 0 } else { length - 1 };
            inner = usize::from(self.area.top + y == outer(self.phase / 2, geometry.height));
            let column = outer(self.phase % 2, geometry.width);
            let here = column.checked_sub(self.area.left).filter(|x| *x < self.area.width);
            edge = here.map(|x| (x, bias(inner + 2)));
        }
        // SAFETY: the row lies inside the area, and a residual has the output's shape.
        unsafe {
            let row = Row {
                out: self.row(y, self.frame.out.0),
                step: self.step(),
                pixels: self.area.width,
                channels,
                bias: bias(inner),
                edge,
                residual: self.frame.residual.map_or(std::ptr::null(), |frame| self.row(y, frame.0).cast_const()),
            };
            row.finish::<S>(moments, y);
        }
    }

    /// Floats from a pixel of the phase to the next in the output.
    fn step(&self) -> usize {
        self.job.geometry.spread * self.job.op.layout.cout as usize
    }

    /// The panel's first channel in the first pixel of row `y` of the area, in a frame of the output's shape.
    ///
    /// # Safety
    /// The frame lies in memory.
    unsafe fn row(&self, y: usize, frame: u64) -> *mut f32 {
        let (spread, output) = (self.job.geometry.spread, &self.job.output);
        let row = (self.area.top + y) * spread + self.phase / 2;
        let column = self.area.left * spread + self.phase % 2;
        let pixel = row * output.width as usize + column;
        // SAFETY: a pixel of the output.
        unsafe { self.job.at(frame).add(pixel * output.channels as usize + self.panel * PANEL) }
    }
}

/// A tile of a panel with fewer channels than it is wide, by way of a buffer that has room for all.
///
/// # Safety
/// As [`Simd::tile`].
#[inline(never)]
unsafe fn narrow<S: Simd>(tile: &Tile, pixels: usize, channels: usize) {
    let mut buffer = [0.0f32; 16 * PANEL];
    // SAFETY: no instruction set has tiles of more than 16 pixels; of the output only its own channels are touched.
    unsafe {
        if tile.add {
            for pixel in 0..pixels {
                let from = tile.out.add(pixel * tile.out_step);
                from.copy_to_nonoverlapping(buffer.as_mut_ptr().add(pixel * PANEL), channels);
            }
        }
        let whole = Tile { out: buffer.as_mut_ptr(), out_step: PANEL, ..*tile };
        S::tile(&whole, pixels);
        for pixel in 0..pixels {
            let into = tile.out.add(pixel * tile.out_step);
            into.copy_from_nonoverlapping(buffer.as_ptr().add(pixel * PANEL), channels);
        }
    }
}
