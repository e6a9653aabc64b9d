//! Convolutions in bands against the same of whole frames, bit for bit, for every placement of the causal cache.

use super::*;
use crate::ir::{
    BandContents, BandedFrame, CacheFormat, CachedFrame, FrameRef, HostOffset, Rematerialise, RematerialisedFrame,
    SplitColumns,
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

/// The bytes of all output frames with their statistics. `cache`: `None` for whole frames.
pub fn outputs(
    gpu: &Cuda,
    (head, layer): (&ConvLayout, &ConvLayout),
    size: (u64, u64),
    cache: Option<Cache>,
) -> Vec<Vec<u8>> {
    let pixels = FrameShape::new(size.0, size.1, head.cin);
    let input = FrameShape::new(size.0, size.1, layer.cin);
    // Layer 0 rematerialises the input of layer 1.
    let weights = [prepare(gpu, head, 5), prepare(gpu, layer, 6)];
    let sizes = gpu.sizes();
    let bytes = |shape: FrameShape| sizes.frame_bytes(shape, layer.groups);
    let mut places = BlockPlaces::default();
    let mut frames = |shape: FrameShape| places.frames(bytes(shape), FRAMES);
    let (raw, made, normalised, out) = (frames(pixels), frames(input), frames(input), frames(input));
    let statistics = frames(FrameShape::new(0, 0, 1));
    let resident = places.frames(bytes(input), CACHE_FRAMES);
    let chunk = FRAMES as u64;
    let most = BandContents {
        fresh: 2,
        cached: 2,
        host_columns: size.1,
        rematerialised: 2,
        outputs: 2,
        ..BandContents::default()
    };
    let room = Room {
        scratch: sizes.conv_scratch(layer, input, chunk).max(sizes.conv_scratch(head, pixels, chunk)),
        staging: sizes.staging_bytes(pixels),
        bands: sizes.band_bytes(layer, input, most).unwrap(),
        offloaded: 2 * chunk * bytes(input),
    };
    let mut job = KernelJob::new(gpu, places, room);
    job.load_random(&mut Lcg(99), pixels, &raw);
    let mut run = |op: Op<Offsets>| job.run(op, &weights);
    let terms = |of: &[DeviceOffset], t: usize| -> Vec<(DeviceOffset, u8)> {
        recipe(t).into_iter().map(|(t, slab)| (of[t], slab)).collect()
    };
    let conv = |layer: LayerId, layout: &ConvLayout, input: FrameShape, frames: Vec<ConvFrame<Offsets>>| {
        let (layout, partial_sums) = (*layout, PartialSums::NONE);
        Op::Conv(ConvOp { layer, layout, weights: None, input, frames, statistics: true, partial_sums })
    };
    let frames = (0..FRAMES).map(|t| frame(&terms(&raw, t), 0, None, made[t])).collect();
    run(conv(0, head, pixels, frames));

    let Some(cache) = cache else {
        let frames = made.iter().copied().zip(normalised.iter().copied()).collect();
        run(Op::Normalise(NormaliseOp { layer: 1, layout: *layer, weights: None, shape: input, frames }));
        let frames = (0..FRAMES).map(|t| frame(&terms(&normalised, t), 1, None, out[t])).collect();
        run(conv(1, layer, input, frames));
        return job.read(&out, bytes(input));
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
        let cache_writes = match cache {
            Cache::Recomputed => Vec::new(),
            Cache::Split(_) => (first..first + 2).filter(is_cached).map(|t| (t - first, cached(t))).collect(),
        };
        let statistics_writes = match cache {
            Cache::Recomputed => (first..first + 2).map(|t| (recomputed + t - first, statistics[t])).collect(),
            Cache::Split(_) => Vec::new(),
        };
        let banded = |t: usize| {
            let terms = recipe(t).into_iter().map(|(t, slab)| (t - (first - before), slab)).collect();
            BandedFrame { terms, shortcut: None, bias: 1, residual: None, out: FrameRef::Resident(out[t]) }
        };
        let makes = |t: usize| RematerialisedFrame { terms: as_terms(&terms(&raw, t)), bias: 0 };
        let rematerialise = Rematerialise {
            layer: 0,
            layout: *head,
            input: pixels,
            frames: (first - before..first).map(makes).collect(),
        };
        run(Op::BandedConv(Box::new(BandedConvOp {
            layer: 1,
            layout: *layer,
            weights: None,
            input,
            cached: (first - before + recomputed..first).map(cached).collect(),
            fresh: (0..recomputed).map(rematerialised).chain(chunk).collect(),
            cache_writes,
            columns,
            format: CacheFormat::Exact,
            rounded: Vec::new(),
            statistics_writes,
            frames: (first..first + 2).map(banded).collect(),
            rematerialise: Some(rematerialise),
            statistics: true,
        })));
    }
    job.read(&out, bytes(input))
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
