//! Reads and writes bytes with a running checksum. The host may cancel between pieces.

use std::io::{Read, Write};
use std::sync::atomic::AtomicBool;

use super::refuse;
use crate::checksum::Checksum;
use crate::error::{Result, check_cancel};
use crate::reserve;

/// Bytes of a checksum.
pub const SEAL: u64 = 8;

pub struct SealedWriter<'a> {
    into: &'a mut dyn Write,
    sum: Checksum,
    cancel: &'a AtomicBool,
}

impl<'a> SealedWriter<'a> {
    pub fn new(into: &'a mut dyn Write, cancel: &'a AtomicBool) -> SealedWriter<'a> {
        SealedWriter { into, sum: Checksum::default(), cancel }
    }

    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        check_cancel(self.cancel)?;
        self.sum.add(bytes);
        self.into.write_all(bytes).map_err(|why| refuse(format_args!("cannot be written: {why}")))
    }

    /// The checksum of everything so far.
    pub fn seal(&mut self) -> Result<()> {
        self.write(&self.sum.value().to_le_bytes())
    }
}

pub struct SealedReader<'a> {
    from: &'a mut dyn Read,
    sum: Checksum,
    left: u64,
    cancel: &'a AtomicBool,
}

impl<'a> SealedReader<'a> {
    /// Of a state of `bytes` in all.
    pub fn new(from: &'a mut dyn Read, bytes: u64, cancel: &'a AtomicBool) -> SealedReader<'a> {
        SealedReader { from, sum: Checksum::default(), left: bytes, cancel }
    }

    /// Bytes that are still to come, the last checksum included.
    pub fn left(&self) -> u64 {
        self.left
    }

    pub fn read(&mut self, into: &mut [u8]) -> Result<()> {
        check_cancel(self.cancel)?;
        self.left = self.left.checked_sub(into.len() as u64).ok_or_else(|| refuse("is cut short"))?;
        self.from.read_exact(into).map_err(|why| match why.kind() {
            std::io::ErrorKind::UnexpectedEof => refuse("is cut short"),
            _ => refuse(format_args!("cannot be read: {why}")),
        })?;
        self.sum.add(into);
        Ok(())
    }

    /// Reads `bytes` of them into memory. The caller has bounded them.
    pub fn take(&mut self, bytes: u64) -> Result<Vec<u8>> {
        let mut taken = reserve::filled("the state's header", 0, bytes as usize)?;
        self.read(&mut taken)?;
        Ok(taken)
    }

    /// Whether everything so far is what was written.
    pub fn check_seal(&mut self) -> Result<()> {
        let expected = self.sum.value();
        let mut found = [0; SEAL as usize];
        self.read(&mut found)?;
        match u64::from_le_bytes(found) == expected {
            true => Ok(()),
            false => Err(refuse("is damaged: its checksum is not that of its contents")),
        }
    }
}
