//! Kernels against the CPU backend and against themselves, on the first Vulkan device. Without one there is nothing to
//! test; VVAE_REQUIRE_VULKAN makes that a failure.

use super::driver::{MatrixElement, Shader};
use super::*;
use crate::backend::cpu::{Cpu, CpuOptions};
use crate::backend::gpu::{HostBlock, JobMemory, RowSizes, limit_testing};
use crate::backend::tests::bands::{CACHE_FRAMES, Cache, FRAMES, Still, block_outputs, run_chunks, still_outputs};
use crate::backend::tests::*;
use crate::ir::{
    AttentionOp, CacheFormat, ConvOp, DeviceOffset, FrameShape, Norm, NormaliseOp, Op, PartialSums, Prologue, Window,
};
use crate::testing::Lcg;

/// The first Vulkan device in every precision.
fn gpus() -> Vec<Vulkan> {
    let open = |precision| Vulkan::new(0, precision, DeviceAllocator::System);
    match Precision::ALL.into_iter().map(open).collect::<Result<Vec<_>>>() {
        Ok(gpus) => gpus,
        Err(why) => {
            assert!(std::env::var_os("VVAE_REQUIRE_VULKAN").is_none(), "{why}");
            println!("skipped: {why}");
            Vec::new()
        }
    }
}

impl Vulkan {
    /// Copies between a block and host memory.
    fn exchange(&self, memory: &JobMemory<Launcher>, at: DeviceOffset, bytes: &mut [u8], is_read: bool) {
        memory.synchronise(&self.launcher).unwrap();
        let (length, queue) = (bytes.len() as u64, VulkanQueue::new(self.context()).unwrap());
        let host = HostMemory::new(self.context(), length).unwrap();
        let (device, staged) = (memory.block.handle, host.buffer());
        let start = host.at(0, length).unwrap();
        let (from, to) = if is_read { (device, staged) } else { (staged, device) };
        let (src_offset, dst_offset) = if is_read { (at.0, 0) } else { (0, at.0) };
        // SAFETY: both blocks are that long, and the copy is waited for.
        unsafe {
            if !is_read {
                start.copy_from(bytes.as_ptr(), bytes.len());
            }
            queue.copy(from, to, &[vk::BufferCopy { src_offset, dst_offset, size: length }]).unwrap();
            queue.synchronise().unwrap();
            if is_read {
                start.copy_to(bytes.as_mut_ptr(), bytes.len());
            }
        }
    }
}

impl RawMemory for Vulkan {
    fn poison(&self, memory: &mut JobMemory<Launcher>, bytes: u64) {
        self.exchange(memory, DeviceOffset(0), &mut vec![0xff; bytes as usize], false);
    }

    fn read(&self, memory: &JobMemory<Launcher>, from: DeviceOffset, into: &mut [u8]) {
        self.exchange(memory, from, into, true);
    }
}

fn cpu() -> Cpu {
    Cpu::new(CpuOptions { threads: Some(1), ..CpuOptions::default() }).unwrap()
}

/// f16 to `most`, bf16 with three bits less to 8 times that, f32 to what the order of sums explains.
fn assert_close(most: f64, what: &str, right: &[f32], find: impl Fn(&Vulkan) -> Vec<f32>) {
    for gpu in &gpus() {
        let most = match gpu.precision() {
            Precision::Fp16 => most,
            Precision::Bf16 => 8.0 * most,
            Precision::Fp32 => most / 500.0,
        };
        let error = relative_error(&find(gpu), right);
        assert!(error <= most, "{what} in {}: {error:.1e}, not {most:.0e} or less", gpu.precision().name());
    }
}

