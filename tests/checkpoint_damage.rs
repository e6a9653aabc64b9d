//! A damaged checkpoint gives an error that names the file, or a handle that works, within little memory.
//! VVAE_DAMAGED_FILES sets how many are tried. One test only, so that nothing else takes memory in the process.

mod common;

use std::path::Path;

use common::process::status_bytes;
use common::safetensors::{self, Folder, to_bytes};
use common::weights::{Sizes, random_weights};
use common::{Buffer, Random, Vae};
use serde_json::{Map, Value, json};
use video_vae::capi::*;

/// Memory that opening a damaged file may take above the file's size.
const ROOM: u64 = 64 << 20;

/// Splits a file into its header and what follows.
fn split(file: &[u8]) -> (Map<String, Value>, Vec<u8>) {
    let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    (serde_json::from_slice(&file[8..8 + length]).unwrap(), file[8 + length..].to_vec())
}

fn join(header: &[u8], data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header, data].concat()
}

/// A number that a reader may stumble over.
fn number(random: &mut Random, file: u64) -> Value {
    match random.below(12) {
        0 => json!(0),
        1 => json!(-1),
        2 => json!(u64::MAX),
        3 => json!(i64::MAX),
        4 => json!(1u64 << random.below(64)),
        5 => json!(file),
        6 => json!(1.5),
        7 => json!("4"),
        8 => Value::Null,
        9 => json!([1, [2, [3]]]),
        _ => json!(random.below(2 * file)),
    }
}

