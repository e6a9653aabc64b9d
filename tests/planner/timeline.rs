//! The timeline of a plan: what `vvae_plan_timeline` tells, and the pictures of it in the docs.
//!
//! The pictures need no GPU: sizes follow from shapes, and the rates are fixed. `VVAE_UPDATE_PICTURES=1` writes them.

use std::time::{Duration, Instant};

use crate::common::{Vae, api, create_info, outcome, small};
use serde_json::Value;
use video_vae::capi::*;

fn number(of: &Value, key: &str) -> u64 {
    of[key].as_u64().unwrap_or_else(|| panic!("{key} of {of}"))
}

fn list<'a>(of: &'a Value, key: &str) -> &'a [Value] {
    of[key].as_array().unwrap_or_else(|| panic!("no {key}"))
}

/// No two things are in the same bytes at the same time, and all lie within what the plan says.
fn check(timeline: &Value) {
    let steps = list(timeline, "steps").len() as u64;
    for (memory, most) in [("device", number(timeline, "device_bytes")), ("host", number(timeline, "host_bytes"))] {
        let of = |key: &'static str| list(timeline, key).iter().filter(move |of| of["memory"] == memory);
        let fixed = of("fixed").map(|of| (number(of, "offset"), number(of, "bytes"), 0, steps));
        let slots = of("slots").map(|of| {
            let (first, last) = (number(of, "first"), number(of, "last"));
            assert!(first <= last && last < steps, "{of}");
            (number(of, "offset"), number(of, "bytes"), first, last + 1)
        });
        let mut all: Vec<_> = fixed.chain(slots).collect();
        all.sort_by_key(|(offset, ..)| *offset);
        for (i, (offset, bytes, first, end)) in all.iter().enumerate() {
            assert!(offset + bytes <= most, "{memory}: {bytes} bytes at {offset} of {most}");
            for (other, _, from, to) in all[i + 1..].iter().take_while(|(other, ..)| *other < offset + bytes) {
                assert!(to <= first || end <= from, "{memory}: {offset} and {other}, {first}..{end} and {from}..{to}");
            }
        }
    }
    let mut now = 0.0;
    for step in list(timeline, "steps") {
        assert!((step["start"].as_f64().unwrap() - now).abs() < 1e-9, "{step} begins at {now}");
        assert!(step["waited"].as_f64().unwrap() <= step["seconds"].as_f64().unwrap());
        now += step["seconds"].as_f64().unwrap();
    }
    assert!((timeline["seconds_shown"].as_f64().unwrap() - now).abs() < 1e-9);
}

#[test]
fn a_timeline_is_that_of_the_plan() {
    let vae = Vae::open(&small()).unwrap();
    for (node, shape, frames) in [("decode", [1, 16, 3, 10, 11], 9), ("encode", [1, 3, 17, 80, 88], 5)] {
        let (plan, words) = vae.plan(node, shape).unwrap();
        let timeline = vae.timeline(node, shape).unwrap();
        let [device] = list(&timeline, "devices") else { panic!("one device") };
        check(device);
        assert_eq!((&device["node"], &device["device"], &device["text"]), (&node.into(), &"cpu".into(), &words.into()));
        assert_eq!((number(device, "device_bytes"), number(device, "frames_shown")), (plan.device_bytes, frames));
        assert_eq!(device["complete"], true);
        let shown = device["seconds_shown"].as_f64().unwrap();
        assert!((shown / plan.seconds - 1.0).abs() < 0.05, "{shown} s shown, {} s planned", plan.seconds);
        let contents: Vec<_> = list(device, "slots").iter().map(|slot| slot["content"].as_str().unwrap()).collect();
        assert!(contents.contains(&"activations") && contents.contains(&"causal cache"), "{contents:?}");
    }
}

#[test]
fn long_jobs_are_cut_short() {
    let vae = Vae::open(&small()).unwrap();
    vae.configure("decode_tile_size", "256").unwrap();
    let long = [1, 16, 1 << 20, 32, 32];
    let tiled = [1, 16, 3, 100, 100];
    for shape in [long, [1, 16, 0, 32, 32], [4096, 16, 100, 8, 8], tiled] {
        let started = Instant::now();
        vae.configure("decode_tiled", if shape == tiled { "true" } else { "false" }).unwrap();
        let timeline = vae.timeline("decode", shape).unwrap();
        let device = &timeline["devices"][0];
        check(device);
        assert_eq!(device["exact"], shape != tiled);
        assert!(list(device, "steps").len() < 20_000 && list(device, "slots").len() < 50_000, "{shape:?}");
        assert!(started.elapsed() < Duration::from_secs(60), "{shape:?} took {:?}", started.elapsed());
    }
}

