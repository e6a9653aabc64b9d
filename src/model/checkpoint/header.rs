//! The header of a safetensors file: eight bytes of length, then JSON with the type, shape and offsets of each tensor.
//! Entries are parsed one by one, so that memory stays below four times the text.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;

use serde_core::Deserializer;
use serde_core::de::{DeserializeOwned, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::names::{self, Check, quoted};
use super::source::Source;
use crate::ir::DType;
use crate::reserve::{self, EXHAUSTED};

/// The format allows 100 MB. This model's header has 30 KB.
const MAX_HEADER: u64 = 16 << 20;
/// The largest configuration has about 3,000.
pub(super) const MAX_TENSORS: usize = 65_536;
/// Bytes of a field's text. The longest valid one, a shape, has fewer than 200 without spaces.
const MAX_FIELD: usize = 1024;
const LENGTH_BYTES: u64 = 8;
const MAX_RANK: usize = 8;

/// A tensor's entry in the header.
#[derive(Debug)]
pub(super) struct TensorEntry {
    /// The current name.
    pub name: Box<str>,
    /// The name in the file, if it is an older one.
    older_name: Option<Box<str>>,
    pub dtype: DType,
    pub shape: Box<[u64]>,
    /// Its values' bytes in the file.
    pub range: Range<u64>,
}

impl TensorEntry {
    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }

    pub fn file_name(&self) -> &str {
        self.older_name.as_deref().unwrap_or(&self.name)
    }
}

#[derive(Debug)]
pub(super) struct CheckpointHeader {
    /// Sorted by name.
    pub entries: Vec<TensorEntry>,
    /// The number of groups in the metadata, if any.
    pub groups: Option<u64>,
}

/// Reads the header and parses it.
pub(super) fn read(file: &Source) -> Check<CheckpointHeader> {
    let text = &text(file)?;
    let data = LENGTH_BYTES + text.len() as u64..file.length;
    if !text.trim_ascii_start().starts_with('{') {
        return Err("the header is not a JSON object of tensors".into());
    }
    // Counted first, because a vector that grows takes up to three times its memory.
    let mut count = 0;
    members(text, |name, _| {
        count += usize::from(name != METADATA);
        Ok(())
    })?;
    if count > MAX_TENSORS {
        return Err(format!("the header has {count} tensors, expected at most {MAX_TENSORS}"));
    }
    let mut entries = reserve::vec("tensors", count).map_err(|_| EXHAUSTED.to_owned())?;
    let mut metadata = None;
    members(text, |name, value| {
        if name == METADATA {
            return set(&mut metadata, value, METADATA);
        }
        reserve::check().map_err(|_| EXHAUSTED.to_owned())?;
        let fields = fields(value, &data);
        let (dtype, shape, range) = fields.map_err(|why| format!("tensor {}: {why}", quoted(&name)))?;
        let (name, older_name) = match names::canonical(&name) {
            Cow::Owned(current) => (current, Some(name.into())),
            Cow::Borrowed(_) => (name, None),
        };
        entries.push(TensorEntry { name: name.into(), older_name, dtype, shape, range });
        Ok(())
    })?;
    refuse_overlaps(&mut entries)?;
    Ok(CheckpointHeader { entries, groups: metadata.map(groups).transpose()?.flatten() })
}

const METADATA: &str = "__metadata__";

fn text(file: &Source) -> Check<String> {
    let Some(available) = file.length.checked_sub(LENGTH_BYTES) else {
        return Err(format!("the file has {} bytes, too few for a safetensors file", file.length));
    };
    let mut length = [0; LENGTH_BYTES as usize];
    file.read(&mut length, 0)?;
    let length = u64::from_le_bytes(length);
    if length > MAX_HEADER {
        return Err(format!(
            "the header claims {length} bytes, expected at most {MAX_HEADER}; this is not a safetensors file"
        ));
    }
    if length > available {
        return Err(format!("the header claims {length} bytes, but only {available} follow; the file is truncated"));
    }
    let mut text = reserve::filled("the header", 0, length as usize).map_err(|_| EXHAUSTED.to_owned())?;
    file.read(&mut text, LENGTH_BYTES)?;
    String::from_utf8(text).map_err(|e| format!("the header is not UTF-8 text: {e}"))
}

/// Calls `each` with the members of a JSON object, one by one: the key, and the text of the value.
fn members<'a>(object: &'a str, mut each: impl FnMut(String, &'a str) -> Check<()>) -> Check<()> {
    let mut outcome = Ok(());
    let visitor = Members(|key, value| {
        if outcome.is_ok() {
            outcome = each(key, value);
        }
    });
    let mut json = serde_json::Deserializer::from_str(object);
    let read = json.deserialize_map(visitor).and_then(|()| json.end());
    read.map_err(|e| format!("the header is not valid JSON: {e}"))?;
    outcome
}

