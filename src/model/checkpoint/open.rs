//! Opens a checkpoint: maps the safetensors file and checks all of it.
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use super::contents::Contents;
use super::file_tensor::FileTensor;
use super::identity::FileIdentity;
use crate::error::{Error, Result};
use crate::ir::DType;
use crate::model::config::Config;

/// An open checkpoint. It has every tensor of the model, with the right shape and finite values.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    identity: FileIdentity,
    pub(super) map: Mmap,
    pub(super) contents: Contents,
}

/// Facts about a checkpoint besides its configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Summary {
    /// All element types in the file.
    pub dtypes: Vec<DType>,
    pub tensors: usize,
    pub parameters: u64,
}

impl Checkpoint {
    pub fn open(path: &Path) -> Result<Checkpoint> {
        let fail = |why: String| Error::Checkpoint(format!("{}: {why}", path.display()));
        let cannot = |what: &str, e: std::io::Error| fail(format!("cannot be {what}: {e}"));
        // Checked before opening, because opening a pipe waits for a writer.
        let metadata = fs::metadata(path).map_err(|e| cannot("opened", e))?;
        if !metadata.is_file() {
            let what = if metadata.is_dir() { "a directory" } else { "not a regular file" };
            return Err(fail(format!("is {what}, expected a safetensors file")));
        }
        let file = File::open(path).map_err(|e| cannot("opened", e))?;
        let metadata = file.metadata().map_err(|e| cannot("read", e))?;
        if metadata.len() == 0 {
            return Err(fail("is empty, expected a safetensors file".into()));
        }
        // SAFETY: the mapping is read-only and private to this struct. If another program changes the file, values
        // change. No code relies on their not changing: offsets and shapes are copies.
        let map = unsafe { Mmap::map(&file) }.map_err(|e| cannot("mapped into memory", e))?;
        let contents = Contents::check(&map).map_err(fail)?;
        Ok(Checkpoint { path: path.into(), identity: FileIdentity::of(&metadata), map, contents })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn config(&self) -> &Config {
        &self.contents.config
    }

    pub fn identity(&self) -> &FileIdentity {
        &self.identity
    }

    /// Fails when the file is no longer the one that was opened.
    pub fn verify_unchanged(&self) -> Result<()> {
        let fail = |why: String| Err(Error::Checkpoint(format!("{}: {why}", self.path.display())));
        match fs::metadata(&self.path) {
            Ok(metadata) if FileIdentity::of(&metadata) == self.identity => Ok(()),
            Ok(_) => fail("has changed since it was opened, expected the same file".into()),
            Err(e) => fail(format!("can no longer be found where it was opened: {e}")),
        }
    }

    pub fn summary(&self) -> Summary {
        let mut summary = Summary { dtypes: Vec::new(), tensors: 0, parameters: 0 };
        for tensor in self.contents.tensors(&self.map) {
            summary.tensors += 1;
            summary.parameters += tensor.elements() as u64;
            if !summary.dtypes.contains(&tensor.dtype) {
                summary.dtypes.push(tensor.dtype);
            }
        }
        summary.dtypes.sort_unstable_by_key(|dtype| dtype.name());
        summary
    }

    /// A tensor by its current name, also if the file has its older name.
    pub fn tensor(&self, name: &str) -> Result<FileTensor<'_>> {
        let unknown = || Error::Internal(format!("{}: the model has no tensor {name:?}", self.path.display()));
        self.contents.tensor(&self.map, name).ok_or_else(unknown)
    }

    /// Reads a whole tensor.
    pub fn read(&self, name: &str, into: &mut [f32]) -> Result<()> {
        let tensor = self.tensor(name)?;
        if tensor.elements() != into.len() {
            let (has, room) = (tensor.elements(), into.len());
            return Err(Error::Internal(format!("tensor {name:?} has {has} values, but the buffer has {room}")));
        }
        tensor.widen(0, into);
        Ok(())
    }
}
