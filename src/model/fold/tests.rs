//! Folded weights, applied by recipe, against the definition of the layer.

use super::buffers::Line;
use super::*;
use crate::ir::{DType, Prologue};
use crate::model::checkpoint::testing::checkpoint;
use crate::model::families::seedvr2::Sizes;
use crate::model::geometry::Direction;
use crate::model::graph::{FirstFrame, TimeAxis};
use crate::model::lower::{Pairs, TimeRule};
use crate::testing::{Lcg, network};

fn config() -> Sizes {
    Sizes { channels: vec![3, 6, 3], layers: 1, groups: 3, latent: 2, temporal_levels: 1 }
}

const CAUSAL: TimeRule = TimeRule::of(TimeAxis::causal(FirstFrame::Repeated));
const DOUBLE: TimeRule = TimeRule { unfold: 2, ..CAUSAL };

/// Frames, rows, columns, channels.
struct PlainClip {
    size: [usize; 4],
    values: Vec<f64>,
}

impl PlainClip {
    fn new(size: [usize; 4], mut value: impl FnMut(usize, usize, usize, usize) -> f64) -> PlainClip {
        let mut values = Vec::new();
        each(size, |t, y, x, c| values.push(value(t, y, x, c)));
        PlainClip { size, values }
    }

    fn noise(size: [usize; 4]) -> PlainClip {
        let mut random = Lcg(3);
        PlainClip::new(size, |_, _, _, _| f64::from(random.next()))
    }

    /// Zero outside the image.
    fn at(&self, t: usize, y: isize, x: isize, c: usize) -> f64 {
        let [_, h, w, channels] = self.size;
        let inside = (0..h as isize).contains(&y) && (0..w as isize).contains(&x);
        if inside { self.values[((t * h + y as usize) * w + x as usize) * channels + c] } else { 0.0 }
    }
}

fn each(size: [usize; 4], mut visit: impl FnMut(usize, usize, usize, usize)) {
    let [_, h, w, c] = size;
    (0..size.iter().product()).for_each(|i| visit(i / (h * w * c), i / (w * c) % h, i / c % w, i % c));
}

fn read(checkpoint: &Checkpoint, name: &str) -> (Vec<usize>, Vec<f64>) {
    let tensor = checkpoint.tensor(name).unwrap();
    (tensor.shape.iter().map(|d| *d as usize).collect(), tensor.read_all().unwrap())
}

/// A causal convolution by its definition, padded with its first frame. `strides` are those of time and space; `pad` is
/// how far the window extends above and to the left.
fn causal_conv(
    checkpoint: &Checkpoint,
    name: &str,
    x: &PlainClip,
    strides: [usize; 2],
    pad: usize,
    size: [usize; 4],
) -> PlainClip {
    let (shape, weight) = read(checkpoint, &format!("{name}.weight"));
    let (_, bias) = read(checkpoint, &format!("{name}.bias"));
    let [_, cin, depth, height, width] = shape[..] else { panic!() };
    PlainClip::new(size, |t, row, column, co| {
        let mut sum = bias[co];
        each([depth, height, width, cin], |dt, dy, dx, ci| {
            let frame = (t * strides[0] + dt).saturating_sub(depth - 1);
            let at = |p: usize, d: usize| (p * strides[1] + d) as isize - pad as isize;
            let weight = weight[(((co * cin + ci) * depth + dt) * height + dy) * width + dx];
            sum += weight * x.at(frame, at(row, dy), at(column, dx), ci);
        });
        sum
    })
}

/// 1x1x1 convolution and unfolding. Where time is doubled, the first input keeps one of its frames.
fn unfold(checkpoint: &Checkpoint, name: &str, x: &PlainClip, frames: usize) -> PlainClip {
    let [t, h, w, c] = x.size;
    let wide = causal_conv(checkpoint, name, x, [1, 1], 0, [t, h, w, 4 * frames * c]);
    PlainClip::new([t * frames - (frames - 1), 2 * h, 2 * w, c], |f, row, column, channel| {
        let unfolded = if f == 0 { 0 } else { f + frames - 1 };
        let part = ((row % 2 * 2 + column % 2) * frames + unfolded % frames) * c + channel;
        wide.at(unfolded / frames, row as isize / 2, column as isize / 2, part)
    })
}

