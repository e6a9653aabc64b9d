//! A minimal reader and writer of safetensors files.

use std::collections::BTreeMap;
use std::path::Path;

#[derive(Debug, Clone, PartialEq)]
pub struct Tensor {
    pub shape: Vec<usize>,
    pub values: Vec<f32>,
}

pub type Tensors = BTreeMap<String, Tensor>;

/// The tensors of a file.
pub fn read(path: &Path) -> Tensors {
    let bytes = std::fs::read(path).unwrap_or_else(|why| panic!("{}: {why}", path.display()));
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let number = |value: &serde_json::Value| value.as_u64().unwrap() as usize;
    let entries = header.as_object().unwrap().iter().filter(|(name, _)| *name != "__metadata__");
    let tensor = |entry: &serde_json::Value| {
        let [start, end] = [0, 1].map(|i| 8 + length + number(&entry["data_offsets"][i]));
        Tensor {
            shape: entry["shape"].as_array().unwrap().iter().map(number).collect(),
            values: numbers(entry["dtype"].as_str().unwrap(), &bytes[start..end]),
        }
    };
    entries.map(|(name, entry)| (name.clone(), tensor(entry))).collect()
}

fn numbers(dtype: &str, bytes: &[u8]) -> Vec<f32> {
    match dtype {
        "F32" => bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect(),
        "F16" => bytes.chunks_exact(2).map(|b| half::f16::from_le_bytes(b.try_into().unwrap()).to_f32()).collect(),
        "I64" => bytes.chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap()) as f32).collect(),
        _ => panic!("a tensor of {dtype}"),
    }
}

/// A file of f32 tensors, with the number of groups as its metadata.
pub fn to_bytes(tensors: &Tensors, groups: u64) -> Vec<u8> {
    let mut header = serde_json::Map::new();
    header.insert("__metadata__".into(), serde_json::json!({ "norm_num_groups": groups.to_string() }));
    let mut data = Vec::new();
    for (name, tensor) in tensors {
        let start = data.len();
        data.extend(tensor.values.iter().flat_map(|value| value.to_le_bytes()));
        let entry = serde_json::json!({ "dtype": "F32", "shape": tensor.shape, "data_offsets": [start, data.len()] });
        header.insert(name.clone(), entry);
    }
    let mut header = serde_json::to_vec(&header).unwrap();
    header.resize(header.len().next_multiple_of(8), b' ');
    [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat()
}

/// A folder for a test's files, removed when dropped.
pub struct Folder(pub std::path::PathBuf);

impl Folder {
    pub fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("video-vae-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    pub fn file(&self, name: &str, bytes: &[u8]) -> std::path::PathBuf {
        let path = self.0.join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
