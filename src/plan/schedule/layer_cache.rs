//! The causal cache of one layer: what it keeps of earlier frames, and where.
//!
//! Owns the slots of cached frames. Knows no operation.

use std::collections::VecDeque;

use crate::ir::{CachedFrame, FrameRef};
use crate::plan::arena::{Arena, Arenas, Slot, Slots};
use crate::plan::policy::CachePolicy;

pub type SlotRef = FrameRef<Slots>;
pub type CachedSlots = CachedFrame<Slots>;

/// Consecutive input frames of a layer. The front one is frame `first` of the clip.
#[derive(Debug)]
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

    /// Counts all frames as read. Their slots have been dropped.
    fn forget(&mut self) {
        self.first = self.end();
        self.frames.clear();
    }

    /// Drops the frames before `oldest`.
    pub fn drop_before(&mut self, oldest: u64, arena: &mut Arena) {
        while self.first < oldest {
            let Some(slot) = self.frames.pop_front() else { break };
            arena.drop(slot);
            self.first += 1;
        }
    }
}

/// What a layer keeps of earlier frames. Heads also queue their input here until a chunk is complete.
#[derive(Debug)]
pub enum LayerCache {
    /// Input frames on the device.
    Resident(FrameQueue),
    /// Products of earlier input frames instead of the frames.
    PartialSums { inputs: FrameQueue, sums: Option<Slot> },
    /// Normalised input frames, each split between device and host memory.
    Offloaded(VecDeque<CachedSlots>),
    /// Only the statistics of input frames. The frames are recomputed.
    Recomputed(VecDeque<Slot>),
}

impl LayerCache {
    /// `first`: the layer's first input frame.
    pub fn new(policy: CachePolicy, keeps_partial_sums: bool, first: u64) -> LayerCache {
        let inputs = FrameQueue { frames: VecDeque::new(), first };
        match policy {
            CachePolicy::Resident if keeps_partial_sums => LayerCache::PartialSums { inputs, sums: None },
            CachePolicy::Resident => LayerCache::Resident(inputs),
            CachePolicy::Offloaded { .. } => LayerCache::Offloaded(VecDeque::new()),
            CachePolicy::Recomputed => LayerCache::Recomputed(VecDeque::new()),
        }
    }

    /// The layer's resident input frames.
    pub fn inputs(&self) -> &FrameQueue {
        match self {
            LayerCache::Resident(inputs) | LayerCache::PartialSums { inputs, .. } => inputs,
            LayerCache::Offloaded(_) | LayerCache::Recomputed(_) => unreachable!("a banded layer queues no input"),
        }
    }

    pub fn inputs_mut(&mut self) -> &mut FrameQueue {
        match self {
            LayerCache::Resident(inputs) | LayerCache::PartialSums { inputs, .. } => inputs,
            LayerCache::Offloaded(_) | LayerCache::Recomputed(_) => unreachable!("a banded layer queues no input"),
        }
    }

    /// Cached frames that are split between device and host memory.
    pub fn split_frames(&self) -> Vec<CachedSlots> {
        if let LayerCache::Offloaded(frames) = self { frames.iter().copied().collect() } else { Vec::new() }
    }

    /// Every slot, as (on the device, in host memory), in an order that depends on the policy and the frame count only.
    pub fn slots(&self) -> Vec<CachedSlots> {
        let resident = |slot: &Slot| CachedSlots { resident: Some(*slot), host: None };
        match self {
            LayerCache::Resident(inputs) => inputs.frames.iter().map(resident).collect(),
            LayerCache::PartialSums { inputs, sums } => inputs.frames.iter().chain(sums).map(resident).collect(),
            LayerCache::Offloaded(frames) => frames.iter().copied().collect(),
            LayerCache::Recomputed(statistics) => statistics.iter().map(resident).collect(),
        }
    }

    /// Drops everything.
    pub fn clear(&mut self, arenas: &mut Arenas) {
        self.slots().into_iter().for_each(|frame| drop_cached(frame, arenas));
        match self {
            LayerCache::Resident(inputs) => inputs.forget(),
            LayerCache::PartialSums { inputs, sums } => {
                inputs.forget();
                *sums = None;
            }
            LayerCache::Offloaded(frames) => frames.clear(),
            LayerCache::Recomputed(statistics) => statistics.clear(),
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
