//! Identifies the file of a checkpoint, to detect that it was replaced or changed.

use std::fs::Metadata;
use std::time::SystemTime;

/// Equal identities mean the same file with the same contents.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct FileIdentity {
    pub stamp: FileStamp,
    /// Of the contents: a program may change them and set the time of modification back.
    pub checksum: u64,
}

/// What the file system says of a file.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct FileStamp {
    length: u64,
    modified: Option<SystemTime>,
    /// Device and inode, on Unix.
    inode: Option<(u64, u64)>,
    /// When contents or attributes last changed, on Unix. No program can set it back.
    changed: Option<(i64, i64)>,
}

impl FileStamp {
    pub fn of(metadata: &Metadata) -> FileStamp {
        let (inode, changed) = unix_facts(metadata);
        FileStamp { length: metadata.len(), modified: metadata.modified().ok(), inode, changed }
    }

    /// Whether all is equal but the time of the last change. Then perhaps only attributes changed.
    pub fn differs_in_change_only(&self, other: &FileStamp) -> bool {
        self != other && *self == FileStamp { changed: self.changed, ..other.clone() }
    }
}

#[cfg(unix)]
fn unix_facts(metadata: &Metadata) -> (Option<(u64, u64)>, Option<(i64, i64)>) {
    use std::os::unix::fs::MetadataExt;
    (Some((metadata.dev(), metadata.ino())), Some((metadata.ctime(), metadata.ctime_nsec())))
}

#[cfg(not(unix))]
fn unix_facts(_: &Metadata) -> (Option<(u64, u64)>, Option<(i64, i64)>) {
    (None, None)
}
