//! A plan with everything a run needs to follow it, made by rehearsing the schedule.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::Costs;
use super::estimate::{Clock, Estimate, Fetches};
use super::job::{Job, Layout, Order, goes_on};
use super::report::Plan;
use super::search::Request;
use super::slots::{Packed, Pools};
use super::step::Step;
use super::weights::WeightBytes;
use crate::model::{Direction, LayerId, Network};
use crate::tensor::{BandFrames, FrameShape, HostMemory, Shape};

/// A way to do the job, with everything a run needs to follow it.
#[derive(Debug, Clone)]
pub struct Blueprint {
    pub(super) layout: Layout,
    frames: Option<u64>,
    pools: Pools,
    scratch: u64,
    /// Of the bands under way.
    bands: u64,
    /// Where bands begin at the least, as the device asks for it.
    bands_from: u64,
    /// Bytes of the one block of device memory that slots, scratch, bands and staging share.
    workspace: u64,
    /// Of the tables through which the device reaches the host's memory.
    mapping: u64,
    /// Of a frame that goes in, and of one that comes out.
    staging: [u64; 2],
    weights: WeightBytes,
    load_bytes: u64,
    input: Shape,
    /// Of the whole job; for a stream, of a clip that stands for it.
    estimate: Estimate,
}

impl Request {
    /// What a job laid out like this takes, at the least: its frames are not [packed](Blueprint::packed) yet.
    pub(super) fn rehearse(&self, layout: Layout, costs: &dyn Costs) -> Blueprint {
        let network = Arc::clone(&self.network);
        let frames = (self.input.frames > 0).then_some(self.input.frames);
        let mut scratch = Scratch::new(costs, &self.network);
        let clock = Clock { network: &network, costs, rates: costs.rates() };
        let mut fetches = Fetches::new(clock.rates);
        let (mut all, mut slice) = (Pace::default(), Pace::default());
        let output = network.output_shape(layout.input);
        let staging = [largest_load(&layout), output.with_channels(stored_channels(&network))];
        let staging = staging.map(|shape| costs.staging_bytes(shape));
        let rehearsed = one_clip(&layout);
        let job = Job::new(rehearsed, frames, Pools::default(), costs);
        let is_long = frames.is_none_or(|frames| frames > 1 + (STEADY_SLICES as u64 + 1) * layout.cut.slice);
        let slices = if is_long { STEADY_SLICES } else { usize::MAX };
        let mut pools = job.rehearse(None, slices, |number, step| {
            scratch.meet(step);
            if number != slice.number {
                slice = Pace { number, ..Pace::default() };
            }
            let (estimate, work) = (fetches.pass(step, clock.of(step)), step.work(&network));
            for pace in [&mut all, &mut slice] {
                pace.estimate = pace.estimate.plus(estimate);
                pace.work += work;
            }
        });
        if let (Some(frames), Some(_), Order::LaneByLane) = (frames, &layout.grid, layout.order) {
            // Every frame of the clip waits for its last tile.
            pools.frames.provide(costs.frame_bytes(output), network.output_frames(frames));
        }
        let all_work = layout.work(frames.unwrap_or(STREAM_FRAMES));
        // The rest of a long clip is like the last slice; other clips and tiles are like this one.
        let like = if is_long { &slice } else { &all };
        let rest = all_work.saturating_sub(all.work) as f64 / like.work.max(1) as f64;
        let estimate = all.estimate.plus(like.estimate.times(rest));
        let (bands, bands_from, most) = (scratch.most_bands(), scratch.bands_from, scratch.most());
        let mut blueprint = Blueprint {
            frames,
            scratch: most.max(layout.grid.as_ref().map_or(0, |_| costs.fade_bytes(output))),
            bands,
            bands_from,
            workspace: 0,
            mapping: 0,
            staging,
            weights: WeightBytes::new(&network, &layout.cut.weights_away, costs),
            load_bytes: self.load_bytes,
            input: self.input,
            estimate,
            layout,
            pools,
        };
        blueprint.add_up(costs);
        blueprint
    }
}

