//! Interprets a graph in f64: node by node, whole clips, plain loops. Nothing is folded, fused or cached.

use super::safetensors::Tensors;
use video_vae::internals::model::graph::{Conv, FirstFrame, Folding, Graph, NodeOp, NormKind, SpaceAxis};

/// One clip, [channel, frame, row, column].
#[derive(Debug, Clone, PartialEq)]
pub struct Clip {
    pub dims: [usize; 4],
    pub values: Vec<f64>,
}

impl Clip {
    pub fn new(dims: [usize; 4]) -> Clip {
        Clip { dims, values: vec![0.0; dims.iter().product()] }
    }

    /// `value` of each channel, frame, row and column.
    pub fn from_fn(dims: [usize; 4], value: impl Fn(usize, usize, usize, usize) -> f64) -> Clip {
        let [channels, frames, height, width] = dims;
        let mut values = Vec::with_capacity(dims.iter().product());
        for c in 0..channels {
            for t in 0..frames {
                for y in 0..height {
                    values.extend((0..width).map(|x| value(c, t, y, x)));
                }
            }
        }
        Clip { dims, values }
    }

    pub fn index(&self, c: usize, t: usize, y: usize, x: usize) -> usize {
        let [_, frames, height, width] = self.dims;
        ((c * frames + t) * height + y) * width + x
    }

    pub fn at(&self, c: usize, t: usize, y: usize, x: usize) -> f64 {
        self.values[self.index(c, t, y, x)]
    }

    /// The pixels of one channel in one frame.
    fn plane(&self, c: usize, t: usize) -> &[f64] {
        let pixels = self.dims[2] * self.dims[3];
        &self.values[(c * self.dims[1] + t) * pixels..][..pixels]
    }

    fn plane_mut(&mut self, c: usize, t: usize) -> &mut [f64] {
        let pixels = self.dims[2] * self.dims[3];
        &mut self.values[(c * self.dims[1] + t) * pixels..][..pixels]
    }

    pub fn add(mut self, other: &Clip) -> Clip {
        assert_eq!(self.dims, other.dims);
        self.values.iter_mut().zip(&other.values).for_each(|(a, b)| *a += b);
        self
    }

    pub fn map(mut self, f: impl Fn(f64) -> f64) -> Clip {
        self.values.iter_mut().for_each(|value| *value = f(*value));
        self
    }
}

/// The graph's output for `input`. A value is dropped after its last reader.
pub fn evaluate(graph: &Graph, tensors: &Tensors, input: Clip) -> Clip {
    for expected in graph.tensors() {
        let found = tensors.get(&expected.name).unwrap_or_else(|| panic!("no tensor {}", expected.name));
        let axes = found.shape.iter().map(|d| *d as u64).chain(std::iter::repeat(1));
        // Matrices may be convolutions with kernel 1.
        let fits = axes.zip(expected.shape.iter().chain([&1; 3])).take(5).all(|(found, expected)| found == *expected);
        assert!(fits, "shape of {expected:?}");
    }
    let mut readers = graph.readers();
    let mut values: Vec<Option<Clip>> = vec![None; graph.nodes().len()];
    values[0] = Some(input);
    for (id, node) in graph.nodes().iter().enumerate() {
        if node.op != NodeOp::Input {
            let inputs: Vec<&Clip> = node.inputs.iter().map(|input| values[*input].as_ref().unwrap()).collect();
            values[id] = Some(compute(&node.op, node.channels as usize, tensors, &inputs));
        }
        assert_eq!(values[id].as_ref().unwrap().dims[0] as u64, node.channels, "channels of {node:?}");
        for input in &node.inputs {
            readers[*input] -= 1;
            if readers[*input] == 0 {
                values[*input] = None;
            }
        }
    }
    values[graph.output()].take().unwrap()
}

/// The value of a node with `channels` channels.
fn compute(op: &NodeOp, channels: usize, tensors: &Tensors, inputs: &[&Clip]) -> Clip {
    let x = inputs[0];
    match *op {
        NodeOp::Input => unreachable!("an input is given"),
        NodeOp::Conv(ref conv) => convolve(conv, tensors, x),
        NodeOp::Norm { ref tensor, kind: NormKind::Group { groups, epsilon } } => {
            let [gamma, beta] = ["weight", "bias"].map(|part| values(tensors, tensor, part));
            group_norm(x, groups as usize, epsilon, &gamma, &beta)
        }
        NodeOp::Norm { ref tensor, kind: NormKind::Pixel { .. } } => pixel_norm(x, &values(tensors, tensor, "gamma")),
        NodeOp::Silu => x.clone().map(|v| v / (1.0 + (-v).exp())),
        NodeOp::Add => x.clone().add(inputs[1]),
        NodeOp::Attention => attention(x),
        NodeOp::Unfold { frames, side } => unfold(x, channels, frames as usize, side as usize),
        NodeOp::Nearest { side } => nearest(x, side as usize),
        NodeOp::FoldMean(folding) => each_clip(x, folding, |x| fold_mean(x, channels, folding)),
        NodeOp::RepeatUnfold(folding) => each_clip(x, folding, |x| repeat_unfold(x, channels, folding)),
        NodeOp::Patch { side } => patch(x, side as usize),
        NodeOp::Unpatch { side } => unpatch(x, side as usize),
    }
}

