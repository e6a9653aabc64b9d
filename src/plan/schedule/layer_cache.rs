//! The causal cache of one layer: what it keeps of earlier frames, and where.
//!
//! Owns the slots of cached frames. Knows no operation.

use std::collections::VecDeque;

use crate::ir::{CachedFrame, FrameRef};
use crate::plan::arena::{Arena, Arenas, Slot, Slots};

pub type SlotRef = FrameRef<Slots>;
pub type CachedSlots = CachedFrame<Slots>;

/// Consecutive input frames of a layer. The front one is frame `first` of the clip.
#[derive(Debug, Clone)]
pub struct FrameQueue {
    pub frames: VecDeque<Slot>,
    pub first: u64,
}

impl FrameQueue {
    fn new(first: u64) -> FrameQueue {
        FrameQueue { frames: VecDeque::new(), first }
    }

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

/// What a layer keeps of earlier frames. Its policy and its sizes say which of it.
#[derive(Debug, Clone)]
pub struct LayerCache {
    /// Whole input frames on the device. The first layer of a stage also queues its input here until a chunk is
    /// complete.
    pub inputs: FrameQueue,
    /// Products of earlier input frames in place of the frames.
    pub partial_sums: Option<Slot>,
    /// Normalised input frames, each split between device and host memory.
    pub split: VecDeque<CachedSlots>,
    /// The statistics of input frames that are recomputed.
    pub statistics: Vec<Slot>,
    /// Input frames that wait for the layer's first output: where a range begins within a clip.
    pub waiting: Vec<SlotRef>,
    /// What waits to be added to its outputs around a level.
    pub around: FrameQueue,
}

impl LayerCache {
    /// `first`: the layer's first input frame. `first_around`: the first frame that is added around a level.
    pub fn new(first: u64, first_around: u64) -> LayerCache {
        LayerCache {
            inputs: FrameQueue::new(first),
            partial_sums: None,
            split: VecDeque::new(),
            statistics: Vec::new(),
            waiting: Vec::new(),
            around: FrameQueue::new(first_around),
        }
    }

    /// Drops everything, in an order that depends on the policy and the frame count only.
    pub fn clear(&mut self, arenas: &mut Arenas) {
        self.inputs.drop_before(None, &mut arenas.device);
        self.partial_sums.take().into_iter().chain(self.statistics.drain(..)).for_each(|slot| arenas.device.drop(slot));
        self.split.drain(..).for_each(|frame| drop_cached(frame, arenas));
        drop_frames(self.waiting.drain(..), arenas);
        self.around.drop_before(None, &mut arenas.device);
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
