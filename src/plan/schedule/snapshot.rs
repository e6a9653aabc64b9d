//! The persisted state of a waiting stream. A schedule follows from frame counts, so only the number of loaded frames
//! and the contents of cached frames are saved; a new schedule reaches the same point by replaying its operations
//! without running them.

use super::work_item::WorkItem;
use super::{Next, Schedule};
use crate::plan::arena::Slot;
use crate::plan::cost::Target;
use crate::plan::policy::MAX_PACKED_LATENTS;

/// Slices that are replayed to restore a stream, after those that fill the cone.
const REPLAYED_SLICES: u64 = 4;

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
        self.prepare_next() == Next::Input
    }

    /// Output frames that have left.
    pub fn stored(&self) -> u64 {
        self.stored
    }

    /// The slots of a waiting schedule, in an order that depends on its spec and the frames loaded only.
    pub fn persisted_slots(&self) -> Vec<PersistedSlot> {
        debug_assert!(self.queue.is_empty() && self.canvases.is_empty() && self.outbox.iter().all(|o| o.is_empty()));
        self.items.iter().flat_map(|item| self.slots_of(item)).collect()
    }

    fn slots_of(&self, item: &WorkItem) -> impl Iterator<Item = PersistedSlot> {
        item.kept_slots().flat_map(|frame| {
            let resident = frame.resident.map(|slot| self.persisted_slot(slot, false));
            resident.into_iter().chain(frame.host.map(|slot| self.persisted_slot(slot, true)))
        })
    }

    fn persisted_slot(&self, slot: Slot, on_host: bool) -> PersistedSlot {
        let arena = if on_host { &self.arenas.host } else { &self.arenas.device };
        PersistedSlot { slot, on_host, bytes: arena.slot_bytes(slot) }
    }

    /// Bytes of all persisted slots of the job.
    pub fn persisted_bytes(&self) -> u64 {
        let of_item = |item: &WorkItem| self.slots_of(item).map(|slot| slot.bytes).sum::<u64>();
        let items = self.items.iter().zip(&self.places);
        items.map(|(item, place)| of_item(item).saturating_mul(place.items)).fold(0, u64::saturating_add)
    }

    /// Brings a new stream schedule to the point where `loaded` frames are loaded and it waits for more. The contents
    /// of its slots are missing. Useless when `target` is cancelled.
    pub fn skip_to(&mut self, loaded: u64, target: &Target) {
        let (slice, rate, start) = (self.spec.policy.slice, self.spec.network.latent_rate(), self.spec.slices_start());
        // Slices repeat after the warm-up, so most of a long clip is only counted. Only packed frames need slices of
        // the full length: what is left after a slice depends on its last frames.
        let (whole, short) = (loaded.saturating_sub(start) / slice, slice.min(MAX_PACKED_LATENTS * rate));
        let filling = self.spec.cone.fill_end.saturating_sub(start + short).div_ceil(short);
        let enough = filling + REPLAYED_SLICES;
        let (replayed, length) = if whole * slice >= enough * short { (enough, short) } else { (whole, slice) };
        for number in 1..=replayed {
            let end = start + number * length;
            self.items.iter_mut().for_each(|item| item.set_slice_end(end));
            self.replay(end, target);
            // What comes next assumes that the whole slice was replayed.
            if target.is_cancelled() {
                return;
            }
        }
        // A slice is whole latent frames, so it is whole frames at every rate.
        let skipped = whole * slice - replayed * length;
        let computed = self.spec.network.later_stage_frames(skipped);
        self.items.iter_mut().for_each(|item| item.skip(skipped, &computed));
        self.stored += computed.last().copied().unwrap_or(0);
        self.replay(loaded, target);
    }

    /// Loads up to frame `end`, and goes through all that can be done then.
    fn replay(&mut self, end: u64, target: &Target) {
        self.replay_ready(target);
        while self.loaded() < end && !target.is_cancelled() {
            self.load();
            self.queue.clear();
        }
        self.replay_ready(target);
    }

    fn replay_ready(&mut self, target: &Target) {
        while self.prepare_next() == Next::Op && !target.is_cancelled() {
            self.done();
        }
    }
}
