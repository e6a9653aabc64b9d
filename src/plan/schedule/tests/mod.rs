//! Tests of schedules and plans on a symbolic device.

mod policies;
mod random_graphs;
mod ranges;
mod repeats;
mod symbols;
mod u8_caches;

use std::collections::HashSet;
use std::sync::Arc;

use self::policies::{has_cache, rematerialises, rematerialises_hidden};
use self::symbols::{Device, FAST_COPIES, FUSED, SEPARATE, SLOW_COPIES, run, run_pushed, work_of};
use crate::ir::{
    CacheFormat, ConvFrame, ConvOp, FetchOp, FetchedWeights, FrameShape, LayerId, Op, PairCosts, PartialSums,
    PinnedBytes, Shape,
};
use crate::model::families::seedvr2::Sizes;
use crate::model::lower::PAIR_SLABS;
use crate::model::{Cone, Direction, FrameRange, Network};
use crate::plan::arena::{Arena, Arenas, SlotKind, Slots};
use crate::plan::cost::{CostModel, Estimate, OffloadCost, Target, WeightArrivals, work};
use crate::plan::exclusions::Choices;
use crate::plan::plan::Plan;
use crate::plan::policy::{Form, Placement, SchedulePolicy};
use crate::plan::repeats::Purpose;
use crate::plan::request::{PlanError, Request};
use crate::plan::schedule::{Next, Schedule, is_periodic};
use crate::plan::search;
use crate::plan::spec::{ItemOrder, ScheduleSpec};
use crate::plan::tiles::{Spacing, TileSize};
use crate::testing::network;

/// Two by two of a [`clip`].
const TILES: Option<TileSize> = Some(TileSize { height: 24, width: 32, overlap: 8, spacing: Spacing::Strided });

fn request(direction: Direction, input: Shape) -> Request {
    request_of(&SIZES(), direction, input)
}

/// Of the model that most tests are for.
const SIZES: fn() -> Sizes =
    || Sizes { channels: vec![8, 16, 16, 32], layers: 2, groups: 8, latent: 4, temporal_levels: 2 };

fn request_of(sizes: &Sizes, direction: Direction, input: Shape) -> Request {
    request_for(network(sizes, direction), input)
}

fn request_for(network: Network, input: Shape) -> Request {
    Request {
        cone: Arc::new(Cone::new(&network, FrameRange::WHOLE)),
        network: Arc::new(network),
        batch: input.batch,
        frames: input.known_frames(),
        image: input.into(),
        limit: u64::MAX,
        host_limit: u64::MAX,
        load_bytes: 0,
        tiles: None,
        allow_tiles: true,
        overlap: 16,
        slice: None,
        chunk: None,
    }
}

impl Request {
    /// The same with pairs of frames that share products.
    fn with_pairs(self) -> Request {
        Request { network: Arc::new(Network::clone(&self.network).with_pairs().with_upsampler_pairs()), ..self }
    }

    /// Every plan keeps to the table of exclusions.
    fn plan(&self, device: &Device) -> Result<Plan, PlanError> {
        let (network, target) = (&self.network, device.target());
        let plan = search::search(self, &target)?;
        for layer in 0..network.layers.len() {
            let choices = self.choices(&plan.spec.policy, layer, &target);
            assert!(choices.exclusion().is_none(), "layer {layer}: {:?} {}", choices.exclusion(), plan.report());
        }
        Ok(plan)
    }

    /// What a policy chooses for a layer, and what that is judged by.
    fn choices(&self, policy: &SchedulePolicy, layer: LayerId, target: &Target) -> Choices {
        let (network, stage) = (&self.network, self.network.stage_of(layer));
        Choices {
            own: policy.layers[layer],
            chunk: policy.chunks[stage],
            is_head: network.is_head(layer),
            is_largest: network.is_largest(stage),
            keeps_partial_sums: target.keeps_partial_sums(&network.layers[layer]),
            reads_rematerialised: policy.rematerialised_for(network, layer).is_some(),
            rounds: network.layers[layer].cache == CacheFormat::U8,
            is_still: self.is_still(),
        }
    }

