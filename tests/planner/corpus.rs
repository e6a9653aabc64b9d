//! The planner corpus: the plans of many jobs on one GPU profile, compared with a committed table.
//!
//! It shows what a change to the planner costs or gains in bytes and estimated time. Needs no GPU: sizes follow from
//! shapes, and the rates are fixed. `VVAE_UPDATE_CORPUS=1` writes the table.

#![cfg(feature = "cuda")]

use std::fmt::Write;
use std::path::Path;
use std::sync::Arc;

use crate::common::planner::{self, H200, published};
use video_vae::internals::backend::Precision;
use video_vae::internals::backend::cuda::{CudaSizes, KernelArch, device_profile};
use video_vae::internals::ir::{DeviceProfile, Rates};
use video_vae::internals::model::families::FAMILIES;
use video_vae::internals::model::{Direction, Model, Network};
use video_vae::internals::plan::{Form, LayerPolicy, Memory, Placement, Plan, Target, search};

/// Height, width, and (frames, limit in GiB) of each job. 0 frames are a stream; a limit of 0 is the whole device.
type SizedJobs = (u64, u64, &'static [(u64, f64)]);
const JOBS: [SizedJobs; 6] = [
    (256, 256, &[(1, 0.0), (21, 0.0), (201, 0.75)]),
    (512, 512, &[(1, 0.0), (5, 0.0), (81, 0.0), (81, 1.25), (81, 0.9)]),
    (720, 1280, &[(1, 0.0), (21, 0.0), (21, 2.7), (81, 4.0), (201, 3.0), (201, 2.0)]),
    (
        1080,
        1920,
        &[
            (1, 0.0),
            (1, 1.5),
            (21, 0.0),
            (21, 5.5),
            (81, 10.0),
            (81, 8.0),
            (81, 6.0),
            (81, 5.0),
            (81, 4.0),
            (201, 6.0),
            (0, 0.0),
            (0, 6.0),
        ],
    ),
    (2160, 3840, &[(1, 0.0), (1, 4.0), (21, 0.0), (21, 24.0), (21, 16.0), (21, 6.0)]),
    (4320, 7680, &[(1, 0.0), (1, 16.0)]),
];

fn describe(plan: &Plan, target: &Target) -> String {
    let (report, schedule) = (plan.report(), plan.schedule(target));
    let cache = |own: &LayerPolicy| match (own.form, own.cache) {
        (Form::Whole, _) => "R".to_string(),
        (Form::Banded, Placement::Recomputed) => "C".to_string(),
        (Form::Banded, Placement::Columns { resident_shares }) => format!("O{resident_shares}"),
    };
    let policy = &schedule.spec().policy;
    let caches: Vec<String> = policy.layers.iter().map(cache).collect();
    let count = |is: fn(&LayerPolicy) -> bool| policy.layers.iter().filter(|own| is(own)).count();
    let materialised = |rematerialised: &[u64]| -> Vec<u64> {
        policy.chunks.iter().zip(rematerialised).map(|(chunk, rematerialised)| chunk - rematerialised).collect()
    };
    format!(
        "device {} host {} seconds {:.6} moved {} tiles {}x{} slice {} chunks {:?} materialised {:?} materialised_hidden {:?} \
         caches {} outputs {} weights {}",
        report.device_bytes,
        report.host_bytes,
        plan.estimate.seconds,
        report.moved_per_frame,
        report.tiles.0,
        report.tiles.1,
        policy.slice,
        policy.chunks,
        materialised(&report.rematerialised_frames),
        materialised(&report.rematerialised_hidden),
        caches.join(","),
        count(|own| own.output == Memory::Host),
        count(|own| own.weights == Memory::Host),
    )
}

/// Jobs of a model of another family.
struct ModelJobs {
    /// The name of the published model.
    name: &'static str,
    /// Frames, height and width; limit in GiB.
    jobs: &'static [([u64; 3], f64)],
}

const OTHERS: [ModelJobs; 4] = [
    ModelJobs {
        name: "wan21",
        jobs: &[
            ([81, 480, 832], 0.0),
            ([81, 480, 832], 2.0),
            ([81, 720, 1280], 0.0),
            ([81, 720, 1280], 3.0),
            ([81, 1080, 1920], 6.0),
            ([0, 720, 1280], 4.0),
        ],
    },
    ModelJobs { name: "qwen-image", jobs: &[([1, 1328, 1328], 0.0), ([1, 2560, 1440], 2.0)] },
    ModelJobs {
        name: "wan22",
        jobs: &[
            ([121, 704, 1280], 0.0),
            ([121, 704, 1280], 6.0),
            ([121, 704, 1280], 4.0),
            ([0, 704, 1280], 6.0),
            ([1, 704, 1280], 0.0),
        ],
    },
    ModelJobs {
        name: "qwen-image-2.1",
        jobs: &[([1, 2048, 2048], 0.0), ([1, 2048, 2048], 8.0), ([1, 1024, 1024], 2.0)],
    },
];

/// The plan of a job, in a line.
fn line(network: &Arc<Network>, clip: [u64; 3], limit: f64, target: &Target) -> String {
    let request = planner::limited(network, clip, limit);
    let answer = match search(&request, target) {
        Err(none) => format!("{none:?}"),
        Ok(plan) => {
            assert!(plan.fits(request.limit, request.host_limit), "{}", plan.report());
            describe(&plan, target)
        }
    };
    let [frames, height, width] = clip;
    format!("{} {frames}x{height}x{width} {limit} | {answer}", network.direction.name())
}

fn corpus() -> String {
    let config = published();
    let sizes = CudaSizes::new(Precision::Fp16, KernelArch::HOPPER);
    let mut table = String::new();
    let network = |model: &Model, direction, profile: DeviceProfile| {
        Arc::new(Network::new(model, direction).unwrap().for_device(profile.paired_layers()))
    };
    // Also with products 1.5 times as fast: copies then hide less.
    for faster in [1.0, 1.5] {
        let profile =
            device_profile(Rates { products: H200.products * faster, ..H200 }, Precision::Fp16, KernelArch::HOPPER);
        let target = Target::new(profile, &sizes, config.groups);
        for direction in [Direction::Encode, Direction::Decode] {
            let network = network(&config.model(), direction, profile);
            for (height, width, jobs) in JOBS {
                for (frames, limit) in jobs {
                    writeln!(table, "{faster} {}", line(&network, [*frames, height, width], *limit, &target)).unwrap();
                }
            }
        }
    }
    let profile = device_profile(H200, Precision::Fp16, KernelArch::HOPPER);
    let published = FAMILIES.iter().flat_map(|family| family.published);
    let known = |name| OTHERS.iter().find(|others| others.name == name);
    for (model, others) in published.filter_map(|model| Some((model, known(model.name)?))) {
        for direction in [Direction::Encode, Direction::Decode] {
            let network = network(&(model.model)(), direction, profile);
            let target = Target::new(profile, &sizes, network.norm.groups());
            for (clip, limit) in others.jobs {
                writeln!(table, "{} {}", others.name, line(&network, *clip, *limit, &target)).unwrap();
            }
        }
    }
    table
}

/// What issues of other implementations name: clips that these fit no card of.
#[test]
fn large_clips_of_other_families_are_exact_within_their_limits() {
    let table =
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/planner_corpus.txt"));
    let table = table.unwrap();
    for job in [
        "wan21 decode 81x480x832 0",
        "wan21 decode 81x720x1280 3",
        "wan21 decode 81x1080x1920 6",
        "wan22 encode 121x704x1280 6",
        "wan22 decode 121x704x1280 6",
        "qwen-image-2.1 encode 1x2048x2048 8",
        "qwen-image-2.1 decode 1x2048x2048 8",
    ] {
        let line = table.lines().find(|line| line.starts_with(&format!("{job} |"))).expect(job);
        assert!(line.contains(" tiles 1x1 "), "{line}");
    }
}

#[test]
fn planner_corpus_is_current() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/planner_corpus.txt");
    let found = corpus();
    if std::env::var_os("VVAE_UPDATE_CORPUS").is_some() {
        std::fs::write(&path, found).unwrap();
        return;
    }
    let expected = std::fs::read_to_string(&path).unwrap();
    let differ = expected.lines().zip(found.lines()).filter(|(expected, found)| expected != found);
    let differ: Vec<String> = differ.map(|(expected, found)| format!("- {expected}\n+ {found}\n")).collect();
    assert!(
        expected == found,
        "{} plans differ; if that is meant, list the changes and run VVAE_UPDATE_CORPUS=1 cargo test --release --test \
         planner corpus::\n{}",
        differ.len(),
        differ.concat()
    );
}
