//! Schedules are run on symbols: a frame's content is a hash of how it was made. So a wrong frame, slab or slot shows as
//! another hash, and cuts that must give the same numbers must give the same hashes.

mod snapshot;

use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};

use super::*;
use crate::model::{Config, LayerId};
use crate::plan::cut::movable;
use crate::plan::estimate::{Clock, Estimate, Fetches};
use crate::plan::{Banded, Blueprint, Carrying, Fetched, Past, Request, SlotAt, SlotPool, Spacing, TileSize};
use crate::tensor::{At, BandFrames, ConvLayout, HostMemory, Prologue, Rates, Shape, Sums, Window};

/// A device that costs four bytes an element.
#[derive(Clone, Copy)]
struct Device {
    /// Whether norms are steps of their own, and sums land on their residuals.
    separate_norms: bool,
    /// Bytes a second to and from the host's memory, for a device that has its own.
    copies: Option<f64>,
    /// Whether what few channels are left of is carried on, and sums stand for what shrinks.
    carries: bool,
    /// How heavy weights are.
    weights: u64,
}

const FUSED: Device = Device { separate_norms: false, copies: None, carries: false, weights: 1 };
const SEPARATE: Device = Device { separate_norms: true, copies: None, carries: false, weights: 1 };
const SLOW_COPIES: Device = Device { separate_norms: true, copies: Some(1e8), carries: true, weights: 1 };
const FAST_COPIES: Device = Device { separate_norms: true, copies: Some(1e12), carries: true, weights: 1 };

impl Costs for Device {
    fn busy_pixels(&self) -> u64 {
        16384
    }
    fn frame_bytes(&self, shape: FrameShape) -> u64 {
        // An empty frame still has its statistics.
        4 * shape.elements().max(1)
    }
    fn weight_bytes(&self, layout: &ConvLayout) -> u64 {
        layout.slabs * layout.window.taps() * layout.cin * layout.cout * self.weights / 8
    }
    fn conv_scratch(&self, layout: &ConvLayout, _: FrameShape, frames: u64) -> u64 {
        layout.cout * frames
    }
    fn attention_scratch(&self, shape: FrameShape, _: u64) -> u64 {
        shape.pixels()
    }
    fn fuses_norm(&self, _: &ConvLayout) -> bool {
        !self.separate_norms
    }
    fn adds_in_place(&self) -> bool {
        self.separate_norms
    }
    fn band_bytes(&self, _: &ConvLayout, input: FrameShape, frames: BandFrames) -> Option<u64> {
        let parts = frames.inputs + frames.anew + frames.shortcuts + frames.outs;
        let rows = (48 / frames.outputs).max(1);
        self.copies.map(|_| (parts * input.width + frames.past * frames.far_columns) * rows * input.channels)
    }
    fn sums_bytes(&self, layout: &ConvLayout, input: FrameShape) -> Option<u64> {
        (self.carries && layout.window == Window::Down).then(|| 4 * layout.cout * input.pixels() / 4 + 1)
    }
    fn carry_bytes(&self, layout: &ConvLayout, input: FrameShape) -> Option<u64> {
        (self.carries && layout.cout <= 3).then_some(6 * 4 * input.pixels())
    }
    fn staging_bytes(&self, shape: FrameShape) -> u64 {
        if self.separate_norms { shape.elements() } else { 0 }
    }
    fn rates(&self) -> Rates {
        let copies = self.copies.unwrap_or(1.0);
        Rates { products: 1e12, memory: 1e12, copies, beside: 0.06 }
    }
}

fn request(direction: Direction, input: Shape) -> Request {
    let config = Config { channels: vec![8, 16, 16, 32], layers: 2, groups: 8, latent: 4, temporal_levels: 2 };
    Request {
        network: Arc::new(Network::new(&config, direction)),
        input,
        limit: u64::MAX,
        host_limit: u64::MAX,
        load_bytes: 0,
        allow_tiles: true,
        tiles: None,
        overlap: 16,
        slice: None,
        chunk: None,
    }
}

fn clip(direction: Direction, batch: u64, frames: u64) -> Shape {
    match direction {
        Direction::Encode => Shape::new(batch, 3, frames, 40, 56),
        Direction::Decode => Shape::new(batch, 4, frames, 5, 7),
    }
}

