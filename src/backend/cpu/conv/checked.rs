//! A convolution whose offsets were all checked against its memory, and the layout of its scratch.

use super::grid::{OutputGrid, PAIR_INPUTS, RUN, uses_winograd};
use super::patch::PatchSource;
use super::weights::ConvWeights;
use crate::backend::Precision;
use crate::backend::cpu::element::{block_channels, pixel_bytes};
use crate::backend::cpu::memory::{ALIGN, CpuMemory, SharedPointer};
use crate::backend::cpu::norm::{self, Moments};
use crate::backend::cpu::simd::{BLOCK, panel_count, panel_width};
use crate::error::{Error, Result};
use crate::ir::{ConvFrame, ConvLayout, ConvOp, FrameShape, FrameUnit, Offsets, Prologue, Term, Window};

/// Scratch of an operation: the moments of all frames; then patches, components, sums and norm tables per slot.
struct ConvScratch {
    moments_of_frame: u64,
    slots: u64,
    slot: u64,
    /// One of the slot's patches.
    patch: u64,
    patches: u64,
    /// Input in the Winograd domain.
    components: u64,
    sums: u64,
}

impl ConvScratch {
    fn new(layout: &ConvLayout, grid: &OutputGrid, frames: u64, threads: usize) -> ConvScratch {
        let panels = panel_count(layout.cout as usize) as u64 * layout.window.phases();
        let patch = grid.patch_bytes(layout) as u64;
        // In bf16 sums are those of a run of frames.
        let run = if grid.precision == Precision::Bf16 { RUN as u64 } else { grid.frames as u64 * panels };
        let (patches, components) = (grid.patches as u64 * patch, grid.component_bytes(layout) as u64);
        let sums = run * grid.sum_floats() as u64 * 4;
        let tables = match layout.prologue {
            Prologue::None => 0,
            _ if layout.pairs.is_some() => PAIR_INPUTS * table_floats(layout, grid.precision) * size_of::<f32>(),
            _ => table_floats(layout, grid.precision) * size_of::<f32>(),
        };
        let areas = grid.areas() as u64;
        ConvScratch {
            moments_of_frame: areas * panels * Moments::BYTES,
            slots: (threads as u64).min(frames * areas * panels),
            slot: (patches + components + sums + tables as u64).next_multiple_of(ALIGN),
            patch,
            patches,
            components,
            sums,
        }
    }

    fn bytes(&self, frames: u64) -> u64 {
        frames * self.moments_of_frame + self.slots * self.slot
    }
}

/// Floats of a norm table: three values a channel, padded to whole blocks.
fn table_floats(layout: &ConvLayout, precision: Precision) -> usize {
    3 * (layout.cin as usize).next_multiple_of(block_channels(precision))
}

pub fn scratch_bytes(layout: &ConvLayout, input: FrameShape, precision: Precision, frames: u64, threads: usize) -> u64 {
    let bytes = |first| {
        let grid = OutputGrid::new(layout, input, precision, first);
        ConvScratch::new(layout, &grid, frames, threads).bytes(frames)
    };
    // The first frame of a clip and the others are computed one after the other.
    first_slab(layout, precision).map_or_else(|| bytes(false), |_| bytes(true).max(bytes(false)))
}

/// The slab of a clip's first frame, where that is computed apart from others. Elsewhere patches are shared with it.
fn first_slab(layout: &ConvLayout, precision: Precision) -> Option<u8> {
    layout.first_frame_slab.filter(|_| uses_winograd(layout, precision))
}

/// Whether a frame is such a frame.
pub fn is_first(layout: &ConvLayout, precision: Precision, frame: &ConvFrame<Offsets>) -> bool {
    first_slab(layout, precision).is_some_and(|first| frame.terms.iter().any(|term| term.slab == first))
}

/// Some frames of an operation: the first of a clip, or others.
pub struct CheckedConv<'a> {
    pub op: &'a ConvOp<Offsets>,
    pub frames: &'a [ConvFrame<Offsets>],
    pub weights: &'a ConvWeights,
    pub grid: OutputGrid,
    pub output: FrameShape,
    /// Panels of one phase.
    pub panels: usize,
    /// Frames that are computed together: where the layout has pairs, pairs too.
    pub units: Vec<FrameUnit>,
    base: SharedPointer,
    scratch_offset: u64,
    scratch: ConvScratch,
}