    /// The plan of a stream by a given policy, whatever a search would choose.
    fn plan_by(&self, policy: SchedulePolicy, device: &Device) -> Plan {
        let grid = self.tiles.and_then(|size| self.grid(size));
        let spec = self.spec(Arc::new(policy), grid, ItemOrder::SliceBySlice);
        Plan::rehearse(self, spec, &device.target()).packed(&device.target())
    }
}

fn run_fused(plan: &Plan) -> Vec<(u64, u64, u64)> {
    run(plan, &FUSED)
}

fn clip(direction: Direction, batch: u64, frames: u64) -> Shape {
    match direction {
        Direction::Encode => Shape::new(batch, 3, frames, 40, 56),
        Direction::Decode => Shape::new(batch, 4, frames, 5, 7),
    }
}

#[test]
fn every_policy_makes_every_frame_the_same_way() {
    for direction in Direction::ALL {
        for frames in [1, 2, 3, 5, 14] {
            let base = request(direction, clip(direction, 1, frames));
            assert_same_frames(base.clone(), frames);
            assert_same_frames(base.with_pairs(), frames);
        }
    }
}

fn assert_same_frames(base: Request, frames: u64) {
    let whole = Request { slice: Some(1000), chunk: Some(8), ..base.clone() };
    let expected = run_fused(&whole.plan(&FUSED).unwrap());
    let made: Vec<u64> = expected.iter().map(|(_, frame, _)| *frame).collect();
    assert_eq!(made, (0..base.network.output_frames(frames)).collect::<Vec<_>>());
    for slice in [1, 2, 3, 7] {
        for chunk in [1, 2, 3, 5] {
            let cut = Request { slice: Some(slice), chunk: Some(chunk), ..base.clone() };
            assert_eq!(run_fused(&cut.plan(&FUSED).unwrap()), expected, "{slice} {chunk}");
            let stream = Request { frames: None, ..cut };
            let stream = stream.plan(&FUSED).unwrap();
            for piece in [1, 3, 100] {
                assert_eq!(run_pushed(&stream, &FUSED, frames, piece), expected, "stream {slice} {chunk} {piece}");
            }
        }
    }
}

/// The cost of offloading the cache of the first layer behind an upsampler of pairs, in chunks of `frames` frames.
fn offload_cost(together: f64, frames: u64, rematerialised: u64) -> OffloadCost {
    let request = request(Direction::Decode, clip(Direction::Decode, 1, 5)).with_pairs();
    let network = &request.network;
    let stage = network.stages.iter().find(|stage| network.layers[stage.head()].layout.pairs.is_some()).unwrap();
    let shapes: Vec<FrameShape> =
        network.layers.iter().map(|layer| FrameShape::new(16, 16, layer.layout.cin)).collect();
    let mut target = SLOW_COPIES.target();
    target.profile.pairs = Some(PairCosts { together, alone: 9.0 });
    let mut policy = SchedulePolicy::resident(network, 1, vec![frames; network.stages.len()]);
    policy.layers[stage.head()].rematerialised = rematerialised;
    CostModel { network, target }.offload_cost(&policy, stage.head() + 1, &shapes)
}

/// Of a cache that is made again from the head's input instead of being offloaded.
#[test]
fn recomputed_upsamplers_count_the_cost_of_pairs() {
    assert!(offload_cost(2.0, 2, 0).recomputed > offload_cost(1.0, 2, 0).recomputed);
}

/// What a layer computes hides copies: pairs of frames, and frames that it rematerialises.
#[test]
fn layers_that_compute_more_wait_less_for_their_cache() {
    let direct = offload_cost(1.0, 2, 0);
    for more in [offload_cost(2.0, 2, 0), offload_cost(1.0, 2, 2)] {
        assert_eq!(more.moving, direct.moving);
        assert!(more.offloaded < direct.offloaded);
    }
}

/// Copies are slow enough to wait for, so what a chunk computes is what it waits less.
#[test]
fn of_an_odd_number_of_frames_one_is_alone() {
    let computing = |frames: u64| {
        let cost = offload_cost(1.0, frames, 0);
        assert!(cost.offloaded > 0.0);
        (cost.moving - cost.offloaded) * frames as f64
    };
    let [two, three, four] = [2, 3, 4].map(computing);
    assert!(three - two > 2.0 * (four - two), "{two} {three} {four}");
}

