//! Convolutions in bf16. A task goes through the frames of one area with some panels of output channels. It keeps the
//! patches of the last frames, because each serves up to three output frames. A few frames share each read of weights.
//! An output is a sum in f32, in the order of terms, blocks of channels, taps and channels.

use std::ops::Range;

use half::bf16;

use super::grid::{PATCHES, RUN, SumTiles, split_evenly};
use super::patch::{self, PatchSize, PatchSource};
use super::{AreaTask, PatchKey};
use crate::backend::Stop;
use crate::backend::cpu::element::Element;
use crate::backend::cpu::simd::{
    AHEAD, Bf16Kernels, BlockProduct, MOST_TILES, PANEL, TILE, TermProduct, WEIGHT_TILE, panel_width,
};
use crate::ir::{ConvFrame, Offsets, Term};

const BLOCK: usize = <bf16 as Element>::BLOCK;

/// Terms of a frame: three slabs and a shortcut.
const MOST_TERMS: usize = 4;
/// Most weights of all terms of a panel that stay in the second-level cache beside patches.
const TERMS_BYTES: usize = 512 << 10;

/// Computes a task in bf16.
pub(in crate::backend::cpu) fn compute_bf16<S: Bf16Kernels>(task: &AreaTask, stop: &mut Stop) {
    // SAFETY: by the rules of `AreaTask`. The processor has `S`.
    unsafe { S::with_tiles(|| task.run_bf16::<S>(stop)) }
}

#[derive(Clone, Copy)]
struct Patch {
    key: PatchKey,
    size: PatchSize,
}

/// Frames of a run whose terms have the same slabs, so that they share each read of weights.
struct AlikeFrames {
    count: usize,
    numbers: [usize; RUN],
}

/// What is multiplied for a term of some frames.
#[derive(Clone, Copy)]
struct TermInput {
    patches: [*const bf16; RUN],
    size: PatchSize,
    /// Elements from one position of a tile to the next.
    step: usize,
    blocks: usize,
    taps: usize,
    /// Of a panel, and those that are needed after it.
    weights: *const bf16,
    next: Option<*const bf16>,
}

impl TermInput {
    const NONE: TermInput = TermInput {
        patches: [std::ptr::null(); RUN],
        size: PatchSize { rows: 0, columns: 0 },
        step: 0,
        blocks: 0,
        taps: 0,
        weights: std::ptr::null(),
        next: None,
    };

    /// The product with half a panel of weights, number `turn.0` of those with this panel. It prefetches its share of the
    /// next `turn.1` halves.
    fn product<'a>(&self, taps: &'a [usize], half: usize, turn: (usize, usize)) -> TermProduct<'a> {
        let steps = self.blocks * self.taps;
        let weights = self.weights.wrapping_add(half * steps * WEIGHT_TILE);
        let (before, all) = (turn.0 * steps * AHEAD, turn.1 * steps * WEIGHT_TILE);
        TermProduct {
            at: [std::ptr::null(); MOST_TILES],
            step: self.step,
            block: self.size.block::<bf16>(),
            blocks: self.blocks,
            taps,
            weights,
            ahead: self.next.filter(|_| before < all).map_or(weights, |next| next.wrapping_add(before)),
        }
    }
}

