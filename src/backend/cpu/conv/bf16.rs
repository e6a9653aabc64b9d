//! Convolutions in bf16. A task goes through the frames of one area with some panels of output channels. It keeps the
//! bands of the last frames, because each serves up to three output frames.
//! The sum of an output runs through all terms in f32, in the order of terms, blocks of channels, taps and channels.

use std::ops::Range;

use half::bf16;

use super::band::{self, BandSize, BandSource};
use super::checked::CheckedConv;
use super::grid::{BANDS, OutputArea, SumTiles, bf16_division, split_evenly};
use super::pass::PanelPass;
use super::weights::ConvWeights;
use crate::backend::Stop;
use crate::backend::cpu::element::Element;
use crate::backend::cpu::memory::CpuMemory;
use crate::backend::cpu::pool::Pool;
use crate::backend::cpu::simd::{Bf16Kernels, BlockSum, BlockTerm, PANEL, TILE, panel_width};
use crate::error::Result;
use crate::ir::{ConvFrame, ConvOp, Offsets, Prologue, Term};

const BLOCK: usize = <bf16 as Element>::BLOCK;

pub(in crate::backend::cpu) fn run<S: Bf16Kernels>(
    pool: &Pool,
    memory: &mut CpuMemory,
    weights: &ConvWeights,
    op: &ConvOp<Offsets>,
    scratch_offset: u64,
    stop: &mut Stop,
) -> Result<()> {
    let conv = CheckedConv::new(pool.threads(), memory, weights, op, scratch_offset)?;
    let (frames, areas) = (op.frames.len(), conv.grid.areas());
    let (parts, groups) = bf16_division(&op.layout, frames, areas, pool.threads());
    pool.run(areas * parts * groups, stop, &|task, slot, stop| {
        let (unit, group) = (task / groups, task % groups);
        let index = unit / parts;
        let task = AreaTask { conv: &conv, index, area: conv.grid.area(index), slot };
        let (frames, panels) =
            (split_evenly(frames, parts, unit % parts), split_evenly(conv.panels * conv.phases(), groups, group));
        // SAFETY: `CheckedConv::new` checked every offset. Tasks differ in area, frames or panels, so no two write the
        // same outputs. No two tasks run on one slot at a time. The processor has `S`.
        unsafe { S::with_tiles(|| task.run::<S>(frames.0..frames.1, panels.0..panels.1, stop)) }
    })?;
    super::write_statistics(pool, &conv, stop)
}

/// What a band was made of.
#[derive(Clone, Copy, PartialEq, Eq)]
struct BandKey {
    frame: u64,
    /// Of a shortcut: the phase whose pixels it has.
    shortcut: Option<usize>,
}

#[derive(Clone, Copy)]
struct Band {
    key: BandKey,
    size: BandSize,
}

/// One area, on the thread with number `slot`.
struct AreaTask<'a> {
    conv: &'a CheckedConv<'a>,
    index: usize,
    area: OutputArea,
    slot: usize,
}

