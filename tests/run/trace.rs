//! The key `trace`: a file with the times of every operation, in the Chrome trace event format.

use std::ffi::{c_char, c_void};
use std::path::Path;
use std::time::Instant;

use crate::common::safetensors::Folder;
use crate::common::trace::{lanes, names, planned};
use crate::common::{Buffer, Failure, Vae, create_info, run_info, small};
use video_vae::capi::*;

const LATENT: [i64; 5] = [1, 16, 3, 10, 11];
const VIDEO: [i64; 5] = [1, 3, 9, 80, 88];

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
    // No CPU computes faster, and none is too busy for this bound.
    let fast = Vae::open(&small()).unwrap();
    fast.configure("rates", "products=1e15,memory=1e15,copies=1e15").unwrap();
    let least: f64 = [("decode", LATENT), ("encode", VIDEO)]
        .map(|(node, shape)| fast.plan(node, shape).unwrap().0.seconds)
        .iter()
        .sum();
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
    let (names, seconds) = names(&lanes[0].events);
    assert_eq!(names, steps);
    assert!(
        least > 0.0 && seconds > least && seconds <= wall,
        "{seconds} s of operations in {wall} s, at least {least} s"
    );
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
    let (names, _) = names(&lanes[0].events);
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
        for lane in &lanes {
            let (names, _) = names(&lane.events);
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
