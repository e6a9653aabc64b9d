//! Convolutions in bands: for layers whose past is not on the device.

use std::ops::Range;

use super::clip::{Clip, Schedule};
use super::cut::Past;
use super::layers::Side;
use super::slots::{Life, Pools, Slot};
use super::step::{Banded, BandedFrame, Step};
use crate::model::LayerId;

/// Frames that go into a layer for the first time.
#[derive(Clone, Copy)]
pub(super) enum Fresh<'a> {
    /// Others need them too. Before them those that were made again, in place of a past.
    Shared(&'a [Slot], &'a [Slot]),
    /// Nobody else does, so that the output may lie over them: a band has read its rows before any of them is written.
    Own(&'a [Slot]),
}

impl Clip {
    /// A layer's outputs `frames` for as many fresh inputs. The inputs that a later frame sees go to the host, if that is
    /// where the layer's past is.
    pub(super) fn conv_banded(
        &mut self,
        layer: LayerId,
        frames: Range<u64>,
        fresh: Fresh,
        side: Side,
        life: Life,
        to: &mut Schedule,
    ) -> Vec<Slot> {
        let (time, slabs) = (self.network.layers[layer].time, self.network.layers[layer].layout.slabs);
        let past: Vec<Slot> = self.histories[layer].frames.iter().copied().collect();
        let (again, inputs) = match fresh {
            Fresh::Shared(again, inputs) => (again, inputs),
            Fresh::Own(inputs) => (&[][..], inputs),
        };
        let own = match fresh {
            Fresh::Own(inputs) if self.shapes.past_bytes(layer) == self.shapes.bytes[layer] => Some(inputs),
            _ => None,
        };
        let outputs = self.outputs(layer, inputs.len(), side.residuals().or(own), life, &mut to.pools.frames);
        let first = frames.start - (past.len() + again.len()) as u64;
        let jobs = frames.clone().zip(&outputs).enumerate().map(|(i, (frame, out))| {
            let recipe = time.recipe(frame);
            BandedFrame {
                terms: recipe.terms().iter().map(|(t, slab)| ((*t - first) as usize, *slab)).collect(),
                shortcut: side.shortcut(i).map(|slot| (slot, slabs as u8)),
                bias: recipe.bias,
                residual: side.residual(i),
                out: *out,
            }
        });
        let jobs = jobs.collect();
        let keep = match self.cut.past[layer] {
            Past::Host => self.remember(layer, frames, to.pools),
            Past::Device | Past::Again => Vec::new(),
        };
        let keep = keep.into_iter().map(|(i, slot)| (again.len() + i, slot)).collect();
        let fresh = again.iter().chain(inputs).copied().collect();
        let input = self.shapes.layers[layer];
        to.steps.push_back(Step::Banded(Banded { layer, input, past, fresh, keep, frames: jobs }));
        outputs
    }

    /// Finds places on the host for the inputs of `frames` that later frames see, then gives those of older ones back: in
    /// this order, as both are in use while the layer works.
    fn remember(&mut self, layer: LayerId, frames: Range<u64>, pools: &mut Pools) -> Vec<(usize, Slot)> {
        let oldest = self.oldest(layer, frames.end);
        let bytes = self.shapes.past_bytes(layer);
        let kept = (oldest.max(frames.start)..frames.end)
            .map(|frame| ((frame - frames.start) as usize, pools.past.take(bytes)))
            .collect::<Vec<_>>();
        let history = &mut self.histories[layer];
        history.first = frames.start - history.frames.len() as u64;
        while history.first < oldest && !history.frames.is_empty() {
            pools.past.drop(history.frames.pop_front().expect("not empty"));
            history.first += 1;
        }
        history.frames.extend(kept.iter().map(|(_, slot)| *slot));
        kept
    }
}
