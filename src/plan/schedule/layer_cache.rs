//! The causal cache of one layer: what it keeps of earlier frames, and where.
//!
//! Owns the slots of cached frames. Knows no operation.

use std::collections::VecDeque;

use crate::ir::{CachedFrame, FrameRef};
use crate::plan::arena::{Arena, Arenas, Slot, Slots};
use crate::plan::policy::{Form, Representation};

pub type SlotRef = FrameRef<Slots>;
pub type CachedSlots = CachedFrame<Slots>;

/// Consecutive input frames of a layer. The front one is frame `first` of the clip.
#[derive(Debug, Clone)]
pub struct FrameQueue {
    pub frames: VecDeque<Slot>,
    pub first: u64,
}

impl FrameQueue {
    pub fn end(&self) -> u64 {
        self.first + self.frames.len() as u64
    }

    pub fn at(&self, frame: u64) -> Slot {
        self.frames[(frame - self.first) as usize]
    }

    /// Drops the frames before `oldest`; `None` drops all.
    pub fn drop_before(&mut self, oldest: Option<u64>, arena: &mut Arena) {
        while oldest.is_none_or(|oldest| self.first < oldest) {
            let Some(slot) = self.frames.pop_front() else { break };
            arena.drop(slot);
            self.first += 1;
        }
    }
}

/// What a layer keeps of earlier frames. Heads also queue their input here until a chunk is complete.
#[derive(Debug, Clone)]
pub enum LayerCache {
    /// Whole input frames on the device.
    Frames(FrameQueue),
    /// Products of earlier input frames instead of the frames.
    PartialSums { inputs: FrameQueue, sums: Option<Slot> },
    /// Normalised input frames, each split between device and host memory.
    Split(VecDeque<CachedSlots>),
    /// Only the statistics of input frames. The frames are recomputed.
    Statistics(Vec<Slot>),
}

impl LayerCache {
    /// `first`: the layer's first input frame.
    pub fn new(form: Form, kept: Representation, first: u64) -> LayerCache {
        let inputs = FrameQueue { frames: VecDeque::new(), first };
        match (kept, form) {
            (Representation::Statistics, _) => LayerCache::Statistics(Vec::new()),
            (_, Form::Banded) => LayerCache::Split(VecDeque::new()),
            (Representation::PartialSums, Form::Whole) => LayerCache::PartialSums { inputs, sums: None },
            (_, Form::Whole) => LayerCache::Frames(inputs),
        }
    }

    /// The layer's resident input frames.
    pub fn inputs(&self) -> &FrameQueue {
        match self {
            LayerCache::Frames(inputs) | LayerCache::PartialSums { inputs, .. } => inputs,
            LayerCache::Split(_) | LayerCache::Statistics(_) => unreachable!("a banded layer queues no input"),
        }
    }

    pub fn inputs_mut(&mut self) -> &mut FrameQueue {
        match self {
            LayerCache::Frames(inputs) | LayerCache::PartialSums { inputs, .. } => inputs,
            LayerCache::Split(_) | LayerCache::Statistics(_) => unreachable!("a banded layer queues no input"),
        }
    }

    /// Cached frames that are split between device and host memory.
    pub fn split_frames(&self) -> impl Iterator<Item = CachedSlots> + '_ {
        let frames = if let LayerCache::Split(frames) = self { Some(frames) } else { None };
        frames.into_iter().flatten().copied()
    }

    /// The statistics of cached frames that are recomputed.
    pub fn statistics(&self) -> &[Slot] {
        if let LayerCache::Statistics(slots) = self { slots } else { &[] }
    }

    /// Drops everything, in an order that depends on the policy and the frame count only.
    pub fn clear(&mut self, arenas: &mut Arenas) {
        match self {
            LayerCache::Frames(inputs) => inputs.drop_before(None, &mut arenas.device),
            LayerCache::PartialSums { inputs, sums } => {
                inputs.drop_before(None, &mut arenas.device);
                sums.take().into_iter().for_each(|slot| arenas.device.drop(slot));
            }
            LayerCache::Split(frames) => frames.drain(..).for_each(|frame| drop_cached(frame, arenas)),
            LayerCache::Statistics(slots) => slots.drain(..).for_each(|slot| arenas.device.drop(slot)),
        }
    }
}

pub fn drop_cached(frame: CachedSlots, arenas: &mut Arenas) {
    frame.resident.into_iter().for_each(|slot| arenas.device.drop(slot));
    frame.host.into_iter().for_each(|slot| arenas.host.drop(slot));
}

pub fn drop_frames(frames: impl IntoIterator<Item = SlotRef>, arenas: &mut Arenas) {
    for frame in frames {
        match frame {
            FrameRef::Resident(slot) => arenas.device.drop(slot),
            FrameRef::Offloaded { frame, statistics } => {
                arenas.host.drop(frame);
                arenas.device.drop(statistics);
            }
            FrameRef::Rematerialised { statistics, .. } => arenas.device.drop(statistics),
        }
    }
}

/// The slots of frames, unless one is not resident.
pub fn all_resident(frames: &[SlotRef]) -> Option<Vec<Slot>> {
    let slot = |frame: &SlotRef| if let FrameRef::Resident(slot) = frame { Some(*slot) } else { None };
    frames.iter().map(slot).collect()
}

/// The slots of frames that an operation reads whole.
pub fn resident(frames: &[SlotRef]) -> Vec<Slot> {
    all_resident(frames).expect("frames that are not resident are read in bands")
}
