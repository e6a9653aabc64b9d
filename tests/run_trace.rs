//! The key `trace`: a file with the times of every operation, in the Chrome trace event format.

mod common;

use std::collections::HashMap;
use std::ffi::{c_char, c_void};
use std::path::Path;
use std::time::Instant;

use common::safetensors::Folder;
use common::{Buffer, Failure, Vae, create_info, run_info, small};
use serde_json::Value;
use video_vae::capi::*;

const LATENT: [i64; 5] = [1, 16, 3, 10, 11];
const VIDEO: [i64; 5] = [1, 3, 9, 80, 88];

/// The operations of a trace by their lane, in the order of the file.
fn lanes(path: &Path) -> HashMap<(u64, u64), Vec<Value>> {
    let text = std::fs::read_to_string(path).unwrap();
    let trace: Value = serde_json::from_str(&text).unwrap_or_else(|why| panic!("{why}: {text}"));
    let events = trace["traceEvents"].as_array().unwrap();
    let mut lanes: HashMap<(u64, u64), Vec<Value>> = HashMap::new();
    let mut named = Vec::new();
    for event in events {
        let lane = (event["pid"].as_u64().unwrap(), event["tid"].as_u64().unwrap());
        match event["ph"].as_str() {
            Some("M") => named.push((lane, event["name"].as_str().unwrap().to_owned())),
            Some("X") => lanes.entry(lane).or_default().push(event.clone()),
            other => panic!("{other:?}"),
        }
    }
    for lane in lanes.keys() {
        for what in ["process_name", "thread_name"] {
            assert!(named.contains(&(*lane, what.to_owned())), "lane {lane:?} has no {what}");
        }
    }
    lanes
}

/// Checks that operations of a lane do not overlap. Returns their names, and their seconds in all.
fn names(events: &[Value]) -> (Vec<&str>, f64) {
    let mut free = 0.0;
    let mut seconds = 0.0;
    for event in events {
        let (ts, dur) = (event["ts"].as_f64().unwrap(), event["dur"].as_f64().unwrap());
        assert!(ts >= free && dur >= 0.0, "{event} begins before {free}");
        // Numbers have a tenth of a microsecond.
        free = ts + dur - 0.01;
        seconds += dur / 1e6;
    }
    (events.iter().map(|event| event["name"].as_str().unwrap()).collect(), seconds)
}

/// The steps of a plan by their names.
fn planned(vae: &Vae, node: &str, shape: [i64; 5]) -> Vec<String> {
    let timeline = vae.timeline(node, shape).unwrap();
    assert_eq!(timeline["devices"][0]["complete"], true);
    let steps = timeline["devices"][0]["steps"].as_array().unwrap();
    steps.iter().map(|step| step["name"].as_str().unwrap().to_owned()).collect()
}

