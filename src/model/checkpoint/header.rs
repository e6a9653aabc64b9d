//! The tensors that a checkpoint's header names: floats under current or older names, each once, none over another.

use std::borrow::Cow;
use std::ops::Range;

use super::source::Source;
use crate::ir::DType;
use crate::reserve::{self, EXHAUSTED};
use crate::safetensors::{Check, LENGTH_BYTES, METADATA, fields, members, quoted, set, text};

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

/// Reads the header and parses it. `then` gets its tensors under the names of the file, and its metadata.
pub(super) fn read<R>(file: &Source, then: impl FnOnce(Vec<TensorEntry>, Option<&str>) -> Check<R>) -> Check<R> {
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
        entries.push(TensorEntry { name: name.into(), older_name: None, dtype, shape, range });
        Ok(())
    })?;
    refuse_repeated(&mut entries)?;
    refuse_overlaps(&entries)?;
    then(entries, metadata)
}

fn float(dtype: &str) -> Check<DType> {
    match dtype {
        "F16" => Ok(DType::F16),
        "BF16" => Ok(DType::BF16),
        "F32" => Ok(DType::F32),
        other => Err(format!("dtype is {}, expected F16, BF16 or F32", quoted(other))),
    }
}

/// Gives tensors the names that `canonical` has for them. Refuses a name that is there twice.
pub(super) fn rename(entries: &mut [TensorEntry], canonical: fn(&str) -> Cow<'_, str>) -> Check<()> {
    for entry in entries.iter_mut() {
        let current: Option<Box<str>> = match canonical(&entry.name) {
            Cow::Owned(current) => Some(current.into()),
            Cow::Borrowed(_) => None,
        };
        if let Some(current) = current {
            entry.older_name = Some(std::mem::replace(&mut entry.name, current));
        }
    }
    refuse_repeated(entries)
}

/// Refuses a name that is there twice. Sorts the entries by name.
fn refuse_repeated(entries: &mut [TensorEntry]) -> Check<()> {
    entries.sort_unstable_by(|one, other| (&one.name, one.file_name()).cmp(&(&other.name, other.file_name())));
    let Some(pair) = entries.windows(2).find(|pair| pair[0].name == pair[1].name) else { return Ok(()) };
    let (one, other) = (pair[1].file_name(), pair[0].file_name());
    Err(match one == other {
        true => format!("the header has the key {} twice", quoted(one)),
        false => {
            let (one, other) = (quoted(one), quoted(other));
            format!("tensor {one}: it is also present as {other}, expected one of the two names")
        }
    })
}

/// Refuses tensors that overlap.
fn refuse_overlaps(entries: &[TensorEntry]) -> Check<()> {
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
