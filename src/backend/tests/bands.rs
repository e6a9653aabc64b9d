//! Convolutions in bands and the same of whole frames, for every placement of inputs, caches and outputs.

use half::f16;

use super::*;
use crate::ir::{
    BandInput, BandPart, BandShape, BandTerm, BandedConvOp, BandedFrame, CacheFormat, CachedFrame, ConvOp, FrameRef,
    HostOffset, LayerId, Norm, NormaliseOp, PartialSums, Rematerialise, RematerialisedFrame, Shortcut, SplitColumns,
};

/// Frames of the clip, which comes in chunks of two.
pub const FRAMES: usize = 6;
pub const CACHE_FRAMES: usize = 2;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cache {
    /// About so many columns are resident, the others in host memory.
    Split(u64),
    Recomputed,
}

/// Of a frame, the frames and slabs that its sum is made of.
fn recipe(frame: usize) -> Vec<(usize, u8)> {
    let first = frame.saturating_sub(CACHE_FRAMES);
    (first..=frame).map(|t| (t, (t + CACHE_FRAMES - frame) as u8)).collect()
}

/// The same by where these frames are.
fn terms(of: &[DeviceOffset], frame: usize) -> Vec<(DeviceOffset, u8)> {
    recipe(frame).into_iter().map(|(t, slab)| (of[t], slab)).collect()
}

/// Frames before norms of pixels carry none.
fn has_statistics(layout: &ConvLayout) -> bool {
    layout.norm.groups() > 0
}

/// A convolution of whole frames, with statistics.
fn conv(layer: LayerId, layout: &ConvLayout, input: FrameShape, frames: Vec<ConvFrame<Offsets>>) -> Op<Offsets> {
    let (layout, statistics, partial_sums) = (*layout, has_statistics(layout), PartialSums::NONE);
    Op::Conv(ConvOp { layer, layout, weights: None, input, frames, statistics, partial_sums })
}

/// Values as a cache in 8 bits gives them back. [channel][frame][row][column]
fn rounded(values: &[f32], shape: FrameShape) -> Vec<f32> {
    const LEAST: f32 = -0.2786;
    let channels = shape.channels as usize;
    let (stride, block) = (values.len() / channels, CacheFormat::block(shape.channels) as usize);
    let mut out = vec![0.0; values.len()];
    for (pixel, first) in (0..stride).flat_map(|pixel| (0..channels).step_by(block).map(move |c| (pixel, c))) {
        let places = (first..first + block).map(|channel| channel * stride + pixel);
        let most = places.clone().map(|at| values[at] - LEAST).fold(1e-8, f32::max);
        let scale = f16::from_f32(most.sqrt() / 255.0);
        let scale = if scale.to_f32() < most.sqrt() / 255.0 { f16::from_bits(scale.to_bits() + 1) } else { scale };
        for at in places {
            let code = ((values[at] - LEAST).max(0.0).sqrt() / scale.to_f32()).round_ties_even().min(255.0);
            out[at] = (code * scale.to_f32()).powi(2) + LEAST;
        }
    }
    out
}

/// The bytes of all output frames with their statistics. `cache`: `None` for whole frames.
pub fn outputs<B: RawMemory>(
    gpu: &B,
    layers: (&ConvLayout, &ConvLayout),
    size: (u64, u64),
    cache: Option<Cache>,
) -> Vec<Vec<u8>> {
    run_chunks(gpu, layers, size, cache, CacheFormat::Exact).0
}

