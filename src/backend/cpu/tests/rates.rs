//! Rates of layer classes beside the processor's own, in processor time of one thread. For `docs/measurements.md`:
//! `cargo test --release --lib backend::cpu::tests::rates -- --ignored --nocapture`

use std::hint::black_box;

use super::case::PlainWeights;
use super::*;
use crate::backend::cpu::conv::products_per_pixel;
use crate::backend::cpu::simd::{Simd, SimdOp, with_simd};
use crate::model::lower::PAIR_SLABS;

/// Nanoseconds that this thread has computed.
pub fn processor_time() -> f64 {
    const CLOCK_THREAD_CPUTIME_ID: i32 = 3;
    unsafe extern "C" {
        fn clock_gettime(clock: i32, time: *mut [i64; 2]) -> i32;
    }
    let mut time = [0; 2];
    // SAFETY: a `timespec` of 64-bit Linux.
    assert_eq!(unsafe { clock_gettime(CLOCK_THREAD_CPUTIME_ID, &raw mut time) }, 0);
    time[0] as f64 * 1e9 + time[1] as f64
}

/// The least time of a few tries, in seconds.
fn least(tries: usize, mut work: impl FnMut()) -> f64 {
    let mut time = || {
        let start = processor_time();
        work();
        (processor_time() - start) * 1e-9
    };
    (0..tries).map(|_| time()).fold(f64::INFINITY, f64::min)
}

/// Of a layer and the processor's own rate, in turns.
pub const ROUNDS: usize = 8;
/// Output frames of a layer.
const FRAMES: u64 = 4;
/// Of a measurement of the processor's own rate.
const STEPS: usize = 100_000;

/// Independent multiply-adds on as many registers as hide their latency.
struct MultiplyAdds;

impl SimdOp for MultiplyAdds {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let mut sums = [S::splat(black_box(1.0)); 12];
        let (a, b) = (S::splat(black_box(0.999)), S::splat(black_box(0.001)));
        for _ in 0..STEPS {
            for sum in &mut sums {
                *sum = S::fma(*sum, a, b);
            }
        }
        let mut total = 0.0;
        for sum in sums {
            total += S::sum(sum);
        }
        black_box(total);
    }
}

/// Products of [`multiply_tiles`].
#[cfg(target_arch = "x86_64")]
pub const PRODUCTS_OF_FOUR_TILES: usize = 4 * 16 * 16 * 32;

/// Four tile products that do not depend on each other.
///
/// # Safety
/// The tiles are configured.
#[cfg(target_arch = "x86_64")]
pub unsafe fn multiply_tiles() {
    // SAFETY: by this function's contract; tiles 0 to 3 hold sums that nobody reads.
    unsafe {
        std::arch::asm!(
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            options(nostack, nomem, preserves_flags)
        );
    }
}

/// Products a second of the multiply-add or tile instructions alone.
pub fn peak(instructions: Instructions) -> f64 {
    #[cfg(target_arch = "x86_64")]
    if instructions == Instructions::Amx {
        use crate::backend::cpu::simd::{Amx, Bf16Kernels};
        let work = || {
            for _ in 0..STEPS / 16 {
                // SAFETY: the tiles are configured; what they hold does not matter.
                unsafe { multiply_tiles() };
            }
        };
        // SAFETY: the processor has AMX: the backend was made with it.
        return (PRODUCTS_OF_FOUR_TILES * (STEPS / 16)) as f64 / least(20, || unsafe { Amx::with_tiles(work) });
    }
    with_simd!(instructions, S => {
        // SAFETY: the processor has the set: the backend was made with it.
        (12 * S::LANES * STEPS) as f64 / least(20, || unsafe { S::enter(MultiplyAdds) })
    })
}

/// Channels in, out, window, height, width, shortcut.
type LayerSize = (u64, u64, Window, u64, u64, Option<u64>);

/// With norms of groups, as at the levels of decode 5 x 256 x 256.
const LAYERS: [LayerSize; 10] = [
    (512, 512, Window::Same, 32, 32, None),
    (512, 512, Window::Same, 64, 64, None),
    (512, 512, Window::Up, 32, 32, None),
    (512, 256, Window::Same, 64, 64, Some(512)),
    (256, 256, Window::Same, 64, 64, None),
    (256, 256, Window::Up, 64, 64, None),
    (128, 128, Window::Same, 128, 128, None),
    (128, 128, Window::Down, 128, 128, None),
    (128, 3, Window::Same, 128, 128, None),
    (512, 1536, Window::Point, 32, 32, None),
];

/// With norms of pixels, as at the levels of decode 5 x 128 x 128.
const PIXEL_LAYERS: [LayerSize; 5] = [
    (384, 384, Window::Same, 32, 32, None),
    (192, 192, Window::Same, 64, 64, None),
    (192, 96, Window::Up, 64, 64, None),
    (96, 96, Window::Same, 128, 128, None),
    (96, 3, Window::Same, 128, 128, None),
];