/// With everything resident, both frames of a pair are in one operation, unless chunks have one frame.
#[test]
fn chunks_have_whole_pairs() {
    for direction in Direction::ALL {
        for (frames, chunk) in [(14, None), (14, Some(2)), (23, Some(3)), (9, Some(5))] {
            let base = request(direction, clip(direction, 1, frames)).with_pairs();
            let plan = Request { chunk, ..base }.plan(&SEPARATE).unwrap();
            let (mut schedule, mut symbols) = (plan.schedule(&SEPARATE.target()), symbols::Symbols::new(&SEPARATE));
            let mut pairs = 0;
            while schedule.prepare_next() == Next::Op {
                if let Some(Op::Conv(op)) =
                    schedule.front().filter(|op| matches!(op, Op::Conv(op) if op.layout.pairs.is_some()))
                {
                    let own = |slab: u8| {
                        let has = |frame: &&ConvFrame<Slots>| frame.terms.iter().any(|term| term.slab == slab);
                        op.frames.iter().filter(has).count()
                    };
                    assert_eq!(own(PAIR_SLABS.own[0]), own(PAIR_SLABS.own[1]), "{direction:?} {frames} {chunk:?}");
                    pairs += own(PAIR_SLABS.own[0]);
                }
                symbols.run(&mut schedule);
            }
            assert!(pairs > 0, "{direction:?} {frames} {chunk:?}");
        }
    }
}

/// Three frames at a time: a chunk has a pair, and a frame whose partner is in the chunk before or after.
#[test]
fn banded_chunks_that_cut_pairs_change_no_frame() {
    for direction in Direction::ALL {
        let clip = request(direction, clip(direction, 1, 23)).with_pairs();
        let expected = run(&clip.plan(&SEPARATE).unwrap(), &SEPARATE);
        let (network, device) = (&clip.network, &FAST_COPIES);
        let stream = Request { frames: None, ..clip.clone() };
        let chunks = vec![3; network.stages.len()];
        let mut policy = SchedulePolicy::resident(network, 3 * network.latent_rate(), chunks);
        offload_caches(&mut policy, network, device);
        let full = network.largest_stage();
        let rematerialising = (direction == Direction::Decode).then(|| policy.with_materialised(network, full, 1));
        let hidden = policy.with_materialised_hidden(network, full, 2);
        let both = rematerialising.as_ref().map(|policy| policy.with_materialised_hidden(network, full, 2));
        for policy in [Some(policy), Some(hidden), rematerialising, both].into_iter().flatten() {
            let plan = stream.plan_by(policy, device);
            assert_eq!(run_pushed(&plan, device, 23, 5), expected, "{direction:?}");
        }
    }
}

#[test]
fn separate_norms_run_in_any_slices_and_chunks() {
    for (direction, pairs) in Direction::ALL.into_iter().flat_map(|direction| [(direction, false), (direction, true)]) {
        let base = request(direction, clip(direction, 2, 14));
        let base = if pairs { base.with_pairs() } else { base };
        let expected = run(&base.plan(&SEPARATE).unwrap(), &SEPARATE);
        for (slice, chunk) in [(1, 1), (2, 3), (3, 2)] {
            let cut = Request { slice: Some(slice), chunk: Some(chunk), ..base.clone() };
            assert_eq!(run(&cut.plan(&SEPARATE).unwrap(), &SEPARATE), expected);
        }
    }
}

