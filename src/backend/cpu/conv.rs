//! Convolution with everything around it.
//!
//! A task takes one area of one output frame and some panels of output channels. For each term it prepares the band of
//! input that the area sees, then goes through the panels: weights of a panel are read from memory once and
//! used for all pixels of the area. Sums wait in the output frame from one term to the next. Every output is a sum in
//! the order of terms, blocks of channels, taps and channels, however the work is cut.

use super::band::{self, Extent, Source};
use super::geometry::{Area, Geometry, groups, part};
use super::kernel::BLOCK;
use super::memory::{ALIGN, Memory, Shared};
use super::norm::{Moments, conclude};
use super::pack::{self, Conv};
use super::pairs;
use super::pass::{Input, Pass};
use super::pool::Pool;
use super::simd::Simd;
use crate::backend::{ConvLayout, ConvOp, Prologue, Stop, Term, Window};
use crate::error::{Error, Result};
use crate::tensor::FrameShape;

/// Where things lie in the scratch of an operation: the moments of all frames, then a band, products and a table for each
/// slot.
struct Scratch {
    moments_of_frame: u64,
    slots: u64,
    slot: u64,
    band: u64,
    products: u64,
}

impl Scratch {
    fn new(layout: &ConvLayout, geometry: &Geometry, frames: u64, threads: usize) -> Scratch {
        let panels = pack::panels(layout.cout as usize) as u64 * layout.window.phases();
        let band = geometry.band(layout) as u64 * 4;
        let products = geometry.products() as u64 * 4;
        let table = if layout.prologue == Prologue::None { 0 } else { padded(layout.cin) * 3 * 4 };
        let areas = geometry.areas() as u64;
        Scratch {
            moments_of_frame: areas * panels * Moments::BYTES,
            slots: (threads as u64).min(frames * areas * panels),
            slot: (band + products + table).next_multiple_of(ALIGN),
            band,
            products,
        }
    }

    fn bytes(&self, frames: u64) -> u64 {
        frames * self.moments_of_frame + self.slots * self.slot
    }
}

fn padded(cin: u64) -> u64 {
    cin.next_multiple_of(BLOCK as u64)
}

pub(super) fn scratch(layout: &ConvLayout, input: FrameShape, frames: u64, threads: usize) -> u64 {
    Scratch::new(layout, &Geometry::new(layout, input), frames, threads).bytes(frames)
}

pub(super) fn run<S: Simd>(pool: &Pool, memory: &mut Memory, conv: &Conv, op: &ConvOp, stop: &mut Stop) -> Result<()> {
    let job = Job::new(pool, memory, conv, op)?;
    let (layout, frames) = (op.layout, op.frames.len());
    let units = frames * job.geometry.areas();
    let groups = groups(layout, units, pool.threads());
    pool.run(units * groups, stop, &|task, slot, stop| {
        let (unit, group) = (task / groups, task % groups);
        let (frame, area) = (unit / job.geometry.areas(), unit % job.geometry.areas());
        let panels = part(job.panels * job.phases(), groups, group);
        // SAFETY: `Job::new` checked that all that the operation touches lies in memory; tasks differ in area or
        // panels, so no two write the same outputs, and no two that run at once have the same slot.
        unsafe { job.area::<S>(frame, area, panels, slot, stop) }
    })?;
    if op.statistics {
        pool.run(frames, stop, &|frame, _, _| job.conclude(frame))?;
    }
    Ok(())
}

pub(super) struct Job<'a> {
    pub op: &'a ConvOp<'a>,
    pub conv: &'a Conv,
    pub geometry: Geometry,
    base: Shared,
    scratch: Scratch,
    panels: usize,
    pub output: FrameShape,
}