fn values(tensors: &Tensors, name: &str, part: &str) -> Vec<f64> {
    tensors[&format!("{name}.{part}")].values.iter().map(|value| f64::from(*value)).collect()
}

fn convolve(conv: &Conv, tensors: &Tensors, x: &Clip) -> Clip {
    let stacked = |part| -> Vec<f64> { conv.tensors.iter().flat_map(|name| values(tensors, name, part)).collect() };
    let (weight, bias) = (stacked("weight"), stacked("bias"));
    let [cin, frames, height, width] = x.dims;
    let (kernel, stride) = (conv.time.kernel as usize, conv.time.stride as usize);
    let taps = (conv.space.kernel * conv.space.kernel) as usize;
    let passed = matches!(conv.time.first, FirstFrame::PassedAndRead | FirstFrame::PassedAndHidden);
    let size = [height, width].map(|length| output_length(conv.space, length));
    let mut out = Clip::new([bias.len(), (frames - 1) / stride + 1, size[0], size[1]]);
    for (o, bias) in bias.iter().enumerate() {
        for t in 0..out.dims[1] {
            let plane = out.plane_mut(o, t);
            if passed && t == 0 {
                plane.copy_from_slice(x.plane(o % cin, 0));
                continue;
            }
            plane.fill(*bias);
            for dt in 0..kernel {
                let Some(frame) = source_frame(conv.time.first, stride * t + dt, kernel - 1) else { continue };
                for i in 0..cin {
                    let weight = &weight[((o * cin + i) * kernel + dt) * taps..][..taps];
                    convolve_plane(plane, size, x.plane(i, frame), [height, width], weight, conv.space);
                }
            }
        }
    }
    out
}

fn output_length(space: SpaceAxis, length: usize) -> usize {
    (length + (space.padding[0] + space.padding[1]) as usize - space.kernel as usize) / space.stride as usize + 1
}

/// The frame that is read at `position` in a clip with `before` frames in front of it. None: zeros.
fn source_frame(first: FirstFrame, position: usize, before: usize) -> Option<usize> {
    match first {
        FirstFrame::Repeated => Some(position.saturating_sub(before)),
        FirstFrame::AfterZeros | FirstFrame::PassedAndRead => position.checked_sub(before),
        FirstFrame::PassedAndHidden => position.checked_sub(before).filter(|frame| *frame > 0),
    }
}

/// Adds what one channel of one frame contributes to one of the output. Sizes: rows, columns.
fn convolve_plane(
    out: &mut [f64],
    out_size: [usize; 2],
    x: &[f64],
    size: [usize; 2],
    weight: &[f64],
    space: SpaceAxis,
) {
    let [kernel, stride, padding] = [space.kernel, space.stride, space.padding[0]].map(|n| n as usize);
    for dy in 0..kernel {
        for dx in 0..kernel {
            let weight = weight[dy * kernel + dx];
            // Columns whose input is no padding.
            let first = padding.saturating_sub(dx).div_ceil(stride);
            let end = (size[1] + padding).saturating_sub(dx).div_ceil(stride).min(out_size[1]);
            for y in 0..out_size[0] {
                let Some(row) = (stride * y + dy).checked_sub(padding).filter(|row| *row < size[0]) else { continue };
                let inputs = x[row * size[1]..][..size[1]].iter().skip(stride * first + dx - padding).step_by(stride);
                let outputs = &mut out[y * out_size[1]..][first.min(end)..end];
                outputs.iter_mut().zip(inputs).for_each(|(out, x)| *out += weight * x);
            }
        }
    }
}

fn group_norm(x: &Clip, groups: usize, epsilon: f64, gamma: &[f64], beta: &[f64]) -> Clip {
    let [channels, frames, height, width] = x.dims;
    assert_eq!(channels % groups, 0, "{channels} channels in {groups} groups");
    let size = channels / groups;
    let count = (size * height * width) as f64;
    let mut out = x.clone();
    for t in 0..frames {
        for group in 0..groups {
            let members = group * size..(group + 1) * size;
            let pixels = || members.clone().flat_map(|c| x.plane(c, t));
            let mean = pixels().sum::<f64>() / count;
            let variance = pixels().map(|value| (value - mean).powi(2)).sum::<f64>() / count;
            for c in members.clone() {
                let scaled =
                    |value: &mut f64| *value = (*value - mean) / (variance + epsilon).sqrt() * gamma[c] + beta[c];
                out.plane_mut(c, t).iter_mut().for_each(scaled);
            }
        }
    }
    out
}

fn pixel_norm(x: &Clip, gamma: &[f64]) -> Clip {
    let channels = x.dims[0];
    let length = |t, y, column| (0..channels).map(|c| x.at(c, t, y, column).powi(2)).sum::<f64>().sqrt().max(1e-12);
    let [_, frames, height, width] = x.dims;
    let lengths = Clip::from_fn([1, frames, height, width], |_, t, y, column| length(t, y, column));
    Clip::from_fn(x.dims, |c, t, y, column| {
        x.at(c, t, y, column) / lengths.at(0, t, y, column) * (channels as f64).sqrt() * gamma[c]
    })
}

