//! Policies that are given, not searched for: a stream makes the frames of the whole clip by each of them.

use super::*;

/// The policy of a search, with every `every`th cache offloaded or recomputed that can be. With `rematerialise` no
/// cache is recomputed, and frames are rematerialised where they can be.
pub fn without_caches(stream: &Request, (every, rematerialise): (usize, bool)) -> SchedulePolicy {
    let network = &*stream.network;
    let mut policy = SchedulePolicy::clone(&stream.plan(&FAST_COPIES).unwrap().spec.policy);
    for layer in FAST_COPIES.target().bandable_layers(network).into_iter().step_by(every) {
        let stage = network.stage_of(layer);
        let recomputes = network.recomputed_by(layer).is_some() && !rematerialise;
        let resident_shares = if layer % 2 == 0 { 0 } else { 5 };
        let offloaded = Placement::Columns { resident_shares };
        policy.layers[layer] = policy.layers[layer].banded(if recomputes { Placement::Recomputed } else { offloaded });
        if rematerialise && network.may_stream(network.stages[stage].head()) {
            policy = policy.with_materialised(network, stage, policy.chunks[stage] / 2);
        }
        if rematerialise && network.largest_stage() == stage {
            policy = policy.with_materialised_hidden(network, stage, 2);
        }
    }
    policy
}

pub fn has_cache(policy: &SchedulePolicy, cache: Placement) -> bool {
    policy.layers.iter().any(|layer| layer.cache == cache)
}

/// Whether outputs of some stage's head are rematerialised.
pub fn rematerialises(policy: &SchedulePolicy, network: &Network) -> bool {
    (0..network.stages.len()).any(|stage| policy.rematerialised(network, stage) > 0)
}

pub fn rematerialises_hidden(policy: &SchedulePolicy, network: &Network) -> bool {
    (0..network.stages.len()).any(|stage| policy.rematerialised_hidden(network, stage) > 0)
}

#[test]
fn offloaded_recomputed_and_rematerialised_frames_are_those_of_the_clip() {
    for direction in Direction::ALL {
        for (slice, every, batch, rematerialise) in
            [(1, 1, 1, false), (2, 2, 2, false), (1, 3, 1, false), (2, 1, 1, true)]
        {
            let stream = Request { slice: Some(slice), ..request(direction, clip(direction, batch, 0)) };
            let whole = request(direction, clip(direction, batch, 26));
            let expected = run(&whole.plan(&SEPARATE).unwrap(), &SEPARATE);
            let policy = without_caches(&stream, (every, rematerialise));
            let network = &stream.network;
            assert!(every > 1 || rematerialise || has_cache(&policy, Placement::Recomputed));
            assert!(direction == Direction::Encode || !rematerialise || rematerialises(&policy, network));
            assert!(!rematerialise || rematerialises_hidden(&policy, network));
            let plan = stream.plan_by(policy, &FAST_COPIES);
            assert!(plan.pinned().offloaded > 0);
            for piece in [1, 3, 100] {
                assert_eq!(run_pushed(&plan, &FAST_COPIES, 26, piece), expected, "{direction:?}, {piece} at a time");
            }
        }
    }
}
