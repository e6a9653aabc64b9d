//! Checks a checkpoint's bytes: header, names, shapes and values.

use std::sync::{Mutex, PoisonError};

use super::file_tensor::FileTensor;
use super::header::{self, CheckpointHeader, TensorEntry};
use super::names::{self, Check, ShapesByName, quoted};
use crate::model::config::Config;
use crate::workers;

/// A checkpoint's configuration and its tensors, sorted by their current names.
#[derive(Debug)]
pub(super) struct Contents {
    pub config: Config,
    tensors: Vec<TensorEntry>,
}

impl Contents {
    pub fn check(file: &[u8]) -> Check<Contents> {
        let CheckpointHeader { entries: mut tensors, groups } = header::parse(file)?;
        let shapes: ShapesByName = tensors.iter().map(|entry| (&*entry.name, &*entry.shape)).collect();
        let config = names::config_of(&shapes, groups)?;
        compare(&mut tensors, &config)?;
        let contents = Contents { config, tensors };
        contents.refuse_non_finite(file)?;
        Ok(contents)
    }

    pub fn tensor<'a>(&'a self, file: &'a [u8], name: &str) -> Option<FileTensor<'a>> {
        find(&self.tensors, name).map(|at| tensor(&self.tensors[at], file))
    }

    pub fn tensors<'a>(&'a self, file: &'a [u8]) -> impl Iterator<Item = FileTensor<'a>> {
        self.tensors.iter().map(|entry| tensor(entry, file))
    }

    /// Tensors with their current names, sorted by name.
    pub fn named<'a>(&'a self, file: &'a [u8]) -> impl Iterator<Item = (&'a str, FileTensor<'a>)> {
        self.tensors.iter().map(|entry| (&*entry.name, tensor(entry, file)))
    }

    fn refuse_non_finite(&self, file: &[u8]) -> Check<()> {
        const PIECE: usize = 1 << 20;
        let entries = &self.tensors;
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
                if let Some(at) = tensor(&entries[index], file).part(first, PIECE).first_non_finite() {
                    // Keep the first, so that the message does not depend on the threads.
                    let mut found = found.lock().unwrap_or_else(PoisonError::into_inner);
                    *found = Some(found.map_or((index, first + at), |other| other.min((index, first + at))));
                }
            },
        );
        match found.into_inner().unwrap_or_else(PoisonError::into_inner) {
            None => Ok(()),
            Some((index, element)) => {
                let (name, tensor) = (quoted(entries[index].file_name()), tensor(&entries[index], file));
                let (value, place) = (tensor.value(element), coordinates(tensor.shape, element));
                Err(format!("tensor {name}: element {element}, at {place:?}, is {value}; expected finite values"))
            }
        }
    }
}

fn tensor<'a>(entry: &'a TensorEntry, file: &'a [u8]) -> FileTensor<'a> {
    FileTensor { dtype: entry.dtype, shape: &entry.shape, bytes: &file[entry.range.clone()] }
}

fn find(tensors: &[TensorEntry], name: &str) -> Option<usize> {
    tensors.binary_search_by(|entry| (*entry.name).cmp(name)).ok()
}

/// Compares the file's tensors with the expected ones, and gives each its expected shape.
fn compare(tensors: &mut [TensorEntry], config: &Config) -> Check<()> {
    let table = names::expected(config);
    for expected in &table {
        let Some(at) = find(tensors, &expected.name) else {
            return Err(format!("tensor {:?} is missing, expected with shape {:?}", expected.name, expected.shape));
        };
        let entry = &mut tensors[at];
        if !names::same_shape(&expected.shape, &entry.shape) {
            let (name, found) = (quoted(entry.file_name()), &entry.shape);
            return Err(format!("tensor {name}: shape is {found:?}, expected {:?}", expected.shape));
        }
        entry.shape = expected.shape.as_slice().into();
    }
    if tensors.len() > table.len() {
        let known: std::collections::HashSet<&str> = table.iter().map(|t| t.name.as_str()).collect();
        if let Some(entry) = tensors.iter().find(|entry| !known.contains(&*entry.name)) {
            let name = quoted(entry.file_name());
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
