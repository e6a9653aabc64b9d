//! Every operation against a plain one in f64, at awkward sizes, on every instruction set of this machine.

use super::*;
use crate::backend::{Affine, Blend, ConvFrame, Frame, Posterior, Prologue, Term, Terms, Window};
use crate::tensor::{DType, Place, Shape, View};

/// A small generator of numbers about zero.
struct Random(u64);

impl Random {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    fn fill(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.next()).collect()
    }
}

fn cpu(instructions: Instructions, threads: usize) -> Cpu {
    Cpu::new(CpuOptions { threads: Some(threads), instructions, ..CpuOptions::default() }).unwrap()
}

/// The weights of a convolution in plain form.
struct Weights {
    slabs: Vec<Vec<f32>>,
    biases: Vec<Vec<f32>>,
    gamma: Vec<f32>,
    beta: Vec<f32>,
}

impl Weights {
    fn new(layout: &ConvLayout, random: &mut Random) -> Weights {
        let mut scaled =
            |len: u64, by: f32| random.fill(len as usize).into_iter().map(|v| v * by).collect::<Vec<f32>>();
        Weights {
            slabs: (0..layout.slab_count()).map(|slab| scaled(layout.slab_elements(slab), 0.2)).collect(),
            biases: (0..layout.biases).map(|_| scaled(layout.bias_elements(), 1.0)).collect(),
            gamma: scaled(layout.cin, 1.0).iter().map(|v| v + 1.5).collect(),
            beta: scaled(layout.cin, 0.5),
        }
    }
}

impl ConvSource for Weights {
    fn slab(&mut self, slab: u64, into: &mut [f32]) {
        into.copy_from_slice(&self.slabs[slab as usize]);
    }
    fn bias(&mut self, bias: u64, into: &mut [f32]) {
        into.copy_from_slice(&self.biases[bias as usize]);
    }
    fn norm(&mut self, gamma: &mut [f32], beta: &mut [f32]) {
        gamma.copy_from_slice(&self.gamma);
        beta.copy_from_slice(&self.beta);
    }
}

/// Memory that frames are laid out in, one after the other, between frames of NaN.
struct Arena<'a> {
    cpu: &'a Cpu,
    frames: Vec<(u64, Vec<f32>)>,
    end: u64,
}

const GUARD: u64 = 4096;

impl<'a> Arena<'a> {
    fn new(cpu: &'a Cpu) -> Arena<'a> {
        Arena { cpu, frames: Vec::new(), end: GUARD }
    }

    fn reserve(&mut self, bytes: u64) -> u64 {
        let at = self.end;
        self.end = (at + bytes).next_multiple_of(64) + GUARD;
        at
    }

    fn frame(&mut self, shape: FrameShape, groups: u64, data: &[f32]) -> Frame {
        let at = self.reserve(self.cpu.frame_bytes(shape, groups));
        self.frames.push((at, data.to_vec()));
        Frame(at)
    }

    fn build(&self) -> Memory {
        let memory = self.cpu.allocate(self.end, HostMemory::default()).unwrap();
        floats(&memory).fill(f32::NAN);
        for (at, data) in &self.frames {
            read(&memory, *at, data.len()).copy_from_slice(data);
        }
        memory
    }
}

#[allow(clippy::mut_from_ref)]
fn floats(memory: &Memory) -> &mut [f32] {
    // SAFETY: the block is the test's own, zeroed by the system, and no operation runs meanwhile.
    unsafe { std::slice::from_raw_parts_mut(memory.block.start().cast(), memory.bytes() as usize / 4) }
}

#[allow(clippy::mut_from_ref)]
fn read(memory: &Memory, at: u64, len: usize) -> &mut [f32] {
    &mut floats(memory)[at as usize / 4..][..len]
}

/// A frame's pixels followed by its exact statistics, as a convolution would have left it.
fn with_statistics(data: &[f32], channels: usize, groups: usize) -> Vec<f32> {
    let mut all = data.to_vec();
    let per_group = channels / groups;
    for group in 0..groups {
        let of = data.iter().enumerate().filter(|(i, _)| i % channels / per_group == group).map(|(_, v)| f64::from(*v));
        let n = (data.len() / groups) as f64;
        let mean = of.clone().sum::<f64>() / n;
        let variance = of.map(|v| (v - mean) * (v - mean)).sum::<f64>() / n;
        all.extend([mean as f32, (1.0 / (variance + 1e-6).sqrt()) as f32]);
    }
    all
}

/// Terms of an output frame as (input, slab), its bias, and whether it has a residual.
type Output = (Vec<(usize, u8)>, u8, bool);
/// Phase, edge, and the input pixel (row, column) of each tap, of an output pixel.
type Seen = (usize, usize, Vec<(usize, (i64, i64))>);

struct Case {
    layout: ConvLayout,
    input: FrameShape,
    weights: Weights,
    inputs: Vec<Vec<f32>>,
    shortcut: Vec<f32>,
    residual: Vec<f32>,
    frames: Vec<Output>,
}

impl Case {
    fn output(&self) -> FrameShape {
        self.layout.window.output(self.input, self.layout.cout)
    }

