//! Memory for frames of activations.
//!
//! A frame lives in its slot from the layer that writes it to the last one that reads it; a causal cache is nothing but
//! frames that are kept longer. So no frame is ever copied to be remembered. Frames that may be kept have equal slots for
//! equal sizes: a freed slot fits the next frame of its size exactly, so memory cannot fragment however long the clip. Frames
//! that do not outlive their stage's turn lie behind those, wherever there is room: every turn begins with none. A still image
//! is all one turn.

/// How long a frame lives at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Life {
    /// As long as anybody needs it.
    Long,
    /// Until the stage that works on it has done its chunk; in a still image, until the image is done.
    Turn,
}

/// Where a frame lies. Becomes an address through [`SlotPool::offset`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Slot {
    Long { class: u32, index: u32 },
    Turn { start: u64, bytes: u64 },
}

/// Slots of one size.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Class {
    bytes: u64,
    /// Uses of each slot; 0 is free.
    uses: Vec<u32>,
    /// Slots reserved by the plan; `None` while planning.
    reserved: Option<(u64, usize)>,
}

/// A frame of the current turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Span {
    start: u64,
    bytes: u64,
    uses: u32,
}

/// Gives out slots, always the lowest free one, and knows how many there ever had to be.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SlotPool {
    classes: Vec<Class>,
    /// In the order of where they lie.
    turn: Vec<Span>,
    /// Bytes that turns have needed, and those reserved by the plan.
    turn_bytes: u64,
    turn_reserved: Option<(u64, u64)>,
}

impl SlotPool {
    /// A free slot of `bytes`, used once.
    pub fn take(&mut self, bytes: u64) -> Slot {
        let class = self.class(bytes);
        let uses = &mut self.classes[class].uses;
        let index = uses.iter().position(|u| *u == 0).unwrap_or_else(|| {
            uses.push(0);
            uses.len() - 1
        });
        uses[index] = 1;
        Slot::Long { class: class as u32, index: index as u32 }
    }

    /// `count` slots of `bytes` each, used once. Those of a turn lie side by side.
    pub fn take_many(&mut self, bytes: u64, count: usize, life: Life) -> Vec<Slot> {
        if life == Life::Long {
            return (0..count).map(|_| self.take(bytes)).collect();
        }
        let needed = bytes * count as u64;
        let mut start = 0;
        let at = self.turn.iter().position(|span| {
            let fits = span.start - start >= needed;
            if !fits {
                start = span.start + span.bytes;
            }
            fits
        });
        let at = at.unwrap_or(self.turn.len());
        let starts: Vec<u64> = (0..count as u64).map(|i| start + i * bytes).collect();
        self.turn.splice(at..at, starts.iter().map(|start| Span { start: *start, bytes, uses: 1 }));
        self.turn_bytes = self.turn_bytes.max(start + needed);
        starts.into_iter().map(|start| Slot::Turn { start, bytes }).collect()
    }

    /// Whether the turn has left nothing behind.
    pub fn turn_is_over(&self) -> bool {
        self.turn.is_empty()
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
        if let (0, Slot::Turn { start, .. }) = (*uses, slot) {
            self.turn.retain(|span| span.start != start);
        }
    }

    /// Slots of `bytes` that will be in use beside those a shortened rehearsal took.
    pub fn add(&mut self, bytes: u64, slots: u64) {
        let class = self.class(bytes);
        let uses = &mut self.classes[class].uses;
        uses.resize(uses.len() + slots as usize, 0);
    }

    /// Ends the rehearsal: fixes the number of slots at what was needed, and empties them.
    pub fn reserve(mut self) -> SlotPool {
        let mut offset = 0;
        for class in &mut self.classes {
            class.reserved = Some((offset, class.uses.len()));
            offset += class.bytes * class.uses.len() as u64;
            class.uses.fill(0);
        }
        self.turn.clear();
        self.turn_reserved = Some((offset, self.turn_bytes));
        self
    }

    /// Bytes of all slots.
    pub fn bytes(&self) -> u64 {
        self.classes.iter().map(|c| c.bytes * c.uses.len() as u64).sum::<u64>() + self.turn_bytes
    }

