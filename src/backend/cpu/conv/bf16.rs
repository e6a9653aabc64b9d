//! Convolutions in bf16. A task goes through the frames of one area with some panels of output channels. It keeps the
//! patches of the last frames, because each serves up to three output frames. A few frames share each read of weights.
//! An output is a sum in f32, in the order of terms, blocks of channels, taps and channels.
//!
//! The frames of a pair share two sums of products. Their sum and their difference are then the sums of the two frames,
//! to which the own products of each and its shortcut are added. A frame alone has the same products in the same order.

use std::ops::Range;

use half::bf16;

use super::grid::{PAIR_INPUTS, PATCHES, RUN, SumTiles, split_evenly};
use super::patch::{self, KeptInputs, PatchSize, PreparedPatch};
use super::winograd::ShareProducts;
use super::{AreaTask, PatchKey};
use crate::backend::Stop;
use crate::backend::cpu::element::Element;
use crate::backend::cpu::simd::{AHEAD, Bf16Kernels, BlockProduct, MOST_TILES, PANEL, TILE, WEIGHT_TILE, panel_width};
use crate::ir::{ConvFrame, FrameUnit, Offsets, Term};

const BLOCK: usize = <bf16 as Element>::BLOCK;

/// Products of all convolutions in bf16, for measurements; those of positions in the halo are not counted.
#[cfg(test)]
pub(in crate::backend::cpu) static PRODUCTS: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);

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

/// The patches of a pair: so many are kept, d2 and d3, which the next pair reads; then those of its products; then its
/// shortcuts.
const KEPT: usize = 2;
const SHORTCUTS: usize = KEPT + PAIR_INPUTS;
const _: () = assert!(SHORTCUTS + 2 <= PATCHES && RUN >= 2);

/// Products of a patch and the weights of a term, which are added to a sum or begin it.
struct PairStep<'a> {
    patch: usize,
    size: PatchSize,
    term: &'a Term<Offsets>,
    sum: usize,
    add: bool,
}

/// The frames of a pair that are there, each with its number in the pair.
fn frames_of(pair: [Option<usize>; 2]) -> impl Iterator<Item = (usize, usize)> {
    pair.into_iter().enumerate().filter_map(|(number, frame)| Some((number, frame?)))
}

