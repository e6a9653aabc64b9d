//! The header of a safetensors file: eight bytes of length, then JSON with the type, shape and offsets of each tensor.
//! Members are parsed one by one, so that memory stays below four times the text. Knows no model.

use std::fmt;
use std::ops::Range;

use serde_core::Deserializer;
use serde_core::de::{DeserializeOwned, MapAccess, Visitor};
use serde_json::value::RawValue;

use crate::reserve::{self, EXHAUSTED};

/// An error says what is wrong with a file, without the file's name.
pub type Check<T> = std::result::Result<T, String>;

/// The format allows 100 MB. Headers of checkpoints and latents have some 30 KB.
pub const MAX_HEADER: u64 = 16 << 20;
/// Bytes of a field's text. The longest valid one, a shape, has fewer than 200 without spaces.
const MAX_FIELD: usize = 1024;
const MAX_RANK: usize = 8;
/// Those of the header's own length, which come first.
pub const LENGTH_BYTES: u64 = 8;
/// The member that is no tensor.
pub const METADATA: &str = "__metadata__";

/// Text of the file, escaped and shortened for a message.
pub fn quoted(text: &str) -> String {
    const SHOWN: usize = 120;
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{:?}...", &text[..end]),
        None => format!("{text:?}"),
    }
}

/// The header's JSON. `file_length`: of the file; `read` fills a buffer from a place of it.
pub fn text(file_length: u64, mut read: impl FnMut(&mut [u8], u64) -> Check<()>) -> Check<String> {
    let Some(available) = file_length.checked_sub(LENGTH_BYTES) else {
        return Err(format!("the file has {file_length} bytes, too few for a safetensors file"));
    };
    let mut length = [0; LENGTH_BYTES as usize];
    read(&mut length, 0)?;
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
    read(&mut text, LENGTH_BYTES)?;
    let text = String::from_utf8(text).map_err(|e| format!("the header is not UTF-8 text: {e}"))?;
    if text.trim_ascii_start().starts_with('{') {
        return Ok(text);
    }
    Err("the header is not a JSON object of tensors".into())
}

/// Calls `each` with the members of a JSON object, one by one: the key, and the text of the value.
pub fn members<'a>(object: &'a str, mut each: impl FnMut(String, &'a str) -> Check<()>) -> Check<()> {
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
pub fn set<'a>(member: &mut Option<&'a str>, value: &'a str, key: &str) -> Check<()> {
    match member.replace(value) {
        None => Ok(()),
        Some(_) => Err(format!("the header has the key {} twice", quoted(key))),
    }
}

/// The value of a field, if it has the right type and no absurd length.
pub fn field<T: DeserializeOwned>(text: Option<&str>) -> Option<T> {
    text.filter(|text| text.len() <= MAX_FIELD).and_then(|text| serde_json::from_str(text).ok())
}

/// The type, shape and bytes of a tensor. `data`: the part of the file after the header.
pub fn fields(entry: &str, data: &Range<u64>) -> Check<(String, Box<[u64]>, Range<u64>)> {
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
    let dtype = field::<String>(dtype).ok_or("dtype is missing, expected F16, BF16 or F32")?;
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
    let elements = shape.iter().try_fold(1u64, |product, dim| product.checked_mul(*dim));
    let size = element_bytes(&dtype);
    let bytes = elements.and_then(|count| count.checked_mul(size.unwrap_or(1)));
    if bytes.is_none() || size.is_some() && bytes != Some(end - begin) {
        let expected = bytes.map_or("more than can be counted".into(), |b| b.to_string());
        let found = end - begin;
        return Err(format!("it has {found} bytes of data, expected {expected} for shape {shape:?} in {dtype}"));
    }
    Ok((dtype, shape.into(), data.start + begin..data.start + end))
}

/// `None` for a type that this version does not know.
fn element_bytes(dtype: &str) -> Option<u64> {
    Some(match dtype {
        "BOOL" | "U8" | "I8" | "F8_E4M3" | "F8_E5M2" => 1,
        "U16" | "I16" | "F16" | "BF16" => 2,
        "U32" | "I32" | "F32" => 4,
        "U64" | "I64" | "F64" => 8,
        _ => return None,
    })
}
