//! A convolution with its data, and a reference in f64.

use super::*;
use crate::testing::SlabSource;
use crate::testing::paired;

/// The weights of a convolution in plain form.
pub(super) struct PlainWeights {
    slabs: Vec<Vec<f32>>,
    biases: Vec<Vec<f32>>,
    gamma: Vec<f32>,
    beta: Vec<f32>,
}

impl PlainWeights {
    pub(super) fn new(layout: &ConvLayout, precision: Precision, random: &mut Lcg) -> PlainWeights {
        let mut scaled =
            |len: u64, by: f32| random.fill(len as usize).into_iter().map(|v| v * by).collect::<Vec<f32>>();
        PlainWeights {
            slabs: (0..layout.slab_count())
                .map(|slab| scaled(layout.slab_elements(slab), 0.2).iter().map(|v| rounded(precision, *v)).collect())
                .collect(),
            biases: (0..layout.biases).map(|_| scaled(layout.bias_elements(), 1.0)).collect(),
            gamma: scaled(layout.cin, 1.0).iter().map(|v| v + 1.5).collect(),
            beta: scaled(layout.cin, 0.5),
        }
    }
}

impl SlabSource for PlainWeights {
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

/// A frame's pixels followed by its exact statistics, as a convolution writes them.
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
pub(super) type CaseFrame = (Vec<(usize, u8)>, u8, bool);
/// Of an output pixel: phase, edge, and the input pixel (row, column) of each tap.
type CasePixel = (usize, usize, Vec<(usize, (i64, i64))>);

pub(super) struct ConvCase {
    precision: Precision,
    layout: ConvLayout,
    pub(super) input: FrameShape,
    pub(super) weights: PlainWeights,
    pub(super) inputs: Vec<Vec<f32>>,
    shortcut: Vec<f32>,
    pub(super) residual: Vec<f32>,
    pub(super) frames: Vec<CaseFrame>,
}

impl ConvCase {
    pub(super) fn output(&self) -> FrameShape {
        self.layout.window.output(self.input, self.layout.cout)
    }

    /// Three frames of up to three terms, or the first six frames of a clip with pairs. Frames after the first have the
    /// shortcut, if there is one.
    pub(super) fn new(precision: Precision, layout: ConvLayout, height: u64, width: u64, seed: u64) -> ConvCase {
        let mut random = Lcg(seed);
        let round = |values: Vec<f32>| values.into_iter().map(|v| rounded(precision, v)).collect::<Vec<f32>>();
        let input = FrameShape::new(height, width, layout.cin);
        let output = layout.window.output(input, layout.cout);
        let weights = PlainWeights::new(&layout, precision, &mut random);
        let inputs: Vec<Vec<f32>> = (0..if layout.pairs.is_some() { 6 } else { 3 })
            .map(|i| {
                let data: Vec<f32> =
                    round(random.fill(input.elements() as usize).iter().map(|v| v * 3.0 + 0.7 * i as f32).collect());
                match layout.prologue {
                    Prologue::None => data,
                    _ => with_statistics(&data, layout.cin as usize, layout.norm.groups() as usize),
                }
            })
            .collect();
        let shortcut = round(random.fill(output.with_channels(layout.shortcut.unwrap_or(0)).elements() as usize));
        let residual = round(random.fill(output.elements() as usize));
        let mut frames = Vec::new();
        for frame in 0..inputs.len() as u64 {
            let mut terms: Vec<(usize, u8)> = match layout.pairs.is_some() {
                true => {
                    let recipe = paired(layout.window).recipe(frame);
                    recipe.terms().iter().map(|term| (term.input as usize, term.slab)).collect()
                }
                false => (0..=frame).map(|t| (t as usize, ((t + frame) % layout.slabs) as u8)).collect(),
            };
            if layout.shortcut.is_some() && frame > 0 {
                terms.push((usize::MAX, layout.slabs as u8));
            }
            frames.push((terms, (frame % layout.biases) as u8, frame != 1));
        }
        ConvCase { precision, layout, input, weights, inputs, shortcut, residual, frames }
    }

    /// Runs `per_call` frames per call, and returns the pixels and statistics of each.
    pub(super) fn run(&mut self, cpu: &Cpu, per_call: usize, stop: &mut Stop) -> Result<Vec<Vec<f32>>> {
        let (layout, output) = (self.layout, self.output());
        let mut arena = GuardedFrames::new(cpu);
        let inputs: Vec<DeviceOffset> =
            self.inputs.iter().map(|data| arena.frame(self.input, layout.norm.groups(), data)).collect();
        let shortcut = arena.frame(output.with_channels(layout.shortcut.unwrap_or(0)), 0, &self.shortcut);
        let residual = arena.frame(output, 0, &self.residual);
        let frames: Vec<ConvFrame<Offsets>> = self
            .frames
            .iter()
            .map(|(list, bias, add)| {
                let mut terms = Vec::new();
                for (input, slab) in list {
                    let frame = if *input == usize::MAX { shortcut } else { inputs[*input] };
                    terms.push(Term { frame, slab: *slab });
                }
                let out = DeviceOffset(arena.reserve(cpu.frame_bytes(output, layout.norm.groups())));
                ConvFrame { terms, bias: *bias, residual: add.then_some(residual), out }
            })
            .collect();
        let bytes = cpu.conv_scratch(&layout, self.input, per_call as u64);
        let scratch = arena.reserve(bytes);
        let mut memory = arena.build();
        let conv = crate::testing::prepare(cpu, (&(), 0), &layout, &mut self.weights)?;
        let statistics = layout.cout.is_multiple_of(layout.norm.groups());
        for frames in frames.chunks(per_call) {
            let op = conv_op(layout, self.input, frames, statistics);
            run_op(cpu, &mut memory, op, std::slice::from_ref(&conv), scratch, stop)?;
        }
        let more = if statistics { 2 * layout.norm.groups() as usize } else { 0 };
        assert_guard(&memory, scratch + bytes);
        Ok(frames.iter().map(|f| read(cpu, &memory, f.out.0, output, more)).collect())
    }

