//! Blocks of memory, and regions of them.

use crate::error::{Error, Result};
use crate::ir::DeviceOffset;

/// Device memory whose bytes have addresses.
pub trait AddressedBlock {
    fn bytes(&self) -> u64;
    /// The address of an offset, which may lie outside: only the lower rows of a frame may be backed by memory.
    fn address(&self, at: DeviceOffset) -> u64;

    /// The address of a region, checked to lie in the block.
    fn at(&self, offset: u64, bytes: u64) -> Result<u64> {
        check_region(self.bytes(), offset, bytes)?;
        Ok(self.address(DeviceOffset(offset)))
    }

    /// An error once the device is lost, where that is known before work is given to it.
    fn check_alive(&self) -> Result<()> {
        Ok(())
    }
}

/// Whether a region lies in a block of `all` bytes.
pub fn check_region(all: u64, offset: u64, bytes: u64) -> Result<()> {
    if offset.checked_add(bytes).is_none_or(|end| end > all) {
        return Err(Error::Internal(format!("{bytes} bytes at {offset} are not in a block of {all}")));
    }
    Ok(())
}
