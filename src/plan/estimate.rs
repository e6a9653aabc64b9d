//! How long steps take, roughly: to choose between plans, and to tell the host.

use std::collections::HashMap;

use super::Costs;
use super::cut::PAST_FRAMES;
use super::step::{Banded, SlotAt, Step};
use super::weights::fetched_bytes;
use super::work::layer_work;
use crate::model::{LayerId, Network};
use crate::tensor::{FrameShape, Rates};

/// Seconds and traffic of the steps seen so far.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Estimate {
    pub seconds: f64,
    /// Bytes that came from host memory and went there.
    pub moved: u64,
    /// Of the seconds, those that layers wait for their weights.
    pub waited: f64,
}

impl Estimate {
    pub fn plus(self, more: Estimate) -> Estimate {
        Estimate {
            seconds: self.seconds + more.seconds,
            moved: self.moved + more.moved,
            waited: self.waited + more.waited,
        }
    }

    /// Of a job that is so many times as much work, done in the same way.
    pub fn times(self, factor: f64) -> Estimate {
        let moved = (self.moved as f64 * factor) as u64;
        Estimate { seconds: self.seconds * factor, moved, waited: self.waited * factor }
    }
}

/// Compares the ways a layer can do without its past on the device, for chunks of `frames`: seconds that it takes longer
/// than with everything there.
pub struct Detour {
    pub host: f64,
    pub again: f64,
    /// What it takes to move the past, of which the layer's own arithmetic hides a part; and to copy it within the device.
    pub moving: f64,
    pub copying: f64,
}

impl Detour {
    /// Of so many chunks.
    pub fn times(self, chunks: f64) -> Detour {
        let Detour { host, again, moving, copying } = self;
        Detour { host: host * chunks, again: again * chunks, moving: moving * chunks, copying: copying * chunks }
    }
}

/// Weights on their way, while layers compute.
pub struct Fetches {
    copies: f64,
    /// How long the steps so far took, and how long the way is taken.
    now: f64,
    free: f64,
    arrivals: HashMap<LayerId, f64>,
}

impl Fetches {
    pub fn new(rates: Rates) -> Fetches {
        Fetches { copies: rates.copies, now: 0.0, free: 0.0, arrivals: HashMap::new() }
    }

    /// What a step takes with the time that it waits for its weights.
    pub fn pass(&mut self, step: &Step, estimate: Estimate) -> Estimate {
        let waited = match step {
            Step::Fetch { layer, .. } => {
                self.free = self.free.max(self.now) + estimate.moved as f64 / self.copies;
                self.arrivals.insert(*layer, self.free);
                0.0
            }
            Step::Conv { layer, weights: Some(_), .. }
            | Step::Normalise { layer, weights: Some(_), .. }
            | Step::Banded(Banded { layer, weights: Some(_), .. }) => {
                self.arrivals.get(layer).map_or(0.0, |arrival| (arrival - self.now).max(0.0))
            }
            _ => 0.0,
        };
        let seconds = waited + estimate.seconds;
        self.now += seconds;
        Estimate { seconds, waited, ..estimate }
    }
}

pub struct Clock<'a> {
    pub network: &'a Network,
    pub costs: &'a dyn Costs,
    pub rates: Rates,
}

impl Clock<'_> {
    pub fn of(&self, step: &Step) -> Estimate {
        let computing = step.work(self.network) as f64 / self.rates.products;
        let (seconds, moved) = match step {
            Step::Banded(banded) => {
                let (up, down) = self.moved(banded);
                let near = FrameShape { width: banded.columns.near_width(), ..banded.input };
                let anew = banded.fresh.iter().filter(|at| at.is_anew()).count();
                // What is on the device is read where it lies.
                let passes =
                    self.passes(banded.input, banded.fresh.len() + anew) + self.passes(near, banded.keep.len());
                let computing = computing + self.made_anew(banded) + passes;
                let moving = self.moving(up, down);
                (computing.max(moving) + self.rates.beside * moving, up + down)
            }
            // Bound by reading its input.
            Step::Carrying(step) => (computing.max(self.passes(step.input, step.frames.len())), 0),
            Step::Normalise { shape, frames, .. } => (self.passes(*shape, frames.len()), 0),
            // What has to wait for it waits in [`Fetches`].
            Step::Fetch { layer, into } => {
                (0.0, fetched_bytes(&self.network.layers[*layer].layout, into.slabs, self.costs))
            }
            _ => (computing, 0),
        };
        Estimate { seconds, moved, waited: 0.0 }
    }

    /// What becomes of `layer` at `input` when its past leaves the device; `head` is that of its stage, with its own input.
    pub fn detour(&self, layer: LayerId, input: FrameShape, frames: u64, head: (LayerId, FrameShape)) -> Detour {
        let past = PAST_FRAMES * self.costs.frame_bytes(input);
        let computing = (layer_work(self.network, layer, input) * frames) as f64 / self.rates.products
            + self.passes(input, frames as usize);
        let repeated = layer_work(self.network, head.0, head.1) * PAST_FRAMES;
        let moving = self.moving(past, past);
        Detour {
            host: (moving - computing).max(0.0),
            moving,
            copying: self.passes(input, PAST_FRAMES as usize),
            again: repeated as f64 / self.rates.products + self.passes(input, PAST_FRAMES as usize),
        }
    }

    fn made_anew(&self, banded: &Banded) -> f64 {
        banded.anew.as_ref().map_or(0.0, |anew| {
            let work = layer_work(self.network, anew.layer, anew.input) * banded.frames_made_anew() as u64;
            work as f64 / self.rates.products
        })
    }

    /// Bytes that come from host memory, and that go there.
    fn moved(&self, banded: &Banded) -> (u64, u64) {
        let layout = &self.network.layers[banded.layer].layout;
        let output = layout.window.output(banded.input, layout.cout);
        let away = |at: &&SlotAt| at.is_away();
        let bytes = |frames: usize, shape: FrameShape| frames as u64 * self.costs.frame_bytes(shape);
        let far = FrameShape { width: banded.columns.far_width(), ..banded.input };
        let past = banded.past.iter().filter(|past| past.far.is_some()).count();
        let kept = banded.keep.iter().filter(|(_, to)| to.far.is_some()).count();
        let fresh = banded.fresh.iter().filter(away).count();
        let shortcuts = banded.frames.iter().filter_map(|frame| frame.shortcut.as_ref().map(|(at, _)| at)).filter(away);
        let side = output.with_channels(layout.shortcut.unwrap_or(0));
        let outputs = banded.frames.iter().map(|frame| &frame.out).filter(away).count();
        let up = bytes(past, far) + bytes(fresh, banded.input) + bytes(shortcuts.count(), side);
        (up, bytes(kept, far) + bytes(outputs, output))
    }

    /// Both ways at the same time.
    fn moving(&self, up: u64, down: u64) -> f64 {
        up.max(down) as f64 / self.rates.copies
    }

    /// Reading and writing frames once.
    fn passes(&self, shape: FrameShape, frames: usize) -> f64 {
        (2 * frames as u64 * self.costs.frame_bytes(shape)) as f64 / self.rates.memory
    }
}