    /// Three frames of up to three terms, the last ones with the shortcut, if there is one.
    fn new(layout: ConvLayout, height: u64, width: u64, seed: u64) -> Case {
        let mut random = Random(seed);
        let input = FrameShape::new(height, width, layout.cin);
        let output = layout.window.output(input, layout.cout);
        let weights = Weights::new(&layout, &mut random);
        let inputs: Vec<Vec<f32>> = (0..3)
            .map(|i| {
                let data: Vec<f32> =
                    random.fill(input.elements() as usize).iter().map(|v| v * 3.0 + 0.7 * i as f32).collect();
                match layout.prologue {
                    Prologue::None => data,
                    _ => with_statistics(&data, layout.cin as usize, layout.groups as usize),
                }
            })
            .collect();
        let shortcut = random.fill(output.with_channels(layout.shortcut.unwrap_or(0)).elements() as usize);
        let residual = random.fill(output.elements() as usize);
        let mut frames = Vec::new();
        for frame in 0..3u64 {
            let mut terms: Vec<(usize, u8)> =
                (0..=frame).map(|t| (t as usize, ((t + frame) % layout.slabs) as u8)).collect();
            if layout.shortcut.is_some() && frame > 0 {
                terms.push((usize::MAX, layout.slabs as u8));
            }
            frames.push((terms, (frame % layout.biases) as u8, frame != 1));
        }
        Case { layout, input, weights, inputs, shortcut, residual, frames }
    }

    /// Runs frames in calls of `per_call`, and returns each one's pixels and statistics.
    fn run(&mut self, cpu: &Cpu, per_call: usize, stop: &mut Stop) -> Result<Vec<Vec<f32>>> {
        let (layout, output) = (self.layout, self.output());
        let mut arena = Arena::new(cpu);
        let inputs: Vec<Frame> = self.inputs.iter().map(|data| arena.frame(self.input, layout.groups, data)).collect();
        let shortcut = arena.frame(output.with_channels(layout.shortcut.unwrap_or(0)), 0, &self.shortcut);
        let residual = arena.frame(output, 0, &self.residual);
        let frames: Vec<ConvFrame> = self
            .frames
            .iter()
            .map(|(list, bias, add)| {
                let mut terms = Terms::new();
                for (input, slab) in list {
                    let frame = if *input == usize::MAX { shortcut } else { inputs[*input] };
                    terms.push(Term { frame, slab: *slab });
                }
                let out = Frame(arena.reserve(cpu.frame_bytes(output, layout.groups)));
                ConvFrame { terms, bias: *bias, residual: add.then_some(residual), out }
            })
            .collect();
        let bytes = cpu.conv_scratch(&layout, self.input, per_call as u64);
        let scratch = arena.reserve(bytes);
        let mut memory = arena.build();
        let conv = cpu.prepare(&(), 0, &layout, &mut self.weights)?;
        let statistics = layout.cout.is_multiple_of(layout.groups);
        for frames in frames.chunks(per_call) {
            let op = ConvOp { layout: &layout, input: self.input, frames, statistics, scratch };
            cpu.conv(&mut memory, &conv, &op, stop)?;
        }
        let len = output.elements() as usize;
        let extra = if statistics { 2 * layout.groups as usize } else { 0 };
        for (at, len) in frames.iter().map(|f| (f.out.0, len + extra)).chain([(scratch, bytes as usize / 4)]) {
            let after = &floats(&memory)[at as usize / 4 + len..][..GUARD as usize / 4];
            assert!(after.iter().all(|v| v.is_nan()), "{layout:?}: written beyond the end");
        }
        Ok(frames.iter().map(|f| read(&memory, f.out.0, len + extra).to_vec()).collect())
    }