fn hash(value: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

/// What lies where: the end and the content of each frame, by its offset.
#[derive(Clone, Default)]
struct Memory(BTreeMap<u64, (u64, u64)>);

impl Memory {
    fn read(&self, pool: &SlotPool, slot: Slot) -> u64 {
        let (start, end) = span(pool, slot);
        let found = self.0.get(&start).unwrap_or_else(|| panic!("nothing is left at {start}"));
        assert_eq!(found.0, end, "another frame is at {start}");
        found.1
    }

    /// Whatever it lies over, even in part, is lost.
    fn write(&mut self, pool: &SlotPool, slot: Slot, content: u64) {
        let (start, end) = span(pool, slot);
        self.0.retain(|at, (to, _)| *to <= start || *at >= end);
        self.0.insert(start, (end, content));
    }
}

fn span(pool: &SlotPool, slot: Slot) -> (u64, u64) {
    let start = pool.offset(slot).expect("the run keeps to its plan");
    (start, start + pool.slot_bytes(slot))
}

/// Of a chunk.
const MOST_FRAMES: u64 = 8;

/// In place of the statistics of a frame that is elsewhere.
fn statistics_of(content: u64) -> u64 {
    hash(("statistics", content))
}

/// What memory holds, and what the host was given.
#[derive(Default)]
struct Symbols {
    memory: Memory,
    past: Memory,
    stored: Vec<(u64, u64, u64)>,
    /// What is carried on, by its hash.
    carries: HashMap<u64, Carry>,
    /// What sums are made of.
    sums: HashMap<u64, Vec<(u64, u8)>>,
}

/// (input, slab) of what is added to the next output frame, and to the one after.
type Carry = [Vec<(u64, u8)>; 2];

impl Symbols {
    fn run(&mut self, job: &mut Job) {
        let step = job.front().expect("a step is in front").clone();
        let (layout, pools) = (job.layout(), job.pools());
        let at = |slot: Slot| self.memory.read(&pools.frames, slot);
        // The slabs of all terms but the shortcut's.
        let has_weights = |layer: LayerId, fetched: Option<Fetched>, terms: &mut dyn Iterator<Item = u8>| {
            let slabs = layout.network.layers[layer].layout.slabs;
            match (fetched, layout.cut.weights_away[layer]) {
                (Some(fetched), true) => {
                    assert_eq!(at(fetched.slot), hash(("weights", layer, fetched.slabs)));
                    let mut terms = terms.map(u64::from).filter(|slab| *slab < slabs);
                    assert!(terms.all(|slab| slab < fetched.slabs), "slabs of {layer}");
                }
                (fetched, away) => assert!(fetched.is_none() && !away, "weights of {layer}"),
            }
        };
        let nothing = &mut std::iter::empty();
        let mut made: Vec<(Slot, u64)> = Vec::new();
        match step {
            Step::Load { lane, batch, frame, into } => {
                let region = layout.regions(layout.tile_of(lane)).0;
                made.push((into, hash((batch, frame, region.top, region.left))));
            }
            Step::Fetch { layer, into } => made.push((into.slot, hash(("weights", layer, into.slabs)))),
            Step::Conv { layer, weights, frames, sums, .. } => {
                has_weights(layer, weights, &mut frames.iter().flat_map(|frame| &frame.terms).map(|(_, slab)| *slab));
                // Sums are written down as their terms, in their order.
                let mut before = sums.before.map(|slot| self.sums[&at(slot)].clone());
                made.extend(frames.iter().map(|frame| {
                    let mut terms = before.take().unwrap_or_default();
                    terms.extend(frame.terms.iter().map(|(slot, slab)| (at(*slot), *slab)));
                    assert!(frame.terms.iter().all(|(slot, _)| *slot != frame.out));
                    (frame.out, hash((layer, terms, frame.bias, frame.residual.map(at))))
                }));
                if let Some(onward) = sums.after {
                    assert!(sums.before != Some(onward.sums));
                    has_weights(layer, weights, &mut std::iter::once(onward.slab));
                    let terms = vec![(at(onward.input), onward.slab)];
                    made.push((onward.sums, hash(("sums", &terms))));
                    self.sums.insert(hash(("sums", &terms)), terms);
                }
            }
            Step::Carrying(Carrying { layer, frames, before, after, .. }) => {
                has_weights(layer, None, nothing);
                // What is carried on is written down as the terms that it sums up, in their order.
                let mut carry = before.map_or(Carry::default(), |slot| self.carries[&at(slot)].clone());
                for frame in &frames {
                    let term = |k: usize| (hash(("norm", layer, at(frame.input))), frame.slabs[k]);
                    let [mut next, mut after_next] = carry;
                    next.push(term(0));
                    made.push((frame.out, hash((layer, next, frame.bias, None::<u64>))));
                    after_next.push(term(1));
                    carry = [after_next, vec![term(2)]];
                }
                if let Some(slot) = after {
                    let content = hash(&carry);
                    made.push((slot, content));
                    self.carries.insert(content, carry);
                }
            }
            Step::Banded(Banded { layer, weights, past, fresh, keep, keep_statistics, frames, anew, .. }) => {
                has_weights(layer, weights, &mut frames.iter().flat_map(|frame| &frame.terms).map(|(_, slab)| *slab));
                let anywhere = |place: SlotAt| match place {
                    At::Anew { index, statistics } => {
                        let made_by = anew.as_ref().expect("somebody makes it anew");
                        let (terms, bias) = &made_by.frames[index];
                        let terms: Vec<_> = terms.iter().map(|(slot, slab)| (at(*slot), *slab)).collect();
                        let content = hash((made_by.layer, terms, bias, None::<u64>));
                        assert_eq!(at(statistics), statistics_of(content));
                        content
                    }
                    At::Device(slot) => at(slot),
                    At::Host { frame, statistics } => {
                        let content = self.past.read(&pools.past, frame);
                        assert_eq!(at(statistics), statistics_of(content));
                        content
                    }
                };
                let normalised = |content: u64| match layout.network.layers[layer].layout.prologue {
                    Prologue::None => content,
                    _ => hash(("norm", layer, content)),
                };
                let past = past.iter().map(|past| {
                    let parts =
                        past.near.map(at).into_iter().chain(past.far.map(|slot| self.past.read(&pools.past, slot)));
                    let parts: Vec<u64> = parts.collect();
                    assert!(parts.iter().all(|part| *part == parts[0]), "parts of two frames");
                    parts[0]
                });
                made.extend(keep_statistics.iter().map(|(i, slot)| (*slot, statistics_of(anywhere(fresh[*i])))));
                let fresh = fresh.iter().map(|place| normalised(anywhere(*place))).collect::<Vec<_>>();
                let inputs = [past.collect(), fresh.clone()].concat();
                let mut to_host: Vec<(Slot, u64)> = Vec::new();
                for frame in &frames {
                    let mut terms: Vec<_> = frame.terms.iter().map(|(input, slab)| (inputs[*input], *slab)).collect();
                    terms.extend(frame.shortcut.map(|(place, slab)| (anywhere(place), slab)));
                    let content = hash((layer, terms, frame.bias, frame.residual.map(at)));
                    match frame.out {
                        At::Device(slot) => made.push((slot, content)),
                        At::Anew { statistics, .. } => made.push((statistics, statistics_of(content))),
                        At::Host { frame, statistics } => {
                            made.push((statistics, statistics_of(content)));
                            to_host.push((frame, content));
                        }
                    }
                }
                for (i, to) in &keep {
                    made.extend(to.near.map(|slot| (slot, fresh[*i])));
                    to_host.extend(to.far.map(|slot| (slot, fresh[*i])));
                }
                for (slot, content) in to_host {
                    self.past.write(&pools.past, slot, content);
                }
            }
            Step::Normalise { layer, weights, frames, .. } => {
                has_weights(layer, weights, nothing);
                made.extend(frames.iter().map(|(from, to)| (*to, hash(("norm", layer, at(*from))))));
            }
            Step::Attention { frames, .. } => {
                made.extend(frames.iter().map(|(from, to)| (*to, hash(("attention", at(*from))))));
            }
            Step::Blend { lane, from, into, clear } => {
                let before = if clear { 0 } else { at(into) };
                made.push((into, hash((before, layout.tile_of(lane), at(from)))));
            }
            Step::Store { batch, frame, from } => self.stored.push((batch, frame, at(from))),
        }
        // All frames of a step are read before any is written, as no order among them is promised.
        for (slot, content) in made {
            self.memory.write(&pools.frames, slot, content);
        }
        job.done();
    }

    fn sorted(mut self) -> Vec<(u64, u64, u64)> {
        self.stored.sort_unstable();
        self.stored
    }
}

fn run_whole(blueprint: &Blueprint) -> Vec<(u64, u64, u64)> {
    run_costing(blueprint, &FUSED)
}

/// The bands of the step in front find room where they were planned.
fn check_bands(job: &mut Job, blueprint: &Blueprint, costs: &dyn Costs) {
    let network = Arc::clone(&job.layout().network);
    if let Some(Step::Banded(banded)) = job.front() {
        let layout = &network.layers[banded.layer].layout;
        // In the smallest bands: those of the most frames.
        let frames = BandFrames { outputs: MOST_FRAMES, ..banded.frames_in_band(layout) };
        let bytes = costs.band_bytes(layout, banded.input, frames);
        assert!(bytes.is_some_and(|bytes| bytes <= blueprint.bands().1), "{bytes:?} of {:?}", blueprint.bands());
    }
}

fn run_costing(blueprint: &Blueprint, costs: &dyn Costs) -> Vec<(u64, u64, u64)> {
    let (mut job, mut symbols) = (blueprint.job(costs), Symbols::default());
    while job.wait() == Wait::No {
        check_bands(&mut job, blueprint, costs);
        symbols.run(&mut job);
    }
    assert_eq!(job.wait(), Wait::End);
    symbols.sorted()
}

/// Pushes at most `piece` frames at a time, and works only when nothing more is taken.
fn run_pushed(blueprint: &Blueprint, frames: u64, piece: u64) -> Vec<(u64, u64, u64)> {
    run_pushed_costing(blueprint, &FUSED, frames, piece)
}

fn run_pushed_costing(blueprint: &Blueprint, costs: &dyn Costs, frames: u64, piece: u64) -> Vec<(u64, u64, u64)> {
    let (mut job, mut symbols) = (blueprint.job(costs), Symbols::default());
    let mut pushed = 0;
    loop {
        for _ in 0..job.room().min(piece).min(frames - pushed) {
            job.load();
            pushed += 1;
        }
        while job.front().is_some() {
            check_bands(&mut job, blueprint, costs);
            symbols.run(&mut job);
        }
        if pushed == frames {
            job.set_total(frames);
        }
        while job.wait() == Wait::No {
            check_bands(&mut job, blueprint, costs);
            symbols.run(&mut job);
        }
        if job.wait() == Wait::End {
            return symbols.sorted();
        }
    }
}

#[test]
fn every_cut_makes_every_frame_the_same_way() {
    for direction in [Direction::Encode, Direction::Decode] {
        for frames in [1, 2, 3, 5, 9, 14, 23] {
            let base = request(direction, clip(direction, 1, frames));
            let whole = Request { slice: Some(1000), chunk: Some(8), ..base.clone() };
            let expected = run_whole(&whole.plan(&FUSED).unwrap());
            let made: Vec<u64> = expected.iter().map(|(_, frame, _)| *frame).collect();
            assert_eq!(made, (0..base.network.output_frames(frames)).collect::<Vec<_>>());
            for slice in [1, 2, 3, 7] {
                for chunk in [1, 2, 3, 5] {
                    let cut = Request { slice: Some(slice), chunk: Some(chunk), ..base.clone() };
                    assert_eq!(run_whole(&cut.plan(&FUSED).unwrap()), expected, "{slice} {chunk}");
                    let stream = Request { input: Shape { frames: 0, ..base.input }, ..cut };
                    let stream = stream.plan(&FUSED).unwrap();
                    for piece in [1, 3, 100] {
                        assert_eq!(run_pushed(&stream, frames, piece), expected, "stream {slice} {chunk} {piece}");
                    }
                }
            }
        }
    }
}

#[test]
fn norms_of_their_own_step_are_cut_as_freely() {
    for direction in [Direction::Encode, Direction::Decode] {
        let base = request(direction, clip(direction, 2, 14));
        let expected = run_costing(&base.plan(&SEPARATE).unwrap(), &SEPARATE);
        for (slice, chunk) in [(1, 1), (2, 3), (3, 2)] {
            let cut = Request { slice: Some(slice), chunk: Some(chunk), ..base.clone() };
            assert_eq!(run_costing(&cut.plan(&SEPARATE).unwrap(), &SEPARATE), expected);
        }
    }
}

#[test]
fn a_past_that_is_elsewhere_changes_no_frame() {
    for direction in [Direction::Encode, Direction::Decode] {
        let (mut seen, mut made_anew) = (std::collections::HashSet::new(), 0);
        for frames in [2, 14] {
            let free = request(direction, clip(direction, 2, frames));
            let whole = free.plan(&SEPARATE).unwrap();
            let expected = run_costing(&whole, &SEPARATE);
            for device in [SLOW_COPIES, FAST_COPIES] {
                for percent in [85, 55, 40] {
                    let limit = whole.device_bytes() * percent / 100;
                    for slice in [None, Some(2)] {
                        let cut = Request { limit, slice, ..free.clone() };
                        let Some(plan) = cut.plan(&device).ok().filter(|plan| plan.report().exact) else { continue };
                        assert!(plan.device_bytes() <= limit);
                        seen.extend(plan.layout.cut.past.iter().copied());
                        made_anew += u32::from(plan.layout.cut.stored != plan.layout.cut.chunks);
                        assert_eq!(run_costing(&plan, &device), expected, "{frames} {percent} {slice:?}");
                        assert_eq!(work_of(&plan, &device), plan.layout.work(frames), "what is done again counts once");
                        let stream = Request { input: Shape { frames: 0, ..cut.input }, ..cut };
                        if let Some(plan) = stream.plan(&device).ok().filter(|plan| plan.report().exact) {
                            assert_eq!(run_pushed_costing(&plan, &device, frames, 3), expected);
                        }
                    }
                }
            }
        }
        assert!(seen.contains(&Past::HOST) && seen.contains(&Past::NEAR), "{direction:?}: {seen:?}");
        let parted = |past: &Past| past.moves() && *past != Past::HOST;
        assert!(seen.iter().any(parted), "{direction:?}: {seen:?}");
        assert!(seen.contains(&Past::Again), "{direction:?}: {seen:?}");
        assert!(direction == Direction::Encode || made_anew > 0);
    }
}

#[test]
fn the_past_leaves_the_device_only_as_far_as_it_must() {
    let free = request(Direction::Decode, clip(Direction::Decode, 1, 23));
    let whole = free.plan(&FAST_COPIES).unwrap();
    assert!(whole.layout.cut.past.iter().all(|past| *past == Past::Device) && whole.pinned().past == 0);
    let mut last = (whole.device_bytes(), 0);
    for percent in [95, 85, 75] {
        let limit = whole.device_bytes() * percent / 100;
        let plan = Request { limit, ..free.clone() }.plan(&FAST_COPIES).unwrap();
        let now = (plan.device_bytes(), plan.pinned().past);
        assert!(plan.report().exact && now.0 <= limit && now.1 >= last.1, "{percent}: {now:?} after {last:?}");
        last = now;
    }
    let limit = whole.device_bytes() * 3 / 4;
    let HostMemory { load, store, past } = Request { limit, ..free.clone() }.plan(&FAST_COPIES).unwrap().pinned();
    let host_limit = load + store + past / 2;
    let plan = Request { limit, host_limit, ..free }.plan(&FAST_COPIES).unwrap();
    assert!(plan.report().host_bytes <= host_limit, "{}", plan.report());
}

#[test]
fn weights_wait_in_host_memory_where_memory_is_short() {
    for direction in [Direction::Encode, Direction::Decode] {
        let free = request(direction, clip(direction, 2, 23));
        let whole = free.plan(&FAST_COPIES).unwrap();
        assert!(!whole.weights_away().contains(&true));
        let expected = run_costing(&whole, &FAST_COPIES);
        let limit = whole.device_bytes() / 2;
        let plan = Request { limit, ..free.clone() }.plan(&FAST_COPIES).unwrap();
        assert!(plan.weights_away().contains(&true) && plan.device_bytes() <= limit, "{}", plan.report());
        assert_eq!(run_costing(&plan, &FAST_COPIES), expected);
        // Never those of stages at full resolution, nor of heads.
        let full = if direction == Direction::Encode { 0 } else { free.network.stages.len() - 1 };
        let mut stay = free.network.stages[full].body().chain(free.network.stages.iter().map(|stage| stage.head));
        assert!(stay.all(|layer| !plan.weights_away()[layer]));
    }
}

#[test]
fn weights_stay_on_the_device_where_host_memory_is_short() {
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
            assert!(plan.fits(limit, host_limit) && !plan.weights_away().contains(&true), "{}", plan.report());
            tiled += usize::from(!plan.report().exact);
        }
        assert!(tiled > 0, "{direction:?}");
    }
}

