//! Convolutions in bands against the same of whole frames, bit for bit, for every placement of the causal cache.

use super::*;
use crate::backend::{AnewOp, BandedFrame, BandedOp, FrameAt, HostFrame, Kept, PastFrame};
use crate::tensor::{At, Columns, PastAt};

/// Frames of the clip, which comes in chunks of two.
const FRAMES: usize = 6;
const CACHE_FRAMES: usize = 2;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cache {
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
fn outputs(
    gpu: &Cuda,
    (head, layer): (&ConvLayout, &ConvLayout),
    size: (u64, u64),
    cache: Option<Cache>,
) -> Vec<Vec<u8>> {
    let pixels = FrameShape::new(size.0, size.1, head.cin);
    let input = FrameShape::new(size.0, size.1, layer.cin);
    let (prepared_head, prepared) = (prepare(gpu, head, 5), prepare(gpu, layer, 6));
    let bytes = |shape: FrameShape| gpu.frame_bytes(shape, layer.groups);
    let mut places = BlockPlaces::default();
    let mut frames = |bytes: u64| -> Vec<Frame> { (0..FRAMES).map(|_| places.take(bytes)).collect() };
    let (raw, made) = (frames(bytes(pixels)), frames(bytes(input)));
    let (normalised, out) = (frames(bytes(input)), frames(bytes(input)));
    let statistics: Vec<Frame> = frames(bytes(FrameShape::new(0, 0, 1)));
    let resident: Vec<Frame> = (0..CACHE_FRAMES).map(|_| places.take(bytes(input))).collect();
    let chunk = FRAMES as u64;
    let scratch = places.take(gpu.conv_scratch(layer, input, chunk).max(gpu.conv_scratch(head, pixels, chunk))).0;
    let staging = places.take(2 * gpu.staging_bytes(pixels)).0;
    let most = BandFrames { inputs: 2, past: 2, far_columns: size.1, anew: 2, outputs: 2, ..BandFrames::default() };
    let band_bytes = gpu.band_bytes(layer, input, most).unwrap();
    let bands = (places.take(band_bytes).0, band_bytes);
    let host = HostMemory { load: 2 * gpu.staging_bytes(pixels), store: 0, past: 2 * chunk * bytes(input) };
    let mut memory = gpu.allocate(places.end, host).unwrap();
    gpu.poison(&mut memory, places.end);

    let values = SeededRandom(99).values(pixels.elements() * chunk, 1.0);
    let from = view(&values, [pixels.channels, chunk, pixels.height, pixels.width]);
    for (t, into) in (0..).zip(&raw) {
        let into = *into;
        let op = LoadOp { from: &from, batch: 0, frame: t, top: 0, left: 0, map: SAME, shape: pixels, into, staging };
        gpu.load(&mut memory, &op, &mut never()).unwrap();
    }
    let terms = |of: &[Frame], t: usize| recipe(t).into_iter().map(|(t, slab)| (of[t], slab)).collect::<Vec<_>>();
    let frames: Vec<ConvFrame> = (0..FRAMES).map(|t| frame(&terms(&raw, t), 0, None, made[t])).collect();
    let op = ConvOp { layout: head, input: pixels, frames: &frames, statistics: true, scratch, sums: Sums::NONE };
    gpu.conv(&mut memory, &prepared_head, &op, &mut never()).unwrap();

    let Some(cache) = cache else {
        let frames: Vec<(Frame, Frame)> = made.iter().copied().zip(normalised.iter().copied()).collect();
        let op = NormOp { layout: layer, shape: input, frames: &frames };
        gpu.normalise(&mut memory, &prepared, &op, &mut never()).unwrap();
        let frames: Vec<ConvFrame> = (0..FRAMES).map(|t| frame(&terms(&normalised, t), 1, None, out[t])).collect();
        let op = ConvOp { layout: layer, input, frames: &frames, statistics: true, scratch, sums: Sums::NONE };
        gpu.conv(&mut memory, &prepared, &op, &mut never()).unwrap();
        return read(gpu, &mut memory, &out, bytes(input));
    };
    let columns = Columns::new(input.width, if let Cache::Split(columns) = cache { columns } else { input.width });
    // A resident frame overwrites one that is no longer needed; in host memory each has its own place.
    let cached = |t: usize| PastAt {
        near: (!columns.near().is_empty()).then_some(resident[t % CACHE_FRAMES]),
        far: (!columns.far().is_empty()).then_some(HostFrame(t as u64 * bytes(input))),
    };
    for first in (0..FRAMES).step_by(2) {
        let before = if first == 0 { 0 } else { CACHE_FRAMES };
        let recomputed = if cache == Cache::Recomputed { before } else { 0 };
        let anew = |i: usize| At::Anew { index: i, statistics: statistics[first - CACHE_FRAMES + i] };
        let fresh: Vec<FrameAt> =
            (0..recomputed).map(anew).chain((first..first + 2).map(|t| At::Device(made[t]))).collect();
        let cached_frames: Vec<PastFrame> = (first - before + recomputed..first).map(cached).collect();
        let keeps = |t: &usize| *t >= first + 2 - CACHE_FRAMES;
        let keep: Vec<(usize, PastFrame)> = match cache {
            Cache::Recomputed => Vec::new(),
            Cache::Split(_) => (first..first + 2).filter(keeps).map(|t| (t - first, cached(t))).collect(),
        };
        let keep_statistics: Vec<(usize, Frame)> = match cache {
            Cache::Recomputed => (first..first + 2).map(|t| (recomputed + t - first, statistics[t])).collect(),
            Cache::Split(_) => Vec::new(),
        };
        let banded = |t: usize| {
            let terms = recipe(t).into_iter().map(|(t, slab)| (t - (first - before), slab)).collect();
            BandedFrame { terms, shortcut: None, bias: 1, residual: None, out: At::Device(out[t]) }
        };
        let frames: Vec<BandedFrame> = (first..first + 2).map(banded).collect();
        let makes = |t: usize| (frame(&terms(&raw, t), 0, None, Frame(0)).terms, 0);
        let rematerialised: Vec<(Terms, u8)> = (first - before..first).map(makes).collect();
        let op = BandedOp {
            weights: &prepared,
            layout: layer,
            input,
            past: &cached_frames,
            fresh: &fresh,
            keep: &keep,
            columns,
            keep_statistics: &keep_statistics,
            frames: &frames,
            anew: Some(AnewOp { weights: &prepared_head, layout: head, input: pixels, frames: &rematerialised }),
            statistics: true,
            scratch,
            bands,
        };
        gpu.banded(&mut memory, &op, &mut never()).unwrap();
    }
    read(gpu, &mut memory, &out, bytes(input))
}

fn read(gpu: &Cuda, memory: &mut JobMemory, frames: &[Frame], bytes: u64) -> Vec<Vec<u8>> {
    gpu.finish(memory, None).unwrap();
    let read = |frame: &Frame| {
        let mut content = vec![0; bytes as usize];
        gpu.read(memory, Kept::Device(*frame), &mut content).unwrap();
        content
    };
    frames.iter().map(read).collect()
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
