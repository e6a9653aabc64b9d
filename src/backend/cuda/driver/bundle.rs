//! Bundles: the machine code of a module for several architectures and its PTX, compressed. `kernels/compile.py` writes
//! them. Calls no driver.

use miniz_oxide::inflate::decompress_to_vec_zlib_with_limit;

use super::arch::KernelArch;
use crate::error::{Error, Result};

/// Bytes before an entry: its architecture (86 for 8.6, 0 for PTX), its bytes, its compressed bytes.
const ENTRY_HEADER: usize = 12;
const PTX: u32 = 0;

#[derive(Clone, Copy)]
pub struct Bundle {
    /// Of the source file.
    pub name: &'static str,
    bytes: &'static [u8],
}

impl Bundle {
    pub const fn new(name: &'static str, bytes: &'static [u8]) -> Bundle {
        Bundle { name, bytes }
    }

    /// As embedded.
    pub fn bytes(&self) -> &'static [u8] {
        self.bytes
    }

    /// Machine code for exactly this architecture. Others of the same major number are integrated GPUs, for which
    /// NVIDIA promises no binary compatibility; they get the PTX.
    pub fn machine_code(&self, arch: KernelArch) -> Result<Option<Vec<u8>>> {
        u32::try_from(arch.major * 10 + arch.minor).map_or(Ok(None), |number| self.entry(number))
    }

    /// With a final NUL.
    pub fn ptx(&self) -> Result<Vec<u8>> {
        let mut text = self.entry(PTX)?.ok_or_else(|| self.damaged())?;
        text.push(0);
        Ok(text)
    }

    fn entry(&self, wanted: u32) -> Result<Option<Vec<u8>>> {
        let mut rest = self.bytes;
        while let Some((header, after)) = rest.split_at_checked(ENTRY_HEADER) {
            let word = |i: usize| u32::from_le_bytes(std::array::from_fn(|byte| header[4 * i + byte]));
            let (compressed, next) = after.split_at_checked(word(2) as usize).ok_or_else(|| self.damaged())?;
            if word(0) == wanted {
                let bytes = word(1) as usize;
                let data = decompress_to_vec_zlib_with_limit(compressed, bytes).map_err(|_| self.damaged())?;
                return if data.len() == bytes { Ok(Some(data)) } else { Err(self.damaged()) };
            }
            rest = next;
        }
        Ok(None)
    }

    fn damaged(&self) -> Error {
        Error::Internal(format!("the embedded kernels of {} are damaged", self.name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Entries of 8.6 ("eight") and PTX ("text"), compressed.
    fn bundle() -> Vec<u8> {
        let mut bytes = Vec::new();
        for (number, data) in [(0u32, "text"), (86, "eight")] {
            let small = miniz_oxide::deflate::compress_to_vec_zlib(data.as_bytes(), 9);
            [number, data.len() as u32, small.len() as u32].iter().for_each(|word| bytes.extend(word.to_le_bytes()));
            bytes.extend(small);
        }
        bytes
    }

    #[test]
    fn entries_are_found_by_exact_architecture() {
        let bundle = Bundle::new("norm", bundle().leak());
        assert_eq!(bundle.machine_code(KernelArch::new(8, 6)), Ok(Some(b"eight".to_vec())));
        for (major, minor) in [(8, 0), (8, 7), (8, 9), (9, 0), (12, 0)] {
            assert_eq!(bundle.machine_code(KernelArch::new(major, minor)), Ok(None), "{major}.{minor}");
        }
        assert_eq!(bundle.ptx(), Ok(b"text\0".to_vec()));
    }

    #[test]
    fn damaged_bundles_are_refused_by_name() {
        let whole = bundle();
        for end in [0, 5, 12, 20] {
            let error = Bundle::new("norm", whole[..end].to_vec().leak()).ptx().unwrap_err();
            assert!(error.to_string().contains("norm"), "{error}");
        }
        let mut flipped = whole.clone();
        flipped[18] ^= 0x40;
        assert!(Bundle::new("norm", flipped.leak()).ptx().is_err());
    }
}