/// How long work took, in a slice or in all.
#[derive(Default)]
struct Pace {
    number: usize,
    estimate: Estimate,
    work: u64,
}

/// Slices after which every layer has all the past it will ever have, and one more.
const STEADY_SLICES: usize = 3;
/// A stream's time is compared as that of a clip of so many frames.
const STREAM_FRAMES: u64 = 1 + 16 * 16;

/// Whether slices are so long that packing their frames, and rehearsing each end that a stream may have, would take too long.
fn is_loose(layout: &Layout, frames: Option<u64>) -> bool {
    let slice = layout.cut.slice.min(frames.unwrap_or(u64::MAX));
    slice > MOST_PACKED_LATENTS * layout.network.latent_rate()
}

/// Latent frames of a slice whose frames are packed: more than the planner ever wants by itself.
const MOST_PACKED_LATENTS: u64 = 6;

/// Clips that go one after the other are all the same.
fn one_clip(layout: &Layout) -> Layout {
    let batch = if layout.order == Order::LaneByLane { 1 } else { layout.batch };
    Layout { batch, ..layout.clone() }
}

impl Blueprint {
    /// With a place for every frame. Takes a little more than the least, as frames of many sizes never fit exactly. Where most
    /// of them are in rings of the past, those that are free take less.
    pub fn packed(self, costs: &dyn Costs) -> Blueprint {
        let loose = self.clone().settled(true, costs);
        if is_loose(&self.layout, self.frames) {
            return loose;
        }
        let scheduled = self.settled(false, costs);
        if loose.device_bytes() < scheduled.device_bytes() { loose } else { scheduled }
    }

    fn settled(mut self, loose: bool, costs: &dyn Costs) -> Blueprint {
        let (slice, rate) = (self.layout.cut.slice, self.layout.network.latent_rate());
        let repeats = goes_on(self.frames, slice);
        let rehearsed = one_clip(&self.layout);
        let slices = if repeats { Packed::TELLING_SLICES } else { usize::MAX };
        let job = Job::new(rehearsed.clone(), self.frames, self.pools.emptied(loose), costs);
        self.pools = job.rehearse(None, slices, |_, _| {}).pack(repeats);
        let (telling, period) = (Packed::TELLING_SLICES as u64, Packed::PERIOD as u64 * slice);
        let endings: Vec<u64> = match self.frames {
            _ if !repeats || loose => Vec::new(),
            // Of the same length but for slices that are like the others.
            Some(frames) => vec![frames - (frames - 2 - telling * slice) / period * period],
            // Within any slice.
            None => {
                // Where turns are taken nothing that the script tells of is left to the next slice.
                let before = if self.layout.is_shared() { vec![0, 1, 2] } else { (0..telling).collect() };
                let within = |m: u64| (0..slice / rate).map(move |r| 1 + m * slice + r * rate);
                before.into_iter().flat_map(within).collect()
            }
        };
        for frames in endings {
            let job = Job::new(rehearsed.clone(), self.frames.map(|_| frames), self.pools.clone(), costs);
            self.pools.cover_partial(&job.rehearse(Some(frames), usize::MAX, |_, _| {}));
        }
        self.add_up(costs);
        self
    }

    fn add_up(&mut self, costs: &dyn Costs) {
        self.mapping = costs.mapping_bytes(self.pools.past.bytes());
        let staging = self.staging[0] + self.staging[1];
        self.workspace = costs.block_bytes(self.bands_offset() + self.bands + staging);
    }
}

/// The largest part of a frame that goes in at a time.
fn largest_load(layout: &Layout) -> FrameShape {
    let tiles = layout.grid.as_ref().map_or(0, |grid| grid.tiles());
    let parts = (0..tiles).map(|tile| layout.regions(Some(tile)).0.shape);
    parts.max_by_key(FrameShape::elements).unwrap_or(layout.input)
}

