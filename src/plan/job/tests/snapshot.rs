//! A job that goes on where another one was makes the same frames.

use super::*;
use crate::plan::cut::{is_passing, movable, repeatable};
use crate::plan::{Cut, Way};

/// What one job remembers goes to where another one expects it.
fn carry_over(from: (&Job, &Symbols), to: &Job) -> Symbols {
    let (mut symbols, old, new) = (Symbols::default(), from.0.remembered(), to.remembered());
    assert_eq!(old.len(), new.len());
    for (old, new) in old.into_iter().zip(new) {
        assert_eq!((old.on_host, old.bytes), (new.on_host, new.bytes));
        let pool = |job: &Job| if old.on_host { job.pools().past.clone() } else { job.pools().frames.clone() };
        let source = if old.on_host { &from.1.past } else { &from.1.memory };
        let target = if old.on_host { &mut symbols.past } else { &mut symbols.memory };
        let (frames, content) = (target.0.len(), source.read(&pool(from.0), old.slot));
        target.write(&pool(to), new.slot, content);
        assert_eq!(target.0.len(), frames + 1, "two frames in one place");
    }
    symbols.stored.clone_from(&from.1.stored);
    symbols.carries.clone_from(&from.1.carries);
    symbols.sums.clone_from(&from.1.sums);
    symbols
}

/// Runs a stream of `frames`, of which `pushed` are there already.
fn run_on(job: &mut Job, symbols: &mut Symbols, mut pushed: u64, frames: u64) {
    loop {
        for _ in 0..job.room().min(frames - pushed) {
            job.load();
            pushed += 1;
        }
        while job.wait() == Wait::No {
            symbols.run(job);
        }
        if pushed == frames {
            return;
        }
    }
}

/// Interrupts a stream after each number of frames, and compares its end with that of one that was not.
fn check(request: &Request, costs: &dyn Costs, frames: u64) {
    check_plan(request, &request.plan(costs).unwrap(), costs, frames);
}

fn check_plan(request: &Request, blueprint: &Blueprint, costs: &dyn Costs, frames: u64) {
    let way = blueprint.layout.way();
    let again = request.follow(&way, costs).expect("a plan can be followed");
    assert_eq!((again.device_bytes(), again.pinned()), (blueprint.device_bytes(), blueprint.pinned()));
    let whole = |job: &mut Job, symbols: &mut Symbols, pushed| {
        run_on(job, symbols, pushed, frames);
        job.set_total(frames);
        while job.wait() == Wait::No {
            symbols.run(job);
        }
        assert_eq!(job.wait(), Wait::End);
    };
    let (mut job, mut symbols) = (blueprint.job(costs), Symbols::default());
    whole(&mut job, &mut symbols, 0);
    let expected = symbols.sorted();
    let (mut job, mut symbols) = (blueprint.job(costs), Symbols::default());
    for pushed in 0..frames {
        run_on(&mut job, &mut symbols, pushed.saturating_sub(1), pushed);
        assert!(job.is_waiting());
        let mut next = again.job(costs);
        next.skip_to(pushed);
        assert_eq!((next.loaded(), next.stored(), next.room()), (job.loaded(), job.stored(), job.room()));
        let mut carried = carry_over((&job, &symbols), &next);
        whole(&mut next, &mut carried, pushed);
        assert_eq!(carried.sorted(), expected, "interrupted after {pushed} of {frames}");
    }
}

#[test]
fn a_stream_goes_on_from_any_frame() {
    for direction in [Direction::Encode, Direction::Decode] {
        for (device, batch) in [(FUSED, 2), (SEPARATE, 1)] {
            for slice in [1, 2, 3] {
                let stream = Request { slice: Some(slice), ..request(direction, clip(direction, batch, 0)) };
                check(&stream, &device, if direction == Direction::Encode { 43 } else { 23 });
            }
        }
    }
}

#[test]
fn tiles_go_on_from_any_frame() {
    let tiles = Some(TileSize { height: 24, width: 32, overlap: 8, spacing: Spacing::Strided });
    for direction in [Direction::Encode, Direction::Decode] {
        let stream = Request { tiles, slice: Some(1), ..request(direction, clip(direction, 2, 0)) };
        [FUSED, FAST_COPIES].iter().for_each(|costs| check(&stream, costs, 14));
    }
}

/// Every layer that can has its past elsewhere, or every other one.
#[test]
fn a_past_that_is_elsewhere_goes_on_from_any_frame() {
    for direction in [Direction::Encode, Direction::Decode] {
        for (slice, every, batch, anew) in [(1, 1, 1, false), (2, 2, 2, false), (1, 3, 1, false), (2, 1, 1, true)] {
            let stream = Request { slice: Some(slice), ..request(direction, clip(direction, batch, 0)) };
            let Way { mut cut, .. } = stream.plan(&FAST_COPIES).unwrap().layout.way();
            for (stage, layer) in movable(&stream.network, &FAST_COPIES).into_iter().step_by(every) {
                let repeats = repeatable(&stream.network, stage) == Some(layer);
                let near = if layer % 2 == 0 { 0 } else { 5 };
                cut.past[layer] = if repeats && !anew { Past::Again } else { Past::Bands { near } };
                if anew && is_passing(&stream.network, stage) {
                    cut.stored[stage] = cut.chunks[stage] / 2;
                }
            }
            assert!(every > 1 || anew || cut.past.contains(&Past::Again));
            assert!(direction == Direction::Encode || !anew || cut.stored != cut.chunks);
            let plan = stream.follow(&Way { cut, tiles: None }, &FAST_COPIES).expect("a way");
            assert!(plan.pinned().past > 0);
            check_plan(&stream, &plan, &FAST_COPIES, 26);
        }
    }
}

#[test]
fn a_way_that_is_none_is_not_followed() {
    let stream = request(Direction::Decode, clip(Direction::Decode, 1, 0));
    let Way { cut, .. } = stream.plan(&FAST_COPIES).unwrap().layout.way();
    let follow = |cut: Cut, tiles| stream.follow(&Way { cut, tiles }, &FAST_COPIES).is_some();
    assert!(follow(cut.clone(), None));
    let layers = cut.past.len();
    for slice in [0, u64::MAX] {
        assert!(!follow(Cut { slice, ..cut.clone() }, None));
    }
    for chunks in [vec![], vec![0; cut.chunks.len()], vec![9; cut.chunks.len()], vec![1; cut.chunks.len() + 1]] {
        assert!(!follow(Cut { chunks, ..cut.clone() }, None));
    }
    let stages = cut.chunks.len();
    for stored in [vec![], vec![0; stages], vec![9; stages], vec![0; stages + 1]] {
        assert!(!follow(Cut { stored, ..cut.clone() }, None));
    }
    for past in [vec![], vec![Past::HOST; layers], vec![Past::Again; layers], vec![Past::Device; layers + 1]] {
        assert!(!follow(Cut { past, ..cut.clone() }, None));
    }
    let size = TileSize { height: 8, width: 8, overlap: 0, spacing: Spacing::Even };
    assert!(follow(cut.clone(), Some(size)));
    for none in [
        TileSize { height: u64::MAX, width: u64::MAX, ..size },
        TileSize { height: 40, width: 56, overlap: u64::MAX, spacing: Spacing::Strided },
    ] {
        assert!(!follow(cut.clone(), Some(none)), "{none:?}");
    }
}
