//! Shortcuts around levels: means of pixels, and sums with a smaller frame. Each row belongs to one task, so the number of
//! threads changes no bit.

use super::element::Element;
use super::memory::{CpuMemory, SharedPointer};
use super::pixels::each_row;
use crate::backend::Stop;
use crate::error::Result;
use crate::ir::{AddOp, AddedFrame, DeviceOffset, FrameShape, Offsets, PoolOp, PooledFrame};
use crate::thread_pool::Pool;

fn frame<A: Element>(memory: &CpuMemory, what: &str, at: DeviceOffset, shape: FrameShape) -> Result<SharedPointer> {
    Ok(SharedPointer::new(memory.block.region(what, at.0, shape.elements() * A::BYTES)?))
}

pub(super) fn pool<A: Element>(
    pool: &Pool,
    memory: &mut CpuMemory,
    op: &PoolOp<Offsets>,
    stop: &mut Stop,
) -> Result<()> {
    let (input, output, parts) = (op.input, op.output(), op.parts as usize);
    let (channels, width) = (input.channels as usize, output.width as usize);
    let pitch = input.width as usize * channels;
    for PooledFrame { from, into, part, clear } in &op.frames {
        let from = frame::<A>(memory, "input of a mean", *from, input)?;
        let into = frame::<A>(memory, "output of a mean", *into, output)?;
        each_row(pool, output.height as usize, width * channels * parts, stop, &|y| {
            // SAFETY: rows are inside the regions checked above, and each belongs to one task.
            unsafe {
                let from = from.get().cast::<A>().add(2 * y * pitch).cast_const();
                let into = into.get().cast::<A>().add(y * width * channels * parts);
                for x in 0..width {
                    for c in 0..channels {
                        let at = |row: usize, column: usize| {
                            (*from.add(row * pitch + (2 * x + column) * channels + c)).value()
                        };
                        let mean = (((at(0, 0) + at(0, 1)) + at(1, 0)) + at(1, 1)) * 0.25;
                        let into = into.add((x * channels + c) * parts);
                        (0..parts).filter(|_| *clear).for_each(|other| *into.add(other) = A::of(0.0));
                        *into.add(*part as usize) = A::of(mean);
                    }
                }
            }
        })?;
    }
    Ok(())
}

pub(super) fn add<A: Element>(pool: &Pool, memory: &mut CpuMemory, op: &AddOp<Offsets>, stop: &mut Stop) -> Result<()> {
    let (shape, small, repeats) = (op.shape, op.addend(), op.repeats() as usize);
    let (side, parts) = (op.repeat.side as usize, op.repeat.parts as usize);
    let (channels, width) = (shape.channels as usize, shape.width as usize);
    for AddedFrame { x, addend, part, out } in &op.frames {
        let x = frame::<A>(memory, "first term of a sum", *x, shape)?;
        let addend = frame::<A>(memory, "second term of a sum", *addend, small)?;
        let out = frame::<A>(memory, "output of a sum", *out, shape)?;
        each_row(pool, shape.height as usize, width * channels, stop, &|y| {
            // SAFETY: rows are inside the regions checked above, and each belongs to one task. An output may be the
            // first term: each element is read before it is written.
            unsafe {
                let row = y * width * channels;
                let (x, out) = (x.get().cast::<A>().add(row).cast_const(), out.get().cast::<A>().add(row));
                let addend = addend.get().cast::<A>().add(y / side * small.width as usize * small.channels as usize);
                for column in 0..width {
                    let addend = addend.add(column / side * small.channels as usize).cast_const();
                    for o in 0..channels {
                        let source = ((o * parts + *part as usize) * side + y % side) * side + column % side;
                        let at = column * channels + o;
                        *out.add(at) = A::of((*x.add(at)).value() + (*addend.add(source / repeats)).value());
                    }
                }
            }
        })?;
    }
    Ok(())
}
