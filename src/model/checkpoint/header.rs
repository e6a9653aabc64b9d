//! The tensors that a checkpoint's header names: floats under current or older names, each once, none over another.

use std::borrow::Cow;
use std::ops::Range;

use super::names;
use super::source::Source;
use crate::ir::DType;
use crate::reserve::{self, EXHAUSTED};
use crate::safetensors::{Check, LENGTH_BYTES, METADATA, field, fields, members, quoted, set, text};

/// The largest configuration has about 3,000.
pub(super) const MAX_TENSORS: usize = 65_536;

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
    let text = &text(file.length, |into, at| file.read(into, at))?;
    let data = LENGTH_BYTES + text.len() as u64..file.length;
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
        let fields = fields(value, &data).and_then(|(dtype, shape, range)| Ok((float(&dtype)?, shape, range)));
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

fn float(dtype: &str) -> Check<DType> {
    match dtype {
        "F16" => Ok(DType::F16),
        "BF16" => Ok(DType::BF16),
        "F32" => Ok(DType::F32),
        other => Err(format!("dtype is {}, expected F16, BF16 or F32", quoted(other))),
    }
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
