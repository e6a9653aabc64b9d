//! A checksum of a checkpoint's contents, the same on every machine and for every file name.

use std::path::PathBuf;

use once_cell::sync::OnceCell;
use parking_lot::Mutex;

use super::identity::FileIdentity;
use super::open::Checkpoint;
use crate::checksum::Checksum;
use crate::error::{Error, Result};
use crate::workers;

/// The fingerprint of a file. The first [`Fingerprint::get`] reads the whole file.
#[derive(Debug)]
pub struct Fingerprint {
    path: PathBuf,
    identity: FileIdentity,
    value: OnceCell<u64>,
}

impl Fingerprint {
    pub fn new(path: PathBuf, identity: FileIdentity) -> Fingerprint {
        Fingerprint { path, identity, value: OnceCell::new() }
    }

    pub fn get(&self) -> Result<u64> {
        let value = self.value.get_or_try_init(|| {
            let checkpoint = Checkpoint::open(&self.path)?;
            if *checkpoint.identity() != self.identity {
                let why = "the file has changed since the handle was created; create a new handle";
                return Err(Error::Checkpoint(format!("{}: {why}", self.path.display())));
            }
            let value = checkpoint.fingerprint();
            checkpoint.verify_unchanged().map(|()| value)
        });
        value.copied()
    }
}

impl Checkpoint {
    /// Covers names, types, shapes and values, and the number of groups, which is in no tensor.
    fn fingerprint(&self) -> u64 {
        const PIECE: usize = 8 << 20;
        let mut all = Checksum::default();
        all.add(&self.config().groups.to_le_bytes());
        let mut pieces: Vec<&[u8]> = Vec::new();
        for (name, tensor) in self.contents.named(&self.map) {
            all.add(name.as_bytes());
            all.add(tensor.dtype.name().as_bytes());
            tensor.shape.iter().for_each(|n| all.add(&n.to_le_bytes()));
            pieces.extend(tensor.bytes.chunks(PIECE));
        }
        let sums = Mutex::new(vec![0; pieces.len()]);
        let bytes: usize = pieces.iter().map(|piece| piece.len()).sum();
        workers::for_each(
            workers::threads_for(bytes / size_of::<u64>()),
            pieces.into_iter().enumerate().collect(),
            || (),
            |(), (index, piece)| {
                let sum = Checksum::of(piece);
                sums.lock()[index] = sum;
            },
        );
        sums.into_inner().iter().for_each(|sum: &u64| all.add(&sum.to_le_bytes()));
        all.value()
    }
}
