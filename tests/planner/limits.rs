//! One job within many limits: a plan is not slower than that of a smaller limit. On the profile of an H200; needs no
//! GPU. `-- --ignored --nocapture` goes through many jobs, and prints those that are.

#![cfg(feature = "cuda")]

use std::sync::Arc;

use crate::common::planner::{self, DEVICE_BYTES, H200, published};
use video_vae::internals::backend::Precision;
use video_vae::internals::backend::cuda::{CudaSizes, KernelArch, device_profile};
use video_vae::internals::ir::Shape;
use video_vae::internals::model::families::kl2d;
use video_vae::internals::model::{Direction, Network};
use video_vae::internals::plan::{Request, Spacing, Target, TileSize, search};

/// A plan may take this much longer than that of a smaller limit.
const TOLERANCE: f64 = 1.01;

/// One job, whatever the limit.
#[derive(Debug, Clone, Copy)]
struct Job {
    direction: Direction,
    /// Frames, height, width. No frames are a stream.
    shape: [u64; 3],
    /// The side of strided tiles.
    tiles: Option<u64>,
}

impl Job {
    fn request(self, network: &Arc<Network>, limit: u64) -> Request {
        let tiles =
            self.tiles.map(|side| TileSize { height: side, width: side, overlap: 64, spacing: Spacing::Strided });
        Request { limit, tiles, allow_tiles: false, ..planner::limited(network, self.shape, 0.0) }
    }

    /// Plans for growing limits. Returns limit and seconds of those that are slower than a smaller limit's.
    fn slower(self, limits: impl Iterator<Item = u64>) -> Vec<(u64, f64, f64)> {
        let (config, sizes) = (published(), CudaSizes::new(Precision::Fp16, KernelArch::HOPPER));
        let profile = device_profile(H200, Precision::Fp16, KernelArch::HOPPER);
        let target = Target::new(profile, &sizes, config.groups);
        let network =
            Arc::new(Network::new(&config.model(), self.direction).unwrap().for_device(profile.paired_layers()));
        let (mut fastest, mut slower) = (f64::INFINITY, Vec::new());
        for limit in limits {
            let Ok(plan) = search(&self.request(&network, limit), &target) else { continue };
            if plan.estimate.seconds > TOLERANCE * fastest {
                slower.push((limit, plan.estimate.seconds, fastest));
            }
            fastest = fastest.min(plan.estimate.seconds);
        }
        slower
    }
}

/// From `first` GiB on, each larger by this factor.
fn limits(first: f64, factor: f64, count: usize) -> impl Iterator<Item = u64> {
    let gib = move |i| first * factor.powi(i as i32);
    (0..count).map(move |i| (gib(i) * (1u64 << 30) as f64) as u64).filter(|limit| *limit < DEVICE_BYTES)
}

/// Where one family of policies begins to fit, plans of another one must not get lost.
#[test]
fn more_memory_does_not_make_a_stream_slower() {
    let job = Job { direction: Direction::Decode, shape: [0, 1080, 1920], tiles: None };
    let gib = [4.6, 4.8, 5.0, 5.07, 5.13, 5.2, 5.3, 5.5, 6.0, 6.5];
    let slower = job.slower(gib.into_iter().map(|gib| (gib * (1u64 << 30) as f64) as u64));
    assert!(slower.is_empty(), "{slower:?}");
}

/// Stills of a network that sees no time have offloaded outputs, as those of SeedVR2 have.
#[test]
fn a_large_image_is_decoded_without_tiles_within_8_gib() {
    let sizes = CudaSizes::new(Precision::Fp16, KernelArch::HOPPER);
    let profile = device_profile(H200, Precision::Fp16, KernelArch::HOPPER);
    for published in kl2d::FAMILY.published {
        let (name, model) = (published.name, (published.model)());
        let network = Arc::new(Network::new(&model, Direction::Decode).unwrap().for_device(profile.paired_layers()));
        let target = Target::new(profile, &sizes, network.norm.groups());
        let input = Shape::new(1, model.geometry.latent_channels, 1, 512, 512);
        let request = |gib: u64| Request { limit: gib << 30, allow_tiles: false, ..planner::request(&network, input) };
        let [tight, whole] = [8, 64].map(|gib| search(&request(gib), &target).unwrap_or_else(|_| panic!("{name}")));
        assert!(tight.device_bytes() <= 8 << 30 && whole.device_bytes() > 8 << 30, "{name}");
        assert!(tight.host_bytes() > whole.host_bytes(), "{name}: frames are offloaded");
    }
}

/// Rehearsals of strided tiles take longest, so searches try the fewest policies there.
#[test]
fn more_memory_does_not_make_strided_tiles_slower() {
    let job = Job { direction: Direction::Encode, shape: [81, 720, 1280], tiles: Some(512) };
    let slower = job.slower(limits(0.8, 1.05, 12));
    assert!(slower.is_empty(), "{slower:?}");
}

#[test]
#[ignore = "takes ten minutes"]
fn more_memory_does_not_make_any_job_slower() {
    let (mut plans, mut all) = (0, Vec::new());
    for direction in [Direction::Encode, Direction::Decode] {
        for tiles in [None, Some(256), Some(512)] {
            for [height, width] in [[480, 832], [720, 1280], [1080, 1920]] {
                for frames in [0, 5, 21, 81] {
                    let job = Job { direction, shape: [frames, height, width], tiles };
                    let slower = job.slower(limits(0.7, 1.09, 24));
                    plans += 24;
                    slower.iter().for_each(|(limit, seconds, fastest)| {
                        println!("{:.3} {job:?} {limit}: {seconds:.3} s, {fastest:.3} s", seconds / fastest);
                    });
                    all.extend(slower);
                }
            }
        }
    }
    assert!(all.is_empty(), "{} of {plans} plans are slower than those of smaller limits", all.len());
}