struct Members<F>(F);

impl<'a, F: FnMut(String, &'a str)> Visitor<'a> for Members<F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<M: MapAccess<'a>>(mut self, mut map: M) -> Result<(), M::Error> {
        while let Some(key) = map.next_key()? {
            self.0(key, map.next_value::<&RawValue>()?.get());
        }
        Ok(())
    }
}

/// Sets a member that must not occur twice.
fn set<'a>(member: &mut Option<&'a str>, value: &'a str, key: &str) -> Check<()> {
    match member.replace(value) {
        None => Ok(()),
        Some(_) => Err(format!("the header has the key {} twice", quoted(key))),
    }
}

/// The value of a field, if it has the right type and no absurd length.
fn field<T: DeserializeOwned>(text: Option<&str>) -> Option<T> {
    text.filter(|text| text.len() <= MAX_FIELD).and_then(|text| serde_json::from_str(text).ok())
}

fn groups(metadata: &str) -> Check<Option<u64>> {
    const KEY: &str = "norm_num_groups";
    if !metadata.starts_with('{') {
        return Err(format!("{METADATA} is not a JSON object"));
    }
    let mut value = None;
    members(metadata, |key, text| if key == KEY { set(&mut value, text, KEY) } else { Ok(()) })?;
    let Some(text) = value else {
        return Ok(None);
    };
    match field::<String>(value).and_then(|text| text.parse().ok()).filter(|n| *n > 0) {
        Some(groups) => Ok(Some(groups)),
        None => Err(format!(
            "{KEY} in the file's metadata is {}, expected a positive whole number as a string",
            quoted(text)
        )),
    }
}

/// The type, shape and bytes of a tensor.
fn fields(entry: &str, data: &Range<u64>) -> Check<(DType, Box<[u64]>, Range<u64>)> {
    if !entry.starts_with('{') {
        return Err("its entry in the header is not a JSON object".into());
    }
    let [mut dtype, mut shape, mut offsets] = [None; 3];
    members(entry, |key, value| match key.as_str() {
        "dtype" => set(&mut dtype, value, &key),
        "shape" => set(&mut shape, value, &key),
        "data_offsets" => set(&mut offsets, value, &key),
        _ => Ok(()),
    })?;
    let dtype = match field::<String>(dtype).as_deref() {
        Some("F16") => DType::F16,
        Some("BF16") => DType::BF16,
        Some("F32") => DType::F32,
        Some(other) => return Err(format!("dtype is {}, expected F16, BF16 or F32", quoted(other))),
        None => return Err("dtype is missing, expected F16, BF16 or F32".into()),
    };
    let numbers = |text, name: &str| {
        field::<Vec<u64>>(text).ok_or_else(|| format!("{name} is missing or not an array of whole numbers"))
    };
    let shape = numbers(shape, "shape")?;
    if shape.len() > MAX_RANK {
        return Err(format!("shape has {} dimensions, expected at most {MAX_RANK}", shape.len()));
    }
    let offsets = numbers(offsets, "data_offsets")?;
    let &[begin, end] = offsets.as_slice() else {
        return Err(format!("data_offsets has {} numbers, expected begin and end", offsets.len()));
    };
    let available = data.end - data.start;
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
    Ok((dtype, shape.into(), data.start + begin..data.start + end))
}

/// Refuses tensors that are there twice, or overlap. Sorts the entries by name.
fn refuse_overlaps(entries: &mut [TensorEntry]) -> Check<()> {
    entries.sort_unstable_by(|one, other| (&one.name, one.file_name()).cmp(&(&other.name, other.file_name())));
    if let Some(pair) = entries.windows(2).find(|pair| pair[0].name == pair[1].name) {
        let (one, other) = (pair[1].file_name(), pair[0].file_name());
        return Err(match one == other {
            true => format!("the header has the key {} twice", quoted(one)),
            false => {
                let (one, other) = (quoted(one), quoted(other));
                format!("tensor {one}: it is also present as {other}, expected one of the two names")
            }
        });
    }
    let mut by_offset: Vec<&TensorEntry> = entries.iter().collect();
    by_offset.sort_unstable_by_key(|entry| (entry.range.start, entry.range.end));
    for pair in by_offset.windows(2) {
        if pair[1].range.start < pair[0].range.end {
            let (one, other) = (quoted(pair[1].file_name()), quoted(pair[0].file_name()));
            return Err(format!("tensor {one}: its data overlap those of tensor {other}, expected separate ones"));
        }
    }
    Ok(())
}