    /// What the prologue makes of a value of an input.
    fn prologue(&self, input: usize, index: usize) -> f64 {
        let data = &self.inputs[input];
        let v = f64::from(data[index]);
        if self.layout.prologue == Prologue::None {
            return v;
        }
        let c = index % self.layout.cin as usize;
        let group = c / (self.layout.cin / self.layout.groups) as usize;
        let statistics = &data[self.input.elements() as usize + 2 * group..];
        let v = (v - f64::from(statistics[0])) * f64::from(statistics[1]);
        let v = v * f64::from(self.weights.gamma[c]) + f64::from(self.weights.beta[c]);
        if self.layout.prologue == Prologue::Norm { v } else { v / (1.0 + (-v).exp()) }
    }

    /// Value and sum of the summands' magnitudes of each output.
    fn exact(&self, frame: usize) -> Vec<(f64, f64)> {
        let (layout, output) = (&self.layout, self.output());
        let (terms, bias, add) = &self.frames[frame];
        let [cin, cout] = [layout.cin as usize, layout.cout as usize];
        let prepared: Vec<Vec<f64>> = (0..self.inputs.len())
            .map(|i| (0..self.input.elements() as usize).map(|at| self.prologue(i, at)).collect())
            .collect();
        let mut sums = Vec::new();
        for y in 0..output.height as i64 {
            for x in 0..output.width as i64 {
                let (phase, edge, taps) = self.window(y, x);
                for c in 0..cout {
                    let at = sums.len();
                    let mut sum = (0.0, 0.0);
                    let mut push = |v: f64| sum = (sum.0 + v, sum.1 + v.abs());
                    push(f64::from(self.weights.biases[usize::from(*bias)][(phase * 4 + edge) * cout + c]));
                    if *add {
                        push(f64::from(self.residual[at]));
                    }
                    for (input, slab) in terms {
                        let slab = &self.weights.slabs[usize::from(*slab)];
                        if *input == usize::MAX {
                            let channels = layout.shortcut.unwrap() as usize;
                            for k in 0..channels {
                                let v = self.shortcut[(at / cout) * channels + k];
                                push(f64::from(v) * f64::from(slab[k * cout + c]));
                            }
                            continue;
                        }
                        for (tap, (y, x)) in &taps {
                            let inside =
                                (0..self.input.height as i64).contains(y) && (0..self.input.width as i64).contains(x);
                            if !inside {
                                continue;
                            }
                            let pixel = *y as usize * self.input.width as usize + *x as usize;
                            for k in 0..cin {
                                let w =
                                    slab[((phase * layout.window.side().pow(2) as usize + tap) * cin + k) * cout + c];
                                push(prepared[*input][pixel * cin + k] * f64::from(w));
                            }
                        }
                    }
                    sums.push(sum);
                }
            }
        }
        sums
    }

    fn window(&self, y: i64, x: i64) -> Seen {
        let side = self.layout.window.side() as i64;
        let taps = (0..side * side).map(|t| (t as usize, (t / side, t % side)));
        match self.layout.window {
            Window::Point => (0, 0, vec![(0, (y, x))]),
            Window::Same => (0, 0, taps.map(|(t, (i, j))| (t, (y + i - 1, x + j - 1))).collect()),
            Window::Down => (0, 0, taps.map(|(t, (i, j))| (t, (2 * y + i, 2 * x + j))).collect()),
            Window::Up => {
                let (r, s) = (y % 2, x % 2);
                let (y, x) = (y / 2, x / 2);
                let row = y == if r == 0 { 0 } else { self.input.height as i64 - 1 };
                let column = x == if s == 0 { 0 } else { self.input.width as i64 - 1 };
                let edge = usize::from(row) + 2 * usize::from(column);
                let taps = taps.map(|(t, (i, j))| (t, (y + r + i - 1, x + s + j - 1))).collect();
                ((2 * r + s) as usize, edge, taps)
            }
        }
    }