#[test]
#[ignore = "measures, and checks nothing"]
fn rates_of_layer_classes() {
    let measured = [Instructions::Amx, Instructions::Avx512, Instructions::Avx2];
    let sets = sets().filter(|(precision, set)| match *precision {
        Precision::Bf16 => *set == Instructions::Amx,
        _ => measured.contains(set),
    });
    // A part of a layer's name as printed, to measure it alone.
    let only = std::env::var("VVAE_RATES_OF").ok();
    for (precision, instructions) in sets {
        let cpu = cpu_in(precision, instructions, 1);
        let pixels = PIXEL_LAYERS.map(|layer| (layer, Norm::Pixel));
        let layers = LAYERS.map(|layer| (layer, Norm::Group { groups: 1 })).into_iter().chain(pixels);
        let layers = layers.flat_map(|layer| [false, true].map(|paired| (layer, paired)));
        for (((cin, cout, window, height, width, shortcut), norm), paired) in layers {
            if paired && (window != Window::Same || cout < 16) {
                continue;
            }
            let kind = if paired { " in pairs" } else { "" };
            let name = format!("{precision:?} {instructions:?} {cin} -> {cout} {window:?} {height} x {width}{kind}");
            if only.as_ref().is_some_and(|only| !name.contains(only.as_str())) {
                continue;
            }
            let prologue = if window == Window::Up { Prologue::None } else { Prologue::NormSilu };
            let slabs = if paired { 5 } else { 3 };
            let layout = ConvLayout {
                cin,
                cout,
                window,
                prologue,
                slabs,
                shortcut,
                biases: 1,
                norm,
                pairs: paired.then_some(PAIR_SLABS),
                first_frame_slab: None,
            };
            let input = FrameShape::new(height, width, cin);
            let output = window.output(input, cout);
            let products = products_per_pixel(&layout, precision);
            let (time, peak) = measure(&cpu, layout, input, instructions);
            let terms = if paired { 2 } else { 3 };
            let terms = output.pixels() * FRAMES * (terms * products + shortcut.unwrap_or(0) * cout);
            let terms = terms as f64;
            println!(
                "{name}: {:.2} ms a frame, {:.1} G products/s of {:.1}: {:.0} %",
                time / FRAMES as f64 * 1e3,
                terms / time * 1e-9,
                peak * 1e-9,
                100.0 * terms / time / peak
            );
        }
    }
}

/// Seconds for [`FRAMES`] frames of three terms each, and the processor's own rate: the best of rounds in turns.
fn measure(cpu: &Cpu, layout: ConvLayout, input: FrameShape, instructions: Instructions) -> (f64, f64) {
    let output = layout.window.output(input, layout.cout);
    let mut random = Lcg(1);
    let mut arena = GuardedFrames::new(cpu);
    let pixels: Vec<f32> = random.fill((input.elements() + 2 * layout.norm.groups()) as usize);
    let inputs: Vec<DeviceOffset> =
        (0..FRAMES + 2).map(|_| arena.frame(input, layout.norm.groups(), &pixels)).collect();
    let shortcut = layout.shortcut.map(|channels| {
        let shape = output.with_channels(channels);
        arena.frame(shape, 0, &random.fill(shape.elements() as usize))
    });
    let frames: Vec<ConvFrame<Offsets>> = (0..FRAMES as usize)
        .map(|frame| {
            let slabs = if layout.pairs.is_some() { [[2, 0, 1], [0, 1, 3]][frame % 2] } else { [0, 1, 2] };
            let terms = (0..3).map(|i| Term { frame: inputs[frame + i], slab: slabs[i] });
            let shortcut = shortcut.map(|frame| Term { frame, slab: layout.slabs as u8 });
            let out = DeviceOffset(arena.reserve(cpu.frame_bytes(output, layout.norm.groups())));
            ConvFrame { terms: terms.chain(shortcut).collect(), bias: 0, residual: None, out }
        })
        .collect();
    let scratch = arena.reserve(cpu.conv_scratch(&layout, input, FRAMES));
    let mut memory = arena.build();
    let weights =
        [crate::testing::prepare(cpu, (&(), 0), &layout, &mut PlainWeights::new(&layout, cpu.precision, &mut random))
            .unwrap()];
    let op = conv_op(layout, input, &frames, layout.norm != Norm::Pixel);
    (0..ROUNDS).fold((f64::INFINITY, 0.0), |(time, rate), _| {
        let one = least(1, || run_op(cpu, &mut memory, op.clone(), &weights, scratch, &mut || false).unwrap());
        (one.min(time), peak(instructions).max(rate))
    })
}
