//! All that is checked about a checkpoint's bytes.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use super::Stored;
use super::header::{self, Entry};
use crate::model::config::Config;
use crate::model::names::{self, Check, Shapes, quoted};
use crate::workers;

/// A checkpoint's configuration and where its tensors lie, by their names of today.
#[derive(Debug)]
pub(super) struct Contents {
    pub config: Config,
    tensors: BTreeMap<String, Entry>,
}

impl Contents {
    pub fn check(file: &[u8]) -> Check<Contents> {
        let header = header::parse(file)?;
        let mut tensors: BTreeMap<String, Entry> = BTreeMap::new();
        for entry in header.entries {
            let name = names::canonical(&entry.name).into_owned();
            if let Some(other) = tensors.get(&name) {
                let (one, other) = (quoted(&entry.name), quoted(&other.name));
                return Err(format!("tensor {one}: it is there as {other} too, expected one of the two names"));
            }
            tensors.insert(name, entry);
        }
        let shapes: Shapes = tensors.iter().map(|(name, entry)| (name.as_str(), entry.shape.as_slice())).collect();
        let config = names::config_of(&shapes, header.groups)?;
        compare(&mut tensors, &config)?;
        let contents = Contents { config, tensors };
        contents.refuse_non_finite(file)?;
        Ok(contents)
    }

    pub fn tensor<'a>(&'a self, file: &'a [u8], name: &str) -> Option<Stored<'a>> {
        self.tensors.get(name).map(|entry| stored(entry, file))
    }

    pub fn tensors<'a>(&'a self, file: &'a [u8]) -> impl Iterator<Item = Stored<'a>> {
        self.tensors.values().map(|entry| stored(entry, file))
    }

    /// With their names of today, in the order of these.
    pub fn named<'a>(&'a self, file: &'a [u8]) -> impl Iterator<Item = (&'a str, Stored<'a>)> {
        self.tensors.iter().map(|(name, entry)| (name.as_str(), stored(entry, file)))
    }

    fn refuse_non_finite(&self, file: &[u8]) -> Check<()> {
        const PIECE: usize = 1 << 20;
        let entries: Vec<&Entry> = self.tensors.values().collect();
        let mut pieces = Vec::new();
        let mut elements = 0;
        for (index, entry) in entries.iter().enumerate() {
            let tensor = stored(entry, file);
            elements += tensor.elements();
            pieces.extend((0..tensor.elements()).step_by(PIECE).map(|first| (index, first)));
        }
        let found: Mutex<Option<(usize, usize)>> = Mutex::new(None);
        workers::for_each(
            workers::threads_for(elements),
            pieces,
            || (),
            |(), (index, first)| {
                if let Some(at) = stored(entries[index], file).part(first, PIECE).first_non_finite() {
                    // Of several the first, so that the message does not depend on the threads.
                    let mut found = found.lock().unwrap_or_else(PoisonError::into_inner);
                    *found = Some(found.map_or((index, first + at), |other| other.min((index, first + at))));
                }
            },
        );
        match found.into_inner().unwrap_or_else(PoisonError::into_inner) {
            None => Ok(()),
            Some((index, element)) => {
                let (name, tensor) = (quoted(&entries[index].name), stored(entries[index], file));
                let (value, place) = (tensor.value(element), coordinates(tensor.shape, element));
                Err(format!("tensor {name}: element {element}, at {place:?}, is {value}; expected finite values"))
            }
        }
    }
}

fn stored<'a>(entry: &'a Entry, file: &'a [u8]) -> Stored<'a> {
    Stored { dtype: entry.dtype, shape: &entry.shape, bytes: &file[entry.range.clone()] }
}

/// Compares what there is with what there has to be, and gives every tensor the shape it is expected to have.
fn compare(tensors: &mut BTreeMap<String, Entry>, config: &Config) -> Check<()> {
    let table = names::expected(config);
    for expected in &table {
        let Some(entry) = tensors.get_mut(&expected.name) else {
            return Err(format!("tensor {:?} is missing, expected with shape {:?}", expected.name, expected.shape));
        };
        if !names::same_shape(&expected.shape, &entry.shape) {
            let (name, found) = (quoted(&entry.name), &entry.shape);
            return Err(format!("tensor {name}: shape is {found:?}, expected {:?}", expected.shape));
        }
        entry.shape.clone_from(&expected.shape);
    }
    if tensors.len() > table.len() {
        let known: std::collections::HashSet<&str> = table.iter().map(|t| t.name.as_str()).collect();
        if let Some((_, entry)) = tensors.iter().find(|(name, _)| !known.contains(name.as_str())) {
            let name = quoted(&entry.name);
            return Err(format!("tensor {name} is no part of this model, expected its {} tensors only", table.len()));
        }
    }
    Ok(())
}

fn coordinates(shape: &[u64], element: usize) -> Vec<u64> {
    let mut rest = element as u64;
    let mut place: Vec<u64> = shape
        .iter()
        .rev()
        .map(|dim| {
            let index = rest % dim;
            rest /= dim;
            index
        })
        .collect();
    place.reverse();
    place
}