    fn check(&mut self, cpus: &[Cpu]) {
        let exact: Vec<Vec<(f64, f64)>> = (0..self.frames.len()).map(|frame| self.exact(frame)).collect();
        for cpu in cpus {
            let got = self.run(cpu, 3, &mut || false).unwrap();
            let what = format!("{:?} {:?} {:?}", cpu.instructions(), self.layout, self.input);
            for (frame, (got, exact)) in got.iter().zip(&exact).enumerate() {
                for (i, (value, magnitude)) in exact.iter().enumerate() {
                    let error = (f64::from(got[i]) - value).abs() / magnitude.max(1.0);
                    assert!(error <= 2e-6, "{what}: frame {frame}, element {i} is {}, not {value}", got[i]);
                }
                let groups = (got.len() - exact.len()) / 2;
                if groups == 0 {
                    continue;
                }
                let expected = with_statistics(&got[..exact.len()], self.layout.cout as usize, groups);
                for (got, expected) in got[exact.len()..].iter().zip(&expected[exact.len()..]) {
                    let error = (got - expected).abs() / expected.abs().max(1.0);
                    assert!(error <= 1e-6, "{what}: frame {frame}, statistics {got}, not {expected}");
                }
            }
        }
    }
}

fn cpus() -> Vec<Cpu> {
    Instructions::available().into_iter().map(|set| cpu(set, 2)).collect()
}

fn layout(cin: u64, cout: u64, window: Window, prologue: Prologue) -> ConvLayout {
    ConvLayout { cin, cout, window, prologue, slabs: 3, shortcut: None, biases: 2, groups: 1 }
}

#[test]
fn convolutions_of_all_kinds_and_sizes() {
    let sizes = [(1, 1), (2, 2), (1, 13), (13, 1), (4, 14), (3, 15), (7, 29), (6, 44)];
    let channels = [(1, 1, 1), (3, 16, 1), (16, 3, 1), (10, 24, 2), (24, 10, 2), (35, 70, 5), (48, 48, 16)];
    let cpus = cpus();
    let mut seed = 1;
    for window in [Window::Point, Window::Same, Window::Down, Window::Up] {
        for (height, width) in sizes {
            if window == Window::Down && (height % 2 != 0 || width % 2 != 0) {
                continue;
            }
            for (cin, cout, groups) in channels {
                seed += 1;
                let prologue = [Prologue::None, Prologue::Norm, Prologue::NormSilu][seed as usize % 3];
                let shortcut = [None, Some(5), Some(33)][seed as usize / 3 % 3];
                let layout = ConvLayout { shortcut, groups, ..layout(cin, cout, window, prologue) };
                Case::new(layout, height, width, seed).check(&cpus);
            }
        }
    }
}

#[test]
fn convolutions_of_many_areas() {
    let cpus = cpus();
    for (window, cin, height, width) in
        [(Window::Same, 512, 25, 23), (Window::Up, 512, 31, 27), (Window::Down, 256, 30, 54), (Window::Same, 2, 90, 61)]
    {
        let layout = ConvLayout { groups: 2, ..layout(cin, 6, window, Prologue::NormSilu) };
        let areas = geometry::Geometry::new(&layout, FrameShape::new(height, width, cin)).areas();
        assert!(areas > 1, "{layout:?}");
        Case::new(layout, height, width, 5).check(&cpus);
    }
}

#[test]
fn a_convolution_may_have_no_terms() {
    for window in [Window::Same, Window::Up] {
        let mut case = Case::new(layout(4, 40, window, Prologue::None), 3, 5, 9);
        case.frames[0].0.clear();
        case.check(&cpus());
    }
}

fn bits(frames: &[Vec<f32>]) -> Vec<Vec<u32>> {
    frames.iter().map(|frame| frame.iter().map(|v| v.to_bits()).collect()).collect()
}

#[test]
fn neither_threads_nor_frames_in_a_call_change_a_bit() {
    for instructions in Instructions::available() {
        for window in [Window::Point, Window::Same, Window::Down, Window::Up] {
            let layout = ConvLayout { shortcut: Some(7), groups: 4, ..layout(264, 36, window, Prologue::NormSilu) };
            let mut case = Case::new(layout, 34, 40, 3);
            assert!(geometry::Geometry::new(&layout, case.input).areas() > 1);
            let expected = bits(&case.run(&cpu(instructions, 1), 3, &mut || false).unwrap());
            for threads in [1, 2, 3] {
                for per_call in [1, 3] {
                    let got = bits(&case.run(&cpu(instructions, threads), per_call, &mut || false).unwrap());
                    assert!(got == expected, "{instructions:?} {window:?}, {threads} threads, {per_call} a call");
                }
            }
        }
    }
}

#[test]
fn a_stopped_convolution_can_be_run_again() {
    let layout = ConvLayout { groups: 4, ..layout(64, 64, Window::Same, Prologue::NormSilu) };
    let cpu = cpu(Instructions::Auto, 2);
    let mut case = Case::new(layout, 120, 120, 3);
    let expected = bits(&case.run(&cpu, 3, &mut || false).unwrap());
    let output = case.output();
    let mut arena = Arena::new(&cpu);
    let input = arena.frame(case.input, 4, &case.inputs[0]);
    let residual = arena.frame(output, 0, &case.residual);
    let out = Frame(arena.reserve(cpu.frame_bytes(output, 4)));
    let scratch = arena.reserve(cpu.conv_scratch(&layout, case.input, 1));
    let mut memory = arena.build();
    let conv = cpu.prepare(&(), 0, &layout, &mut case.weights).unwrap();
    let mut terms = Terms::new();
    terms.push(Term { frame: input, slab: 0 });
    let frames = [ConvFrame { terms, bias: 0, residual: Some(residual), out }];
    let op = ConvOp { layout: &layout, input: case.input, frames: &frames, statistics: true, scratch };
    for after in 0..6 {
        let mut asked = 0;
        let mut stop = || {
            asked += 1;
            asked > after
        };
        assert_eq!(cpu.conv(&mut memory, &conv, &op, &mut stop), Err(Error::Cancelled));
    }
    cpu.conv(&mut memory, &conv, &op, &mut || false).unwrap();
    let len = output.elements() as usize + 8;
    assert!(bits(&[read(&memory, out.0, len).to_vec()])[0] == expected[0]);
}

#[test]
fn wrong_operations_are_refused() {
    let layout = layout(4, 4, Window::Down, Prologue::None);
    let cpu = cpu(Instructions::Auto, 1);
    let mut case = Case::new(layout, 4, 4, 3);
    let conv = cpu.prepare(&(), 0, &layout, &mut case.weights).unwrap();
    let mut memory = cpu.allocate(1 << 20, HostMemory::default()).unwrap();
    let mut terms = Terms::new();
    terms.push(Term { frame: Frame(0), slab: 0 });
    let good = ConvFrame { terms, bias: 0, residual: None, out: Frame(4096) };
    let input = case.input;
    let mut run = |layout: &ConvLayout, input, frame, scratch| {
        let frames = [frame];
        let op = ConvOp { layout, input, frames: &frames, statistics: false, scratch };
        cpu.conv(&mut memory, &conv, &op, &mut || false)
    };
    assert_eq!(run(&layout, input, good, 8192), Ok(()));
    let refused = |result| matches!(result, Err(Error::Internal(_)));
    assert!(refused(run(&layout, FrameShape::new(3, 4, 4), good, 8192)));
    assert!(refused(run(&layout, FrameShape::new(4, 4, 5), good, 8192)));
    assert!(refused(run(&layout, input, good, (1 << 20) - 64)));
    assert!(refused(run(&layout, input, ConvFrame { out: Frame(1 << 20), ..good }, 8192)));
    assert!(refused(run(&layout, input, ConvFrame { bias: 2, ..good }, 8192)));
    assert!(refused(run(&ConvLayout { slabs: 2, ..layout }, input, good, 8192)));
    let mut terms = Terms::new();
    terms.push(Term { frame: Frame(0), slab: 3 });
    assert!(refused(run(&layout, input, ConvFrame { terms, ..good }, 8192)));
}

fn attend(cpu: &Cpu, shape: FrameShape, inputs: &[Vec<f32>], per_call: usize) -> Vec<Vec<f32>> {
    let mut arena = Arena::new(cpu);
    let inputs: Vec<Frame> =
        inputs.iter().map(|data| arena.frame(shape.with_channels(3 * shape.channels), 0, data)).collect();
    let frames: Vec<(Frame, Frame)> =
        inputs.iter().map(|input| (*input, Frame(arena.reserve(cpu.frame_bytes(shape, 0))))).collect();
    let bytes = cpu.attention_scratch(shape, per_call as u64);
    let scratch = arena.reserve(bytes);
    let mut memory = arena.build();
    for frames in frames.chunks(per_call) {
        cpu.attention(&mut memory, &AttentionOp { shape, frames, scratch }, &mut || false).unwrap();
    }
    let len = shape.elements() as usize;
    for (at, len) in frames.iter().map(|f| (f.1.0, len)).chain([(scratch, bytes as usize / 4)]) {
        assert!(floats(&memory)[at as usize / 4 + len..][..GUARD as usize / 4].iter().all(|v| v.is_nan()));
    }
    frames.iter().map(|f| read(&memory, f.1.0, len).to_vec()).collect()
}

#[test]
fn attention_at_all_sizes() {
    let sizes = [(1, 1, 1), (1, 2, 16), (3, 11, 24), (8, 7, 5), (19, 16, 40), (5, 57, 64)];
    for instructions in Instructions::available() {
        for (height, width, channels) in sizes {
            let shape = FrameShape::new(height, width, channels);
            let (n, c) = (shape.pixels() as usize, channels as usize);
            let mut random = Random(7);
            let inputs: Vec<Vec<f32>> =
                (0..3).map(|_| random.fill(3 * n * c).iter().map(|v| v * 3.0).collect()).collect();
            let got = attend(&cpu(instructions, 2), shape, &inputs, 3);
            for (input, got) in inputs.iter().zip(&got) {
                let at = |pixel: usize, part: usize, c0: usize| f64::from(input[(pixel * 3 + part) * c + c0]);
                for q in 0..n {
                    let scores: Vec<f64> =
                        (0..n).map(|k| (0..c).map(|i| at(q, 0, i) * at(k, 1, i)).sum::<f64>()).collect();
                    let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    let p: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
                    let total: f64 = p.iter().sum();
                    for i in 0..c {
                        let exact = (0..n).map(|k| p[k] * at(k, 2, i)).sum::<f64>() / total;
                        let error = (f64::from(got[q * c + i]) - exact).abs();
                        assert!(error < 6e-5, "{instructions:?} {shape:?}: {} not {exact}", got[q * c + i]);
                    }
                }
            }
            for threads in [1, 3] {
                for per_call in [1, 3] {
                    let again = attend(&cpu(instructions, threads), shape, &inputs, per_call);
                    assert!(bits(&again) == bits(&got), "{threads} threads, {per_call} a call");
                }
            }
        }
    }
}

/// A host tensor and the memory it lies in.
struct Host {
    data: Vec<u64>,
    shape: Shape,
    dtype: DType,
    strides: [i64; 5],
    first: i64,
}

impl Host {
    /// `order` lists the axes from the slowest to the fastest, those in `reversed` run backwards, rows are padded.
    fn new(shape: Shape, dtype: DType, order: [usize; 5], reversed: &[usize]) -> Host {
        let mut strides = [0; 5];
        let (mut step, mut first) = (1i64, 0);
        for axis in order.into_iter().rev() {
            let dim = shape.dims()[axis] as i64;
            strides[axis] = step;
            if reversed.contains(&axis) {
                strides[axis] = -step;
                first += step * (dim - 1);
            }
            step *= dim + i64::from(axis == 4);
        }
        Host { data: vec![0x5555_5555_5555_5555; step as usize], shape, dtype, strides, first }
    }