impl<'a> Job<'a> {
    fn new(pool: &Pool, memory: &mut Memory, conv: &'a Conv, op: &'a ConvOp) -> Result<Job<'a>> {
        let (layout, input) = (op.layout, op.input);
        let output = layout.window.output(input, layout.cout);
        let fail = |why: &str| Err(Error::Internal(format!("convolution {layout:?} of {input:?}: {why}")));
        if *layout != conv.layout {
            return fail("its weights were prepared for another one");
        }
        if input.channels != layout.cin || input.pixels() == 0 || output.pixels() == 0 {
            return fail("the input has another number of channels, or no pixels");
        }
        if layout.window == Window::Down && (input.height % 2 != 0 || input.width % 2 != 0) {
            return fail("the height and width of the input must be even");
        }
        if op.statistics && (layout.groups == 0 || !layout.cout.is_multiple_of(layout.groups)) {
            return fail("the groups do not divide the output's channels");
        }
        let geometry = Geometry::new(layout, input);
        let frames = op.frames.len() as u64;
        let scratch = Scratch::new(layout, &geometry, frames, pool.threads());
        memory.block.region("scratch of a convolution", op.scratch, scratch.bytes(frames))?;
        let plain = |shape: FrameShape| shape.elements() * 4;
        for frame in op.frames {
            let statistics = if op.statistics { layout.groups * 8 } else { 0 };
            memory.block.region("output of a convolution", frame.out.0, plain(output) + statistics)?;
            if let Some(residual) = frame.residual {
                memory.block.region("residual of a convolution", residual.0, plain(output))?;
            }
            if u64::from(frame.bias) >= layout.biases {
                return fail("a frame names a bias that is not there");
            }
            for term in frame.terms.iter() {
                let bytes = match layout.shortcut {
                    Some(channels) if u64::from(term.slab) == layout.slabs => plain(output.with_channels(channels)),
                    _ if u64::from(term.slab) >= layout.slabs => return fail("a term names a slab that is not there"),
                    _ if layout.prologue == Prologue::None => plain(input),
                    _ => plain(input) + layout.groups * 8,
                };
                memory.block.region("input of a convolution", term.frame.0, bytes)?;
            }
        }
        let base = Shared::new(memory.block.start().cast());
        Ok(Job { op, conv, geometry, base, scratch, panels: pack::panels(layout.cout as usize), output })
    }

    fn phases(&self) -> usize {
        self.op.layout.window.phases() as usize
    }

    /// The address at an offset in bytes that `new` has checked.
    pub fn at(&self, offset: u64) -> *mut f32 {
        self.base.get().wrapping_byte_add(offset as usize)
    }

    fn moments(&self, frame: usize) -> *mut Moments {
        self.at(self.op.scratch + frame as u64 * self.scratch.moments_of_frame).cast()
    }

    /// Panels `panels` (of all phases) of one area of one frame.
    ///
    /// # Safety
    /// The offsets of the operation were checked, nobody else uses the slot or these outputs, the processor has `S`.
    unsafe fn area<S: Simd>(&self, frame: usize, index: usize, panels: (usize, usize), slot: usize, stop: &mut Stop) {
        let area = self.geometry.area(index);
        let band = self.at(self.op.scratch
            + self.op.frames.len() as u64 * self.scratch.moments_of_frame
            + slot as u64 * self.scratch.slot);
        let moments = match self.op.statistics {
            true => self.moments(frame).wrapping_add(index * self.panels * self.phases()),
            false => std::ptr::null_mut(),
        };
        let frame = &self.op.frames[frame];
        let last = frame.terms.len().saturating_sub(1);
        // SAFETY: the areas, panels and slots of a job lie inside what `new` checked.
        unsafe {
            for (number, term) in frame.terms.iter().enumerate() {
                let mut ready = None;
                for panel in panels.0..panels.1 {
                    if stop() {
                        return;
                    }
                    let phase = panel / self.panels;
                    let (key, shortcut) = (phase, u64::from(term.slab) == self.op.layout.slabs);
                    // All phases see the same band, but for a shortcut that has a pixel for each.
                    let key = if shortcut { key } else { 0 };
                    let extent = match ready {
                        Some((of, extent)) if of == key => extent,
                        _ => self.band::<S>(term, area, phase, band),
                    };
                    ready = Some((key, extent));
                    let pass = Pass { job: self, frame, area, phase, panel: panel % self.panels };
                    let moments = if moments.is_null() { moments } else { moments.add(panel) };
                    let finish = (number == last).then_some(moments);
                    let products = band.byte_add(self.scratch.band as usize);
                    pass.term::<S>(term, number > 0, Input { band, extent, products }, finish);
                }
            }
            if frame.terms.is_empty() {
                for panel in panels.0..panels.1 {
                    let pass = Pass { job: self, frame, area, phase: panel / self.panels, panel: panel % self.panels };
                    let moments = if moments.is_null() { moments } else { moments.add(panel) };
                    pass.nothing::<S>(moments);
                }
            }
        }
    }

    /// Prepares the band of a term.
    ///
    /// # Safety
    /// As [`Job::area`].
    unsafe fn band<S: Simd>(&self, term: &Term, area: Area, phase: usize, into: *mut f32) -> Extent {
        let layout = self.op.layout;
        let frame: *const f32 = self.at(term.frame.0);
        if u64::from(term.slab) == layout.slabs {
            let source = Source {
                frame,
                height: self.geometry.height,
                width: self.geometry.width,
                channels: layout.shortcut.unwrap_or(0) as usize,
                prologue: Prologue::None,
                table: &[],
                spread: self.geometry.spread,
                phase: (phase / 2, phase % 2),
            };
            let extent = Extent { rows: area.height, columns: area.width };
            // SAFETY: as the caller vouches; a shortcut has a pixel for every one of the output.
            unsafe { band::fill::<S>(&source, area.top as isize, area.left as isize, extent, into) };
            return extent;
        }
        let mut table: &mut [f32] = &mut [];
        if layout.prologue != Prologue::None {
            // SAFETY: the slot has room for the table behind band and products, and all bytes are set before they are numbers;
            // the statistics follow the pixels of a frame.
            unsafe {
                let len = 3 * padded(layout.cin) as usize;
                let start = into.byte_add((self.scratch.band + self.scratch.products) as usize);
                start.write_bytes(0, len);
                table = std::slice::from_raw_parts_mut(start, len);
                let statistics = frame.add(self.op.input.elements() as usize);
                let statistics = std::slice::from_raw_parts(statistics, 2 * layout.groups as usize);
                let [gamma, beta] = self.conv.norm();
                band::table(table, statistics, gamma, beta);
            }
        }
        let source = Source {
            frame,
            height: self.op.input.height as usize,
            width: self.op.input.width as usize,
            channels: layout.cin as usize,
            prologue: layout.prologue,
            table,
            spread: 1,
            phase: (0, 0),
        };
        // SAFETY: as the caller vouches.
        unsafe {
            match self.geometry.paired {
                true => pairs::band::<S>(&source, &self.geometry, area, into),
                false => band::windowed::<S>(&source, &self.geometry, area, into),
            }
        }
    }

    fn conclude(&self, frame: usize) {
        let layout = self.op.layout;
        // SAFETY: the moments of the frame were all written by the tasks before, and the statistics have their place
        // behind the output, which `new` checked; they are set before they are numbers.
        let (moments, into) = unsafe {
            let count = self.geometry.areas() * self.phases() * self.panels;
            let into = self.at(self.op.frames[frame].out.0).add(self.output.elements() as usize);
            into.write_bytes(0, 2 * layout.groups as usize);
            (
                std::slice::from_raw_parts(self.moments(frame), count),
                std::slice::from_raw_parts_mut(into, 2 * layout.groups as usize),
            )
        };
        conclude(moments, &self.geometry, layout.cout as usize, into);
    }
}
