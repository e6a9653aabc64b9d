//! Plans of ranges for the full-size model on one GPU profile: what a cut costs, with and without limits.

#![cfg(feature = "cuda")]

use std::sync::Arc;
use std::time::Instant;

use crate::common::planner::{self, H200, published};
use video_vae::internals::backend::Precision;
use video_vae::internals::backend::cuda::{CudaSizes, KernelArch, device_profile};
use video_vae::internals::ir::Shape;
use video_vae::internals::model::{Cone, Direction, FrameRange, Network};
use video_vae::internals::plan::{Next, Plan, Request, Target, op_work, search};
use video_vae::internals::report::PlanReport;

fn request(network: &Arc<Network>, first: u64, count: u64, limit: u64) -> Request {
    let cone = Cone::new(network, FrameRange { first, end: Some(first + count) });
    let inputs = cone.inputs(u64::MAX);
    let frames = inputs.end - inputs.start;
    let input = match network.direction {
        Direction::Encode => Shape::new(1, 3, frames, 1080, 1920),
        Direction::Decode => Shape::new(1, 16, frames, 135, 240),
    };
    Request { cone: Arc::new(cone), limit: limit << 30, allow_tiles: false, ..planner::request(network, input) }
}

/// Multiplications of all operations.
fn work(plan: &Plan, target: &Target) -> f64 {
    let (mut schedule, mut done) = (plan.schedule(target), 0.0);
    let network = Arc::clone(&schedule.spec().network);
    while schedule.prepare_next() == Next::Op {
        done += schedule.front().map_or(0, |op| op_work(op, &network)) as f64;
        schedule.done();
    }
    done
}

#[test]
fn a_cut_costs_few_frames_also_within_limits() {
    let config = published();
    let sizes = CudaSizes::new(Precision::Fp16, KernelArch::HOPPER);
    let profile = device_profile(H200, Precision::Fp16, KernelArch::HOPPER);
    let target = Target::new(profile, &sizes, config.groups);
    for (direction, first, counts, video_frames, most) in
        [(Direction::Decode, 1002, [60, 160], 1.0, 27.0), (Direction::Encode, 250, [15, 40], 4.0, 105.0)]
    {
        let network = Arc::new(Network::new(&config.model(), direction).unwrap().for_device(profile.paired_layers()));
        for limit in [139, 8] {
            let started = Instant::now();
            let plans = counts.map(|count| search(&request(&network, first, count, limit), &target).unwrap());
            let seconds = started.elapsed().as_secs_f64() / 2.0;
            // Of frames beyond the fill, which are those of a long run.
            let [frames, more] = counts.map(|count| count as f64);
            let cut = |short: f64, long: f64| (short / ((long - short) / (more - frames)) - frames) * video_frames;
            let [short, long] = [0, 1].map(|i| work(&plans[i], &target));
            let [time, longer] = [0, 1].map(|i| plans[i].estimate.seconds);
            let (products, time) = (cut(short, long), cut(time, longer));
            println!(
                "{direction:?} within {limit} GiB: a cut costs {products:.1} frames' products, about {time:.1} frames' \
                 time; planned in {seconds:.1} s, {:.2} GiB",
                plans[1].device_bytes() as f64 / f64::from(1 << 30)
            );
            assert!(plans.iter().all(|plan| plan.fits(limit << 30, 110 << 30) && plan.is_untiled()));
            assert!(products > 0.0 && products <= most, "{direction:?}: {products:.1}");
            assert!(time <= most * 1.15, "{direction:?}: {time:.1}");
        }
    }
}

/// What a fleet relies on: parts that begin whole periods apart are planned once.
#[test]
fn ranges_whole_periods_apart_have_the_same_plan() {
    let config = published();
    let sizes = CudaSizes::new(Precision::Fp16, KernelArch::HOPPER);
    let profile = device_profile(H200, Precision::Fp16, KernelArch::HOPPER);
    let target = Target::new(profile, &sizes, config.groups);
    for (direction, first, count) in [(Direction::Decode, 1002, 60), (Direction::Encode, 250, 15)] {
        let network = Arc::new(Network::new(&config.model(), direction).unwrap().for_device(profile.paired_layers()));
        let period = Cone::period(&network);
        for limit in [139, 8] {
            let one = request(&network, first, count, limit);
            let planned = search(&one, &target).unwrap().report();
            for periods in [1, 5, 40] {
                let shifted = request(&network, first + periods * period, count, limit);
                assert!(shifted.cone.is_shift_of(&one.cone, &network), "{direction:?} {periods}");
                let report = search(&shifted, &target).unwrap().report();
                assert_eq!(PlanReport { range: planned.range, ..report }, planned, "{direction:?} {periods} {limit}");
            }
            let [longer, later] = [(first, count + 1), (first + 1, count)];
            for (first, count) in [longer, later] {
                assert!(!request(&network, first, count, limit).cone.is_shift_of(&one.cone, &network));
            }
        }
    }
}
