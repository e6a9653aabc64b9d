//! Schedules are run on symbols: a frame's content is a hash of how it was made. So a wrong frame, slab or slot shows as
//! another hash, and cuts that must give the same numbers must give the same hashes.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use super::*;
use crate::model::Config;
use crate::plan::{Blueprint, Request, Spacing, TileSize};
use crate::tensor::{ConvLayout, Shape};

struct FourBytes;

/// The same, but norms are steps of their own.
struct SeparateNorms;

impl Costs for SeparateNorms {
    fn busy_pixels(&self) -> u64 {
        FourBytes.busy_pixels()
    }
    fn frame_bytes(&self, shape: FrameShape) -> u64 {
        FourBytes.frame_bytes(shape)
    }
    fn conv_scratch(&self, layout: &ConvLayout, input: FrameShape, frames: u64) -> u64 {
        FourBytes.conv_scratch(layout, input, frames)
    }
    fn attention_scratch(&self, shape: FrameShape, frames: u64) -> u64 {
        FourBytes.attention_scratch(shape, frames)
    }
    fn staging_bytes(&self, shape: FrameShape) -> u64 {
        shape.elements()
    }
    fn fuses_norm(&self, layout: &ConvLayout) -> bool {
        layout.cout <= 3
    }
}

impl Costs for FourBytes {
    fn fuses_norm(&self, _: &ConvLayout) -> bool {
        true
    }
    fn busy_pixels(&self) -> u64 {
        16384
    }
    fn frame_bytes(&self, shape: FrameShape) -> u64 {
        4 * shape.elements()
    }
    fn conv_scratch(&self, layout: &ConvLayout, _: FrameShape, frames: u64) -> u64 {
        layout.cout * frames
    }
    fn attention_scratch(&self, shape: FrameShape, _: u64) -> u64 {
        shape.pixels()
    }
    fn staging_bytes(&self, _: FrameShape) -> u64 {
        0
    }
}