    /// A value of an input after the prologue.
    fn prologue(&self, input: usize, index: usize) -> f64 {
        let data = &self.inputs[input];
        let v = f64::from(data[index]);
        if self.layout.prologue == Prologue::None {
            return v;
        }
        let c = index % self.layout.cin as usize;
        let group = c / (self.layout.cin / self.layout.norm.groups()) as usize;
        let statistics = &data[self.input.elements() as usize + 2 * group..];
        let v = (v - f64::from(statistics[0])) * f64::from(statistics[1]);
        let v = v * f64::from(self.weights.gamma[c]) + f64::from(self.weights.beta[c]);
        let v = if self.layout.prologue == Prologue::Norm { v } else { v / (1.0 + (-v).exp()) };
        if self.precision == Precision::Bf16 { f64::from(rounded(self.precision, v as f32)) } else { v }
    }

    /// Of each output: its value, and the sum of its terms' magnitudes.
    fn exact(&self, frame: usize) -> Vec<(f64, f64)> {
        let (layout, output) = (&self.layout, self.output());
        let (terms, bias, add) = &self.frames[frame];
        let [cin, cout] = [layout.cin as usize, layout.cout as usize];
        let prepared: Vec<Vec<f64>> = (0..self.inputs.len())
            .map(|i| (0..self.input.elements() as usize).map(|at| self.prologue(i, at)).collect())
            .collect();
        let (products, bf16) = (self.products(terms), self.precision == Precision::Bf16);
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
                    for (inputs, slab) in &products {
                        let slab = &self.weights.slabs[usize::from(*slab)];
                        if inputs[0].0 == usize::MAX {
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
                                let of = |(input, factor): &(usize, f64)| factor * prepared[*input][pixel * cin + k];
                                let value = inputs.iter().map(of).sum::<f64>();
                                push(
                                    if bf16 { f64::from(rounded(self.precision, value as f32)) } else { value }
                                        * f64::from(w),
                                );
                            }
                        }
                    }
                    sums.push(sum);
                }
            }
        }
        sums
    }

    /// Terms as (inputs and their factors, slab): those of pairs are sums and differences of inputs.
    fn products(&self, terms: &[(usize, u8)]) -> Vec<(Vec<(usize, f64)>, u8)> {
        let both = |a: usize, b: usize, sign: f64| vec![(a, 1.0), (b, sign)];
        match (self.layout.pairs.is_some(), terms) {
            (true, [(d0, 2), (d1, 0), (d2, 1), rest @ ..]) => {
                let pair = vec![(both(*d1, *d2, 1.0), 0), (both(*d2, *d1, -1.0), 1), (both(*d0, *d2, -1.0), 2)];
                [pair, self.products(rest)].concat()
            }
            (true, [(d1, 0), (d2, 1), (d3, 3), rest @ ..]) => {
                let pair = vec![(both(*d1, *d2, 1.0), 0), (both(*d1, *d2, -1.0), 1), (both(*d1, *d3, -1.0), 3)];
                [pair, self.products(rest)].concat()
            }
            _ => terms.iter().map(|(input, slab)| (vec![(*input, 1.0)], *slab)).collect(),
        }
    }

    fn window(&self, y: i64, x: i64) -> CasePixel {
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

    pub(super) fn check(&mut self, cpus: &[Cpu]) {
        let exact: Vec<Vec<(f64, f64)>> = (0..self.frames.len()).map(|frame| self.exact(frame)).collect();
        for cpu in cpus {
            let got = self.run(cpu, self.frames.len(), &mut || false).unwrap();
            let what = format!("{:?} {:?} {:?}", cpu.instructions(), self.layout, self.input);
            for (frame, (got, exact)) in got.iter().zip(&exact).enumerate() {
                for (i, (value, magnitude)) in exact.iter().enumerate() {
                    let error = (f64::from(got[i]) - value).abs();
                    // The output is rounded, and now and then an input to the other side.
                    let rounding = if self.precision == Precision::Bf16 { 0.02 + value.abs() / 256.0 } else { 0.0 };
                    assert!(
                        error <= 2e-6 * magnitude.max(1.0) + rounding,
                        "{what}: frame {frame}, element {i} is {}, not {value}",
                        got[i]
                    );
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

pub(super) fn layout(cin: u64, cout: u64, window: Window, prologue: Prologue) -> ConvLayout {
    ConvLayout {
        cin,
        cout,
        window,
        prologue,
        slabs: 3,
        shortcut: None,
        biases: 2,
        norm: Norm::Group { groups: 1 },
        pairs: None,
        first_frame_slab: None,
    }
}
