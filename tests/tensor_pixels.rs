//! Input and output tensors: element types, strides, ranges, padding and cropping, scaling, sampling.

mod common;

use common::{Buffer, Random, Vae, run_info, small};
use half::{bf16, f16};
use video_vae::capi::*;

const VIDEO: [i64; 5] = [1, 3, 5, 24, 16];
const LATENT: [i64; 5] = [1, 16, 2, 3, 2];

fn noise(shape: [i64; 5]) -> Buffer {
    let mut random = Random(21);
    let mut buffer = Buffer::new(VVAE_DTYPE_F32, shape);
    buffer.f32_mut().iter_mut().for_each(|v| *v = random.below(256) as f32 * (2.0 / 255.0) - 1.0);
    buffer
}

fn encode(vae: &Vae, video: &Buffer) -> Vec<f32> {
    let [b, _, t, h, w] = video.shape;
    let mut latent = Buffer::new(VVAE_DTYPE_F32, [b, 16, (t + 2) / 4 + 1, (h + 7) / 8, (w + 7) / 8]);
    vae.encode(video, &mut latent).unwrap();
    latent.f32().to_vec()
}

fn decode(vae: &Vae, latent: &Buffer, mut into: Buffer) -> Buffer {
    vae.decode(latent, &mut into).unwrap();
    into
}

/// The element at an index of B, C, T, H, W, by the strides.
fn element(buffer: &Buffer, index: [i64; 5]) -> f64 {
    let [_, c, t, h, w] = buffer.shape;
    let strides = buffer.strides.unwrap_or([c * t * h * w, t * h * w, h * w, w, 1]);
    let at = index.iter().zip(strides).map(|(i, s)| i * s).sum::<i64>() as usize;
    let bytes = buffer.bytes();
    let word = |n: usize| &bytes[at * n..at * n + n];
    match buffer.dtype {
        VVAE_DTYPE_U8 => f64::from(bytes[at]),
        VVAE_DTYPE_U16 => f64::from(u16::from_le_bytes(word(2).try_into().unwrap())),
        VVAE_DTYPE_F16 => f64::from(f16::from_le_bytes(word(2).try_into().unwrap())),
        VVAE_DTYPE_BF16 => f64::from(bf16::from_le_bytes(word(2).try_into().unwrap())),
        _ => f64::from(f32::from_le_bytes(word(4).try_into().unwrap())),
    }
}

fn indices(shape: [i64; 5]) -> impl Iterator<Item = [i64; 5]> {
    let total: i64 = shape.iter().product();
    (0..total).map(move |mut n| {
        let mut index = [0; 5];
        for axis in (0..5).rev() {
            index[axis] = n % shape[axis];
            n /= shape[axis];
        }
        index
    })
}

fn set(buffer: &mut Buffer, index: [i64; 5], value: f32) {
    let [_, c, t, h, w] = buffer.shape;
    let strides = buffer.strides.unwrap_or([c * t * h * w, t * h * w, h * w, w, 1]);
    let at = index.iter().zip(strides).map(|(i, s)| i * s).sum::<i64>() as usize;
    let dtype = buffer.dtype;
    let bytes = buffer.bytes_mut();
    match dtype {
        VVAE_DTYPE_U8 => bytes[at] = value as u8,
        VVAE_DTYPE_U16 => bytes[2 * at..][..2].copy_from_slice(&(value as u16).to_le_bytes()),
        VVAE_DTYPE_F16 => bytes[2 * at..][..2].copy_from_slice(&f16::from_f32(value).to_le_bytes()),
        VVAE_DTYPE_BF16 => bytes[2 * at..][..2].copy_from_slice(&bf16::from_f32(value).to_le_bytes()),
        _ => bytes[4 * at..][..4].copy_from_slice(&value.to_le_bytes()),
    }
}

