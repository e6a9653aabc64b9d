//! Identifies the file of a checkpoint, to detect that it was replaced or changed.

use std::fs::Metadata;
use std::time::SystemTime;

/// Equal identities mean the same file with the same contents, as far as the file system can tell.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct FileIdentity {
    pub length: u64,
    pub modified: Option<SystemTime>,
    /// Device and inode, on Unix.
    pub inode: Option<(u64, u64)>,
}

impl FileIdentity {
    pub fn of(metadata: &Metadata) -> FileIdentity {
        FileIdentity { length: metadata.len(), modified: metadata.modified().ok(), inode: inode(metadata) }
    }
}

#[cfg(unix)]
fn inode(metadata: &Metadata) -> Option<(u64, u64)> {
    use std::os::unix::fs::MetadataExt;
    Some((metadata.dev(), metadata.ino()))
}

#[cfg(not(unix))]
fn inode(_: &Metadata) -> Option<(u64, u64)> {
    None
}