/// Channels of a frame that comes out: an encoder's means and log-variances leave as tensors of their own.
fn stored_channels(network: &Network) -> u64 {
    match network.direction {
        Direction::Encode => network.config.latent,
        Direction::Decode => network.output_channels(),
    }
}

/// The scratch that steps need. Most steps of a job are like an earlier one, so each kind is asked for once.
struct Scratch<'a> {
    costs: &'a dyn Costs,
    network: &'a Network,
    known: HashMap<(Option<LayerId>, FrameShape, u64), u64>,
    /// What is in a band of each layer.
    bands: HashMap<(LayerId, FrameShape), HashSet<BandFrames>>,
    /// Before them, for the largest frame that is made in parts.
    bands_from: u64,
}

impl<'a> Scratch<'a> {
    fn new(costs: &'a dyn Costs, network: &'a Network) -> Scratch<'a> {
        Scratch { costs, network, known: HashMap::new(), bands: HashMap::new(), bands_from: 0 }
    }

    fn meet(&mut self, step: &Step) {
        let (costs, network) = (self.costs, self.network);
        match step {
            Step::Conv { layer, input, frames, .. } => {
                let (layout, frames) = (&network.layers[*layer].layout, frames.len() as u64);
                let bytes = || costs.conv_scratch(layout, *input, frames);
                self.known.entry((Some(*layer), *input, frames)).or_insert_with(bytes);
            }
            Step::Attention { shape, frames } => {
                let frames = frames.len() as u64;
                self.known.entry((None, *shape, frames)).or_insert_with(|| costs.attention_scratch(*shape, frames));
            }
            Step::Banded(banded) => {
                let (layout, frames) = (&network.layers[banded.layer].layout, banded.frames.len() as u64);
                let bytes = || costs.conv_scratch(layout, banded.input, frames);
                self.known.entry((Some(banded.layer), banded.input, frames)).or_insert_with(bytes);
                let bands = self.bands.entry((banded.layer, banded.input)).or_default();
                bands.insert(banded.frames_in_band(layout));
                let for_statistics = banded.frames.iter().any(|frame| frame.out.is_anew());
                let made = match &banded.anew {
                    Some(anew) => Some((anew.layer, anew.input)),
                    None => for_statistics.then_some((banded.layer, banded.input)),
                };
                let whole = made.map_or(0, |(layer, input)| {
                    let layout = &network.layers[layer].layout;
                    costs.bytes_above_parts(layout.window.output(input, layout.cout))
                });
                self.bands_from = self.bands_from.max(whole);
            }
            Step::Load { .. }
            | Step::Fetch { .. }
            | Step::Carrying(_)
            | Step::Normalise { .. }
            | Step::Blend { .. }
            | Step::Store { .. } => {}
        }
    }

    /// Bytes of the bands under way. Those of few frames would have more rows, but need not.
    fn most_bands(&self) -> u64 {
        let of_layer = |((layer, input), bands): (&(LayerId, FrameShape), &HashSet<BandFrames>)| {
            let layout = &self.network.layers[*layer].layout;
            let outputs = bands.iter().map(|band| band.outputs).max()?;
            let bytes = bands.iter().map(|band| self.costs.band_bytes(layout, *input, BandFrames { outputs, ..*band }));
            bytes.map(|bytes| bytes.expect("planned for a device that can")).max()
        };
        self.bands.iter().filter_map(of_layer).max().unwrap_or(0)
    }

    fn most(&self) -> u64 {
        self.known.values().copied().max().unwrap_or(0)
    }
}

impl Blueprint {
    /// The schedule, from the start.
    pub fn job(&self, costs: &dyn Costs) -> Job {
        Job::new(self.layout.clone(), self.frames, self.pools.clone(), costs)
    }

    /// Bytes of the one block of device memory that slots, scratch, bands and staging share.
    pub fn workspace_bytes(&self) -> u64 {
        self.workspace
    }