#[test]
fn element_types_and_layouts_give_the_same_latent() {
    let vae = Vae::open(&small()).unwrap();
    let plain = noise(VIDEO);
    let expected = encode(&vae, &plain);
    let close = |found: &[f32]| {
        let most = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(most < 2e-5, "{most}");
    };
    // Values of `plain` are k / 127.5 - 1: exact in u8 and u16, rounded in floats.
    for (dtype, range, scale, shift) in [
        (VVAE_DTYPE_U8, "-1..1", 127.5, 127.5),
        (VVAE_DTYPE_U16, "-1..1", 32767.5, 32767.5),
        (VVAE_DTYPE_F32, "-1..1", 1.0, 0.0),
        (VVAE_DTYPE_F32, "0..1", 0.5, 0.5),
    ] {
        vae.configure("pixel_range", range).unwrap();
        for mut buffer in [Buffer::new(dtype, VIDEO), Buffer::interleaved(dtype, VIDEO)] {
            let integers = dtype == VVAE_DTYPE_U8 || dtype == VVAE_DTYPE_U16;
            for index in indices(VIDEO) {
                let value = element(&plain, index) as f32 * scale + shift;
                set(&mut buffer, index, if integers { value.round() } else { value });
            }
            close(&encode(&vae, &buffer));
        }
    }
}

#[test]
fn half_precision_video_is_widened_exactly() {
    let vae = Vae::open(&small()).unwrap();
    for dtype in [VVAE_DTYPE_F16, VVAE_DTYPE_BF16] {
        let mut narrow = Buffer::interleaved(dtype, VIDEO);
        let (plain, mut wide) = (noise(VIDEO), Buffer::new(VVAE_DTYPE_F32, VIDEO));
        for index in indices(VIDEO) {
            set(&mut narrow, index, element(&plain, index) as f32);
            let rounded = element(&narrow, index) as f32;
            set(&mut wide, index, rounded);
        }
        assert_eq!(encode(&vae, &narrow), encode(&vae, &wide));
    }
}

#[test]
fn negative_row_strides_flip_the_image() {
    let vae = Vae::open(&small()).unwrap();
    let latent = noise(LATENT);
    let upright = decode(&vae, &latent, Buffer::new(VVAE_DTYPE_F32, VIDEO));
    let flipped = Buffer::new(VVAE_DTYPE_F32, VIDEO);
    let [_, c, t, h, w] = VIDEO;
    let strides = [c * t * h * w, t * h * w, h * w, -w, 1];
    let tensor = vvae_tensor { strides: strides.as_ptr(), byte_offset: ((h - 1) * w * 4) as u64, ..flipped.tensor() };
    // SAFETY: with the offset, the last row of each plane comes first.
    let status = unsafe { (common::api().vvae_decode)(vae.0, &latent.tensor(), &tensor, &run_info()) };
    common::outcome(vae.0, status).unwrap();
    for [b, c, t, y, x] in indices(VIDEO) {
        assert_eq!(element(&flipped, [b, c, t, h - 1 - y, x]), element(&upright, [b, c, t, y, x]));
    }
}

#[test]
fn integer_output_is_rounded_and_clamped() {
    let vae = Vae::open(&small()).unwrap();
    let mut latent = noise(LATENT);
    // Large latents, so that some pixels exceed the range.
    latent.f32_mut().iter_mut().for_each(|v| *v *= 4.0);
    let exact = decode(&vae, &latent, Buffer::new(VVAE_DTYPE_F32, VIDEO));
    let outside = exact.f32().iter().filter(|v| v.abs() > 1.0).count();
    assert!(outside > 10, "the test needs pixels out of range, has {outside}");
    for (dtype, full) in [(VVAE_DTYPE_U8, 255.0), (VVAE_DTYPE_U16, 65535.0)] {
        let found = decode(&vae, &latent, Buffer::interleaved(dtype, VIDEO));
        for index in indices(VIDEO) {
            let expected = ((element(&exact, index) + 1.0) * full / 2.0).clamp(0.0, full);
            let error = (element(&found, index) - expected).abs();
            assert!(error <= 0.5 + full * 1e-6, "{expected} became {}", element(&found, index));
        }
    }
    for (dtype, epsilon) in [(VVAE_DTYPE_F16, 1.0 / 2048.0), (VVAE_DTYPE_BF16, 1.0 / 256.0)] {
        let found = decode(&vae, &latent, Buffer::new(dtype, VIDEO));
        for index in indices(VIDEO) {
            let expected = element(&exact, index);
            assert!((element(&found, index) - expected).abs() <= expected.abs() * epsilon + 1e-7);
        }
    }
    vae.configure("pixel_range", "0..1").unwrap();
    let unit = decode(&vae, &latent, Buffer::new(VVAE_DTYPE_F32, VIDEO));
    for index in indices(VIDEO) {
        assert!((element(&unit, index) - (element(&exact, index) + 1.0) / 2.0).abs() < 1e-6);
    }
}