impl AreaTask<'_> {
    /// # Safety
    /// The processor has `S`, and this thread its tiles.
    unsafe fn run_bf16<S: Bf16Kernels>(&self, stop: &mut Stop) {
        let mut patches = [None; PATCHES];
        if self.conv.op.layout.pairs.is_some() {
            // SAFETY: by this function's contract.
            return unsafe { self.run_units::<S>(&mut patches, stop) };
        }
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

    /// Single frames and pairs, one after the other.
    ///
    /// # Safety
    /// As [`AreaTask::run_bf16`].
    unsafe fn run_units<S: Bf16Kernels>(&self, patches: &mut [Option<Patch>; PATCHES], stop: &mut Stop) {
        for unit in &self.conv.units[self.units.clone()] {
            let steps = match *unit {
                FrameUnit::Single(_) => {
                    // Patches that a pair has kept have no borders.
                    *patches = [None; PATCHES];
                    Vec::new()
                }
                // SAFETY: by this function's contract.
                FrameUnit::Pair(pair) => unsafe { self.prepare_pair::<S>(pair, patches) },
            };
            for panel in self.panels.clone() {
                if stop() {
                    return;
                }
                let more = panel + 1 < self.panels.end;
                // SAFETY: by this function's contract.
                unsafe {
                    match *unit {
                        FrameUnit::Single(frame) => self.panel_of_run::<S>(frame..frame + 1, panel, more, patches),
                        FrameUnit::Pair(pair) => self.panel_of_pair::<S>(pair, panel, more, &steps),
                    }
                }
            }
        }
    }

    /// Prepares the patches of a pair, or of one frame of it.
    ///
    /// # Safety
    /// As [`AreaTask::run_bf16`].
    unsafe fn prepare_pair<S: Bf16Kernels>(
        &self,
        pair: [Option<usize>; 2],
        patches: &mut [Option<Patch>; PATCHES],
    ) -> Vec<PairStep<'_>> {
        let conv = self.conv;
        let at = |place: usize| conv.patch(self.slot, place).cast::<bf16>();
        let inputs = conv.pair_inputs(pair);
        let keys = inputs.map(|term| term.map(|term| self.key(term, 0)));
        let place_of = |key: PatchKey| patches[..KEPT].iter().position(|patch| patch.is_some_and(|p| p.key == key));
        let kept = KeptInputs {
            from: [keys[0], keys[1]].map(|key| key.and_then(place_of).map(|place| at(place).cast_const())),
            into: [0, 1].map(|i| keys[i + 2].map(|_| at(i))),
        };
        // SAFETY: the slot has room for a table of each input and for all patches.
        let size = unsafe {
            let sources = [0, 1, 2, 3].map(|i| inputs[i].map(|term| conv.source(term, 0, self.slot, i)));
            let into = [0, 1, 2, 3].map(|i| at(KEPT + i));
            patch::windowed_pair::<S, bf16>(&sources, &conv.grid, self.area, kept, into)
        };
        *patches = [None; PATCHES];
        for (patch, key) in patches.iter_mut().zip(&keys[2..]) {
            *patch = key.map(|key| Patch { key, size });
        }
        let mut steps = Vec::with_capacity(PAIR_INPUTS + 2);
        for (i, sum, add) in [(1, 0, false), (2, 1, false), (0, 0, true), (3, 1, true)] {
            steps.extend(inputs[i].map(|term| PairStep { patch: KEPT + i, size, term, sum, add }));
        }
        for (sum, frame) in frames_of(pair) {
            for term in &conv.frames[frame].terms[3..] {
                let patch = SHORTCUTS + sum;
                // SAFETY: by this function's contract; the slot has room for the patch.
                let size = unsafe { self.prepare_patch::<S, bf16>(term, 0, at(patch)) };
                steps.push(PairStep { patch, size, term, sum, add: true });
            }
        }
        steps
    }

    /// One panel of a pair, or of one frame of it. `more`: the next panel follows.
    ///
    /// # Safety
    /// As [`AreaTask::run_bf16`]; the patches are prepared.
    unsafe fn panel_of_pair<S: Bf16Kernels>(
        &self,
        pair: [Option<usize>; 2],
        panel: usize,
        more: bool,
        steps: &[PairStep],
    ) {
        let floats = self.tiles().tiles * TILE * PANEL;
        if panel_width(self.conv.op.layout.cout as usize, panel % self.conv.panels).1 < PANEL {
            // Products leave the other half of a panel as it is, and sums and differences are of whole panels.
            // SAFETY: the slot has room for the sums of both frames.
            unsafe {
                self.sums(0).write_bytes(0, floats);
                self.sums(1).write_bytes(0, floats);
            }
        }
        for (number, step) in steps.iter().enumerate() {
            let next = match steps.get(number + 1) {
                Some(next) => Some(self.weights(panel, next.term)),
                None => more.then(|| self.weights(panel + 1, steps[0].term)),
            };
            // SAFETY: by this function's contract. The slot has room for the sums of both frames.
            unsafe {
                let patch = self.conv.patch(self.slot, step.patch).cast_const().cast();
                let ahead = next.map(|next| (next, 0));
                let patch = PreparedPatch { at: patch, size: step.size };
                self.add_products::<S>(panel, step.term, patch, ahead, self.sums(step.sum), step.add);
                if number == 1 {
                    S::enter(ShareProducts { first: self.sums(0), second: self.sums(1), floats });
                }
            }
        }
        for (sum, frame) in frames_of(pair) {
            // SAFETY: by this function's contract.
            unsafe { self.finish::<S>(frame, panel, self.sums(sum)) };
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
        let conv = self.conv;
        let frames = &conv.frames[run.clone()];
        let tiles = self.tiles();
        let terms = frames.iter().map(|frame| frame.terms.len()).max().unwrap_or(0);
        let first_of = |i: usize| frames.iter().find_map(|frame| frame.terms.get(i));
        for i in 0..terms {
            let next = match first_of(i + 1) {
                Some(term) => Some(self.weights(panel, term)),
                None => first_of(0).filter(|_| more).map(|term| self.weights(panel + 1, term)),
            };
            for (number, frame) in frames.iter().enumerate() {
                let Some(term) = frame.terms.get(i) else { continue };
                // SAFETY: by this function's contract. The slot has room for the patches and the sums.
                unsafe {
                    let patch = self.kept_patch::<S>(frames, term, panel / conv.panels, patches);
                    let ahead = next.map(|next| (next, number * 2 * tiles.tiles.div_ceil(MOST_TILES)));
                    self.add_products::<S>(panel, term, patch, ahead, self.sums(number), i > 0);
                }
            }
        }
        for (number, frame) in frames.iter().enumerate() {
            // SAFETY: as above.
            unsafe {
                if frame.terms.is_empty() {
                    self.sums(number).write_bytes(0, tiles.tiles * TILE * PANEL);
                }
                self.finish::<S>(run.start + number, panel, self.sums(number));
            }
        }
    }

    /// The epilogue of a frame.
    ///
    /// # Safety
    /// As [`AreaTask::run_bf16`]; the sums are complete.
    unsafe fn finish<S: Bf16Kernels>(&self, frame: usize, panel: usize, sums: *const f32) {
        let (pass, pitch) = (self.pass(frame, panel), self.tiles().pitch);
        for y in 0..self.area.height {
            // SAFETY: by this function's contract.
            unsafe { pass.finish_row::<S, bf16>(y, Some(sums.add(y * pitch * PANEL))) };
        }
    }

    /// The sums of one panel of a frame that is computed together with others.
    fn sums(&self, frame: usize) -> *mut f32 {
        self.conv.sums(self.slot).wrapping_add(frame * self.conv.grid.sum_floats())
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
    ) -> PreparedPatch<bf16> {
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
            _ => unsafe { self.prepare_patch::<S, bf16>(term, phase, into) },
        };
        patches[place] = Some(Patch { key, size });
        PreparedPatch { at: into, size }
    }

    /// The products of a term, added to the sums or written to them. `ahead` are the weights that are needed after its,
    /// and the number of blocks that have prefetched some of them.
    ///
    /// # Safety
    /// As [`AreaTask::run_bf16`]; the patch is the term's.
    unsafe fn add_products<S: Bf16Kernels>(
        &self,
        panel: usize,
        term: &Term<Offsets>,
        patch: PreparedPatch<bf16>,
        ahead: Option<(*const bf16, usize)>,
        sums: *mut f32,
        add: bool,
    ) {
        let (layout, tiles, PreparedPatch { at: patch, size }) = (&self.conv.op.layout, self.tiles(), patch);
        let (phase, (channels, _)) =
            (panel / self.conv.panels, panel_width(layout.cout as usize, panel % self.conv.panels));
        let (cin, side, stride, r, s) = match layout.shortcut {
            Some(cin) if self.conv.is_shortcut(term) => (cin, 1, 1, 0, 0),
            _ => (layout.cin, layout.window.side() as usize, self.conv.grid.stride, phase / 2, phase % 2),
        };
        #[cfg(test)]
        count_products(self.area.pixels() * channels * cin as usize * side * side);
        let taps: [usize; 9] = std::array::from_fn(|tap| ((r + tap / side) * size.columns + s + tap % side) * BLOCK);
        let (blocks, halves) = ((cin as usize).div_ceil(BLOCK), channels.div_ceil(TILE));
        let weights = self.weights(panel, term);
        let (steps, groups) = (blocks * side * side, tiles.tiles.div_ceil(MOST_TILES));
        // Where in the patch the next tile of the sums begins.
        let (mut y, mut x) = (0, 0);
        let mut next_tile = || {
            let at = patch.wrapping_add((y * size.columns + x) * stride * BLOCK);
            x += TILE;
            while x >= tiles.pitch {
                (y, x) = (y + 1, x - tiles.pitch);
            }
            at
        };
        for group in 0..groups {
            let (first, end) = split_evenly(tiles.tiles, groups, group);
            let mut at = [patch; MOST_TILES];
            at[..end - first].fill_with(&mut next_tile);
            for half in 0..halves {
                let weights = weights.wrapping_add(half * steps * WEIGHT_TILE);
                let ahead = ahead.map(|(next, before)| (next, (before + group * halves + half) * steps * AHEAD));
                let ahead = ahead.filter(|(_, at)| *at < halves * steps * WEIGHT_TILE);
                // SAFETY: the tiles are inside the sums, their positions and taps inside the patch or just past it.
                unsafe {
                    S::product(&BlockProduct {
                        at,
                        tiles: end - first,
                        step: stride * BLOCK,
                        block: size.block::<bf16>(),
                        blocks,
                        taps: &taps[..side * side],
                        weights,
                        ahead: ahead.map_or(weights, |(next, at)| next.wrapping_add(at)),
                        out: sums.add(first * TILE * PANEL + half * TILE),
                        add,
                    });
                }
            }
        }
    }
}

#[cfg(test)]
fn count_products(products: usize) {
    PRODUCTS.fetch_add(products as u64, std::sync::atomic::Ordering::Relaxed);
}
