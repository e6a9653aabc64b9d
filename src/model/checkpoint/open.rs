//! Reads a checkpoint: a safetensors file, mapped into memory and checked as a whole before anything uses it.
//!
//! After [`Checkpoint::open`] every tensor of the model is known to be there, with the right shape and finite values,
//! so nothing later has to ask again.

mod contents;
mod fingerprint;
mod header;
mod identity;
mod keys;
mod stored;
#[cfg(test)]
pub(super) mod testing;
#[cfg(test)]
mod tests;

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use super::config::Config;
use crate::error::{Error, Result};
use crate::tensor::DType;
use contents::Contents;
pub use fingerprint::Fingerprint;
pub use identity::FileIdentity;
pub use stored::Stored;

/// An open checkpoint. The file is mapped for as long as this lives.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    identity: FileIdentity,
    map: Mmap,
    contents: Contents,
}

/// What there is to tell about a checkpoint besides its configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Summary {
    /// The element types that occur.
    pub dtypes: Vec<DType>,
    pub tensors: usize,
    pub parameters: u64,
}

impl Checkpoint {
    pub fn open(path: &Path) -> Result<Checkpoint> {
        let fail = |why: String| Error::Checkpoint(format!("{}: {why}", path.display()));
        let cannot = |what: &str, e: std::io::Error| fail(format!("cannot be {what}: {e}"));
        // Asked before opening, because opening a pipe would wait for somebody to write to it.
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
        // SAFETY: the mapping is read-only and private to this struct. Should another program change the file under
        // it, values change, which no code here relies on not happening: offsets and shapes were copied out of it.
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

    /// A tensor by its name of today, whatever the file calls it.
    pub fn tensor(&self, name: &str) -> Result<Stored<'_>> {
        let unknown = || Error::Internal(format!("{}: tensor {name:?} was asked for", self.path.display()));
        self.contents.tensor(&self.map, name).ok_or_else(unknown)
    }

    /// Reads a whole tensor.
    pub fn read(&self, name: &str, into: &mut [f32]) -> Result<()> {
        let tensor = self.tensor(name)?;
        if tensor.elements() != into.len() {
            let (has, room) = (tensor.elements(), into.len());
            return Err(Error::Internal(format!("tensor {name:?} has {has} values, read into room for {room}")));
        }
        tensor.widen(0, into);
        Ok(())
    }
}
