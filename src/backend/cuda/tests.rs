//! Every kernel against the CPU backend, in every precision, at sizes that are no multiple of anything. Without a GPU
//! there is nothing to test; VVAE_REQUIRE_CUDA makes that a failure.

mod bands;
mod column_pairs;
mod graphs;
mod large;
mod levels;
mod pairs;
mod partial_sums;
mod pixel_norms;
mod short_launches;
mod statistics;

use std::ffi::c_void;
use std::ops::Range;

use cudarc::driver::sys;

use super::*;
use crate::backend::cpu::{Cpu, CpuOptions};
use crate::backend::gpu::{AddressedBlock, Queue, RowSizes};
use crate::backend::tests::*;
use crate::backend::{Callbacks, Execution};
use crate::error::Error;
use crate::ir::{
    AttentionOp, BlendTile, ConvFrame, ConvOp, DType, DeviceOffset, Fades, FrameShape, Norm, NormaliseOp, Offsets, Op,
    PartialSums, PartialSumsOut, Prologue, StoreTensor, TensorDevice, View, Window,
};
use crate::testing::{Lcg, SlabSource};

/// The first GPU in every precision, twice: with its own kernels, and with those of an older card. None where there is
/// no GPU.
fn gpus() -> Vec<Cuda> {
    let open = |arch: Option<&str>, precision| {
        Cuda::with_kernel_arch(0, precision, DeviceAllocator::System, arch.map(str::to_owned))
    };
    // 8.6 also has less shared memory.
    let older = |precision| open(Some("8.6"), precision).or_else(|_| open(Some("8.0"), precision)).unwrap();
    match Precision::ALL.into_iter().map(|precision| open(None, precision)).collect::<Result<Vec<_>>>() {
        Ok(gpus) => gpus.into_iter().chain(Precision::ALL.map(older)).collect(),
        Err(why) => {
            assert!(std::env::var_os("VVAE_REQUIRE_CUDA").is_none(), "{why}");
            println!("skipped: {why}");
            Vec::new()
        }
    }
}

fn name(gpu: &Cuda) -> String {
    format!("{}, kernels of {}", gpu.precision().name(), gpu.kernel_arch())
}

impl RawMemory for Cuda {
    fn poison(&self, memory: &mut JobMemory<Launcher>, bytes: u64) {
        let _current = self.context().enter().unwrap();
        let start = memory.block.at(0, bytes).unwrap();
        let stream = self.launcher.queue.stream();
        // SAFETY: the block is that long.
        let answer = unsafe { sys::cuMemsetD8Async(start, 0xff, bytes as usize, stream.handle()) };
        driver::check("poisoning memory", answer).unwrap();
        // Copies run on other streams, which would not wait.
        stream.synchronise().unwrap();
    }

    fn read(&self, memory: &JobMemory<Launcher>, from: DeviceOffset, into: &mut [u8]) {
        let _current = self.context().enter().unwrap();
        memory.synchronise(&self.launcher).unwrap();
        memory.block.read(self.launcher.queue.stream(), from.0, into).unwrap();
    }
}

/// Compares every precision with the CPU: f16 to `most`, bf16 with three bits less to 8 times that, f32 to what the
/// order of sums explains.
fn assert_close(gpus: &[Cuda], most: f64, what: &str, right: &[f32], find: impl Fn(&Cuda) -> Vec<f32>) {
    for gpu in gpus {
        let most = match gpu.precision() {
            Precision::Fp16 => most,
            Precision::Bf16 => 8.0 * most,
            Precision::Fp32 => most / 50.0,
        };
        let error = relative_error(&find(gpu), right);
        assert!(error <= most, "{what} in {}: {error:.1e}, not {most:.0e} or less", name(gpu));
    }
}

/// A convolution of frames that another convolution has made, with statistics.
struct ConvCase {
    layout: ConvLayout,
    input: FrameShape,
    residual: bool,
}

impl KernelJob<'_, Cuda> {
    fn write(&mut self, to: DeviceOffset, from: &[u8]) {
        let _current = self.backend.context().enter().unwrap();
        self.memory.synchronise(&self.backend.launcher).unwrap();
        self.memory.block.write(self.backend.launcher.queue.stream(), to.0, from).unwrap();
    }
}

