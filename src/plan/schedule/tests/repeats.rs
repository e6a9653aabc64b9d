//! A rehearsal that counts what repeats takes the same memory as one of the whole schedule.

use super::*;

fn spec(request: &Request, policy: SchedulePolicy, tiles: Option<TileSize>, order: ItemOrder) -> ScheduleSpec {
    request.spec(Arc::new(policy), tiles.and_then(|size| request.grid(size)), order)
}

type Demand = (Vec<(u64, u64)>, u64);

/// What both memories need, and the number of operations that were rehearsed.
fn rehearsed(schedule: Schedule, end: Option<u64>, slices: Option<usize>, target: &Target) -> ([Demand; 2], usize) {
    let mut ops = 0;
    let arenas = schedule.rehearse(end, slices, target, |_, _| ops += 1);
    ([&arenas.device, &arenas.host].map(Arena::demand), ops)
}

/// Compares both rehearsals. Returns how many operations each had.
fn compare(spec: &ScheduleSpec, frames: Option<u64>, end: Option<u64>, device: &Device) -> [usize; 2] {
    let spec = ScheduleSpec { end: frames, ..spec.clone() };
    let (target, slices) = (device.target(), end.is_none().then_some(4));
    let whole = Schedule::new(Purpose::Run, spec.clone(), Arenas::default(), &target);
    let short = Schedule::new(Purpose::Rehearsal, spec.clone(), Arenas::default(), &target);
    let ((whole, whole_ops), (short, short_ops)) =
        (rehearsed(whole, end, slices, &target), rehearsed(short, end, slices, &target));
    let (policy, batch, tiles, order) = (&spec.policy, spec.batch, spec.tiles(), spec.order);
    let what = format!("{batch} clips of {frames:?} ({end:?}) in {tiles} tiles, {order:?}");
    assert_eq!(short, whole, "{what}: {policy:?}");
    [whole_ops, short_ops]
}

/// Everything resident, and every other cache offloaded or recomputed.
fn policies(request: &Request, slice: u64, chunks: &[u64], device: &Device) -> Vec<SchedulePolicy> {
    let network = &request.network;
    let resident = SchedulePolicy::resident(network, slice * network.latent_rate(), chunks.to_vec());
    let mut policies = vec![resident.clone()];
    if device.target().profile.offloads {
        let mut banded = resident;
        for layer in device.target().bandable_layers(network).into_iter().step_by(2) {
            let recomputes = network.recomputed_by(layer).is_some();
            let offloaded = Placement::Columns { resident_shares: (layer % 3 * 20) as u8 };
            banded.layers[layer] =
                banded.layers[layer].banded(if recomputes { Placement::Recomputed } else { offloaded });
        }
        policies.push(banded);
    }
    policies
}

#[test]
fn work_items_that_are_alike_are_counted_exactly() {
    let tile = |height, width, overlap| Some(TileSize { height, width, overlap, spacing: Spacing::Strided });
    let mut ops = [0; 2];
    for direction in Direction::ALL {
        for device in [FUSED, SEPARATE, FAST_COPIES] {
            for (batch, tiles) in [
                (1, tile(16, 16, 8)),
                (1, tile(8, 56, 0)),
                (2, tile(24, 32, 8)),
                (3, tile(16, 24, 8)),
                (4, tile(40, 8, 0)),
                (5, None),
                (9, None),
            ] {
                for (slice, chunks) in [(1, [1, 2, 4, 4]), (2, [3, 8, 2, 1])] {
                    let request = request(direction, clip(direction, batch, 0));
                    for policy in policies(&request, slice, &chunks, &device) {
                        let long = 1 + 6 * policy.slice;
                        let by_slice = spec(&request, policy.clone(), tiles, ItemOrder::SliceBySlice);
                        let by_item = spec(&request, policy, tiles, ItemOrder::ItemByItem);
                        for (spec, frames, end) in [
                            (&by_slice, None, None),
                            (&by_slice, None, Some(long - 2)),
                            (&by_slice, Some(long), None),
                            (&by_item, Some(9), Some(9)),
                        ] {
                            let more = compare(spec, frames, end, &device);
                            ops = [ops[0] + more[0], ops[1] + more[1]];
                        }
                    }
                }
            }
        }
    }
    assert!(ops[1] < ops[0], "{ops:?}");
}

#[test]
fn rehearsals_do_not_grow_with_work_items() {
    for direction in Direction::ALL {
        let ops = |batch: u64, size: u64| {
            let request = request(direction, clip(direction, batch, 0));
            let policy = policies(&request, 6, &[8, 8, 4, 2], &FUSED).remove(0);
            let tiles = Some(TileSize { height: size, width: size, overlap: 0, spacing: Spacing::Even });
            let spec = spec(&request, policy, tiles, ItemOrder::SliceBySlice);
            let target = FUSED.target();
            rehearsed(Schedule::new(Purpose::Rehearsal, spec, Arenas::default(), &target), None, Some(4), &target).1
        };
        let (few, many) = (ops(3, 16), ops(256, 8));
        assert!(many < 4 * few, "{many} against {few}");
    }
}
