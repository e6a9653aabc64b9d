//! An output under a temporary name. It gets its own name when it is whole, and is removed when it never will be.

use std::path::{Path, PathBuf};

use crate::{Result, interrupt};

pub struct Draft {
    /// Where it is written.
    pub path: PathBuf,
    target: PathBuf,
    finished: bool,
}

impl Draft {
    /// Beside the target, so that the last step is a rename, and with its extension, which tells ffmpeg the format.
    pub fn new(target: &Path) -> Result<Draft> {
        let name = target.file_name().ok_or_else(|| format!("{} names no file; add one", target.display()))?;
        let folder = target.parent().filter(|folder| !folder.as_os_str().is_empty());
        if let Some(folder) = folder.filter(|folder| !folder.is_dir()) {
            return Err(format!("the folder {} does not exist; make it first", folder.display()));
        }
        let path = target.with_file_name(format!(".part-{}-{}", std::process::id(), name.to_string_lossy()));
        interrupt::watch_draft(path.clone());
        Ok(Draft { path, target: target.to_owned(), finished: false })
    }

    /// A new file that can be read back too.
    pub fn create(&self) -> Result<std::fs::File> {
        let mut options = std::fs::OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(true).open(&self.path);
        file.map_err(|why| format!("{} cannot be written: {why}", self.target.display()))
    }

    pub fn finish(mut self) -> Result<()> {
        interrupt::check()?;
        std::fs::rename(&self.path, &self.target)
            .map_err(|why| format!("{} cannot be given its name: {why}", self.target.display()))?;
        self.finished = true;
        Ok(())
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if !self.finished {
            remove(&self.path);
        }
        interrupt::unwatch_draft(&self.path);
    }
}

/// A file or a folder; one that is not there is fine.
pub fn remove(path: &Path) {
    let _ = if path.is_dir() { std::fs::remove_dir_all(path) } else { std::fs::remove_file(path) };
}
