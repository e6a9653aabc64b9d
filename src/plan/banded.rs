//! Convolutions in bands: for layers whose normalised input, past or output is not to lie whole on the device.

use std::ops::Range;

use super::clip::{Clip, Schedule};
use super::cut::{PAST_FRAMES, Past};
use super::layers::Side;
use super::slots::{Life, Pools, Slot};
use super::step::{Banded, BandedFrame, PastSlots, SlotAt, Step};
use crate::model::LayerId;
use crate::tensor::{At, Columns, PastAt};

/// Frames that go into a layer for the first time.
#[derive(Clone, Copy)]
pub(super) enum Fresh<'a> {
    /// Others need them too.
    Shared(&'a [SlotAt]),
    /// Nobody else does, so that the output may lie over them: a band has read its rows before any of them is written.
    Own(&'a [SlotAt]),
}

impl Clip {
    /// A layer's outputs `frames` for as many fresh inputs. The inputs that a later frame sees go to the host, if that is
    /// where the layer's past is, and so does what it makes, if that is to wait there.
    pub(super) fn conv_banded(
        &mut self,
        layer: LayerId,
        frames: Range<u64>,
        fresh: Fresh,
        side: Side,
        left: u64,
        to: &mut Schedule,
    ) -> Vec<SlotAt> {
        let weights = self.weights_of(layer, to);
        let (time, slabs) = (self.network.layers[layer].time, self.network.layers[layer].layout.slabs);
        let past: Vec<PastSlots> = self.pasts[layer].iter().copied().collect();
        let again = if self.cut.past[layer] == Past::Again { std::mem::take(&mut self.again) } else { Vec::new() };
        let (Fresh::Shared(inputs) | Fresh::Own(inputs)) = fresh;
        let outputs = self.banded_outputs(layer, frames.clone(), fresh, side, left, to.pools);
        let read = frames.start - again.len() as u64..frames.end;
        let first = read.start - past.len() as u64;
        let jobs = frames.clone().zip(&outputs).enumerate().map(|(i, (frame, out))| {
            let recipe = time.recipe(frame);
            BandedFrame {
                terms: recipe.terms().iter().map(|(t, slab)| ((*t - first) as usize, *slab)).collect(),
                shortcut: side.shortcut(i).map(|at| (at, slabs as u8)),
                bias: recipe.bias,
                residual: side.residual(i),
                out: *out,
            }
        });
        let jobs = jobs.collect();
        let keep = match self.cut.past[layer] {
            Past::Bands { .. } => self.remember(layer, read, to.pools),
            Past::Again | Past::Device => Vec::new(),
        };
        let keep_statistics = match self.cut.past[layer] {
            Past::Again => self.remember_statistics(layer, frames.clone(), again.len(), &mut to.pools.frames),
            Past::Bands { .. } | Past::Device => Vec::new(),
        };
        let is_again = !again.is_empty();
        let fresh = [again, inputs.to_vec()].concat();
        let input = self.shapes.layers[layer];
        let columns = self.cut.past[layer].columns(input.width);
        let mut step =
            Banded { layer, weights, input, past, fresh, keep, columns, keep_statistics, frames: jobs, anew: None };
        if step.frames_made_anew() > 0 {
            step.anew.clone_from(&self.anew);
        }
        to.steps.push_back(Step::Banded(step));
        self.done_with_weights(layer, frames.end, to);
        if let Some(made_by) = self.anew.take_if(|_| is_again) {
            self.forget_before(made_by.layer, frames.end.saturating_sub(PAST_FRAMES), &mut to.pools.frames);
        }
        outputs
    }

    /// Where outputs go: to host memory, over frames that nobody needs any more, or to places of their own.
    fn banded_outputs(
        &self,
        layer: LayerId,
        frames: Range<u64>,
        fresh: Fresh,
        side: Side,
        left: u64,
        pools: &mut Pools,
    ) -> Vec<SlotAt> {
        if self.cut.away[layer] {
            return frames.map(|_| self.host_frame(layer, pools)).collect();
        }
        let own = match fresh {
            Fresh::Own(inputs) if self.shapes.past_bytes(layer) == self.shapes.bytes[layer] => all_on_device(inputs),
            _ => None,
        };
        let over = side.residuals().or(own.as_deref());
        let outputs = self.outputs(layer, frames, over, left, &mut pools.frames);
        outputs.into_iter().map(At::Device).collect()
    }

    /// The outputs of a stage's head, which wait in host memory; its inputs are read where they lie.
    pub(super) fn head_away(&mut self, head: LayerId, frames: Range<u64>, to: &mut Schedule) -> Vec<SlotAt> {
        let outputs: Vec<SlotAt> = frames.clone().map(|_| self.host_frame(head, to.pools)).collect();
        self.head_in_bands(head, frames, &outputs, to);
        outputs
    }

    pub(super) fn head_in_bands(&mut self, head: LayerId, frames: Range<u64>, outputs: &[SlotAt], to: &mut Schedule) {
        debug_assert!(self.shapes.sums[head].is_none(), "whose first term is in a frame that is gone");
        let (time, first) = (self.network.layers[head].time, self.histories[head].first);
        let jobs = frames.zip(outputs).map(|(frame, out)| {
            let recipe = time.recipe(frame);
            let terms = recipe.terms().iter().map(|(t, slab)| ((*t - first) as usize, *slab)).collect();
            BandedFrame { terms, shortcut: None, bias: recipe.bias, residual: None, out: *out }
        });
        let frames = jobs.collect();
        let fresh = self.histories[head].frames.iter().map(|slot| At::Device(*slot)).collect();
        let (past, keep, input) = (vec![], vec![], self.shapes.layers[head]);
        let step = Banded {
            layer: head,
            weights: None,
            input,
            past,
            fresh,
            keep,
            columns: Columns::all_near(input.width),
            keep_statistics: vec![],
            frames,
            anew: None,
        };
        to.steps.push_back(Step::Banded(step));
    }

    /// A place on the host for a frame that a layer makes.
    fn host_frame(&self, layer: LayerId, pools: &mut Pools) -> SlotAt {
        let statistics = pools.frames.take(self.shapes.statistics, Life::Scheduled);
        At::Host { frame: pools.past.take(self.shapes.bytes[layer], Life::Scheduled), statistics }
    }

    /// Finds places for the inputs of `frames` that later frames see, and gives those of older ones back.
    fn remember(&mut self, layer: LayerId, frames: Range<u64>, pools: &mut Pools) -> Vec<(usize, PastSlots)> {
        let (oldest, bytes) = (self.oldest(layer, frames.end), self.shapes.past[layer]);
        let past = &mut self.pasts[layer];
        let gone = oldest.saturating_sub(frames.start - past.len() as u64).min(past.len() as u64) as usize;
        let given_back: Vec<PastSlots> = past.drain(..gone).collect();
        // On the device a row is read before it is written. Host memory is read and written by two copy engines.
        let mut reused = given_back.iter().filter_map(|past| past.near);
        // The next frame takes the place of one that is forgotten.
        let new = oldest.max(frames.start)..frames.end;
        let places = new.map(|frame| {
            let near = bytes.near.map(|bytes| reused.next().unwrap_or_else(|| pools.frames.take(bytes, Life::Free)));
            let far = bytes.far.map(|bytes| pools.past.take(bytes, Life::Free));
            ((frame - frames.start) as usize, PastAt { near, far })
        });
        let places: Vec<(usize, PastSlots)> = places.collect();
        reused.for_each(|slot| pools.frames.drop(slot));
        given_back.iter().filter_map(|past| past.far).for_each(|slot| pools.past.drop(slot));
        past.extend(places.iter().map(|(_, place)| *place));
        places
    }
}

pub(super) fn drop_past(past: PastSlots, pools: &mut Pools) {
    past.near.into_iter().for_each(|slot| pools.frames.drop(slot));
    past.far.into_iter().for_each(|slot| pools.past.drop(slot));
}

/// The slots of frames, unless any of them is elsewhere.
pub(super) fn all_on_device(frames: &[SlotAt]) -> Option<Vec<Slot>> {
    let slot = |at: &SlotAt| match at {
        At::Device(slot) => Some(*slot),
        At::Host { .. } | At::Anew { .. } => None,
    };
    frames.iter().map(slot).collect()
}
