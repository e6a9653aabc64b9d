//! The header of a safetensors file: its length, then JSON that says where every tensor lies.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;

use serde_json::{Map, Value, json};

use crate::Result;

/// As in the format's own reader.
const LONGEST_HEADER: u64 = 100_000_000;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    pub dtype: String,
    pub shape: Vec<u64>,
    /// From the start of the file.
    pub start: u64,
    pub bytes: u64,
}

impl Entry {
    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }
}

#[derive(Debug)]
pub struct Header {
    pub tensors: BTreeMap<String, Entry>,
    pub metadata: BTreeMap<String, String>,
    pub file_bytes: u64,
}

impl Header {
    pub fn read(path: &Path) -> Result<Header> {
        let name = path.display();
        let mut file = File::open(path).map_err(|why| format!("{name} cannot be opened: {why}"))?;
        let file_bytes = file.metadata().map_err(|why| format!("{name} cannot be read: {why}"))?.len();
        let mut length = [0; 8];
        file.read_exact(&mut length).map_err(|_| format!("{name} is too short to be a safetensors file"))?;
        let length = u64::from_le_bytes(length);
        if length > LONGEST_HEADER || length + 8 > file_bytes {
            return Err(format!("{name} is no safetensors file, or cut short; get it anew"));
        }
        let mut text = vec![0; length as usize];
        file.read_exact(&mut text).map_err(|why| format!("{name} cannot be read: {why}"))?;
        let fields: Map<String, Value> = serde_json::from_slice(&text)
            .map_err(|why| format!("{name} is no safetensors file: its header is no JSON ({why})"))?;
        let mut header = Header { tensors: BTreeMap::new(), metadata: BTreeMap::new(), file_bytes };
        for (key, value) in fields {
            if key == "__metadata__" {
                let pairs = value.as_object().into_iter().flatten();
                header.metadata = pairs.filter_map(|(k, v)| Some((k.clone(), v.as_str()?.to_owned()))).collect();
                continue;
            }
            let entry = entry(&value, length + 8, file_bytes);
            let entry = entry.ok_or_else(|| format!("{name}: the entry of {key} is damaged; get the file anew"))?;
            header.tensors.insert(key, entry);
        }
        Ok(header)
    }
}

fn entry(value: &Value, data: u64, file_bytes: u64) -> Option<Entry> {
    let numbers = |value: &Value| value.as_array()?.iter().map(Value::as_u64).collect::<Option<Vec<u64>>>();
    let dtype = value["dtype"].as_str()?.to_owned();
    let shape = numbers(&value["shape"])?;
    let [start, end] = numbers(&value["data_offsets"])?.try_into().ok()?;
    let whole = end >= start && data.checked_add(end)? <= file_bytes;
    // No product of these may overflow later.
    shape.iter().try_fold(1u64, |product, n| product.checked_mul((*n).max(1)))?;
    whole.then_some(Entry { dtype, shape, start: data + start, bytes: end - start })
}

/// A header for tensors that lie one after the other in this order, filled up with spaces to a multiple of 8 and to at
/// least `room` bytes, its length included.
pub fn header(tensors: &[(String, &str, Vec<u64>, u64)], metadata: &[(&str, String)], room: usize) -> Vec<u8> {
    let mut fields = Map::new();
    let metadata: Map<_, _> = metadata.iter().map(|(k, v)| ((*k).to_owned(), json!(v))).collect();
    fields.insert("__metadata__".into(), Value::Object(metadata));
    let mut start = 0;
    for (name, dtype, shape, bytes) in tensors {
        let end = start + bytes;
        fields.insert(name.clone(), json!({ "dtype": dtype, "shape": shape, "data_offsets": [start, end] }));
        start = end;
    }
    let mut text = Value::Object(fields).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(8).max(room.saturating_sub(8)), b' ');
    [&(text.len() as u64).to_le_bytes()[..], &text].concat()
}

/// Writes at a place of the file.
pub fn write_at(file: &mut File, position: u64, bytes: &[u8]) -> Result<()> {
    let written = file.seek(SeekFrom::Start(position)).and_then(|_| file.write_all(bytes));
    written.map_err(|why| format!("the safetensors file cannot be written: {why}; make room"))
}