/// A convolution of layer 0.
fn conv_op(
    layout: &ConvLayout,
    input: FrameShape,
    frames: Vec<ConvFrame<Offsets>>,
    statistics: bool,
    partial_sums: PartialSums<Offsets>,
) -> Op<Offsets> {
    let statistics = statistics && layout.norm.groups() > 0;
    Op::Conv(ConvOp { layer: 0, layout: *layout, weights: None, input, frames, statistics, partial_sums })
}

/// The norm of layer 0.
fn normalise_op(layout: &ConvLayout, shape: FrameShape, frames: Vec<(DeviceOffset, DeviceOffset)>) -> Op<Offsets> {
    Op::Normalise(NormaliseOp { layer: 0, layout: *layout, weights: None, shape, frames })
}

/// The output frames of a case.
fn run<B: RawMemory>(backend: &B, case: &ConvCase) -> Vec<f32> {
    let (layout, input) = (&case.layout, case.input);
    let output = layout.window.output(input, layout.cout);
    let shortcut_shape = output.with_channels(layout.shortcut.unwrap_or(output.channels));
    let point = self::layout(input.channels, input.channels, Window::Point, Prologue::None);
    let first = ConvLayout { slabs: 1, biases: 1, norm: layout.norm, ..point };
    let makes_input = input.channels > 3;
    let (sizes, mut places) = (backend.sizes(), BlockPlaces::default());
    let mut take = |shape: FrameShape| places.frames(sizes.frame_bytes(shape, layout.norm.groups()), 3);
    let (raw, made, normalised) = (take(input), take(input), take(input));
    let (shortcut, residual, out) = (take(shortcut_shape), take(output), take(output));
    let staging = [input, output, shortcut_shape].map(|shape| sizes.staging_bytes(shape)).into_iter().max().unwrap();
    let scratch = sizes.conv_scratch(layout, input, 3).max(sizes.conv_scratch(&first, input, 3));
    let mut job = KernelJob::new(backend, places, Room { scratch, staging, ..Room::default() });

    let mut random = Lcg(99);
    job.load_random(&mut random, input, if makes_input { &raw } else { &made });
    if case.residual {
        job.load_random(&mut random, output, &residual);
    }
    if layout.shortcut.is_some() {
        job.load_random(&mut random, shortcut_shape, &shortcut);
    }
    if makes_input {
        let frames = raw.iter().zip(&made).map(|(from, to)| frame(&[(*from, 0)], 0, None, *to)).collect();
        let weights = [prepare(backend, &first, 5)];
        job.run(conv_op(&first, input, frames, true, PartialSums::NONE), &weights);
        job.finish();
    }
    let weights = [prepare(backend, layout, 6)];
    let has_partial_sums = layout.slabs > 1 && sizes.partial_sums(layout, input, 2).is_some();
    let fuses_norm = backend.profile().fuses_norm || sizes.partial_sums(layout, input, 2).is_some();
    let inputs = if layout.prologue != Prologue::None && !fuses_norm {
        let frames = made.iter().copied().zip(normalised.iter().copied()).collect();
        job.run(normalise_op(layout, input, frames), &weights);
        &normalised
    } else {
        &made
    };
    // The terms of output `i` that are made of these inputs: its own alone where there is one slab.
    let terms = |i: usize, of: Range<usize>| -> Vec<(DeviceOffset, u8)> {
        if layout.slabs == 1 {
            return vec![(inputs[i], 0)];
        }
        let seen = i.saturating_sub(2)..=i;
        of.filter(|t| seen.contains(t)).map(|t| (inputs[t], (t + 2 - i) as u8)).collect()
    };
    let conv_frame = |i: usize, first_input: usize| {
        let mut terms = terms(i, first_input..3);
        if layout.shortcut.is_some() {
            terms.push((shortcut[i], layout.slabs as u8));
        }
        frame(&terms, (i % 2) as u8, case.residual.then_some(residual[i]), out[i])
    };
    let mut convolve = |launch: Range<usize>, partial_sums: PartialSums<Offsets>| {
        let frames = launch.clone().map(|i| conv_frame(i, launch.start)).collect();
        job.run(conv_op(layout, input, frames, layout.cout > 3, partial_sums), &weights);
    };
    if has_partial_sums {
        // The first frame alone, so that its partial sums go through memory.
        let into = normalised[0];
        for (launch, before) in [(0..1, None), (1..3, Some(into))] {
            let pending = (launch.end..launch.end + 2).map(|i| as_terms(&terms(i, launch.clone()))).collect();
            convolve(launch, PartialSums { before, after: Some(PartialSumsOut { pending, into }) });
        }
    } else {
        convolve(0..3, PartialSums::NONE);
    }
    job.store(output, &out)
}