impl AreaTask<'_> {
    /// # Safety
    /// Nobody else uses the slot or writes these outputs. The processor has `S`, and this thread its tiles.
    unsafe fn run<S: Bf16Kernels>(&self, frames: Range<usize>, panels: Range<usize>, stop: &mut Stop) {
        let conv = self.conv;
        let mut bands = [None; BANDS];
        for (number, panel) in frames.flat_map(|frame| panels.clone().map(move |panel| (frame, panel))) {
            if stop() {
                return;
            }
            let pass = PanelPass {
                conv,
                frame: &conv.op.frames[number],
                area: self.area,
                phase: panel / conv.panels,
                panel: panel % conv.panels,
                moments: match conv.op.statistics {
                    true => conv.moments(number).wrapping_add(self.index * conv.panels * conv.phases() + panel),
                    false => std::ptr::null_mut(),
                },
            };
            // SAFETY: by this function's contract.
            unsafe { self.pass::<S>(&pass, &mut bands) };
        }
    }

    /// One panel of one frame.
    ///
    /// # Safety
    /// As [`AreaTask::run`].
    unsafe fn pass<S: Bf16Kernels>(&self, pass: &PanelPass, bands: &mut [Option<Band>; BANDS]) {
        let (conv, frame): (_, &ConvFrame<Offsets>) = (self.conv, pass.frame);
        let sums = conv.sums(self.slot);
        let tiles = conv.grid.sum_tiles(self.area.height, self.area.width);
        // SAFETY: by this function's contract. The slot has room for the bands and the sums.
        unsafe {
            if frame.terms.is_empty() {
                sums.write_bytes(0, tiles.tiles * TILE * PANEL);
            }
            for (group, terms) in frame.terms.chunks(BANDS).enumerate() {
                self.prepare_bands::<S>(terms, pass.phase, tiles, bands);
                self.add_terms::<S>(pass, terms, bands, tiles, group > 0);
            }
            for y in 0..self.area.height {
                pass.finish_row::<S, bf16>(y, Some(sums.add(y * tiles.pitch * PANEL)));
            }
        }
    }

    fn key(&self, term: &Term<Offsets>, phase: usize) -> BandKey {
        BandKey { frame: term.frame.0, shortcut: self.conv.is_shortcut(term).then_some(phase) }
    }

    fn band_at(&self, index: usize) -> *mut bf16 {
        self.conv.band(self.slot).wrapping_byte_add(index * self.conv.band_bytes()).cast()
    }

    /// Prepares those bands of `terms` that are not there yet, in place of others.
    ///
    /// # Safety
    /// As [`AreaTask::run`].
    unsafe fn prepare_bands<S: Bf16Kernels>(
        &self,
        terms: &[Term<Offsets>],
        phase: usize,
        tiles: SumTiles,
        bands: &mut [Option<Band>; BANDS],
    ) {
        for term in terms {
            let key = self.key(term, phase);
            if bands.iter().flatten().any(|band| band.key == key) {
                continue;
            }
            let is_free = |band: &Option<Band>| {
                band.is_none_or(|band| terms.iter().all(|term| self.key(term, phase) != band.key))
            };
            let free = bands.iter().position(is_free).unwrap_or(0);
            // SAFETY: by this function's contract; the slot has room for the band.
            let size = unsafe { self.prepare_band::<S>(term, phase, tiles, self.band_at(free)) };
            bands[free] = Some(Band { key, size });
        }
    }

    /// # Safety
    /// As [`AreaTask::run`].
    unsafe fn prepare_band<S: Bf16Kernels>(
        &self,
        term: &Term<Offsets>,
        phase: usize,
        tiles: SumTiles,
        into: *mut bf16,
    ) -> BandSize {
        let (conv, area) = (self.conv, self.area);
        let (layout, input) = (&conv.op.layout, conv.op.input);
        let frame: *const bf16 = conv.at(term.frame.0).cast();
        if conv.is_shortcut(term) {
            let source = BandSource {
                frame,
                height: conv.grid.height,
                width: conv.grid.width,
                channels: layout.shortcut.unwrap_or(0) as usize,
                prologue: Prologue::None,
                table: &[],
                spread: conv.grid.spread,
                phase: (phase / 2, phase % 2),
            };
            let size = BandSize { rows: area.height, columns: tiles.pitch };
            // SAFETY: by this function's contract; a shortcut has a pixel for every pixel of the output.
            unsafe { band::fill::<S, bf16>(&source, area.top as isize, area.left as isize, size, into) };
            return size;
        }
        let source = BandSource {
            frame,
            height: input.height as usize,
            width: input.width as usize,
            channels: layout.cin as usize,
            prologue: layout.prologue,
            // SAFETY: the slot is this task's.
            table: unsafe { conv.norm_table(term, self.slot) },
            spread: 1,
            phase: (0, 0),
        };
        // SAFETY: by this function's contract.
        unsafe { band::windowed::<S, bf16>(&source, &conv.grid, area, into) }
    }

    /// The products of up to [`BANDS`] terms, whose bands are there, added to the sums or written to them.
    ///
    /// # Safety
    /// As [`AreaTask::run`].
    unsafe fn add_terms<S: Bf16Kernels>(
        &self,
        pass: &PanelPass,
        terms: &[Term<Offsets>],
        bands: &[Option<Band>; BANDS],
        tiles: SumTiles,
        add: bool,
    ) {
        let layout = &self.conv.op.layout;
        let (channels, _) = panel_width(layout.cout as usize, pass.panel);
        let mut taps = [[0; 9]; BANDS];
        let mut inputs = [None; BANDS];
        for ((term, taps), input) in terms.iter().zip(&mut taps).zip(&mut inputs) {
            let key = self.key(term, pass.phase);
            let found = bands.iter().enumerate().find_map(|(i, band)| band.filter(|b| b.key == key).map(|b| (i, b)));
            *input = found.map(|(index, band)| self.term_input(pass, term, index, band.size, taps));
        }
        for first in (0..tiles.tiles).step_by(2) {
            let mut block = [BlockTerm::EMPTY; BANDS];
            for ((block, input), taps) in block.iter_mut().zip(inputs.iter().flatten()).zip(&taps) {
                let at =
                    [first, first + 1].map(|tile| input.band.wrapping_add(input.position(tile * TILE, tiles.pitch)));
                *block = BlockTerm { at, taps: &taps[..input.taps], ..input.block };
            }
            // SAFETY: the tiles are inside the sums, their positions and taps inside the bands or just past them.
            unsafe {
                S::block_sum(&BlockSum {
                    terms: &block[..terms.len()],
                    tiles: (tiles.tiles - first).min(2),
                    width: channels.next_multiple_of(TILE),
                    out: self.conv.sums(self.slot).add(first * TILE * PANEL),
                    add,
                });
            }
        }
    }

    /// What the blocks of a term have in common.
    fn term_input(
        &self,
        pass: &PanelPass,
        term: &Term<Offsets>,
        band: usize,
        size: BandSize,
        taps: &mut [usize; 9],
    ) -> TermInput {
        let (layout, grid) = (&self.conv.op.layout, &self.conv.grid);
        let shortcut = self.conv.is_shortcut(term);
        let side = if shortcut { 1 } else { layout.window.side() as usize };
        let stride = if shortcut { 1 } else { grid.stride };
        let (r, s) = if shortcut { (0, 0) } else { (pass.phase / 2, pass.phase % 2) };
        for (i, j) in (0..side).flat_map(|i| (0..side).map(move |j| (i, j))) {
            taps[i * side + j] = ((r + i) * size.columns + s + j) * BLOCK;
        }
        let cin = if shortcut { layout.shortcut.unwrap_or(0) } else { layout.cin } as usize;
        let weights = self.conv.weights.panel(usize::from(term.slab), pass.phase, pass.panel, 0).cast();
        let (step, block, blocks) = (stride * BLOCK, size.block::<bf16>(), cin.div_ceil(BLOCK));
        TermInput {
            band: self.band_at(band),
            columns: size.columns,
            stride,
            taps: side * side,
            block: BlockTerm { step, block, blocks, weights, ..BlockTerm::EMPTY },
        }
    }
}

/// A term of a pass.
#[derive(Clone, Copy)]
struct TermInput {
    band: *const bf16,
    columns: usize,
    stride: usize,
    taps: usize,
    block: BlockTerm<'static>,
}

impl TermInput {
    /// Offset in the band of a position of the sums, whose rows are `pitch` positions long.
    fn position(&self, position: usize, pitch: usize) -> usize {
        (position / pitch * self.columns + position % pitch) * self.stride * BLOCK
    }
}