/// Slabs, and biases.
type Folded = (Vec<Vec<f64>>, Vec<Vec<f64>>);

/// The slabs of an output frame, and the sum of input frames that each is applied to.
fn slab_inputs(layer: &Layer, frame: u64) -> Vec<(u8, Vec<(u64, f64)>)> {
    let recipe = layer.time.recipe(frame);
    let terms: Vec<(u64, u8)> = recipe.terms().iter().map(|term| (term.input, term.slab)).collect();
    // Upsamplers halve sums of frames.
    let half = if layer.layout.window == Window::Up { 0.5 } else { 1.0 };
    let (sum, difference) = (|x, y| vec![(x, half), (y, half)], |x, y| vec![(x, half), (y, -half)]);
    match (layer.layout.pairs.is_some(), &terms[..]) {
        (true, &[(d0, 2), (d1, 0), (d2, 1)]) => {
            vec![(0, sum(d1, d2)), (1, difference(d2, d1)), (2, difference(d0, d2))]
        }
        (true, &[(d1, 0), (d2, 1), (d3, 3)]) => {
            vec![(0, sum(d1, d2)), (1, difference(d1, d2)), (3, difference(d1, d3))]
        }
        _ => terms.into_iter().map(|(frame, slab)| (slab, vec![(frame, 1.0)])).collect(),
    }
}

/// Applies slabs and biases as [`ConvLayout`] describes them. A shortcut reads `x` too.
fn apply(layer: &Layer, (slabs, biases): &Folded, x: &PlainClip, size: [usize; 4]) -> PlainClip {
    let ConvLayout { cin, cout, window, .. } = layer.layout;
    let (cin, cout, side) = (cin as usize, cout as usize, window.side() as usize);
    PlainClip::new(size, |t, row, column, co| {
        let recipe = layer.time.recipe(t as u64);
        let (phase, edge, origin): (usize, usize, [isize; 2]) = match window {
            Window::Point => (0, 0, [row as isize, column as isize]),
            Window::Same => (0, 0, [row as isize - 1, column as isize - 1]),
            Window::Down => (0, 0, [2 * row as isize, 2 * column as isize]),
            Window::Up => {
                let (r, s) = (row % 2, column % 2);
                let outer = |p: usize, all: usize| usize::from(if p.is_multiple_of(2) { p == 0 } else { p + 1 == all });
                let edge = outer(row, size[1]) + 2 * outer(column, size[2]);
                (2 * r + s, edge, [(row / 2 + r) as isize - 1, (column / 2 + s) as isize - 1])
            }
        };
        let mut sum = biases[usize::from(recipe.bias)][(phase * 4 + edge) * cout + co];
        for (slab, inputs) in slab_inputs(layer, t as u64) {
            each([1, side, side, cin], |_, i, j, ci| {
                let weight = slabs[usize::from(slab)][(((phase * side + i) * side + j) * cin + ci) * cout + co];
                let at = |frame: u64| x.at(frame as usize, origin[0] + i as isize, origin[1] + j as isize, ci);
                sum += weight * inputs.iter().map(|(frame, factor)| at(*frame) * factor).sum::<f64>();
            });
        }
        if let Some(cin) = layer.layout.shortcut {
            let shortcut = slabs.last().unwrap();
            let at = |ci| x.at(t, row as isize, column as isize, ci);
            sum += (0..cin as usize).map(|ci| shortcut[ci * cout + co] * at(ci)).sum::<f64>();
        }
        sum
    })
}

