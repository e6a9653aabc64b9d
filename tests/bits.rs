//! The bits of results do not change from version to version: hashes of jobs, compared with a committed table.
//!
//! A line of the table has arithmetic, job and hash. Arithmetic that this machine lacks is skipped; `portable` runs
//! everywhere. `VVAE_UPDATE_BITS=1` replaces the lines of the arithmetic that is here.

mod common;

use std::collections::BTreeMap;
use std::ffi::CString;
use std::path::PathBuf;

use common::safetensors::{Folder, to_bytes};
use common::weights::{Sizes, random_weights};
use common::{Buffer, Random, Vae, api, devices, golden, root, run_info, sized};
use video_vae::capi::*;
use xxhash_rust::xxh64::xxh64;

struct Job {
    weights: &'static str,
    node: &'static str,
    input: [i64; 5],
    output: [i64; 5],
    settings: &'static [(&'static str, &'static str)],
}

const fn encode(weights: &'static str, clip: [i64; 4], settings: &'static [(&'static str, &'static str)]) -> Job {
    let [b, t, h, w] = clip;
    let output = [b, 16, (t + 2) / 4 + 1, (h + 7) / 8, (w + 7) / 8];
    Job { weights, node: "encode", input: [b, 3, t, h, w], output, settings }
}

/// Of a model with 48 latent channels and scales 16 and 4.
const WIDE: &str = "families/wan22";
/// Of a model of images with four pixel channels, 64 latent channels and scale 16.
const IMAGES: &str = "families/qwen21";

const fn job(weights: &'static str, node: &'static str, [input, output]: [[i64; 5]; 2]) -> Job {
    Job { weights, node, input, output, settings: &[] }
}

const fn decode(weights: &'static str, latent: [i64; 4], settings: &'static [(&'static str, &'static str)]) -> Job {
    let [b, t, h, w] = latent;
    let output = [b, 3, 4 * t - 3, 8 * h, 8 * w];
    Job { weights, node: "decode", input: [b, 16, t, h, w], output, settings }
}

const JOBS: [Job; 25] = [
    encode("small", [1, 1, 40, 24], &[]),
    encode("small", [2, 18, 24, 16], &[]),
    encode("small", [1, 29, 24, 40], &[("slice_frames", "1")]),
    encode("small", [1, 9, 64, 64], &[("posterior", "sample"), ("seed", "7")]),
    encode("medium", [1, 13, 32, 48], &[]),
    encode("wide", [1, 9, 33, 47], &[]),
    decode("small", [3, 1, 5, 4], &[]),
    decode("small", [2, 5, 2, 3], &[]),
    decode("small", [1, 9, 3, 5], &[("slice_frames", "2"), ("chunk_frames", "3")]),
    decode("medium", [1, 1, 6, 5], &[]),
    decode("medium", [1, 4, 4, 6], &[]),
    decode(
        "medium",
        [1, 3, 10, 12],
        &[("decode_tiled", "true"), ("decode_tile_size", "64"), ("decode_tile_overlap", "16")],
    ),
    decode("wide", [1, 5, 4, 5], &[]),
    decode("wide", [1, 1, 9, 7], &[]),
    decode("deep", [1, 4, 3, 4], &[]),
    encode("families/wan21", [1, 1, 40, 24], &[]),
    encode("families/wan21", [2, 18, 24, 16], &[]),
    decode("families/wan21", [3, 1, 5, 4], &[]),
    decode("families/wan21", [1, 9, 3, 5], &[("slice_frames", "2"), ("chunk_frames", "3")]),
    job(WIDE, "encode", [[1, 3, 18, 40, 24], [1, 48, 6, 3, 2]]),
    job(WIDE, "decode", [[1, 48, 5, 3, 2], [1, 3, 17, 48, 32]]),
    job(WIDE, "decode", [[2, 48, 1, 2, 3], [2, 3, 1, 32, 48]]),
    job(IMAGES, "encode", [[2, 4, 1, 40, 24], [2, 64, 1, 3, 2]]),
    job(IMAGES, "decode", [[1, 64, 1, 3, 2], [1, 4, 1, 48, 32]]),
    job(IMAGES, "decode", [[1, 64, 3, 2, 2], [1, 4, 3, 32, 32]]),
];

/// Checkpoints that are made here, beside the goldens. All have 16 latent channels and scales 8 and 4.
fn made(folder: &Folder, name: &str) -> Option<PathBuf> {
    let (channels, layers, groups, seed) = match name {
        "wide" => (vec![64, 64, 128, 128], 1, 16, 21),
        "deep" => (vec![8, 24, 16, 40], 3, 8, 22),
        _ => return None,
    };
    let config = Sizes { channels, layers, groups, latent: 16, temporal_levels: 2 };
    Some(folder.file(&format!("{name}.safetensors"), &to_bytes(&random_weights(&config.model(), seed), groups)))
}