#[test]
fn offloaded_and_recomputed_caches_change_no_frame() {
    for (direction, pairs) in Direction::ALL.into_iter().flat_map(|direction| [(direction, false), (direction, true)]) {
        let (mut seen, mut rematerialised, mut hidden) = (HashSet::new(), 0, 0);
        for frames in [2, 14] {
            let free = request(direction, clip(direction, 2, frames));
            let free = if pairs { free.with_pairs() } else { free };
            let whole = free.plan(&SEPARATE).unwrap();
            let expected = run(&whole, &SEPARATE);
            for device in [SLOW_COPIES, FAST_COPIES] {
                for percent in [70, 40] {
                    let limit = whole.device_bytes() * percent / 100;
                    for slice in [None, Some(2)] {
                        let cut = Request { limit, slice, ..free.clone() };
                        let Some(plan) = cut.plan(&device).ok().filter(|plan| plan.report().exact) else { continue };
                        assert!(plan.device_bytes() <= limit);
                        seen.extend(
                            plan.spec.policy.layers.iter().filter(|own| own.form == Form::Banded).map(|own| own.cache),
                        );
                        rematerialised += u32::from(rematerialises(&plan.spec.policy, &plan.spec.network));
                        hidden += u32::from(rematerialises_hidden(&plan.spec.policy, &plan.spec.network));
                        assert_eq!(run(&plan, &device), expected, "{frames} {percent} {slice:?}");
                        assert_eq!(
                            u128::from(work_of(&plan, &device)),
                            work(&plan.spec, frames),
                            "what is done again counts once"
                        );
                        let stream = Request { frames: None, ..cut };
                        if let Some(plan) = stream.plan(&device).ok().filter(|plan| plan.report().exact) {
                            assert_eq!(run_pushed(&plan, &device, frames, 3), expected);
                        }
                    }
                }
            }
        }
        assert!(seen.contains(&Placement::HOST) && seen.contains(&Placement::RESIDENT), "{direction:?}: {seen:?}");
        let split = |cache: &Placement| cache.uses_host() && *cache != Placement::HOST;
        assert!(seen.iter().any(split), "{direction:?}: {seen:?}");
        assert!(seen.contains(&Placement::Recomputed), "{direction:?}: {seen:?}");
        assert!(direction == Direction::Encode || rematerialised > 0);
        assert!(hidden > 0, "{direction:?}, pairs: {pairs}");
    }
}

#[test]
fn caches_are_offloaded_only_as_far_as_the_limit_asks() {
    let free = request(Direction::Decode, clip(Direction::Decode, 1, 23));
    let whole = free.plan(&FAST_COPIES).unwrap();
    assert!(whole.spec.policy.layers.iter().all(|own| own.form == Form::Whole) && whole.pinned().offloaded == 0);
    let mut last = (whole.device_bytes(), 0);
    for percent in [95, 85, 75] {
        let limit = whole.device_bytes() * percent / 100;
        let plan = Request { limit, ..free.clone() }.plan(&FAST_COPIES).unwrap();
        let now = (plan.device_bytes(), plan.pinned().offloaded);
        assert!(plan.report().exact && now.0 <= limit && now.1 >= last.1, "{percent}: {now:?} after {last:?}");
        last = now;
    }
    let limit = whole.device_bytes() * 3 / 4;
    let PinnedBytes { load, store, offloaded } = Request { limit, ..free.clone() }.plan(&FAST_COPIES).unwrap().pinned();
    let host_limit = load + store + offloaded / 2;
    let plan = Request { limit, host_limit, ..free }.plan(&FAST_COPIES).unwrap();
    assert!(plan.report().host_bytes <= host_limit, "{}", plan.report());
}

#[test]
fn weights_are_offloaded_where_device_memory_is_short() {
    for direction in Direction::ALL {
        let free = request(direction, clip(direction, 2, 23));
        let whole = free.plan(&FAST_COPIES).unwrap();
        assert!(!whole.offloaded_weights().contains(&true));
        let expected = run(&whole, &FAST_COPIES);
        let limit = whole.device_bytes() / 2;
        let plan = Request { limit, ..free.clone() }.plan(&FAST_COPIES).unwrap();
        assert!(plan.offloaded_weights().contains(&true) && plan.device_bytes() <= limit, "{}", plan.report());
        assert_eq!(run(&plan, &FAST_COPIES), expected);
        // Never those of stages at full resolution, nor of heads.
        let full = if direction == Direction::Encode { 0 } else { free.network.stages.len() - 1 };
        let mut stay = free.network.stages[full].body().chain(free.network.stages.iter().map(|stage| stage.head()));
        assert!(stay.all(|layer| !plan.offloaded_weights()[layer]));
    }
}