#[test]
fn every_device_with_a_part_has_a_timeline() {
    let weights = std::ffi::CString::new(small().to_str().unwrap()).unwrap();
    let vae = Vae::create(&vvae_create_info { device: c"cpu,cpu".as_ptr(), ..create_info(&weights) }).unwrap();
    for shape in [[2, 16, 9, 10, 11], [1, 16, 0, 10, 11]] {
        let timeline = vae.timeline("decode", shape).unwrap();
        assert_eq!(list(&timeline, "devices").len(), 2);
        list(&timeline, "devices").iter().for_each(check);
    }
}

#[test]
fn misuse_is_refused() {
    let vae = Vae::open(&small()).unwrap();
    let ask = |node: *const _, shape: *const i64, length: *mut u64, text: &mut [u8]| {
        let (out, capacity) = (text.as_mut_ptr().cast(), text.len() as u64);
        // SAFETY: pointers are null or valid, and the buffer has its capacity.
        outcome(vae.0, unsafe { (api().vvae_plan_timeline)(vae.0, node, shape, out, capacity, length) })
    };
    let (shape, mut length, mut text) = ([1i64, 16, 2, 10, 11], 0, [7; 16]);
    let null = std::ptr::null_mut();
    let decode = c"decode".as_ptr();
    ask(null, shape.as_ptr(), &mut length, &mut text).unwrap_err().says(VVAE_ERROR_ARGUMENT, &["node is null"]);
    ask(decode, null.cast(), &mut length, &mut text).unwrap_err().says(VVAE_ERROR_ARGUMENT, &["shape is null"]);
    ask(decode, shape.as_ptr(), null.cast(), &mut text).unwrap_err().says(VVAE_ERROR_ARGUMENT, &["length is null"]);
    vae.timeline("decode", [1, 3, 2, 10, 11]).unwrap_err().says(VVAE_ERROR_TENSOR, &["C is 3"]);
    // Cut to the buffer, with a NUL.
    ask(decode, shape.as_ptr(), &mut length, &mut text).unwrap();
    assert!(length > 1000 && text.starts_with(b"{\"devices\"") && text[15] == 0);
}

#[cfg(feature = "cuda")]
mod pictures {
    use std::path::Path;
    use std::sync::Arc;

    use serde_json::{Value, json};
    use video_vae::internals::backend::Precision;
    use video_vae::internals::backend::cuda::{CudaSizes, KernelArch, device_profile};
    use video_vae::internals::ir::Shape;
    use video_vae::internals::model::{Direction, Network};
    use video_vae::internals::plan::{Request, Target, search};
    use video_vae::internals::report::{PlanLimits, timeline};
    use vvae::picture;

    use super::check;
    use crate::common::planner::{DEVICE_BYTES, H200, HOST_BYTES, published, request};

    /// The timeline of a job on an H200, as `vvae_plan_timeline` tells it.
    fn shown(direction: Direction, input: Shape, limit: u64) -> Value {
        let config = published();
        let profile = device_profile(H200, Precision::Fp16, KernelArch::HOPPER);
        let network = Arc::new(Network::new(&config.model(), direction).unwrap().for_device(profile.paired_layers()));
        let sizes = CudaSizes::new(Precision::Fp16, KernelArch::HOPPER);
        let target = Target::new(profile, &sizes, config.groups);
        let request = Request { limit, ..request(&network, input) };
        let plan = search(&request, &target).unwrap_or_else(|why| panic!("{why:?}"));
        let timeline =
            timeline(&plan, &plan.report(), "NVIDIA H200", PlanLimits { device: limit, host: HOST_BYTES }, &target)
                .unwrap();
        check(&timeline);
        json!({ "devices": [timeline] })
    }

    #[test]
    fn plan_pictures_are_current() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/pictures");
        for (name, limit) in [("plan-no-limit.svg", DEVICE_BYTES), ("plan-6gib.svg", 6 << 30)] {
            let found = picture::plan(&shown(Direction::Decode, Shape::new(1, 16, 21, 135, 240), limit)).unwrap();
            if std::env::var_os("VVAE_UPDATE_PICTURES").is_some() {
                std::fs::create_dir_all(&folder).unwrap();
                std::fs::write(folder.join(name), found).unwrap();
                continue;
            }
            let expected = std::fs::read_to_string(folder.join(name)).unwrap();
            assert!(
                expected == found,
                "docs/pictures/{name} is not what is planned; if that is meant, run VVAE_UPDATE_PICTURES=1 cargo test \
                 --release --test planner timeline::, and look at it"
            );
        }
    }

    #[test]
    fn offloaded_and_tiled_plans_have_timelines() {
        for (direction, input, limit) in [
            (Direction::Encode, Shape::new(1, 3, 81, 1080, 1920), 5 << 30),
            (Direction::Decode, Shape::new(1, 16, 1, 270, 480), 4 << 30),
            (Direction::Decode, Shape::new(1, 16, 0, 135, 240), 6 << 30),
            (Direction::Decode, Shape::new(2, 16, 6, 270, 480), 6 << 30),
        ] {
            let svg = picture::plan(&shown(direction, input, limit)).unwrap();
            assert!(svg.contains("limit") && svg.contains("host memory"), "{input}");
        }
    }
}
