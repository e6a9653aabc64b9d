//! Whole sessions on a GPU in host memory, whose queues run in random order. Within every limit the bits are those of
//! a run with all memory, and a wait that is left out changes them.

use super::*;
use crate::backend::gpu::tests::host::{HostGpu, WaitSite};
use crate::exec::{Allocators, Limit};
use crate::ir::{DType, View};
use crate::node;
use crate::testing::golden;

/// One direction of a model, and the shapes of its tensors. High enough for several bands.
#[derive(Clone, Copy)]
struct Case {
    direction: Direction,
    input: [u64; 5],
    output: [u64; 5],
    cache: CacheFormat,
    host_limit: u64,
}

const CLIP: [[u64; 5]; 2] = [[1, 3, 9, 80, 24], [1, 16, 3, 10, 3]];
const STILL: [[u64; 5]; 2] = [[1, 3, 1, 144, 40], [1, 16, 1, 18, 5]];

const fn decode([output, input]: [[u64; 5]; 2], cache: CacheFormat) -> Case {
    Case { direction: Direction::Decode, input, output, cache, host_limit: 1 << 30 }
}

const fn encode([input, output]: [[u64; 5]; 2], cache: CacheFormat) -> Case {
    Case { direction: Direction::Encode, input, output, cache, host_limit: 1 << 30 }
}

/// What a run gave, and where it waited.
struct Ran {
    bits: Vec<u32>,
    bytes: u64,
    text: String,
    sites: Vec<WaitSite>,
}

/// `limit`: of device memory; `None` for all of it.
fn run(case: &Case, limit: Option<u64>, seed: u64, dropped: Option<WaitSite>) -> Result<Ran> {
    let mut settings = node::defaults();
    settings.memory_limit = vec![limit.map_or(Limit::Auto, Limit::Bytes)];
    settings.host_memory_limit = Limit::Bytes(case.host_limit);
    settings.cache = case.cache;
    settings.allow_tiles = false;
    let place = TensorDevice::Cuda(0);
    let make = Box::new(move |_: &Settings| HostGpu::new(seed, dropped));
    let checkpoint = Checkpoint::open(&golden("small"))?;
    let mut engine = Engine::open(place, &checkpoint, Allocators::default(), settings, make)?;
    let count = |shape: [u64; 5]| shape.iter().product::<u64>() as usize;
    let mut input: Vec<f32> = (0..count(case.input)).map(|i| (i * 37 % 101) as f32 / 50.0 - 1.0).collect();
    let mut output = vec![0.0_f32; count(case.output)];
    let view = |data: &mut [f32], shape: [u64; 5]| {
        let data = data.as_mut_ptr().cast();
        View::checked("t", data, DType::F32, TensorDevice::Cpu, shape.into(), None, true).unwrap()
    };
    let (from, into) = (view(&mut input, case.input), view(&mut output, case.output));
    let (direction, cancel) = (case.direction, AtomicBool::new(false));
    let call = Call { direction, range: None, input: &from, output: &into, logvar: None, stream: None, first_clip: 0 };
    let report = engine.run(&call, &mut Control::new(&cancel))?;
    let bits = output.iter().map(|value| value.to_bits()).collect();
    Ok(Ran { bits, bytes: report.device_bytes, text: report.to_string(), sites: engine.backend.wait_sites() })
}

const CASES: [Case; 4] = [
    decode(CLIP, CacheFormat::Exact),
    encode(CLIP, CacheFormat::Exact),
    decode(STILL, CacheFormat::Exact),
    decode(CLIP, CacheFormat::U8),
];

/// The run with all memory, and runs within less and less, down to the least.
fn within_limits(case: &Case, seed: u64, dropped: Option<WaitSite>) -> (Ran, Vec<Ran>) {
    let whole = run(case, None, 1, None).unwrap();
    let limits = [75, 60, 42, 30, 25].map(|percent| whole.bytes * percent / 100);
    let runs = limits.iter().filter_map(|limit| match run(case, Some(*limit), seed, dropped) {
        Ok(found) => Some(found),
        Err(Error::Memory(_)) => None,
        Err(why) => panic!("{why}"),
    });
    let runs = runs.collect();
    (whole, runs)
}

#[test]
fn every_limit_gives_the_bits_of_a_run_with_all_memory() {
    let mut texts = String::new();
    for (seed, case) in (2..).zip(&CASES) {
        let (whole, runs) = within_limits(case, seed, None);
        assert!(whole.bits.iter().all(|bits| f32::from_bits(*bits).is_finite()));
        assert!(!runs.is_empty(), "no limit of {:?}", case.direction);
        for found in runs {
            assert!(found.bits == whole.bits, "{:?}: {}", case.direction, found.text);
            texts += &found.text;
        }
    }
    for used in ["offloaded frames", "offloaded weights"] {
        assert!(texts.contains(used), "{used} in {texts}");
    }
}

/// Bands and staging have a test of their own in `backend/gpu`.
#[test]
fn a_wait_for_weights_that_is_left_out_changes_bits() {
    let case = &CASES[1];
    let right = run(case, None, 1, None).unwrap();
    let limit = Some(right.bytes * 42 / 100);
    let mut sites: Vec<WaitSite> = run(case, limit, 1, None).unwrap().sites;
    sites.retain(|site| site.0.ends_with("staging.rs"));
    let own: Vec<WaitSite> = run(&CASES[1], None, 1, None).unwrap().sites;
    sites.retain(|site| !own.contains(site));
    assert_eq!(sites.len(), 2, "before weights are fetched, and before they are used: {sites:?}");
    for site in sites {
        let shows = |seed: u64| run(case, limit, seed, Some(site)).unwrap().bits != right.bits;
        assert!((2..12).any(shows), "{site:?}");
    }
}

#[test]
fn a_limit_of_host_memory_that_no_plan_keeps_is_named() {
    let refused = run(&Case { host_limit: 0, ..CASES[0] }, None, 1, None).err().unwrap().to_string();
    assert!(refused.contains("needs more host memory than host_memory_limit allows"), "{refused}");
}