#[test]
fn weights_stay_resident_where_host_memory_is_short() {
    let costs = Device { weights: 20, ..FAST_COPIES };
    for (direction, input) in
        [(Direction::Encode, Shape::new(1, 3, 9, 240, 320)), (Direction::Decode, Shape::new(1, 4, 3, 30, 40))]
    {
        let free = request(direction, input);
        let whole = free.plan(&costs).unwrap();
        // Enough for what frames pass through on their way.
        let host_limit = whole.host_bytes();
        let mut tiled = 0;
        for percent in [80, 60, 40, 30] {
            let limit = whole.device_bytes() * percent / 100;
            let plan = Request { limit, host_limit, ..free.clone() }.plan(&costs);
            let plan = plan.unwrap_or_else(|no| panic!("{direction:?} {percent}: {no:?}"));
            assert!(plan.fits(limit, host_limit) && !plan.offloaded_weights().contains(&true), "{}", plan.report());
            tiled += usize::from(!plan.report().exact);
        }
        assert!(tiled > 0, "{direction:?}");
    }
}

#[test]
fn a_layer_waits_until_its_offloaded_weights_arrive() {
    let (at, input) = (Arena::default().take(1, SlotKind::Pooled), FrameShape::new(1, 1, 1));
    let into = FetchedWeights::<Slots> { at, slabs: 3 };
    let layout = request(Direction::Encode, clip(Direction::Encode, 1, 1)).network.layers[0].layout;
    let fetch = |layer| Op::Fetch(FetchOp { layer, into });
    let conv = |layer| {
        let (weights, partial_sums) = (Some(into), PartialSums::NONE);
        Op::Conv(ConvOp { layer, layout, weights, input, frames: Vec::new(), statistics: false, partial_sums })
    };
    let (mut arrivals, took) =
        (WeightArrivals::new(10.0), |seconds, moved| Estimate { seconds, moved, ..Estimate::default() });
    // Two seconds each, one after the other.
    assert_eq!(arrivals.pass(&fetch(1), took(0.0, 20)).seconds, 0.0);
    assert_eq!(arrivals.pass(&fetch(2), took(0.0, 20)).seconds, 0.0);
    let mut waits = |layer, seconds| {
        let estimate = arrivals.pass(&conv(layer), took(seconds, 0));
        (estimate.seconds, estimate.waited)
    };
    assert_eq!([waits(1, 1.5), waits(2, 1.0), waits(2, 1.0)], [(3.5, 2.0), (1.5, 0.5), (1.0, 0.0)]);
}

#[test]
fn tiles_come_only_where_nothing_exact_fits() {
    for (direction, frames) in [(Direction::Encode, 14), (Direction::Decode, 7), (Direction::Decode, 0)] {
        let free = request(direction, clip(direction, 1, frames));
        let whole = free.plan(&FAST_COPIES).unwrap().device_bytes();
        let exact = |percent: u64| {
            let plan = Request { limit: whole * percent / 100, ..free.clone() }.plan(&FAST_COPIES);
            plan.is_ok_and(|plan| plan.report().exact)
        };
        let mut percents = (5..100).step_by(2);
        let least = percents.find(|percent| exact(*percent)).unwrap();
        assert!(percents.all(exact), "{direction:?} {frames} from {least} %");
    }
}

#[test]
fn a_still_image_caches_nothing() {
    let one = request(Direction::Decode, clip(Direction::Decode, 1, 1)).plan(&SEPARATE).unwrap();
    let two = request(Direction::Decode, clip(Direction::Decode, 1, 2)).plan(&SEPARATE).unwrap();
    assert!(one.workspace * 2 < two.workspace, "{} {}", one.report(), two.report());
}

#[test]
fn a_still_image_offloads_outputs_that_do_not_fit() {
    for direction in Direction::ALL {
        let free = request(direction, clip(direction, 2, 1));
        let whole = free.plan(&FAST_COPIES).unwrap();
        assert_eq!(whole.pinned().offloaded, 0);
        let expected = run(&whole, &FAST_COPIES);
        let mut away = 0;
        for percent in (20..100).rev().step_by(5) {
            let limit = whole.device_bytes() * percent / 100;
            let Ok(plan) = Request { limit, ..free.clone() }.plan(&FAST_COPIES) else { break };
            if !plan.report().exact {
                break;
            }
            assert!(plan.device_bytes() <= limit);
            away = plan.pinned().offloaded.max(away);
            assert_eq!(run(&plan, &FAST_COPIES), expected, "{percent}");
        }
        assert!(away > 0, "{direction:?}");
    }
}

