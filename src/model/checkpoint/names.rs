//! The tensors of a checkpoint by name: the questions that a family asks to find its sizes.

use std::borrow::Cow;

use crate::safetensors::{Check, METADATA, field, members, quoted, set};

/// Shapes under the names that a family has for them, and the metadata as the file has it.
pub struct FileTensors<'a> {
    /// Sorted by name. A map would take twice the memory.
    shapes: Vec<(Cow<'a, str>, &'a [u64])>,
    /// Names of the file's other tensors: of a diffusion model that has the autoencoder beside it.
    pub beside: &'a [Box<str>],
    metadata: Option<&'a str>,
}

impl<'a> FileTensors<'a> {
    pub fn new(
        shapes: impl Iterator<Item = (Cow<'a, str>, &'a [u64])>,
        beside: &'a [Box<str>],
        metadata: Option<&'a str>,
    ) -> FileTensors<'a> {
        let mut shapes: Vec<_> = shapes.collect();
        shapes.sort_unstable();
        FileTensors { shapes, beside, metadata }
    }

    fn find(&self, name: &str) -> Option<&[u64]> {
        let at = self.shapes.binary_search_by(|(found, _)| (**found).cmp(name)).ok();
        at.map(|at| self.shapes[at].1)
    }

    pub fn has(&self, name: &str) -> bool {
        self.find(name).is_some()
    }

    /// One more than the largest N in names that begin with `before`, then N, then `after`.
    pub fn count(&self, before: &str, after: &str, what: &str, most: u64) -> Check<u64> {
        let number = |name: &Cow<str>| -> Option<u64> {
            let rest = name.strip_prefix(before)?;
            let digits = rest.find(|c: char| !c.is_ascii_digit())?;
            rest[digits..].starts_with(after).then(|| rest[..digits].parse().ok())?
        };
        let found = self.shapes.iter().filter_map(|(name, _)| number(name)).max().map_or(0, |n| n.saturating_add(1));
        match found {
            0 => Err(format!(
                "tensor \"{before}0{after}...\" is missing, so this is not a checkpoint of this autoencoder"
            )),
            n if n > most => Err(format!("the names \"{before}N{after}...\" imply {n} {what}, expected 1 to {most}")),
            n => Ok(n),
        }
    }

    pub fn shape(&self, name: &str) -> Check<&[u64]> {
        self.find(name).ok_or_else(|| format!("tensor {name:?} is missing"))
    }

    pub fn dimension(&self, name: &str, axis: usize, what: &str, most: u64) -> Check<u64> {
        let shape = self.shape(name)?;
        match shape.get(axis) {
            Some(size) if (1..=most).contains(size) => Ok(*size),
            Some(size) => Err(format!("tensor {name:?}: shape is {shape:?}, with {size} {what}; expected 1 to {most}")),
            None => Err(format!("tensor {name:?}: shape is {shape:?}, expected more dimensions")),
        }
    }

    /// A positive whole number in the metadata, which has texts only.
    pub fn metadata_number(&self, key: &str) -> Check<Option<u64>> {
        let Some(metadata) = self.metadata else { return Ok(None) };
        if !metadata.starts_with('{') {
            return Err(format!("{METADATA} is not a JSON object"));
        }
        let mut value = None;
        members(metadata, |found, text| if found == key { set(&mut value, text, key) } else { Ok(()) })?;
        let Some(text) = value else { return Ok(None) };
        match field::<String>(value).and_then(|text| text.parse().ok()).filter(|n| *n > 0) {
            Some(number) => Ok(Some(number)),
            None => Err(format!(
                "{key} in the file's metadata is {}, expected a positive whole number as a string",
                quoted(text)
            )),
        }
    }
}

/// Whether a tensor of shape `expected` may have shape `found` in a file. Some files have matrices as convolutions with
/// kernel 1, and some have no axis of time where it would be 1.
pub(super) fn same_shape(expected: &[u64], found: &[u64]) -> bool {
    let (most, least) = (expected.len().max(found.len()), expected.len().min(found.len()));
    let kernel = |shape: &[u64]| shape[2..].iter().copied().filter(|dim| *dim != 1).collect::<Vec<u64>>();
    let has_other_axes = most <= 5 && least >= 2 && most > least;
    found == expected || has_other_axes && found[..2] == expected[..2] && kernel(found) == kernel(expected)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_of_length_one_may_be_missing_behind_the_channels() {
        assert!(same_shape(&[4, 3, 1, 3, 3], &[4, 3, 3, 3]) && same_shape(&[4, 1, 1, 1], &[4, 1, 1]));
        assert!(!same_shape(&[4, 3, 3, 3, 3], &[4, 3, 3, 3]) && !same_shape(&[4, 3, 1, 3], &[4, 3, 3, 1]));
        assert!(same_shape(&[4, 4], &[4, 4, 1, 1]) && same_shape(&[4, 4], &[4, 4, 1, 1, 1]));
        assert!(!same_shape(&[4, 4], &[4, 4, 1, 2]) && !same_shape(&[4, 4], &[4, 4, 1, 1, 1, 1]));
        assert!(!same_shape(&[4], &[4, 1]) && !same_shape(&[4, 4], &[4]) && !same_shape(&[4, 4], &[]));
    }
}
