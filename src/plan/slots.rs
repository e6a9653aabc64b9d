//! Memory for frames of activations.
//!
//! A frame lives in its slot from the layer that writes it to the last one that reads it; a causal cache is little but
//! frames that are kept longer. So no frame is copied to be remembered, but by layers that never have it whole.
//!
//! Which frames are taken and given back, and in which order, is the same in every slice of a job from the third on. So a
//! rehearsal of a few slices [records](Recording) when each frame lives, all frames are packed into one region with that
//! known, and the run finds each frame's place by counting.

mod packing;

pub use packing::Packed;

use std::collections::BTreeMap;
use std::sync::Arc;

use packing::Recording;

/// How long a frame lives, as far as memory is concerned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Life {
    /// Until nobody needs it, and nobody says when: equal slots for equal sizes, so that a freed one fits the next frame
    /// exactly. For what a host sends when it likes, and for rings of the past.
    Free,
    /// As the schedule has it.
    Scheduled,
}

/// Where a frame lies. Becomes an address through [`SlotPool::offset`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Slot {
    Free {
        class: u32,
        index: u32,
    },
    /// While recording, `start` is but a number.
    Scheduled {
        start: u64,
        bytes: u64,
    },
}

/// Slots of one size.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Class {
    bytes: u64,
    /// Uses of each slot; 0 is free.
    uses: Vec<u32>,
    /// None before this one is free.
    full: usize,
    /// Slots reserved by the plan; `None` while planning.
    reserved: Option<(u64, usize)>,
}

impl Class {
    fn empty(&mut self) {
        self.uses.fill(0);
        self.full = 0;
    }
}

/// A scheduled frame that somebody needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Live {
    bytes: u64,
    uses: u32,
}

/// Where scheduled frames find their places.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Script {
    Recording(Recording),
    Following(Arc<Packed>),
}

impl Default for Script {
    fn default() -> Script {
        Script::Recording(Recording::default())
    }
}

/// Gives out slots.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SlotPool {
    classes: Vec<Class>,
    script: Script,
    live: BTreeMap<u64, Live>,
    /// Slices begun before this one, and the scheduled frames taken in it.
    slice: usize,
    taken: usize,
    /// Whether this slice is the last and shorter than others, so that the script does not tell of it.
    partial: bool,
    /// Whether all frames are free, as slices are too long to be packed, or that takes less.
    loose: bool,
    /// Bytes that partial slices have needed of the region of scheduled frames.
    partial_bytes: u64,
    /// Where that region begins, and its bytes; `None` while planning.
    region: Option<(u64, u64)>,
}

impl SlotPool {
    /// A free slot of `bytes`, used once.
    pub fn take(&mut self, bytes: u64, life: Life) -> Slot {
        match life {
            Life::Scheduled if !self.loose => self.take_scheduled(bytes),
            Life::Free | Life::Scheduled => self.take_free(bytes),
        }
    }

    fn take_free(&mut self, bytes: u64) -> Slot {
        let class = self.class(bytes);
        let Class { uses, full, .. } = &mut self.classes[class];
        let index = uses[*full..].iter().position(|u| *u == 0).map_or(uses.len(), |after| *full + after);
        uses.resize(uses.len().max(index + 1), 0);
        uses[index] = 1;
        *full = index + 1;
        Slot::Free { class: class as u32, index: index as u32 }
    }

    fn take_scheduled(&mut self, bytes: u64) -> Slot {
        let start = match &mut self.script {
            Script::Recording(recording) => recording.take(self.slice, self.taken, bytes),
            Script::Following(_) if self.partial => self.first_gap(bytes),
            Script::Following(packed) => packed.place(self.slice, self.taken),
        };
        if self.partial {
            self.partial_bytes = self.partial_bytes.max(start.saturating_add(bytes));
        }
        self.taken += 1;
        debug_assert!(self.is_free(start, bytes), "two frames in one place");
        self.live.insert(start, Live { bytes, uses: 1 });
        Slot::Scheduled { start, bytes }
    }

    /// The lowest place with room for `bytes`.
    fn first_gap(&self, bytes: u64) -> u64 {
        let mut start = 0;
        for (at, live) in &self.live {
            if *at >= start + bytes {
                break;
            }
            start = start.max(at + live.bytes);
        }
        start
    }

    fn is_free(&self, start: u64, bytes: u64) -> bool {
        match self.script {
            Script::Recording(_) => !self.live.contains_key(&start),
            Script::Following(_) => {
                let before = self.live.range(..start.saturating_add(bytes)).next_back();
                before.is_none_or(|(at, live)| at + live.bytes <= start)
            }
        }
    }

    /// What comes now belongs to the next slice. `partial`: it is the last one, and shorter than others.
    pub fn next_slice(&mut self, partial: bool) {
        (self.slice, self.taken) = (self.slice + 1, 0);
        self.set_partial(partial);
    }

    /// What comes now belongs to another clip or tile in the same slice, which takes the same frames again.
    pub fn next_turn(&mut self) {
        self.taken = 0;
    }

