//! Convolution with its prologue and epilogue: the order of work, and its division among threads.
//! Each output is a sum in the order of terms, components, blocks of channels, taps and channels. How the work is
//! divided changes no bit of it.

mod band;
mod bf16;
mod checked;
mod epilogue;
mod grid;
mod pass;
mod weights;
mod winograd;

use super::memory::CpuMemory;
use super::norm;
use super::pool::Pool;
use super::simd::Microkernels;
use crate::backend::Stop;
use crate::error::Result;
use crate::ir::{ConvOp, Offsets, Term};
use band::{BandSize, BandSource};
use checked::CheckedConv;
use grid::{OutputArea, panel_groups, split_evenly};
use pass::{PanelPass, PassInput};

pub(super) use bf16::run as run_bf16;
pub(super) use checked::scratch_bytes;
#[cfg(test)]
pub(super) use grid::{OutputGrid, products_per_pixel};
pub use weights::ConvWeights;
pub(super) use weights::packed_bytes;

/// A task is one area of one output frame and some panels of output channels.
pub(super) fn run<S: Microkernels>(
    pool: &Pool,
    memory: &mut CpuMemory,
    weights: &ConvWeights,
    op: &ConvOp<Offsets>,
    scratch_offset: u64,
    stop: &mut Stop,
) -> Result<()> {
    let conv = CheckedConv::new(pool.threads(), memory, weights, op, scratch_offset)?;
    let (frames, areas) = (op.frames.len(), conv.grid.areas());
    let groups = panel_groups(&op.layout, frames * areas, pool.threads());
    pool.run(frames * areas * groups, stop, &|task, slot, stop| {
        let (unit, group) = (task / groups, task % groups);
        let panels = split_evenly(conv.panels * conv.phases(), groups, group);
        let task = AreaTask { conv: &conv, frame: unit / areas, index: unit % areas, slot };
        // SAFETY: `CheckedConv::new` checked every offset. Tasks differ in area or panels, so no two write the same
        // outputs. No two tasks run on one slot at a time.
        unsafe { task.run::<S>(panels, stop) }
    })?;
    write_statistics(pool, &conv, stop)
}

/// Writes the statistics of all frames, if the operation takes them.
fn write_statistics(pool: &Pool, conv: &CheckedConv, stop: &mut Stop) -> Result<()> {
    let frames = if conv.op.statistics { conv.op.frames.len() } else { 0 };
    pool.run(frames, stop, &|frame, _, _| combine_moments(conv, frame))
}

/// Combines the moments of a frame's areas into the statistics stored with it.
fn combine_moments(conv: &CheckedConv, frame: usize) {
    let pixels: Vec<usize> = (0..conv.grid.areas()).map(|index| conv.grid.area(index).pixels()).collect();
    let count = pixels.len() * conv.phases() * conv.panels;
    let len = 2 * conv.op.layout.groups as usize;
    // SAFETY: the tasks wrote all moments of the frame. Its statistics follow its pixels, as `new` checked, and are
    // zeroed before they are a slice.
    let (moments, into) = unsafe {
        let into = conv.statistics(conv.op.frames[frame].out.0, conv.output);
        into.write_bytes(0, len);
        (std::slice::from_raw_parts(conv.moments(frame), count), std::slice::from_raw_parts_mut(into, len))
    };
    norm::statistics(moments, &pixels, conv.phases(), conv.op.layout.cout as usize, into);
}

/// One area of one output frame, on the thread with number `slot`.
struct AreaTask<'a> {
    conv: &'a CheckedConv<'a>,
    frame: usize,
    index: usize,
    slot: usize,
}

impl AreaTask<'_> {
    /// Computes panels `panels` of all phases. For each term, the area's band is prepared once and a panel's weights
    /// are read once. Sums stay in the output frame from one term to the next.
    ///
    /// # Safety
    /// Nobody else uses the slot or writes these outputs, and the processor has `S`.
    unsafe fn run<S: Microkernels>(&self, panels: (usize, usize), stop: &mut Stop) {
        let conv = self.conv;
        let area = conv.grid.area(self.index);
        let frame = &conv.op.frames[self.frame];
        let pass = |panel: usize| PanelPass {
            conv,
            frame,
            area,
            phase: panel / conv.panels,
            panel: panel % conv.panels,
            moments: match conv.op.statistics {
                true => conv.moments(self.frame).wrapping_add(self.index * conv.panels * conv.phases() + panel),
                false => std::ptr::null_mut(),
            },
        };
        if frame.terms.is_empty() {
            // SAFETY: by this function's contract.
            return (panels.0..panels.1).for_each(|panel| unsafe { pass(panel).write_empty_sum::<S>() });
        }
        let band = conv.band(self.slot);
        let last = frame.terms.len() - 1;
        for (number, term) in frame.terms.iter().enumerate() {
            let mut ready = None;
            for panel in panels.0..panels.1 {
                if stop() {
                    return;
                }
                let pass = pass(panel);
                // All phases read the same band, except of a shortcut: it has a pixel for each phase.
                let key = if conv.is_shortcut(term) { pass.phase } else { 0 };
                // SAFETY: by this function's contract; the slot has room for the band.
                unsafe {
                    let size = match ready {
                        Some((of, size)) if of == key => size,
                        _ => self.prepare_band::<S>(term, area, pass.phase, band),
                    };
                    ready = Some((key, size));
                    let input = PassInput { band, size, products: conv.sums(self.slot) };
                    pass.add_term::<S>(term, number > 0, input, number == last);
                }
            }
        }
    }

    /// Prepares the band of a term.
    ///
    /// # Safety
    /// As [`AreaTask::run`].
    unsafe fn prepare_band<S: Microkernels>(
        &self,
        term: &Term<Offsets>,
        area: OutputArea,
        phase: usize,
        into: *mut f32,
    ) -> BandSize {
        let conv = self.conv;
        // SAFETY: the slot is this task's.
        let source: BandSource<f32> = unsafe { conv.source(term, phase, self.slot) };
        if conv.is_shortcut(term) {
            let size = BandSize { rows: area.height, columns: area.width };
            // SAFETY: by this function's contract.
            unsafe { band::fill::<S, f32>(&source, area.top as isize, area.left as isize, size, into) };
            return size;
        }
        // SAFETY: by this function's contract.
        unsafe {
            match conv.grid.winograd {
                true => winograd::transform_band::<S>(&source, &conv.grid, area, into),
                false => band::windowed::<S, f32>(&source, &conv.grid, area, into),
            }
        }
    }
}
