//! Layers with norms of pixels, against the CPU: widths that wide tiles do not divide. And the bits of such norms,
//! however rows are cut.

use super::pairs::ClipCase;
use super::*;
use crate::backend::cuda::launch::tiling::{PAIRS, TileWidths};
use crate::backend::tests::bands::{CACHE_FRAMES, Cache, FRAMES, block_outputs, outputs};
use crate::testing::paired;

fn pixel(cin: u64, cout: u64, window: Window, prologue: Prologue) -> ConvLayout {
    ConvLayout { norm: Norm::Pixel, ..layout(cin, cout, window, prologue) }
}

#[test]
fn convolutions_with_norms_of_pixels_match_the_cpu() {
    let gpus = gpus();
    if gpus.is_empty() {
        return;
    }
    let cpu = Cpu::new(CpuOptions::default()).unwrap();
    let (silu, norm, none) = (Prologue::NormSilu, Prologue::Norm, Prologue::None);
    for (height, width) in [(6, 4), (18, 34), (38, 54)] {
        for (cin, cout, window, prologue, slabs, shortcut) in [
            (96, 96, Window::Same, silu, 3, None),
            (96, 192, Window::Same, silu, 3, Some(96)),
            (24, 48, Window::Same, silu, 3, Some(24)),
            (192, 384, Window::Same, silu, 3, Some(192)),
            (640, 160, Window::Same, silu, 1, None),
            (16, 384, Window::Same, none, 3, None),
            (384, 32, Window::Same, silu, 3, None),
            (4, 96, Window::Same, none, 3, None),
            (96, 4, Window::Same, silu, 3, None),
            (3, 96, Window::Same, none, 3, None),
            (96, 3, Window::Same, silu, 3, None),
            (24, 3, Window::Same, silu, 3, None),
            (192, 96, Window::Up, none, 1, None),
            (384, 192, Window::Up, none, 1, None),
            (48, 24, Window::Up, none, 1, None),
            (96, 96, Window::Down, none, 1, None),
            (192, 192, Window::Down, none, 1, None),
            (96, 96, Window::Down, none, 3, None),
            (384, 384, Window::Point, none, 3, None),
            (48, 48, Window::Point, none, 3, None),
            (384, 1152, Window::Point, norm, 1, None),
            (96, 288, Window::Point, norm, 1, None),
            (1024, 96, Window::Point, silu, 1, None),
        ] {
            let layout = ConvLayout { slabs, shortcut, ..pixel(cin, cout, window, prologue) };
            let is_main = cin > 3 && cout > 3;
            let case = ConvCase {
                layout,
                input: FrameShape::new(height, width, cin),
                residual: is_main && window != Window::Up,
            };
            let what = format!("{layout:?} {height}x{width}");
            assert_close(&gpus, 2e-3, &what, &super::run(&cpu, &case), |cuda| super::run(cuda, &case));
        }
    }
}

/// Wan 2.2's and Qwen-Image 2.1's.
#[test]
fn wide_layers_with_norms_of_pixels_match_the_cpu() {
    let gpus = gpus();
    if gpus.is_empty() {
        return;
    }
    let cpu = Cpu::new(CpuOptions::default()).unwrap();
    let (silu, norm, none) = (Prologue::NormSilu, Prologue::Norm, Prologue::None);
    for (height, width) in [(6, 4), (10, 18)] {
        for (cin, cout, window, prologue, slabs, shortcut) in [
            (12, 160, Window::Same, none, 3, None),
            (160, 160, Window::Same, silu, 3, None),
            (160, 320, Window::Same, silu, 3, Some(160)),
            (320, 640, Window::Same, silu, 3, Some(320)),
            (640, 96, Window::Same, silu, 3, None),
            (48, 1024, Window::Same, none, 3, None),
            (512, 256, Window::Same, silu, 3, Some(512)),
            (256, 12, Window::Same, silu, 3, None),
            (64, 1152, Window::Same, none, 1, None),
            (1152, 576, Window::Same, silu, 1, Some(1152)),
            (288, 144, Window::Same, silu, 1, Some(288)),
            (144, 144, Window::Same, silu, 1, None),
            (144, 4, Window::Same, silu, 1, None),
            (160, 160, Window::Down, none, 1, None),
            (768, 768, Window::Down, none, 1, None),
            (1024, 1024, Window::Up, none, 1, None),
            (576, 576, Window::Up, none, 1, None),
            (288, 288, Window::Up, none, 1, None),
            (320, 320, Window::Point, none, 3, None),
            (1024, 2048, Window::Point, none, 3, None),
            (1152, 3456, Window::Point, norm, 1, None),
        ] {
            let layout = ConvLayout { slabs, shortcut, ..pixel(cin, cout, window, prologue) };
            let input = FrameShape::new(height, width, cin);
            let case = ConvCase { layout, input, residual: window != Window::Up };
            let what = format!("{layout:?} {height}x{width}");
            assert_close(&gpus, 2e-3, &what, &super::run(&cpu, &case), |cuda| super::run(cuda, &case));
        }
    }
}

