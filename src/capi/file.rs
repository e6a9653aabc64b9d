//! Files that the library writes. A file is complete under its name, or is not there.

use std::collections::hash_map::RandomState;
use std::fs::{self, File, OpenOptions};
use std::hash::{BuildHasher, Hasher};
use std::io;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// Writes a file under a temporary name, and gives it its name once it is complete.
pub(super) fn replace(path: &Path, write: impl FnOnce(&mut File) -> Result<()>) -> Result<()> {
    let fail = |why| cannot_write(path, why);
    let target = target(path).map_err(fail)?;
    let (mut temporary, mut file) = create_temporary(folder(&target)).map_err(fail)?;
    // A power failure after the rename must not leave an empty file.
    let written = write(&mut file).and_then(|()| file.sync_all().map_err(fail));
    // Some systems rename and remove closed files only.
    drop(file);
    written?;
    fs::rename(&temporary.0, &target).map_err(fail)?;
    temporary.0.clear();
    sync_folder(folder(&target));
    Ok(())
}

/// A file that is removed when dropped, unless the path was cleared.
struct Temporary(PathBuf);

impl Drop for Temporary {
    fn drop(&mut self) {
        if !self.0.as_os_str().is_empty() {
            let _ = fs::remove_file(&self.0);
        }
    }
}

/// The file that `path` names: itself, or the one that a symbolic link leads to.
fn target(path: &Path) -> io::Result<PathBuf> {
    let target = match fs::symlink_metadata(path) {
        Ok(found) if found.is_symlink() => fs::canonicalize(path)?,
        Err(why) if why.kind() != io::ErrorKind::NotFound => return Err(why),
        _ => path.to_owned(),
    };
    match fs::symlink_metadata(&target) {
        // A rename would replace pipes, sockets and devices.
        Ok(found) if !found.is_file() => Err(io::Error::other("it exists and is not a regular file")),
        _ if target.file_name().is_none() => Err(io::Error::other("it does not end with the name of a file")),
        _ => Ok(target),
    }
}

fn folder(file: &Path) -> &Path {
    file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Creates a file exclusively under a random name, so that it cannot be a link that another program made.
fn create_temporary(folder: &Path) -> io::Result<(Temporary, File)> {
    const TRIES: u32 = 8;
    let mut created = Err(io::ErrorKind::AlreadyExists.into());
    for _ in 0..TRIES {
        // The standard library seeds it from the system's random numbers.
        let name = RandomState::new().build_hasher().finish();
        let path = folder.join(format!("vvae-{name:016x}.partial"));
        created = OpenOptions::new().write(true).create_new(true).open(&path).map(|file| (Temporary(path), file));
        if !matches!(&created, Err(why) if why.kind() == io::ErrorKind::AlreadyExists) {
            break;
        }
    }
    created
}

/// Makes the rename survive a power failure, where the file system can.
fn sync_folder(folder: &Path) {
    #[cfg(unix)]
    let _ = File::open(folder).and_then(|folder| folder.sync_all());
    #[cfg(not(unix))]
    let _ = folder;
}

fn cannot_write(path: &Path, why: io::Error) -> Error {
    Error::Checkpoint(format!("path: {} cannot be written: {why}", path.display()))
}
