//! Synthetic checkpoints for tests.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use half::{bf16, f16};

use super::open::Checkpoint;
use crate::ir::DType;
use crate::model::families::seedvr2::Sizes;
use crate::model::graph::TensorShape;
use crate::testing::Lcg;

#[derive(Clone)]
pub(in crate::model) struct TestTensor {
    pub name: String,
    pub dtype: &'static str,
    pub shape: Vec<u64>,
    pub bytes: Vec<u8>,
}

impl TestTensor {
    pub fn new(name: &str, dtype: DType, shape: &[u64], values: &[f32]) -> TestTensor {
        let (text, bytes) = match dtype {
            DType::F16 => ("F16", values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect()),
            DType::BF16 => ("BF16", values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect()),
            _ => ("F32", values.iter().flat_map(|v| v.to_le_bytes()).collect()),
        };
        TestTensor { name: name.into(), dtype: text, shape: shape.into(), bytes }
    }
}

/// All tensors of a model, with random values.
pub(in crate::model) fn random(config: &Sizes, dtype: DType) -> Vec<TestTensor> {
    let mut random = Lcg(1);
    let tensor = |TensorShape { name, shape }: TensorShape| {
        let values = random.fill(shape.iter().product::<u64>() as usize);
        TestTensor::new(&name, dtype, &shape, &values)
    };
    config.model().tensors().into_iter().map(tensor).collect()
}

/// A file with `groups` in its metadata.
pub(in crate::model) fn write(tensors: &[TestTensor], groups: u64) -> Vec<u8> {
    write_with(tensors, &format!(r#""__metadata__":{{"norm_num_groups":"{groups}"}}"#))
}

/// A file with contiguous tensors, and `more` at the start of its header.
pub(in crate::model) fn write_with(tensors: &[TestTensor], more: &str) -> Vec<u8> {
    let (mut entries, mut at) = (vec![more.to_string()], 0);
    for TestTensor { name, dtype, shape, bytes } in tensors {
        let end = at + bytes.len();
        entries.push(format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{at},{end}]}}"#));
        at = end;
    }
    entries.retain(|entry| !entry.is_empty());
    let data: Vec<u8> = tensors.iter().flat_map(|t| t.bytes.iter().copied()).collect();
    with_header(&format!("{{{}}}", entries.join(",")), &data)
}

pub(in crate::model) fn with_header(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

/// A file in the system's temporary folder, removed when dropped.
pub struct TemporaryFile(pub PathBuf);

impl TemporaryFile {
    pub fn new(bytes: &[u8]) -> TemporaryFile {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("video-vae-{}-{number}.safetensors", std::process::id()));
        std::fs::write(&path, bytes).unwrap();
        TemporaryFile(path)
    }
}

impl Drop for TemporaryFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// An open checkpoint with random values.
pub(in crate::model) fn checkpoint(config: &Sizes, dtype: DType) -> Checkpoint {
    let file = TemporaryFile::new(&write(&random(config, dtype), config.groups));
    Checkpoint::open(&file.0).unwrap()
}

/// Counts the bytes that each thread holds.
struct Counting;

thread_local! {
    static LIVE: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

#[global_allocator]
static COUNTING: Counting = Counting;

// SAFETY: `System` does the work, with the same arguments. The counters allocate nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // Wrapping: a test asks for more than there is.
        LIVE.set(LIVE.get().wrapping_add(layout.size() as isize));
        PEAK.set(PEAK.get().max(LIVE.get()));
        // SAFETY: the caller's promises are those of `System`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        LIVE.set(LIVE.get().wrapping_sub(layout.size() as isize));
        // SAFETY: as in `alloc`.
        unsafe { System.dealloc(block, layout) }
    }
}

/// The result of `work`, and the most bytes that this thread held for it.
pub(in crate::model) fn peak_bytes<R>(work: impl FnOnce() -> R) -> (R, usize) {
    let before = LIVE.get();
    PEAK.set(before);
    let result = work();
    (result, (PEAK.get() - before) as usize)
}