impl<'a> CheckedConv<'a> {
    pub fn new(
        threads: usize,
        memory: &mut CpuMemory,
        weights: &'a ConvWeights,
        op: &'a ConvOp<Offsets>,
        frames: &'a [ConvFrame<Offsets>],
        scratch_offset: u64,
    ) -> Result<CheckedConv<'a>> {
        let (layout, input) = (&op.layout, op.input);
        let output = layout.window.output(input, layout.cout);
        if *layout != weights.layout {
            return Err(fail(op, "its weights were prepared for another layout"));
        }
        if input.channels != layout.cin || input.pixels() == 0 || output.pixels() == 0 {
            return Err(fail(op, "the input has another number of channels, or no pixels"));
        }
        if layout.window == Window::Down && (input.height % 2 != 0 || input.width % 2 != 0) {
            return Err(fail(op, "the height and width of the input must be even"));
        }
        if layout.pairs.is_some() && layout.window != Window::Same {
            return Err(fail(op, "pairs of frames have another window than Same"));
        }
        if op.statistics && (layout.norm.groups() == 0 || !layout.cout.is_multiple_of(layout.norm.groups())) {
            return Err(fail(op, "the groups do not divide the output's channels"));
        }
        let first = frames.iter().any(|frame| is_first(layout, weights.precision, frame));
        let grid = OutputGrid::new(layout, input, weights.precision, first);
        let count = frames.len() as u64;
        let scratch = ConvScratch::new(layout, &grid, count, threads);
        memory.block.region("scratch of a convolution", scratch_offset, scratch.bytes(count))?;
        for frame in frames {
            check_frame(memory, op, output, weights.precision, frame)?;
            let main = || frame.terms.iter().filter(|term| u64::from(term.slab) < layout.slabs);
            if first && !main().all(|term| Some(term.slab) == layout.first_frame_slab) {
                return Err(fail(op, "the first frame of a clip has slabs of others"));
            }
        }
        let base = SharedPointer::new(memory.block.start().cast());
        let panels = panel_count(layout.cout as usize);
        let units = FrameUnit::of(layout, frames);
        Ok(CheckedConv { op, frames, weights, grid, output, panels, units, base, scratch_offset, scratch })
    }

    /// Channels of a panel, and the width that it is padded to.
    pub fn panel_width(&self, panel: usize) -> (usize, usize) {
        let (channels, width) = panel_width(self.op.layout.cout as usize, panel);
        (channels, if self.grid.square.is_some() { channels.next_multiple_of(BLOCK) } else { width })
    }

    pub fn phases(&self) -> usize {
        self.op.layout.window.phases() as usize
    }

    pub fn is_shortcut(&self, term: &Term<Offsets>) -> bool {
        u64::from(term.slab) == self.op.layout.slabs
    }

    /// The terms of a pair's input frames d0 to d3; `None` for one that only a missing frame reads.
    pub fn pair_inputs(&self, [first, second]: [Option<usize>; 2]) -> [Option<&'a Term<Offsets>>; PAIR_INPUTS] {
        let term = |frame: Option<usize>, number: usize| frame.map(|frame| &self.frames[frame].terms[number]);
        [term(first, 0), term(first, 1).or(term(second, 0)), term(first, 2).or(term(second, 1)), term(second, 2)]
    }

    /// The frame of a term. A shortcut has a pixel for every pixel of the output; other terms have a prologue.
    ///
    /// # Safety
    /// The slot, whose norm table `table` this may be, is the caller's.
    pub unsafe fn source<E>(
        &self,
        term: &Term<Offsets>,
        phase: usize,
        slot: usize,
        table: usize,
    ) -> PatchSource<'_, E> {
        let (layout, input) = (&self.op.layout, self.op.input);
        let frame: *const E = self.at(term.frame.0).cast();
        if self.is_shortcut(term) {
            return PatchSource {
                frame,
                height: self.grid.height,
                width: self.grid.width,
                channels: layout.shortcut.unwrap_or(0) as usize,
                prologue: Prologue::None,
                norm: layout.norm,
                table: &[],
                spread: self.grid.spread,
                phase: (phase / 2, phase % 2),
            };
        }
        PatchSource {
            frame,
            height: input.height as usize,
            width: input.width as usize,
            channels: layout.cin as usize,
            prologue: layout.prologue,
            norm: layout.norm,
            // SAFETY: by this function's contract.
            table: unsafe { self.norm_table(term, slot, table) },
            spread: 1,
            phase: (0, 0),
        }
    }

    /// The address at an offset in bytes that `new` has checked.
    pub fn at(&self, offset: u64) -> *mut f32 {
        self.base.get().wrapping_byte_add(offset as usize)
    }

    /// Moments of a frame: [area][phase][panel].
    pub fn moments(&self, frame: usize) -> *mut Moments {
        self.at(self.scratch_offset + frame as u64 * self.scratch.moments_of_frame).cast()
    }

    /// A patch of a slot.
    pub fn patch(&self, slot: usize, patch: usize) -> *mut f32 {
        let moments = self.frames.len() as u64 * self.scratch.moments_of_frame;
        self.at(self.scratch_offset + moments + slot as u64 * self.scratch.slot + patch as u64 * self.scratch.patch)
    }

    /// Room for the input in one component of columns of the Winograd domain.
    pub fn components(&self, slot: usize) -> *mut f32 {
        self.patch(slot, 0).wrapping_byte_add(self.scratch.patches as usize)
    }

    /// Room for sums: in the Winograd domain of all panels, in bf16 of one panel of a run of frames.
    pub fn sums(&self, slot: usize) -> *mut f32 {
        self.components(slot).wrapping_byte_add(self.scratch.components as usize)
    }

    /// The statistics of a frame follow its pixels.
    pub fn statistics(&self, frame: u64, shape: FrameShape) -> *mut f32 {
        self.at(frame + pixel_bytes(self.weights.precision, shape))
    }

    /// The norm table of a term's input frame, written to the slot as its table `number`; empty without a norm.
    ///
    /// # Safety
    /// Nobody else uses the slot.
    unsafe fn norm_table(&self, term: &Term<Offsets>, slot: usize, number: usize) -> &[f32] {
        let layout = &self.op.layout;
        if layout.prologue == Prologue::None {
            return &[];
        }
        let len = table_floats(layout, self.weights.precision);
        let start = self.sums(slot).wrapping_byte_add(self.scratch.sums as usize).wrapping_add(number * len);
        // SAFETY: the slot has room for the table, which is zeroed before it is a slice. The statistics of a frame
        // follow its pixels.
        unsafe {
            start.write_bytes(0, len);
            let table = std::slice::from_raw_parts_mut(start, len);
            let statistics = self.statistics(term.frame.0, self.op.input);
            let statistics = std::slice::from_raw_parts(statistics, 2 * layout.norm.groups() as usize);
            let [gamma, beta] = self.weights.norm();
            norm::fill_table(table, statistics, gamma, beta);
            table
        }
    }
}

