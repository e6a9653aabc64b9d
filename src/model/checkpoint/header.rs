//! The tensors that a checkpoint's header names: each once, none over another. Other tensors than the autoencoder's may
//! be of any type.

use std::borrow::Cow;
use std::ops::Range;

use super::source::Source;
use crate::ir::DType;
use crate::model::families::{Family, PREFIXES};
use crate::reserve::{self, EXHAUSTED};
use crate::safetensors::{Check, LENGTH_BYTES, METADATA, fields, members, quoted, set, text};

/// The largest configuration has about 3,000.
pub(super) const MAX_TENSORS: usize = 65_536;

/// A tensor's entry in the header.
#[derive(Debug)]
pub(super) struct HeaderEntry {
    /// The name that a family's graphs have for it, once that is known.
    pub name: Box<str>,
    /// The name in the file, if it is another.
    other_name: Option<Box<str>>,
    pub dtype: Box<str>,
    pub shape: Box<[u64]>,
    /// Its values' bytes in the file.
    pub range: Range<u64>,
}

impl HeaderEntry {
    pub fn file_name(&self) -> &str {
        self.other_name.as_deref().unwrap_or(&self.name)
    }

    fn rename(&mut self, name: Box<str>) {
        let before = std::mem::replace(&mut self.name, name);
        self.other_name.get_or_insert(before);
    }

    /// The type of its values, which must be floats.
    pub fn float(&self) -> Check<DType> {
        match &*self.dtype {
            "F16" => Ok(DType::F16),
            "BF16" => Ok(DType::BF16),
            "F32" => Ok(DType::F32),
            other => {
                let (name, other) = (quoted(self.file_name()), quoted(other));
                Err(format!("tensor {name}: dtype is {other}, expected F16, BF16 or F32"))
            }
        }
    }
}

/// Reads the header and parses it. `then` gets its tensors under the names of the file, and its metadata.
pub(super) fn read<R>(file: &Source, then: impl FnOnce(Vec<HeaderEntry>, Option<&str>) -> Check<R>) -> Check<R> {
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
        let fields = fields(value, &data).map_err(|why| format!("tensor {}: {why}", quoted(&name)));
        let (dtype, shape, range) = fields?;
        entries.push(HeaderEntry { name: name.into(), other_name: None, dtype: dtype.into(), shape, range });
        Ok(())
    })?;
    refuse_repeated(&mut entries)?;
    refuse_overlaps(&entries)?;
    then(entries, metadata)
}

/// Keeps the tensors of the autoencoder, without the prefix that a whole diffusion model's checkpoint has before their
/// names. Returns the names of the others.
pub(super) fn split(entries: &mut Vec<HeaderEntry>) -> Vec<Box<str>> {
    let is_there = |prefix: &&&str| entries.iter().any(|entry| entry.name.starts_with(**prefix));
    let Some(prefix) = PREFIXES.iter().find(is_there) else { return Vec::new() };
    let outside = |entry: &mut HeaderEntry| !entry.name.starts_with(prefix);
    let others = entries.extract_if(.., outside).map(|entry| entry.name).collect();
    entries.iter_mut().for_each(|entry| entry.rename(entry.name[prefix.len()..].into()));
    others
}

/// Gives tensors the names that a family has for them, and drops those that it does not need. Refuses a name that is
/// there twice.
pub(super) fn rename(entries: &mut Vec<HeaderEntry>, family: &Family) -> Check<()> {
    let names: Vec<&str> = entries.iter().map(|entry| &*entry.name).collect();
    let renamed = |name: Cow<str>| if let Cow::Owned(name) = name { Some(name.into_boxed_str()) } else { None };
    let renamed: Vec<Option<Box<str>>> = (family.canonical)(&names).into_iter().map(renamed).collect();
    for (entry, name) in entries.iter_mut().zip(renamed) {
        name.into_iter().for_each(|name| entry.rename(name));
    }
    entries.retain(|entry| !(family.is_unread)(&entry.name));
    refuse_repeated(entries)
}

/// Refuses a name that is there twice. Sorts the entries by name.
fn refuse_repeated(entries: &mut [HeaderEntry]) -> Check<()> {
    entries.sort_unstable_by(|one, other| (&one.name, one.file_name()).cmp(&(&other.name, other.file_name())));
    let Some(pair) = entries.windows(2).find(|pair| pair[0].name == pair[1].name) else { return Ok(()) };
    let (one, other) = (pair[1].file_name(), pair[0].file_name());
    if one == other {
        return Err(format!("the header has the key {} twice", quoted(one)));
    }
    let (one, other) = (quoted(one), quoted(other));
    Err(format!("tensor {one}: it is also present as {other}, expected one of the two names"))
}

/// Refuses tensors that overlap.
fn refuse_overlaps(entries: &[HeaderEntry]) -> Check<()> {
    let mut by_offset: Vec<&HeaderEntry> = entries.iter().collect();
    by_offset.sort_unstable_by_key(|entry| (entry.range.start, entry.range.end));
    for pair in by_offset.windows(2) {
        if pair[1].range.start < pair[0].range.end {
            let (one, other) = (quoted(pair[1].file_name()), quoted(pair[0].file_name()));
            return Err(format!("tensor {one}: its data overlap those of tensor {other}, expected separate ones"));
        }
    }
    Ok(())
}
