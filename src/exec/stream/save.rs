//! Writes the state of a stream.

use std::io::Write;
use std::sync::atomic::AtomicBool;

use super::Streaming;
use crate::backend::Backend;
use crate::error::{Error, Result};
use crate::exec::state::{Numbers, PIECE, SealedWriter, StateHeader, StateOwner};
use crate::ir::{PersistedRegion, Relocate};
use crate::plan::{Arenas, PersistedSlot};
use crate::reserve;

/// Where a persisted slot lies.
pub fn region_of(arenas: &Arenas, slot: &PersistedSlot) -> Result<PersistedRegion> {
    Ok(match slot.on_host {
        true => PersistedRegion::Host(arenas.host(slot.slot)?),
        false => PersistedRegion::Device(arenas.device(slot.slot)?),
    })
}

/// Calls `each` with the pieces of a region and their bytes.
pub fn in_pieces(
    at: PersistedRegion,
    bytes: u64,
    mut each: impl FnMut(PersistedRegion, usize) -> Result<()>,
) -> Result<()> {
    let starts = (0..bytes).step_by(PIECE as usize);
    starts.into_iter().try_for_each(|start| each(at.plus(start), PIECE.min(bytes - start) as usize))
}

impl<B: Backend> Streaming<B> {
    fn owner(&self) -> StateOwner {
        StateOwner::new(self.place, self.backend.precision(), self.settings.cache)
    }

    /// Fails if the stream cannot be saved now: it is broken, ended, or has frames to pull.
    fn check_waiting(&mut self) -> Result<()> {
        self.check.intact()?;
        if self.check.ended {
            let why = "the clip was said to be complete, so there is nothing to go on with; pull the rest";
            return Err(Error::State(format!("stream: {why}")));
        }
        if !self.schedule.is_waiting() {
            let why = "frames are waiting to be pulled; pull until VVAE_AGAIN, then save";
            return Err(Error::State(format!("stream: {why}")));
        }
        Ok(())
    }

    fn header(&self, model: u64) -> StateHeader {
        let spec = self.schedule.spec();
        StateHeader {
            model,
            direction: spec.network.direction,
            input: self.check.input,
            numbers: Numbers::of(&self.settings),
            plan: spec.saved_plan(),
            first: spec.cone.range.first,
            loaded: self.schedule.loaded(),
        }
    }

    pub(super) fn saved_bytes(&mut self) -> Result<u64> {
        self.check_waiting()?;
        let frames = self.schedule.persisted_bytes();
        // The length of a header does not depend on the fingerprint.
        Ok(self.header(0).state_bytes(&self.owner(), frames))
    }

    pub(super) fn save_into(&mut self, into: &mut dyn Write, cancel: &AtomicBool) -> Result<()> {
        self.check_waiting()?;
        let mut into = SealedWriter::new(into, cancel);
        into.write(&self.header(self.model.get()?).write(&self.owner()))?;
        into.seal()?;
        let mut piece = reserve::filled("a piece of the state", 0, PIECE as usize)?;
        for frame in self.schedule.persisted_slots() {
            in_pieces(region_of(self.schedule.arenas(), &frame)?, frame.bytes, |at, bytes| {
                self.backend.read(&mut self.workspace.memory, at, &mut piece[..bytes])?;
                into.write(&piece[..bytes])
            })?;
        }
        into.seal()
    }
}
