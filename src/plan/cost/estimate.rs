//! How long operations take, roughly: to choose between plans, and to tell the host.

use super::sizes::Target;
use super::work::op_work;
use crate::ir::{
    BandedConvOp, BandedFrame, CacheFormat, CachedFrame, ConvFrame, ConvOp, ConvProducts, FrameShape, LayerId,
    Location, Op,
};
use crate::model::Network;
use crate::plan::policy::{CACHE_FRAMES, SchedulePolicy};

/// Work, seconds and host traffic of some operations.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Estimate {
    /// What they count towards the whole: see [`op_work`].
    pub work: u64,
    pub seconds: f64,
    /// Bytes from and to host memory.
    pub moved: u64,
    /// Of the seconds, those in which layers wait for offloaded weights.
    pub waited: f64,
}

impl Estimate {
    pub fn plus(self, more: Estimate) -> Estimate {
        Estimate {
            work: self.work.saturating_add(more.work),
            seconds: self.seconds + more.seconds,
            moved: self.moved.saturating_add(more.moved),
            waited: self.waited + more.waited,
        }
    }

    /// `factor` times as much work, done in the same way.
    pub fn times(self, factor: f64) -> Estimate {
        let [work, moved] = [self.work, self.moved].map(|number| (number as f64 * factor) as u64);
        Estimate { work, seconds: self.seconds * factor, moved, waited: self.waited * factor }
    }
}

/// Bytes from host memory, and to it.
#[derive(Debug, Clone, Copy, Default)]
pub struct Moved {
    pub up: u64,
    pub down: u64,
}

/// The cost of not keeping a layer's cache resident, in seconds of one latent period.
pub struct OffloadCost {
    pub layer: LayerId,
    /// Bytes of a cached frame.
    pub bytes: f64,
    /// Extra time if the cache is offloaded, and if it is recomputed.
    pub offloaded: f64,
    pub recomputed: f64,
    /// Time of the copies to and from host memory. The layer's own arithmetic hides a part of it.
    pub moving: f64,
    /// Time to copy the cache within the device.
    pub copying: f64,
}

/// Tracks when offloaded weights arrive while layers compute.
pub struct WeightArrivals {
    copy_rate: f64,
    /// Time of the operations so far, and when the copy engine is free.
    now: f64,
    free: f64,
    /// When the last copy began.
    pub last_start: f64,
    /// Of the layers met, when their weights arrive.
    arrivals: Vec<f64>,
}

impl WeightArrivals {
    pub fn new(copy_rate: f64) -> WeightArrivals {
        WeightArrivals { copy_rate, now: 0.0, free: 0.0, last_start: 0.0, arrivals: Vec::new() }
    }

    /// Adds the time that an operation waits for its weights.
    pub fn pass<L: Location>(&mut self, op: &Op<L>, estimate: Estimate) -> Estimate {
        if let Op::Fetch(fetch) = op {
            self.last_start = self.free.max(self.now);
            self.free = self.last_start + estimate.moved as f64 / self.copy_rate;
            self.arrivals.resize(self.arrivals.len().max(fetch.layer + 1), 0.0);
            self.arrivals[fetch.layer] = self.free;
        }
        let reader = op.reads_weights_of().and_then(|(layer, fetched)| fetched.map(|_| layer));
        let arrival = reader.and_then(|layer| self.arrivals.get(layer));
        let waited = arrival.map_or(0.0, |arrival| (arrival - self.now).max(0.0));
        let seconds = waited + estimate.seconds;
        self.now += seconds;
        Estimate { seconds, waited, ..estimate }
    }
}

/// Estimates single operations of a network on a device.
pub struct CostModel<'a> {
    pub network: &'a Network,
    pub target: Target<'a>,
}