#[test]
fn staging_buffers_follow_the_band_buffers() {
    for direction in Direction::ALL {
        let whole = request(direction, clip(direction, 1, 9)).plan(&SEPARATE).unwrap();
        let tiled = Request { tiles: TILES, ..request(direction, clip(direction, 1, 9)) }.plan(&SEPARATE).unwrap();
        for plan in [&whole, &tiled] {
            let (buffers, pinned) = (plan.buffers(), plan.pinned());
            let ([load, store], bands) = (buffers.staging, buffers.bands);
            assert_eq!((load, store), (bands.offset + bands.bytes, load + pinned.load / 2));
            assert_eq!(plan.workspace, store + pinned.store / 2);
        }
        assert!(tiled.pinned().load < whole.pinned().load && tiled.pinned().store == whole.pinned().store);
    }
}

#[test]
fn clips_of_a_batch_do_not_mix() {
    for direction in Direction::ALL {
        let one = request(direction, clip(direction, 1, 9)).plan(&FUSED).unwrap();
        let three = request(direction, clip(direction, 3, 9)).plan(&FUSED).unwrap();
        assert_eq!(one.workspace, three.workspace, "clips go one after the other");
        let all = run_fused(&three);
        let first: Vec<_> = all.iter().filter(|(batch, ..)| *batch == 0).copied().collect();
        assert_eq!(run_fused(&one), first);
        assert!(all.iter().map(|(.., made)| made).collect::<HashSet<_>>().len() == all.len());
        let stream = Request { frames: None, ..request(direction, clip(direction, 3, 9)) };
        assert_eq!(run_pushed(&stream.plan(&FUSED).unwrap(), &FUSED, 9, 2), all);
    }
}

#[test]
fn tiles_are_the_same_in_any_order_and_from_a_stream() {
    for (direction, costs) in Direction::ALL.into_iter().flat_map(|d| [(d, FUSED), (d, FAST_COPIES)]) {
        let base = Request { tiles: TILES, slice: Some(2), ..request(direction, clip(direction, 2, 14)) };
        let whole = base.plan(&costs).unwrap();
        let expected = run(&whole, &costs);
        assert!(!whole.report().exact && whole.report().tiles == (2, 2));
        let by_slice = Plan::rehearse(
            &base,
            ScheduleSpec { order: ItemOrder::SliceBySlice, ..whole.spec.clone() },
            &costs.target(),
        );
        let by_slice = by_slice.packed(&costs.target());
        assert_eq!(run(&by_slice, &costs), expected);
        let stream = Request { frames: None, ..base };
        assert_eq!(run_pushed(&stream.plan(&costs).unwrap(), &costs, 14, 5), expected);
    }
}

#[test]
fn a_longer_clip_takes_no_more_memory() {
    for direction in Direction::ALL {
        for slice in [None, Some(1), Some(3)] {
            let bytes = |frames| {
                let request = Request { slice, ..request(direction, clip(direction, 1, frames)) };
                request.plan(&FUSED).unwrap().device_bytes()
            };
            // Both end with a whole slice.
            let (short, long) = (bytes(1 + 48 * 4), bytes(1 + 48 * 20));
            assert_eq!(long, short, "{direction:?} {slice:?}");
        }
    }
}

#[test]
fn a_long_job_keeps_to_a_plan_made_from_a_few_slices() {
    for direction in Direction::ALL {
        for frames in [61, 62, 67, 100] {
            for tiles in [None, TILES] {
                let request = Request { slice: Some(1), tiles, ..request(direction, clip(direction, 3, frames)) };
                // Symbols::run fails on a slot that was not planned.
                [FUSED, FAST_COPIES].iter().for_each(|costs| drop(run(&request.plan(costs).unwrap(), costs)));
            }
        }
    }
}

#[test]
fn a_stream_may_end_anywhere() {
    for direction in Direction::ALL {
        for (slice, costs) in [(1, FUSED), (3, FUSED), (3, SEPARATE), (7, SEPARATE), (3, FAST_COPIES)] {
            let request = Request { slice: Some(slice), ..request(direction, clip(direction, 2, 0)) };
            let plan = request.plan(&costs).unwrap();
            for frames in 1..(2 * slice + 2) * 4 {
                run_pushed(&plan, &costs, frames, 5);
            }
        }
    }
}

