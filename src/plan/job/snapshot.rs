//! Where a stream is when it waits for frames: what has to be remembered to go on from there, in this process or another.
//!
//! All of a schedule follows from frame counts. So of its state only the number of frames taken and the contents of the
//! frames remembered need to be kept: a new job is brought to the same point by going through the motions.

use super::{Job, Wait};
use crate::model::Network;
use crate::plan::clip::Clip;
use crate::plan::slots::Slot;

/// A frame that later ones need.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Remembered {
    pub slot: Slot,
    /// Whether the slot is one of the pool of the past, in the host's memory.
    pub on_host: bool,
    pub bytes: u64,
}

impl Job {
    /// Whether everything that can be done without more input has been done.
    pub fn is_waiting(&mut self) -> bool {
        self.wait() == Wait::Input
    }

    /// Output frames that have left.
    pub fn stored(&self) -> u64 {
        self.stored
    }

    /// The frames that a waiting job remembers, in an order that depends on its layout and on how many it has taken.
    pub fn remembered(&self) -> Vec<Remembered> {
        debug_assert!(self.queue.is_empty() && self.canvases.is_empty() && self.outbox.iter().all(|o| o.is_empty()));
        self.lanes.iter().flat_map(|lane| lane.remembered(self)).collect()
    }

    /// Brings a stream's job that has not begun to where one waits that has taken `loaded` frames. What it then remembers is
    /// in none of its slots yet.
    pub fn skip_to(&mut self, loaded: u64) {
        let slice = self.layout.cut.slice;
        // From the third slice on one is like the other, so most of a long clip need only be counted.
        let skipped = loaded.saturating_sub(1 + 4 * slice) / slice * slice;
        loop {
            match self.wait() {
                Wait::No => self.done(),
                Wait::Input | Wait::End => match self.room().min(loaded - skipped - self.loaded()) {
                    0 => break,
                    count => (0..count).for_each(|_| self.load()),
                },
            }
        }
        // A slice is whole latent frames, so that it is whole frames at every rate.
        let computed = self.layout.network.later_stage_frames(skipped);
        self.lanes.iter_mut().for_each(|lane| lane.skip(skipped, &computed));
        self.stored += computed.last().copied().unwrap_or(0);
    }
}

impl Clip {
    fn remembered<'a>(&'a self, job: &'a Job) -> impl Iterator<Item = Remembered> + 'a {
        let remembered = |slot: Slot, on_host: bool| {
            let pool = if on_host { &job.pools.past } else { &job.pools.frames };
            Remembered { slot, on_host, bytes: pool.slot_bytes(slot) }
        };
        let frames = self.histories.iter().flat_map(|history| &history.frames);
        let frames = frames.chain(self.sums.iter().flatten()).chain(self.statistics.iter().flatten());
        let past = self.pasts.iter().flatten().flat_map(move |past| {
            let far = past.far.map(|slot| remembered(slot, true));
            past.near.map(|slot| remembered(slot, false)).into_iter().chain(far)
        });
        frames.map(move |slot| remembered(*slot, false)).chain(past)
    }

    /// Counts `taken` more input frames, of which each stage has made `computed` frames.
    fn skip(&mut self, taken: u64, computed: &[u64]) {
        self.loaded += taken;
        self.slice_end += taken;
        let inputs = [taken].into_iter().chain(computed.iter().copied());
        for (stage, (into, made)) in inputs.zip(computed).enumerate() {
            self.computed[stage] += made;
            let Network { stages, .. } = &*self.network;
            self.histories[stages[stage].head].first += into;
            stages[stage].body().for_each(|layer| self.histories[layer].first += made);
        }
        self.look_ahead();
    }
}