/// The same with the values. In 8 bits, frames read those of earlier chunks rounded; whole frames are rounded here.
pub fn run_chunks<B: RawMemory>(
    gpu: &B,
    (head, layer): (&ConvLayout, &ConvLayout),
    size: (u64, u64),
    cache: Option<Cache>,
    format: CacheFormat,
) -> (Vec<Vec<u8>>, Vec<f32>) {
    let pixels = FrameShape::new(size.0, size.1, head.cin);
    let input = FrameShape::new(size.0, size.1, layer.cin);
    // Layer 0 rematerialises the input of layer 1.
    let weights = [prepare(gpu, head, 5), prepare(gpu, layer, 6)];
    let sizes = gpu.sizes();
    let bytes = |shape: FrameShape| sizes.frame_bytes(shape, layer.norm.groups());
    let mut places = BlockPlaces::default();
    let mut frames = |shape: FrameShape| places.frames(bytes(shape), FRAMES);
    let (raw, made, normalised, out) = (frames(pixels), frames(input), frames(input), frames(input));
    let as_rounded = frames(input);
    let statistics = frames(FrameShape::new(0, 0, 1));
    let resident = places.frames(bytes(input), CACHE_FRAMES);
    let chunk = FRAMES as u64;
    // More than each chunk has.
    let most: Vec<BandPart> = (0..2)
        .flat_map(|i| {
            use BandPart::{HostColumns, Input, NewHostColumns, Rematerialised, Rounded};
            [HostColumns(i), Input(i), Rematerialised(i), Rounded(i), NewHostColumns(i)]
        })
        .collect();
    let most_columns = SplitColumns::new(size.1, 0, gpu.profile().column_step);
    let shape = BandShape { layout: *layer, input, columns: most_columns, format };
    let room = Room {
        scratch: sizes.conv_scratch(layer, input, chunk).max(sizes.conv_scratch(head, pixels, chunk)),
        staging: sizes.staging_bytes(pixels).max(sizes.staging_bytes(input)),
        bands: sizes.band_bytes(&shape, &most, 2).unwrap(),
        offloaded: 2 * chunk * bytes(input),
    };
    let mut job = KernelJob::new(gpu, places, room);
    job.load_random(&mut Lcg(99), pixels, &raw);
    let frames = (0..FRAMES).map(|t| frame(&terms(&raw, t), 0, None, made[t])).collect();
    job.run(conv(0, head, pixels, frames), &weights);

    let Some(cache) = cache else {
        let frames = made.iter().copied().zip(normalised.iter().copied()).collect();
        job.run(Op::Normalise(NormaliseOp { layer: 1, layout: *layer, weights: None, shape: input, frames }), &weights);
        let as_cached = match format {
            CacheFormat::Exact => normalised.clone(),
            CacheFormat::U8 => {
                let values = rounded(&job.store(input, &normalised), input);
                let from = view(&values, dims(input, &normalised));
                (0..).zip(&as_rounded).for_each(|(t, into)| job.load(&plain_load(&from, t, input, *into)));
                job.finish();
                as_rounded
            }
        };
        let read_by = |t: usize| {
            let of = |(s, slab): (usize, u8)| (if s / 2 < t / 2 { as_cached[s] } else { normalised[s] }, slab);
            recipe(t).into_iter().map(of).collect::<Vec<_>>()
        };
        let frames = (0..FRAMES).map(|t| frame(&read_by(t), 1, None, out[t])).collect();
        job.run(conv(1, layer, input, frames), &weights);
        return (job.read(&out, bytes(input)), job.store(input, &out));
    };
    let resident_columns = if let Cache::Split(columns) = cache { columns } else { input.width };
    let columns = SplitColumns::new(input.width, resident_columns, gpu.profile().column_step);
    // A frame overwrites one that is no longer needed, on the device and in host memory.
    let cached = |t: usize| CachedFrame {
        resident: (!columns.resident().is_empty()).then_some(resident[t % CACHE_FRAMES]),
        host: (!columns.host().is_empty()).then_some(HostOffset((t % CACHE_FRAMES) as u64 * bytes(input))),
    };
    for first in (0..FRAMES).step_by(2) {
        let before = if first == 0 { 0 } else { CACHE_FRAMES };
        let recomputed = if cache == Cache::Recomputed { before } else { 0 };
        let rematerialised =
            |i: usize| FrameRef::Rematerialised { index: i, statistics: statistics[first - CACHE_FRAMES + i] };
        let chunk = (first..first + 2).map(|t| FrameRef::Resident(made[t]));
        let is_cached = |t: &usize| *t >= first + 2 - CACHE_FRAMES;
        // Recomputed frames are read as a cache would store them.
        let is_rounded = |input: usize| format == CacheFormat::U8 && input < recomputed;
        let kept = (first - before + recomputed..first).map(|t| BandInput::cached(cached(t)));
        let mut inputs: Vec<BandInput<Offsets>> =
            kept.chain((0..recomputed).map(rematerialised).chain(chunk).map(BandInput::fresh)).collect();
        inputs.iter_mut().enumerate().for_each(|(i, input)| input.is_rounded = is_rounded(i));
        for (input, t) in inputs[before..].iter_mut().zip(first..first + 2) {
            match cache {
                Cache::Recomputed => input.statistics_to = Some(statistics[t]),
                Cache::Split(_) => input.cached_to = is_cached(&t).then(|| cached(t)),
            }
        }
        let banded = |t: usize| {
            let input = |t: usize| t - (first - before);
            let terms = recipe(t).into_iter().map(|(t, slab)| BandTerm {
                input: input(t),
                is_rounded: is_rounded(input(t)),
                slab,
            });
            let terms = terms.collect();
            BandedFrame { terms, shortcut: None, bias: 1, residual: None, out: FrameRef::Resident(out[t]) }
        };
        let makes = |t: usize| RematerialisedFrame { terms: as_terms(&terms(&raw, t)), bias: 0 };
        let rematerialise = Rematerialise {
            layer: 0,
            layout: *head,
            input: pixels,
            block_inputs: Vec::new(),
            frames: (first - before..first).map(makes).collect(),
        };
        let op = Op::BandedConv(Box::new(BandedConvOp {
            layer: 1,
            layout: *layer,
            weights: None,
            input,
            inputs,
            columns,
            format,
            frames: (first..first + 2).map(banded).collect(),
            rematerialise: Some(rematerialise),
            statistics: has_statistics(layer),
        }));
        job.run(op, &weights);
    }
    (job.read(&out, bytes(input)), job.store(input, &out))
}

