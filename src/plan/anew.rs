//! Frames that lie nowhere: the head of a stage makes them anew, band by band, for the layers that read them. These are the widest
//! fresh ones, where memory is short, and those of the past, where that takes less time than to move them.

use std::ops::Range;

use super::clip::{Clip, Schedule};
use super::cut::PAST_FRAMES;
use super::slots::{Life, Slot, SlotPool};
use super::step::{Anew, SlotAt};
use crate::model::LayerId;
use crate::tensor::At;

impl Clip {
    /// The statistics of a stage head's outputs; the outputs themselves are made anew for whoever reads them.
    pub(super) fn head_anew(&mut self, head: LayerId, frames: Range<u64>, to: &mut Schedule) -> Vec<SlotAt> {
        let mut statistics = || to.pools.frames.take(self.shapes.statistics, Life::Scheduled);
        let outputs =
            (0..(frames.end - frames.start) as usize).map(|index| At::Anew { index, statistics: statistics() });
        let outputs: Vec<SlotAt> = outputs.collect();
        self.head_in_bands(head, frames.clone(), &outputs, to);
        self.anew = Some(self.made_anew(head, frames));
        outputs
    }

    /// The past of `layer`, the frames before `first`, is to be made again by the head.
    pub(super) fn past_again(&mut self, head: LayerId, layer: LayerId, first: u64) {
        let statistics = self.statistics[layer].iter().enumerate();
        self.again = statistics.map(|(index, slot)| At::Anew { index, statistics: *slot }).collect();
        if !self.again.is_empty() {
            self.anew = Some(self.made_anew(head, first - self.again.len() as u64..first));
        }
    }

    /// What makes these frames of a stage's head anew.
    fn made_anew(&self, head: LayerId, frames: Range<u64>) -> Anew {
        let (time, history) = (self.network.layers[head].time, &self.histories[head]);
        let made = frames.map(|frame| {
            let recipe = time.recipe(frame);
            (recipe.terms().iter().map(|(t, slab)| (history.at(*t), *slab)).collect(), recipe.bias)
        });
        Anew { layer: head, input: self.shapes.layers[head], frames: made.collect() }
    }

    /// Finds places for the statistics of those of `frames` that will be made again; they come after `before` others.
    pub(super) fn remember_statistics(
        &mut self,
        layer: LayerId,
        frames: Range<u64>,
        before: usize,
        pool: &mut SlotPool,
    ) -> Vec<(usize, Slot)> {
        let wanted = if self.closing { 0 } else { PAST_FRAMES as usize };
        let seen = self.chunk_end.saturating_sub(wanted as u64).max(frames.start)..frames.end;
        let places =
            seen.map(|frame| (before + (frame - frames.start) as usize, pool.take(self.shapes.statistics, Life::Free)));
        let places: Vec<(usize, Slot)> = places.collect();
        let statistics = &mut self.statistics[layer];
        statistics.extend(places.iter().map(|(_, slot)| *slot));
        let older = statistics.len().saturating_sub(wanted);
        statistics.drain(..older).for_each(|slot| pool.drop(slot));
        places
    }
}
