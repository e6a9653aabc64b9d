//! A plan: a schedule spec with its memory to the byte, found by rehearsing the schedule.
//!
//! Owns the layout of the job's device block. Follows one policy; does not choose it.

use std::sync::Arc;

use super::arena::{Arenas, PackedLayout};
use super::cost::{self, BufferBytes, CostModel, Estimate, Target, WeightArrivals, WeightBytes};
use super::repeats::Purpose;
use super::request::Request;
use super::schedule::{Schedule, is_periodic};
use super::spec::{ItemOrder, ScheduleSpec};
use crate::ir::{BandBuffers, Buffers, FrameShape, PinnedBytes, Rates};
use crate::model::{Direction, Network};

/// A schedule for a job, with everything a run needs to follow it.
#[derive(Debug, Clone)]
pub struct Plan {
    pub spec: ScheduleSpec,
    arenas: Arenas,
    scratch: u64,
    bands: u64,
    /// The least offset of the band buffers.
    least_band_offset: u64,
    /// Bytes of the device block that slots, scratch, bands and staging share.
    pub workspace: u64,
    /// Bytes of the page tables through which the device reaches host memory, beside that block.
    pub mapping: u64,
    /// Bytes of a staging buffer for input, and for output.
    staging: [u64; 2],
    pub weights: WeightBytes,
    load_bytes: u64,
    /// A frame as the host passes it in.
    pub image: FrameShape,
    /// Of the whole job; for a stream, of a clip of [`STREAM_FRAMES`].
    pub estimate: Estimate,
    /// Those that it was estimated with.
    pub rates: Rates,
}

/// Slices that are rehearsed for an estimate, after those that fill the cone: two of warm-up, and one that stands for
/// the rest.
const STEADY_SLICES: usize = 3;
/// A stream's time is estimated as that of a clip of this many frames.
const STREAM_FRAMES: u64 = 1 + 16 * 16;
/// Slices in which a stream of interleaved items may end in different ways, after those that fill the cone.
const INTERLEAVED_ENDINGS: u64 = 3;

impl Plan {
    /// A lower bound of what a schedule takes: frames are not [packed](Plan::packed) yet.
    pub fn rehearse(request: &Request, spec: ScheduleSpec, target: &Target) -> Plan {
        let network = Arc::clone(&request.network);
        let mut buffers = BufferBytes::new(*target, network.layers.len());
        let costs = CostModel { network: &network, target: *target };
        let mut arrivals = WeightArrivals::new(target.profile.rates.copies);
        let (mut all, mut slice, mut last) = (Estimate::default(), Estimate::default(), 0);
        let is_long = spec.is_longer_than(STEADY_SLICES + 1);
        let slices = is_long.then(|| spec.filling_slices() + STEADY_SLICES);
        let schedule = Schedule::new(Purpose::Rehearsal, spec.one_clip(), Arenas::default(), target);
        let mut arenas = schedule.rehearse(None, slices, target, |number, op| {
            buffers.record(op);
            if number != last {
                (slice, last) = (Estimate::default(), number);
            }
            let estimate = arrivals.pass(op, costs.of(op));
            (all, slice) = (all.plus(estimate), slice.plus(estimate));
        });
        let output = network.output_shape(spec.input);
        if let (Some(end), Some(_), ItemOrder::ItemByItem) = (spec.end, &spec.grid, spec.order) {
            // Every frame of the clip is kept until its last tile.
            arenas.device.provide(target.frame_bytes(output), spec.cone.output_frames(&network, end));
        }
        let total = cost::work(&spec, spec.end.unwrap_or(spec.cone.fill_end + STREAM_FRAMES - 1));
        // The rest of a long clip is like the last slice; other clips and tiles are like this one.
        let typical = if is_long { slice } else { all };
        let rest = total.saturating_sub(all.work.into()) as f64 / typical.work.max(1) as f64;
        let fades = spec.grid.as_ref().map_or(0, |_| target.sizes.fade_bytes(output));
        let staged = [spec.largest_load(), output.with_channels(stored_channels(&network))];
        let mut plan = Plan {
            scratch: buffers.scratch.max(fades),
            bands: buffers.bands(),
            least_band_offset: buffers.least_band_offset,
            workspace: 0,
            mapping: 0,
            staging: staged.map(|shape| target.sizes.staging_bytes(shape)),
            weights: WeightBytes::new(&network, &spec.policy.offloaded_weights(), target),
            load_bytes: request.load_bytes,
            image: request.image,
            estimate: all.plus(typical.times(rest)),
            rates: target.profile.rates,
            spec,
            arenas,
        };
        plan.add_up(target);
        plan
    }