#[test]
fn conv_matches_the_cpu() {
    let gpus = gpus();
    if gpus.is_empty() {
        return;
    }
    let cpu = Cpu::new(CpuOptions::default()).unwrap();
    let check = |case: &ConvCase| {
        let what = format!("{:?} {}x{}", case.layout, case.input.height, case.input.width);
        assert_close(&gpus, 2e-3, &what, &run(&cpu, case), |cuda| run(cuda, case));
    };
    let sizes = [(1, 1), (2, 6), (7, 5), (16, 16), (18, 34), (37, 53)];
    let channels = [(8, 8), (16, 24), (64, 64), (72, 128), (128, 136), (12, 20)];
    for (height, width) in sizes {
        for (cin, cout) in channels {
            for window in [Window::Point, Window::Same, Window::Down, Window::Up] {
                if window == Window::Down && (height % 2 == 1 || width % 2 == 1) {
                    continue;
                }
                for prologue in [Prologue::None, Prologue::NormSilu, Prologue::Norm] {
                    let shortcut = (window == Window::Same && cin != cout).then_some(cin + 8);
                    let layout = ConvLayout { shortcut, ..layout(cin, cout, window, prologue) };
                    check(&ConvCase {
                        layout,
                        input: FrameShape::new(height, width, cin),
                        residual: window != Window::Up,
                    });
                }
            }
        }
        for (cin, cout, prologue) in [
            (3, 16, Prologue::None),
            (3, 128, Prologue::None),
            (16, 3, Prologue::NormSilu),
            (128, 3, Prologue::NormSilu),
        ] {
            check(&ConvCase {
                layout: layout(cin, cout, Window::Same, prologue),
                input: FrameShape::new(height, width, cin),
                residual: false,
            });
        }
    }
}

/// Frames that see one input frame each, in more tiles than blocks compute at a time.
#[test]
fn images_to_pixels_match_the_cpu() {
    let gpus = gpus();
    if gpus.is_empty() {
        return;
    }
    let cpu = Cpu::new(CpuOptions::default()).unwrap();
    for (height, width) in [(1, 1), (37, 53), (300, 300)] {
        for (cin, cout) in [(32, 3), (96, 4)] {
            let groups = layout(cin, cout, Window::Same, Prologue::NormSilu);
            for norm in [groups.norm, Norm::Pixel] {
                let layout = ConvLayout { slabs: 1, norm, ..groups };
                let case = ConvCase { layout, input: FrameShape::new(height, width, cin), residual: false };
                let what = format!("{layout:?} {height}x{width}");
                assert_close(&gpus, 2e-3, &what, &run(&cpu, &case), |cuda| run(cuda, &case));
            }
        }
    }
}

fn attend<B: RawMemory>(backend: &B, shape: FrameShape) -> Vec<f32> {
    let wide = shape.with_channels(3 * shape.channels);
    let (sizes, mut places) = (backend.sizes(), BlockPlaces::default());
    let (from, to) = (places.take(sizes.frame_bytes(wide, 1)), places.take(sizes.frame_bytes(shape, 1)));
    let (scratch, staging) = (sizes.attention_scratch(shape, 1), sizes.staging_bytes(wide));
    let mut job = KernelJob::new(backend, places, Room { scratch, staging, ..Room::default() });
    job.load_random(&mut Lcg(3), wide, &[from]);
    job.run(Op::Attention(AttentionOp { shape, frames: vec![(from, to)] }), &[]);
    job.store(shape, &[to])
}

#[test]
fn attention_matches_the_cpu() {
    let gpus = gpus();
    let cpu = Cpu::new(CpuOptions::default()).unwrap();
    for (height, width, channels) in
        [(1, 1, 8), (5, 7, 32), (13, 17, 64), (4, 8, 256), (31, 37, 512), (65, 1, 504), (29, 23, 384)]
            .into_iter()
            .chain([(1, 1, 520), (5, 7, 640), (13, 17, 768), (31, 37, 1024), (49, 4, 1152), (7, 6, 1000)])
    {
        let (shape, what) = (FrameShape::new(height, width, channels), format!("{height}x{width}x{channels}"));
        assert_close(&gpus, 4e-3, &what, &attend(&cpu, shape), |cuda| attend(cuda, shape));
    }
}

