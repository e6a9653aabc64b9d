//! Checks a checkpoint's bytes: header, names, shapes and values.

use std::sync::Arc;

use super::file_tensor;
use super::header::{self, TensorEntry};
use super::names::{self, FileTensors};
use super::source::{PIECE, Source};
use crate::model::families::{FAMILIES, Family, Model};
use crate::model::graph::TensorShape;
use crate::safetensors::{Check, quoted};
use crate::thread_pool;

/// A checkpoint's model and its tensors, sorted by the names that its graphs have for them.
#[derive(Debug)]
pub(super) struct Contents {
    pub model: Arc<Model>,
    tensors: Vec<TensorEntry>,
}

impl Contents {
    /// `known`: the model that the tensors must be of; `None` finds it.
    pub fn check(file: &Source, known: Option<Arc<Model>>) -> Check<Contents> {
        let contents = header::read(file, |mut tensors, metadata| {
            let model = match known {
                Some(model) => {
                    header::rename(&mut tensors, model.family.canonical)?;
                    model
                }
                None => Arc::new(recognise(&mut tensors, metadata)?),
            };
            compare(&mut tensors, &model)?;
            Ok(Contents { model, tensors })
        })?;
        contents.refuse_non_finite(file)?;
        Ok(contents)
    }

    pub fn tensor(&self, name: &str) -> Option<&TensorEntry> {
        find(&self.tensors, name).map(|at| &self.tensors[at])
    }

    /// Sorted by name.
    pub fn tensors(&self) -> &[TensorEntry] {
        &self.tensors
    }

    fn refuse_non_finite(&self, file: &Source) -> Check<()> {
        const UNIT: u64 = 4 << 20;
        let mut units = Vec::new();
        let mut elements = 0;
        for (index, entry) in self.tensors.iter().enumerate() {
            elements += entry.elements();
            units.extend(entry.range.clone().step_by(UNIT as usize).map(|start| (index, start)));
        }
        let found = thread_pool::map_on(
            thread_pool::threads_for(elements as usize),
            units,
            || Box::new([0; PIECE]),
            |buffer, (index, start)| {
                let TensorEntry { dtype, range, .. } = &self.tensors[index];
                let mut first = None;
                let read = file.pieces(buffer, start..range.end.min(start + UNIT), |at, piece| {
                    let found = file_tensor::first_non_finite(*dtype, piece);
                    let place = |element| (at - range.start) / dtype.bytes() + element as u64;
                    first = first.or(found.map(|(element, value)| (index, place(element), value)));
                });
                read.map(|()| first)
            },
        );
        // The first one, so that the message does not depend on the threads.
        for found in found {
            if let Some((index, element, value)) = found? {
                let entry = &self.tensors[index];
                let (name, place) = (quoted(entry.file_name()), coordinates(&entry.shape, element));
                return Err(format!(
                    "tensor {name}: element {element}, at {place:?}, is {value}; expected finite values"
                ));
            }
        }
        Ok(())
    }
}

fn find(tensors: &[TensorEntry], name: &str) -> Option<usize> {
    tensors.binary_search_by(|entry| (*entry.name).cmp(name)).ok()
}

/// The model that the tensors are of. They get the names that its graphs have for them.
fn recognise(tensors: &mut [TensorEntry], metadata: Option<&str>) -> Check<Model> {
    let of_family = |family: &Family| {
        let shapes = tensors.iter().map(|entry| ((family.canonical)(&entry.name), &*entry.shape)).collect();
        (family.model)(&FileTensors { shapes, metadata })
    };
    let mut refused = None;
    for family in FAMILIES {
        match of_family(family) {
            Ok(model) => return header::rename(tensors, family.canonical).map(|()| model),
            Err(why) => refused = refused.or(Some(why)),
        }
    }
    Err(refused.unwrap_or_default())
}

/// Compares the file's tensors with the expected ones, and gives each its expected shape.
fn compare(tensors: &mut [TensorEntry], model: &Model) -> Check<()> {
    let table = model.tensors();
    for TensorShape { name, shape } in &table {
        let Some(at) = find(tensors, name) else {
            return Err(format!("tensor {name:?} is missing, expected with shape {shape:?}"));
        };
        let entry = &mut tensors[at];
        if !names::same_shape(shape, &entry.shape) {
            let (name, found) = (quoted(entry.file_name()), &entry.shape);
            return Err(format!("tensor {name}: shape is {found:?}, expected {shape:?}"));
        }
        entry.shape = shape.as_slice().into();
    }
    if tensors.len() > table.len() {
        let known: std::collections::HashSet<&str> = table.iter().map(|tensor| tensor.name.as_str()).collect();
        if let Some(entry) = tensors.iter().find(|entry| !known.contains(&*entry.name)) {
            let name = quoted(entry.file_name());
            return Err(format!("tensor {name} is not part of this model, expected only its {} tensors", table.len()));
        }
    }
    Ok(())
}

fn coordinates(shape: &[u64], element: u64) -> Vec<u64> {
    let mut size: u64 = shape.iter().product();
    let index = |dim: &u64| {
        let (of_all, within) = (element % size, size / dim);
        size = within;
        of_all / within
    };
    shape.iter().map(index).collect()
}
