//! Convolution with its prologue and epilogue: the order of work, and its division among threads.
//! Each output is a sum in the order of terms, blocks of channels, taps and channels, by Winograd's algorithm in each
//! component. How the work is divided changes no bit of it.

mod bf16;
mod checked;
mod components;
mod epilogue;
mod grid;
mod pass;
mod patch;
mod square;
mod weights;
mod winograd;

use std::ops::Range;

use super::element::Element;
use super::memory::CpuMemory;
use super::norm;
use super::simd::{Microkernels, Simd};
use crate::backend::{Precision, RunArgs, Stop};
use crate::error::Result;
use crate::ir::{ConvFrame, ConvOp, Offsets, Term};
use crate::thread_pool::Pool;
use checked::{CheckedConv, is_first};
use grid::{OutputArea, division, split_evenly};
use pass::PanelPass;
use patch::{PatchSize, PatchSource, PreparedPatch};

#[cfg(all(test, target_os = "linux", target_arch = "x86_64"))]
pub(super) use bf16::PRODUCTS;
pub(super) use bf16::compute_bf16;
pub(super) use checked::scratch_bytes;
pub(super) use grid::product_share;
#[cfg(test)]
pub(super) use grid::{OutputGrid, products_per_pixel};
pub use weights::ConvWeights;
pub(super) use weights::{packed_bytes, parts};

/// Runs a convolution as tasks: one area, some units of output frames, some panels of output channels. `compute` is
/// [`compute_f32`] or [`compute_bf16`], as the weights' precision asks.
pub(super) fn run(
    pool: &Pool,
    memory: &mut CpuMemory,
    op: &ConvOp<Offsets>,
    args: &RunArgs<ConvWeights>,
    stop: &mut Stop,
    compute: &(dyn Fn(&AreaTask, &mut Stop) + Sync),
) -> Result<()> {
    let (weights, scratch) = (&args.weights[op.layer], args.buffers.scratch);
    let precision = weights.precision;
    let of_one_kind =
        |a: &ConvFrame<_>, b: &ConvFrame<_>| is_first(&op.layout, precision, a) == is_first(&op.layout, precision, b);
    let checked = |frames| CheckedConv::new(pool.threads(), memory, weights, op, frames, scratch);
    let convs: Vec<CheckedConv> = op.frames.chunk_by(of_one_kind).map(checked).collect::<Result<_>>()?;
    convs.iter().try_for_each(|conv| run_frames(pool, conv, stop, compute))
}

/// Frames that have areas of the same sizes.
fn run_frames(
    pool: &Pool,
    conv: &CheckedConv,
    stop: &mut Stop,
    compute: &(dyn Fn(&AreaTask, &mut Stop) + Sync),
) -> Result<()> {
    let (units, areas) = (conv.units.len(), conv.grid.areas());
    let (parts, groups) = division(&conv.op.layout, conv.weights.precision, units, areas, pool.threads());
    pool.run(areas * parts * groups, stop, &|task, slot, stop| {
        let (unit, group) = (task / groups, task % groups);
        let index = unit / parts;
        let (units, panels) =
            (split_evenly(units, parts, unit % parts), split_evenly(conv.panels * conv.phases(), groups, group));
        let (units, panels) = (units.0..units.1, panels.0..panels.1);
        compute(&AreaTask { conv, index, area: conv.grid.area(index), units, panels, slot }, stop);
    })?;
    write_statistics(pool, conv, stop)
}

/// Computes a task in f32.
pub(super) fn compute_f32<S: Microkernels>(task: &AreaTask, stop: &mut Stop) {
    // SAFETY: by the rules of `AreaTask`. The processor has `S`.
    unsafe {
        match task.conv.grid.square {
            Some(square) => task.run_winograd::<S>(square, stop),
            None => task.run_f32::<S>(stop),
        }
    }
}

/// Writes the statistics of all frames, if the operation takes them.
fn write_statistics(pool: &Pool, conv: &CheckedConv, stop: &mut Stop) -> Result<()> {
    let frames = if conv.op.statistics { conv.frames.len() } else { 0 };
    pool.run(frames, stop, &|frame, _, _| combine_moments(conv, frame))
}

/// Combines the moments of a frame's areas into the statistics stored with it.
fn combine_moments(conv: &CheckedConv, frame: usize) {
    let pixels: Vec<usize> = (0..conv.grid.areas()).map(|index| conv.grid.area(index).pixels()).collect();
    let count = pixels.len() * conv.phases() * conv.panels;
    let len = 2 * conv.op.layout.norm.groups() as usize;
    // SAFETY: the tasks wrote all moments of the frame. Its statistics follow its pixels, as `new` checked, and are
    // zeroed before they are a slice.
    let (moments, into) = unsafe {
        let into = conv.statistics(conv.frames[frame].out.0, conv.output);
        into.write_bytes(0, len);
        (std::slice::from_raw_parts(conv.moments(frame), count), std::slice::from_raw_parts_mut(into, len))
    };
    norm::statistics(moments, &pixels, conv.phases(), conv.op.layout.cout as usize, into);
}

/// What a patch was made of.
#[derive(Clone, Copy, PartialEq, Eq)]
struct PatchKey {
    frame: u64,
    shortcut: Option<usize>,
}

