//! Checkpoints: any bytes as a file, and a real one whose header is changed. A file that opens can be run.

use std::ffi::CString;
use std::path::PathBuf;
use std::sync::OnceLock;

use serde_json::{Map, Value, json};

use super::{Bytes, timed};
use crate::common::{Buffer, LATENT_CHANNELS, Vae, tiny_bytes};
use video_vae::capi::*;

/// The real file: the entries of its header, these as texts, and its data.
struct Parts {
    header: Map<String, Value>,
    texts: Vec<String>,
    data: &'static [u8],
}

fn parts() -> &'static Parts {
    static PARTS: OnceLock<Parts> = OnceLock::new();
    PARTS.get_or_init(|| {
        let file = tiny_bytes();
        let length = u64::from_le_bytes(file[..8].try_into().expect("eight bytes")) as usize;
        let header: Map<String, Value> = serde_json::from_slice(&file[8..8 + length]).expect("JSON");
        let texts = header.iter().map(|(name, entry)| text(name, entry)).collect();
        Parts { header, texts, data: &file[8 + length..] }
    })
}

fn text(name: &str, entry: &Value) -> String {
    format!("{}:{entry}", Value::from(name))
}

fn value(bytes: &mut Bytes) -> Value {
    match bytes.below(8) {
        0..=2 => json!(bytes.number()),
        3 => json!(bytes.number().cast_signed()),
        4 => bytes.pick(&[Value::Null, json!(1.5), json!("4"), json!([1, [2]]), json!({})].each_ref()).clone(),
        5 => json!([bytes.number(), bytes.number()]),
        6 => json!(String::from_utf8_lossy(&bytes.text())),
        _ => json!(["F16", "BF16", "F32", "F64", "I64", "U8", "", "f32"][bytes.below(8) as usize]),
    }
}

/// Changes one entry of the header. `None`: it is left out.
fn changed(name: &str, entry: &Value, bytes: &mut Bytes) -> Option<String> {
    let mut entry = entry.clone();
    let key = bytes.pick(&["data_offsets", "shape", "dtype", "other"]);
    match bytes.below(8) {
        0 | 1 => return None,
        2 => {
            let twin = text(&String::from_utf8_lossy(&bytes.text()), &entry);
            return Some(text(name, &entry) + "," + &twin);
        }
        3 => return Some(text("__metadata__", &json!({ "norm_num_groups": value(bytes) }))),
        4 => entry = value(bytes),
        5 => {
            if let Some(list) = entry[key].as_array_mut().filter(|list| !list.is_empty()) {
                let at = bytes.below(list.len() as u64) as usize;
                list[at] = value(bytes);
            }
        }
        6 => {
            if let Some(list) = entry["shape"].as_array_mut() {
                let first = list.first().cloned().unwrap_or(json!(1));
                list.insert(0, first);
            }
        }
        _ => drop(entry.as_object_mut().map(|entry| entry.insert(key.into(), value(bytes)))),
    }
    Some(text(name, &entry))
}

fn file(bytes: &mut Bytes) -> Vec<u8> {
    let Parts { header, texts, data } = parts();
    match bytes.below(4) {
        // Any header, with a length that is right, and some data.
        0 => {
            let header = bytes.rest();
            [&(header.len() as u64).to_le_bytes()[..], header, &data[..64]].concat()
        }
        1 => bytes.rest().to_vec(),
        // The real file with a few other bytes.
        2 => {
            let mut file = tiny_bytes().to_vec();
            for _ in 0..1 + bytes.below(4) {
                let end = if bytes.one_in(4) { file.len() } else { file.len() - data.len() };
                file[bytes.below(end as u64) as usize] = bytes.byte();
            }
            if bytes.one_in(4) {
                file.truncate(bytes.below(file.len() as u64 + 1) as usize);
            }
            file
        }
        _ => {
            let mut changes: Vec<(usize, Option<String>)> = Vec::new();
            for _ in 0..1 + bytes.below(3) {
                let at = bytes.below(header.len() as u64) as usize;
                let (name, entry) = header.iter().nth(at).expect("it is one of them");
                changes.push((at, changed(name, entry, bytes)));
            }
            let entry = |(at, text): (usize, &'static String)| match changes.iter().find(|(other, _)| *other == at) {
                Some((_, changed)) => changed.clone(),
                None => Some(text.clone()),
            };
            let header = format!("{{{}}}", texts.iter().enumerate().filter_map(entry).collect::<Vec<_>>().join(","));
            [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), data].concat()
        }
    }
}

/// In memory, where the system has such a folder.
fn path() -> PathBuf {
    let memory = PathBuf::from("/dev/shm");
    let folder = if memory.is_dir() { memory } else { std::env::temp_dir() };
    folder.join(format!("video-vae-fuzz-{}.safetensors", std::process::id()))
}

pub fn run(data: &[u8]) {
    let mut bytes = Bytes::new(data);
    let path = path();
    std::fs::write(&path, file(&mut bytes)).expect("a folder for temporary files");
    let opened = timed("create", || Vae::open(&path));
    match &opened {
        Ok(vae) => {
            let shape = [1, LATENT_CHANNELS, 1, 1, 1];
            let mut video = Buffer::new(VVAE_DTYPE_F32, [1, 3, 1, 8, 8]);
            // The number of latent channels may be another, or the scale of its values too large.
            let _ = timed("decode", || vae.decode(&Buffer::new(VVAE_DTYPE_F32, shape), &mut video)).map_err(|why| {
                assert!([VVAE_ERROR_TENSOR, VVAE_ERROR_MEMORY].contains(&why.status), "{why:?}");
            });
        }
        Err(why) => {
            why.says(VVAE_ERROR_CHECKPOINT, &[path.file_name().and_then(|name| name.to_str()).expect("UTF-8")]);
            CString::new(why.text.as_str()).expect("no NUL");
        }
    }
    let _ = std::fs::remove_file(&path);
}
