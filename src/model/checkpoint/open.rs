//! Opens a checkpoint: checks all of the safetensors file, and reads its tensors when they are asked for.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::contents::{Contents, Watch};
use super::file_tensor::FileTensor;
use super::identity::{FileIdentity, FileStamp};
use super::source::Source;
use crate::error::{Error, Result};
use crate::file;
use crate::model::families::Model;
use crate::reserve::{self, EXHAUSTED};

/// An open checkpoint. It has every tensor of the model, with the right shape and finite values.
#[derive(Debug)]
pub struct Checkpoint {
    identity: FileIdentity,
    pub(super) source: Source,
    pub(super) contents: Contents,
}

/// The file of a checkpoint that was open, to be opened again.
#[derive(Debug, Clone)]
pub struct CheckpointFile {
    pub path: PathBuf,
    pub identity: FileIdentity,
    pub model: Arc<Model>,
}

impl CheckpointFile {
    /// Its values were checked when it was opened first. Fails if they may have changed since.
    pub fn open(&self) -> Result<Checkpoint> {
        let CheckpointFile { path, identity, model } = self;
        let (source, stamp) = open_file(path)?;
        let changed = || failure(path, "the file has changed since the handle was created; create a new handle".into());
        if stamp != identity.stamp && !stamp.differs_in_change_only(&identity.stamp) {
            return Err(changed());
        }
        let contents = Contents::of_header(&source, Some(Arc::clone(model))).map_err(|why| failure(path, why))?;
        let open = Checkpoint { identity: identity.clone(), source, contents };
        if open.is_same(&stamp) {
            Ok(Checkpoint { identity: FileIdentity { stamp, ..identity.clone() }, ..open })
        } else {
            Err(changed())
        }
    }
}

impl Checkpoint {
    /// Opens a checkpoint of any family.
    pub fn open(path: &Path) -> Result<Checkpoint> {
        Checkpoint::check(path, None, &mut |_, _| false)
    }

    /// The same. `watch` may end it.
    pub fn open_watched(path: &Path, watch: &mut Watch) -> Result<Checkpoint> {
        Checkpoint::check(path, None, watch)
    }

    /// Opens a checkpoint that must have the tensors of this model.
    pub fn open_as(path: &Path, model: Arc<Model>) -> Result<Checkpoint> {
        Checkpoint::check(path, Some(model), &mut |_, _| false)
    }

    /// `known`: the model that it must be of.
    fn check(path: &Path, known: Option<Arc<Model>>, watch: &mut Watch) -> Result<Checkpoint> {
        // The file is opened again later, when the process may be in another folder.
        let path = std::path::absolute(path)
            .map_err(|why| Error::Checkpoint(format!("weights: \"{}\" is no path: {why}", path.display())))?;
        let (source, stamp) = open_file(&path)?;
        let contents = Contents::of_header(&source, known).map_err(|why| failure(&path, why))?;
        let mut stopped = false;
        let checksum = contents.read_values(&source, &mut |done, total| {
            stopped |= watch(done, total);
            stopped
        });
        match checksum {
            Err(_) if stopped => Err(Error::Cancelled),
            Err(why) => Err(failure(&path, why)),
            Ok(checksum) => Ok(Checkpoint { identity: FileIdentity { stamp, checksum }, source, contents }),
        }
    }

    pub fn path(&self) -> &Path {
        &self.source.path
    }

    pub fn model(&self) -> &Arc<Model> {
        &self.contents.model
    }

    pub fn identity(&self) -> &FileIdentity {
        &self.identity
    }

    pub fn file(&self) -> CheckpointFile {
        CheckpointFile {
            path: self.path().to_owned(),
            identity: self.identity.clone(),
            model: Arc::clone(self.model()),
        }
    }

    /// Fails when the file is no longer the one that was opened.
    pub fn verify_unchanged(&self) -> Result<()> {
        match fs::metadata(self.path()) {
            Ok(metadata) if self.is_same(&FileStamp::of(&metadata)) => Ok(()),
            Ok(_) => Err(self.source.fail("has changed since it was opened, expected the same file".into())),
            Err(e) => Err(self.source.fail(format!("can no longer be found where it was opened: {e}"))),
        }
    }

    /// Whether a file with this stamp has the same contents. Where the stamps do not decide, a checksum does.
    fn is_same(&self, stamp: &FileStamp) -> bool {
        let same_values = || {
            let checksum = self.contents.read_values(&self.source, &mut |_, _| false);
            checksum.is_ok_and(|checksum| checksum == self.identity.checksum)
        };
        *stamp == self.identity.stamp || stamp.differs_in_change_only(&self.identity.stamp) && same_values()
    }

    /// Finds a tensor by its current name, also if the file has its older name.
    pub fn tensor(&self, name: &str) -> Result<FileTensor<'_>> {
        let unknown = || Error::Internal(format!("{}: the model has no tensor {name:?}", self.path().display()));
        let entry = self.contents.tensor(name).ok_or_else(unknown)?;
        Ok(FileTensor { dtype: entry.dtype, shape: &entry.shape, file: &self.source, start: entry.range.start })
    }
}

fn open_file(path: &Path) -> Result<(Source, FileStamp)> {
    let (file, metadata) = file::open_regular(path).map_err(|e| failure(path, format!("cannot be opened: {e}")))?;
    let Some(file) = file else {
        let what = if metadata.is_dir() { "a directory" } else { "not a regular file" };
        return Err(failure(path, format!("is {what}, expected a safetensors file")));
    };
    if metadata.len() == 0 {
        return Err(failure(path, "is empty, expected a safetensors file".into()));
    }
    Ok((Source { path: path.into(), file, length: metadata.len() }, FileStamp::of(&metadata)))
}

fn failure(path: &Path, why: String) -> Error {
    if why == EXHAUSTED { reserve::exhausted() } else { Error::Checkpoint(format!("{}: {why}", path.display())) }
}