fn attention(qkv: &Clip) -> Clip {
    let [wide, frames, height, width] = qkv.dims;
    let (channels, pixels) = (wide / 3, height * width);
    let mut out = Clip::new([channels, frames, height, width]);
    for t in 0..frames {
        let [q, k, v] = [0, 1, 2].map(|part| move |c: usize, pixel: usize| qkv.plane(part * channels + c, t)[pixel]);
        for pixel in 0..pixels {
            let dot = |other| (0..channels).map(|c| q(c, pixel) * k(c, other)).sum::<f64>();
            let scores: Vec<f64> = (0..pixels).map(|other| dot(other) / (channels as f64).sqrt()).collect();
            let most = scores.iter().copied().fold(f64::MIN, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - most).exp()).collect();
            let total: f64 = weights.iter().sum();
            for c in 0..channels {
                let sum: f64 = (0..pixels).map(|other| weights[other] * v(c, other)).sum();
                out.plane_mut(c, t)[pixel] = sum / total;
            }
        }
    }
    out
}

fn unfold(x: &Clip, channels: usize, frames: usize, side: usize) -> Clip {
    let [_, inputs, height, width] = x.dims;
    Clip::from_fn([channels, frames * (inputs - 1) + 1, height * side, width * side], |c, t, y, column| {
        let part = if t == 0 { 0 } else { (t - 1) % frames };
        let channel = ((y % side * side + column % side) * frames + part) * channels + c;
        x.at(channel, t.div_ceil(frames), y / side, column / side)
    })
}

fn nearest(x: &Clip, side: usize) -> Clip {
    let [channels, frames, height, width] = x.dims;
    let dims = [channels, frames, height * side, width * side];
    Clip::from_fn(dims, |c, t, y, column| x.at(c, t, y / side, column / side))
}

/// Clip by clip, if each frame is one.
fn each_clip(x: &Clip, folding: Folding, map: impl Fn(&Clip) -> Clip) -> Clip {
    if !folding.still {
        return map(x);
    }
    let [channels, frames, height, width] = x.dims;
    let frame = |t| Clip::from_fn([channels, 1, height, width], |c, _, y, column| x.at(c, t, y, column));
    let made: Vec<Clip> = (0..frames).map(|t| map(&frame(t))).collect();
    let [channels, _, height, width] = made[0].dims;
    Clip::from_fn([channels, frames, height, width], |c, t, y, column| made[t].at(c, 0, y, column))
}

fn fold_mean(x: &Clip, channels: usize, folding: Folding) -> Clip {
    let (frames, side) = (folding.frames as usize, folding.side as usize);
    let [cin, inputs, height, width] = x.dims;
    let (before, block) = (frames - 1, frames * side * side);
    assert_eq!(((inputs + before) % frames, height % side, width % side), (0, 0, 0), "blocks of {:?}", x.dims);
    assert_eq!(cin * block % channels, 0, "{cin} x {block} channels to {channels}");
    let run = cin * block / channels;
    Clip::from_fn([channels, (inputs + before) / frames, height / side, width / side], |o, t, y, column| {
        let folded = |n: usize| {
            let (row, col) = (y * side + n / side % side, column * side + n % side);
            let frame = (t * frames + n / (side * side) % frames).checked_sub(before);
            frame.map_or(0.0, |frame| x.at(n / block, frame, row, col))
        };
        (o * run..(o + 1) * run).map(folded).sum::<f64>() / run as f64
    })
}

fn repeat_unfold(x: &Clip, channels: usize, folding: Folding) -> Clip {
    let (frames, side) = (folding.frames as usize, folding.side as usize);
    let [cin, inputs, height, width] = x.dims;
    let wide = channels * frames * side * side;
    assert_eq!(wide % cin, 0, "{cin} channels repeated to {wide}");
    let dropped = frames - 1;
    Clip::from_fn([channels, inputs * frames - dropped, height * side, width * side], |c, t, y, column| {
        let (frame, part) = ((t + dropped) / frames, (t + dropped) % frames);
        let channel = ((c * frames + part) * side + y % side) * side + column % side;
        x.at(channel / (wide / cin), frame, y / side, column / side)
    })
}

fn patch(x: &Clip, side: usize) -> Clip {
    let [channels, frames, height, width] = x.dims;
    assert_eq!((height % side, width % side), (0, 0), "patches of {:?}", x.dims);
    Clip::from_fn([channels * side * side, frames, height / side, width / side], |c, t, y, column| {
        x.at(c / (side * side), t, y * side + c % side, column * side + c / side % side)
    })
}

fn unpatch(x: &Clip, side: usize) -> Clip {
    let [channels, frames, height, width] = x.dims;
    Clip::from_fn([channels / (side * side), frames, height * side, width * side], |c, t, y, column| {
        x.at((c * side + column % side) * side + y % side, t, y / side, column / side)
    })
}
