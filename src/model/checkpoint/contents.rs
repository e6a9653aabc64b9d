//! Checks a checkpoint's bytes: header, names, shapes and values.

use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use super::file_tensor;
use super::header::{self, HeaderEntry};
use super::names::{self, FileTensors};
use super::source::{PIECE, Source};
use crate::checksum::Checksum;
use crate::ir::{DType, Norm};
use crate::model::families::{FAMILIES, Family, Model};
use crate::model::graph::TensorShape;
use crate::safetensors::{Check, quoted};
use crate::thread_pool;

/// A tensor of the model in the file.
#[derive(Debug)]
pub(super) struct TensorEntry {
    /// The name that the model's graphs have for it.
    pub name: Box<str>,
    file_name: Box<str>,
    pub dtype: DType,
    pub shape: Box<[u64]>,
    /// Its values' bytes in the file.
    pub range: Range<u64>,
}

impl TensorEntry {
    fn elements(&self) -> u64 {
        self.shape.iter().product()
    }
}

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
            let beside = header::split(&mut tensors);
            let family = known.as_ref().map_or_else(|| nearest(&tensors), |model| model.family);
            let unfit = |why: String| format!("{why}; the nearest family of autoencoders is {}", family.name);
            let model = match known {
                Some(model) => Ok(model),
                None => recognise(&tensors, &beside, metadata, family).map(Arc::new),
            };
            let model = model.map_err(unfit)?;
            header::rename(&mut tensors, family)?;
            Ok(Contents { tensors: compare(tensors, &model).map_err(unfit)?, model })
        })
    }

    pub fn tensor(&self, name: &str) -> Option<&TensorEntry> {
        let at = self.tensors.binary_search_by(|entry| (*entry.name).cmp(name)).ok();
        at.map(|at| &self.tensors[at])
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
        let (name, place) = (quoted(&entry.file_name), coordinates(&entry.shape, element));
        Err(format!("tensor {name}: element {element}, at {place:?}, is {value}; expected finite values"))
    }

    fn header_checksum(&self) -> Checksum {
        let mut all = Checksum::default();
        all.add(&self.model.encoder.norm().map_or(0, Norm::groups).to_le_bytes());
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

fn canonical<'a>(tensors: &'a [HeaderEntry], family: &Family) -> Vec<Cow<'a, str>> {
    (family.canonical)(&tensors.iter().map(|entry| &*entry.name).collect::<Vec<_>>())
}

/// The family that knows most of the tensors, by their names and numbers of axes.
fn nearest(tensors: &[HeaderEntry]) -> &'static Family {
    let known_tensors = |family: &&&Family| {
        let published = family.published.iter().flat_map(|published| (published.model)().tensors());
        let known: HashMap<String, usize> = published.map(|tensor| (tensor.name, tensor.shape.len())).collect();
        // Matrices may be convolutions with kernel 1.
        let fits = |axes: &usize, entry: &HeaderEntry| *axes == 2 || *axes == entry.shape.len();
        let names = canonical(tensors, family).into_iter().zip(tensors);
        names.filter(|(name, entry)| known.get(&**name).is_some_and(|axes| fits(axes, entry))).count()
    };
    FAMILIES.iter().rev().max_by_key(known_tensors).expect("there are families")
}

/// The model of a family that the tensors are of.
fn recognise(
    tensors: &[HeaderEntry],
    beside: &[Box<str>],
    metadata: Option<&str>,
    family: &'static Family,
) -> Check<Model> {
    let shapes = canonical(tensors, family).into_iter().zip(tensors.iter().map(|entry| &*entry.shape));
    (family.model)(&FileTensors::new(shapes, beside, metadata))
}

/// The model's tensors among those of the file, which may have no others.
fn compare(tensors: Vec<HeaderEntry>, model: &Model) -> Check<Vec<TensorEntry>> {
    let mut expected = model.tensors();
    expected.sort_unstable_by(|one, other| one.name.cmp(&other.name));
    let find = |name: &str| tensors.binary_search_by(|entry| (*entry.name).cmp(name)).ok();
    let mut found = Vec::with_capacity(expected.len());
    for TensorShape { name, shape } in &expected {
        let Some(entry) = find(name).map(|at| &tensors[at]) else {
            return Err(format!("tensor {name:?} is missing, expected with shape {shape:?}"));
        };
        if !names::same_shape(shape, &entry.shape) {
            let (name, found) = (quoted(entry.file_name()), &entry.shape);
            return Err(format!("tensor {name}: shape is {found:?}, expected {shape:?}"));
        }
        found.push(TensorEntry {
            name: name.as_str().into(),
            file_name: entry.file_name().into(),
            dtype: entry.float()?,
            shape: shape.as_slice().into(),
            range: entry.range.clone(),
        });
    }
    let is_known = |entry: &HeaderEntry| expected.binary_search_by(|tensor| (*tensor.name).cmp(&entry.name)).is_ok();
    match tensors.iter().find(|entry| !is_known(entry)) {
        None => Ok(found),
        Some(entry) => {
            let (name, count) = (quoted(entry.file_name()), expected.len());
            Err(format!("tensor {name} is not part of this model, expected only its {count} tensors"))
        }
    }
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