    pub fn slot_bytes(&self, slot: Slot) -> u64 {
        match slot {
            Slot::Long { class, .. } => self.classes[class as usize].bytes,
            Slot::Turn { bytes, .. } => bytes,
        }
    }

    /// The offset of a slot; `None` if the run took more slots than its rehearsal, which would be a bug in the plan.
    pub fn offset(&self, slot: Slot) -> Option<u64> {
        match slot {
            Slot::Long { class, index } => {
                let class = &self.classes[class as usize];
                let (base, slots) = class.reserved?;
                ((index as usize) < slots).then(|| base + class.bytes * u64::from(index))
            }
            Slot::Turn { start, bytes } => {
                let (base, reserved) = self.turn_reserved?;
                (start + bytes <= reserved).then_some(base + start)
            }
        }
    }

    #[cfg(test)]
    pub fn in_use(&self) -> usize {
        self.turn.len() + self.classes.iter().map(|c| c.uses.iter().filter(|u| **u > 0).count()).sum::<usize>()
    }

    fn class(&mut self, bytes: u64) -> usize {
        self.classes.iter().position(|c| c.bytes == bytes).unwrap_or_else(|| {
            self.classes.push(Class { bytes, uses: Vec::new(), reserved: None });
            self.classes.len() - 1
        })
    }

    fn uses(&mut self, slot: Slot) -> &mut u32 {
        match slot {
            Slot::Long { class, index } => &mut self.classes[class as usize].uses[index as usize],
            Slot::Turn { start, .. } => {
                let span = self.turn.iter_mut().find(|span| span.start == start);
                &mut span.expect("a slot of this turn").uses
            }
        }
    }
}

/// The two memories of a job: the device's, and the host's for frames of the past that are not worth the device's.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pools {
    pub frames: SlotPool,
    pub past: SlotPool,
}

impl Pools {
    pub fn reserve(self) -> Pools {
        Pools { frames: self.frames.reserve(), past: self.past.reserve() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_freed_slot_is_taken_again() {
        let mut pool = SlotPool::default();
        let (a, b) = (pool.take(64), pool.take(64));
        pool.keep(a);
        pool.drop(a);
        assert_ne!(pool.take(64), a, "still kept once");
        pool.drop(b);
        assert_eq!(pool.take(64), b);
        assert_eq!(pool.bytes(), 3 * 64);
    }

    #[test]
    fn a_run_gets_the_slots_of_its_rehearsal_side_by_side_and_no_more() {
        let mut rehearsal = SlotPool::default();
        rehearsal.take(64);
        let b = rehearsal.take(128);
        rehearsal.drop(b);
        rehearsal.take(64);
        let mut pool = rehearsal.reserve();
        assert_eq!(pool.bytes(), 256);
        let offsets: Vec<_> = [64, 64, 128].map(|bytes| pool.take(bytes)).map(|s| pool.offset(s)).into();
        assert_eq!(offsets, [Some(0), Some(64), Some(128)]);
        let beyond = pool.take(64);
        assert_eq!(pool.offset(beyond), None);
    }

    #[test]
    fn frames_of_a_turn_fill_the_gaps_behind_the_others() {
        let mut rehearsal = SlotPool::default();
        rehearsal.take(100);
        let a = rehearsal.take_many(50, 2, Life::Turn);
        let b = rehearsal.take_many(10, 1, Life::Turn);
        a.iter().for_each(|slot| rehearsal.drop(*slot));
        let c = rehearsal.take_many(30, 3, Life::Turn);
        let d = rehearsal.take_many(20, 1, Life::Turn);
        let mut run = rehearsal.clone().reserve();
        assert_eq!(run.bytes(), 100 + 130);
        assert_eq!([a[1], b[0], c[2], d[0]].map(|slot| run.offset(slot)), [Some(150), Some(200), Some(160), Some(210)]);
        let beyond = run.take_many(131, 1, Life::Turn);
        assert_eq!(run.offset(beyond[0]), None, "more than planned");
    }
}
