//! Frames between tensors and activations: patches of pixels, a missing alpha channel, and maps of channels.

use super::{BlockPlaces, KernelJob, RawMemory, Room, plain_load, plain_store, view};
use crate::ir::{Affine, ChannelMaps, DeviceOffset, Fades, FrameShape, LoadTensor, Posterior, StoreTensor};
use crate::testing::Lcg;

#[derive(Debug, Clone, Copy)]
pub struct PatchCase {
    /// Of the tensor, and of its image in activations.
    channels: [u64; 2],
    patch: u64,
    size: [u64; 2],
}

const fn patches(channels: [u64; 2], patch: u64, size: [u64; 2]) -> PatchCase {
    PatchCase { channels, patch, size }
}

/// Of the last three, the tensor has no alpha channel.
pub const PATCH_CASES: [PatchCase; 9] = [
    patches([3, 3], 2, [2, 2]),
    patches([3, 3], 2, [17, 33]),
    patches([4, 4], 1, [6, 10]),
    patches([4, 4], 1, [17, 33]),
    patches([4, 4], 2, [17, 33]),
    patches([1, 1], 3, [17, 33]),
    patches([3, 4], 1, [6, 10]),
    patches([3, 4], 1, [17, 33]),
    patches([3, 4], 2, [17, 33]),
];

/// A frame that reaches beyond the image goes in and out.
pub fn patched<B: RawMemory>(backend: &B, case: &PatchCase) -> Vec<f32> {
    let PatchCase { channels: [given, own], patch, size: [height, width] } = *case;
    let [rows, columns] = case.size.map(|length| length.div_ceil(patch) + 1);
    let shape = FrameShape::new(rows, columns, own * patch * patch);
    let (mut job, frame) = one_frame(backend, shape);
    let values = Lcg(6).fill((given * height * width) as usize);
    let from = view(&values, [given, 1, height, width]);
    let map = Affine { mul: 0.5, add: 0.25 };
    job.load(&LoadTensor { patch, map, ..plain_load(&from, 0, shape, frame) });
    let mut found = job.store(shape, &[frame]);
    let out = vec![f32::NAN; (own * height * width) as usize];
    let into = view(&out, [own, 1, height, width]);
    backend
        .store(&mut job.memory, &StoreTensor { patch, ..plain_store(frame, shape, &into, 0) }, &job.buffers)
        .unwrap();
    job.finish();
    found.extend(out);
    found
}

/// A job with one frame of activations.
fn one_frame<B: RawMemory>(backend: &B, shape: FrameShape) -> (KernelJob<'_, B>, DeviceOffset) {
    let (sizes, mut places) = (backend.sizes(), BlockPlaces::default());
    let frame = places.take(sizes.frame_bytes(shape, 0));
    let room = Room { scratch: sizes.fade_bytes(shape), staging: sizes.staging_bytes(shape), ..Room::default() };
    (KernelJob::new(backend, places, room), frame)
}

/// Latents with as many log-variances as means, all with maps of their own.
#[derive(Debug, Clone, Copy)]
pub struct MapCase {
    /// Means of a pixel of activations.
    means: u64,
    side: u64,
    /// Rows and columns of the tensor.
    size: [u64; 2],
    /// Row and column of activations at which a load begins that ends beyond the image.
    start: [u64; 2],
}

const fn maps(means: u64, side: u64, size: [u64; 2], start: [u64; 2]) -> MapCase {
    MapCase { means, side, size, start }
}

pub const MAP_CASES: [MapCase; 7] = [
    maps(16, 1, [5, 7], [0, 0]),
    maps(16, 1, [18, 33], [3, 5]),
    maps(48, 1, [6, 10], [1, 0]),
    maps(16, 2, [4, 6], [0, 0]),
    maps(16, 2, [9, 17], [3, 5]),
    maps(5, 2, [9, 17], [4, 33]),
    maps(3, 3, [5, 7], [4, 20]),
];

/// Some of a tensor goes in, then all of it, of which means, samples and log-variances come out.
pub fn mapped<B: RawMemory>(backend: &B, case: &MapCase) -> Vec<f32> {
    let MapCase { means, side, size: [height, width], start: [top, left] } = *case;
    let whole = FrameShape::new(height * side, width * side, 2 * means);
    let (mut job, frame) = one_frame(backend, whole);
    let host = [2 * means * side * side, 1, height, width];
    let (mut random, count) = (Lcg(9), |dims: [u64; 4]| dims.iter().product::<u64>() as usize);
    let values = random.fill(count(host));
    let all: Vec<Affine> = (0..host[0]).map(|_| Affine { mul: 1.0 + random.next(), add: random.next() }).collect();
    let (from, channels) = (view(&values, host), ChannelMaps { side, maps: &all });
    let part = FrameShape { height: whole.height - top / 2, width: whole.width - left / 2, ..whole };
    let load = LoadTensor { channels: Some(channels), ..plain_load(&from, 0, part, frame) };
    job.load(&LoadTensor { top, left, ..load });
    let mut found = job.store(part, &[frame]);
    job.load(&LoadTensor { shape: whole, ..load });
    found.extend(job.store(whole, &[frame]));

    let stored = [host[0] / 2, 1, height, width];
    let [rows, columns] = [whole.height, whole.width].map(|length| random.fill(length as usize));
    let weight = |of: &[f32]| of.iter().map(|value| 1.5 + value).collect::<Vec<f32>>();
    let (rows, columns) = (weight(&rows), weight(&columns));
    let divide = Some(Fades { rows: &rows, columns: &columns });
    let sample = Some(Posterior { seed: 3, logvar_channel: means });
    for (channel, clamp, sample) in [(0, None, None), (0, None, sample), (means, Some((-0.5, 0.5)), None)] {
        let out = vec![f32::NAN; count(stored)];
        let into = view(&out, stored);
        let plain = StoreTensor { clip: 1, clip_frame: 2, ..plain_store(frame, whole, &into, 0) };
        let op = StoreTensor { channel, clamp, sample, divide, channels: Some(channels), ..plain };
        backend.store(&mut job.memory, &op, &job.buffers).unwrap();
        job.finish();
        found.extend(out);
    }
    found
}
