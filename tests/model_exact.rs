//! Results match the authors' implementation, and for any sizes the oracle.

mod common;

use common::oracle::{Clip, evaluate};
use common::safetensors::{Folder, Tensor, read, to_bytes};
use common::weights::{Sizes, random_weights};
use common::{Buffer, Random, Vae, golden, on_every_device, run_info};
use video_vae::capi::*;

/// The CPU computes in f32 unless `settings` has bf16. A GPU rounds activations to f16 after every layer, unless
/// `settings` has another precision.
fn most_error(device: &str, settings: &[(&str, &str)]) -> f64 {
    let precision = settings.iter().find(|(key, _)| *key == "precision").map(|(_, value)| *value);
    match precision {
        // bf16 has three bits less than f16.
        Some("bf16") => 8.0 * 3e-3,
        _ if device == "cpu" => 1e-5,
        _ if settings.contains(&("cache", "u8")) => 2.0 * 3e-3,
        Some("fp32") => 5e-5,
        _ => 3e-3,
    }
}

/// Root mean square of the error, relative to that of the expected values.
fn relative_error(found: &[f32], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let squares = |sum: f64, value: f64| sum + value * value;
    let difference = found.iter().zip(expected).map(|(f, r)| f64::from(*f) - r).fold(0.0, squares);
    (difference / expected.iter().copied().fold(0.0, squares)).sqrt()
}

#[track_caller]
fn assert_close(most: f64, what: &str, found: &[f32], expected: &[f64]) {
    let error = relative_error(found, expected);
    println!("{what}: {error:.2e}");
    assert!(error <= most, "{what}: relative error {error:.2e}, expected at most {most:.0e}");
}

fn buffer(tensor: &Tensor) -> Buffer {
    let mut shape: Vec<i64> = tensor.shape.iter().map(|d| *d as i64).collect();
    if shape.len() == 4 {
        // An image is a clip of one frame.
        shape.insert(2, 1);
    }
    Buffer::from_f32(shape.try_into().unwrap(), &tensor.values)
}

fn check_golden(device: &str, weights: &str, case: &str, settings: &[(&str, &str)]) {
    let tensors = read(&golden(&format!("{case}.safetensors")));
    let vae = Vae::open(&golden(&format!("{weights}.safetensors"))).unwrap();
    for (key, value) in settings {
        vae.configure(key, value).unwrap();
    }
    let expected = |name: &str| tensors[name].values.iter().map(|v| f64::from(*v)).collect::<Vec<f64>>();
    let like = |name: &str| Buffer::poisoned(buffer(&tensors[name]).shape);
    let (most, what) = (most_error(device, settings), format!("{case} {settings:?} on {device}"));

    let (mut mean, logvar) = (like("encode_mean"), like("encode_logvar"));
    let second = logvar.tensor();
    let run = vvae_run_info { logvar: &second, ..run_info() };
    vae.encode_with(&buffer(&tensors["encode_video"]), &mut mean, &run).unwrap();
    assert_close(most, &format!("{what}, mean"), mean.f32(), &expected("encode_mean"));
    assert_close(most, &format!("{what}, logvar"), logvar.f32(), &expected("encode_logvar"));

    let mut video = like("decode_video");
    vae.decode(&buffer(&tensors["decode_latent"]), &mut video).unwrap();
    // diffusers clamps the video of this family.
    let clamps = weights == "families/qwen21";
    let video: Vec<f32> = video.f32().iter().map(|v| if clamps { v.clamp(-1.0, 1.0) } else { *v }).collect();
    assert_close(most, &format!("{what}, video"), &video, &expected("decode_video"));
}

/// Latents as the diffusion model reads them, and back.
#[test]
fn goldens_match_in_the_latents_of_the_diffusion_model() {
    on_every_device(|device| {
        for (model, case, format) in [
            ("sdxl", "a", "sdxl"),
            ("sdxl", "batch2", "sdxl"),
            ("flux", "a", "flux"),
            ("flux2", "a", "auto"),
            ("wan21", "clip9", "auto"),
            ("wan22", "clip9", "auto"),
            ("qwen21", "a", "auto"),
        ] {
            let tensors = read(&golden(&format!("families/{model}-{case}.safetensors")));
            let vae = Vae::open(&golden(&format!("families/{model}.safetensors"))).unwrap();
            vae.configure("latent_format", format).unwrap();
            let (most, what) = (most_error(device, &[]), format!("{model}-{case} on {device}"));
            let expected = |name: &str| tensors[name].values.iter().map(|v| f64::from(*v)).collect::<Vec<f64>>();
            let like = |name: &str| Buffer::poisoned(buffer(&tensors[name]).shape);
            let [mut raw, mut video] = [like("encode_mean"), like("encode_video")];
            vae.encode(&buffer(&tensors["encode_video"]), &mut raw).unwrap();
            vae.decode(&raw, &mut video).unwrap();
            vae.configure("latents", "model").unwrap();
            let (mut latent, logvar) = (like("encode_model_latent"), like("encode_model_latent"));
            let planned = vae.plan("encode", buffer(&tensors["encode_video"]).shape).unwrap().0;
            assert_eq!(planned.output_shape, latent.shape, "{what}");
            let second = logvar.tensor();
            let run = vvae_run_info { logvar: &second, ..run_info() };
            vae.encode_with(&buffer(&tensors["encode_video"]), &mut latent, &run).unwrap();
            assert_close(most, &format!("{what}, latent"), latent.f32(), &expected("encode_model_latent"));
            // Packing moves log-variances and changes none.
            let sum = |values: &[f32]| values.iter().map(|value| f64::from(*value)).sum::<f64>();
            let logvars = expected("encode_logvar").iter().sum::<f64>();
            assert!((sum(logvar.f32()) / logvars - 1.0).abs() < 1e-2, "{what}, log-variance");
            let mut again = like("encode_video");
            vae.decode(&latent, &mut again).unwrap();
            let video: Vec<f64> = video.f32().iter().map(|value| f64::from(*value)).collect();
            assert_close(most, &format!("{what}, video"), again.f32(), &video);
        }
    });
}