fn request(direction: Direction, input: Shape) -> Request {
    let config = Config { channels: vec![8, 16, 16, 32], layers: 2, groups: 8, latent: 4, temporal_levels: 2 };
    Request {
        network: Arc::new(Network::new(&config, direction)),
        input,
        limit: u64::MAX,
        weight_bytes: 1000,
        load_bytes: 0,
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

/// What each slot's memory holds, and what the host was given.
#[derive(Default)]
struct Symbols {
    memory: HashMap<u64, u64>,
    stored: Vec<(u64, u64, u64)>,
}

impl Symbols {
    fn run(&mut self, job: &mut Job) {
        let step = job.front().expect("a step is in front").clone();
        let (layout, pool) = (job.layout(), job.pool());
        let at = |slot: Slot| pool.offset(slot).expect("the run keeps to its plan");
        match step {
            Step::Load { lane, batch, frame, into } => {
                let region = layout.regions(layout.tile_of(lane)).0;
                self.memory.insert(at(into), hash((batch, frame, region.top, region.left)));
            }
            Step::Conv { layer, frames, .. } => {
                // All frames of a step are read before any is written, as no order among them is promised.
                let made: Vec<_> = frames
                    .iter()
                    .map(|frame| {
                        let terms: Vec<_> =
                            frame.terms.iter().map(|(slot, slab)| (self.memory[&at(*slot)], *slab)).collect();
                        let residual = frame.residual.map(|slot| self.memory[&at(slot)]);
                        assert!(
                            frame.terms.iter().all(|(slot, _)| *slot != frame.out) && frame.residual != Some(frame.out)
                        );
                        (at(frame.out), hash((layer, terms, frame.bias, residual)))
                    })
                    .collect();
                self.memory.extend(made);
            }
            Step::Normalise { layer, frames, .. } => {
                let made: Vec<_> =
                    frames.iter().map(|(from, to)| (at(*to), hash(("norm", layer, self.memory[&at(*from)])))).collect();
                self.memory.extend(made);
            }
            Step::Attention { frames, .. } => {
                let made: Vec<_> =
                    frames.iter().map(|(from, to)| (at(*to), hash(("attention", self.memory[&at(*from)])))).collect();
                self.memory.extend(made);
            }
            Step::Blend { lane, from, into, clear } => {
                let before = if clear { 0 } else { self.memory[&at(into)] };
                let tile = layout.tile_of(lane);
                self.memory.insert(at(into), hash((before, tile, self.memory[&at(from)])));
            }
            Step::Store { batch, frame, from } => self.stored.push((batch, frame, self.memory[&at(from)])),
        }
        job.done();
    }

    fn sorted(mut self) -> Vec<(u64, u64, u64)> {
        self.stored.sort_unstable();
        self.stored
    }
}

fn run_whole(blueprint: &Blueprint) -> Vec<(u64, u64, u64)> {
    run_costing(blueprint, &FourBytes)
}

fn run_costing(blueprint: &Blueprint, costs: &dyn Costs) -> Vec<(u64, u64, u64)> {
    let (mut job, mut symbols) = (blueprint.job(costs), Symbols::default());
    while job.wait() == Wait::No {
        symbols.run(&mut job);
    }
    assert_eq!(job.wait(), Wait::End);
    symbols.sorted()
}

/// Pushes at most `piece` frames at a time, and works only when nothing more is taken.
fn run_pushed(blueprint: &Blueprint, frames: u64, piece: u64) -> Vec<(u64, u64, u64)> {
    let (mut job, mut symbols) = (blueprint.job(&FourBytes), Symbols::default());
    let mut pushed = 0;
    loop {
        for _ in 0..job.room().min(piece).min(frames - pushed) {
            job.load();
            pushed += 1;
        }
        while job.front().is_some() {
            symbols.run(&mut job);
        }
        if pushed == frames {
            job.set_total(frames);
        }
        while job.wait() == Wait::No {
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
            let expected = run_whole(&whole.plan(&FourBytes).unwrap());
            let made: Vec<u64> = expected.iter().map(|(_, frame, _)| *frame).collect();
            assert_eq!(made, (0..base.network.output_frames(frames)).collect::<Vec<_>>());
            for slice in [1, 2, 3, 7] {
                for chunk in [1, 2, 3, 5] {
                    let cut = Request { slice: Some(slice), chunk: Some(chunk), ..base.clone() };
                    assert_eq!(run_whole(&cut.plan(&FourBytes).unwrap()), expected, "{slice} {chunk}");
                    let stream = Request { input: Shape { frames: 0, ..base.input }, ..cut };
                    let stream = stream.plan(&FourBytes).unwrap();
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
        let expected = run_costing(&base.plan(&SeparateNorms).unwrap(), &SeparateNorms);
        for (slice, chunk) in [(1, 1), (2, 3), (3, 2)] {
            let cut = Request { slice: Some(slice), chunk: Some(chunk), ..base.clone() };
            assert_eq!(run_costing(&cut.plan(&SeparateNorms).unwrap(), &SeparateNorms), expected);
        }
    }
}

#[test]
fn clips_of_a_batch_do_not_mix() {
    for direction in [Direction::Encode, Direction::Decode] {
        let one = request(direction, clip(direction, 1, 9)).plan(&FourBytes).unwrap();
        let three = request(direction, clip(direction, 3, 9)).plan(&FourBytes).unwrap();
        assert_eq!(one.workspace_bytes(), three.workspace_bytes(), "clips go one after the other");
        let all = run_whole(&three);
        let first: Vec<_> = all.iter().filter(|(batch, ..)| *batch == 0).copied().collect();
        assert_eq!(run_whole(&one), first);
        assert!(all.iter().map(|(.., made)| made).collect::<std::collections::HashSet<_>>().len() == all.len());
        let stream = Request { input: clip(direction, 3, 0), ..request(direction, clip(direction, 3, 9)) };
        assert_eq!(run_pushed(&stream.plan(&FourBytes).unwrap(), 9, 2), all);
    }
}

#[test]
fn tiles_are_the_same_in_any_order_and_from_a_stream() {
    let tiles = Some(TileSize { height: 24, width: 32, overlap: 8, spacing: Spacing::Strided });
    for direction in [Direction::Encode, Direction::Decode] {
        let base = Request { tiles, slice: Some(2), ..request(direction, clip(direction, 2, 14)) };
        let whole = base.plan(&FourBytes).unwrap();
        let expected = run_whole(&whole);
        assert!(!whole.report().exact && whole.report().tiles == (2, 2));
        let by_slice = base.rehearse(Layout { order: Order::SliceBySlice, ..whole.layout.clone() }, &FourBytes);
        assert_eq!(run_whole(&by_slice), expected);
        let stream = Request { input: Shape { frames: 0, ..base.input }, ..base };
        assert_eq!(run_pushed(&stream.plan(&FourBytes).unwrap(), 14, 5), expected);
    }
}

#[test]
fn a_longer_clip_takes_no_more_memory() {
    for direction in [Direction::Encode, Direction::Decode] {
        for slice in [None, Some(1), Some(3)] {
            let bytes = |frames| {
                let request = Request { slice, ..request(direction, clip(direction, 1, frames)) };
                request.plan(&FourBytes).unwrap().device_bytes()
            };
            let (short, long) = (bytes(1 + 4 * 40), bytes(1 + 4 * 250));
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
                run_whole(&request.plan(&FourBytes).unwrap());
            }
        }
    }
}

#[test]
fn a_smaller_limit_costs_chunks_first_and_tiles_last() {
    let free = request(Direction::Decode, clip(Direction::Decode, 1, 21));
    let largest = free.plan(&FourBytes).unwrap();
    let smallest_exact = Request { slice: Some(1), chunk: Some(1), ..free.clone() }.plan(&FourBytes).unwrap();
    assert!(smallest_exact.device_bytes() < largest.device_bytes());
    let at = |limit| Request { limit, ..free.clone() }.plan(&FourBytes);
    for limit in [largest.device_bytes(), largest.device_bytes() - 1, smallest_exact.device_bytes()] {
        let plan = at(limit).unwrap();
        assert!(plan.device_bytes() <= limit && plan.report().exact);
        assert_eq!(run_whole(&plan), run_whole(&largest));
    }
    let unplannable = at(2000).unwrap_err();
    assert!(at(unplannable.smallest).is_ok() && at(unplannable.smallest - 1).is_err());
}

#[test]
fn tiles_made_by_the_limit_are_even_and_fit() {
    let free = request(Direction::Decode, Shape::new(1, 4, 9, 40, 60));
    let exact = Request { slice: Some(1), chunk: Some(1), ..free.clone() }.plan(&FourBytes).unwrap();
    for percent in [90, 50] {
        let limit = exact.device_bytes() * percent / 100;
        let plan = Request { limit, ..free.clone() }.plan(&FourBytes).unwrap();
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
            let plan = request.plan(&FourBytes).unwrap();
            let (mut job, mut done) = (plan.job(&FourBytes), 0);
            while job.wait() == Wait::No {
                done += job.front().unwrap().work(&request.network);
                job.done();
            }
            assert_eq!(done, plan.layout.work(14));
        }
    }
}