fn fail(op: &ConvOp<Offsets>, why: &str) -> Error {
    Error::Internal(format!("convolution {:?} of {:?}: {why}", op.layout, op.input))
}

fn check_frame(
    memory: &CpuMemory,
    op: &ConvOp<Offsets>,
    output: FrameShape,
    precision: Precision,
    frame: &ConvFrame<Offsets>,
) -> Result<()> {
    let layout = &op.layout;
    let bytes = |shape: FrameShape| pixel_bytes(precision, shape);
    let statistics = if op.statistics { layout.norm.groups() * 8 } else { 0 };
    memory.block.region("output of a convolution", frame.out.0, bytes(output) + statistics)?;
    if let Some(residual) = frame.residual {
        memory.block.region("residual of a convolution", residual.0, bytes(output))?;
    }
    if u64::from(frame.bias) >= layout.biases {
        return Err(fail(op, "a frame names a bias that does not exist"));
    }
    if frame.terms.iter().rev().skip(1).any(|term| u64::from(term.slab) == layout.slabs) {
        return Err(fail(op, "a shortcut is not the last term of a frame"));
    }
    for term in frame.terms.iter() {
        let bytes = match layout.shortcut {
            Some(channels) if u64::from(term.slab) == layout.slabs => bytes(output.with_channels(channels)),
            _ if u64::from(term.slab) >= layout.slabs => {
                return Err(fail(op, "a term names a slab that does not exist"));
            }
            _ if layout.prologue == Prologue::None => bytes(op.input),
            _ => bytes(op.input) + layout.norm.groups() * 8,
        };
        memory.block.region("input of a convolution", term.frame.0, bytes)?;
    }
    Ok(())
}
