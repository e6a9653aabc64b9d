//! A stream that is restored from persisted slots makes the same frames.

use std::sync::atomic::AtomicBool;

use super::symbols::Symbols;
use super::*;
use crate::plan::policy::{full_resolution_stage, head_is_transient, recomputable_layer};

/// Copies the persisted slots of one schedule to those of another.
fn carry_over(from: (&Schedule, &Symbols), to: &Schedule) -> Symbols {
    let (mut symbols, old, new) = (Symbols::new(&from.1.device), from.0.persisted_slots(), to.persisted_slots());
    assert_eq!(old.len(), new.len());
    for (old, new) in old.into_iter().zip(new) {
        assert_eq!((old.on_host, old.bytes), (new.on_host, new.bytes));
        let arena = |schedule: &Schedule| match old.on_host {
            true => schedule.arenas().host.clone(),
            false => schedule.arenas().device.clone(),
        };
        let source = if old.on_host { &from.1.host } else { &from.1.memory };
        let target = if old.on_host { &mut symbols.host } else { &mut symbols.memory };
        let (frames, content) = (target.0.len(), source.read(&arena(from.0), old.slot));
        target.write(&arena(to), new.slot, content);
        assert_eq!(target.0.len(), frames + 1, "two frames at one offset");
    }
    symbols.stored.clone_from(&from.1.stored);
    symbols.partial_sums.clone_from(&from.1.partial_sums);
    symbols
}

/// Runs a stream of `frames`, of which `pushed` are there already.
fn run_on(schedule: &mut Schedule, symbols: &mut Symbols, mut pushed: u64, frames: u64) {
    loop {
        for _ in 0..schedule.room().min(frames - pushed) {
            schedule.load();
            pushed += 1;
        }
        while schedule.prepare_next() == Next::Op {
            symbols.run(schedule);
        }
        if pushed == frames {
            return;
        }
    }
}

/// Interrupts a stream after each number of frames, and compares its end with that of one that was not.
fn check(request: &Request, device: &Device, frames: u64) {
    check_plan(request, &request.plan(device).unwrap(), device, frames);
}

pub fn check_plan(request: &Request, plan: &Plan, device: &Device, frames: u64) {
    let again = request.restore(&plan.spec.saved_plan(), device).expect("a saved plan is valid");
    assert_eq!((again.device_bytes(), again.pinned()), (plan.device_bytes(), plan.pinned()));
    let whole = |schedule: &mut Schedule, symbols: &mut Symbols, pushed| {
        run_on(schedule, symbols, pushed, frames);
        schedule.set_total(frames);
        while schedule.prepare_next() == Next::Op {
            symbols.run(schedule);
        }
        assert_eq!(schedule.prepare_next(), Next::End);
    };
    let (mut schedule, mut symbols) = (plan.schedule(&device.target()), Symbols::new(device));
    whole(&mut schedule, &mut symbols, plan.spec.cone.first_input);
    let expected = symbols.sorted();
    let (mut schedule, mut symbols) = (plan.schedule(&device.target()), Symbols::new(device));
    let first = plan.spec.cone.first_input;
    for pushed in first..frames {
        run_on(&mut schedule, &mut symbols, pushed.saturating_sub(1).max(first), pushed);
        assert!(schedule.is_waiting());
        let mut next = again.schedule(&device.target());
        next.skip_to(pushed, &device.target());
        assert_eq!(
            (next.loaded(), next.stored(), next.room()),
            (schedule.loaded(), schedule.stored(), schedule.room())
        );
        let mut carried = carry_over((&schedule, &symbols), &next);
        whole(&mut next, &mut carried, pushed);
        assert_eq!(carried.sorted(), expected, "interrupted after {pushed} of {frames}");
    }
}

#[test]
fn a_stream_is_restored_at_any_frame() {
    for direction in Direction::ALL {
        for (device, batch) in [(FUSED, 2), (SEPARATE, 1)] {
            for slice in [1, 2, 3] {
                let stream = Request { slice: Some(slice), ..request(direction, clip(direction, batch, 0)) };
                check(&stream, &device, if direction == Direction::Encode { 43 } else { 23 });
            }
        }
    }
}

#[test]
fn tiles_are_restored_at_any_frame() {
    for direction in Direction::ALL {
        let stream = Request { tiles: TILES, slice: Some(1), ..request(direction, clip(direction, 2, 0)) };
        [FUSED, FAST_COPIES].iter().for_each(|device| check(&stream, device, 14));
    }
}

