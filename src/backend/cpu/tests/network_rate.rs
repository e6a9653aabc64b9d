//! The whole network in bf16 beside the rate of AMX, in one run. For `docs/measurements.md`, with a checkpoint of the
//! real size such as `vvae bench --random` makes:
//! `VVAE_RATES_WEIGHTS=... cargo test --release --lib network_rate -- --ignored --nocapture`

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use super::rates::{PRODUCTS_OF_FOUR_TILES, ROUNDS, multiply_tiles, peak, processor_time};
use super::*;
use crate::backend::cpu::conv::PRODUCTS;
use crate::backend::cpu::simd::{Amx, Bf16Kernels};
use crate::exec::{self, Allocators, Call, Control, DeviceName, Opening, Outputs};
use crate::ir::{DType, Shape, TensorDevice, View};
use crate::model::{Checkpoint, Direction};
use crate::node;

/// Products a second of the tile instructions on random numbers, for as long as a run takes. The processor lowers its
/// clock then. [`peak`] does not show that: it takes a moment, and multiplies zeros.
fn sustained() -> f64 {
    let numbers: Vec<half::bf16> = Lcg(3).fill(4 * 512).into_iter().map(half::bf16::from_f32).collect();
    let mut count = 0;
    let start = processor_time();
    let work = || {
        // SAFETY: the tiles are configured, and four of them are loaded from as much memory.
        unsafe {
            std::arch::asm!(
                "tileloadd tmm4, [{0} + {1}]",
                "tileloadd tmm5, [{0} + {1} + 1024]",
                "tileloadd tmm6, [{0} + {1} + 2048]",
                "tileloadd tmm7, [{0} + {1} + 3072]",
                in(reg) numbers.as_ptr(), in(reg) 64usize,
                options(nostack, readonly, preserves_flags)
            );
            while processor_time() - start < 1e8 {
                for _ in 0..1000 {
                    multiply_tiles();
                }
                count += 1000 * PRODUCTS_OF_FOUR_TILES;
            }
        }
    };
    // SAFETY: the processor has AMX, as the caller knows.
    unsafe { Amx::with_tiles(work) };
    count as f64 * 1e9 / (processor_time() - start)
}

/// Frames, height and width of videos.
const VIDEOS: [[u64; 3]; 2] = [[5, 128, 128], [1, 256, 256]];

/// The whole network in bf16 on AMX beside the rate of the tile products, which all threads measure together before and
/// after each run: at best, and sustained. `VVAE_RATES_WEIGHTS` names the checkpoint.
#[test]
#[ignore = "measures, and checks nothing"]
fn rate_of_the_whole_network() {
    let Ok(weights) = std::env::var("VVAE_RATES_WEIGHTS") else { return println!("VVAE_RATES_WEIGHTS is not set") };
    assert_eq!(Instructions::available(Precision::Bf16)[0], Instructions::Amx);
    let threads = std::thread::available_parallelism().unwrap().get();
    for ([frames, height, width], direction) in
        VIDEOS.into_iter().flat_map(|video| [(video, Direction::Decode), (video, Direction::Encode)])
    {
        let settings = exec::Settings { precision: Some(Precision::Bf16), ..node::defaults() };
        let device = [DeviceName::Place(TensorDevice::Cpu)];
        let (checkpoint, allocators) = (Checkpoint::open(weights.as_ref()).unwrap(), Allocators::default());
        let mut session = exec::open(&device, Opening { checkpoint: &checkpoint, allocators, settings }, &()).unwrap();
        let latent = Shape::new(1, 16, frames.div_ceil(4), height / 8, width / 8);
        let video = Shape::new(1, 3, frames, height, width);
        let (input, output) = if direction == Direction::Decode { (latent, video) } else { (video, latent) };
        let tensor = |s: Shape| Lcg(1).fill((s.channels * s.frames * s.height * s.width) as usize);
        let (mut from, mut into) = (tensor(input), tensor(output));
        let view = |name: &str, values: &mut Vec<f32>, shape| {
            View::checked(name, values.as_mut_ptr().cast(), DType::F32, TensorDevice::Cpu, shape, None, true).unwrap()
        };
        let (input, output) = (view("input", &mut from, input), view("output", &mut into, output));
        let call =
            Call { direction, range: None, input, into: Outputs { output, logvar: None, stream: None }, first_clip: 0 };
        let mut run = || {
            let (cancel, before, start) = (AtomicBool::new(false), PRODUCTS.load(Ordering::Relaxed), Instant::now());
            session.run(&call, &mut Control::new(&cancel)).unwrap();
            (start.elapsed().as_secs_f64(), (PRODUCTS.load(Ordering::Relaxed) - before) as f64)
        };
        let of_all = |rate: fn() -> f64| {
            std::thread::scope(|scope| {
                let all: Vec<_> = (0..threads).map(|_| scope.spawn(rate)).collect();
                all.into_iter().map(|thread| thread.join().unwrap()).sum::<f64>()
            })
        };
        let rates = || [of_all(|| peak(Instructions::Amx)), of_all(sustained)];
        let (_, products) = run();
        let (mut least, mut most) = (f64::INFINITY, rates());
        for _ in 0..2 * ROUNDS {
            least = least.min(run().0);
            let now = rates();
            most = [most[0].max(now[0]), most[1].max(now[1])];
        }
        let [at_best, at_length] = most.map(|rate| 100.0 * products / least / rate);
        println!(
            "{direction:?} {frames} x {height} x {width}: {:.1} G products in {least:.4} s. {at_best:.1} % of {:.0} G/s at \
             best, {at_length:.1} % of {:.0} sustained",
            products * 1e-9,
            most[0] * 1e-9,
            most[1] * 1e-9
        );
    }
}
