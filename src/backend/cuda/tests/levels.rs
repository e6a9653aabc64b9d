//! Shortcuts around levels, patches of pixels, and maps of channels, against the CPU.

use super::*;
use crate::backend::tests::pixels::{MAP_CASES, PATCH_CASES, mapped, patched};
use crate::ir::{AddOp, AddedFrame, PoolOp, PooledFrame, Repeat};

/// An output of two parts, and one of the newer part alone; or of one part each.
fn pooled<B: RawMemory>(backend: &B, input: FrameShape, parts: u64) -> Vec<f32> {
    let output = PoolOp::<Offsets> { input, parts, frames: Vec::new() }.output();
    let (sizes, mut places) = (backend.sizes(), BlockPlaces::default());
    let mut take = |shape: FrameShape| places.frames(sizes.frame_bytes(shape, 0), 2);
    let (from, into) = (take(input), take(output));
    let staging = sizes.staging_bytes(input).max(sizes.staging_bytes(output));
    let mut job = KernelJob::new(backend, places, Room { staging, ..Room::default() });
    job.load_random(&mut Lcg(4), input, &from);
    let newest = parts - 1;
    let older = (newest > 0).then_some(PooledFrame { from: from[1], into: into[0], part: 0, clear: true });
    let newer = PooledFrame { from: from[0], into: into[0], part: newest, clear: newest == 0 };
    let alone = PooledFrame { from: from[1], into: into[1], part: newest, clear: true };
    let frames = older.into_iter().chain([newer, alone]).collect();
    job.run(Op::Pool(PoolOp { input, parts, frames }), &[]);
    job.finish();
    job.store(output, &into)
}

#[test]
fn means_of_pixels_match_the_cpu() {
    let (gpus, cpu) = (gpus(), Cpu::new(CpuOptions::default()).unwrap());
    for (height, width, channels) in [(2, 2, 8), (6, 10, 12), (38, 54, 160), (4, 2, 20), (18, 34, 640)] {
        for parts in [1, 2] {
            let (input, what) = (FrameShape::new(height, width, channels), format!("{height}x{width}x{channels}"));
            let right = pooled(&cpu, input, parts);
            assert_close(&gpus, 2e-3, &format!("{what} in {parts} parts"), &right, |cuda| pooled(cuda, input, parts));
        }
    }
}

/// To another place, then in place, for every part.
fn added<B: RawMemory>(backend: &B, shape: FrameShape, repeat: Repeat) -> Vec<f32> {
    let addend = AddOp::<Offsets> { shape, repeat, frames: Vec::new() }.addend();
    let (sizes, mut places) = (backend.sizes(), BlockPlaces::default());
    let count = repeat.parts as usize;
    let mut take = |shape: FrameShape, count| places.frames(sizes.frame_bytes(shape, 0), count);
    let (x, out, addends) = (take(shape, count), take(shape, count), take(addend, 1));
    let staging = sizes.staging_bytes(shape).max(sizes.staging_bytes(addend));
    let mut job = KernelJob::new(backend, places, Room { staging, ..Room::default() });
    let mut random = Lcg(5);
    job.load_random(&mut random, shape, &x);
    job.load_random(&mut random, addend, &addends);
    for out in [&out, &x] {
        let frame = |part: usize| AddedFrame { x: x[part], addend: addends[0], part: part as u64, out: out[part] };
        job.run(Op::Add(AddOp { shape, repeat, frames: (0..count).map(frame).collect() }), &[]);
        job.finish();
    }
    let bytes = sizes.frame_bytes(shape, 0);
    assert!(job.read(&x, bytes)[0][..64] == job.read(&out, bytes)[0][..64], "in place as to another place");
    job.store(shape, &[x, out].concat())
}

#[test]
fn repeated_addends_match_the_cpu() {
    let (gpus, cpu) = (gpus(), Cpu::new(CpuOptions::default()).unwrap());
    for (channels, repeat) in [
        (1024, Repeat { channels: 1024, side: 2, parts: 2 }),
        (512, Repeat { channels: 1024, side: 2, parts: 1 }),
        (576, Repeat { channels: 1152, side: 2, parts: 2 }),
        (640, Repeat { channels: 640, side: 1, parts: 1 }),
        (12, Repeat { channels: 12, side: 1, parts: 1 }),
        (20, Repeat { channels: 40, side: 2, parts: 1 }),
        (16, Repeat { channels: 8, side: 2, parts: 1 }),
        (12, Repeat { channels: 96, side: 2, parts: 2 }),
    ] {
        for (height, width) in [(2, 2), (6, 10), (18, 34)] {
            let (shape, what) = (FrameShape::new(height, width, channels), format!("{repeat:?} {height}x{width}"));
            assert_close(&gpus, 2e-3, &what, &added(&cpu, shape, repeat), |cuda| added(cuda, shape, repeat));
        }
    }
}

#[test]
fn patches_of_pixels_match_the_cpu() {
    let (gpus, cpu) = (gpus(), Cpu::new(CpuOptions::default()).unwrap());
    for case in PATCH_CASES {
        let what = format!("{case:?}");
        assert_close(&gpus, 2e-3, &what, &patched(&cpu, &case), |cuda| patched(cuda, &case));
    }
}

#[test]
fn maps_of_channels_match_the_cpu() {
    let (gpus, cpu) = (gpus(), Cpu::new(CpuOptions::default()).unwrap());
    for case in MAP_CASES {
        let what = format!("{case:?}");
        assert_close(&gpus, 2e-3, &what, &mapped(&cpu, &case), |cuda| mapped(cuda, &case));
    }
}
