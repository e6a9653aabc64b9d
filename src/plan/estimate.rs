//! How long steps take, roughly: to choose between plans, and to tell the host.

use super::Costs;
use super::cut::PAST_FRAMES;
use super::slots::Worker;
use super::step::{Banded, Step};
use super::work::layer_work;
use crate::model::{LayerId, Network};
use crate::tensor::{FrameShape, Rates};

/// Seconds and traffic of the steps seen so far.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Estimate {
    /// Of each worker on its own.
    workers: [f64; 2],
    /// Of what they compute, and of what they move.
    computing: f64,
    moving: f64,
    /// Bytes of the past that came from the host and went there.
    pub moved: u64,
    now: Worker,
}

impl Estimate {
    /// Of a job that is so many times as much work, done in the same way.
    pub fn times(self, factor: f64) -> Estimate {
        Estimate {
            workers: self.workers.map(|seconds| seconds * factor),
            computing: self.computing * factor,
            moving: self.moving * factor,
            moved: (self.moved as f64 * factor) as u64,
            now: self.now,
        }
    }

    /// Two workers share the arithmetic and the bus, and are done when the slower one is.
    pub fn seconds(&self) -> f64 {
        let [main, apart] = self.workers;
        if apart > 0.0 { main.max(apart).max(self.computing).max(self.moving) } else { main }
    }
}

/// Compares the ways a layer can do without its past on the device, for chunks of `frames`: seconds that it takes longer
/// than with everything there.
pub struct Detour {
    pub host: f64,
    pub again: f64,
}

pub struct Clock<'a> {
    pub network: &'a Network,
    pub costs: &'a dyn Costs,
    pub rates: Rates,
}

impl Clock<'_> {
    pub fn meet(&self, step: &Step, estimate: &mut Estimate) {
        let passes = match step {
            Step::Turn { worker, .. } => {
                estimate.now = *worker;
                0.0
            }
            Step::Banded(banded) => self.passes(banded.input, banded.fresh.len()),
            Step::Normalise { shape, frames, .. } => self.passes(*shape, frames.len()),
            _ => 0.0,
        };
        let computing = step.work(self.network) as f64 / self.rates.products + passes;
        let (up, down) = if let Step::Banded(banded) = step { self.moved(banded) } else { (0, 0) };
        let moving = self.moving(up, down);
        estimate.workers[estimate.now as usize] += computing.max(moving);
        estimate.computing += computing;
        estimate.moving += moving;
        estimate.moved += up + down;
    }

    /// What becomes of `layer` at `input` when its past leaves the device; `head` is that of its stage, with its own input.
    pub fn detour(&self, layer: LayerId, input: FrameShape, frames: u64, head: (LayerId, FrameShape)) -> Detour {
        let past = PAST_FRAMES * self.costs.frame_bytes(input);
        let computing = (layer_work(self.network, layer, input) * frames) as f64 / self.rates.products;
        let repeated = layer_work(self.network, head.0, head.1) * PAST_FRAMES;
        Detour {
            host: (self.moving(past, past) - computing).max(0.0),
            again: repeated as f64 / self.rates.products + self.passes(input, PAST_FRAMES as usize),
        }
    }

    fn moved(&self, banded: &Banded) -> (u64, u64) {
        let bytes = self.costs.frame_bytes(banded.input);
        (banded.past.len() as u64 * bytes, banded.keep.len() as u64 * bytes)
    }

    /// Both ways at the same time.
    fn moving(&self, up: u64, down: u64) -> f64 {
        (up as f64 / self.rates.upload).max(down as f64 / self.rates.download)
    }

    /// Reading and writing frames once.
    fn passes(&self, shape: FrameShape, frames: usize) -> f64 {
        (2 * frames as u64 * self.costs.frame_bytes(shape)) as f64 / self.rates.memory
    }
}