/// Two tiles into a frame, divided by the sum of their fades.
fn blended<B: RawMemory>(backend: &B) -> Vec<f32> {
    let (tile, deep, whole) = (FrameShape::new(5, 7, 3), FrameShape::new(5, 7, 8), FrameShape::new(8, 7, 3));
    let layout = |cout, window, prologue| ConvLayout {
        slabs: 1,
        biases: 1,
        norm: Norm::Group { groups: 2 },
        ..layout(8, cout, window, prologue)
    };
    let (first, layout) = (layout(8, Window::Point, Prologue::None), layout(3, Window::Same, Prologue::NormSilu));
    let (sizes, mut places) = (backend.sizes(), BlockPlaces::default());
    let [raw, source, from, canvas] = [deep, deep, tile, whole].map(|shape| places.take(sizes.frame_bytes(shape, 2)));
    let conv_scratch = [&first, &layout].map(|layout| sizes.conv_scratch(layout, deep, 1));
    let scratch = conv_scratch.into_iter().fold(sizes.fade_bytes(whole), u64::max);
    let staging = sizes.staging_bytes(whole).max(sizes.staging_bytes(deep));
    let mut job = KernelJob::new(backend, places, Room { scratch, staging, ..Room::default() });
    let (makes, prepared) = ([prepare(backend, &first, 1)], [prepare(backend, &layout, 2)]);
    let (fade, columns) = ([0.25, 0.5, 1.0, 0.75, 0.5], [1.0f32; 7]);
    for (i, top) in [0, 3].into_iter().enumerate() {
        job.load_random(&mut Lcg(i as u64), deep, &[raw]);
        let frames = vec![frame(&[(raw, 0)], 0, None, source)];
        job.run(conv_op(&first, deep, frames, true, PartialSums::NONE), &makes);
        let frames = vec![frame(&[(source, 0)], 0, None, from)];
        job.run(conv_op(&layout, deep, frames, false, PartialSums::NONE), &prepared);
        let (fades, clear) = (Fades { rows: &fade, columns: &columns }, i == 0);
        let op = BlendTile { from, from_shape: tile, into: canvas, into_shape: whole, top, left: 0, fades, clear };
        backend.blend(&mut job.memory, &op, &job.buffers).unwrap();
        job.finish();
    }
    let sums: Vec<f32> = (0..8).map(|y| fade.get(y).unwrap_or(&0.0) + if y >= 3 { fade[y - 3] } else { 0.0 }).collect();
    let values = vec![f32::NAN; whole.elements() as usize];
    let into = view(&values, [3, 1, 8, 7]);
    let divide = Some(Fades { rows: &sums, columns: &columns });
    let op = StoreTensor { divide, ..plain_store(canvas, whole, &into, 0) };
    backend.store(&mut job.memory, &op, &job.buffers).unwrap();
    job.finish();
    values
}

#[test]
fn blend_matches_the_cpu() {
    let cpu = Cpu::new(CpuOptions { threads: Some(1), ..CpuOptions::default() }).unwrap();
    assert_close(&gpus(), 2e-3, "blending", &blended(&cpu), blended);
}

#[test]
fn staging_keeps_frames_apart() {
    let (shape, count) = (FrameShape::new(256, 320, 8), 40);
    // Whole numbers that every precision has, and another one in the same place of the next frame.
    let values: Vec<f32> = (0..count * shape.elements()).map(|i| (i % 251) as f32).collect();
    let dims = [shape.channels, count, shape.height, shape.width];
    let input = view(&values, dims);
    for cuda in &gpus() {
        let (sizes, mut places) = (cuda.sizes(), BlockPlaces::default());
        let slot = places.take(sizes.frame_bytes(shape, 1));
        let room = Room { staging: sizes.staging_bytes(shape), ..Room::default() };
        let KernelJob { mut memory, buffers, .. } = KernelJob::new(cuda, places, room);
        let found = vec![f32::NAN; values.len()];
        let into = view(&found, dims);
        let mut pass = |frames: Range<u64>, cancelled: u64| {
            for frame in frames {
                let op = plain_load(&input, frame, shape, slot);
                if let Err(error) = cuda.load(&mut memory, &op, &buffers, &mut || frame == cancelled) {
                    assert_eq!(error, Error::Cancelled);
                    break;
                }
                let op = plain_store(slot, shape, &into, frame);
                cuda.store(&mut memory, &op, &buffers).unwrap();
            }
            cuda.finish(&mut memory, None).unwrap();
        };
        let half = count / 2;
        pass(0..count, half);
        let pixels = shape.pixels() as usize;
        for (i, (found, right)) in found.chunks_exact(pixels).zip(values.chunks_exact(pixels)).enumerate() {
            let frame = i as u64 % count;
            let arrived = if frame < half { found == right } else { found.iter().all(|v| v.is_nan()) };
            assert!(arrived, "{}: frame {frame} of a run that was cancelled at {half}", name(cuda));
        }
        pass(half..count, count);
        assert!(found == values, "{}", name(cuda));
    }
}