/// Everything that is folded, rounded to `T`.
fn folded<T: Rounded + Into<f64>>(weights: &LayerWeights) -> Folded {
    let layout = weights.layout;
    let mut slabs: Vec<Vec<f64>> =
        (0..layout.slab_count()).map(|slab| vec![f64::NAN; layout.slab_elements(slab) as usize]).collect();
    let mut buffers = FoldBuffers::default();
    // Uneven blocks, several of them even of few channels.
    for block in WeightBlock::all(&layout, 5, 4).into_iter().chain(WeightBlock::all(&layout, 131, 129)) {
        let (cin, cout, rows, columns) = (
            if block.shortcut { layout.shortcut.unwrap() } else { layout.cin } as usize,
            layout.cout as usize,
            block.rows() as usize,
            block.columns() as usize,
        );
        let mut each = |slab: u64, plain: &[T]| {
            assert_eq!(plain.len() as u64, block.slab_elements(&layout));
            for (at, value) in plain.iter().enumerate() {
                let (tap, row, column) = (at / columns / rows, at / columns % rows, at % columns);
                let (row, column) = (row + block.inputs.start as usize, column + block.outputs.start as usize);
                let into = &mut slabs[slab as usize][(tap * cin + row) * cout + column];
                let value: f64 = (*value).into();
                assert!(into.is_nan() || *into == value, "blocks of every size have the same bits");
                *into = value;
            }
            Ok(())
        };
        weights.fold(&block, &mut buffers, &mut each).unwrap();
    }
    let mut biases = vec![T::round(f64::NAN); (layout.biases * layout.bias_elements()) as usize];
    weights.fold_biases(&mut biases).unwrap();
    let biases: Vec<f64> = biases.into_iter().map(Into::into).collect();
    (slabs, biases.chunks(layout.bias_elements() as usize).map(<[f64]>::to_vec).collect())
}

#[track_caller]
fn assert_near(found: &PlainClip, expected: &PlainClip, tolerance: f64, what: &str) {
    assert_eq!(found.size, expected.size, "{what}");
    let scale = expected.values.iter().fold(0.0, |most: f64, v| most.max(v.abs()));
    for (index, (found, expected)) in found.values.iter().zip(&expected.values).enumerate() {
        let error = (found - expected).abs() / scale;
        assert!(error <= tolerance, "{what}: element {index} is {found}, expected {expected}: off by {error}");
    }
}

/// The definition of a layer applied to `x`, without its prologue.
fn definition(checkpoint: &Checkpoint, layer: &Layer, x: &PlainClip) -> PlainClip {
    let [t, h, w, _] = x.size;
    let cout = layer.layout.cout as usize;
    let names: Vec<&str> = layer.weights().map(|weight| weight.name.as_str()).collect();
    let stride = layer.time.rule.axis.stride as usize;
    let (strides, pad, size) = match layer.layout.window {
        Window::Up => {
            let unfolded = unfold(checkpoint, names[0], x, layer.time.rule.unfold as usize);
            return causal_conv(checkpoint, names[1], &unfolded, [1, 1], 1, unfolded.size);
        }
        Window::Down => ([stride, 2], 0, [t.div_ceil(stride), h / 2, w / 2, cout]),
        _ => ([1, 1], 1, [t, h, w, cout]),
    };
    let mut y = causal_conv(checkpoint, names[0], x, strides, pad, size);
    for shortcut in &names[1..] {
        let other = causal_conv(checkpoint, shortcut, x, [1, 1], 0, size);
        y.values.iter_mut().zip(other.values).for_each(|(sum, term)| *sum += term);
    }
    y
}