fn decode(vae: &Vae) -> Result<i32, Failure> {
    vae.decode(&Buffer::new(VVAE_DTYPE_F32, LATENT), &mut Buffer::new(VVAE_DTYPE_F32, VIDEO))
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn a_trace_has_the_operations_of_the_plan() {
    let folder = Folder::new("trace");
    let vae = Vae::open(&small()).unwrap();
    let path = folder.0.join("trace.json");
    let steps = [planned(&vae, "decode", LATENT), planned(&vae, "encode", VIDEO)].concat();
    decode(&vae).unwrap();
    assert_eq!(std::fs::read_dir(&folder.0).unwrap().count(), 0, "off unless asked for");

    vae.configure("trace", text(&path)).unwrap();
    let started = Instant::now();
    decode(&vae).unwrap();
    vae.encode(&Buffer::new(VVAE_DTYPE_F32, VIDEO), &mut Buffer::new(VVAE_DTYPE_F32, LATENT)).unwrap();
    let wall = started.elapsed().as_secs_f64();
    assert!(!path.exists(), "a file has its name when it is complete");
    vae.configure("trace", "").unwrap();
    decode(&vae).unwrap();

    let lanes = lanes(&path);
    assert_eq!(lanes.len(), 1);
    let (names, seconds) = names(lanes.values().next().unwrap());
    assert_eq!(names, steps);
    assert!(seconds > 0.02 * wall && seconds <= wall, "{seconds} s of operations in {wall} s");
    assert_eq!(std::fs::read_dir(&folder.0).unwrap().count(), 1, "nothing temporary is left");
}

unsafe extern "C" fn stop_late(calls: *mut c_void, _: u64, _: u64, _: *const c_char) -> i32 {
    // SAFETY: the test's own number.
    let calls = unsafe { &mut *calls.cast::<u32>() };
    *calls += 1;
    i32::from(*calls > 20)
}

#[test]
fn a_cancelled_or_failed_call_leaves_a_valid_trace() {
    let folder = Folder::new("trace-cancel");
    let vae = Vae::open(&small()).unwrap();
    let path = folder.file("trace.json", b"an earlier file");
    let whole = planned(&vae, "decode", LATENT);
    vae.configure("trace", text(&path)).unwrap();
    let mut calls = 0u32;
    let run = vvae_run_info { progress: Some(stop_late), progress_user: (&raw mut calls).cast(), ..run_info() };
    let (latent, mut video) = (Buffer::new(VVAE_DTYPE_F32, LATENT), Buffer::new(VVAE_DTYPE_F32, VIDEO));
    vae.decode_with(&latent, &mut video, &run).unwrap_err().says(VVAE_ERROR_CANCELLED, &[]);
    vae.decode(&latent, &mut Buffer::new(VVAE_DTYPE_F32, LATENT)).unwrap_err();
    // Freeing completes it too.
    assert_eq!(vae.free(), VVAE_OK);
    let lanes = lanes(&path);
    let (names, _) = names(lanes.values().next().unwrap());
    assert!(names.len() > 5 && names.len() < whole.len());
    assert_eq!(names, whole[..names.len()]);
}

#[test]
fn streams_and_several_devices_have_their_lanes() {
    let folder = Folder::new("trace-stream");
    let weights = std::ffi::CString::new(small().to_str().unwrap()).unwrap();
    let one = Vae::open(&small()).unwrap();
    let two = Vae::create(&vvae_create_info { device: c"cpu,cpu".as_ptr(), ..create_info(&weights) }).unwrap();
    for (vae, name, devices) in [(one, "one.json", 1), (two, "two.json", 2)] {
        let path = folder.0.join(name);
        vae.configure("trace", text(&path)).unwrap();
        let stream = vae.stream("decode", LATENT).unwrap();
        let (frames, room) = (Buffer::new(VVAE_DTYPE_F32, LATENT), Buffer::new(VVAE_DTYPE_F32, VIDEO));
        stream.push(Some(&frames.tensor())).unwrap();
        stream.push(None).unwrap();
        while stream.pull(&room.tensor(), None).unwrap().0 == VVAE_OK {}
        drop(stream);
        vae.encode(
            &Buffer::new(VVAE_DTYPE_F32, [2, 3, 9, 80, 88]),
            &mut Buffer::new(VVAE_DTYPE_F32, [2, 16, 3, 10, 11]),
        )
        .unwrap();
        vae.configure("trace", "").unwrap();
        let lanes = lanes(&path);
        assert_eq!(lanes.len(), devices, "{name}");
        for events in lanes.values() {
            let (names, _) = names(events);
            assert!(names.contains(&"load") && names.contains(&"store"), "{names:?}");
        }
    }
}

#[test]
fn a_trace_replaces_regular_files_only() {
    let folder = Folder::new("trace-refused");
    let vae = Vae::open(&small()).unwrap();
    let refused = |path: &Path, why: &str| {
        vae.configure("trace", text(path)).unwrap_err().says(VVAE_ERROR_CHECKPOINT, &["trace: ", text(path), why]);
    };
    refused(&folder.0, "not a regular file");
    refused(&folder.0.join("no such folder/trace.json"), "cannot be written");
    #[cfg(unix)]
    refused(Path::new("/dev/null"), "not a regular file");
    // Refused before anything is changed: the handle has no trace.
    decode(&vae).unwrap();
    // Another path ends the first trace.
    let [first, second] = ["first.json", "second.json"].map(|name| folder.0.join(name));
    vae.configure("trace", text(&first)).unwrap();
    vae.configure("trace", text(&second)).unwrap();
    assert!(first.exists() && lanes(&first).is_empty());
    vae.configure("trace", "").unwrap();
    assert!(second.exists());
}