/// Every cache that can be is offloaded or recomputed, or every other one.
#[test]
fn offloaded_and_recomputed_caches_are_restored_at_any_frame() {
    for direction in Direction::ALL {
        for (slice, every, batch, rematerialise) in
            [(1, 1, 1, false), (2, 2, 2, false), (1, 3, 1, false), (2, 1, 1, true)]
        {
            let stream = Request { slice: Some(slice), ..request(direction, clip(direction, batch, 0)) };
            let SavedPlan { mut policy, .. } = stream.plan(&FAST_COPIES).unwrap().spec.saved_plan();
            for (stage, layer) in FAST_COPIES.target().offloadable_caches(&stream.network).into_iter().step_by(every) {
                let recomputes = recomputable_layer(&stream.network, stage) == Some(layer) && !rematerialise;
                let resident_shares = if layer % 2 == 0 { 0 } else { 5 };
                let offloaded = CachePolicy::Offloaded { resident_shares };
                policy.caches[layer] = if recomputes { CachePolicy::Recomputed } else { offloaded };
                if rematerialise && head_is_transient(&stream.network, stage) {
                    policy.materialised[stage] = policy.chunks[stage] / 2;
                }
                if rematerialise && full_resolution_stage(&stream.network) == stage {
                    policy.materialised_hidden[stage] = 2.min(policy.chunks[stage]);
                }
            }
            assert!(every > 1 || rematerialise || policy.caches.contains(&CachePolicy::Recomputed));
            assert!(direction == Direction::Encode || !rematerialise || policy.materialised != policy.chunks);
            assert!(!rematerialise || policy.materialised_hidden != policy.chunks);
            let plan = stream.restore(&SavedPlan { policy, tiles: None }, &FAST_COPIES).expect("a valid plan");
            assert!(plan.pinned().offloaded > 0);
            check_plan(&stream, &plan, &FAST_COPIES, 26);
        }
    }
}

#[test]
fn an_invalid_saved_plan_is_refused() {
    let stream = request(Direction::Decode, clip(Direction::Decode, 1, 0));
    let SavedPlan { policy, .. } = stream.plan(&FAST_COPIES).unwrap().spec.saved_plan();
    let valid = |policy: SchedulePolicy, tiles| stream.restore(&SavedPlan { policy, tiles }, &FAST_COPIES).is_some();
    assert!(valid(policy.clone(), None));
    let layers = policy.caches.len();
    for slice in [0, u64::MAX] {
        assert!(!valid(SchedulePolicy { slice, ..policy.clone() }, None));
    }
    for chunks in [vec![], vec![0; policy.chunks.len()], vec![9; policy.chunks.len()], vec![1; policy.chunks.len() + 1]]
    {
        assert!(!valid(SchedulePolicy { chunks, ..policy.clone() }, None));
    }
    let stages = policy.chunks.len();
    for materialised in [vec![], vec![0; stages], vec![9; stages], vec![0; stages + 1]] {
        assert!(!valid(SchedulePolicy { materialised, ..policy.clone() }, None));
    }
    for hidden in [vec![], vec![1; stages], vec![9; stages], vec![2; stages], vec![2; stages + 1]] {
        assert!(!valid(SchedulePolicy { materialised_hidden: hidden, ..policy.clone() }, None));
    }
    for caches in [
        vec![],
        vec![CachePolicy::HOST; layers],
        vec![CachePolicy::Recomputed; layers],
        vec![CachePolicy::Resident; layers + 1],
    ] {
        assert!(!valid(SchedulePolicy { caches, ..policy.clone() }, None));
    }
    let size = TileSize { height: 8, width: 8, overlap: 0, spacing: Spacing::Even };
    assert!(valid(policy.clone(), Some(size)));
    for none in [
        TileSize { height: u64::MAX, width: u64::MAX, ..size },
        TileSize { height: 40, width: 56, overlap: u64::MAX, spacing: Spacing::Strided },
    ] {
        assert!(!valid(policy.clone(), Some(none)), "{none:?}");
    }
}

#[test]
fn a_cancelled_skip_stops_at_once() {
    let cancel = AtomicBool::new(true);
    for direction in Direction::ALL {
        for device in [FUSED, FAST_COPIES] {
            for slice in [1, 2, 3] {
                let stream = Request { slice: Some(slice), ..request(direction, clip(direction, 1, 0)) };
                let plan = stream.plan(&device).unwrap();
                for loaded in plan.spec.cone.first_input..90 {
                    let mut schedule = plan.schedule(&device.target());
                    schedule.skip_to(loaded, &device.target().with_cancel(&cancel));
                    assert_eq!(schedule.stored(), 0);
                }
            }
        }
    }
}
