//! Convolutions in bands against the same of whole frames, bit for bit, for every placement of the causal cache.

use half::f16;

use super::*;
use crate::ir::{
    BandInput, BandPart, BandShape, BandTerm, BandedFrame, CacheFormat, CachedFrame, FrameRef, HostOffset,
    Rematerialise, RematerialisedFrame, SplitColumns,
};

/// Frames of the clip, which comes in chunks of two.
const FRAMES: usize = 6;
const CACHE_FRAMES: usize = 2;

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

/// A convolution of whole frames, with statistics.
fn conv(layer: LayerId, layout: &ConvLayout, input: FrameShape, frames: Vec<ConvFrame<Offsets>>) -> Op<Offsets> {
    let (layout, partial_sums) = (*layout, PartialSums::NONE);
    Op::Conv(ConvOp { layer, layout, weights: None, input, frames, statistics: true, partial_sums })
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
pub fn outputs(gpu: &Cuda, layers: (&ConvLayout, &ConvLayout), size: (u64, u64), cache: Option<Cache>) -> Vec<Vec<u8>> {
    run_chunks(gpu, layers, size, cache, CacheFormat::Exact).0
}

/// The same with the values. In 8 bits, frames read those of earlier chunks rounded; whole frames are rounded here.
fn run_chunks(
    gpu: &Cuda,
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
    let bytes = |shape: FrameShape| sizes.frame_bytes(shape, layer.groups);
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
    // A resident frame overwrites one that is no longer needed; in host memory each has its own place.
    let cached = |t: usize| CachedFrame {
        resident: (!columns.resident().is_empty()).then_some(resident[t % CACHE_FRAMES]),
        host: (!columns.host().is_empty()).then_some(HostOffset(t as u64 * bytes(input))),
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
            statistics: true,
        }));
        job.run(op, &weights);
    }
    (job.read(&out, bytes(input)), job.store(input, &out))
}

#[test]
fn bands_match_whole_frames_bit_for_bit() {
    let head = ConvLayout { groups: 8, ..layout(3, 32, Window::Same, Prologue::None) };
    let layer = layout(32, 32, Window::Same, Prologue::NormSilu);
    for gpu in gpus() {
        for (height, width) in [(70, 77), (16, 300), (150, 33)] {
            let whole = outputs(&gpu, (&head, &layer), (height, width), None);
            let columns = [0, 32, width / 2, width - 1, width].map(Cache::Split);
            for cache in columns.into_iter().chain([Cache::Recomputed]) {
                let banded = outputs(&gpu, (&head, &layer), (height, width), Some(cache));
                assert!(banded == whole, "{height} x {width}, {cache:?}, {}", name(&gpu));
            }
        }
    }
}

/// Every placement gives the same bits, close to frames that are rounded here.
#[test]
fn bands_with_caches_in_8_bits_read_them_as_they_are_rounded() {
    let head = ConvLayout { groups: 8, ..layout(3, 32, Window::Same, Prologue::None) };
    for channels in [32, 128] {
        let head = ConvLayout { cout: channels, ..head };
        let layer = layout(channels, channels, Window::Same, Prologue::NormSilu);
        for gpu in gpus() {
            for (height, width) in [(70, 77), (16, 300), (150, 33)] {
                let run = |cache, format| run_chunks(&gpu, (&head, &layer), (height, width), cache, format);
                let (_, exact) = run(None, CacheFormat::Exact);
                let (_, right) = run(None, CacheFormat::U8);
                let columns = [0, 32, width / 2, width - 1, width].map(Cache::Split);
                let mut first: Option<Vec<Vec<u8>>> = None;
                for cache in columns.into_iter().chain([Cache::Recomputed]) {
                    let (bytes, values) = run(Some(cache), CacheFormat::U8);
                    let what = format!("{channels} channels, {height} x {width}, {cache:?}, {}", name(&gpu));
                    let [loss, error] = [&exact, &right].map(|of| relative_error(&values, of));
                    assert!(loss > 1e-4 && loss < 1e-2 && error < loss / 3.0, "{loss} {error} {what}");
                    assert!(*first.get_or_insert_with(|| bytes.clone()) == bytes, "{what}");
                }
            }
        }
    }
}

/// The convolution from pixels normalises its output: with the model's own channels and groups, with part of a channel
/// tile, and with more than one.
#[test]
fn rematerialised_frames_are_normalised_as_whole_frames() {
    for gpu in gpus() {
        for (channels, groups, prologue) in
            [(128, 32, Prologue::NormSilu), (40, 10, Prologue::Norm), (144, 4, Prologue::NormSilu)]
        {
            let head = ConvLayout { groups, ..layout(3, channels, Window::Same, Prologue::None) };
            let layer = ConvLayout { groups, ..layout(channels, channels, Window::Same, prologue) };
            let whole = outputs(&gpu, (&head, &layer), (70, 165), None);
            let banded = outputs(&gpu, (&head, &layer), (70, 165), Some(Cache::Recomputed));
            assert!(banded == whole, "{channels} channels in {groups} groups, {}", name(&gpu));
        }
    }
}

/// The outputs of a residual block, with their statistics. `hidden`: how many hidden frames are materialised if it runs
/// in bands; `None` for whole frames.
fn block_outputs(
    gpu: &Cuda,
    head: &ConvLayout,
    layer: &ConvLayout,
    size: (u64, u64),
    hidden: Option<usize>,
) -> Vec<Vec<u8>> {
    let (pixels, input) = (FrameShape::new(size.0, size.1, head.cin), FrameShape::new(size.0, size.1, layer.cin));
    // Layer 0 makes the block's input, with statistics. Layers 1 and 2 are the block.
    let weights = [prepare(gpu, head, 5), prepare(gpu, layer, 6), prepare(gpu, layer, 7)];
    let sizes = gpu.sizes();
    let bytes = |shape: FrameShape| sizes.frame_bytes(shape, layer.groups);
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
            statistics: true,
        };
        job.run(Op::BandedConv(Box::new(op)), &weights);
    }
    job.read(&x, bytes(input))
}

#[test]
fn rematerialised_hidden_frames_change_no_bit() {
    for gpu in gpus() {
        for (channels, groups) in [(128, 32), (40, 10)] {
            let head = ConvLayout { groups, ..layout(3, channels, Window::Same, Prologue::None) };
            let layer = ConvLayout { groups, ..layout(channels, channels, Window::Same, Prologue::NormSilu) };
            for size in [(70, 77), (150, 165)] {
                let whole = block_outputs(&gpu, &head, &layer, size, None);
                for hidden in [CACHE_FRAMES, 3, FRAMES - 1] {
                    let banded = block_outputs(&gpu, &head, &layer, size, Some(hidden));
                    assert!(banded == whole, "{channels} channels, {size:?}, {hidden} materialised, {}", name(&gpu));
                }
            }
        }
    }
}