/// A convolution of two frames, with a residual and a shortcut if the layout has one, and then one behind the norm of
/// its output.
fn convolved<B: RawMemory>(backend: &B, layout: &ConvLayout, input: FrameShape) -> Vec<f32> {
    let output = layout.window.output(input, layout.cout);
    let next =
        ConvLayout { cin: layout.cout, prologue: Prologue::NormSilu, window: Window::Same, shortcut: None, ..*layout };
    let weights = [prepare(backend, layout, 3), prepare(backend, &next, 4)];
    let sizes = backend.sizes();
    let (mut places, groups) = (BlockPlaces::default(), layout.norm.groups());
    let frames = places.frames(sizes.frame_bytes(input, groups), 2);
    let [added, out, normalised, last] = [(); 4].map(|()| places.frames(sizes.frame_bytes(output, groups), 2));
    let shape = output.with_channels(layout.shortcut.unwrap_or(1));
    let shortcuts = places.frames(sizes.frame_bytes(shape, groups), 2);
    let room = Room {
        scratch: sizes.conv_scratch(layout, input, 2).max(sizes.conv_scratch(&next, output, 2)),
        staging: [input, output, shape].map(|shape| sizes.staging_bytes(shape)).into_iter().max().unwrap(),
        ..Room::default()
    };
    let mut job = KernelJob::new(backend, places, room);
    let mut random = Lcg(21);
    job.load_random(&mut random, input, &frames);
    job.load_random(&mut random, output, &added);
    job.load_random(&mut random, shape, &shortcuts);
    let of = |i: usize| {
        let mut terms = vec![(frames[1 - i], 0), (frames[i], 2)];
        terms.extend(layout.shortcut.map(|_| (shortcuts[i], layout.slabs as u8)));
        frame(&terms, i as u8, (i == 1).then_some(added[i]), out[i])
    };
    let conv = |layer, layout: &ConvLayout, input, frames| {
        let (layout, statistics, partial_sums) = (*layout, groups > 0, PartialSums::NONE);
        Op::Conv(ConvOp { layer, layout, weights: None, input, frames, statistics, partial_sums })
    };
    job.run(conv(0, layout, input, vec![of(0), of(1)]), &weights);
    let mut read = out.clone();
    if !backend.profile().fuses_norm {
        let frames = out.iter().copied().zip(normalised.iter().copied()).collect();
        job.run(Op::Normalise(NormaliseOp { layer: 1, layout: next, weights: None, shape: output, frames }), &weights);
        read = normalised;
    }
    let behind = |i: usize| frame(&[(read[i], 1)], 0, None, last[i]);
    job.run(conv(1, &next, output, vec![behind(0), behind(1)]), &weights);
    let mut all = job.store(output, &out);
    all.extend(job.store(output, &last));
    all
}

#[test]
fn convolutions_and_norms_match_the_cpu() {
    let plain = |cin, cout, window| layout(cin, cout, window, Prologue::None);
    let cases = [
        plain(3, 24, Window::Same),
        plain(40, 136, Window::Same),
        plain(16, 128, Window::Same),
        plain(24, 96, Window::Down),
        ConvLayout { biases: 2, ..plain(24, 40, Window::Up) },
        plain(32, 16, Window::Point),
        ConvLayout { shortcut: Some(24), ..plain(16, 48, Window::Same) },
        ConvLayout { norm: Norm::Pixel, ..plain(32, 96, Window::Same) },
        ConvLayout { norm: Norm::Pixel, ..plain(96, 12, Window::Up) },
    ];
    for layout in &cases {
        let input = FrameShape::new(22, 38, layout.cin);
        let right = convolved(&cpu(), layout, input);
        assert_close(2e-3, &format!("{layout:?}"), &right, |gpu| convolved(gpu, layout, input));
    }
}

/// Attention over two frames of queries, keys and values side by side.
fn attended<B: RawMemory>(backend: &B, shape: FrameShape, values: &[f32]) -> Vec<f32> {
    let (sizes, mut places, input) = (backend.sizes(), BlockPlaces::default(), with_keys(shape));
    let [from, to] = [input, shape].map(|shape| places.frames(sizes.frame_bytes(shape, 1), 2));
    let room =
        Room { scratch: sizes.attention_scratch(shape, 2), staging: sizes.staging_bytes(input), ..Room::default() };
    let mut job = KernelJob::new(backend, places, room);
    let tensor = view(values, dims(input, &from));
    (0..).zip(&from).for_each(|(t, into)| job.load(&plain_load(&tensor, t, input, *into)));
    job.finish();
    job.run(Op::Attention(AttentionOp { shape, frames: from.into_iter().zip(to.iter().copied()).collect() }), &[]);
    job.store(shape, &to)
}

fn with_keys(shape: FrameShape) -> FrameShape {
    shape.with_channels(3 * shape.channels)
}

#[test]
fn attention_matches_the_cpu() {
    for shape in [(7, 11, 32), (5, 9, 520), (7, 11, 64), (9, 15, 576)].map(|(h, w, c)| FrameShape::new(h, w, c)) {
        let values = Lcg(5).fill(2 * with_keys(shape).elements() as usize);
        let right = attended(&cpu(), shape, &values);
        assert_close(2e-3, &format!("attention {shape:?}"), &right, |gpu| attended(gpu, shape, &values));
    }
}

