//! Which file a checkpoint was read from, and whether it is still the same.

use std::fs::Metadata;
use std::time::SystemTime;

/// Two equal identities mean the same file with the same contents, as far as the file system can tell.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct FileIdentity {
    pub length: u64,
    pub modified: Option<SystemTime>,
    /// Device and inode, where there is such a thing; elsewhere the path has to do.
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