#[test]
fn a_layer_waits_for_its_weights_as_long_as_they_travel() {
    let slot = SlotPool::default().take(1, Life::Free);
    let (into, input) = (Fetched { slot, slabs: 3 }, FrameShape::new(1, 1, 1));
    let rates = Rates { products: 1.0, memory: 1.0, copies: 10.0, beside: 0.0 };
    let fetch = |layer| Step::Fetch { layer, into };
    let conv = |layer| Step::Conv { layer, weights: Some(into), input, frames: Vec::new(), sums: Sums::NONE };
    let (mut fetches, took) = (Fetches::new(rates), |seconds, moved| Estimate { seconds, moved, waited: 0.0 });
    // Two seconds each, one after the other.
    assert_eq!(fetches.pass(&fetch(1), took(0.0, 20)).seconds, 0.0);
    assert_eq!(fetches.pass(&fetch(2), took(0.0, 20)).seconds, 0.0);
    let mut waits = |layer, seconds| {
        let estimate = fetches.pass(&conv(layer), took(seconds, 0));
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
        let least = (5..100).find(|percent| exact(*percent)).unwrap();
        assert!((least..100).all(exact), "{direction:?} {frames} from {least} %");
    }
}

#[test]
fn a_still_image_keeps_nothing_for_later() {
    let one = request(Direction::Decode, clip(Direction::Decode, 1, 1)).plan(&SEPARATE).unwrap();
    let two = request(Direction::Decode, clip(Direction::Decode, 1, 2)).plan(&SEPARATE).unwrap();
    assert!(one.workspace_bytes() * 2 < two.workspace_bytes(), "{} {}", one.report(), two.report());
}

