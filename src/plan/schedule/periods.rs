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
const REHEARSED_LATENTS: u64 = 16;
/// Frames at the start of a clip that have recipes of their own, and more.
const WARM_UP_FRAMES: u64 = 8;

#[derive(Debug)]
pub struct PeriodFinder {
    network: Arc<Network>,
    /// Input up to this frame fills the cone.
    fill_end: u64,
    /// Where the period may have begun. A group of the arenas began there too.
    start: Option<ItemProgress>,
    /// Steps since then, and after how many a later start is tried.
    steps: u64,
    most_steps: u64,
    /// Whether the current slice has been shortened.
    done: bool,
}

impl PeriodFinder {
    /// `None` if slices are too short to repeat.
    pub fn new(spec: &ScheduleSpec) -> Option<PeriodFinder> {
        let network = Arc::clone(&spec.network);
        let is_long = spec.policy.slice > REHEARSED_LATENTS * network.latent_rate();
        let fill_end = spec.cone.fill_end();
        is_long.then_some(PeriodFinder { network, fill_end, start: None, steps: 0, most_steps: 1, done: false })
    }

    /// Sees a work item between two chunks. Where it repeats itself, skips whole periods and counts their memory.
    pub fn pass(&mut self, item: &mut WorkItem, pushed: bool, arenas: &mut Arenas) {
        if self.done || item.is_waiting(pushed) {
            return;
        }
        let now = item.progress(pushed);
        let warm_up = self.fill_end + WARM_UP_FRAMES * self.network.latent_rate();
        if now.taken < warm_up || now.computed.iter().any(|frames| *frames < WARM_UP_FRAMES) {
            return;
        }
        if let Some(inputs) = self.start.as_ref().and_then(|start| self.period(start, &now)) {
            let kept = REHEARSED_LATENTS * self.network.latent_rate();
            let times = now.left.saturating_sub(kept) / inputs;
            arenas.end_group(times);
            let skipped = times * inputs;
            item.skip_in_slice(skipped, &self.network.later_stage_frames(skipped), pushed);
            (self.start, self.done) = (None, true);
            return;
        }
        self.steps += 1;
        if self.start.is_none() || self.steps >= self.most_steps {
            self.drop_start(arenas);
            arenas.begin_group();
            (self.start, self.steps, self.most_steps) = (Some(now), 0, 2 * self.most_steps);
        }
    }

    /// Input frames from `start` to `now`, if what follows is the same.
    fn period(&self, start: &ItemProgress, now: &ItemProgress) -> Option<u64> {
        let inputs = now.taken - start.taken;
        let whole = inputs > 0 && inputs.is_multiple_of(self.network.latent_rate());
        if !whole || start.state != now.state {
            return None;
        }
        let made = self.network.later_stage_frames(inputs);
        let mut computed = start.computed.iter().zip(&now.computed).zip(made);
        computed.all(|((before, after), made)| after - before == made).then_some(inputs)
    }

    fn drop_start(&mut self, arenas: &mut Arenas) {
        if self.start.take().is_some() {
            arenas.end_group(0);
        }
    }

    /// The slice of the current work item ends.
    pub fn end_slice(&mut self, arenas: &mut Arenas) {
        self.drop_start(arenas);
        (self.steps, self.most_steps, self.done) = (0, 1, false);
    }
}