impl AreaTask<'_> {
    /// # Safety
    /// The processor has `S`, and this thread its tiles.
    unsafe fn run_bf16<S: Bf16Kernels>(&self, stop: &mut Stop) {
        let mut patches = [None; PATCHES];
        for first in self.units.clone().step_by(RUN) {
            for panel in self.panels.clone() {
                if stop() {
                    return;
                }
                let run = first..self.units.end.min(first + RUN);
                // SAFETY: by this function's contract.
                unsafe { self.panel_of_run::<S>(run, panel, panel + 1 < self.panels.end, &mut patches) };
            }
        }
    }

    /// One panel of up to [`RUN`] frames. `more`: the next panel follows.
    ///
    /// # Safety
    /// As [`AreaTask::run_bf16`].
    unsafe fn panel_of_run<S: Bf16Kernels>(
        &self,
        run: Range<usize>,
        panel: usize,
        more: bool,
        patches: &mut [Option<Patch>; PATCHES],
    ) {
        let frames = &self.conv.frames[run.clone()];
        let tiles = self.tiles();
        let slabs = |number: usize| frames[number].terms.iter().map(|term| term.slab);
        let has_all = self.has_room_for_patches(frames, panel / self.conv.panels);
        let mut done = [false; RUN];
        for first in 0..frames.len() {
            let mut alike = AlikeFrames { count: 0, numbers: [0; RUN] };
            let is_alike = |number: usize| number == first || has_all && slabs(number).eq(slabs(first));
            for number in (first..frames.len()).filter(|number| is_alike(*number)) {
                if !std::mem::replace(&mut done[number], true) {
                    alike.numbers[alike.count] = number;
                    alike.count += 1;
                }
            }
            let terms = if alike.count > 0 { frames[first].terms.len() } else { 0 };
            let together = if has_all { self.terms_together(terms) } else { 1 };
            for i in (0..terms).step_by(together) {
                // SAFETY: by this function's contract. The slot has room for the patches and the sums.
                unsafe { self.add_products::<S>(panel, more, frames, &alike, i..terms.min(i + together), patches) };
            }
        }
        for (number, frame) in frames.iter().enumerate() {
            let pass = self.pass(run.start + number, panel);
            // SAFETY: as above.
            unsafe {
                if frame.terms.is_empty() {
                    self.sums(number).write_bytes(0, tiles.tiles * TILE * PANEL);
                }
                for y in 0..self.area.height {
                    pass.finish_row::<S, bf16>(y, Some(self.sums(number).add(y * tiles.pitch * PANEL)));
                }
            }
        }
    }

    /// The weights of a term. Panels are numbered through all phases.
    fn weights(&self, panel: usize, term: &Term<Offsets>) -> *const bf16 {
        let (phase, panel) = (panel / self.conv.panels, panel % self.conv.panels);
        self.conv.weights.panel(usize::from(term.slab), phase, panel).cast()
    }

    fn tiles(&self) -> SumTiles {
        self.conv.grid.sum_tiles(self.area.height, self.area.width)
    }

    /// The patch of a term. If it is not there yet, it takes the place of one that no term of `frames` has.
    ///
    /// # Safety
    /// As [`AreaTask::run_bf16`].
    unsafe fn kept_patch<S: Bf16Kernels>(
        &self,
        frames: &[ConvFrame<Offsets>],
        term: &Term<Offsets>,
        phase: usize,
        patches: &mut [Option<Patch>; PATCHES],
    ) -> (*const bf16, PatchSize) {
        let key = self.key(term, phase);
        let found = patches.iter().position(|patch| patch.is_some_and(|patch| patch.key == key));
        let place = found.unwrap_or_else(|| {
            let is_needed = |key| frames.iter().flat_map(|frame| &frame.terms).any(|term| self.key(term, phase) == key);
            patches.iter().position(|patch| !patch.is_some_and(|patch| is_needed(patch.key))).unwrap_or(0)
        });
        let into = self.conv.patch(self.slot, place).cast();
        let size = match patches[place] {
            Some(patch) if found.is_some() => patch.size,
            // SAFETY: by this function's contract; the slot has room for the patch.
            _ => unsafe { self.prepare_bf16_patch::<S>(term, phase, into) },
        };
        patches[place] = Some(Patch { key, size });
        (into, size)
    }

    /// # Safety
    /// As [`AreaTask::run_bf16`].
    unsafe fn prepare_bf16_patch<S: Bf16Kernels>(
        &self,
        term: &Term<Offsets>,
        phase: usize,
        into: *mut bf16,
    ) -> PatchSize {
        let (conv, area) = (self.conv, self.area);
        // SAFETY: the slot is this task's.
        let source: PatchSource<bf16> = unsafe { conv.source(term, phase, self.slot, 0) };
        if conv.is_shortcut(term) {
            let size = PatchSize { rows: area.height, columns: self.tiles().pitch };
            // SAFETY: by this function's contract.
            unsafe { patch::fill::<S, bf16>(&source, area.top as isize, area.left as isize, size, into) };
            return size;
        }
        // SAFETY: by this function's contract.
        unsafe { patch::windowed::<S, bf16>(&source, &conv.grid, area, into) }
    }

    /// Terms whose products are added while the sums are in tiles: all, if their weights leave room for patches in the
    /// second-level cache.
    fn terms_together(&self, terms: usize) -> usize {
        let layout = &self.conv.op.layout;
        let panel = (layout.window.side() * layout.window.side() * layout.cin) as usize * PANEL * size_of::<bf16>();
        if terms * panel <= TERMS_BYTES { terms.clamp(1, MOST_TERMS) } else { 1 }
    }

    /// Whether the slot has room for the patches of all terms of some frames.
    fn has_room_for_patches(&self, frames: &[ConvFrame<Offsets>], phase: usize) -> bool {
        let mut keys = [None; PATCHES];
        frames.iter().flat_map(|frame| &frame.terms).all(|term| {
            let key = Some(self.key(term, phase));
            let place = keys.iter_mut().find(|place| place.is_none() || **place == key);
            place.map(|place| *place = key).is_some()
        })
    }

    /// Adds the products of some terms to the sums of frames. The first term replaces the sums. `more`: the next panel
    /// follows.
    ///
    /// # Safety
    /// As [`AreaTask::run_bf16`].
    unsafe fn add_products<S: Bf16Kernels>(
        &self,
        panel: usize,
        more: bool,
        frames: &[ConvFrame<Offsets>],
        alike: &AlikeFrames,
        terms: Range<usize>,
        patches: &mut [Option<Patch>; PATCHES],
    ) {
        let (conv, tiles) = (self.conv, self.tiles());
        let numbers = &alike.numbers[..alike.count];
        let of_first = &frames[numbers[0]].terms;
        let mut inputs = [TermInput::NONE; MOST_TERMS];
        let mut taps = [[0; 9]; MOST_TERMS];
        for (i, (input, taps)) in terms.clone().zip(inputs.iter_mut().zip(&mut taps)) {
            // SAFETY: by this function's contract.
            unsafe {
                for (patch, number) in input.patches.iter_mut().zip(numbers) {
                    let term = &frames[*number].terms[i];
                    (*patch, input.size) = self.kept_patch::<S>(frames, term, panel / conv.panels, patches);
                }
            }
            // The terms that follow, or those of the next panel.
            let next = match of_first.get(i + terms.len()) {
                Some(term) => Some(self.weights(panel, term)),
                None => more.then(|| self.weights(panel + 1, &of_first[i % terms.len()])),
            };
            (input.weights, input.next) = (self.weights(panel, &of_first[i]), next);
            self.find_taps(panel, &of_first[i], input, taps);
        }
        let (channels, _) = panel_width(conv.op.layout.cout as usize, panel % conv.panels);
        let (all, halves) = (alike.count * tiles.tiles, channels.div_ceil(TILE));
        let groups = all.div_ceil(MOST_TILES);
        for (group, half) in (0..groups).flat_map(|group| (0..halves).map(move |half| (group, half))) {
            let (first, end) = split_evenly(all, groups, group);
            let mut sums = [std::ptr::null_mut(); MOST_TILES];
            let mut products = [TermProduct::NONE; MOST_TERMS];
            for (product, (input, taps)) in products.iter_mut().zip(inputs.iter().zip(&taps)).take(terms.len()) {
                *product = input.product(&taps[..input.taps], half, (group * halves + half, halves));
            }
            for (i, tile) in (first..end).enumerate() {
                let (frame, tile) = (tile / tiles.tiles, tile % tiles.tiles);
                let (y, x) = (tile * TILE / tiles.pitch, tile * TILE % tiles.pitch);
                for (product, input) in products.iter_mut().zip(&inputs).take(terms.len()) {
                    product.at[i] = input.patches[frame].wrapping_add((y * input.size.columns + x) * input.step);
                }
                sums[i] = self.sums(numbers[frame]).wrapping_add(tile * TILE * PANEL + half * TILE);
            }
            // SAFETY: the tiles are inside the sums, their positions and taps inside the patches or just past them.
            unsafe {
                S::product(&BlockProduct {
                    terms: &products[..terms.len()],
                    tiles: end - first,
                    sums,
                    add: terms.start > 0,
                });
            }
        }
    }

    /// Finds the taps of a term in its patches.
    fn find_taps(&self, panel: usize, term: &Term<Offsets>, input: &mut TermInput, taps: &mut [usize; 9]) {
        let (layout, phase) = (&self.conv.op.layout, panel / self.conv.panels);
        let (cin, side, stride, r, s) = match layout.shortcut {
            Some(cin) if self.conv.is_shortcut(term) => (cin, 1, 1, 0, 0),
            _ => (layout.cin, layout.window.side() as usize, self.conv.grid.stride, phase / 2, phase % 2),
        };
        for (i, j) in (0..side).flat_map(|i| (0..side).map(move |j| (i, j))) {
            taps[i * side + j] = ((r + i) * input.size.columns + s + j) * BLOCK;
        }
        (input.blocks, input.taps, input.step) = ((cin as usize).div_ceil(BLOCK), side * side, stride * BLOCK);
    }

    /// The sums of a frame of the run: [position][one panel of channels].
    fn sums(&self, number: usize) -> *mut f32 {
        self.conv.sums(self.slot).wrapping_add(number * self.conv.grid.sum_floats())
    }
}
