//! Memory for frames of activations: equal slots for frames of equal size.
//!
//! A frame lives in its slot from the layer that writes it to the last one that reads it; a causal cache is nothing but
//! frames that are kept longer. So no frame is ever copied to be remembered, and memory cannot fragment: a freed slot
//! fits the next frame of its size exactly.

/// Where a frame lies. Becomes an address through [`SlotPool::offset`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Slot {
    class: u32,
    index: u32,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Class {
    bytes: u64,
    /// Uses of each slot; 0 is free.
    uses: Vec<u32>,
    /// Slots reserved by the plan; `None` while planning.
    reserved: Option<(u64, usize)>,
}

/// Gives out slots, always the lowest free one, and knows how many there ever had to be.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SlotPool {
    classes: Vec<Class>,
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
        Slot { class: class as u32, index: index as u32 }
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
        self
    }

    /// Bytes of all slots.
    pub fn bytes(&self) -> u64 {
        self.classes.iter().map(|c| c.bytes * c.uses.len() as u64).sum()
    }

    /// The offset of a slot; `None` if the run took more slots than its rehearsal, which would be a bug in the plan.
    pub fn offset(&self, slot: Slot) -> Option<u64> {
        let class = &self.classes[slot.class as usize];
        let (base, slots) = class.reserved?;
        ((slot.index as usize) < slots).then(|| base + class.bytes * u64::from(slot.index))
    }

    #[cfg(test)]
    pub fn in_use(&self) -> usize {
        self.classes.iter().map(|c| c.uses.iter().filter(|u| **u > 0).count()).sum()
    }

    fn class(&mut self, bytes: u64) -> usize {
        self.classes.iter().position(|c| c.bytes == bytes).unwrap_or_else(|| {
            self.classes.push(Class { bytes, uses: Vec::new(), reserved: None });
            self.classes.len() - 1
        })
    }

    fn uses(&mut self, slot: Slot) -> &mut u32 {
        &mut self.classes[slot.class as usize].uses[slot.index as usize]
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
}
