//! The header of a safetensors file: eight bytes of length, then JSON with the type, shape and offsets of each tensor.

use std::ops::Range;

use serde_json::{Map, Value};

use super::keys;
use super::names::{Check, quoted};
use crate::ir::DType;

/// The format allows 100 MB. This model's header has 30 KB, and parsed JSON takes tens of times its text.
const MAX_HEADER: u64 = 16 << 20;
const LENGTH_BYTES: usize = 8;
const MAX_RANK: usize = 8;

/// A tensor's entry in the header.
#[derive(Debug, Clone)]
pub(super) struct TensorEntry {
    pub name: String,
    pub dtype: DType,
    pub shape: Vec<u64>,
    /// Its values' bytes in the file.
    pub range: Range<usize>,
}

#[derive(Debug)]
pub(super) struct CheckpointHeader {
    pub entries: Vec<TensorEntry>,
    /// The number of groups in the metadata, if any.
    pub groups: Option<u64>,
}

pub(super) fn parse(file: &[u8]) -> Check<CheckpointHeader> {
    let (text, data_start) = text(file)?;
    let json: Value = serde_json::from_str(text).map_err(|e| format!("the header is not valid JSON: {e}"))?;
    if let Some(key) = keys::duplicate(text) {
        return Err(format!("the header has the key {} twice", quoted(&key)));
    }
    let Value::Object(object) = json else {
        return Err("the header is not a JSON object of tensors".into());
    };
    let mut header = CheckpointHeader { entries: Vec::with_capacity(object.len()), groups: None };
    for (name, value) in object {
        if name == "__metadata__" {
            header.groups = groups(&value)?;
        } else {
            let entry = entry(&name, &value, data_start, file.len());
            header.entries.push(entry.map_err(|why| format!("tensor {}: {why}", quoted(&name)))?);
        }
    }
    refuse_overlaps(&mut header.entries)?;
    Ok(header)
}

fn text(file: &[u8]) -> Check<(&str, usize)> {
    let Some((length, rest)) = file.split_first_chunk::<LENGTH_BYTES>() else {
        return Err(format!("the file has {} bytes, too few for a safetensors file", file.len()));
    };
    let length = u64::from_le_bytes(*length);
    if length > MAX_HEADER {
        return Err(format!(
            "the header claims {length} bytes, expected at most {MAX_HEADER}; this is not a safetensors file"
        ));
    }
    let Some(header) = usize::try_from(length).ok().and_then(|n| rest.get(..n)) else {
        return Err(format!("the header claims {length} bytes, but only {} follow; the file is truncated", rest.len()));
    };
    let text = std::str::from_utf8(header).map_err(|e| format!("the header is not UTF-8 text: {e}"))?;
    Ok((text, LENGTH_BYTES + header.len()))
}

fn groups(metadata: &Value) -> Check<Option<u64>> {
    let Value::Object(metadata) = metadata else {
        return Err("__metadata__ is not a JSON object".into());
    };
    let Some(value) = metadata.get("norm_num_groups") else {
        return Ok(None);
    };
    match value.as_str().and_then(|text| text.parse().ok()).filter(|n| *n > 0) {
        Some(groups) => Ok(Some(groups)),
        None => Err(format!(
            "norm_num_groups in the file's metadata is {}, expected a positive whole number as a string",
            quoted(&value.to_string())
        )),
    }
}

fn entry(name: &str, value: &Value, data_start: usize, file_length: usize) -> Check<TensorEntry> {
    let Value::Object(fields) = value else {
        return Err("its entry in the header is not a JSON object".into());
    };
    let dtype = match fields.get("dtype").and_then(Value::as_str) {
        Some("F16") => DType::F16,
        Some("BF16") => DType::BF16,
        Some("F32") => DType::F32,
        Some(other) => return Err(format!("dtype is {}, expected F16, BF16 or F32", quoted(other))),
        None => return Err("dtype is missing, expected F16, BF16 or F32".into()),
    };
    let shape = numbers(fields, "shape")?;
    if shape.len() > MAX_RANK {
        return Err(format!("shape has {} dimensions, expected at most {MAX_RANK}", shape.len()));
    }
    let offsets = numbers(fields, "data_offsets")?;
    let &[begin, end] = offsets.as_slice() else {
        return Err(format!("data_offsets has {} numbers, expected begin and end", offsets.len()));
    };
    let available = (file_length - data_start) as u64;
    if begin > end || end > available {
        return Err(format!(
            "data_offsets are [{begin}, {end}], expected an interval within the {available} bytes after the header; \
             the file is damaged or truncated"
        ));
    }
    let bytes = shape.iter().try_fold(dtype.bytes(), |product, dim| product.checked_mul(*dim));
    if bytes != Some(end - begin) {
        let expected = bytes.map_or("more than can be counted".into(), |b| b.to_string());
        let (found, dtype) = (end - begin, dtype.name());
        return Err(format!("it has {found} bytes of data, expected {expected} for shape {shape:?} in {dtype}"));
    }
    // Both are at most the file's length, so they fit in usize.
    let range = data_start + begin as usize..data_start + end as usize;
    Ok(TensorEntry { name: name.into(), dtype, shape, range })
}

fn numbers(fields: &Map<String, Value>, field: &str) -> Check<Vec<u64>> {
    fields
        .get(field)
        .and_then(Value::as_array)
        .and_then(|array| array.iter().map(Value::as_u64).collect())
        .ok_or_else(|| format!("{field} is missing or not an array of whole numbers"))
}

/// Sorts the entries by offset, and refuses overlaps.
fn refuse_overlaps(entries: &mut [TensorEntry]) -> Check<()> {
    entries.sort_unstable_by_key(|entry| (entry.range.start, entry.range.end));
    for pair in entries.windows(2) {
        if pair[1].range.start < pair[0].range.end {
            let (one, other) = (quoted(&pair[1].name), quoted(&pair[0].name));
            return Err(format!("tensor {one}: its data overlap those of tensor {other}, expected separate ones"));
        }
    }
    Ok(())
}