    fn address(&self, index: i64) -> *mut u8 {
        self.data
            .as_ptr()
            .cast_mut()
            .cast::<u8>()
            .wrapping_offset((self.first + index) as isize * self.dtype.bytes() as isize)
    }

    fn view(&self) -> View {
        View::checked("host", self.address(0), self.dtype, Place::Cpu, self.shape, Some(self.strides), true).unwrap()
    }

    fn index(&self, at: [u64; 5]) -> i64 {
        at.iter().zip(self.strides).map(|(i, s)| *i as i64 * s).sum()
    }

    fn get(&self, at: [u64; 5]) -> f32 {
        let address = self.address(self.index(at));
        // SAFETY: an element of the test's own memory.
        unsafe {
            match self.dtype {
                DType::U8 => f32::from(*address),
                DType::U16 => f32::from(*address.cast::<u16>()),
                DType::F16 => (*address.cast::<half::f16>()).to_f32(),
                DType::BF16 => (*address.cast::<half::bf16>()).to_f32(),
                DType::F32 => *address.cast::<f32>(),
            }
        }
    }

    fn set(&mut self, at: [u64; 5], value: f32) {
        let address = self.address(self.index(at));
        // SAFETY: an element of the test's own memory.
        unsafe {
            match self.dtype {
                DType::U8 => *address = value as u8,
                DType::U16 => *address.cast::<u16>() = value as u16,
                DType::F16 => *address.cast::<half::f16>() = half::f16::from_f32(value),
                DType::BF16 => *address.cast::<half::bf16>() = half::bf16::from_f32(value),
                DType::F32 => *address.cast::<f32>() = value,
            }
        }
    }
}

const PLANAR: [usize; 5] = [0, 1, 2, 3, 4];
const INTERLEAVED: [usize; 5] = [0, 2, 3, 4, 1];

#[test]
fn loads_from_every_layout() {
    let cpu = cpu(Instructions::Auto, 2);
    for dtype in DType::ALL {
        for (order, reversed) in [(PLANAR, &[][..]), (INTERLEAVED, &[]), (INTERLEAVED, &[3]), (PLANAR, &[1, 4])] {
            let mut host = Host::new(Shape::new(2, 3, 2, 5, 7), dtype, order, reversed);
            for i in 0..2 * 3 * 2 * 5 * 7 {
                host.set([i / 210, i / 70 % 3, i / 35 % 2, i / 7 % 5, i % 7], (i * 7 % 251) as f32);
            }
            let view = host.view();
            for (top, left, height, width) in [(0, 0, 5, 7), (2, 3, 6, 9), (4, 6, 1, 1), (9, 9, 2, 2)] {
                let shape = FrameShape::new(height, width, 3);
                let mut arena = Arena::new(&cpu);
                let into = Frame(arena.reserve(cpu.frame_bytes(shape, 0)));
                let mut memory = arena.build();
                let map = Affine { mul: 0.5, add: -3.0 };
                let op = LoadOp { from: &view, batch: 1, frame: 1, top, left, map, shape, into, staging: 0 };
                cpu.load(&mut memory, &op, &mut || false).unwrap();
                let got = read(&memory, into.0, shape.elements() as usize + 1);
                for (i, got) in got[..shape.elements() as usize].iter().enumerate() {
                    let i = i as u64;
                    let (y, x) = ((top + i / 3 / width).min(4), (left + i / 3 % width).min(6));
                    assert_eq!(*got, host.get([1, i % 3, 1, y, x]) * 0.5 - 3.0);
                }
                assert!(got[got.len() - 1].is_nan());
            }
        }
    }
}

#[test]
fn stores_into_every_layout() {
    let cpu = cpu(Instructions::Auto, 2);
    let shape = FrameShape::new(6, 8, 7);
    let mut data = Random(3).fill(shape.elements() as usize);
    data[7] = f32::NAN;
    let rows: Vec<f32> = (0..6).map(|y| y as f32 * 0.4).collect();
    let columns: Vec<f32> = (0..8).map(|x| 1.0 + x as f32).collect();
    for dtype in DType::ALL {
        for (order, reversed) in [(PLANAR, &[][..]), (INTERLEAVED, &[]), (INTERLEAVED, &[3]), (PLANAR, &[1, 4])] {
            for divide in [None, Some(Blend { rows: &rows, columns: &columns })] {
                for sample in [None, Some(Posterior { seed: 99, logvar_channel: 4 })] {
                    let host = Host::new(Shape::new(2, 3, 2, 5, 7), dtype, order, reversed);
                    let view = host.view();
                    let mut arena = Arena::new(&cpu);
                    let from = arena.frame(shape, 0, &data);
                    let mut memory = arena.build();
                    let map = Affine { mul: 150.0, add: 127.5 };
                    let clamp = Some((-0.9, 0.8));
                    let (batch, frame, clip_frame) = (1, 1, 12);
                    let op = StoreOp {
                        from,
                        shape,
                        channel: 1,
                        divide,
                        clamp,
                        sample,
                        map,
                        into: &view,
                        batch,
                        frame,
                        clip_frame,
                        scratch: 0,
                        staging: 0,
                    };
                    cpu.store(&mut memory, &op, &mut || false).unwrap();
                    for i in 0..3 * 5 * 7u64 {
                        let (c, y, x) = (i % 3, i / 3 / 7, i / 3 % 7);
                        let pixel = (y * 8 + x) as usize * 7;
                        let share = divide.map_or(1.0, |by| (by.rows[y as usize] * by.columns[x as usize]).max(1e-6));
                        let mut v = data[pixel + 1 + c as usize] / share;
                        v = if v.is_nan() { v } else { v.clamp(-0.9, 0.8) };
                        if sample.is_some() {
                            let logvar = data[pixel + 4 + c as usize] / share;
                            let place = noise::Place { batch, frame: clip_frame, channel: c, y, x };
                            v += (0.5 * logvar.clamp(-30.0, 20.0)).exp() * noise::normal(99, place);
                        }
                        let v = v * 150.0 + 127.5;
                        let got = host.get([1, c, 1, y, x]);
                        let expected = match dtype {
                            DType::U8 if v.is_nan() => 0.0,
                            DType::U16 if v.is_nan() => 0.0,
                            DType::U8 => v.round_ties_even().clamp(0.0, 255.0),
                            DType::U16 => v.round_ties_even().clamp(0.0, 65535.0),
                            DType::F16 => half::f16::from_f32(v).to_f32(),
                            DType::BF16 => half::bf16::from_f32(v).to_f32(),
                            DType::F32 => v,
                        };
                        assert!(got == expected || (got.is_nan() && expected.is_nan()), "{dtype:?}: {got} {expected}");
                    }
                    let untouched = Host::new(Shape::new(2, 3, 2, 5, 7), dtype, order, reversed);
                    assert_eq!(host.get([0, 0, 1, 0, 0]).to_bits(), untouched.get([0, 0, 1, 0, 0]).to_bits());
                }
            }
        }
    }
}

#[test]
fn tiles_blend_into_frames() {
    let cpu = cpu(Instructions::Auto, 2);
    let (tile, whole) = (FrameShape::new(3, 4, 5), FrameShape::new(7, 9, 5));
    let data = Random(3).fill(tile.elements() as usize);
    let (rows, columns) = ([0.25, 1.0, 0.5], [0.1, 0.6, 1.0, 0.3]);
    let mut arena = Arena::new(&cpu);
    let from = arena.frame(tile, 0, &data);
    let into = Frame(arena.reserve(cpu.frame_bytes(whole, 0)));
    let mut memory = arena.build();
    let fade = Blend { rows: &rows, columns: &columns };
    let mut expected = vec![0.0f32; whole.elements() as usize];
    for (top, left, clear) in [(4, 5, true), (3, 2, false), (0, 0, false)] {
        let op = BlendOp { from, from_shape: tile, into, into_shape: whole, top, left, fade, clear, scratch: 0 };
        cpu.blend(&mut memory, &op, &mut || false).unwrap();
        for (i, v) in data.iter().enumerate() {
            let (y, x, c) = (i / 20, i / 5 % 4, i % 5);
            expected[((top as usize + y) * 9 + left as usize + x) * 5 + c] += v * (rows[y] * columns[x]);
        }
    }
    assert_eq!(read(&memory, into.0, expected.len()), expected);
    let op =
        BlendOp { from, from_shape: tile, into, into_shape: whole, top: 5, left: 0, fade, clear: false, scratch: 0 };
    assert!(cpu.blend(&mut memory, &op, &mut || false).is_err());
}

unsafe extern "C" fn refuse(user: *mut std::ffi::c_void, bytes: u64, _: u64) -> *mut std::ffi::c_void {
    // SAFETY: the test passes its counter.
    unsafe { *user.cast::<u64>() = bytes };
    std::ptr::null_mut()
}

unsafe extern "C" fn forget(_: *mut std::ffi::c_void, _: *mut std::ffi::c_void, _: u64) {}

#[test]
fn memory_comes_from_the_allocator_and_nowhere_else() {
    let mut asked = 0u64;
    let callbacks = HostCallbacks { alloc: refuse, free: forget, user: (&raw mut asked).cast() };
    let cpu = Cpu::new(CpuOptions { allocator: HostAllocator::Host(callbacks), ..CpuOptions::default() }).unwrap();
    let error = cpu.allocate(777, HostMemory::default()).err().unwrap();
    assert!(matches!(&error, Error::Memory(text) if text.contains("777")), "{error}");
    let layout = layout(20, 33, Window::Same, Prologue::NormSilu);
    let mut weights = Weights::new(&layout, &mut Random(1));
    let error = cpu.prepare(&(), 0, &layout, &mut weights).err().unwrap();
    let bytes = cpu.weight_bytes(&layout);
    assert!(matches!(&error, Error::Memory(text) if text.contains(&bytes.to_string())), "{error}");
    assert_eq!(asked, bytes);
}

#[test]
fn what_the_processor_lacks_is_named() {
    for set in [Instructions::Avx512, Instructions::Avx2, Instructions::Portable] {
        match Cpu::new(CpuOptions { instructions: set, threads: Some(1), ..CpuOptions::default() }) {
            Ok(cpu) => assert_eq!(cpu.instructions(), set),
            Err(error) => assert!(matches!(&error, Error::Device(text) if text.contains("lacks")), "{error}"),
        }
    }
    let none = Cpu::new(CpuOptions { threads: Some(0), ..CpuOptions::default() });
    assert!(matches!(none, Err(Error::Argument(_))));
}