#[test]
fn a_still_image_leaves_in_host_memory_what_does_not_fit() {
    for direction in [Direction::Encode, Direction::Decode] {
        let free = request(direction, clip(direction, 2, 1));
        let whole = free.plan(&FAST_COPIES).unwrap();
        assert_eq!(whole.pinned().past, 0);
        let expected = run_costing(&whole, &FAST_COPIES);
        let mut away = 0;
        for percent in (20..100).rev().step_by(5) {
            let limit = whole.device_bytes() * percent / 100;
            let Ok(plan) = Request { limit, ..free.clone() }.plan(&FAST_COPIES) else { break };
            if !plan.report().exact {
                break;
            }
            assert!(plan.device_bytes() <= limit);
            away = plan.pinned().past.max(away);
            assert_eq!(run_costing(&plan, &FAST_COPIES), expected, "{percent}");
        }
        assert!(away > 0, "{direction:?}");
    }
}

#[test]
fn frames_on_their_way_have_places_of_their_own() {
    let tiles = Some(TileSize { height: 24, width: 32, overlap: 8, spacing: Spacing::Strided });
    for direction in [Direction::Encode, Direction::Decode] {
        let whole = request(direction, clip(direction, 1, 9)).plan(&SEPARATE).unwrap();
        let tiled = Request { tiles, ..request(direction, clip(direction, 1, 9)) }.plan(&SEPARATE).unwrap();
        for plan in [&whole, &tiled] {
            let ([load, store], pinned) = (plan.staging(), plan.pinned());
            let (bands, bytes) = plan.bands();
            assert_eq!((load, store), (bands + bytes, load + pinned.load / 2));
            assert_eq!(plan.workspace_bytes(), store + pinned.store / 2);
        }
        assert!(tiled.pinned().load < whole.pinned().load && tiled.pinned().store == whole.pinned().store);
    }
}