#[test]
fn folded_convolutions_match_their_definition() {
    let checkpoint = checkpoint(&config(), DType::F32);
    let mut seen = Vec::new();
    for direction in Direction::ALL {
        let plain = network(&config(), direction);
        for layer in plain.clone().layers.into_iter().chain(plain.with_pairs().with_upsampler_pairs().layers) {
            if layer.layout.window == Window::Point {
                continue;
            }
            seen.push((layer.layout.window, layer.time.rule, layer.layout.shortcut.is_some()));
            let weights = LayerWeights::new(&checkpoint, &layer, ProductType::F64).unwrap();
            let (exact, rounded) = (folded::<f64>(&weights), folded::<f32>(&weights));
            // A downsampler needs even sizes.
            let sizes = match layer.layout.window {
                Window::Down => vec![(4, 6), (2, 2), (2, 8)],
                _ => vec![(3, 4), (1, 1), (1, 4), (4, 1), (2, 2)],
            };
            // A shortcut may be wider than the convolution it is added to.
            let channels = layer.layout.cin.max(layer.layout.shortcut.unwrap_or(0)) as usize;
            for (h, w) in sizes {
                for t in [1, 2, 5] {
                    let x = PlainClip::noise([t, h, w, channels]);
                    let expected = definition(&checkpoint, &layer, &x);
                    let what = format!("{:?} on {t}x{h}x{w}", layer.tensors);
                    assert_near(&apply(&layer, &exact, &x, expected.size), &expected, 1e-12, &what);
                    assert_near(&apply(&layer, &rounded, &x, expected.size), &expected, 1e-6, &what);
                }
            }
        }
    }
    for kind in [
        (Window::Up, DOUBLE, false),
        (Window::Up, CAUSAL, false),
        (Window::Down, TimeRule::of(TimeAxis::halving(FirstFrame::Repeated)), false),
        (Window::Down, TimeRule::of(TimeAxis::POINT), false),
        (Window::Same, CAUSAL, false),
        (Window::Same, CAUSAL, true),
        (Window::Same, TimeRule { pairs: Pairs::Plain, ..CAUSAL }, false),
        (Window::Same, TimeRule { pairs: Pairs::Plain, ..CAUSAL }, true),
        (Window::Up, TimeRule { pairs: Pairs::Halved, ..CAUSAL }, false),
    ] {
        assert!(seen.contains(&kind), "{kind:?} was not tested");
    }
}

#[test]
fn projections_are_concatenated_with_scaled_queries() {
    let checkpoint = checkpoint(&config(), DType::BF16);
    let network = network(&config(), Direction::Decode);
    let c = 3;
    let mut attention = network.layers.iter().filter(|layer| layer.layout.window == Window::Point);
    let (qkv, project) = (attention.next().unwrap(), attention.next().unwrap());
    assert_eq!(qkv.layout.prologue, Prologue::Norm);
    let weights = LayerWeights::new(&checkpoint, qkv, ProductType::F64).unwrap();
    let (slabs, biases) = folded::<f64>(&weights);
    for (part, name) in ["to_q", "to_k", "to_v"].into_iter().enumerate() {
        let scale = if part == 0 { 1.0 / f64::from(c as u32).sqrt() } else { 1.0 };
        let (_, weight) = read(&checkpoint, &format!("decoder.mid_block.attentions.0.{name}.weight"));
        let (_, bias) = read(&checkpoint, &format!("decoder.mid_block.attentions.0.{name}.bias"));
        for o in 0..c {
            assert!((biases[0][part * c + o] - bias[o] * scale).abs() < 1e-15);
            for i in 0..c {
                assert!((slabs[0][i * 3 * c + part * c + o] - weight[o * c + i] * scale).abs() < 1e-15);
            }
        }
    }
    let (mut gamma, mut beta) = ([0.0; 3], [0.0; 3]);
    let mut source = BufferedWeights { weights: &weights, buffers: &mut FoldBuffers::default() };
    source.norm(&mut gamma, &mut beta).unwrap();
    for (name, found) in [("weight", gamma), ("bias", beta)] {
        let (_, expected) = read(&checkpoint, &format!("decoder.mid_block.attentions.0.group_norm.{name}"));
        assert_eq!(found.map(f64::from), *expected);
    }

    let (slabs, biases) = folded::<f64>(&LayerWeights::new(&checkpoint, project, ProductType::F64).unwrap());
    let (_, weight) = read(&checkpoint, "decoder.mid_block.attentions.0.to_out.0.weight");
    assert!((0..c * c).all(|at| slabs[0][at] == weight[at % c * c + at / c]));
    assert_eq!(biases[0], read(&checkpoint, "decoder.mid_block.attentions.0.to_out.0.bias").1);
}