    /// What comes now belongs to the first slice of another clip.
    pub fn first_slice(&mut self, partial: bool) {
        (self.slice, self.taken) = (0, 0);
        self.set_partial(partial);
    }

    /// Tells of a slice that has not begun to work whether it is one that the script does not tell of.
    pub fn set_partial(&mut self, partial: bool) {
        self.partial = partial && matches!(&self.script, Script::Following(packed) if packed.repeats());
    }

    /// Slices begun.
    pub fn slices(&self) -> usize {
        self.slice + 1
    }

    /// Whether nobody but the asker uses a slot.
    pub fn is_sole(&mut self, slot: Slot) -> bool {
        *self.uses(slot) == 1
    }

    /// One more use of a slot.
    pub fn keep(&mut self, slot: Slot) {
        *self.uses(slot) += 1;
    }

    /// One use fewer; the last one frees the slot.
    pub fn drop(&mut self, slot: Slot) {
        let uses = self.uses(slot);
        debug_assert!(*uses > 0, "a free slot was dropped");
        *uses -= 1;
        match slot {
            _ if *uses > 0 => {}
            Slot::Free { class, index } => {
                let full = &mut self.classes[class as usize].full;
                *full = (*full).min(index as usize);
            }
            Slot::Scheduled { start, .. } => {
                self.live.remove(&start);
                if let Script::Recording(recording) = &mut self.script {
                    recording.give_back(start);
                }
            }
        }
    }

    /// Sees to it that there are so many free slots of a size.
    pub fn provide(&mut self, bytes: u64, slots: u64) {
        let class = self.class(bytes);
        let uses = &mut self.classes[class].uses;
        uses.resize(uses.len().max(slots as usize), 0);
    }

    fn emptied(&self, loose: bool) -> SlotPool {
        let mut empty = SlotPool { classes: self.classes.clone(), loose, ..SlotPool::default() };
        empty.classes.iter_mut().for_each(Class::empty);
        empty
    }

    /// Ends the rehearsal: packs what was recorded. `repeats`: slices from the third on are alike, and more may come.
    pub fn pack(mut self, repeats: bool) -> SlotPool {
        if let Script::Recording(recording) = &self.script {
            self.script = Script::Following(Arc::new(recording.pack(repeats)));
        }
        self.reserve();
        self
    }

    /// Makes room for the partial slices that another pool, packed alike, has met.
    pub fn cover_partial(&mut self, other: &SlotPool) {
        self.partial_bytes = self.partial_bytes.max(other.partial_bytes);
        for class in &other.classes {
            self.provide(class.bytes, class.uses.len() as u64);
        }
        self.reserve();
    }

    /// Fixes where everything lies, and empties it.
    fn reserve(&mut self) {
        let mut offset = 0;
        for class in &mut self.classes {
            class.reserved = Some((offset, class.uses.len()));
            offset += class.bytes * class.uses.len() as u64;
            class.empty();
        }
        self.region = Some((offset, self.region_bytes()));
        self.live.clear();
        self.first_slice(false);
    }

    /// Bytes of all slots. While recording, the least that these can be.
    pub fn bytes(&self) -> u64 {
        self.classes.iter().map(|c| c.bytes * c.uses.len() as u64).sum::<u64>() + self.region_bytes()
    }

    fn region_bytes(&self) -> u64 {
        match &self.script {
            Script::Recording(recording) => recording.most_bytes(),
            Script::Following(packed) => packed.bytes().max(self.partial_bytes),
        }
    }

    pub fn slot_bytes(&self, slot: Slot) -> u64 {
        match slot {
            Slot::Free { class, .. } => self.classes[class as usize].bytes,
            Slot::Scheduled { bytes, .. } => bytes,
        }
    }

    /// The offset of a slot; `None` if the run took more slots than its rehearsal, which would be a bug in the plan.
    pub fn offset(&self, slot: Slot) -> Option<u64> {
        match slot {
            Slot::Free { class, index } => {
                let class = &self.classes[class as usize];
                let (base, slots) = class.reserved?;
                ((index as usize) < slots).then(|| base + class.bytes * u64::from(index))
            }
            Slot::Scheduled { start, bytes } => {
                let (region, end) = self.region?;
                (start.checked_add(bytes)? <= end).then_some(region + start)
            }
        }
    }

    fn class(&mut self, bytes: u64) -> usize {
        self.classes.iter().position(|c| c.bytes == bytes).unwrap_or_else(|| {
            self.classes.push(Class { bytes, uses: Vec::new(), full: 0, reserved: None });
            self.classes.len() - 1
        })
    }

    fn uses(&mut self, slot: Slot) -> &mut u32 {
        match slot {
            Slot::Free { class, index } => &mut self.classes[class as usize].uses[index as usize],
            Slot::Scheduled { start, .. } => &mut self.live.get_mut(&start).expect("a slot that is in use").uses,
        }
    }
}

/// The two memories of a job: the device's, and the host's for frames that are not worth the device's.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pools {
    pub frames: SlotPool,
    pub past: SlotPool,
}

