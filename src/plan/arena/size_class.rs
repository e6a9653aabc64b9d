//! Pooled slots of one size: which are free, and how many a job needs at a time.

use std::ops::Range;

/// Pooled slots of one size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SizeClass {
    pub bytes: u64,
    /// Uses of each slot; 0 is free.
    uses: Vec<u32>,
    /// No slot before this one is free. Searching from 0 took a fifth of the planning time with tiles.
    full: usize,
    /// Slots in use, with those of repeated [groups](SizeClass::end_group), and the most since the last mark.
    live: i64,
    most: i64,
    /// Of each group that is open: `live` at its start, and `most` of the group around it.
    marks: Vec<(i64, i64)>,
    /// Slots that are needed at a time.
    pub slots: u64,
    /// The bytes that the plan has for them; empty while planning.
    reserved: Range<u64>,
}

impl SizeClass {
    /// `groups`: those that are open.
    pub fn new(bytes: u64, groups: usize) -> SizeClass {
        let marks = vec![(0, 0); groups];
        SizeClass { bytes, uses: Vec::new(), full: 0, live: 0, most: 0, marks, slots: 0, reserved: 0..0 }
    }

    /// The number of a slot with one use.
    pub fn take(&mut self) -> u32 {
        let free = self.uses[self.full..].iter().position(|uses| *uses == 0);
        let index = free.map_or(self.uses.len(), |after| self.full + after);
        self.uses.resize(self.uses.len().max(index + 1), 0);
        self.uses[index] = 1;
        self.full = index + 1;
        self.live += 1;
        self.most = self.most.max(self.live);
        self.slots = self.slots.max(self.most as u64);
        index as u32
    }

    pub fn uses(&mut self, index: u32) -> &mut u32 {
        &mut self.uses[index as usize]
    }

    /// The last use of a slot has ended, and of `others` that groups have counted.
    pub fn free(&mut self, index: u32, others: u64) {
        self.full = self.full.min(index as usize);
        self.live -= 1 + others as i64;
    }

    pub fn begin_group(&mut self) {
        self.marks.push((self.live, self.most));
        self.most = self.live;
    }

    /// The group is done `times` more.
    pub fn end_group(&mut self, times: u64) {
        let Some((start, around)) = self.marks.pop() else { return };
        // Each time starts where the last one ended. So the first or the last needs the most.
        let gain = (self.live - start) * times as i64;
        self.live += gain;
        self.most = around.max(self.most + gain.max(0));
        self.slots = self.slots.max(self.most as u64);
    }

    /// Bytes of all slots.
    pub fn total(&self) -> u64 {
        self.bytes.saturating_mul(self.slots)
    }

    /// The same with every slot free.
    pub fn emptied(&self) -> SizeClass {
        SizeClass { slots: self.slots, reserved: self.reserved.clone(), ..SizeClass::new(self.bytes, 0) }
    }

    /// Every slot is free, and they begin at `offset`.
    pub fn reserve(&mut self, offset: u64) {
        *self = SizeClass { reserved: offset..offset.saturating_add(self.total()), ..self.emptied() };
    }

    /// `None` if fewer slots were reserved.
    pub fn offset(&self, index: u32) -> Option<u64> {
        within(&self.reserved, self.bytes.checked_mul(index.into())?, self.bytes)
    }
}

/// Where `bytes` at `start` of a region lie; `None` if they are not within it.
pub fn within(region: &Range<u64>, start: u64, bytes: u64) -> Option<u64> {
    let offset = region.start.checked_add(start)?;
    (offset.checked_add(bytes)? <= region.end).then_some(offset)
}