/// The outputs of a residual block, with their statistics. `hidden`: how many hidden frames are materialised if it runs
/// in bands; `None` for whole frames.
pub fn block_outputs<B: RawMemory>(
    gpu: &B,
    head: &ConvLayout,
    layer: &ConvLayout,
    size: (u64, u64),
    hidden: Option<usize>,
) -> Vec<Vec<u8>> {
    let (pixels, input) = (FrameShape::new(size.0, size.1, head.cin), FrameShape::new(size.0, size.1, layer.cin));
    // Layer 0 makes the block's input, with statistics. Layers 1 and 2 are the block.
    let weights = [prepare(gpu, head, 5), prepare(gpu, layer, 6), prepare(gpu, layer, 7)];
    let sizes = gpu.sizes();
    let bytes = |shape: FrameShape| sizes.frame_bytes(shape, layer.norm.groups());
    let mut places = BlockPlaces::default();
    let mut frames = |shape: FrameShape| places.frames(bytes(shape), FRAMES);
    let (raw, x, normalised, h) = (frames(pixels), frames(input), frames(input), frames(input));
    let statistics = frames(FrameShape::new(0, 0, 1));
    let most = FRAMES as u64;
    let each = (0..FRAMES).flat_map(|i| [BandPart::BlockInput(i), BandPart::Input(i), BandPart::Rematerialised(i)]);
    let parts: Vec<BandPart> = each.chain([BandPart::StatisticsOutput]).collect();
    let columns = SplitColumns::all_resident(input.width);
    let shape = BandShape { layout: *layer, input, columns, format: CacheFormat::Exact };
    let room = Room {
        scratch: sizes.conv_scratch(layer, input, most).max(sizes.conv_scratch(head, pixels, most)),
        staging: sizes.staging_bytes(pixels).max(sizes.staging_bytes(input)),
        bands: sizes.band_bytes(&shape, &parts, 1).unwrap(),
        offloaded: 0,
    };
    let mut job = KernelJob::new(gpu, places, room);
    job.load_random(&mut Lcg(99), pixels, &raw);
    let made = (0..FRAMES).map(|t| frame(&terms(&raw, t), 0, None, x[t])).collect();
    job.run(conv(0, head, pixels, made), &weights);
    let Some(hidden) = hidden else {
        for (number, from, out, residual) in [(1, &x, &h, None), (2, &h, &x, Some(&x))] {
            let pairs = from.iter().copied().zip(normalised.iter().copied()).collect();
            let layout = *layer;
            job.run(
                Op::Normalise(NormaliseOp { layer: number, layout, weights: None, shape: input, frames: pairs }),
                &weights,
            );
            let made = |t: usize| frame(&terms(&normalised, t), 1, residual.map(|x: &Vec<DeviceOffset>| x[t]), out[t]);
            job.run(conv(number, layer, input, (0..FRAMES).map(made).collect()), &weights);
        }
        return job.read(&x, bytes(input));
    };
    let hidden_frame = |t: usize| match t.checked_sub(hidden) {
        None => FrameRef::Resident(h[t]),
        Some(index) => FrameRef::Rematerialised { index, statistics: statistics[t] },
    };
    let resident = |of: &[DeviceOffset]| of.iter().map(|at| FrameRef::Resident(*at)).collect::<Vec<_>>();
    let makes = |t: usize| RematerialisedFrame { terms: as_terms(&terms(&x, t)), bias: 1 };
    let rematerialise = Rematerialise {
        layer: 1,
        layout: *layer,
        input,
        block_inputs: x[hidden - CACHE_FRAMES..].to_vec(),
        frames: (hidden..FRAMES).map(makes).collect(),
    };
    let all_hidden: Vec<FrameRef<Offsets>> = (0..FRAMES).map(hidden_frame).collect();
    for (number, fresh, outs, rematerialise) in
        [(1, resident(&x), all_hidden.clone(), None), (2, all_hidden, resident(&x), Some(rematerialise))]
    {
        let banded = |t: usize| {
            let residual = (number == 2).then(|| x[t]);
            let term = |(input, slab): (usize, u8)| BandTerm { input, is_rounded: false, slab };
            let terms = recipe(t).into_iter().map(term).collect();
            BandedFrame { terms, shortcut: None, bias: 1, residual, out: outs[t] }
        };
        let op = BandedConvOp {
            layer: number,
            layout: *layer,
            weights: None,
            input,
            inputs: fresh.into_iter().map(BandInput::fresh).collect(),
            columns,
            format: CacheFormat::Exact,
            frames: (0..FRAMES).map(banded).collect(),
            rematerialise,
            statistics: has_statistics(layer),
        };
        job.run(Op::BandedConv(Box::new(op)), &weights);
    }
    job.read(&x, bytes(input))
}

