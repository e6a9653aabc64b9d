//! Results that must not depend on device or run, cancellation, and checkpoints without kernels.

use std::ffi::{c_char, c_void};
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::time::{Duration, Instant};

use crate::common::safetensors::{Folder, to_bytes};
use crate::common::weights::{Sizes, random_weights};
use crate::common::{Buffer, Random, Vae, run_info, small};
use crate::driver::Gpu;
use crate::{latent, open, video};
use video_vae::capi::*;

const VIDEO: [i64; 5] = [2, 3, 9, 40, 48];
const LATENT: [i64; 5] = [2, 16, 3, 5, 6];

fn pixels() -> Buffer {
    Buffer::random(&mut Random(4), VIDEO)
}

/// The noise of a sample, and the deviation that scales it.
fn noise(vae: &Vae) -> (Vec<f32>, Vec<f32>) {
    let [mut mean, mut sample, logvar] = [0; 3].map(|_| Buffer::new(VVAE_DTYPE_F32, LATENT));
    let beside = logvar.tensor();
    vae.encode_with(&pixels(), &mut mean, &vvae_run_info { logvar: &beside, ..run_info() }).unwrap();
    vae.configure("posterior", "sample").unwrap();
    vae.configure("seed", "12345678901").unwrap();
    vae.encode(&pixels(), &mut sample).unwrap();
    let deviation: Vec<f32> = logvar.f32().iter().map(|v| (0.5 * v).exp()).collect();
    let difference = sample.f32().iter().zip(mean.f32()).zip(&deviation).map(|((s, m), d)| (s - m) / d);
    (difference.collect(), deviation)
}

#[test]
fn seed_gives_the_same_noise_on_every_device() {
    let Some(_gpu) = Gpu::open() else { return };
    let (on_gpu, deviation) = noise(&open(&small()));
    let (on_cpu, _) = noise(&Vae::open_on(c"cpu", &small()).unwrap());
    // With a small deviation, rounding dominates the difference.
    let significant = deviation.iter().zip(on_gpu.iter().zip(&on_cpu)).filter(|(d, _)| **d > 0.05);
    let (mut count, mut worst, mut square) = (0, 0f32, 0f32);
    for (_, (gpu, cpu)) in significant {
        count += 1;
        worst = worst.max((gpu - cpu).abs());
        square += gpu * gpu;
    }
    println!("{count} of {} values, {worst:.1e} apart at most", deviation.len());
    assert!(count * 2 > deviation.len() && worst < 1e-3, "{count} values, {worst:.1e} apart");
    let variance = square / count as f32;
    assert!((0.8..1.2).contains(&variance), "it is noise: {variance}");
}

#[test]
fn runs_are_bit_identical() {
    let Some(_gpu) = Gpu::open() else { return };
    let latent = latent(4, 13, 11);
    let decode = |vae: &Vae| {
        let mut out = video(&latent, VVAE_DTYPE_F32);
        vae.decode(&latent, &mut out).unwrap();
        out.bytes().to_vec()
    };
    let vae = open(&small());
    let first = decode(&vae);
    for again in 0..5 {
        assert!(decode(&vae) == first, "repetition {again}");
    }
    vae.trim(VVAE_TRIM_WORKSPACE | VVAE_TRIM_WEIGHTS).unwrap();
    assert!(decode(&vae) == first, "after a trim");
    assert!(decode(&open(&small())) == first, "with another handle");
}

/// Counts progress calls where another thread can see them.
unsafe extern "C" fn count(user: *mut c_void, _: u64, _: u64, _: *const c_char) -> i32 {
    // SAFETY: the test passes a counter that outlives the run.
    unsafe { &*user.cast::<AtomicU32>() }.fetch_add(1, SeqCst);
    0
}

#[test]
fn run_is_cancelled_from_another_thread() {
    let Some(_gpu) = Gpu::open() else { return };
    let vae = open(&small());
    let short = latent(3, 8, 8);
    let mut expected = video(&short, VVAE_DTYPE_F32);
    vae.decode(&short, &mut expected).unwrap();
    let long = latent(97, 64, 64);
    let mut out = video(&long, VVAE_DTYPE_U8);
    let calls = AtomicU32::new(0);
    let info = vvae_run_info {
        progress: Some(count),
        progress_user: std::ptr::from_ref(&calls).cast_mut().cast(),
        ..run_info()
    };
    let took = std::thread::scope(|scope| {
        let canceller = scope.spawn(|| {
            let patience = Instant::now();
            while calls.load(SeqCst) < 40 && patience.elapsed() < Duration::from_secs(60) {
                std::thread::sleep(Duration::from_micros(200));
            }
            let now = Instant::now();
            vae.cancel().unwrap();
            now
        });
        vae.decode_with(&long, &mut out, &info).unwrap_err().says(VVAE_ERROR_CANCELLED, &["cancelled"]);
        let returned = Instant::now();
        returned.saturating_duration_since(canceller.join().unwrap())
    });
    println!("cancelled within {took:?} after {} steps", calls.load(SeqCst));
    assert!(took < Duration::from_secs(1), "{took:?}");
    let mut again = video(&short, VVAE_DTYPE_F32);
    vae.decode(&short, &mut again).unwrap();
    assert!(again.bytes() == expected.bytes());
}

#[test]
fn checkpoint_without_kernels_is_refused_at_create() {
    let Some(_gpu) = Gpu::open() else { return };
    let folder = Folder::new("no-kernel");
    for (channels, says) in [(vec![16, 36], "attention over 36 channels"), (vec![136, 16], "from 136 to 3 channels")] {
        let config = Sizes { channels, layers: 1, groups: 4, latent: 4, temporal_levels: 1 };
        let file = folder.file("odd.safetensors", &to_bytes(&random_weights(&config.model(), 1), config.groups));
        let refused = Vae::open_on(c"cuda:0", &file).err().expect("refused");
        refused.says(VVAE_ERROR_DEVICE, &[says, "\"cpu\""]);
        Vae::open_on(c"cpu", &file).unwrap();
    }
}
