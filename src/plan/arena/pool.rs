//! Slots for frames. A frame keeps its slot from the layer that writes it to its last reader.
//! Takes and drops repeat from slice to slice after the warm-up. So a rehearsal traces a few slices, all packed frames
//! get offsets for that trace, and the run finds each frame's offset by counting takes.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use super::pack::{self, PackedLayout};
use super::size_class::{SizeClass, within};
use super::trace::LifetimeTrace;
use crate::error::{Error, Result};
use crate::ir::{Access, DeviceOffset, HostOffset, Location, Offsets, Relocate, Value};

/// More bytes than any device has, and few enough to be added up.
const MAX_BYTES: u64 = 1 << 60;

/// How a frame gets its offset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SlotKind {
    /// Its lifetime is unknown in advance: it takes any free slot of its size. For frames that a host pushes, and for
    /// rings of cached frames.
    Pooled,
    /// Its lifetime is known from the rehearsal.
    Packed,
}

/// Names a frame's memory. [`Arena::offset`] turns it into an offset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Slot {
    Pooled {
        class: u32,
        index: u32,
    },
    /// A packed frame of a rehearsal: its number in the lifetime trace.
    Traced {
        number: u32,
        bytes: u64,
    },
    /// A packed frame of a run: where it lies in the packed region.
    Packed {
        start: u64,
        bytes: u64,
    },
    /// A packed frame of a run that the plan lacks, or for which another frame is in the way: a bug in the plan.
    /// Operations on it fail.
    Unplanned {
        slice: usize,
        frame: usize,
        bytes: u64,
    },
}

/// The locations of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Slots {}

impl Location for Slots {
    type Device = Slot;
    type Host = Slot;
}

/// A packed frame in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct LiveFrame {
    bytes: u64,
    uses: u32,
}

/// The packed frames of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
struct PackedFrames {
    layout: Arc<PackedLayout>,
    /// Frames in use, by where they start.
    live: BTreeMap<u64, LiveFrame>,
    /// True for a last slice that is shorter than others: the layout does not cover it.
    partial: bool,
    /// Bytes of the region that partial slices have needed.
    partial_bytes: u64,
    /// The reserved bytes of the arena.
    region: Range<u64>,
}

impl PackedFrames {
    fn new(layout: PackedLayout) -> PackedFrames {
        PackedFrames { layout: Arc::new(layout), live: BTreeMap::new(), partial: false, partial_bytes: 0, region: 0..0 }
    }

    /// Where frame `index` of a slice starts; `None` if the plan has no room for it.
    fn take(&mut self, slice: usize, index: usize, bytes: u64) -> Option<u64> {
        let start = if self.partial {
            pack::first_fit(self.live.iter().map(|(at, live)| (*at, at.saturating_add(live.bytes))), bytes)
        } else {
            self.layout.offset(slice, index)?
        };
        let before = self.live.range(..start.saturating_add(bytes)).next_back();
        if before.is_some_and(|(at, live)| at.saturating_add(live.bytes) > start) {
            return None;
        }
        if self.partial {
            self.partial_bytes = self.partial_bytes.max(start.saturating_add(bytes));
        }
        self.live.insert(start, LiveFrame { bytes, uses: 1 });
        Some(start)
    }

    fn bytes(&self) -> u64 {
        self.layout.bytes().max(self.partial_bytes)
    }
}

/// Packed frames, while planning and in a run.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Packing {
    Tracing(LifetimeTrace),
    Packed(PackedFrames),
}

impl Default for Packing {
    fn default() -> Packing {
        Packing::Tracing(LifetimeTrace::default())
    }
}

/// One memory, divided into slots.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Arena {
    classes: Vec<SizeClass>,
    packing: Packing,
    /// Number of this slice, and packed frames taken in it.
    slice: usize,
    taken: usize,
    /// Groups that are open.
    groups: usize,
}

impl Arena {
    /// A slot of `bytes` with one use.
    pub fn take(&mut self, bytes: u64, kind: SlotKind) -> Slot {
        match kind {
            SlotKind::Packed => self.take_packed(bytes),
            SlotKind::Pooled => {
                let class = self.class(bytes);
                Slot::Pooled { class: class as u32, index: self.classes[class].take() }
            }
        }
    }

    fn take_packed(&mut self, bytes: u64) -> Slot {
        let (slice, frame) = (self.slice, self.taken);
        self.taken += 1;
        match &mut self.packing {
            Packing::Tracing(trace) => Slot::Traced { number: trace.take(slice, frame, bytes), bytes },
            Packing::Packed(frames) => match frames.take(slice, frame, bytes) {
                Some(start) => Slot::Packed { start, bytes },
                None => Slot::Unplanned { slice, frame, bytes },
            },
        }
    }