/// Changes the meaning of the header in one place.
fn change_header(header: &mut Map<String, Value>, random: &mut Random, file: u64) {
    let names: Vec<String> = header.keys().cloned().collect();
    let name = names[random.below(names.len() as u64) as usize].clone();
    let other = names[random.below(names.len() as u64) as usize].clone();
    let dtypes = ["F16", "BF16", "F64", "I64", "U8", "BOOL", "F8_E4M3", "", "f32", "\u{0}"];
    match random.below(12) {
        0 => header[&name]["dtype"] = json!(random.pick(&dtypes)),
        1 => {
            let (a, b) = (header[&name]["data_offsets"].clone(), header[&other]["data_offsets"].clone());
            (header[&name]["data_offsets"], header[&other]["data_offsets"]) = (b, a);
        }
        2 => header[&name]["data_offsets"] = json!([number(random, file), number(random, file)]),
        3 => {
            let end = random.below(2) as usize;
            if let Some(offsets) = header[&name]["data_offsets"].as_array_mut() {
                offsets[end] = number(random, file);
            }
        }
        4 => header[&name]["shape"] = json!([number(random, file), number(random, file)]),
        5 => {
            if let Some(shape) = header[&name]["shape"].as_array_mut() {
                let axis = random.below(shape.len() as u64) as usize;
                shape[axis] = number(random, file);
            }
        }
        6 => header[&name]["shape"] = Value::Array(vec![json!(1); random.below(2000) as usize]),
        7 => drop(header.remove(&name)),
        8 => {
            let value = header.remove(&name).unwrap();
            header.insert("x".repeat(random.below(100_000) as usize), value);
        }
        9 => {
            for extra in 0..random.below(3000) {
                header.insert(format!("extra.{extra}"), json!({"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}));
            }
        }
        10 => header[&name] = number(random, file),
        _ => header["__metadata__"] = json!({ "norm_num_groups": number(random, file).to_string() }),
    }
}

/// A file that differs from the valid one.
fn damaged(valid: &[u8], header: &Map<String, Value>, data: &[u8], random: &mut Random) -> Vec<u8> {
    let file = valid.len() as u64;
    let mut bytes = valid.to_vec();
    match random.below(10) {
        0..=2 => {
            for _ in 0..1 + random.below(3) {
                // Mostly in the header, which is a small part of the file.
                let end = if random.one_in(4) { file } else { file - data.len() as u64 };
                bytes[random.below(end) as usize] ^= 1 << random.below(8);
            }
        }
        3 => bytes.truncate(random.below(file + 1) as usize),
        4 => bytes.extend(std::iter::repeat_n(0xa5, 1 + random.below(10_000) as usize)),
        5 => {
            let length = [0, 1, 8, file - 8, file - 7, file, 1 << 24, 1 << 32, u64::MAX - 7, u64::MAX, random.next()];
            bytes[..8].copy_from_slice(&random.pick(&length).to_le_bytes());
        }
        6 => {
            let text = serde_json::to_string(header).unwrap();
            let at = random.below(text.len() as u64) as usize;
            let inserted = random.pick(&["{", "}", "[[[[[[[[", "\"", ",", ":", "\\u0000", "1e999", "-", "\u{2028}"]);
            bytes = join([&text[..at], inserted, &text[at..]].concat().as_bytes(), data);
        }
        _ => {
            let mut header = header.clone();
            for _ in 0..1 + random.below(2) {
                let intact = header.values().all(Value::is_object);
                if intact && header.len() > 1 && header.contains_key("__metadata__") {
                    change_header(&mut header, random, file);
                }
            }
            bytes = join(&serde_json::to_vec(&header).unwrap(), data);
        }
    }
    bytes
}

/// Resident memory now and at its peak since the last call, in bytes. 0 where the system does not tell.
fn memory() -> (u64, u64) {
    let found = (status_bytes("VmRSS"), status_bytes("VmHWM"));
    let _ = std::fs::write("/proc/self/clear_refs", "5");
    found
}

/// The video of a fixed latent.
fn decode(vae: &Vae) -> Option<Vec<u8>> {
    let mut latent = Buffer::new(VVAE_DTYPE_F32, [1, 2, 2, 2, 2]);
    latent.f32_mut().iter_mut().enumerate().for_each(|(i, v)| *v = (i as f32 * 0.7).sin());
    let mut video = Buffer::new(VVAE_DTYPE_F32, [1, 3, 5, 16, 16]);
    vae.decode(&latent, &mut video).is_ok().then(|| video.bytes().to_vec())
}

/// The video of the tensors as another reader finds them, if it can read the file.
fn decode_as_read(path: &Path, groups: u64, folder: &Folder) -> Option<Vec<u8>> {
    let quiet = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let tensors = std::panic::catch_unwind(|| safetensors::read(path));
    std::panic::set_hook(quiet);
    let again = folder.file("again.safetensors", &to_bytes(&tensors.ok()?, groups));
    decode(&Vae::open(&again).ok()?)
}

#[test]
fn damaged_files_are_refused_or_work() {
    const GROUPS: u64 = 2;
    let config = Sizes { channels: vec![2, 2, 4, 4], layers: 1, groups: GROUPS, latent: 2, temporal_levels: 2 };
    let valid = to_bytes(&random_weights(&config.model(), 4), GROUPS);
    let (header, data) = split(&valid);
    let folder = Folder::new("damage");
    let files = std::env::var("VVAE_DAMAGED_FILES").map_or(2000, |count| count.parse::<u64>().unwrap());
    let mut random = Random(2);
    let (mut opened, mut refused, mut compared, mut most) = (0, 0, 0, 0);
    for round in 0..files {
        let bytes = damaged(&valid, &header, &data, &mut random);
        let path = folder.file("damaged.safetensors", &bytes);
        let (before, _) = memory();
        let found = Vae::open(&path);
        let (_, peak) = memory();
        let taken = peak.saturating_sub(before + bytes.len() as u64);
        most = most.max(taken);
        assert!(taken <= ROOM, "file {round} of {} bytes takes {taken} bytes more", bytes.len());
        match found {
            Ok(vae) => {
                opened += 1;
                if opened % 20 == 0 {
                    let video = decode(&vae);
                    let groups = split(&bytes).0["__metadata__"]["norm_num_groups"].as_str().map(str::parse::<u64>);
                    let Some(Ok(groups)) = groups else { continue };
                    if let Some(expected) = decode_as_read(&path, groups, &folder) {
                        compared += 1;
                        assert!(video == Some(expected), "file {round} decodes to other values than it has");
                    }
                }
            }
            Err(failure) => {
                refused += 1;
                failure.says(VVAE_ERROR_CHECKPOINT, &["damaged.safetensors"]);
            }
        }
    }
    println!(
        "{files} files: {refused} refused, {opened} opened, {compared} compared, at most {most} bytes above the file"
    );
    assert!(opened > files / 100 && refused > files / 2, "{opened} opened, {refused} refused");
    assert!(compared > 0);
}