#[test]
fn clips_of_a_batch_do_not_mix() {
    for direction in [Direction::Encode, Direction::Decode] {
        let one = request(direction, clip(direction, 1, 9)).plan(&FUSED).unwrap();
        let three = request(direction, clip(direction, 3, 9)).plan(&FUSED).unwrap();
        assert_eq!(one.workspace_bytes(), three.workspace_bytes(), "clips go one after the other");
        let all = run_whole(&three);
        let first: Vec<_> = all.iter().filter(|(batch, ..)| *batch == 0).copied().collect();
        assert_eq!(run_whole(&one), first);
        assert!(all.iter().map(|(.., made)| made).collect::<std::collections::HashSet<_>>().len() == all.len());
        let stream = Request { input: clip(direction, 3, 0), ..request(direction, clip(direction, 3, 9)) };
        assert_eq!(run_pushed(&stream.plan(&FUSED).unwrap(), 9, 2), all);
    }
}

#[test]
fn tiles_are_the_same_in_any_order_and_from_a_stream() {
    let tiles = Some(TileSize { height: 24, width: 32, overlap: 8, spacing: Spacing::Strided });
    for (direction, costs) in
        [Direction::Encode, Direction::Decode].into_iter().flat_map(|d| [(d, FUSED), (d, FAST_COPIES)])
    {
        let base = Request { tiles, slice: Some(2), ..request(direction, clip(direction, 2, 14)) };
        let whole = base.plan(&costs).unwrap();
        let expected = run_costing(&whole, &costs);
        assert!(!whole.report().exact && whole.report().tiles == (2, 2));
        let by_slice = base.rehearse(Layout { order: Order::SliceBySlice, ..whole.layout.clone() }, &costs);
        let by_slice = by_slice.packed(&costs);
        assert_eq!(run_costing(&by_slice, &costs), expected);
        let stream = Request { input: Shape { frames: 0, ..base.input }, ..base };
        assert_eq!(run_pushed_costing(&stream.plan(&costs).unwrap(), &costs, 14, 5), expected);
    }
}

