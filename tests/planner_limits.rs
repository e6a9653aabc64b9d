//! One job within many limits: plans use the memory that they may take. On the profile of an H200; needs no GPU.

#![cfg(feature = "cuda")]

mod common;

use std::sync::Arc;

use common::planner::{self, H200, published};
use video_vae::backend::Precision;
use video_vae::backend::cuda::{CudaSizes, KernelArch, device_profile};
use video_vae::model::{Direction, Network};
use video_vae::plan::{PlanReport, Request, Target, search};

/// The plan of decoding 1080p video, and its seconds. 0 frames are a stream, which counts as a clip.
fn decode(frames: u64, gib: f64, slice: Option<u64>) -> (PlanReport, f64) {
    let (config, sizes) = (published(), CudaSizes { precision: Precision::Fp16 });
    let profile = device_profile(H200, Precision::Fp16, KernelArch::HOPPER);
    let target = Target::new(profile, &sizes, config.groups);
    let network = Arc::new(Network::new(&config.model(), Direction::Decode).unwrap().for_device(&profile));
    let request = Request { slice, ..planner::limited(&network, [frames, 1080, 1920], gib) };
    let plan = search(&request, &target).unwrap();
    (plan.report(), plan.seconds())
}

/// Where one family of policies begins to fit, plans of another one must not get lost.
#[test]
fn more_memory_does_not_make_a_stream_slower() {
    let mut fastest = f64::INFINITY;
    for limit in [4.6, 4.8, 5.0, 5.07, 5.13, 5.2, 5.3, 5.5, 6.0, 6.5] {
        let (plan, seconds) = decode(0, limit, None);
        assert!(plan.exact && seconds < 1.02 * fastest, "{limit} GiB: {seconds} s, {fastest} with less\n{plan}");
        fastest = fastest.min(seconds);
    }
}

/// Slices of 8 latent frames are not packed, so they take more memory. Within 10 GiB they take little more time.
#[test]
fn long_slices_use_the_memory_they_may_take() {
    let [(_, short), (plan, long)] = [4, 8].map(|slice| decode(201, 10.0, Some(slice)));
    assert!(plan.exact && long < 1.25 * short, "{short} s with short slices\n{plan}");
    let [(_, with_less), (_, with_more)] = [8.0, 16.0].map(|gib| decode(201, gib, Some(8)));
    assert!(with_more < long && long < with_less, "{with_less}, {long}, {with_more} s\n{plan}");
}
