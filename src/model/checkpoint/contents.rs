//! Checks a checkpoint's bytes: header, names, shapes and values.

use std::sync::Arc;

use super::file_tensor;
use super::header::{self, TensorEntry};
use super::names::{self, FileTensors};
use super::source::{PIECE, Source};
use crate::checksum::Checksum;
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

/// Told how many bytes are checked, and how many there are. `true` ends it.
pub type Watch<'a> = dyn FnMut(u64, u64) -> bool + 'a;

/// Bytes that are read as one task.
const UNIT: u64 = 8 << 20;
/// Tasks between two looks at the watch, for each thread: about 10 ms.
const UNITS_AT_A_TIME: usize = 4;

impl Contents {
    /// `known`: the model that the tensors must be of; `None` finds it. Reads no values.
    pub fn of_header(file: &Source, known: Option<Arc<Model>>) -> Check<Contents> {
        header::read(file, |mut tensors, metadata| {
            let model = match known {
                Some(model) => {
                    header::rename(&mut tensors, model.family.canonical)?;
                    model
                }
                None => Arc::new(recognise(&mut tensors, metadata)?),
            };
            compare(&mut tensors, &model)?;
            Ok(Contents { model, tensors })
        })
    }

    pub fn tensor(&self, name: &str) -> Option<&TensorEntry> {
        find(&self.tensors, name).map(|at| &self.tensors[at])
    }

    /// A checksum of names, types, shapes and values, and of the number of groups, which is in no tensor. It is the same
    /// on every machine and for every file name. Fails if a value is not finite, or if `watch` ends it.
    pub fn read_values(&self, file: &Source, watch: &mut Watch) -> Check<u64> {
        let mut units = Vec::new();
        for (tensor, entry) in self.tensors.iter().enumerate() {
            units.extend(entry.range.clone().step_by(UNIT as usize).map(|start| Unit { tensor, start }));
        }
        let total: u64 = self.tensors.iter().map(|entry| entry.range.end - entry.range.start).sum();
        let elements: u64 = self.tensors.iter().map(TensorEntry::elements).sum();
        let threads = thread_pool::threads_for(elements as usize);
        let (mut all, mut done) = (self.header_checksum(), 0);
        for units in units.chunks(threads * UNITS_AT_A_TIME) {
            let read = |buffer: &mut Box<[u8; PIECE]>, unit: &Unit| self.read_unit(file, buffer, unit);
            let read = thread_pool::map_on(threads, units.iter().collect(), || Box::new([0; PIECE]), read);
            // In order, so that neither message nor checksum depends on the threads.
            for unit in read {
                let (bytes, sum) = unit?;
                all.add(&sum.to_le_bytes());
                done += bytes;
            }
            if watch(done, total) {
                return Err("was not checked to its end".into());
            }
        }
        Ok(all.value())
    }

    /// The bytes of a part of a tensor, and their checksum.
    fn read_unit(&self, file: &Source, buffer: &mut [u8; PIECE], unit: &Unit) -> Check<(u64, u64)> {
        let entry = &self.tensors[unit.tensor];
        let TensorEntry { dtype, range, .. } = entry;
        let part = unit.start..range.end.min(unit.start + UNIT);
        let (mut first, mut sum) = (None, Checksum::default());
        file.pieces(buffer, part.clone(), |at, piece| {
            let found = file_tensor::first_non_finite(*dtype, piece);
            let place = |element| (at - range.start) / dtype.bytes() + element as u64;
            first = first.or(found.map(|(element, value)| (place(element), value)));
            sum.add(piece);
        })?;
        let Some((element, value)) = first else { return Ok((part.end - part.start, sum.value())) };
        let (name, place) = (quoted(entry.file_name()), coordinates(&entry.shape, element));
        Err(format!("tensor {name}: element {element}, at {place:?}, is {value}; expected finite values"))
    }

    fn header_checksum(&self) -> Checksum {
        let mut all = Checksum::default();
        all.add(&self.model.encoder.norm_groups().unwrap_or(0).to_le_bytes());
        for TensorEntry { name, dtype, shape, .. } in &self.tensors {
            all.add(name.as_bytes());
            all.add(dtype.name().as_bytes());
            shape.iter().for_each(|n| all.add(&n.to_le_bytes()));
        }
        all
    }
}

/// The part of a tensor that begins at this byte of the file.
struct Unit {
    tensor: usize,
    start: u64,
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
