//! Checks a checkpoint's bytes: header, names, shapes and values.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use super::file_tensor::FileTensor;
use super::header::{self, TensorEntry};
use super::names::{self, Check, ShapesByName, quoted};
use crate::model::config::Config;
use crate::workers;

/// A checkpoint's configuration and its tensors, by their current names.
#[derive(Debug)]
pub(super) struct Contents {
    pub config: Config,
    tensors: BTreeMap<String, TensorEntry>,
}

impl Contents {
    pub fn check(file: &[u8]) -> Check<Contents> {
        let header = header::parse(file)?;
        let mut tensors: BTreeMap<String, TensorEntry> = BTreeMap::new();
        for entry in header.entries {
            let name = names::canonical(&entry.name).into_owned();
            if let Some(other) = tensors.get(&name) {
                let (one, other) = (quoted(&entry.name), quoted(&other.name));
                return Err(format!("tensor {one}: it is also present as {other}, expected one of the two names"));
            }
            tensors.insert(name, entry);
        }
        let shapes: ShapesByName =
            tensors.iter().map(|(name, entry)| (name.as_str(), entry.shape.as_slice())).collect();
        let config = names::config_of(&shapes, header.groups)?;
        compare(&mut tensors, &config)?;
        let contents = Contents { config, tensors };
        contents.refuse_non_finite(file)?;
        Ok(contents)
    }

    pub fn tensor<'a>(&'a self, file: &'a [u8], name: &str) -> Option<FileTensor<'a>> {
        self.tensors.get(name).map(|entry| tensor(entry, file))
    }

    pub fn tensors<'a>(&'a self, file: &'a [u8]) -> impl Iterator<Item = FileTensor<'a>> {
        self.tensors.values().map(|entry| tensor(entry, file))
    }

    /// Tensors with their current names, sorted by name.
    pub fn named<'a>(&'a self, file: &'a [u8]) -> impl Iterator<Item = (&'a str, FileTensor<'a>)> {
        self.tensors.iter().map(|(name, entry)| (name.as_str(), tensor(entry, file)))
    }

    fn refuse_non_finite(&self, file: &[u8]) -> Check<()> {
        const PIECE: usize = 1 << 20;
        let entries: Vec<&TensorEntry> = self.tensors.values().collect();
        let mut pieces = Vec::new();
        let mut elements = 0;
        for (index, entry) in entries.iter().enumerate() {
            let tensor = tensor(entry, file);
            elements += tensor.elements();
            pieces.extend((0..tensor.elements()).step_by(PIECE).map(|first| (index, first)));
        }
        let found: Mutex<Option<(usize, usize)>> = Mutex::new(None);
        workers::for_each(
            workers::threads_for(elements),
            pieces,
            || (),
            |(), (index, first)| {
                if let Some(at) = tensor(entries[index], file).part(first, PIECE).first_non_finite() {
                    // Keep the first, so that the message does not depend on the threads.
                    let mut found = found.lock().unwrap_or_else(PoisonError::into_inner);
                    *found = Some(found.map_or((index, first + at), |other| other.min((index, first + at))));
                }
            },
        );
        match found.into_inner().unwrap_or_else(PoisonError::into_inner) {
            None => Ok(()),
            Some((index, element)) => {
                let (name, tensor) = (quoted(&entries[index].name), tensor(entries[index], file));
                let (value, place) = (tensor.value(element), coordinates(tensor.shape, element));
                Err(format!("tensor {name}: element {element}, at {place:?}, is {value}; expected finite values"))
            }
        }
    }
}

fn tensor<'a>(entry: &'a TensorEntry, file: &'a [u8]) -> FileTensor<'a> {
    FileTensor { dtype: entry.dtype, shape: &entry.shape, bytes: &file[entry.range.clone()] }
}

/// Compares the file's tensors with the expected ones, and gives each its expected shape.
fn compare(tensors: &mut BTreeMap<String, TensorEntry>, config: &Config) -> Check<()> {
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
            return Err(format!("tensor {name} is not part of this model, expected only its {} tensors", table.len()));
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