    /// The same with an offset for every frame. Takes a little more than the lower bound: frames of many sizes never
    /// fit exactly.
    pub fn packed(mut self, target: &Target) -> Plan {
        if target.is_cancelled() {
            return self;
        }
        let (filling, periodic) = (self.spec.filling_slices(), is_periodic(&self.spec));
        let spec = self.spec.one_clip();
        let slices = periodic.then_some(filling + PackedLayout::TRACED_SLICES);
        let schedule = Schedule::new(Purpose::Rehearsal, spec.clone(), self.arenas.emptied(), target);
        let traced = schedule.rehearse(None, slices, target, |_, _| {});
        self.arenas = traced.pack(periodic.then_some(filling), &|| target.is_cancelled());
        if periodic {
            let endings = self.endings();
            // A stream may end at each of them. It is followed once, and copies of it end.
            let ending = ScheduleSpec { end: spec.end.and(endings.first().copied()), ..spec };
            let mut schedule = Schedule::new(Purpose::Rehearsal, ending, self.arenas.clone(), target);
            for end in endings.into_iter().take_while(|_| !target.is_cancelled()) {
                schedule.follow_stream(end, target);
                self.arenas.cover_partial(&schedule.clone().rehearse(Some(end), None, target, |_, _| {}));
            }
        }
        self.add_up(target);
        self
    }

    /// Ends of the input that stand for all ends of a long job: a partial last slice must find room too.
    fn endings(&self) -> Vec<u64> {
        let (slice, rate, start) = (self.spec.policy.slice, self.spec.network.latent_rate(), self.spec.slices_start());
        let filling = self.spec.filling_slices() as u64;
        let (traced, period) = (PackedLayout::TRACED_SLICES as u64, PackedLayout::PERIOD as u64 * slice);
        match self.spec.end {
            // The same length without whole periods.
            Some(end) => vec![end - (end - start - 1 - (filling + traced) * slice) / period * period],
            // A stream may end within any slice. Interleaved items keep nothing packed from slice to slice.
            None => {
                let last = filling + if self.spec.is_interleaved() { INTERLEAVED_ENDINGS } else { traced };
                let within = |m: u64| (0..slice / rate).map(move |r| start + m * slice + r * rate);
                (0..last).flat_map(within).filter(|end| *end > self.spec.cone.first_input).collect()
            }
        }
    }

    fn add_up(&mut self, target: &Target) {
        self.mapping = target.sizes.mapping_bytes(self.arenas.host.bytes());
        let staging = self.staging[0].saturating_add(self.staging[1]);
        let bytes = self.bands_offset().saturating_add(self.bands).saturating_add(staging);
        self.workspace = target.sizes.block_bytes(bytes);
    }

    /// The schedule, from the start.
    pub fn schedule(&self, target: &Target) -> Schedule {
        Schedule::new(Purpose::Run, self.spec.clone(), self.arenas.clone(), target)
    }

    /// The same for a timeline: of work items that are alike, one.
    pub fn shown_schedule(&self, target: &Target) -> Schedule {
        Schedule::new(Purpose::Picture, self.spec.one_clip(), self.arenas.clone(), target)
    }

    /// Slots come first in the block, then scratch, bands and staging.
    pub fn buffers(&self) -> Buffers {
        let staging = self.bands_offset() + self.bands;
        Buffers {
            scratch: self.arenas.device.bytes(),
            bands: BandBuffers { offset: self.bands_offset(), bytes: self.bands },
            staging: [staging, staging + self.staging[0]],
        }
    }

    fn bands_offset(&self) -> u64 {
        self.least_band_offset.max(self.arenas.device.bytes().saturating_add(self.scratch))
    }

    pub fn device_bytes(&self) -> u64 {
        let held = self.weights.device().saturating_add(self.workspace).saturating_add(self.mapping);
        held.max(self.load_bytes)
    }

    /// Of each layer, whether its weights are offloaded.
    pub fn offloaded_weights(&self) -> Vec<bool> {
        self.spec.policy.offloaded_weights()
    }

    /// Bytes of host memory in all.
    pub fn host_bytes(&self) -> u64 {
        self.pinned().total().saturating_add(self.weights.host)
    }

    /// Pinned host memory: two staging buffers each way, and offloaded frames.
    pub fn pinned(&self) -> PinnedBytes {
        let [load, store] = self.staging.map(|bytes| 2 * bytes);
        PinnedBytes { load, store, offloaded: self.arenas.host.bytes() }
    }

    pub fn fits(&self, limit: u64, host_limit: u64) -> bool {
        self.device_bytes() <= limit && self.host_bytes() <= host_limit
    }

    /// Whether it computes whole images.
    pub fn is_untiled(&self) -> bool {
        self.spec.grid.is_none()
    }

    /// The share of the time in which layers wait for offloaded weights.
    pub fn weight_wait_share(&self) -> f64 {
        self.estimate.waited / self.estimate.seconds.max(f64::MIN_POSITIVE)
    }
}

/// Channels of a stored frame: an encoder's means and log-variances are tensors of their own.
fn stored_channels(network: &Network) -> u64 {
    match network.direction {
        Direction::Encode => network.geometry.latent_channels,
        Direction::Decode => network.output_channels(),
    }
}