/// Enough pixels that blocks go round more than once.
#[test]
fn norm_in_place_matches_another_place_bit_for_bit() {
    let (shape, groups) = (FrameShape::new(300, 701, 64), 16);
    for cuda in &gpus() {
        let (sizes, mut places) = (cuda.launcher.sizes, BlockPlaces::default());
        let frames = places.frames(sizes.frame_bytes(shape, groups), 4);
        let mut job = KernelJob::new(cuda, places, Room { staging: sizes.staging_bytes(shape), ..Room::default() });
        let statistics: Vec<u8> = (0..2 * groups).flat_map(|i| (0.5 + i as f32 / 100.0).to_le_bytes()).collect();
        for prologue in [Prologue::Norm, Prologue::NormSilu] {
            let layout = ConvLayout { norm: Norm::Group { groups }, ..layout(64, 64, Window::Same, prologue) };
            let weights = [prepare(cuda, &layout, 3)];
            job.load_random(&mut Lcg(8), shape, &frames[..2]);
            frames[..2]
                .iter()
                .for_each(|frame| job.write(DeviceOffset(frame.0 + sizes.data_bytes(shape)), &statistics));
            let other_place = (0..2).map(|i| (frames[i], frames[i + 2])).collect();
            job.run(normalise_op(&layout, shape, other_place), &weights);
            let in_place = (0..2).map(|i| (frames[i], frames[i])).collect();
            job.run(normalise_op(&layout, shape, in_place), &weights);
            let made = job.read(&frames, sizes.data_bytes(shape));
            assert!(made[..2] == made[2..] && made[0] != made[1], "{prologue:?} in {}", name(cuda));
        }
    }
}

/// A stream of ours, and whether it was idle when a block was freed.
struct FreeProbe {
    stream: sys::CUstream,
    idle: Option<bool>,
}

unsafe extern "C" fn allocate(_: *mut c_void, _: i32, bytes: u64) -> *mut c_void {
    let mut address = 0;
    // SAFETY: a context is current.
    driver::check("allocating", unsafe { sys::cuMemAlloc_v2(&mut address, bytes as usize) }).unwrap();
    std::ptr::without_provenance_mut(address as usize)
}

unsafe extern "C" fn free(probe: *mut c_void, _: i32, block: *mut c_void, _: u64) {
    // SAFETY: the test passes its probe, whose stream lives; the block is one of `allocate`.
    unsafe {
        let probe = &mut *probe.cast::<FreeProbe>();
        probe.idle = Some(sys::cuStreamQuery(probe.stream) == sys::CUresult::CUDA_SUCCESS);
        sys::cuMemFree_v2(block.addr() as u64);
    }
}

#[test]
fn memory_is_freed_when_no_stream_uses_it() {
    for cuda in gpus().iter().take(1) {
        let mut probe = FreeProbe { stream: cuda.launcher.queue.stream().handle(), idle: None };
        let host = DeviceAllocator::Host(Callbacks { alloc: allocate, free, user: (&raw mut probe).cast() });
        let bytes = 1 << 30;
        let block = DeviceBlock::new(cuda.context(), host, bytes).unwrap();
        let _current = cuda.context().enter().unwrap();
        for _ in 0..200 {
            let address = block.at(0, bytes).unwrap();
            // SAFETY: the block is that long, and freeing it waits.
            let answer = unsafe { sys::cuMemsetD8Async(address, 0, bytes as usize, probe.stream) };
            driver::check("filling memory", answer).unwrap();
        }
        // SAFETY: the stream lives.
        assert_eq!(unsafe { sys::cuStreamQuery(probe.stream) }, sys::CUresult::CUDA_ERROR_NOT_READY);
        drop(block);
        assert_eq!(probe.idle, Some(true));
    }
}
