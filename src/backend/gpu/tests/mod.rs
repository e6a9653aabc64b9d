//! Bands, staging and offloading on a GPU in host memory: every placement has the bits of whole frames, in whatever
//! order the queues run, and a wait that is left out shows.

pub mod host;

use self::host::{HostGpu, WaitSite};
use crate::backend::cpu::{Cpu, CpuOptions};
use crate::backend::tests::bands::{CACHE_FRAMES, Cache, FRAMES, Still, block_outputs, run_chunks, still_outputs};
use crate::backend::tests::pixels::{MAP_CASES, PATCH_CASES, mapped, patched};
use crate::backend::tests::{BlockPlaces, KernelJob, Room, layout, plain_load, plain_store};
use crate::backend::{DeviceFacts, Execution};
use crate::ir::{CacheFormat, ConvLayout, DType, FrameShape, Norm, Prologue, TensorDevice, View, Window};

const CHANNELS: u64 = 16;
/// Six bands, of which three are in flight, and columns that are no multiple of a step.
const SIZE: (u64, u64) = (84, 19);

type Bits = Vec<Vec<u8>>;

fn layers() -> [ConvLayout; 2] {
    let head = ConvLayout { norm: Norm::Group { groups: 8 }, ..layout(3, CHANNELS, Window::Same, Prologue::None) };
    [head, layout(CHANNELS, CHANNELS, Window::Same, Prologue::NormSilu)]
}

/// What is computed, by whole frames or in bands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Work {
    /// A clip in chunks; `None` for whole frames.
    Chunks(Option<Cache>, CacheFormat),
    /// A residual block with so many hidden frames materialised; `None` for whole frames.
    Block(Option<usize>),
    Still(Still),
    /// Frames of a tensor through staging buffers, in wide elements or in narrow ones, which double-buffer.
    Tensors(DType),
}

impl Work {
    /// The same by whole frames. Caches in 8 bits have no whole form: they are compared with resident ones.
    fn whole(self) -> Work {
        match self {
            Work::Chunks(_, CacheFormat::Exact) => Work::Chunks(None, CacheFormat::Exact),
            Work::Chunks(_, CacheFormat::U8) => Work::Chunks(Some(Cache::Split(SIZE.1)), CacheFormat::U8),
            Work::Block(_) => Work::Block(None),
            Work::Still(_) => Work::Still(Still::Whole),
            Work::Tensors(_) => self,
        }
    }

    fn all() -> Vec<Work> {
        let columns = [0, 8, SIZE.1 / 2, SIZE.1 - 1, SIZE.1].map(Cache::Split);
        let caches = columns.into_iter().chain([Cache::Recomputed]);
        let chunks = caches.flat_map(|cache| [CacheFormat::Exact, CacheFormat::U8].map(|format| (cache, format)));
        let mut all: Vec<Work> = chunks.map(|(cache, format)| Work::Chunks(Some(cache), format)).collect();
        all.extend([CACHE_FRAMES, 3, FRAMES - 1].map(|hidden| Work::Block(Some(hidden))));
        all.extend([Still::Offloaded, Still::Rematerialised].map(Work::Still));
        all.extend([DType::F32, DType::U8].map(Work::Tensors));
        all
    }

    fn run(self, seed: u64, dropped: Option<WaitSite>) -> (Bits, Vec<WaitSite>) {
        let gpu = HostGpu::new(seed, dropped).unwrap();
        let [head, layer] = layers();
        let bits = match self {
            Work::Chunks(cache, format) => run_chunks(&gpu, (&head, &layer), SIZE, cache, format).0,
            Work::Block(hidden) => block_outputs(&gpu, &head, &layer, SIZE, hidden),
            Work::Still(still) => still_outputs(&gpu, CHANNELS, SIZE, still),
            Work::Tensors(dtype) => through_staging(&gpu, dtype),
        };
        (bits, gpu.wait_sites())
    }
}

