//! Every operation against a plain reference in f64, at awkward sizes, on every instruction set of this machine.

mod attention;
mod case;
mod conv;
mod options;
mod pixels;
mod simd;

use super::*;
use crate::ir::{AttentionOp, ConvFrame, DeviceOffset, PartialSums, Prologue, Term, Window};
use crate::testing::Lcg;

fn cpu(instructions: Instructions, threads: usize) -> Cpu {
    Cpu::new(CpuOptions { threads: Some(threads), instructions, ..CpuOptions::default() }).unwrap()
}

/// Runs an operation of layer 0 with this scratch.
fn run_op(
    cpu: &Cpu,
    memory: &mut CpuMemory,
    op: Op<Offsets>,
    weights: &[ConvWeights],
    scratch: u64,
    stop: &mut Stop,
) -> Result<()> {
    let buffers = Buffers { scratch, ..Buffers::default() };
    cpu.run(memory, &op, &RunArgs { weights, buffers }, stop)
}

fn conv_op(layout: ConvLayout, input: FrameShape, frames: &[ConvFrame<Offsets>], statistics: bool) -> Op<Offsets> {
    let (frames, partial_sums) = (frames.to_vec(), PartialSums::NONE);
    Op::Conv(ConvOp { layer: 0, layout, weights: None, input, frames, statistics, partial_sums })
}

fn cpus() -> Vec<Cpu> {
    Instructions::available().into_iter().map(|set| cpu(set, 2)).collect()
}

/// A block of frames one after the other, separated by guards of NaN.
struct GuardedFrames<'a> {
    cpu: &'a Cpu,
    frames: Vec<(u64, Vec<f32>)>,
    end: u64,
}

const GUARD: u64 = 4096;

impl<'a> GuardedFrames<'a> {
    fn new(cpu: &'a Cpu) -> GuardedFrames<'a> {
        GuardedFrames { cpu, frames: Vec::new(), end: GUARD }
    }

    fn reserve(&mut self, bytes: u64) -> u64 {
        let at = self.end;
        self.end = (at + bytes).next_multiple_of(64) + GUARD;
        at
    }

    fn frame(&mut self, shape: FrameShape, groups: u64, data: &[f32]) -> DeviceOffset {
        let at = self.reserve(self.cpu.frame_bytes(shape, groups));
        self.frames.push((at, data.to_vec()));
        DeviceOffset(at)
    }

    fn build(&self) -> CpuMemory {
        let memory = self.cpu.allocate(self.end, PinnedBytes::default()).unwrap();
        floats(&memory).fill(f32::NAN);
        for (at, data) in &self.frames {
            read(&memory, *at, data.len()).copy_from_slice(data);
        }
        memory
    }
}

#[allow(clippy::mut_from_ref)]
fn floats(memory: &CpuMemory) -> &mut [f32] {
    // SAFETY: the block belongs to the test, the system zeroed it, and no operation runs now.
    unsafe { std::slice::from_raw_parts_mut(memory.block.start().cast(), memory.bytes() as usize / 4) }
}

#[allow(clippy::mut_from_ref)]
fn read(memory: &CpuMemory, at: u64, len: usize) -> &mut [f32] {
    &mut floats(memory)[at as usize / 4..][..len]
}

fn bits(frames: &[Vec<f32>]) -> Vec<Vec<u32>> {
    frames.iter().map(|frame| frame.iter().map(|v| v.to_bits()).collect()).collect()
}
