//! Every operation against a plain reference in f64, at awkward sizes, on every instruction set of this machine.

mod attention;
mod case;
mod conv;
mod level;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod network_rate;
mod options;
mod pixels;
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
mod rates;
mod simd;

use super::*;
use crate::ir::{AttentionOp, ConvFrame, DeviceOffset, Norm, PartialSums, Prologue, Term, Window};
use crate::testing::Lcg;

fn cpu(instructions: Instructions, threads: usize) -> Cpu {
    cpu_in(Precision::Fp32, instructions, threads)
}

fn cpu_in(precision: Precision, instructions: Instructions, threads: usize) -> Cpu {
    let precision = Some(precision);
    Cpu::new(CpuOptions { threads: Some(threads), instructions, precision, ..CpuOptions::default() }).unwrap()
}

/// Every precision with every instruction set of this machine for it.
fn sets() -> impl Iterator<Item = (Precision, Instructions)> {
    let of = |precision| Instructions::available(precision).into_iter().map(move |set| (precision, set));
    [Precision::Fp32, Precision::Bf16].into_iter().flat_map(of)
}

/// The nearest value that a frame of this precision has.
fn rounded(precision: Precision, value: f32) -> f32 {
    if precision == Precision::Bf16 { half::bf16::from_f32(value).to_f32() } else { value }
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

fn cpus(precision: Precision) -> Vec<Cpu> {
    Instructions::available(precision).into_iter().map(|set| cpu_in(precision, set, 2)).collect()
}

/// A frame as bytes: its pixels, then what else there is of `data` as f32.
fn frame_bytes(precision: Precision, shape: FrameShape, data: &[f32]) -> Vec<u8> {
    let (pixels, rest) = data.split_at(shape.elements() as usize);
    let mut bytes: Vec<u8> = match precision {
        Precision::Bf16 => pixels.iter().flat_map(|v| half::bf16::from_f32(*v).to_le_bytes()).collect(),
        _ => pixels.iter().flat_map(|v| v.to_le_bytes()).collect(),
    };
    bytes.resize(element::pixel_bytes(precision, shape) as usize, 0xff);
    bytes.extend(rest.iter().flat_map(|v| v.to_le_bytes()));
    bytes
}

/// A block of frames one after the other, separated by guards of NaN.
struct GuardedFrames<'a> {
    cpu: &'a Cpu,
    frames: Vec<(u64, Vec<u8>)>,
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
        self.frames.push((at, frame_bytes(self.cpu.precision, shape, data)));
        DeviceOffset(at)
    }

    fn build(&self) -> CpuMemory {
        let memory = self.cpu.allocate(self.end, PinnedBytes::default()).unwrap();
        floats(&memory).fill(f32::NAN);
        for (at, data) in &self.frames {
            bytes(&memory, *at, data.len()).copy_from_slice(data);
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
fn bytes(memory: &CpuMemory, at: u64, len: usize) -> &mut [u8] {
    let floats = floats(memory);
    // SAFETY: the same memory as bytes.
    let all = unsafe { std::slice::from_raw_parts_mut(floats.as_mut_ptr().cast::<u8>(), 4 * floats.len()) };
    &mut all[at as usize..][..len]
}

/// The pixels of a frame, and `more` floats behind them. What follows must be a guard.
fn read(cpu: &Cpu, memory: &CpuMemory, at: u64, shape: FrameShape, more: usize) -> Vec<f32> {
    let len = element::pixel_bytes(cpu.precision, shape);
    let pixels = bytes(memory, at, (shape.elements() * cpu.precision.bytes()) as usize);
    let mut values: Vec<f32> = match cpu.precision {
        Precision::Bf16 => pixels.chunks_exact(2).map(|b| half::bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
        _ => pixels.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
    };
    values.extend(&floats(memory)[(at + len) as usize / 4..][..more]);
    assert_guard(memory, at + len + 4 * more as u64);
    values
}

/// Fails if something was written from `end` on.
fn assert_guard(memory: &CpuMemory, end: u64) {
    let guard = &floats(memory)[end as usize / 4..][..GUARD as usize / 4];
    assert!(guard.iter().all(|v| v.is_nan()), "written beyond the end");
}

fn bits(frames: &[Vec<f32>]) -> Vec<Vec<u32>> {
    frames.iter().map(|frame| frame.iter().map(|v| v.to_bits()).collect()).collect()
}
