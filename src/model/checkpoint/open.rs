//! Opens a checkpoint: checks all of the safetensors file, and reads its tensors when they are asked for.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::contents::Contents;
use super::file_tensor::FileTensor;
use super::identity::FileIdentity;
use super::source::Source;
use crate::error::{Error, Result};
use crate::file;
use crate::model::families::Model;
use crate::reserve::{self, EXHAUSTED};

/// An open checkpoint. It has every tensor of the model, with the right shape and finite values.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    identity: FileIdentity,
    pub(super) source: Source,
    pub(super) contents: Contents,
}

impl Checkpoint {
    /// Opens a checkpoint of any family.
    pub fn open(path: &Path) -> Result<Checkpoint> {
        Checkpoint::check(path, None, None)
    }

    /// Opens a checkpoint that must have the tensors of this model.
    pub fn open_as(path: &Path, model: Arc<Model>) -> Result<Checkpoint> {
        Checkpoint::check(path, Some(model), None)
    }

    /// `known`: the model that it must be of. `expected`: the file that it must be.
    fn check(path: &Path, known: Option<Arc<Model>>, expected: Option<&FileIdentity>) -> Result<Checkpoint> {
        let fail = |why: String| Error::Checkpoint(format!("{}: {why}", path.display()));
        let cannot = |what: &str, e: std::io::Error| fail(format!("cannot be {what}: {e}"));
        let (file, metadata) = file::open_regular(path).map_err(|e| cannot("opened", e))?;
        let Some(file) = file else {
            let what = if metadata.is_dir() { "a directory" } else { "not a regular file" };
            return Err(fail(format!("is {what}, expected a safetensors file")));
        };
        let identity = FileIdentity::of(&metadata);
        if expected.is_some_and(|expected| *expected != identity) {
            return Err(fail("the file has changed since the handle was created; create a new handle".into()));
        }
        if metadata.len() == 0 {
            return Err(fail("is empty, expected a safetensors file".into()));
        }
        let source = Source { file, length: metadata.len() };
        let contents = Contents::check(&source, known).map_err(|why| match why == EXHAUSTED {
            true => reserve::exhausted(),
            false => fail(why),
        })?;
        Ok(Checkpoint { path: path.into(), identity, source, contents })
    }

    /// Opens the file again that a handle was created with.
    pub fn reopen(path: &Path, identity: &FileIdentity, model: &Arc<Model>) -> Result<Checkpoint> {
        Checkpoint::check(path, Some(Arc::clone(model)), Some(identity))
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn model(&self) -> &Arc<Model> {
        &self.contents.model
    }

    pub fn identity(&self) -> &FileIdentity {
        &self.identity
    }

    pub(super) fn fail(&self, why: String) -> Error {
        Error::Checkpoint(format!("{}: {why}", self.path.display()))
    }

    /// Fails when the file is no longer the one that was opened.
    pub fn verify_unchanged(&self) -> Result<()> {
        match fs::metadata(&self.path) {
            Ok(metadata) if FileIdentity::of(&metadata) == self.identity => Ok(()),
            Ok(_) => Err(self.fail("has changed since it was opened, expected the same file".into())),
            Err(e) => Err(self.fail(format!("can no longer be found where it was opened: {e}"))),
        }
    }

    /// Finds a tensor by its current name, also if the file has its older name.
    pub fn tensor(&self, name: &str) -> Result<FileTensor<'_>> {
        let unknown = || Error::Internal(format!("{}: the model has no tensor {name:?}", self.path.display()));
        let entry = self.contents.tensor(name).ok_or_else(unknown)?;
        Ok(FileTensor { dtype: entry.dtype, shape: &entry.shape, checkpoint: self, start: entry.range.start })
    }

    pub(super) fn read(&self, into: &mut [u8], at: u64) -> Result<()> {
        self.source.read(into, at).map_err(|why| self.fail(why))
    }
}