const CASES: [(&str, &str); 16] = [
    ("small", "small-image"),
    ("small", "small-clip5"),
    ("small", "small-clip17"),
    ("small", "small-batch2"),
    ("medium", "medium-image"),
    ("medium", "medium-clip9"),
    ("families/sdxl", "families/sdxl-a"),
    ("families/sdxl", "families/sdxl-batch2"),
    ("families/flux", "families/flux-a"),
    ("families/flux2", "families/flux2-a"),
    ("families/wan21", "families/wan21-image"),
    ("families/wan21", "families/wan21-clip9"),
    ("families/wan21", "families/wan21-clip17"),
    ("families/wan22", "families/wan22-image"),
    ("families/wan22", "families/wan22-clip9"),
    ("families/qwen21", "families/qwen21-a"),
];

/// Their caches are exact.
const OF_PIXEL_NORMS: [&str; 3] = ["families/wan21", "families/wan22", "families/qwen21"];

#[test]
fn goldens_match_the_authors_implementation() {
    on_every_device(|device| {
        for (weights, case) in CASES {
            check_golden(device, weights, case, &[]);
        }
    });
}

/// The settings of the golden "small-tiled".
fn tiles() -> Vec<(String, &'static str)> {
    let tiles = |node: &str| {
        [("tiled", "true"), ("tile_size", "64"), ("tile_overlap", "16")]
            .map(|(key, value)| (format!("{node}_{key}"), value))
    };
    [tiles("encode"), tiles("decode")].concat()
}

#[test]
fn goldens_match_with_tiles() {
    let tiles = tiles();
    let settings: Vec<(&str, &str)> = tiles.iter().map(|(key, value)| (key.as_str(), *value)).collect();
    on_every_device(|device| check_golden(device, "small", "small-tiled", &settings));
}

#[test]
fn goldens_match_in_every_precision_of_the_device() {
    let tiles = tiles();
    on_every_device(|device| {
        let precisions = if device == "cpu" { &["bf16", "fp32"][..] } else { &["fp16", "bf16", "fp32"] };
        for precision in precisions {
            let setting = ("precision", *precision);
            for (weights, case) in CASES {
                check_golden(device, weights, case, &[setting]);
            }
            let settings = tiles.iter().map(|(key, value)| (key.as_str(), *value)).chain([setting]);
            check_golden(device, "small", "small-tiled", &settings.collect::<Vec<_>>());
        }
    });
}

/// The loss is small, and a still image has none.
#[test]
fn goldens_match_with_caches_in_8_bits() {
    on_every_device(|device| {
        let vae = Vae::open(&golden("small.safetensors")).unwrap();
        if device == "cpu" {
            let refused = vae.configure("cache", "u8").unwrap_err();
            return refused.says(VVAE_ERROR_ARGUMENT, &["cache", "needs a GPU", "exact"]);
        }
        let wan = Vae::open(&golden("families/wan21.safetensors")).unwrap();
        let refused = wan.configure("cache", "u8").unwrap_err();
        refused.says(VVAE_ERROR_ARGUMENT, &["cache: u8", "norms", "exact"]);
        for (weights, case) in CASES.into_iter().filter(|(weights, _)| !OF_PIXEL_NORMS.contains(weights)) {
            check_golden(device, weights, case, &[("cache", "u8")]);
        }
        for (frames, same) in [(1, true), (5, false)] {
            let latent = Buffer::random(&mut Random(5), [1, 16, frames, 4, 6]);
            let [exact, rounded] = ["exact", "u8"].map(|cache| {
                vae.configure("cache", cache).unwrap();
                let (plan, text) = vae.plan("decode", latent.shape).unwrap();
                assert_eq!(text.contains("8 bits"), plan.exact == 0, "{text}");
                let mut video = Buffer::poisoned([1, 3, 4 * frames - 3, 32, 48]);
                vae.decode(&latent, &mut video).unwrap();
                (plan.exact, video.bytes().to_vec())
            });
            assert_eq!((exact == rounded, rounded.0), (same, u32::from(same)), "{frames} frames");
        }
    });
}