/// The video with its last frame, row and column repeated.
fn padded(video: &Buffer, shape: [i64; 5]) -> Buffer {
    let mut out = Buffer::new(VVAE_DTYPE_F32, shape);
    for index in indices(shape) {
        let from: [i64; 5] = std::array::from_fn(|axis| index[axis].min(video.shape[axis] - 1));
        let value = element(video, from) as f32;
        set(&mut out, index, value);
    }
    out
}

#[test]
fn odd_sizes_are_padded_with_the_edge_and_cropped() {
    let vae = Vae::open(&small()).unwrap();
    for odd in [[1, 3, 4, 17, 9], [2, 3, 2, 8, 15], [1, 3, 7, 1, 1], [1, 3, 1, 23, 24]] {
        let [b, _, t, h, w] = odd;
        let (latents, rows, columns) = ((t + 2) / 4 + 1, (h + 7) / 8, (w + 7) / 8);
        let whole = [b, 3, 4 * latents - 3, rows * 8, columns * 8];
        let video = noise(odd);
        assert_eq!(encode(&vae, &video), encode(&vae, &padded(&video, whole)), "{odd:?}");

        let latent = noise([b, 16, latents, rows, columns]);
        let full = decode(&vae, &latent, Buffer::new(VVAE_DTYPE_F32, whole));
        let cropped = decode(&vae, &latent, Buffer::new(VVAE_DTYPE_F32, odd));
        for index in indices(odd) {
            assert_eq!(element(&cropped, index), element(&full, index), "{odd:?}");
        }
    }
}

#[test]
fn scaling_factor_multiplies_encoded_and_divides_decoded_latents() {
    let vae = Vae::open(&small()).unwrap();
    let (video, latent) = (noise(VIDEO), noise(LATENT));
    let (plain, pixels) = (encode(&vae, &video), decode(&vae, &latent, Buffer::new(VVAE_DTYPE_F32, VIDEO)));
    vae.configure("scaling_factor", "0.9152").unwrap();
    for (scaled, plain) in encode(&vae, &video).iter().zip(&plain) {
        assert!((scaled - plain * 0.9152).abs() <= plain.abs() * 1e-6);
    }
    let mut scaled = latent.clone();
    scaled.f32_mut().iter_mut().for_each(|v| *v *= 0.9152);
    let again = decode(&vae, &scaled, Buffer::new(VVAE_DTYPE_F32, VIDEO));
    for (again, plain) in again.f32().iter().zip(pixels.f32()) {
        assert!((again - plain).abs() < 1e-4, "{again} {plain}");
    }
}

#[test]
fn samples_follow_the_posterior_and_their_seed() {
    let vae = Vae::open(&small()).unwrap();
    let video = noise([1, 3, 9, 80, 80]);
    let shape = [1, 16, 3, 10, 10];
    let (mut mean, logvar) = (Buffer::new(VVAE_DTYPE_F32, shape), Buffer::new(VVAE_DTYPE_F32, shape));
    let second = logvar.tensor();
    vae.encode_with(&video, &mut mean, &vvae_run_info { logvar: &second, ..run_info() }).unwrap();
    vae.configure("posterior", "sample").unwrap();
    let sample = encode(&vae, &video);
    assert_eq!(encode(&vae, &video), sample, "one seed, one sample");
    vae.configure("slice_frames", "1").unwrap();
    assert_eq!(encode(&vae, &video), sample, "in slices too");
    vae.configure("seed", "43").unwrap();
    assert_ne!(encode(&vae, &video), sample);

    let deviations = sample.iter().zip(mean.f32()).zip(logvar.f32());
    let noise: Vec<f64> = deviations.map(|((s, m), l)| f64::from(s - m) / (0.5 * f64::from(*l)).exp()).collect();
    let count = noise.len() as f64;
    let average = noise.iter().sum::<f64>() / count;
    let variance = noise.iter().map(|n| (n - average).powi(2)).sum::<f64>() / count;
    let fourth = noise.iter().map(|n| (n - average).powi(4)).sum::<f64>() / count / variance.powi(2);
    assert!(average.abs() < 4.0 / count.sqrt(), "mean {average}");
    assert!((variance - 1.0).abs() < 0.1, "variance {variance}");
    assert!((fourth - 3.0).abs() < 0.5, "kurtosis {fourth}");
}