/// Loads frames one after the other, and stores them. They come back as they were.
fn through_staging(gpu: &HostGpu, dtype: DType) -> Bits {
    let shape = FrameShape::new(SIZE.0, SIZE.1, 3);
    let mut places = BlockPlaces::default();
    let frames = places.frames(gpu.sizes().frame_bytes(shape, 1), FRAMES);
    let staging = gpu.sizes().staging_bytes(shape);
    let mut job = KernelJob::new(gpu, places, Room { staging, ..Room::default() });
    let bytes = (shape.elements() * dtype.bytes()) as usize;
    let mut from: Vec<u64> = (0..(bytes * FRAMES / 8) as u64).map(|i| 0x0101_0101_0101_0101 * (i % 61 + 1)).collect();
    let mut into = vec![0_u64; from.len() + 1];
    from.push(0);
    // Frame after frame, each planar.
    let view = |data: &mut [u64]| {
        let (row, plane) = (SIZE.1 as i64, (SIZE.0 * SIZE.1) as i64);
        let (shape, strides) = ([1, 3, FRAMES as u64, SIZE.0, SIZE.1].into(), [0, plane, 3 * plane, row, 1]);
        let data = data.as_mut_ptr().cast();
        View::checked("t", data, dtype, TensorDevice::Cpu, shape, Some(strides), false).unwrap()
    };
    let (source, target) = (view(&mut from), view(&mut into));
    (0..).zip(&frames).for_each(|(t, at)| job.load(&plain_load(&source, t, shape, *at)));
    for (t, at) in (0..).zip(&frames) {
        gpu.store(&mut job.memory, &plain_store(*at, shape, &target, t), &job.buffers).unwrap();
    }
    job.finish();
    let as_bytes = |words: &[u64]| words.iter().flat_map(|word| word.to_ne_bytes()).collect::<Vec<u8>>();
    let frames_of = |words: &[u64]| as_bytes(words)[..bytes * FRAMES].chunks(bytes).map(<[u8]>::to_vec).collect();
    let (sent, came): (Bits, Bits) = (frames_of(&from), frames_of(&into));
    assert!(came == sent, "{dtype:?}");
    came
}

#[test]
fn every_placement_has_the_bits_of_whole_frames_in_any_order() {
    for work in Work::all() {
        let (right, _) = work.whole().run(1, None);
        let finite = |bytes: &[u8; 4]| f32::from_ne_bytes(*bytes).is_finite();
        let is_tensor = matches!(work, Work::Tensors(_));
        assert!(is_tensor || right.iter().all(|frame| frame.as_chunks().0[..64].iter().all(finite)), "{work:?}");
        for seed in 2..6 {
            assert!(work.run(seed, None).0 == right, "{work:?}, seed {seed}");
        }
    }
}

#[test]
fn a_wait_that_is_left_out_changes_bits() {
    let all: Vec<(Work, Bits)> = Work::all().into_iter().map(|work| (work, work.whole().run(1, None).0)).collect();
    let mut sites: Vec<WaitSite> = all.iter().flat_map(|(work, _)| work.run(1, None).1).collect();
    // How far the host runs ahead of the queue changes no bits.
    sites.retain(|site| !site.0.ends_with("job.rs"));
    sites.sort_unstable();
    sites.dedup();
    let shows = |site: WaitSite| {
        (2..12).any(|seed| {
            all.iter().any(|(work, right)| {
                let run = std::panic::catch_unwind(|| work.run(seed, Some(site)).0);
                run.map_or(true, |found| found != *right)
            })
        })
    };
    let unseen: Vec<WaitSite> = sites.iter().copied().filter(|site| !shows(*site)).collect();
    assert!(unseen.is_empty(), "{unseen:?} of {sites:?}");
}

/// Frames with norms of pixels carry no statistics.
#[test]
fn norms_of_pixels_in_bands_have_the_bits_of_whole_frames() {
    let [head, layer] = layers().map(|layout| ConvLayout { norm: Norm::Pixel, ..layout });
    let gpu = HostGpu::new(7, None).unwrap();
    let chunks = |cache| run_chunks(&gpu, (&head, &layer), SIZE, cache, CacheFormat::Exact).0;
    for cache in [Cache::Split(0), Cache::Split(8), Cache::Split(SIZE.1), Cache::Recomputed] {
        assert!(chunks(Some(cache)) == chunks(None), "{cache:?}");
    }
    let block = |hidden| block_outputs(&gpu, &head, &layer, SIZE, hidden);
    for hidden in [CACHE_FRAMES, FRAMES - 1] {
        assert!(block(Some(hidden)) == block(None), "{hidden} hidden frames");
    }
}

/// Staging changes no bits: not of parts of packed latents that begin within a pixel, and not of a missing alpha channel.
#[test]
fn staged_patches_and_maps_of_channels_have_the_bits_of_the_cpu() {
    let (cpu, bits) = (Cpu::new(CpuOptions::default()).unwrap(), |of: Vec<f32>| of.into_iter().map(f32::to_bits));
    for seed in 0..3 {
        let gpu = HostGpu::new(seed, None).unwrap();
        for case in PATCH_CASES {
            assert!(bits(patched(&gpu, &case)).eq(bits(patched(&cpu, &case))), "{case:?}");
        }
        for case in MAP_CASES {
            assert!(bits(mapped(&gpu, &case)).eq(bits(mapped(&cpu, &case))), "{case:?}");
        }
    }
}
