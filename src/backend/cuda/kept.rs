//! Frames as plain bytes, for whoever writes down where a job is and goes on from there.

use super::{Cuda, Memory};
use crate::backend::{Frame, Kept};
use crate::error::Result;

impl Cuda {
    pub(in crate::backend::cuda) fn read_kept(&self, memory: &Memory, from: Kept, into: &mut [u8]) -> Result<()> {
        self.settle(memory)?;
        match from {
            Kept::Device(Frame(offset)) => memory.block.read(&self.stream, offset, into),
            Kept::Host(frame) => {
                let from = memory.bands.at(frame, into.len() as u64)?;
                // SAFETY: the block has that many bytes there, and no copy to it is under way any more.
                unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
                Ok(())
            }
        }
    }

    /// Done when it returns, so that whatever comes next finds the bytes.
    pub(in crate::backend::cuda) fn write_kept(&self, memory: &mut Memory, to: Kept, from: &[u8]) -> Result<()> {
        self.settle(memory)?;
        match to {
            Kept::Device(Frame(offset)) => memory.block.write(&self.stream, offset, from),
            Kept::Host(frame) => {
                let to = memory.bands.at(frame, from.len() as u64)?;
                // SAFETY: the block has that many bytes there, and no copy from or to it is under way any more.
                unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) };
                Ok(())
            }
        }
    }

    /// Waits for everything that is under way in the memory of a job: a call on the host's stream may have returned before it
    /// had ended, also one of another job that the memory was used for.
    fn settle(&self, memory: &Memory) -> Result<()> {
        let _current = self.context.enter()?;
        self.stream.wait()?;
        memory.bands.wait()?;
        memory.transfers.wait()
    }
}