/// A handle that changes its precision uses weights of the new one. Other handles keep theirs.
#[test]
fn precisions_do_not_mix() {
    on_every_device(|device| {
        let tensors = read(&golden("small-image.safetensors"));
        let decode = |vae: &Vae| {
            let mut video = Buffer::poisoned(buffer(&tensors["decode_video"]).shape);
            vae.decode(&buffer(&tensors["decode_latent"]), &mut video).unwrap();
            video.f32().to_vec()
        };
        let [vae, other] = [(); 2].map(|()| Vae::open(&golden("small.safetensors")).unwrap());
        let auto = decode(&other);
        let default = if device == "cpu" { "fp32" } else { "fp16" };
        for precision in ["bf16", "fp32", "auto"] {
            vae.configure("precision", precision).unwrap();
            assert_eq!(decode(&vae) == auto, ["auto", default].contains(&precision), "{precision}");
            assert!(decode(&other) == auto, "the other handle, after {precision}");
        }
    });
}

#[test]
fn goldens_match_with_every_instruction_set_of_this_processor() {
    for (precision, sets) in
        [("fp32", &["avx512", "avx2", "portable"][..]), ("bf16", &["amx", "avx512bf16", "avx512", "avx2", "portable"])]
    {
        for set in sets {
            let vae = Vae::open(&golden("small.safetensors")).unwrap();
            vae.configure("precision", precision).unwrap();
            match vae.configure("instruction_set", set) {
                Ok(_) => {
                    for (weights, case) in CASES {
                        check_golden("cpu", weights, case, &[("precision", precision), ("instruction_set", set)]);
                    }
                }
                Err(lacks) => println!("skipped {set}: {}", lacks.text),
            }
        }
    }
}

fn random_clip(dims: [usize; 4], random: &mut Random) -> Clip {
    let mut clip = Clip::new(dims);
    // Values that are exact in f32, so that both sides have the same input.
    clip.values.iter_mut().for_each(|value| *value = random.below(1 << 20) as f64 / (1 << 19) as f64 - 1.0);
    clip
}

fn to_buffer(clip: &Clip) -> Buffer {
    let [c, t, h, w] = clip.dims.map(|d| d as i64);
    Buffer::from_f32([1, c, t, h, w], &clip.values.iter().map(|v| *v as f32).collect::<Vec<f32>>())
}

#[test]
fn configurations_match_the_oracle() {
    let configs = [
        (vec![8, 16, 16, 16], 2, 8, 16, 2),
        (vec![6, 12, 18, 24], 1, 3, 4, 2),
        (vec![10, 5, 15, 20], 3, 5, 7, 2),
        (vec![4, 4, 4, 4], 1, 1, 1, 3),
        (vec![4, 8, 4, 8], 1, 4, 2, 0),
        (vec![16, 48, 33], 1, 1, 5, 1),
        (vec![20, 17], 2, 1, 3, 1),
        (vec![9], 1, 3, 2, 0),
    ];
    let (folder, most) = (Folder::new("configurations"), most_error("cpu", &[]));
    for (number, (channels, layers, groups, latent, temporal_levels)) in configs.into_iter().enumerate() {
        let sizes = Sizes { channels, layers, groups, latent: latent as u64, temporal_levels };
        let model = sizes.model();
        let tensors = random_weights(&model, number as u64);
        let path = folder.file(&format!("{number}.safetensors"), &to_bytes(&tensors, groups));
        let vae = Vae::open(&path).unwrap();
        let (scale, mut random) = (model.geometry.space as usize, Random(7 + number as u64));
        for (latents, rows, columns) in [(1, 2, 3), (3, 1, 1), (4, 2, 1)] {
            let what = format!("{:?} {latents} latents", sizes.channels);
            let frames = ((latents - 1) << temporal_levels) + 1;

            let clip = random_clip([latent, latents, rows, columns], &mut random);
            let expected = evaluate(&model.decoder, &tensors, clip.clone());
            let mut video = Buffer::poisoned([1, 3, frames as i64, (rows * scale) as i64, (columns * scale) as i64]);
            vae.decode(&to_buffer(&clip), &mut video).unwrap();
            assert_close(most, &format!("{what} video"), video.f32(), &expected.values);

            let clip = random_clip([3, frames, rows * scale, columns * scale], &mut random);
            let expected = evaluate(&model.encoder, &tensors, clip.clone());
            let mut mean = Buffer::poisoned([1, latent as i64, latents as i64, rows as i64, columns as i64]);
            let logvar = mean.clone();
            let second = logvar.tensor();
            vae.encode_with(&to_buffer(&clip), &mut mean, &vvae_run_info { logvar: &second, ..run_info() }).unwrap();
            let (expected_mean, expected_logvar) = expected.values.split_at(expected.values.len() / 2);
            assert_close(most, &format!("{what} mean"), mean.f32(), expected_mean);
            assert_close(most, &format!("{what} logvar"), logvar.f32(), expected_logvar);
        }
    }
}