impl Pools {
    /// For another rehearsal of the same job, with as many free slots.
    pub fn emptied(&self, loose: bool) -> Pools {
        Pools { frames: self.frames.emptied(loose), past: self.past.emptied(loose) }
    }

    pub fn next_slice(&mut self, partial: bool) {
        self.frames.next_slice(partial);
        self.past.next_slice(partial);
    }

    pub fn next_turn(&mut self) {
        self.frames.next_turn();
        self.past.next_turn();
    }

    pub fn first_slice(&mut self, partial: bool) {
        self.frames.first_slice(partial);
        self.past.first_slice(partial);
    }

    pub fn set_partial(&mut self, partial: bool) {
        self.frames.set_partial(partial);
        self.past.set_partial(partial);
    }

    pub fn pack(self, repeats: bool) -> Pools {
        Pools { frames: self.frames.pack(repeats), past: self.past.pack(repeats) }
    }

    pub fn cover_partial(&mut self, other: &Pools) {
        self.frames.cover_partial(&other.frames);
        self.past.cover_partial(&other.past);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_freed_slot_is_taken_again() {
        let mut pool = SlotPool::default();
        let (a, b) = (pool.take(64, Life::Free), pool.take(64, Life::Free));
        pool.keep(a);
        pool.drop(a);
        assert_ne!(pool.take(64, Life::Free), a, "still kept once");
        pool.drop(b);
        assert_eq!(pool.take(64, Life::Free), b);
        assert_eq!(pool.bytes(), 3 * 64);
    }

    #[test]
    fn a_run_gets_the_slots_of_its_rehearsal_side_by_side_and_no_more() {
        let mut rehearsal = SlotPool::default();
        rehearsal.take(64, Life::Free);
        let b = rehearsal.take(128, Life::Free);
        rehearsal.drop(b);
        rehearsal.take(64, Life::Free);
        let mut pool = rehearsal.pack(false);
        assert_eq!(pool.bytes(), 256);
        let offsets: Vec<_> = [64, 64, 128].map(|bytes| pool.take(bytes, Life::Free)).map(|s| pool.offset(s)).into();
        assert_eq!(offsets, [Some(0), Some(64), Some(128)]);
        let beyond = pool.take(64, Life::Free);
        assert_eq!(pool.offset(beyond), None);
    }

    /// Two slices that each make a large frame of a small one, and leave a small one to the next.
    fn slices(pool: &mut SlotPool, count: usize) -> Vec<Option<u64>> {
        let mut offsets = Vec::new();
        let mut left = None;
        for slice in 0..count {
            if slice > 0 {
                pool.next_slice(false);
            }
            let small = pool.take(10, Life::Scheduled);
            let large = pool.take(60, Life::Scheduled);
            pool.drop(small);
            let kept = pool.take(10, Life::Scheduled);
            left.replace(kept).into_iter().for_each(|old| pool.drop(old));
            pool.drop(large);
            offsets.extend([small, large, kept].map(|slot| pool.offset(slot)));
        }
        offsets
    }

    #[test]
    fn scheduled_frames_share_memory_with_those_that_live_at_other_times() {
        let mut rehearsal = SlotPool::default();
        rehearsal.take(100, Life::Free);
        slices(&mut rehearsal, Packed::TELLING_SLICES);
        let mut run = rehearsal.pack(true);
        assert_eq!(run.bytes(), 100 + 80, "one large and two small at a time");
        run.take(100, Life::Free);
        let offsets = slices(&mut run, 14);
        assert!(offsets.iter().all(|offset| offset.is_some_and(|offset| offset >= 100)));
        let period = 3 * Packed::PERIOD;
        assert_eq!(offsets[6..6 + period], offsets[6 + period..6 + 2 * period]);
    }

    #[test]
    fn more_than_was_rehearsed_has_no_place() {
        let mut rehearsal = SlotPool::default();
        rehearsal.take(10, Life::Scheduled);
        let mut run = rehearsal.pack(false);
        let [planned, beyond] = [10, 10].map(|bytes| run.take(bytes, Life::Scheduled));
        assert_eq!((run.offset(planned), run.offset(beyond)), (Some(0), None));
    }

    #[test]
    fn a_shorter_last_slice_finds_gaps_for_itself() {
        let mut rehearsal = SlotPool::default();
        slices(&mut rehearsal, Packed::TELLING_SLICES);
        let packed = rehearsal.pack(true);
        let mut ending = packed.clone();
        slices(&mut ending, 3);
        ending.next_slice(true);
        let long = ending.take(100, Life::Scheduled);
        assert_eq!(ending.offset(long), None, "nobody has planned for it");
        let mut covered = packed.clone();
        covered.cover_partial(&ending);
        assert!(covered.bytes() >= 100 && covered.bytes() > packed.bytes());
        slices(&mut covered, 3);
        covered.next_slice(true);
        let long = covered.take(100, Life::Scheduled);
        assert!(covered.offset(long).is_some());
    }
}