/// Frames whose keys grow from the first pixel to the last: slowly in one frame, fast in the other. `factor`: of the
/// queries of a pixel. Queries and keys are eighths that every precision has, so scores are exact.
fn growing_keys(shape: FrameShape, factor: impl Fn(u64) -> f32) -> Vec<f32> {
    let (pixels, channels, mut random) = (shape.pixels(), shape.channels, Lcg(6));
    let mut values = Vec::new();
    for channel in 0..3 * channels {
        for eighths in [12, 64] {
            for pixel in 0..pixels {
                let noise = random.next();
                values.push(match channel / channels {
                    0 => (1.5 + 1.5 * noise).round() / 8.0 * factor(pixel),
                    1 => ((eighths * pixel / pixels) as f32 + (4.0 * noise).round()) / 8.0,
                    _ => noise,
                });
            }
        }
    }
    values
}

/// Also where scores have exponents that f16 does not have. Keys are alike, so every value weighs the same.
#[test]
fn attention_over_large_scores_matches_the_cpu() {
    let shape = FrameShape::new(7, 11, 64);
    let (elements, large) = (2 * shape.elements() as usize, (1u64 << 57) as f32);
    let values = [vec![large; elements], vec![-large; elements], Lcg(7).fill(elements)].concat();
    let right = attended(&cpu(), shape, &values);
    for gpu in gpus().iter().filter(|gpu| gpu.precision() != Precision::Fp16) {
        let most = if gpu.precision() == Precision::Bf16 { 2e-2 } else { 1e-5 };
        let error = relative_error(&attended(gpu, shape, &values), &right);
        assert!(error <= most, "{}: {error:.1e}", gpu.precision().name());
    }
}

/// The greatest score of a query is in the last keys for two of three queries, and in the first for the third.
#[test]
fn attention_whose_scores_grow_matches_the_cpu() {
    for shape in [(7, 29, 64), (16, 12, 192), (13, 11, 512), (9, 15, 576)].map(|(h, w, c)| FrameShape::new(h, w, c)) {
        let values = growing_keys(shape, |pixel| [1.0, -1.0, 0.5][pixel as usize % 3]);
        let right = attended(&cpu(), shape, &values);
        assert_close(2e-3, &format!("growing scores {shape:?}"), &right, |gpu| attended(gpu, shape, &values));
    }
}

/// Corrections of a query's sums leave the others of its workgroup as they are.
#[test]
fn queries_do_not_change_each_other() {
    let shape = FrameShape::new(9, 17, 64);
    let values = |odd: f32| growing_keys(shape, |pixel| if pixel % 2 == 0 { -1.0 } else { odd });
    for gpu in &gpus() {
        let [alike, other] = [-1.0, 1.0].map(|odd| attended(gpu, shape, &values(odd)));
        let pixels = shape.pixels() as usize;
        let same = |(i, (a, b)): (usize, (&f32, &f32))| i % pixels % 2 == 1 || a.to_bits() == b.to_bits();
        assert!(alike.iter().zip(&other).enumerate().all(same), "{}", gpu.precision().name());
        assert!(alike != other);
    }
}

/// However a launch is divided.
#[test]
fn short_launches_have_the_bits_of_long_ones() {
    let layout = ConvLayout { shortcut: Some(24), ..layout(16, 48, Window::Same, Prologue::None) };
    let input = FrameShape::new(40, 20, 16);
    let find = || gpus().iter().map(|gpu| convolved(gpu, &layout, input)).collect::<Vec<_>>();
    let bits = |all: Vec<Vec<f32>>| all.concat().iter().map(|value| value.to_bits()).collect::<Vec<u32>>();
    let long = bits(find());
    limit_testing::FORCED.set(Some(1));
    let short = bits(find());
    limit_testing::FORCED.set(None);
    assert!(limit_testing::SPLIT.get() > 0 || long.is_empty());
    assert!(short == long);
}

const CHANNELS: u64 = 16;
const SIZE: (u64, u64) = (84, 67);