#[test]
fn wide_upsamplers_match_their_definition() {
    let wide = Sizes { channels: vec![134, 134], layers: 1, groups: 2, latent: 1, temporal_levels: 1 };
    let checkpoint = checkpoint(&wide, DType::F16);
    let network = network(&wide, Direction::Decode);
    let layer = network.layers.iter().find(|layer| layer.layout.window == Window::Up).unwrap();
    let folded = folded::<f64>(&LayerWeights::new(&checkpoint, layer, ProductType::F64).unwrap());
    let x = PlainClip::noise([2, 1, 2, 134]);
    let expected = definition(&checkpoint, layer, &x);
    assert_near(&apply(layer, &folded, &x, expected.size), &expected, 1e-12, "wide upsampler");
}

#[test]
fn f32_products_of_upsamplers_are_near_those_in_f64() {
    let wide = Sizes { channels: vec![134, 134, 134], layers: 1, groups: 2, latent: 1, temporal_levels: 1 };
    let checkpoint = checkpoint(&wide, DType::F16);
    let plain = network(&wide, Direction::Decode);
    let mut seen = Vec::new();
    for layer in plain.clone().layers.into_iter().chain(plain.with_upsampler_pairs().layers) {
        if layer.layout.window != Window::Up || seen.contains(&layer.time.rule) {
            continue;
        }
        seen.push(layer.time.rule);
        let fold = |product_type| folded::<f64>(&LayerWeights::new(&checkpoint, &layer, product_type).unwrap());
        let ((found, _), (expected, _)) = (fold(ProductType::F32), fold(ProductType::F64));
        let (found, expected) = (found.concat(), expected.concat());
        let most = expected.iter().fold(0.0, |most: f64, value| most.max(value.abs()));
        let error = found.iter().zip(&expected).fold(0.0, |most: f64, (f, e)| most.max((f - e).abs())) / most;
        assert!(error > 0.0 && error < 1e-6, "{:?}: off by {error}", layer.time.rule);
    }
    for time in [DOUBLE, CAUSAL, TimeRule { pairs: Pairs::Halved, ..CAUSAL }] {
        assert!(seen.contains(&time), "{time:?} was not tested");
    }
}

#[test]
fn buffers_take_no_more_than_was_counted() {
    let checkpoint = checkpoint(&config(), DType::F32);
    for direction in Direction::ALL {
        for layer in network(&config(), direction).layers {
            let blocks = WeightBlock::all(&layer.layout, 5, 4).into_iter().chain(WeightBlock::all(&layer.layout, 9, 9));
            let types = [ProductType::F32, ProductType::F64];
            for (block, product_type) in blocks.flat_map(|block| types.map(|of| (block.clone(), of))) {
                let weights = LayerWeights::new(&checkpoint, &layer, product_type).unwrap();
                let mut buffers = FoldBuffers::<f32>::default();
                weights.fold(&block, &mut buffers, &mut |_, _| Ok(())).unwrap();
                let counted = bytes(&layer, &WeightPart::Block(block));
                for (name, taken, counted) in [
                    ("bytes", buffers.bytes.capacity(), counted.bytes),
                    ("kernels", 4 * buffers.kernels.capacity(), counted.kernels),
                    ("upscale", 4 * buffers.upscale.capacity(), counted.upscale),
                    ("conv", size_of::<Line>() * buffers.conv.capacity(), counted.conv),
                    ("products", size_of::<Line>() * buffers.products.capacity(), counted.products),
                    ("plain", 4 * buffers.plain.capacity(), counted.plain),
                ] {
                    assert!(taken as u64 <= counted, "{name} of {:?}: {taken} bytes of {counted}", layer.tensors);
                }
            }
        }
    }
}

#[test]
fn layer_of_another_network_is_refused() {
    let checkpoint = checkpoint(&config(), DType::F16);
    let other = Sizes { channels: vec![3, 6, 6], ..config() };
    let network = network(&other, Direction::Decode);
    let errors =
        network.layers.iter().filter_map(|layer| LayerWeights::new(&checkpoint, layer, ProductType::F64).err());
    assert!(errors.map(|e| matches!(e, Error::Internal(_))).reduce(|a, b| a && b).unwrap());
}