/// A kind of arithmetic: its name in the table, the device, and what selects it.
struct Arithmetic {
    name: String,
    device: String,
    settings: Vec<(&'static str, &'static str)>,
}

/// What this machine can compute with.
fn arithmetic() -> Vec<Arithmetic> {
    let mut found = Vec::new();
    for (index, device) in devices().into_iter().enumerate() {
        let cpu = [("avx512", "fp32"), ("avx2", "fp32"), ("portable", "fp32"), ("amx", "bf16"), ("avx512bf16", "bf16")];
        if device == "cpu" {
            found.extend(cpu.map(|(instructions, precision)| Arithmetic {
                name: format!("{instructions}-{precision}"),
                device: device.clone(),
                settings: vec![("precision", precision), ("instruction_set", instructions)],
            }));
            continue;
        }
        let mut info = sized::<vvae_device_desc>();
        // SAFETY: `struct_size` is right.
        assert_eq!(unsafe { (api().vvae_device_info)(index as u32, &mut info) }, VVAE_OK);
        let card = format!("{}.{}", info.compute_major, info.compute_minor);
        let kernels = std::env::var("VVAE_ARCH").unwrap_or_else(|_| card.clone());
        for (name, settings) in [
            ("fp16", vec![("precision", "fp16")]),
            ("bf16", vec![("precision", "bf16")]),
            ("fp16-u8", vec![("precision", "fp16"), ("cache", "u8")]),
        ] {
            found.push(Arithmetic { name: format!("cuda-{card}-{kernels}-{name}"), device: device.clone(), settings });
        }
    }
    found
}

/// The hash of a job's output, or `None` if the processor lacks the instructions.
fn hash(weights: &std::path::Path, with: &Arithmetic, job: &Job) -> Option<u64> {
    let vae = Vae::open_on(&CString::new(with.device.as_str()).unwrap(), weights).unwrap();
    for (key, value) in with.settings.iter().chain(job.settings) {
        match vae.configure(key, value) {
            Ok(_) => {}
            Err(_) if *key == "instruction_set" && with.device == "cpu" && !with.name.starts_with("portable") => {
                return None;
            }
            Err(why) => panic!("{key}={value}: {why:?}"),
        }
    }
    let mut random = Random(3);
    let (input, output) = (Buffer::random(&mut random, job.input), Buffer::poisoned(job.output));
    match vae.run(job.node, &input.tensor(), &output.tensor(), &run_info()) {
        Ok(_) => Some(xxh64(output.bytes(), 0)),
        Err(why) => {
            assert!(with.device == "cpu" && !with.name.starts_with("portable"), "{}: {why:?}", with.name);
            None
        }
    }
}

#[test]
fn bits_are_those_of_the_table() {
    let folder = Folder::new("bits");
    let mut found: BTreeMap<String, String> = BTreeMap::new();
    for weights in ["small", "medium", "wide", "deep", "families/wan21", WIDE, IMAGES] {
        let path = made(&folder, weights).unwrap_or_else(|| golden(&format!("{weights}.safetensors")));
        for with in arithmetic() {
            // Caches in 8 bits are for norms of groups.
            let computes = !(with.name.ends_with("-u8") && ["families/wan21", WIDE, IMAGES].contains(&weights));
            for job in JOBS.iter().filter(|job| computes && job.weights == weights) {
                let Some(hash) = hash(&path, &with, job) else { continue };
                let settings: Vec<String> = job.settings.iter().map(|(key, value)| format!("{key}={value}")).collect();
                let name = format!("{} {weights} {} {:?} {}", with.name, job.node, job.input, settings.join(","));
                found.insert(name.trim_end().to_owned(), format!("{hash:016x}"));
            }
        }
    }
    let path = root().join("tests/fixtures/bits.txt");
    let text = std::fs::read_to_string(&path).unwrap_or_default();
    let mut table: BTreeMap<String, String> =
        text.lines().filter_map(|line| line.split_once(": ")).map(|(a, b)| (a.to_owned(), b.to_owned())).collect();
    if std::env::var_os("VVAE_UPDATE_BITS").is_some() {
        table.extend(found);
        let lines: Vec<String> = table.iter().map(|(name, hash)| format!("{name}: {hash}\n")).collect();
        std::fs::write(&path, lines.concat()).unwrap();
        return;
    }
    let known = |arithmetic: &str| table.keys().any(|name| name.starts_with(arithmetic));
    for with in arithmetic().iter().filter(|with| !known(&format!("{} ", with.name))) {
        println!("skipped: the table has no line of {}", with.name);
    }
    let differs = |(name, hash): &(&String, &String)| {
        known(name.split_inclusive(' ').next().unwrap()) && table.get(*name) != Some(hash)
    };
    let differ: Vec<_> = found.iter().filter(differs).collect();
    assert!(found.keys().any(|name| name.starts_with("portable")));
    assert!(differ.is_empty(), "{} of {} jobs have other bits:\n{differ:#?}", differ.len(), found.len());
}
