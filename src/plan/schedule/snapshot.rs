//! The persisted state of a waiting stream. A schedule follows from frame counts, so only the number of loaded frames
//! and the contents of cached frames are saved; a new schedule reaches the same point by replaying its operations
//! without running them.

use super::{Schedule, Wait};
use crate::plan::arena::Slot;

/// Slices that are replayed to restore a stream, after those that fill the cone.
const REPLAYED_SLICES: usize = 4;

/// A slot whose contents later frames need.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PersistedSlot {
    pub slot: Slot,
    /// Whether the slot is in host memory.
    pub on_host: bool,
    pub bytes: u64,
}

impl Schedule {
    /// Whether everything is done that needs no more input.
    pub fn is_waiting(&mut self) -> bool {
        self.wait() == Wait::Input
    }

    /// Output frames that have left.
    pub fn stored(&self) -> u64 {
        self.stored
    }

    /// The slots of a waiting schedule, in an order that depends on its spec and the frames loaded only.
    pub fn persisted_slots(&self) -> Vec<PersistedSlot> {
        debug_assert!(self.queue.is_empty() && self.canvases.is_empty() && self.outbox.iter().all(|o| o.is_empty()));
        let slots = self.items.iter().flat_map(|item| item.kept_slots()).flat_map(|frame| {
            let resident = frame.resident.map(|slot| self.persisted_slot(slot, false));
            resident.into_iter().chain(frame.host.map(|slot| self.persisted_slot(slot, true)))
        });
        slots.collect()
    }

    fn persisted_slot(&self, slot: Slot, on_host: bool) -> PersistedSlot {
        let arena = if on_host { &self.arenas.host } else { &self.arenas.device };
        PersistedSlot { slot, on_host, bytes: arena.slot_bytes(slot) }
    }

    /// Brings a new stream schedule to where one waits that has loaded `loaded` frames. The contents of its slots are
    /// missing.
    pub fn skip_to(&mut self, loaded: u64) {
        let slice = self.spec.policy.slice;
        // Slices repeat after the warm-up, so most of a long clip is only counted.
        let replayed = (self.spec.filling_slices(None) + REPLAYED_SLICES) as u64 * slice;
        let skipped = loaded.saturating_sub(self.spec.slices_start() + replayed) / slice * slice;
        loop {
            match self.wait() {
                Wait::No => self.done(),
                Wait::Input | Wait::End => match self.room().min(loaded - skipped - self.loaded()) {
                    0 => break,
                    count => (0..count).for_each(|_| self.load()),
                },
            }
        }
        // A slice is whole latent frames, so it is whole frames at every rate.
        let computed = self.spec.network.later_stage_frames(skipped);
        self.items.iter_mut().for_each(|item| item.skip(skipped, &computed));
        self.stored += computed.last().copied().unwrap_or(0);
    }
}
