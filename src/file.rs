//! Files that the library reads or writes. None is waited for: what is read is a regular file, or refused. What is
//! written is complete under its name, or is not there.

use std::collections::hash_map::RandomState;
use std::fs::{self, File, Metadata, OpenOptions};
use std::hash::{BuildHasher, Hasher};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// Opens a file to be read. What is not a regular file is `None`, with what it is.
pub fn open_regular(path: &Path) -> io::Result<(Option<File>, Metadata)> {
    // Asked first as well, because opening a device may change its state.
    let found = fs::metadata(path)?;
    if !found.is_file() {
        return Ok((None, found));
    }
    // Another program may put a pipe there meanwhile. Opening one would wait for its other end.
    let file = open_at_once(path, 0)?;
    let opened = file.metadata()?;
    Ok((opened.is_file().then_some(file), opened))
}

#[cfg(unix)]
fn open_at_once(path: &Path, flags: i32) -> io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt;
    OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY | flags).open(path)
}

#[cfg(not(unix))]
fn open_at_once(path: &Path, _: i32) -> io::Result<File> {
    File::open(path)
}

/// A file that is written under a temporary name, and gets its name once it is complete. Dropped before, it is gone.
#[derive(Debug)]
pub struct Replacement {
    /// Closed before the temporary file is removed: some systems rename and remove closed files only.
    file: Option<File>,
    temporary: Temporary,
    target: PathBuf,
    argument: &'static str,
}

impl Replacement {
    /// `argument` is what the host calls the path. Anything that exists and is no regular file is refused.
    pub fn new(argument: &'static str, path: &Path) -> Result<Replacement> {
        let fail = |why: io::Error| cannot_write(argument, path, &why);
        // The working folder may change before the rename.
        let target = std::path::absolute(path).and_then(|path| target(&path)).map_err(fail)?;
        let (temporary, file) = create_temporary(folder(&target)).map_err(fail)?;
        Ok(Replacement { file: Some(file), temporary, target, argument })
    }

    /// Gives the file its name.
    pub fn commit(mut self) -> Result<()> {
        let fail = |why: io::Error| cannot_write(self.argument, &self.target, &why);
        // A power failure after the rename must not leave an empty file.
        self.file.take().map_or(Ok(()), |file| file.sync_all()).map_err(fail)?;
        fs::rename(&self.temporary.0, &self.target).map_err(fail)?;
        self.temporary.0.clear();
        sync_folder(folder(&self.target));
        Ok(())
    }
}

impl Write for Replacement {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.as_mut().map_or(Ok(0), |file| file.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.as_mut().map_or(Ok(()), File::flush)
    }
}

/// A file that is removed when dropped, unless the path was cleared.
#[derive(Debug)]
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
    let _ = open_at_once(folder, libc::O_DIRECTORY).and_then(|folder| folder.sync_all());
    #[cfg(not(unix))]
    let _ = folder;
}

pub fn cannot_write(argument: &str, path: &Path, why: &io::Error) -> Error {
    Error::Checkpoint(format!("{argument}: {} cannot be written: {why}", path.display()))
}
