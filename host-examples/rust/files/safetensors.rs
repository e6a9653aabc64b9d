//! The header of a safetensors file: its length, then JSON that says where every tensor lies.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;

use serde_json::{Map, Value, json};
use video_vae::internals::safetensors as reader;

use crate::Result;

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
        Header::parse(&mut file, file_bytes).map_err(|why| format!("{name}: {why}; get the file anew"))
    }

    fn parse(file: &mut File, file_bytes: u64) -> Result<Header> {
        let text = reader::text(file_bytes, |into, at| {
            file.seek(SeekFrom::Start(at))
                .and_then(|_| file.read_exact(into))
                .map_err(|why| format!("it cannot be read: {why}"))
        })?;
        let data = reader::LENGTH_BYTES + text.len() as u64..file_bytes;
        let mut header = Header { tensors: BTreeMap::new(), metadata: BTreeMap::new(), file_bytes };
        reader::members(&text, |key, value| {
            if key == reader::METADATA {
                return reader::members(value, |key, value| {
                    header.metadata.extend(serde_json::from_str(value).ok().map(|value: String| (key, value)));
                    Ok(())
                });
            }
            let (dtype, shape, range) = reader::fields(value, &data).map_err(|why| format!("tensor {key}: {why}"))?;
            let entry = Entry { dtype, shape: shape.into(), start: range.start, bytes: range.end - range.start };
            header.tensors.insert(key, entry);
            Ok(())
        })?;
        Ok(header)
    }
}

/// Name, type, shape and bytes of a tensor.
pub type Tensor = (String, &'static str, Vec<u64>, u64);

/// A header for tensors that lie one after the other in this order, filled up with spaces to a multiple of 8 and to at
/// least `room` bytes, its length included.
pub fn header(tensors: &[Tensor], metadata: &[(&str, String)], room: usize) -> Vec<u8> {
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