/// How the frames of a still image go from layer to layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Still {
    /// Whole, on the device.
    Whole,
    /// Through host memory, in bands.
    Offloaded,
    /// The first layer's output is computed again for each reader.
    Rematerialised,
}

/// The outputs of a block with a shortcut, with their statistics: a layer from pixels, and two behind norms.
pub fn still_outputs<B: RawMemory>(gpu: &B, channels: u64, size: (u64, u64), still: Still) -> Vec<Vec<u8>> {
    const STILLS: usize = 2;
    let pixels = FrameShape::new(size.0, size.1, 3);
    let (input, groups) = (pixels.with_channels(channels), 8);
    let one = |of: ConvLayout| ConvLayout { norm: Norm::Group { groups }, slabs: 1, ..of };
    let head = one(layout(3, channels, Window::Same, Prologue::None));
    let first = one(layout(channels, channels, Window::Same, Prologue::NormSilu));
    let layouts = [head, first, ConvLayout { shortcut: Some(channels), ..first }];
    let weights = [0, 1, 2].map(|i| prepare(gpu, &layouts[i], 5 + i as u64));
    let (sizes, columns) = (gpu.sizes(), SplitColumns::all_resident(input.width));
    let bytes = |shape: FrameShape| sizes.frame_bytes(shape, groups);
    let mut places = BlockPlaces::default();
    let mut frames = |shape: FrameShape| places.frames(bytes(shape), STILLS);
    let (raw, x, h, normalised, out) = (frames(pixels), frames(input), frames(input), frames(input), frames(input));
    let statistics = [frames(FrameShape::new(0, 0, 1)), frames(FrameShape::new(0, 0, 1))];
    let offloaded = |value: usize, i: usize| FrameRef::Offloaded {
        frame: HostOffset((value * STILLS + i) as u64 * bytes(input)),
        statistics: statistics[value][i],
    };
    let remade = |i: usize| FrameRef::Rematerialised { index: i, statistics: statistics[0][i] };
    let resident = |of: &[DeviceOffset], i: usize| FrameRef::Resident(of[i]);
    let rematerialise = |_: &Still| Rematerialise {
        layer: 0,
        layout: head,
        input: pixels,
        block_inputs: Vec::new(),
        frames: (0..STILLS).map(|i| RematerialisedFrame { terms: as_terms(&[(raw[i], 0)]), bias: 0 }).collect(),
    };
    // Of each layer: where its input, its shortcut's input and its output lie.
    let place = |layer: usize, i: usize| match (still, layer) {
        (Still::Offloaded, 0) => [resident(&raw, i), offloaded(0, i)],
        (Still::Offloaded, 1) => [offloaded(0, i), offloaded(1, i)],
        (Still::Offloaded, _) => [offloaded(1, i), resident(&out, i)],
        (_, 0) => [resident(&raw, i), remade(i)],
        (_, 1) => [remade(i), resident(&h, i)],
        _ => [resident(&h, i), resident(&out, i)],
    };
    let shortcut = |i: usize| if still == Still::Offloaded { offloaded(0, i) } else { remade(i) };
    let banded = |layer: usize| {
        let frame = |i: usize| BandedFrame {
            terms: vec![BandTerm { input: i, is_rounded: false, slab: 0 }],
            shortcut: (layer == 2).then(|| Shortcut { from: shortcut(i), slab: 1 }),
            bias: 0,
            residual: None,
            out: place(layer, i)[1],
        };
        BandedConvOp {
            layer,
            layout: layouts[layer],
            weights: None,
            input: if layer == 0 { pixels } else { input },
            inputs: (0..STILLS).map(|i| BandInput::fresh(place(layer, i)[0])).collect(),
            columns: SplitColumns::all_resident(columns.resident_width()),
            format: CacheFormat::Exact,
            frames: (0..STILLS).map(frame).collect(),
            rematerialise: Some(&still)
                .filter(|still| layer > 0 && **still == Still::Rematerialised)
                .map(rematerialise),
            statistics: true,
        }
    };
    let ops = [0, 1, 2].map(banded);
    let planned = |op: &BandedConvOp<Offsets>| {
        let parts: Vec<BandPart> = op.band_parts().collect();
        sizes.band_bytes(&op.band_shape(), &parts, STILLS as u64).unwrap()
    };
    let scratch = |layout: &ConvLayout| sizes.conv_scratch(layout, input, STILLS as u64);
    let room = Room {
        scratch: layouts.iter().map(scratch).max().unwrap(),
        staging: sizes.staging_bytes(pixels),
        bands: ops.iter().map(planned).max().unwrap(),
        offloaded: 2 * STILLS as u64 * bytes(input),
    };
    let mut job = KernelJob::new(gpu, places, room);
    job.load_random(&mut Lcg(99), pixels, &raw);
    if still != Still::Whole {
        ops.into_iter().for_each(|op| job.run(Op::BandedConv(Box::new(op)), &weights));
        return job.read(&out, bytes(input));
    }
    let plain =
        |of: &[DeviceOffset], to: &[DeviceOffset]| (0..STILLS).map(|i| frame(&[(of[i], 0)], 0, None, to[i])).collect();
    job.run(conv(0, &head, pixels, plain(&raw, &x)), &weights);
    let norm = |layer: usize, from: &[DeviceOffset]| {
        let frames = from.iter().copied().zip(normalised.iter().copied()).collect();
        Op::Normalise(NormaliseOp { layer, layout: layouts[layer], weights: None, shape: input, frames })
    };
    job.run(norm(1, &x), &weights);
    job.run(conv(1, &first, input, plain(&normalised, &h)), &weights);
    job.run(norm(2, &h), &weights);
    let last = (0..STILLS).map(|i| frame(&[(normalised[i], 0), (x[i], 1)], 0, None, out[i])).collect();
    job.run(conv(2, &layouts[2], input, last), &weights);
    job.read(&out, bytes(input))
}