/// One area of some units of output frames, some panels of all phases, on the thread with number `slot`.
///
/// # Rules
/// All `unsafe` of this folder rests on these:
/// 1. **Bounds.** `CheckedConv::new` has checked that every frame, its statistics and the scratch lie in the block.
///    Nothing else is addressed, and `op`, block and weights are borrowed until all tasks have ended.
/// 2. **Writes.** A task writes the pixels of its area, in the channels of its panels, of its frames; their moments;
///    and its slot. Areas are a partition of the grid ([`OutputGrid::area`](grid::OutputGrid::area)), units and panels
///    are partitioned by [`split_evenly`]. So no two tasks write the same bytes, whichever threads run them.
/// 3. **Reads.** A task reads input frames, residuals and weights, which no task writes, and outputs that it has
///    written itself: sums stay there from term to term. The plan keeps outputs apart from each other and from all that
///    is read; the tests on symbols prove it.
/// 4. **Slots.** Patches, components, sums and norm tables belong to a slot. The pool runs one task of a slot at a
///    time.
/// 5. **Statistics.** They are combined after all tasks, so each moment has been written once, by one task.
pub(super) struct AreaTask<'a> {
    conv: &'a CheckedConv<'a>,
    index: usize,
    area: OutputArea,
    /// Where the layout has pairs, a unit is a frame or a pair. Elsewhere it is a frame and has the frame's index.
    units: Range<usize>,
    panels: Range<usize>,
    slot: usize,
}

impl AreaTask<'_> {
    /// A panel, numbered through all phases, of a frame.
    fn pass(&self, frame: usize, panel: usize) -> PanelPass<'_> {
        let conv = self.conv;
        let moments = || conv.moments(frame).wrapping_add(self.index * conv.panels * conv.phases() + panel);
        PanelPass {
            conv,
            frame: &conv.frames[frame],
            area: self.area,
            phase: panel / conv.panels,
            panel: panel % conv.panels,
            moments: if conv.op.statistics { moments() } else { std::ptr::null_mut() },
        }
    }

    /// What the patch of a term is made of: a frame, and of a shortcut the phase whose pixels it has.
    fn key(&self, term: &Term<Offsets>, phase: usize) -> PatchKey {
        PatchKey { frame: term.frame.0, shortcut: self.conv.is_shortcut(term).then_some(phase) }
    }

    /// Goes through the input frames. Each patch is prepared once and serves all output frames whose next term it is.
    /// Sums stay in the output frames from one term to the next.
    ///
    /// # Safety
    /// The processor has `S`.
    unsafe fn run_f32<S: Microkernels>(&self, stop: &mut Stop) {
        let frames = &self.conv.frames[self.units.clone()];
        for frame in self.units.clone().filter(|frame| self.conv.frames[*frame].terms.is_empty()) {
            // SAFETY: by this function's contract.
            unsafe { self.write_empty_sum::<S>(frame) };
        }
        // Terms of each frame that are done.
        let mut done = vec![0; frames.len()];
        let next = |done: &[usize], i: usize| frames[i].terms.get(done[i]);
        while let Some(term) = (0..frames.len()).find_map(|i| next(&done, i)) {
            let (key, mut ready) = (self.key(term, 0), None);
            for i in 0..frames.len() {
                let Some(term) = next(&done, i).filter(|term| self.key(term, 0) == key) else { continue };
                // SAFETY: by the rules of `AreaTask`.
                if !unsafe { self.add_term::<S>(self.units.start + i, done[i], term, &mut ready, stop) } {
                    return;
                }
                done[i] += 1;
            }
        }
    }

    /// A frame without terms.
    ///
    /// # Safety
    /// As [`AreaTask::run_f32`].
    unsafe fn write_empty_sum<S: Microkernels>(&self, frame: usize) {
        for panel in self.panels.clone() {
            // SAFETY: by the rules of `AreaTask`.
            unsafe { self.pass(frame, panel).write_empty_sum::<S>() };
        }
    }

    /// Adds term `number` to all panels of a frame. `ready` is the patch that the slot has. False if told to stop.
    ///
    /// # Safety
    /// As [`AreaTask::run_f32`].
    unsafe fn add_term<S: Microkernels>(
        &self,
        frame: usize,
        number: usize,
        term: &Term<Offsets>,
        ready: &mut Option<(PatchKey, PatchSize)>,
        stop: &mut Stop,
    ) -> bool {
        let (conv, patch) = (self.conv, self.conv.patch(self.slot, 0));
        let last = number + 1 == conv.frames[frame].terms.len();
        for panel in self.panels.clone() {
            if stop() {
                return false;
            }
            let pass = self.pass(frame, panel);
            let key = self.key(term, pass.phase);
            // SAFETY: by this function's contract; the slot has room for the patch.
            unsafe {
                let size = match *ready {
                    Some((of, size)) if of == key => size,
                    _ => self.prepare_patch::<S, f32>(term, pass.phase, patch),
                };
                *ready = Some((key, size));
                pass.add_term::<S>(term, number > 0, PreparedPatch { at: patch, size }, last);
            }
        }
        true
    }

    /// Prepares the patch of a term. In bf16 that of a shortcut is as wide as the sums.
    ///
    /// # Safety
    /// The processor has `S`, and the slot has room for the patch.
    unsafe fn prepare_patch<S: Simd, E: Element>(&self, term: &Term<Offsets>, phase: usize, into: *mut E) -> PatchSize {
        let (conv, area) = (self.conv, self.area);
        // SAFETY: the slot is this task's.
        let source: PatchSource<E> = unsafe { conv.source(term, phase, self.slot, 0) };
        if !conv.is_shortcut(term) {
            // SAFETY: by this function's contract.
            return unsafe { patch::windowed::<S, E>(&source, &conv.grid, area, into) };
        }
        let columns = match conv.grid.precision {
            Precision::Bf16 => conv.grid.sum_tiles(area.height, area.width).pitch,
            _ => area.width,
        };
        let size = PatchSize { rows: area.height, columns };
        // SAFETY: by this function's contract.
        unsafe { patch::fill::<S, E>(&source, area.top as isize, area.left as isize, size, into) };
        size
    }
}