    /// What the device takes beside that block to reach the host's memory.
    pub fn mapping_bytes(&self) -> u64 {
        self.mapping
    }

    /// Where the scratch begins in that block.
    pub fn scratch_offset(&self) -> u64 {
        self.pools.frames.bytes()
    }

    /// Where the bands begin in that block, and their bytes.
    pub fn bands(&self) -> (u64, u64) {
        (self.bands_offset(), self.bands)
    }

    fn bands_offset(&self) -> u64 {
        self.bands_from.max(self.pools.frames.bytes() + self.scratch)
    }

    /// Where the places begin that a frame passes through on its way in, and on its way out.
    pub fn staging(&self) -> [u64; 2] {
        let first = self.bands_offset() + self.bands;
        [first, first + self.staging[0]]
    }

    pub fn device_bytes(&self) -> u64 {
        (self.weights.device() + self.workspace_bytes() + self.mapping).max(self.load_bytes)
    }

    /// Of each layer, whether its weights wait in host memory.
    pub fn weights_away(&self) -> &[bool] {
        &self.layout.cut.weights_away
    }

    /// Bytes of host memory in all.
    pub fn host_bytes(&self) -> u64 {
        self.pinned().bytes() + self.weights.host
    }

    /// Bytes of pinned host memory to load through and to store through, two frames each, and for frames of the past.
    pub fn pinned(&self) -> HostMemory {
        let [load, store] = self.staging.map(|bytes| 2 * bytes);
        HostMemory { load, store, past: self.pools.past.bytes() }
    }

    pub fn fits(&self, limit: u64, host_limit: u64) -> bool {
        self.device_bytes() <= limit && self.host_bytes() <= host_limit
    }

    pub fn seconds(&self) -> f64 {
        self.estimate.seconds
    }

    /// The share of that time in which layers wait for their weights.
    pub fn waits_for_weights(&self) -> f64 {
        self.estimate.waited / self.estimate.seconds.max(f64::MIN_POSITIVE)
    }

    /// What the host is told.
    pub fn report(&self) -> Plan {
        let (network, cut) = (&self.layout.network, &self.layout.cut);
        let config = &network.config;
        let rate = match network.direction {
            Direction::Encode => config.time_scale(),
            Direction::Decode => 1,
        };
        let channels = stored_channels(network);
        let shape = network.output_shape(self.layout.input);
        let frames = self.frames.map_or(0, |n| network.output_frames(n));
        let image = match network.direction {
            Direction::Encode => (self.layout.input.height, self.layout.input.width),
            Direction::Decode => (shape.height, shape.width),
        };
        let grid = self.layout.grid.as_deref();
        Plan {
            direction: network.direction,
            input: self.input,
            output: Shape::new(self.input.batch, channels, frames, shape.height, shape.width),
            device_bytes: self.device_bytes(),
            host_bytes: self.host_bytes(),
            past_bytes: self.pinned().past,
            moved_per_frame: self.frames.map_or(0, |n| self.estimate.moved / network.output_frames(n).max(1)),
            seconds: self.frames.map_or(0.0, |_| self.estimate.seconds),
            weight_bytes: self.weights.device(),
            waiting_weight_bytes: self.weights.host,
            workspace_bytes: self.workspace_bytes() + self.mapping,
            slice_frames: cut.slice / rate,
            chunk_frames: cut.chunks.clone(),
            anew_frames: cut.chunks.iter().zip(&cut.stored).map(|(chunk, stored)| chunk - stored).collect(),
            tiles: grid.map_or((1, 1), |g| (g.rows.spans.len() as u64, g.columns.spans.len() as u64)),
            tile_size: grid.map_or(image, |g| (g.size.height.min(image.0), g.size.width.min(image.1))),
            tile_overlap: grid.map_or(0, |g| g.size.overlap),
            exact: grid.is_none(),
        }
    }
}