#[test]
fn a_smaller_limit_costs_chunks_first_and_tiles_last() {
    let free = request(Direction::Decode, clip(Direction::Decode, 1, 21));
    let largest = free.plan(&FUSED).unwrap();
    let smallest_exact = Request { slice: Some(1), chunk: Some(1), ..free.clone() }.plan(&FUSED).unwrap();
    assert!(smallest_exact.device_bytes() < largest.device_bytes());
    let at = |limit| Request { limit, ..free.clone() }.plan(&FUSED);
    for limit in [largest.device_bytes(), largest.device_bytes() - 1, smallest_exact.device_bytes()] {
        let plan = at(limit).unwrap();
        assert!(plan.device_bytes() <= limit && plan.report().exact);
        assert_eq!(run_fused(&plan), run_fused(&largest));
    }
    let Err(PlanError::TooLarge { smallest: Some(smallest), .. }) = at(2000) else { panic!("2000 bytes are too few") };
    assert!(at(smallest).is_ok() && at(smallest * 95 / 100).is_err());
}

#[test]
fn tiles_made_by_the_limit_are_even_and_fit() {
    let free = request(Direction::Decode, Shape::new(1, 4, 9, 40, 60));
    let exact = Request { slice: Some(1), chunk: Some(1), ..free.clone() }.plan(&FUSED).unwrap();
    for percent in [90, 50] {
        let limit = exact.device_bytes() * percent / 100;
        let plan = Request { limit, ..free.clone() }.plan(&FUSED).unwrap();
        let report = plan.report();
        assert!(!report.exact && report.device_bytes <= limit, "{report}");
        let grid = plan.spec.grid.as_ref().unwrap();
        for axis in [&grid.rows.spans, &grid.columns.spans] {
            assert!(axis.iter().all(|span| span.len() == axis[0].len()), "{:?}", axis);
        }
        assert_eq!(run_fused(&plan).len(), 33);
    }
}

#[test]
fn the_operations_add_up_to_the_work_that_progress_counts() {
    for direction in Direction::ALL {
        for tiles in [None, TILES] {
            let request = Request { tiles, slice: Some(2), ..request(direction, clip(direction, 2, 14)) };
            let plan = request.plan(&FUSED).unwrap();
            assert_eq!(u128::from(work_of(&plan, &FUSED)), work(&plan.spec, 14));
        }
    }
}

/// What `of` finds in the operations of nine frames, in order.
fn rehearsed<T>(
    request: &Request,
    policy: SchedulePolicy,
    device: &Device,
    of: impl Fn(&Op<Slots>) -> Option<T>,
) -> Vec<T> {
    let (target, mut found) = (device.target(), Vec::new());
    let spec = ScheduleSpec { policy: Arc::new(policy), end: Some(9), ..request.plan(device).unwrap().spec };
    let schedule = Schedule::new(Purpose::Run, spec, Arenas::default(), &target);
    schedule.rehearse(None, None, &target, |_, op| found.extend(of(op)));
    found
}

/// Every cache that can be.
fn offload_caches(policy: &mut SchedulePolicy, network: &Network, device: &Device) {
    let offloadable = device.target().bandable_layers(network);
    offloadable.into_iter().for_each(|layer| policy.layers[layer] = policy.layers[layer].banded(Placement::HOST));
}

/// It has no cache to move yet.
#[test]
fn an_incomplete_chunk_comes_first() {
    let request = request(Direction::Decode, clip(Direction::Decode, 1, 9));
    let network = &request.network;
    let mut policy = SchedulePolicy::resident(network, 3, vec![3, 6, 6, 6]);
    offload_caches(&mut policy, network, &FAST_COPIES);
    // The second block of the stage.
    let last = network.stages.last().unwrap().head() + 3;
    let chunks = rehearsed(&request, policy, &FAST_COPIES, |op| match op {
        Op::BandedConv(conv) if conv.layer == last => Some((conv.cached().count(), conv.frames.len())),
        _ => None,
    });
    assert_eq!(chunks, [(0, 3), (2, 6), (2, 6), (2, 6), (2, 6), (2, 6)]);
}