#[test]
fn pairs_in_narrow_tiles_match_the_cpu_and_frames_alone_have_the_same_bits() {
    let cpu = Cpu::new(CpuOptions::default()).unwrap();
    for gpu in gpus().iter().filter(|gpu| gpu.profile().pairs.is_some()) {
        for (height, width) in [(7, 5), (18, 34), (130, 200)] {
            for (cin, cout, shortcut) in [
                (96, 96, None),
                (192, 192, None),
                (96, 192, Some(96)),
                (24, 48, Some(24)),
                (384, 32, None),
                (160, 160, None),
            ] {
                let slabs = paired(Window::Same).slabs().len() as u64;
                let base = ConvLayout { shortcut, biases: 1, ..pixel(cin, cout, Window::Same, Prologue::None) };
                let layout = ConvLayout { pairs: Some(PAIRS), slabs, ..base };
                assert!(TileWidths::of(&layout).is_narrow());
                let (input, factor, bias) = (FrameShape::new(height, width, cin), 1.0, (0.0, 1.0));
                let whole = std::slice::from_ref(&(0..super::pairs::FRAMES));
                let (expected, _) = ClipCase { layout: base, input, factor, bias }.run(&cpu, whole);
                let paired = ClipCase { layout, input, factor, bias };
                let (found, bits) = paired.run(gpu, whole);
                let what = format!("pairs of {cin} to {cout}, {height}x{width}");
                assert_close(std::slice::from_ref(gpu), 2e-3, &what, &expected, |_| found.clone());
                for launches in [&[0..1, 1..2, 2..3, 3..4, 4..5, 5..6][..], &[0..2, 2..4, 4..6], &[0..3, 3..6]] {
                    assert!(paired.run(gpu, launches).1 == bits, "{what} in {}: launches of {launches:?}", name(gpu));
                }
            }
        }
    }
}

/// Enough pixels that blocks go round more than once; and numbers of units from fewer than a pixel has lanes to more
/// than a lane holds.
#[test]
fn norms_of_pixels_in_place_match_another_place_bit_for_bit() {
    for cuda in &gpus() {
        for (channels, height) in [(24, 300), (96, 300), (384, 40), (1024, 10), (2048, 5)] {
            let (shape, sizes) = (FrameShape::new(height, 701, channels), cuda.launcher.sizes);
            let mut places = BlockPlaces::default();
            let frames = places.frames(sizes.frame_bytes(shape, 0), 4);
            let mut job = KernelJob::new(cuda, places, Room { staging: sizes.staging_bytes(shape), ..Room::default() });
            for prologue in [Prologue::Norm, Prologue::NormSilu] {
                let layout = pixel(channels, 8, Window::Point, prologue);
                let weights = [prepare(cuda, &layout, 3)];
                job.load_random(&mut Lcg(8), shape, &frames[..2]);
                let other_place = (0..2).map(|i| (frames[i], frames[i + 2])).collect();
                job.run(normalise_op(&layout, shape, other_place), &weights);
                let in_place = (0..2).map(|i| (frames[i], frames[i])).collect();
                job.run(normalise_op(&layout, shape, in_place), &weights);
                let made = job.read(&frames, sizes.data_bytes(shape));
                assert!(made[..2] == made[2..] && made[0] != made[1], "{channels}, {prologue:?} in {}", name(cuda));
            }
        }
    }
}

#[test]
fn bands_with_norms_of_pixels_match_whole_frames_bit_for_bit() {
    for gpu in gpus() {
        for channels in [96, 48] {
            let head = pixel(3, channels, Window::Same, Prologue::None);
            let layer = pixel(channels, channels, Window::Same, Prologue::NormSilu);
            for (height, width) in [(70, 77), (150, 33)] {
                let whole = outputs(&gpu, (&head, &layer), (height, width), None);
                for cache in [0, 32, width].map(Cache::Split).into_iter().chain([Cache::Recomputed]) {
                    let banded = outputs(&gpu, (&head, &layer), (height, width), Some(cache));
                    assert!(banded == whole, "{channels} channels, {height} x {width}, {cache:?}, {}", name(&gpu));
                }
                let whole = block_outputs(&gpu, &head, &layer, (height, width), None);
                for hidden in [CACHE_FRAMES, FRAMES - 1] {
                    let banded = block_outputs(&gpu, &head, &layer, (height, width), Some(hidden));
                    assert!(banded == whole, "{channels} channels, {hidden} materialised, {}", name(&gpu));
                }
            }
        }
    }
}