impl CostModel<'_> {
    pub fn of<L: Location>(&self, op: &Op<L>) -> Estimate {
        let work = op_work(op, self.network);
        let computing = self.products(op, work) / self.target.profile.rates.products;
        let (seconds, moved) = match op {
            Op::BandedConv(conv) => self.banded(conv, self.moved_by(op), computing),
            // Bound by its products, or by reading its input where it has few outputs.
            Op::Conv(conv) => (computing.max(self.passes(conv.input, conv.frames.len())), 0),
            Op::Normalise(norm) => (self.passes(norm.shape, norm.frames.len()), 0),
            Op::Pool(pool) => (self.passes(pool.input, pool.frames.len()), 0),
            // It reads the addend beside its pass.
            Op::Add(add) => (self.passes(add.shape, add.frames.len()) + self.passes(add.addend(), add.frames.len()), 0),
            // Readers wait for it in [`WeightArrivals`].
            Op::Fetch(fetch) => {
                (0.0, self.target.fetched_bytes(&self.network.layers[fetch.layer].layout, fetch.into.slabs))
            }
            Op::Attention(_) => (computing * self.target.profile.attention_cost, 0),
            Op::Load(_) | Op::Blend(_) | Op::Store(_) => (computing, 0),
        };
        Estimate { work, seconds, moved, waited: 0.0 }
    }

    /// Products at the device's rate that take as long. Pairs share products, but their kernel does fewer in a second;
    /// a frame alone shares none. The first frame of a clip has one term.
    fn products<L: Location>(&self, op: &Op<L>, work: u64) -> f64 {
        let (layer, input, frames, starts_clip) = match op {
            Op::Conv(conv) => (conv.layer, conv.input, conv.frames.len(), starts_clip(conv)),
            Op::BandedConv(conv) => (conv.layer, conv.input, conv.frames.len(), first_of_clip(conv).is_some()),
            _ => return work as f64,
        };
        let layout = &self.network.layers[layer].layout;
        let later = frames - usize::from(starts_clip);
        let first = if starts_clip { self.network.layers[layer].work(input, 1) as f64 } else { 0.0 };
        let shared = work as f64 * later as f64 / (frames.max(1) as f64) * self.pair_cost(layer, later as u64);
        // A rehearsal's frames have no terms, so the recipe says how many there are.
        let elements = |frames: usize, terms: u64| {
            let output = layout.window.output(input, layout.cout).elements();
            frames as f64 * (output as f64 + terms as f64 * input.elements() as f64)
        };
        let (opening, terms) = (usize::from(starts_clip), self.network.layers[layer].time.steady_terms());
        let cost = |products: f64, elements: f64, starts_clip: bool| {
            self.target.sizes.effective_products(layout, ConvProducts { products, elements, starts_clip })
        };
        cost(first, elements(opening, 1), true) + cost(shared, elements(later, terms), false)
    }

    /// What products of a layer take, for each of `frames` frames that are computed together.
    fn pair_cost(&self, layer: LayerId, frames: u64) -> f64 {
        match self.target.profile.pairs.filter(|_| self.network.layers[layer].layout.pairs.is_some()) {
            // Of an odd number, one is alone.
            Some(costs) => {
                let alone = (frames % 2) as f64 / frames.max(1) as f64;
                costs.together * (1.0 - alone) + costs.alone * alone
            }
            None => 1.0,
        }
    }

    /// The arithmetic of `frames` output frames, none of which is the first of a clip.
    fn convolving(&self, layer: LayerId, input: FrameShape, frames: u64) -> f64 {
        let work = self.network.layers[layer].steady_work(input).saturating_mul(frames) as f64;
        work * self.pair_cost(layer, frames) / self.target.profile.rates.products
    }

    /// Bytes from host memory and to it.
    pub fn moved_by<L: Location>(&self, op: &Op<L>) -> Moved {
        match op {
            Op::BandedConv(conv) => self.moved_by_bands(conv),
            Op::Fetch(_) => Moved { up: self.of(op).moved, down: 0 },
            _ => Moved::default(),
        }
    }

    fn moved_by_bands<L: Location>(&self, conv: &BandedConvOp<L>) -> Moved {
        let output = conv.layout.window.output(conv.input, conv.layout.cout);
        let shortcut = output.with_channels(conv.layout.shortcut.unwrap_or(0));
        let host = FrameShape { width: conv.columns.host_width(), ..conv.input };
        let cached = if host.width == 0 { 0 } else { self.target.cached_bytes(host, conv.format) };
        let cached = |frames: usize| cached.saturating_mul(frames as u64);
        let in_host = |(_, frame): &(usize, CachedFrame<L>)| frame.host.is_some();
        let fresh = conv.fresh().filter(|(_, frame)| frame.is_offloaded()).count();
        let shortcuts = conv.frames.iter().filter_map(|frame| frame.shortcut);
        let shortcuts = shortcuts.filter(|shortcut| shortcut.from.is_offloaded()).count();
        let outputs = conv.frames.iter().filter(|frame| frame.out.is_offloaded()).count();
        let up = cached(conv.cached().filter(in_host).count());
        let up = up.saturating_add(self.bytes(conv.input, fresh)).saturating_add(self.bytes(shortcut, shortcuts));
        let down = cached(conv.cache_writes().filter(in_host).count()).saturating_add(self.bytes(output, outputs));
        Moved { up, down }
    }

    fn banded<L: Location>(&self, conv: &BandedConvOp<L>, moved: Moved, computing: f64) -> (f64, u64) {
        let resident = FrameShape { width: conv.columns.resident_width(), ..conv.input };
        let rematerialised = conv.fresh().filter(|(_, frame)| frame.is_rematerialised()).count();
        let (cached, written) = (conv.cached().count(), conv.cache_writes().count());
        let block_inputs = conv.rematerialise.as_ref().map_or(0, |by| by.block_inputs.len());
        let fresh = self.passes(conv.input, conv.fresh().count() + rematerialised + block_inputs);
        let passes = fresh
            + match conv.format {
                // Resident parts of the cache are read in place.
                CacheFormat::Exact => self.passes(resident, written),
                // Three bytes an element in place of a pass's four.
                CacheFormat::U8 => {
                    let rounded = conv.inputs.iter().filter(|input| input.is_rounded).count();
                    self.passes(conv.input, rounded) + 0.75 * self.passes(conv.input, cached + written)
                }
            };
        let computing = computing + self.rematerialising(conv) + passes;
        let moving = self.moving(moved);
        (self.slowed(computing, moving).max(moving), moved.up.saturating_add(moved.down))
    }

    /// The time of arithmetic beside copies that take `moving`.
    fn slowed(&self, computing: f64, moving: f64) -> f64 {
        computing + self.target.profile.rates.copy_contention * moving
    }

    /// The cost of taking the cache of `layer` off the device. `shapes`: of the inputs of all layers.
    pub fn offload_cost(&self, policy: &SchedulePolicy, layer: LayerId, shapes: &[FrameShape]) -> OffloadCost {
        let (network, input, stage) = (self.network, shapes[layer], self.network.stage_of(layer));
        let cache = CACHE_FRAMES * self.target.cached_bytes(input, network.layers[layer].cache);
        // The layer that can compute its input again: the first one of its block, or of its stage.
        let by = policy.rematerialised_for(network, layer);
        let rematerialised = by.map_or(0, |by| policy.layers[by].rematerialised);
        let by = by.unwrap_or(network.stages[stage].head());
        let chunk = policy.chunks[stage];
        let computing = self.convolving(layer, input, chunk)
            + self.convolving(by, shapes[by], rematerialised)
            + self.passes(input, chunk as usize);
        let moving = self.moving(Moved { up: cache, down: cache });
        let copying = self.passes(input, CACHE_FRAMES as usize);
        let chunks = network.later_stage_frames(network.geometry.time)[stage] as f64 / chunk as f64;
        OffloadCost {
            layer,
            bytes: self.target.frame_bytes(input) as f64,
            offloaded: (moving - self.slowed(computing, moving)).max(0.0) * chunks,
            recomputed: (self.convolving(by, shapes[by], CACHE_FRAMES) + copying) * chunks,
            moving: moving * chunks,
            copying: copying * chunks,
        }
    }

    fn rematerialising<L: Location>(&self, conv: &BandedConvOp<L>) -> f64 {
        conv.rematerialise.as_ref().map_or(0.0, |by| {
            let first = first_of_clip(conv).map_or(0, |frame| {
                let first = conv.fresh().next().map(|(_, from)| from);
                let read = first.into_iter().chain(frame.shortcut.map(|shortcut| shortcut.from));
                read.filter(|frame| frame.is_rematerialised()).count() as u64
            });
            let later = conv.rematerialised_frames() as u64 - first;
            let first = self.network.layers[by.layer].work(by.input, 1).saturating_mul(first) as f64;
            first / self.target.profile.rates.products + self.convolving(by.layer, by.input, later)
        })
    }

    /// Both directions run at the same time.
    fn moving(&self, moved: Moved) -> f64 {
        moved.up.max(moved.down) as f64 / self.target.profile.rates.copies
    }

    /// Bytes of frames. To ask the device takes longer than all else here, so it is asked only where there are frames.
    fn bytes(&self, shape: FrameShape, frames: usize) -> u64 {
        if frames == 0 { 0 } else { self.target.frame_bytes(shape).saturating_mul(frames as u64) }
    }

    /// Reading and writing frames once.
    fn passes(&self, shape: FrameShape, frames: usize) -> f64 {
        self.bytes(shape, 2 * frames) as f64 / self.target.profile.rates.memory
    }
}

/// Whether the first frame of the operation is the first of a clip, which has one term beside its shortcut.
fn starts_clip<L: Location>(conv: &ConvOp<L>) -> bool {
    let is_main = |slab: u8| u64::from(slab) < conv.layout.slabs;
    let terms = |frame: &ConvFrame<L>| frame.terms.iter().filter(|term| is_main(term.slab)).count();
    conv.partial_sums.before.is_none() && conv.frames.first().is_some_and(|first| terms(first) == 1)
}

/// The first frame of the operation, if it is the first of a clip. That one has one term and no partner.
fn first_of_clip<L: Location>(conv: &BandedConvOp<L>) -> Option<&BandedFrame<L>> {
    conv.frames.first().filter(|frame| frame.terms.len() == 1)
}