/// Frames that wait for three more are queued at half the resolution.
#[test]
fn a_downsampler_runs_early_for_queued_frames() {
    let request = request(Direction::Encode, clip(Direction::Encode, 1, 9));
    let network = &request.network;
    let policy = SchedulePolicy::resident(network, 4, vec![1, 4, 2, 1]);
    let [head, first] = [network.stages[1].head(), network.stages[1].head() + 1];
    let chunks = rehearsed(&request, policy, &SEPARATE, |op| match op {
        Op::Conv(conv) if [head, first].contains(&conv.layer) => Some((conv.layer, conv.frames.len())),
        _ => None,
    });
    // The first slice has a frame more.
    let four = [(head, 1), (head, 1), (head, 1), (head, 1), (first, 4)];
    assert_eq!(chunks, [&four[..], &[(head, 1), (first, 1)], &four[..]].concat());
}

/// Its input frames are dropped as soon as they have been read.
#[test]
fn a_downsampler_in_time_keeps_partial_sums() {
    let request = request(Direction::Encode, clip(Direction::Encode, 1, 9));
    let head = request.network.stages[2].head();
    let launches = |device: &Device| {
        let policy = SchedulePolicy::resident(&request.network, 4, vec![4, 4, 2, 1]);
        rehearsed(&request, policy, device, |op| match op {
            Op::Conv(conv) if conv.layer == head => {
                let terms: Vec<usize> = conv.frames.iter().map(|frame| frame.terms.len()).collect();
                Some((terms, conv.partial_sums.before.is_some(), conv.partial_sums.after.is_some()))
            }
            _ => None,
        })
    };
    let whole = [vec![1, 3], vec![3], vec![3, 3]].map(|terms| (terms, false, false));
    assert_eq!(launches(&SEPARATE), whole);
    let summed = [(vec![1, 3], false, true), (vec![2], true, true), (vec![2, 3], true, false)];
    assert_eq!(launches(&FAST_COPIES), summed);
}

#[test]
fn the_estimate_of_a_long_clip_is_that_of_all_its_operations() {
    for direction in Direction::ALL {
        let request = request(direction, clip(direction, 1, 61));
        let mut policy = SchedulePolicy::resident(&request.network, 2 * request.network.latent_rate(), vec![2; 4]);
        offload_caches(&mut policy, &request.network, &SLOW_COPIES);
        let spec = ScheduleSpec { policy: Arc::new(policy), ..request.plan(&SLOW_COPIES).unwrap().spec };
        let plan = Plan::rehearse(&request, spec, &SLOW_COPIES.target()).packed(&SLOW_COPIES.target());
        assert_estimated(&plan, 1e-3);
    }
}

/// Compares a plan's estimate with the sum over its operations.
fn assert_estimated(plan: &Plan, tolerance: f64) {
    let costs = CostModel { network: &plan.spec.network, target: SLOW_COPIES.target() };
    let (mut schedule, mut seconds) = (plan.schedule(&SLOW_COPIES.target()), 0.0);
    while schedule.prepare_next() == Next::Op {
        seconds += costs.of(schedule.front().unwrap()).seconds;
        schedule.done();
    }
    let off = plan.estimate.seconds / seconds - 1.0;
    assert!(off.abs() < tolerance, "{:?}: {} for {seconds}", plan.spec.network.direction, plan.estimate.seconds);
}

/// A banded layer may write over its input. The frames of a batch wait for those of its last clip, so they must not lie
/// where the next clip's are.
#[test]
fn a_last_layer_in_bands_keeps_its_frames_while_the_next_clip_runs() {
    // As many channels go into the last layer as come out of it.
    let sizes = Sizes { latent: 16, ..SIZES() };
    let base = request_of(&sizes, Direction::Encode, clip(Direction::Encode, 2, 23));
    let expected = run(&base.plan(&SEPARATE).unwrap(), &SEPARATE);
    let stream = Request { frames: None, ..base };
    let mut policy = SchedulePolicy::clone(&stream.plan(&FAST_COPIES).unwrap().spec.policy);
    offload_caches(&mut policy, &stream.network, &FAST_COPIES);
    for slice in [1, 2, 3] {
        policy.slice = slice * stream.network.latent_rate();
        let plan = stream.plan_by(policy.clone(), &FAST_COPIES);
        assert_eq!(run_pushed(&plan, &FAST_COPIES, 23, 5), expected, "{slice}");
    }
}