    /// Slice `number` of a work item begins. `partial`: it is the last one and shorter than others.
    pub fn begin_slice(&mut self, number: usize, partial: bool) {
        (self.slice, self.taken) = (number, 0);
        self.set_partial(partial);
    }

    /// The next work item begins in the same slice. It takes the same frames again.
    pub fn next_item(&mut self) {
        self.taken = 0;
    }

    /// Says whether the slice that begins is partial.
    pub fn set_partial(&mut self, partial: bool) {
        if let Packing::Packed(frames) = &mut self.packing {
            frames.partial = partial && frames.layout.is_periodic();
        }
    }

    /// Slices begun.
    pub fn slices(&self) -> usize {
        self.slice + 1
    }

    /// Whether a slot has one use.
    pub fn is_sole(&mut self, slot: Slot) -> bool {
        self.uses(slot).is_some_and(|uses| *uses == 1)
    }

    /// Whether a slot is in use.
    pub fn is_live(&mut self, slot: Slot) -> bool {
        self.uses(slot).is_some_and(|uses| *uses > 0)
    }

    /// One more use of a slot.
    pub fn keep(&mut self, slot: Slot) {
        self.uses(slot).into_iter().for_each(|uses| *uses += 1);
    }

    /// One use fewer; the last one frees the slot.
    pub fn drop(&mut self, slot: Slot) {
        self.drop_with(slot, 0);
    }

    /// One use fewer. With the last use, those of `others` end that groups have counted.
    pub fn drop_with(&mut self, slot: Slot, others: u64) {
        let Some(uses) = self.uses(slot) else {
            debug_assert!(matches!(slot, Slot::Unplanned { .. }), "a free slot was dropped");
            return;
        };
        debug_assert!(*uses > 0, "a free slot was dropped");
        *uses -= 1;
        if *uses > 0 {
            return;
        }
        match (slot, &mut self.packing) {
            (Slot::Pooled { class, index }, _) => self.classes[class as usize].free(index, others),
            (Slot::Traced { number, .. }, Packing::Tracing(trace)) => trace.drop(number),
            (Slot::Packed { start, .. }, Packing::Packed(frames)) => _ = frames.live.remove(&start),
            _ => {}
        }
    }

    /// Takes and drops up to [`Arena::end_group`] are a group.
    pub fn begin_group(&mut self) {
        self.groups += 1;
        self.classes.iter_mut().for_each(SizeClass::begin_group);
    }

    /// The group is done `times` more. Its pooled slots are counted, not taken; none of its packed frames is left.
    pub fn end_group(&mut self, times: u64) {
        self.groups -= 1;
        self.classes.iter_mut().for_each(|class| class.end_group(times));
    }

    /// Reserves at least `slots` pooled slots of a size.
    pub fn provide(&mut self, bytes: u64, slots: u64) {
        let class = self.class(bytes);
        let class = &mut self.classes[class];
        class.slots = class.slots.max(slots);
    }

    fn emptied(&self) -> Arena {
        Arena { classes: self.classes.iter().map(SizeClass::emptied).collect(), ..Arena::default() }
    }

    /// Ends the rehearsal and packs its trace. `filling`: of a periodic job, the slices that fill the cone.
    pub fn pack(mut self, filling: Option<usize>, cancelled: &(dyn Fn() -> bool + Sync)) -> Arena {
        if let Packing::Tracing(trace) = &self.packing {
            self.packing = Packing::Packed(PackedFrames::new(PackedLayout::new(trace, filling, cancelled)));
        }
        self.reserve();
        self
    }

    /// Makes room for the partial slices that another arena of the same layout has run.
    pub fn cover_partial(&mut self, other: &Arena) {
        if let (Packing::Packed(own), Packing::Packed(other)) = (&mut self.packing, &other.packing) {
            own.partial_bytes = own.partial_bytes.max(other.partial_bytes);
        }
        for class in &other.classes {
            self.provide(class.bytes, class.slots);
        }
        self.reserve();
    }

    /// Fixes all offsets and frees all slots.
    fn reserve(&mut self) {
        let mut offset = 0;
        for class in &mut self.classes {
            let total = class.total();
            class.reserve(offset);
            offset = total.saturating_add(offset).min(MAX_BYTES);
        }
        if let Packing::Packed(frames) = &mut self.packing {
            frames.region = offset..offset.saturating_add(frames.bytes());
            frames.live.clear();
        }
        self.groups = 0;
        self.begin_slice(0, false);
    }

    /// Bytes of all slots; while tracing, a lower bound.
    pub fn bytes(&self) -> u64 {
        self.classes.iter().map(SizeClass::total).fold(self.region_bytes(), u64::saturating_add).min(MAX_BYTES)
    }

    fn region_bytes(&self) -> u64 {
        match &self.packing {
            Packing::Tracing(trace) => trace.peak_bytes(),
            Packing::Packed(frames) => frames.bytes(),
        }
    }

