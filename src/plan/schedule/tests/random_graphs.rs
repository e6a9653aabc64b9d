//! The planner knows no family: on random networks, every plan within any limit makes every frame as the layers define.

use super::u8_caches::defined;
use super::*;
use random_graph::random_model;

#[path = "../../../../tests/common/random.rs"]
mod random;
#[path = "../../../../tests/common/random_graph.rs"]
mod random_graph;

/// Random networks of each direction.
const NETWORKS: u64 = 40;

fn requests(seed: u64) -> impl Iterator<Item = Request> {
    let model = random_model(seed, 4);
    let frames = 1 + seed % 14;
    Direction::ALL.into_iter().map(move |direction| {
        let network = Network::new(&model, direction).unwrap();
        let side = network.latent_scale();
        let input = Shape::new(1 + seed % 2, network.input_channels(), frames, 4 * side, 5 * side);
        request_for(if seed.is_multiple_of(3) { network.with_pairs().with_upsampler_pairs() } else { network }, input)
    })
}

#[test]
fn plans_within_any_limit_make_the_frames_that_the_layers_define() {
    let (mut offloaded, mut recomputed, mut hidden, mut refused) = (0, 0, 0, 0);
    for seed in 0..NETWORKS {
        for request in requests(seed) {
            let expected = defined(&request);
            for device in [&SEPARATE, &FAST_COPIES, &SLOW_COPIES] {
                let free = request.plan(device).unwrap();
                assert_eq!(run(&free, device), expected, "seed {seed}, {:?}", request.network.direction);
                for share in [0.9, 0.6, 0.4, 0.25, 0.1] {
                    let limit = (free.device_bytes() as f64 * share) as u64;
                    let limited = Request { limit, allow_tiles: false, ..request.clone() };
                    let Ok(plan) = limited.plan(device) else {
                        refused += 1;
                        continue;
                    };
                    assert!(plan.device_bytes() <= limit, "seed {seed}: {}", plan.report());
                    assert_eq!(run(&plan, device), expected, "seed {seed} within {share}: {}", plan.report());
                    let policy = &plan.spec.policy;
                    offloaded += usize::from(plan.pinned().offloaded > 0);
                    recomputed += usize::from(has_cache(policy, Placement::Recomputed));
                    hidden += usize::from(rematerialises_hidden(policy, &plan.spec.network));
                }
            }
        }
    }
    println!("{offloaded} plans offload, {recomputed} recompute, {hidden} hide frames; {refused} limits are too small");
    assert!(offloaded > 20 && recomputed > 5 && hidden > 0, "{offloaded} {recomputed} {hidden}");
}

#[test]
fn streams_slices_and_chunks_make_the_same_frames() {
    for seed in 0..NETWORKS {
        for request in requests(seed) {
            let expected = defined(&request);
            for (slice, chunk) in [(1, 1), (2, 3), (3, 2)] {
                let cut = Request { slice: Some(slice), chunk: Some(chunk), ..request.clone() };
                let what = format!("seed {seed}, slices of {slice}, chunks of {chunk}");
                assert_eq!(run(&cut.plan(&SEPARATE).unwrap(), &SEPARATE), expected, "{what}");
                let stream = Request { frames: None, ..cut };
                let plan = stream.plan(&FAST_COPIES).unwrap();
                assert_eq!(run_pushed(&plan, &FAST_COPIES, request.frames.unwrap(), 2), expected, "{what}, streamed");
            }
        }
    }
}
