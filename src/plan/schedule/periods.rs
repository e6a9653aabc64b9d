//! Finds where a long slice repeats in itself, so that a rehearsal of it stays short.
//!
//! A work item that comes to the same state again, but for frame numbers, does the same again until the slice ends.

use std::sync::Arc;

use super::work_item::{ItemProgress, WorkItem};
use crate::model::Network;
use crate::plan::arena::Arenas;
use crate::plan::spec::ScheduleSpec;

/// Latent frames of a slice that are always rehearsed: all of a shorter slice, and the end of a longer one, where more
/// stays cached.
const REHEARSED_LATENTS: u64 = 6;
/// Frames at the start of a clip that have recipes of their own, and one more.
const WARM_UP_FRAMES: u64 = 4;

#[derive(Debug)]
pub struct PeriodFinder {
    network: Arc<Network>,
    /// Input up to this frame fills the cone.
    fill_end: u64,
    /// Input frames after which the chunks of all stages begin together again.
    period: u64,
    /// Where the period may have begun. A group of the arenas began there too.
    start: Option<ItemProgress>,
    /// Input frames after which a later start is tried.
    reach: u64,
    /// Whether the current slice has been shortened.
    done: bool,
}

impl PeriodFinder {
    /// `None` if slices are too short to repeat.
    pub fn new(spec: &ScheduleSpec) -> Option<PeriodFinder> {
        let network = Arc::clone(&spec.network);
        let is_long = spec.policy.slice > REHEARSED_LATENTS * network.latent_rate();
        let (fill_end, period) = (spec.cone.fill_end, spec.policy.period(&network) * network.latent_rate());
        is_long.then_some(PeriodFinder { network, fill_end, period, start: None, reach: period, done: false })
    }

    /// Sees a work item between two chunks. Where it repeats itself, skips whole periods and counts their memory.
    pub fn pass(&mut self, item: &mut WorkItem, pushed: bool, arenas: &mut Arenas) {
        if self.done || item.is_waiting(pushed) {
            return;
        }
        let (taken, computed) = (item.taken(pushed), item.computed());
        let warm_up = self.fill_end + WARM_UP_FRAMES * self.network.latent_rate();
        if taken < warm_up || computed.iter().any(|frames| *frames < WARM_UP_FRAMES) {
            return;
        }
        match &self.start {
            Some(start) if taken <= start.taken + self.reach => {
                let inputs = taken - start.taken;
                if self.is_whole(inputs, &start.computed, computed) && start.state == item.state(pushed) {
                    let kept = REHEARSED_LATENTS * self.network.latent_rate();
                    let times = item.left(taken).saturating_sub(kept) / inputs;
                    arenas.end_group(times);
                    let skipped = times * inputs;
                    item.skip_in_slice(skipped, &self.network.later_stage_frames(skipped), pushed);
                    (self.start, self.done) = (None, true);
                }
            }
            start => {
                // A state that has not come again belonged to the start of the slice.
                if start.is_some() {
                    arenas.end_group(0);
                    self.reach *= 2;
                }
                arenas.begin_group();
                self.start = Some(ItemProgress { taken, computed: computed.to_vec(), state: item.state(pushed) });
            }
        }
    }

    /// Whether stages computed what `inputs` input frames make, which are whole latent frames.
    fn is_whole(&self, inputs: u64, before: &[u64], after: &[u64]) -> bool {
        let whole = inputs > 0 && inputs.is_multiple_of(self.network.latent_rate());
        let computed = || before.iter().zip(after).zip(self.network.later_stage_frames(inputs));
        whole && computed().all(|((before, after), made)| after - before == made)
    }

    /// The slice of the current work item ends.
    pub fn end_slice(&mut self, arenas: &mut Arenas) {
        if self.start.take().is_some() {
            arenas.end_group(0);
        }
        (self.reach, self.done) = (self.period, false);
    }
}
