//! One panel of a convolution over one area: the tiles of each term, and the epilogue after the last.

use super::checked::CheckedConv;
use super::epilogue::EpilogueRow;
use super::grid::{OutputArea, split_evenly};
use super::patch::PreparedPatch;
use crate::backend::cpu::element::Element;
use crate::backend::cpu::norm::Moments;
use crate::backend::cpu::simd::{BLOCK, DOT_CHANNELS, DOT_PIXELS, MicroTile, Microkernels, PANEL, Simd, dot_tile};
use crate::ir::{ConvFrame, Offsets, Term, Window};

/// One panel of one phase over one area.
pub struct PanelPass<'a> {
    pub conv: &'a CheckedConv<'a>,
    pub frame: &'a ConvFrame<Offsets>,
    pub area: OutputArea,
    pub phase: usize,
    pub panel: usize,
    /// Of this panel and area; null if the operation takes no statistics.
    pub moments: *mut Moments,
}

impl PanelPass<'_> {
    /// Computes a term, added to the output or written to it. With the `last` term, each row gets its epilogue at once.
    ///
    /// # Safety
    /// Nobody else writes this panel of the area, the patch is that of the term, and the processor has `S`.
    pub unsafe fn add_term<S: Microkernels>(
        &self,
        term: &Term<Offsets>,
        add: bool,
        patch: PreparedPatch<f32>,
        last: bool,
    ) {
        let PreparedPatch { at: patch, size } = patch;
        let layout = &self.conv.op.layout;
        let shortcut = self.conv.is_shortcut(term);
        let side = if shortcut { 1 } else { layout.window.side() as usize };
        let stride = if shortcut { 1 } else { self.conv.grid.stride };
        let (r, s) = if shortcut { (0, 0) } else { (self.phase / 2, self.phase % 2) };
        let mut taps = [0; 9];
        for i in 0..side {
            for j in 0..side {
                taps[i * side + j] = ((r + i) * size.columns + s + j) * BLOCK;
            }
        }
        let (channels, width) = self.conv.panel_width(self.panel);
        let mut tile = MicroTile {
            patch,
            block: size.block::<f32>(),
            step: stride * BLOCK,
            taps: &taps[..side * side],
            cin: if shortcut { layout.shortcut.unwrap_or(0) } else { layout.cin } as usize,
            weights: self.conv.weights.panel(usize::from(term.slab), self.phase, self.panel),
            width,
            out: std::ptr::null_mut(),
            out_step: self.step(),
            add,
            later: std::ptr::null(),
        };
        let panel = side * side * tile.cin * width;
        let dots = width <= DOT_CHANNELS;
        let tiles = self.area.width.div_ceil(if dots { DOT_PIXELS } else { S::PIXELS });
        for y in 0..self.area.height {
            // SAFETY: tiles are inside the area, and their taps inside its patch.
            unsafe {
                let out = self.out_row(y);
                for index in 0..tiles {
                    let (left, right) = split_evenly(self.area.width, tiles, index);
                    tile.patch = patch.add((y * size.columns + left) * stride * BLOCK);
                    tile.out = out.add(left * self.step());
                    tile.prefetch_later(tile.weights.wrapping_add(panel), panel, y * tiles + index);
                    if dots {
                        dot_tile::<S>(&tile, right - left);
                    } else if channels == width {
                        S::tile(&tile, right - left);
                    } else {
                        padded_tile::<S>(&tile, right - left, channels);
                    }
                }
                if last {
                    self.finish_row::<S, f32>(y, None);
                }
            }
        }
    }

    /// The output of a frame without terms.
    ///
    /// # Safety
    /// As [`PanelPass::add_term`].
    pub unsafe fn write_empty_sum<S: Microkernels>(&self) {
        let (channels, _) = self.conv.panel_width(self.panel);
        for y in 0..self.area.height {
            // SAFETY: inside the area.
            unsafe {
                for x in 0..self.area.width {
                    self.out_row(y).add(x * self.step()).write_bytes(0, channels);
                }
                self.finish_row::<S, f32>(y, None);
            }
        }
    }

    /// The epilogue of row `y`. Its sums are in the output, or [pixel][one panel of channels] at `sums`.
    ///
    /// # Safety
    /// As [`PanelPass::add_term`].
    pub unsafe fn finish_row<S: Simd, E: Element>(&self, y: usize, sums: Option<*const f32>) {
        let layout = &self.conv.op.layout;
        let grid = &self.conv.grid;
        let (channels, _) = self.conv.panel_width(self.panel);
        let bias = |edge| {
            let bias = self.conv.weights.bias(usize::from(self.frame.bias), self.phase, edge);
            bias.wrapping_add(self.panel * PANEL)
        };
        let (mut inner, mut edge) = (0, None);
        if layout.window == Window::Up {
            let outer = |phase, length: usize| if phase == 0 { 0 } else { length - 1 };
            inner = usize::from(self.area.top + y == outer(self.phase / 2, grid.height));
            let column = outer(self.phase % 2, grid.width);
            let here = column.checked_sub(self.area.left).filter(|x| *x < self.area.width);
            edge = here.map(|x| (x, bias(inner + 2)));
        }
        // SAFETY: the row is inside the area, and a residual has the output's shape.
        unsafe {
            let out = self.row::<E>(y, self.frame.out.0);
            let row = EpilogueRow {
                sums: sums.unwrap_or(out.cast_const().cast()),
                sum_step: if sums.is_some() { PANEL } else { self.step() },
                out,
                step: self.step(),
                pixels: self.area.width,
                channels,
                bias: bias(inner),
                edge,
                residual: self.frame.residual.map_or(std::ptr::null(), |frame| self.row::<E>(y, frame.0).cast_const()),
            };
            row.finish::<S>(self.moments, y);
        }
    }

    /// The panel's channels in row `y` of the output.
    ///
    /// # Safety
    /// The row is inside the area.
    pub unsafe fn out_row(&self, y: usize) -> *mut f32 {
        // SAFETY: by this function's contract.
        unsafe { self.row(y, self.frame.out.0) }
    }

    /// Stride of the phase's pixels in the output.
    fn step(&self) -> usize {
        self.conv.grid.spread * self.conv.op.layout.cout as usize
    }

    /// The panel's first channel in the first pixel of row `y` of the area, in a frame of the output's shape.
    ///
    /// # Safety
    /// `frame` is an offset that was checked.
    unsafe fn row<E: Element>(&self, y: usize, frame: u64) -> *mut E {
        let (spread, output) = (self.conv.grid.spread, &self.conv.output);
        let row = (self.area.top + y) * spread + self.phase / 2;
        let column = self.area.left * spread + self.phase % 2;
        let pixel = row * output.width as usize + column;
        // SAFETY: a pixel of the output.
        unsafe { self.conv.at(frame).cast::<E>().add(pixel * output.channels as usize + self.panel * PANEL) }
    }
}

/// A tile of a padded panel, through a buffer that has room for the padding.
///
/// # Safety
/// As [`Microkernels::tile`].
#[inline(never)]
unsafe fn padded_tile<S: Microkernels>(tile: &MicroTile, pixels: usize, channels: usize) {
    let mut buffer = [0.0f32; 16 * PANEL];
    // SAFETY: tiles have at most 16 pixels; only the panel's own channels of the output are touched.
    unsafe {
        if tile.add {
            for pixel in 0..pixels {
                let from = tile.out.add(pixel * tile.out_step);
                from.copy_to_nonoverlapping(buffer.as_mut_ptr().add(pixel * PANEL), channels);
            }
        }
        let whole = MicroTile { out: buffer.as_mut_ptr(), out_step: PANEL, ..*tile };
        S::tile(&whole, pixels);
        for pixel in 0..pixels {
            let into = tile.out.add(pixel * tile.out_step);
            into.copy_from_nonoverlapping(buffer.as_ptr().add(pixel * PANEL), channels);
        }
    }
}