    pub fn slot_bytes(&self, slot: Slot) -> u64 {
        match slot {
            Slot::Pooled { class, .. } => self.classes[class as usize].bytes,
            Slot::Traced { bytes, .. } | Slot::Packed { bytes, .. } | Slot::Unplanned { bytes, .. } => bytes,
        }
    }

    /// An error if the run took more slots than its rehearsal: a bug in the plan.
    fn planned_offset(&self, slot: Slot) -> Result<u64> {
        self.offset(slot).ok_or_else(|| {
            let (bytes, slice) = (self.slot_bytes(slot), self.slice);
            Error::Internal(format!("the plan lacks {slot:?}, which has {bytes} bytes, in slice {slice}"))
        })
    }

    /// `None` if the run took more slots than its rehearsal.
    pub fn offset(&self, slot: Slot) -> Option<u64> {
        match (slot, &self.packing) {
            (Slot::Pooled { class, index }, _) => self.classes[class as usize].offset(index),
            (Slot::Packed { start, bytes }, Packing::Packed(frames)) => within(&frames.region, start, bytes),
            _ => None,
        }
    }

    fn class(&mut self, bytes: u64) -> usize {
        self.classes.iter().position(|c| c.bytes == bytes).unwrap_or_else(|| {
            self.classes.push(SizeClass::new(bytes, self.groups));
            self.classes.len() - 1
        })
    }

    /// The uses of a slot; `None` if it is [unplanned](Slot::Unplanned), or a packed one that is free.
    fn uses(&mut self, slot: Slot) -> Option<&mut u32> {
        match (slot, &mut self.packing) {
            (Slot::Pooled { class, index }, _) => Some(self.classes[class as usize].uses(index)),
            (Slot::Traced { number, .. }, Packing::Tracing(trace)) => Some(trace.uses(number)),
            (Slot::Packed { start, bytes }, Packing::Packed(frames)) => {
                let live = frames.live.get_mut(&start).filter(|live| live.bytes == bytes);
                live.map(|live| &mut live.uses)
            }
            _ => None,
        }
    }
}

/// The two memories of a job: the device's, and host memory for offloaded frames.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Arenas {
    pub device: Arena,
    pub host: Arena,
}

impl Arenas {
    /// For another rehearsal of the same job, with as many pooled slots.
    pub fn emptied(&self) -> Arenas {
        Arenas { device: self.device.emptied(), host: self.host.emptied() }
    }

    pub fn each(&mut self, change: impl Fn(&mut Arena)) {
        change(&mut self.device);
        change(&mut self.host);
    }

    pub fn pack(self, filling: Option<usize>, cancelled: &(dyn Fn() -> bool + Sync)) -> Arenas {
        Arenas { device: self.device.pack(filling, cancelled), host: self.host.pack(filling, cancelled) }
    }

    pub fn cover_partial(&mut self, other: &Arenas) {
        self.device.cover_partial(&other.device);
        self.host.cover_partial(&other.host);
    }
}

impl Relocate<Slots, Offsets> for &Arenas {
    fn device(&mut self, slot: Slot, _: Value, _: Access) -> Result<DeviceOffset> {
        self.device.planned_offset(slot).map(DeviceOffset)
    }