#[test]
fn a_longer_clip_takes_no_more_memory() {
    for direction in [Direction::Encode, Direction::Decode] {
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
    for direction in [Direction::Encode, Direction::Decode] {
        for frames in [61, 62, 67, 100] {
            for tiles in [None, Some(TileSize { height: 24, width: 32, overlap: 8, spacing: Spacing::Strided })] {
                let request = Request { slice: Some(1), tiles, ..request(direction, clip(direction, 3, frames)) };
                // Symbols::run fails on a slot that was not planned.
                [FUSED, FAST_COPIES].iter().for_each(|costs| drop(run_costing(&request.plan(costs).unwrap(), costs)));
            }
        }
    }
}

#[test]
fn a_stream_may_end_anywhere() {
    for direction in [Direction::Encode, Direction::Decode] {
        for (slice, costs) in [(1, FUSED), (3, FUSED), (3, SEPARATE), (7, SEPARATE), (3, FAST_COPIES)] {
            let request = Request { slice: Some(slice), ..request(direction, clip(direction, 2, 0)) };
            let plan = request.plan(&costs).unwrap();
            for frames in 1..(2 * slice + 2) * 4 {
                run_pushed_costing(&plan, &costs, frames, 5);
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
        assert_eq!(run_whole(&plan), run_whole(&largest));
    }
    let unplannable = at(2000).unwrap_err();
    assert!(at(unplannable.smallest).is_ok() && at(unplannable.smallest * 95 / 100).is_err());
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
        let grid = plan.layout.grid.as_ref().unwrap();
        for axis in [&grid.rows, &grid.columns] {
            assert!(axis.spans.iter().all(|span| span.len() == axis.spans[0].len()), "{:?}", axis.spans);
        }
        assert_eq!(run_whole(&plan).len(), 33);
    }
}

#[test]
fn the_steps_add_up_to_the_work_that_progress_counts() {
    for direction in [Direction::Encode, Direction::Decode] {
        for tiles in [None, Some(TileSize { height: 24, width: 32, overlap: 8, spacing: Spacing::Strided })] {
            let request = Request { tiles, slice: Some(2), ..request(direction, clip(direction, 2, 14)) };
            let plan = request.plan(&FUSED).unwrap();
            assert_eq!(work_of(&plan, &FUSED), plan.layout.work(14));
        }
    }
}

fn work_of(plan: &Blueprint, costs: &dyn Costs) -> u64 {
    let (mut job, mut done) = (plan.job(costs), 0);
    while job.wait() == Wait::No {
        done += job.front().unwrap().work(&plan.layout.network);
        job.done();
    }
    done
}

/// What is no whole chunk has no past to move.
#[test]
fn what_makes_no_whole_chunk_comes_first() {
    let request = request(Direction::Decode, clip(Direction::Decode, 1, 9));
    let network = &request.network;
    let mut cut = Cut::new(network, 3, vec![3, 6, 6, 6]);
    movable(network, &FAST_COPIES).into_iter().for_each(|(_, layer)| cut.past[layer] = Past::HOST);
    let layout = Layout { cut: Arc::new(cut), ..request.plan(&FAST_COPIES).unwrap().layout };
    let last = network.stages.last().unwrap().blocks[1].layers()[0];
    let mut chunks = Vec::new();
    Job::new(layout, Some(9), Pools::default(), &FAST_COPIES).rehearse(None, usize::MAX, |_, step| match step {
        Step::Banded(banded) if banded.layer == last => chunks.push((banded.past.len(), banded.frames.len())),
        _ => {}
    });
    assert_eq!(chunks, [(0, 3), (2, 6), (2, 6), (2, 6), (2, 6), (2, 6)]);
}

/// Frames that wait for three more do so at half the resolution.
#[test]
fn a_downsampler_goes_ahead_of_frames_that_wait() {
    let request = request(Direction::Encode, clip(Direction::Encode, 1, 9));
    let network = &request.network;
    let cut = Arc::new(Cut::new(network, 4, vec![1, 4, 2, 1]));
    let layout = Layout { cut, ..request.plan(&SEPARATE).unwrap().layout };
    let [head, first] = [network.stages[1].head, network.stages[1].blocks[0].layers()[0]];
    let mut chunks = Vec::new();
    Job::new(layout, Some(9), Pools::default(), &SEPARATE).rehearse(None, usize::MAX, |_, step| match step {
        Step::Conv { layer, frames, .. } if [head, first].contains(layer) => chunks.push((*layer, frames.len())),
        _ => {}
    });
    // The first slice has a frame more.
    let four = [(head, 1), (head, 1), (head, 1), (head, 1), (first, 4)];
    assert_eq!(chunks, [&four[..], &[(head, 1), (first, 1)], &four[..]].concat());
}

/// Their input frames may go as soon as they have been read.
#[test]
fn a_downsampler_in_time_remembers_sums() {
    let request = request(Direction::Encode, clip(Direction::Encode, 1, 9));
    let head = request.network.stages[2].head;
    let launches = |costs: &Device| {
        let cut = Arc::new(Cut::new(&request.network, 4, vec![4, 4, 2, 1]));
        let layout = Layout { cut, ..request.plan(costs).unwrap().layout };
        let mut launches = Vec::new();
        Job::new(layout, Some(9), Pools::default(), costs).rehearse(None, usize::MAX, |_, step| match step {
            Step::Conv { layer, frames, sums, .. } if *layer == head => {
                let terms: Vec<usize> = frames.iter().map(|frame| frame.terms.len()).collect();
                launches.push((terms, sums.before.is_some(), sums.after.is_some()));
            }
            _ => {}
        });
        launches
    };
    let whole = [vec![1, 3], vec![3], vec![3, 3]].map(|terms| (terms, false, false));
    assert_eq!(launches(&SEPARATE), whole);
    let summed = [(vec![1, 3], false, true), (vec![2], true, true), (vec![2, 3], true, false)];
    assert_eq!(launches(&FAST_COPIES), summed);
}

#[test]
fn the_estimate_of_a_long_clip_is_that_of_all_its_steps() {
    for direction in [Direction::Encode, Direction::Decode] {
        let request = request(direction, clip(direction, 1, 61));
        let mut cut = Cut::new(&request.network, 2 * request.network.latent_rate(), vec![2; 4]);
        let movable = movable(&request.network, &SLOW_COPIES);
        movable.into_iter().for_each(|(_, layer)| cut.past[layer] = Past::HOST);
        let layout = Layout { cut: Arc::new(cut), ..request.plan(&SLOW_COPIES).unwrap().layout };
        let plan = request.rehearse(layout, &SLOW_COPIES).packed(&SLOW_COPIES);
        let network = &plan.layout.network;
        let clock = Clock { network, costs: &SLOW_COPIES, rates: SLOW_COPIES.rates() };
        let (mut job, mut seconds) = (plan.job(&SLOW_COPIES), 0.0);
        while job.wait() == Wait::No {
            seconds += clock.of(job.front().unwrap()).seconds;
            job.done();
        }
        let off = plan.seconds() / seconds - 1.0;
        assert!(off.abs() < 1e-3, "{direction:?}: {} for {seconds}", plan.seconds());
    }
}