#[test]
fn every_placement_has_the_bits_of_whole_frames() {
    for norm in [Norm::Group { groups: 8 }, Norm::Pixel] {
        let head = ConvLayout { norm, ..layout(3, CHANNELS, Window::Same, Prologue::None) };
        let layer = ConvLayout { norm, ..layout(CHANNELS, CHANNELS, Window::Same, Prologue::NormSilu) };
        for gpu in &gpus() {
            let run = |cache, format| run_chunks(gpu, (&head, &layer), SIZE, cache, format).0;
            let whole = run(None, CacheFormat::Exact);
            let resident = run(Some(Cache::Split(SIZE.1)), CacheFormat::U8);
            for cache in [0, 32, 64, SIZE.1].map(Cache::Split).into_iter().chain([Cache::Recomputed]) {
                assert!(run(Some(cache), CacheFormat::Exact) == whole, "{cache:?} {norm:?}");
                assert!(run(Some(cache), CacheFormat::U8) == resident, "{cache:?} in 8 bits, {norm:?}");
            }
            let block = |hidden| block_outputs(gpu, &head, &layer, SIZE, hidden);
            let whole = block(None);
            for hidden in [CACHE_FRAMES, 3, FRAMES - 1] {
                assert!(block(Some(hidden)) == whole, "{hidden} hidden frames, {norm:?}");
            }
        }
    }
    for gpu in &gpus() {
        let whole = still_outputs(gpu, CHANNELS, SIZE, Still::Whole);
        for still in [Still::Offloaded, Still::Rematerialised] {
            assert!(still_outputs(gpu, CHANNELS, SIZE, still) == whole, "{still:?}");
        }
    }
}

/// Values as a cache in 8 bits gives them back, computed by the test.
#[test]
fn caches_in_8_bits_round_as_defined() {
    let norm = Norm::Group { groups: 8 };
    let head = ConvLayout { norm, ..layout(3, CHANNELS, Window::Same, Prologue::None) };
    let layer = layout(CHANNELS, CHANNELS, Window::Same, Prologue::NormSilu);
    for gpu in &gpus() {
        let run = |cache| run_chunks(gpu, (&head, &layer), SIZE, cache, CacheFormat::U8).1;
        let error = relative_error(&run(Some(Cache::Split(32))), &run(None));
        // A value between two steps of the format may go to either.
        let most = if gpu.precision() == Precision::Fp32 { 5e-5 } else { 5e-3 };
        assert!(error <= most, "{}: {error:.1e}", gpu.precision().name());
    }
}

/// Prints what the tests of this file ran on.
#[test]
fn arithmetic_tells_kernels_of_matrices_apart() {
    for gpu in &gpus() {
        let (precision, arithmetic) = (gpu.precision(), gpu.arithmetic());
        println!("{}: {arithmetic}", precision.name());
        let matrices = &gpu.context().device.matrices;
        let element = match precision {
            Precision::Fp16 => Some(MatrixElement::Fp16).filter(|fp16| matrices.of_element(*fp16).is_some()),
            Precision::Bf16 => Some(MatrixElement::Bf16).filter(|bf16| matrices.of_element(*bf16).is_some()),
            Precision::Fp32 => None,
        };
        assert_eq!(arithmetic.contains("with matrices of"), element.is_some(), "{arithmetic}");
        let shader = gpu.launcher.conv_shader(&layout(64, 128, Window::Same, Prologue::NormSilu));
        let used = match shader {
            Shader::ConvMatrix(element, _) => Some(element),
            _ => None,
        };
        assert_eq!(used, element, "{shader:?}");
    }
}

#[test]
fn the_device_is_refused_by_name_if_it_is_not_there() {
    if gpus().is_empty() {
        return;
    }
    let why = Vulkan::new(99, Precision::Fp16, DeviceAllocator::System).err().unwrap().to_string();
    assert!(why.contains("Vulkan devices"), "{why}");
}

#[test]
fn sizes_of_frames_and_weights_follow_shapes() {
    let sizes = VulkanSizes { precision: Precision::Fp16 };
    let shape = FrameShape::new(3, 5, 12);
    assert_eq!((sizes.row_bytes(shape), sizes.data_bytes(shape)), (5 * 16 * 2, 3 * 5 * 16 * 2));
    assert_eq!(sizes.frame_bytes(shape, 4), 512);
    let up = layout(16, 40, Window::Up, Prologue::None);
    let weights = sizes.weight_layout(&up);
    assert_eq!((weights.slab_bytes, weights.bias), (16 * 32 * 96 * 2, 3 * 16 * 32 * 96 * 2));
    assert_eq!(weights.end - weights.bias, 2 * 16 * 96 * 4);
}

#[test]
fn rates_can_be_measured() {
    for gpu in &gpus() {
        let Rates { products, memory, copies, .. } = rates::measured(gpu, 32).unwrap();
        println!("{}: {products:.3e} products/s, {memory:.3e} bytes/s", gpu.precision().name());
        // From one core beside other work to more than any GPU has.
        assert!((1e5..1e17).contains(&products) && (1e5..1e15).contains(&memory), "{products:e}, {memory:e}");
        assert_eq!(copies, gpu.profile().rates.copies);
    }
}