    fn host(&mut self, slot: Slot, _: Value, _: Access) -> Result<HostOffset> {
        self.host.planned_offset(slot).map(HostOffset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Arena {
        /// Bytes and number of the slots of each size, and bytes of the packed region.
        pub fn demand(&self) -> (Vec<(u64, u64)>, u64) {
            let mut classes: Vec<(u64, u64)> = self.classes.iter().map(|class| (class.bytes, class.slots)).collect();
            classes.sort_unstable();
            (classes, self.region_bytes())
        }
    }

    #[test]
    fn a_freed_slot_is_taken_again() {
        let mut arena = Arena::default();
        let (a, b) = (arena.take(64, SlotKind::Pooled), arena.take(64, SlotKind::Pooled));
        arena.keep(a);
        arena.drop(a);
        assert_ne!(arena.take(64, SlotKind::Pooled), a, "still kept once");
        arena.drop(b);
        assert_eq!(arena.take(64, SlotKind::Pooled), b);
        assert_eq!(arena.bytes(), 3 * 64);
    }

    #[test]
    fn a_run_gets_the_slots_of_its_rehearsal_side_by_side_and_no_more() {
        let mut rehearsal = Arena::default();
        rehearsal.take(64, SlotKind::Pooled);
        let b = rehearsal.take(128, SlotKind::Pooled);
        rehearsal.drop(b);
        rehearsal.take(64, SlotKind::Pooled);
        let mut arena = rehearsal.pack(None, &|| false);
        assert_eq!(arena.bytes(), 256);
        let offsets: Vec<_> =
            [64, 64, 128].map(|bytes| arena.take(bytes, SlotKind::Pooled)).map(|s| arena.offset(s)).into();
        assert_eq!(offsets, [Some(0), Some(64), Some(128)]);
        let beyond = arena.take(64, SlotKind::Pooled);
        assert_eq!(arena.offset(beyond), None);
    }

    /// Two slices that each make a large frame of a small one, and leave a small one to the next.
    fn slices(arena: &mut Arena, count: usize) -> Vec<Option<u64>> {
        let mut offsets = Vec::new();
        let mut left = None;
        for slice in 0..count {
            if slice > 0 {
                arena.begin_slice(slice, false);
            }
            let small = arena.take(10, SlotKind::Packed);
            let large = arena.take(60, SlotKind::Packed);
            arena.drop(small);
            let kept = arena.take(10, SlotKind::Packed);
            left.replace(kept).into_iter().for_each(|old| arena.drop(old));
            arena.drop(large);
            offsets.extend([small, large, kept].map(|slot| arena.offset(slot)));
        }
        offsets
    }

    #[test]
    fn scheduled_frames_share_memory_with_those_that_live_at_other_times() {
        let mut rehearsal = Arena::default();
        rehearsal.take(100, SlotKind::Pooled);
        slices(&mut rehearsal, PackedLayout::TRACED_SLICES);
        let mut run = rehearsal.pack(Some(0), &|| false);
        assert_eq!(run.bytes(), 100 + 80, "one large and two small at a time");
        run.take(100, SlotKind::Pooled);
        let offsets = slices(&mut run, 14);
        assert!(offsets.iter().all(|offset| offset.is_some_and(|offset| offset >= 100)));
        let period = 3 * PackedLayout::PERIOD;
        assert_eq!(offsets[6..6 + period], offsets[6 + period..6 + 2 * period]);
    }

    #[test]
    fn more_than_was_rehearsed_has_no_place() {
        let mut rehearsal = Arena::default();
        rehearsal.take(10, SlotKind::Packed);
        let mut run = rehearsal.pack(None, &|| false);
        let [planned, beyond, last] = [10, 10, 10].map(|bytes| run.take(bytes, SlotKind::Packed));
        assert_eq!([planned, beyond, last].map(|slot| run.offset(slot)), [Some(0), None, None]);
        let why = run.planned_offset(last).unwrap_err().to_string();
        assert!(why.contains("slice: 0, frame: 2"), "{why}");
        // Each is a frame of its own: a drop of one is not that of another.
        run.keep(last);
        [beyond, last, last, planned].into_iter().for_each(|slot| run.drop(slot));
        assert!([planned, beyond, last].into_iter().all(|slot| !run.is_live(slot)));
    }

    /// The same item again while a frame of it is live: what a run must never do.
    #[test]
    fn a_frame_never_gets_the_offset_of_another_that_is_live() {
        let mut rehearsal = Arena::default();
        rehearsal.take(10, SlotKind::Packed);
        let mut run = rehearsal.pack(None, &|| false);
        let first = run.take(10, SlotKind::Packed);
        run.next_item();
        let second = run.take(10, SlotKind::Packed);
        assert_eq!((run.offset(first), run.offset(second)), (Some(0), None));
        run.drop(first);
        run.drop(second);
        assert!(!run.is_live(first) && !run.is_live(second));
    }

    /// The layout of a cancelled search has every frame at one place.
    #[test]
    fn a_useless_layout_gives_no_frame_a_place_and_every_drop_is_right() {
        let mut rehearsal = Arena::default();
        slices(&mut rehearsal, PackedLayout::TRACED_SLICES);
        let mut run = rehearsal.pack(Some(0), &|| true);
        slices(&mut run, 14);
        let Packing::Packed(frames) = &run.packing else { panic!("it is packed") };
        assert!(frames.live.len() <= 1);
    }

    #[test]
    fn a_shorter_last_slice_finds_gaps_for_itself() {
        let mut rehearsal = Arena::default();
        slices(&mut rehearsal, PackedLayout::TRACED_SLICES);
        let packed = rehearsal.pack(Some(0), &|| false);
        let mut ending = packed.clone();
        slices(&mut ending, 3);
        ending.begin_slice(3, true);
        let long = ending.take(100, SlotKind::Packed);
        assert_eq!(ending.offset(long), None, "nobody has planned for it");
        let mut covered = packed.clone();
        covered.cover_partial(&ending);
        assert!(covered.bytes() >= 100 && covered.bytes() > packed.bytes());
        slices(&mut covered, 3);
        covered.begin_slice(3, true);
        let long = covered.take(100, SlotKind::Packed);
        assert!(covered.offset(long).is_some());
    }
}
