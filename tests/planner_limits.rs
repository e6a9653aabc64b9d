//! One job within many limits: plans use the memory that they may take. On the profile of an H200; needs no GPU.

#![cfg(feature = "cuda")]

mod common;

use std::sync::Arc;

use common::planner::{self, H200, published};
use video_vae::backend::Precision;
use video_vae::backend::cuda::{CudaSizes, KernelArch, device_profile};
use video_vae::model::{Direction, Network};
use video_vae::plan::{PlanReport, Target, search};

/// The plan of decoding a stream of 1080p video, and its seconds as those of a clip.
fn decode_stream(gib: f64) -> (PlanReport, f64) {
    let (config, sizes) = (published(), CudaSizes { precision: Precision::Fp16 });
    let profile = device_profile(H200, Precision::Fp16, KernelArch::HOPPER);
    let target = Target::new(profile, &sizes, config.groups);
    let network = Arc::new(Network::new(&config.model(), Direction::Decode).unwrap().for_device(&profile));
    let request = planner::limited(&network, [0, 1080, 1920], gib);
    let plan = search(&request, &target).unwrap();
    (plan.report(), plan.seconds())
}

/// Where one family of policies begins to fit, plans of another one must not get lost.
#[test]
fn more_memory_does_not_make_a_stream_slower() {
    let mut fastest = f64::INFINITY;
    for limit in [4.6, 4.8, 5.0, 5.07, 5.13, 5.2, 5.3, 5.5, 6.0, 6.5] {
        let (plan, seconds) = decode_stream(limit);
        assert!(plan.exact && seconds < 1.02 * fastest, "{limit} GiB: {seconds} s, {fastest} with less\n{plan}");
        fastest = fastest.min(seconds);
    }
}
