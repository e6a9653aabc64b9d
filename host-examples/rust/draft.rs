//! An output under a temporary name. It gets its own name when it is whole, and is removed when it never will be.

use std::collections::hash_map::RandomState;
use std::fs::{self, File, OpenOptions};
use std::hash::{BuildHasher, Hasher};
use std::io::{Error, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::{Result, interrupt};

/// -y: outputs that exist are replaced.
pub static OVERWRITE: AtomicBool = AtomicBool::new(false);

/// What this run reads, by identity. No output replaces any of it.
static SOURCES: Mutex<Vec<(Identity, PathBuf)>> = Mutex::new(Vec::new());

/// What this run writes, by full names. No two outputs have one name.
static TARGETS: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Notes a file as one that this run reads.
pub fn protect(path: &Path) {
    if let Some(identity) = identity(path) {
        SOURCES.lock().unwrap_or_else(PoisonError::into_inner).push((identity, path.to_owned()));
    }
}

/// The name begins so, followed by 16 random digits and the name of the target.
const PREFIX: &str = ".part-";

pub struct Draft {
    /// Where it is written.
    pub path: PathBuf,
    target: PathBuf,
    is_folder: bool,
    /// `None` for a folder, and once it is closed.
    file: Option<File>,
    /// Locked until the draft is gone or has its name. The lock of a process that was killed is gone with it.
    _lock: Option<File>,
    finished: bool,
}

impl Draft {
    /// As `replacing`, for a name that is free, unless the user wants to replace what has it.
    pub fn new(target: &Path) -> Result<Draft> {
        refuse_existing(target)?;
        Draft::replacing(target)
    }

    /// Writes a whole file.
    pub fn write(self, text: &str) -> Result<()> {
        let written = self.create()?.write_all(text.as_bytes());
        written.map_err(|why| format!("{} cannot be written: {why}; make room", self.target.display()))?;
        self.finish()
    }

    /// A file beside the target, so that the last step is a rename, with its extension, which tells ffmpeg the format.
    pub fn replacing(target: &Path) -> Result<Draft> {
        let followed = follow(target)?;
        claim(&followed, target)?;
        Draft::make(target, followed, new_file)
    }

    /// A folder in the same way.
    pub fn folder(target: &Path) -> Result<Draft> {
        let followed = follow(target)?;
        claim(&followed, target)?;
        Draft::make(target, followed, |path| fs::create_dir(path).map(|()| None))
    }

    /// A file that never gets a name, in the temporary folder. There may be many.
    pub fn temporary(name: &str) -> Result<Draft> {
        let target = std::env::temp_dir().join(name);
        Draft::make(&target, target.clone(), new_file)
    }

    /// `given`: the target as the user names it. `create` must refuse a name that exists, so that nobody can plant a
    /// link there.
    fn make(given: &Path, target: PathBuf, create: impl Fn(&Path) -> std::io::Result<Option<File>>) -> Result<Draft> {
        const TRIES: u32 = 8;
        let name = target.file_name().ok_or_else(|| format!("{} names no file; add one", given.display()))?;
        let folder = parent(&target);
        if !folder.is_dir() {
            return Err(format!("the folder {} does not exist; make it first", folder.display()));
        }
        let mut made: std::io::Result<_> = Err(ErrorKind::AlreadyExists.into());
        for _ in 0..TRIES {
            // The standard library seeds it from the system's random numbers.
            let random = RandomState::new().build_hasher().finish();
            let path = target.with_file_name(format!("{PREFIX}{random:016x}-{}", name.to_string_lossy()));
            interrupt::watch_draft(path.clone());
            made = create(&path).and_then(|file| Ok((lock(&path, file.as_ref())?, path.clone(), file)));
            match &made {
                Ok(_) => break,
                Err(why) => {
                    interrupt::unwatch_draft(&path);
                    if why.kind() != ErrorKind::AlreadyExists {
                        break;
                    }
                }
            }
        }
        let (_lock, path, file) = made.map_err(|why| format!("{} cannot be written: {why}", given.display()))?;
        let draft = Draft { path, target, is_folder: file.is_none(), file, _lock, finished: false };
        remove_left_behind(&draft.path, &draft.target);
        draft.check_target()?;
        Ok(draft)
    }

    /// A rename would replace pipes, sockets and devices, too.
    fn check_target(&self) -> Result<()> {
        refuse_source(&self.target)?;
        let wanted = if self.is_folder { "a folder" } else { "a regular file" };
        match fs::symlink_metadata(&self.target) {
            Ok(found) if found.is_dir() != self.is_folder || !(found.is_dir() || found.is_file()) => {
                Err(format!("{} exists and is not {wanted}; name another", self.target.display()))
            }
            _ => Ok(()),
        }
    }

    /// The empty file, which can be read back too.
    pub fn create(&self) -> Result<File> {
        let file = self.file.as_ref().map_or_else(|| Err(Error::other("it is no open file")), File::try_clone);
        file.map_err(|why| format!("{} cannot be written: {why}", self.target.display()))
    }

    /// For a writer that puts another file in its place. Some systems replace closed files only.
    pub fn close(&mut self) {
        self.file = None;
    }

    /// The name that it will have.
    pub fn target(&self) -> &Path {
        &self.target
    }

    /// Puts it on the disk, which may be too full for what programs believe they have written.
    pub fn sync(&self) -> Result<()> {
        let synced = self.file.as_ref().map_or(Ok(()), File::sync_all);
        synced.map_err(|why| format!("{} cannot be written: {why}; make room", self.target.display()))
    }

    pub fn finish(mut self) -> Result<()> {
        interrupt::check()?;
        self.check_target()?;
        let failed = |why| format!("{} cannot be given its name: {why}", self.target.display());
        // A power failure after the rename must not leave an empty file. Some systems rename closed files only.
        self.file.take().map_or(Ok(()), |file| file.sync_all()).map_err(failed)?;
        fs::rename(&self.path, &self.target).map_err(failed)?;
        self.finished = true;
        #[cfg(unix)]
        let _ = File::open(parent(&self.target)).and_then(|folder| folder.sync_all());
        Ok(())
    }
}

fn new_file(path: &Path) -> std::io::Result<Option<File>> {
    OpenOptions::new().read(true).write(true).create_new(true).open(path).map(Some)
}

/// The path itself, or where a symbolic link leads to.
fn follow(path: &Path) -> Result<PathBuf> {
    match fs::symlink_metadata(path) {
        Ok(found) if found.is_symlink() => {
            fs::canonicalize(path).map_err(|why| format!("{} leads nowhere: {why}", path.display()))
        }
        _ => Ok(path.to_owned()),
    }
}

fn parent(file: &Path) -> &Path {
    file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

impl Drop for Draft {
    fn drop(&mut self) {
        self.file = None;
        if !self.finished {
            interrupt::remove(&self.path);
        }
        interrupt::unwatch_draft(&self.path);
    }
}

/// What tells a file from all others, whatever its names.
#[cfg(unix)]
type Identity = (u64, u64);
#[cfg(not(unix))]
type Identity = PathBuf;

#[cfg(unix)]
fn identity(path: &Path) -> Option<Identity> {
    use std::os::unix::fs::MetadataExt;
    fs::metadata(path).ok().map(|found| (found.dev(), found.ino()))
}

#[cfg(not(unix))]
fn identity(path: &Path) -> Option<Identity> {
    fs::canonicalize(path).ok()
}

/// The lock of a draft that was just made. A run that removes drafts may have been faster; then the name is as good as
/// taken. Systems that know no such locks leave drafts of killed runs behind.
#[cfg(unix)]
fn lock(path: &Path, file: Option<&File>) -> std::io::Result<Option<File>> {
    use std::os::unix::fs::MetadataExt;
    let file = file.map_or_else(|| File::open(path), File::try_clone)?;
    match file.try_lock() {
        Ok(()) => {
            let held = file.metadata().map(|found| (found.dev(), found.ino()))?;
            if identity(path) == Some(held) { Ok(Some(file)) } else { Err(ErrorKind::AlreadyExists.into()) }
        }
        Err(fs::TryLockError::WouldBlock) => Err(ErrorKind::AlreadyExists.into()),
        Err(fs::TryLockError::Error(_)) => Ok(None),
    }
}

/// Other systems keep everybody from a locked file, ffmpeg too.
#[cfg(not(unix))]
fn lock(_: &Path, _: Option<&File>) -> std::io::Result<Option<File>> {
    Ok(None)
}

/// Removes drafts of the same target whose runs were killed: those of this user that nobody holds.
#[cfg(unix)]
fn remove_left_behind(own: &Path, target: &Path) {
    use std::os::unix::fs::MetadataExt;
    let Ok(user) = fs::symlink_metadata(own).map(|found| found.uid()) else { return };
    let (Some(name), Ok(entries)) = (target.file_name(), fs::read_dir(parent(target))) else { return };
    let ending = format!("-{}", name.to_string_lossy());
    for entry in entries.flatten() {
        let name = entry.file_name();
        let digits = name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.strip_suffix(&ending));
        if !digits.is_some_and(|digits| digits.len() == 16 && digits.bytes().all(|digit| digit.is_ascii_hexdigit())) {
            continue;
        }
        let ours = entry.metadata().is_ok_and(|found| found.uid() == user && (found.is_file() || found.is_dir()));
        let left = ours.then(|| File::open(entry.path()).ok()).flatten().filter(|file| file.try_lock().is_ok());
        if left.is_some() {
            interrupt::remove(&entry.path());
        }
    }
}

#[cfg(not(unix))]
fn remove_left_behind(_: &Path, _: &Path) {}

fn refuse_source(target: &Path) -> Result<()> {
    let Some(identity) = identity(target) else { return Ok(()) };
    let sources = SOURCES.lock().unwrap_or_else(PoisonError::into_inner);
    match sources.iter().find(|(known, _)| *known == identity) {
        Some((_, source)) => {
            Err(format!("{} is the same file as the input {}; name another", target.display(), source.display()))
        }
        None => Ok(()),
    }
}

/// The name that tells an output from all others, whether it exists or not.
fn full_name(target: &Path) -> PathBuf {
    let beside = || Some(fs::canonicalize(parent(target)).ok()?.join(target.file_name()?));
    fs::canonicalize(target).ok().or_else(beside).unwrap_or_else(|| target.to_owned())
}

/// Notes a name as one that this run writes. `given`: as the user wrote it.
fn claim(target: &Path, given: &Path) -> Result<()> {
    refuse_claimed(target, given)?;
    TARGETS.lock().unwrap_or_else(PoisonError::into_inner).push(full_name(target));
    Ok(())
}

fn refuse_claimed(target: &Path, given: &Path) -> Result<()> {
    if TARGETS.lock().unwrap_or_else(PoisonError::into_inner).contains(&full_name(target)) {
        return Err(format!("{} is the name of two outputs; give each its own", given.display()));
    }
    Ok(())
}

/// For a file that is renamed to this name later: what has the name must be a regular file that may be replaced, and
/// no other output.
pub fn refuse_taken(target: &Path) -> Result<()> {
    if fs::symlink_metadata(target).is_ok_and(|found| !found.is_file()) {
        return Err(format!("{} exists and is not a regular file; name another", target.display()));
    }
    refuse_claimed(target, target)?;
    refuse_existing(target)
}

/// A file is replaced only where the user said so, and never if this run reads it.
pub fn refuse_existing(target: &Path) -> Result<()> {
    refuse_source(target)?;
    if target.is_file() && !OVERWRITE.load(Ordering::Relaxed) {
        return Err(format!("{} exists; add -y to replace it, or name another", target.display()));
    }
    Ok(())
}
