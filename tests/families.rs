//! Only `src/model/families` knows a family: no other source names its tensors or has its constants. A checkpoint says
//! which family it is, under every naming scheme.

mod common;

use std::ffi::c_char;
use std::path::{Path, PathBuf};

use common::safetensors::{Folder, Tensor, Tensors, read, to_bytes};
use common::weights::random_weights;
use common::{Buffer, Random, Vae, golden, on_every_device, root};
use std::collections::BTreeMap;
use video_vae::capi::{VVAE_ERROR_ARGUMENT, vvae_model_desc};
use video_vae::internals::model::families::{FAMILIES, wan, wan21};

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap().flatten() {
        let path = entry.path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// The product's part of a source: without unit tests, which may use any model.
fn product(path: &Path) -> Option<String> {
    let relative = path.strip_prefix(root()).unwrap().to_string_lossy().replace('\\', "/");
    let is_test = relative.contains("/tests") || relative.ends_with("testing.rs");
    let is_family = relative.starts_with("src/model/families/");
    let text = std::fs::read_to_string(path).unwrap();
    (!is_test && !is_family).then(|| text.split("#[cfg(test)]\nmod tests {").next().unwrap().to_owned())
}

/// Texts between quotation marks.
fn literals(source: &str) -> Vec<String> {
    let code = source.lines().filter(|line| !line.trim_start().starts_with("//"));
    code.flat_map(|line| line.split('"').skip(1).step_by(2).map(str::to_owned).collect::<Vec<_>>()).collect()
}

#[test]
fn no_source_outside_the_families_names_a_tensor() {
    // The parts of all names, without numbers: "down_blocks", "resnets", "conv_shortcut" and so on.
    let published =
        FAMILIES.iter().flat_map(|family| family.published.iter().flat_map(|published| (published.model)().tensors()));
    let tensors: Vec<String> = published.map(|tensor| tensor.name).collect();
    let parts: std::collections::BTreeSet<&str> = tensors.iter().flat_map(|name| name.split('.')).collect();
    // Words that are no names of a family alone: sides of a network, kinds of tensors, CUDA's own kernels, plain words.
    let general = [
        "encoder", "decoder", "weight", "bias", "gamma", "conv", "conv_in", "conv_out", "down", "up", "mid", "block",
        "norm", "head", "residual", "shortcut", "middle", "q", "k", "v",
    ];
    let named: Vec<&str> =
        parts.into_iter().filter(|part| part.parse::<u64>().is_err() && !general.contains(part)).collect();
    assert!(named.contains(&"upscale_conv") && named.contains(&"nin_shortcut"), "{named:?}");
    let mut files = Vec::new();
    sources(&root().join("src"), &mut files);
    assert!(files.len() > 100);
    for file in files {
        for literal in product(&file).iter().flat_map(|text| literals(text)) {
            let words: Vec<&str> = literal.split(['.', '{', '}', ' ', '/', '\\']).collect();
            let found = named.iter().find(|name| words.contains(name));
            assert!(found.is_none(), "{} names the tensor part {found:?} in {literal:?}", file.display());
            let sided = ["encoder.", "decoder."].iter().any(|side| literal.contains(side));
            assert!(!sided, "{} names a tensor in {literal:?}", file.display());
        }
    }
}

#[test]
fn no_source_outside_the_families_has_their_constants_or_names() {
    let mut files = Vec::new();
    sources(&root().join("src"), &mut files);
    for file in files {
        let Some(text) = product(&file) else { continue };
        for word in [
            "0.9152",
            "0.18215",
            "0.13025",
            "1.5305",
            "0.3611",
            "2.8184",
            "SeedVR2",
            "seedvr2",
            "kl2d",
            "wan21",
            "wan22",
            "qwen21",
            "0.2289",
            "3.8363",
            "norm_num_groups",
            "sdxl",
            "AutoencoderKL",
        ] {
            // The list of families is in their own folder.
            assert!(!text.contains(word), "{} has {word:?}", file.display());
        }
    }
}

/// What a checkpoint decodes a latent to.
fn decoded(path: &Path, channels: i64) -> Vec<u8> {
    let vae = Vae::open(path).unwrap_or_else(|why| panic!("{}: {why:?}", path.display()));
    let mut video = Buffer::poisoned([1, 3, 1, 32, 24]);
    vae.decode(&Buffer::random(&mut Random(3), [1, channels, 1, 4, 3]), &mut video).unwrap();
    video.bytes().to_vec()
}

fn renamed(tensors: &Tensors, name: impl Fn(&str) -> String) -> Tensors {
    tensors.iter().map(|(old, tensor)| (name(old), tensor.clone())).collect()
}

#[test]
fn every_naming_scheme_gives_the_same_bits() {
    for (model, channels) in [("sdxl", 4), ("flux", 16), ("flux2", 32)] {
        let folder = Folder::new(&format!("names-{model}"));
        let mut ldm = read(&golden(&format!("families/{model}.safetensors")));
        ldm.remove("bn.num_batches_tracked");
        let map = std::fs::read(golden(&format!("families/{model}.diffusers.json"))).unwrap();
        let map: BTreeMap<String, String> = serde_json::from_slice(&map).unwrap();
        let mut diffusers = renamed(&ldm, |name| map[name].clone());
        for (name, tensor) in &mut diffusers {
            if name.contains("attentions") && tensor.shape.len() == 4 {
                tensor.shape.truncate(2);
            }
        }
        let older = renamed(&diffusers, |name| {
            let name = name.replace("to_q", "query").replace("to_k", "key").replace("to_v", "value");
            name.replace("to_out.0", "proj_attn")
        });
        let mut whole = renamed(&ldm, |name| format!("first_stage_model.{name}"));
        whole.insert("model.diffusion_model.weight".into(), Tensor { shape: vec![2], values: vec![f32::NAN; 2] });
        let vae = renamed(&diffusers, |name| format!("vae.{name}"));
        let expected = decoded(&golden(&format!("families/{model}.safetensors")), channels);
        let schemes = [("ldm", ldm), ("diffusers", diffusers), ("older", older), ("whole", whole), ("vae", vae)];
        for (scheme, tensors) in schemes {
            let path = folder.file(&format!("{scheme}.safetensors"), &to_bytes(&tensors, 32));
            assert!(decoded(&path, channels) == expected, "{model} with the names of {scheme}");
        }
    }
}

/// The authors' names, and those of diffusers.
#[test]
fn both_naming_schemes_of_a_video_model_give_the_same_bits() {
    for (model, latent, video) in [
        ("wan21", [1, 16, 1, 4, 3], [1, 3, 1, 32, 24]),
        ("wan22", [1, 48, 2, 2, 3], [1, 3, 5, 32, 48]),
        ("qwen21", [1, 64, 1, 3, 2], [1, 4, 1, 48, 32]),
    ] {
        let folder = Folder::new(&format!("names-{model}"));
        let authors = golden(&format!("families/{model}.safetensors"));
        let map = std::fs::read(golden(&format!("families/{model}.diffusers.json"))).unwrap();
        let map: BTreeMap<String, String> = serde_json::from_slice(&map).unwrap();
        let diffusers = renamed(&read(&authors), |name| map[name].clone());
        let mut images = diffusers.clone();
        for tensor in images.values_mut().filter(|tensor| tensor.shape.len() == 5 && tensor.shape[2] == 1) {
            tensor.shape.remove(2);
        }
        let decoded = |path: &Path| {
            let vae = Vae::open(path).unwrap_or_else(|why| panic!("{}: {why:?}", path.display()));
            let mut into = Buffer::poisoned(video);
            vae.decode(&Buffer::random(&mut Random(3), latent), &mut into).unwrap();
            into.bytes().to_vec()
        };
        let expected = decoded(&authors);
        // Convolutions of images have four axes in some files, and five in others.
        let timeless = images.clone().into_iter().filter(|(name, _)| !name.contains("time_conv")).collect();
        let schemes = [("diffusers", diffusers), ("images", images), ("timeless", timeless)];
        for (scheme, tensors) in schemes.into_iter().take(if model == "qwen21" { 3 } else { 1 }) {
            let path = folder.file(&format!("{scheme}.safetensors"), &to_bytes(&tensors, 1));
            assert!(decoded(&path) == expected, "{model} with the names of {scheme}");
        }
    }
}

/// A damaged file is told what it lacks.
#[test]
fn near_misses_of_a_video_model_are_told_what_they_lack() {
    let folder = Folder::new("near-wan21");
    let tensors = read(&golden("families/wan21.safetensors"));
    let refused = |change: &dyn Fn(&mut Tensors)| {
        let mut changed = tensors.clone();
        change(&mut changed);
        Vae::open(&folder.file("near.safetensors", &to_bytes(&changed, 1))).err().unwrap().text
    };
    let lacks = |name: &'static str| refused(&|tensors| drop(tensors.remove(name)));
    for name in ["decoder.middle.1.to_qkv.bias", "encoder.downsamples.2.resample.1.weight", "conv2.weight"] {
        let text = lacks(name);
        assert!(text.contains(name) && text.contains("missing"), "{text}");
    }
    let text = lacks("encoder.downsamples.5.time_conv.weight");
    assert!(text.contains("frames a latent"), "{text}");
}

/// Narrow models, and those with an alpha channel on one side or on both.
#[test]
fn video_models_have_any_width_and_three_or_four_pixel_channels() {
    let folder = Folder::new("widths");
    let level = wan::level;
    for (number, (width, pixel_channels)) in [(6, [4, 4]), (10, [4, 3]), (24, [3, 4])].into_iter().enumerate() {
        let sizes = wan::Sizes {
            pixel_channels,
            latent_channels: 5,
            time_kernel: 3,
            encoder: vec![level(width, Some((width, true))), level(2 * width, None)],
            decoder: vec![level(2 * width, Some((width, true))), level(width, None)],
        };
        let weights = random_weights(&wan21::model(&sizes), number as u64);
        let vae = Vae::open(&folder.file(&format!("{number}.safetensors"), &to_bytes(&weights, 1))).unwrap();
        let mut random = Random(number as u64);
        let [from, to] = pixel_channels.map(|channels| channels as i64);
        let (mut latent, mut video) = (Buffer::poisoned([1, 5, 3, 2, 3]), Buffer::poisoned([1, to, 5, 4, 6]));
        vae.encode(&Buffer::random(&mut random, [1, from, 5, 4, 6]), &mut latent).unwrap();
        vae.decode(&latent, &mut video).unwrap();
        assert!(video.f32().iter().all(|value| value.is_finite()));
    }
}

/// Video without an alpha channel gets one that is opaque, and its three channels may be taken back.
#[test]
fn a_model_with_an_alpha_channel_takes_and_gives_video_without_one() {
    on_every_device(|_| {
        let vae = Vae::open(&golden("families/qwen21.safetensors")).unwrap();
        let opaque = |mut buffer: Buffer| {
            let pixels = buffer.f32().len() / 4;
            buffer.f32_mut()[3 * pixels..].fill(1.0);
            buffer
        };
        for range in ["-1..1", "0..1"] {
            vae.configure("pixel_range", range).unwrap();
            let with = opaque(Buffer::random(&mut Random(7), [1, 4, 1, 32, 48]));
            let rgb = 3 * 32 * 48;
            let without = Buffer::from_f32([1, 3, 1, 32, 48], &with.f32()[..rgb]);
            let [mut of_four, mut of_three] = [(); 2].map(|()| Buffer::poisoned([1, 64, 1, 2, 3]));
            vae.encode(&with, &mut of_four).unwrap();
            vae.encode(&without, &mut of_three).unwrap();
            assert!(of_four.bytes() == of_three.bytes(), "{range}");
            let (mut four, mut three) = (Buffer::poisoned([1, 4, 1, 32, 48]), Buffer::poisoned([1, 3, 1, 32, 48]));
            vae.decode(&of_four, &mut four).unwrap();
            vae.decode(&of_four, &mut three).unwrap();
            assert!(four.f32()[..rgb] == *three.f32(), "{range}");
        }
        let refused =
            vae.encode(&Buffer::poisoned([1, 2, 1, 32, 48]), &mut Buffer::poisoned([1, 64, 1, 2, 3])).unwrap_err();
        assert!(
            refused.text.contains("C is 2") && refused.text.contains("4 channels, or 3 without alpha"),
            "{refused:?}"
        );
    });
}

/// SD and SDXL have the same tensors. Nothing is guessed.
#[test]
fn latents_of_the_model_need_to_know_which_it_is() {
    let folder = Folder::new("formats");
    let tensors = read(&golden("families/sdxl.safetensors"));
    let path = folder.file("alone.safetensors", &to_bytes(&tensors, 32));
    let vae = Vae::open(&path).unwrap();
    let known = |vae: &Vae| {
        let desc = vae.model();
        (desc.latents_known, array(&desc.latent_format), desc.latent_scale)
    };
    assert_eq!(known(&vae), (0, String::new(), 1.0));
    let refused = vae.configure("latents", "model").unwrap_err();
    refused.says(VVAE_ERROR_ARGUMENT, &["latents", "latent_format", "sd, sdxl", "config.json"]);
    vae.configure("latent_format", "flux").unwrap();
    assert_eq!(known(&vae), (0, String::new(), 1.0));
    vae.configure("latents", "model").unwrap_err().says(VVAE_ERROR_ARGUMENT, &["latent_format: flux", "sd, sdxl"]);
    let encoded = |vae: &Vae| {
        let mut latent = Buffer::poisoned([1, 4, 1, 4, 3]);
        vae.encode(&Buffer::random(&mut Random(3), [1, 3, 1, 32, 24]), &mut latent).unwrap();
        latent.f32().to_vec()
    };
    let raw = encoded(&vae);
    let scaled = |scale: f32| raw.iter().map(|value| value * scale).collect::<Vec<f32>>();
    vae.configure("latent_format", "sdxl").unwrap();
    vae.configure("latents", "model").unwrap();
    assert_eq!(encoded(&vae), scaled(0.13025));
    assert_eq!(known(&vae), (1, "sdxl".into(), 0.13025));
    vae.configure("scaling_factor", "2").unwrap_err().says(VVAE_ERROR_ARGUMENT, &["scaling_factor", "latents"]);
    vae.configure("latent_format", "auto").unwrap_err().says(VVAE_ERROR_ARGUMENT, &["sd, sdxl"]);

    // A checkpoint of the whole model says which it is.
    let mut whole = renamed(&tensors, |name| format!("first_stage_model.{name}"));
    whole.insert("cond_stage_model.x".into(), Tensor { shape: vec![1], values: vec![0.0] });
    let whole = Vae::open(&folder.file("whole.safetensors", &to_bytes(&whole, 32))).unwrap();
    whole.configure("latents", "model").unwrap();
    assert_eq!(encoded(&whole), scaled(0.18215));

    // So does the configuration that diffusers writes.
    folder.file("config.json", br#"{"_class_name": "AutoencoderKL", "scaling_factor": 0.5, "shift_factor": null}"#);
    let vae = Vae::open(&path).unwrap();
    vae.configure("latents", "model").unwrap();
    assert_eq!(encoded(&vae), scaled(0.5));
    assert_eq!(known(&vae), (1, String::new(), 0.5));
}

/// A text in an array of a struct.
fn array(text: &[c_char]) -> String {
    text.iter().take_while(|c| **c != 0).map(|c| *c as u8 as char).collect()
}

/// The latents of a diffusion model, computed from raw ones by the numbers that the library gives.
fn by_numbers(desc: &vvae_model_desc, raw: &Buffer) -> Vec<f64> {
    let statistics = |values: *const f64| {
        if values.is_null() {
            return &[][..];
        }
        // SAFETY: so many numbers, valid while the handle is open.
        unsafe { std::slice::from_raw_parts(values, desc.statistics_count as usize) }
    };
    let (means, deviations) = (statistics(desc.latent_means), statistics(desc.latent_deviations));
    let scaled = |channel: usize, z: f64| match means.get(channel) {
        Some(mean) => (z - mean) / deviations[channel],
        None => (z - desc.latent_shift) * desc.latent_scale,
    };
    let [_, channels, frames, rows, columns] = raw.shape.map(|length| length as usize);
    let side = desc.packing as usize;
    let mut packed = Vec::new();
    for channel in 0..channels * side * side {
        let (from, row, column) = (channel / (side * side), channel / side % side, channel % side);
        for pixel in 0..frames * (rows / side) * (columns / side) {
            let (line, x) = (pixel / (columns / side), pixel % (columns / side));
            let at = (from * frames * rows + line * side + row) * columns + x * side + column;
            packed.push(scaled(channel, f64::from(raw.f32()[at])));
        }
    }
    packed
}

#[test]
fn what_the_library_says_of_latents_is_what_it_does_with_them() {
    for (model, format, family, known, formats, packed) in [
        ("small", "auto", "seedvr2", "seedvr2", "seedvr2", 16),
        ("families/sdxl", "sd", "kl2d", "sd", "sd,sdxl", 4),
        ("families/sdxl", "sdxl", "kl2d", "sdxl", "sd,sdxl", 4),
        ("families/flux", "flux", "kl2d", "flux", "sd3,flux", 16),
        ("families/flux2", "auto", "kl2d", "flux2", "flux2", 128),
        ("families/wan21", "auto", "wan21", "wan21", "wan21", 16),
        ("families/wan22", "auto", "wan22", "wan22", "wan22", 48),
        ("families/qwen21", "auto", "qwen21", "qwen21", "qwen21", 64),
    ] {
        let vae = Vae::open(&golden(&format!("{model}.safetensors"))).unwrap();
        vae.configure("latent_format", format).unwrap();
        let desc = vae.model();
        let told = (array(&desc.family), array(&desc.latent_format), array(&desc.latent_formats));
        assert_eq!(told, (family.into(), known.into(), formats.into()), "{model}");
        assert_eq!((desc.latents_known, desc.packed_channels), (1, packed), "{model}");
        assert_eq!(desc.packed_channels, desc.latent_channels * desc.packing * desc.packing, "{model}");
        assert!([0, packed].contains(&desc.statistics_count) && desc.decoded_channels == desc.pixel_channels);
        let frames = 1 + i64::from(desc.time_scale);
        let clip = [1, i64::from(desc.pixel_channels), if desc.time_scale > 1 { frames } else { 1 }, 32, 64];
        let video = Buffer::random(&mut Random(3), clip);
        let encoded = |latents: &str| {
            vae.configure("latents", latents).unwrap();
            let mut latent = Buffer::poisoned(vae.plan("encode", clip).unwrap().0.output_shape);
            vae.encode(&video, &mut latent).unwrap();
            latent
        };
        let (raw, scaled) = (encoded("raw"), encoded("model"));
        let expected = by_numbers(&desc, &raw);
        assert_eq!(scaled.f32().len(), expected.len(), "{model}");
        for (found, expected) in scaled.f32().iter().zip(expected) {
            assert!(
                (f64::from(*found) - expected).abs() <= 1e-5 * expected.abs().max(1.0),
                "{model}: {found}, {expected}"
            );
        }
        // The same numbers whatever latents is set to, at the same place.
        assert_eq!(vae.model().latent_means, desc.latent_means, "{model}");
    }
}

/// A pipe beside the weights is no configuration. Opening one would wait for its other end.
#[cfg(unix)]
#[test]
fn a_pipe_in_place_of_a_configuration_is_not_waited_for() {
    use std::ffi::{CString, c_int};
    unsafe extern "C" {
        fn mkfifo(path: *const c_char, mode: u32) -> c_int;
    }
    let folder = Folder::new("pipe");
    let path = folder.file("a.safetensors", &to_bytes(&read(&golden("families/sdxl.safetensors")), 32));
    let pipe = CString::new(path.with_file_name("config.json").to_str().unwrap()).unwrap();
    // SAFETY: a C string that outlives the call.
    assert_eq!(unsafe { mkfifo(pipe.as_ptr(), 0o600) }, 0);
    let refused = Vae::open(&path).unwrap().configure("latents", "model").unwrap_err();
    refused.says(VVAE_ERROR_ARGUMENT, &["latent_format"]);
}

#[test]
fn a_checkpoint_that_is_almost_one_names_the_nearest_family() {
    let folder = Folder::new("nearest");
    for (model, family, missing) in
        [("families/flux", "kl2d", "decoder.up.2.block.1.conv2.weight"), ("small", "seedvr2", "decoder.conv_in.bias")]
    {
        let mut tensors = read(&golden(&format!("{model}.safetensors")));
        tensors.remove(missing).unwrap();
        let path = folder.file("damaged.safetensors", &to_bytes(&tensors, 16));
        let error = Vae::open(&path).err().unwrap();
        assert!(error.text.contains(missing) && error.text.contains(family), "{error:?}");
    }
}
