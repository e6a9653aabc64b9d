//! `vvae_last_run`: what a host is told about the run before.

mod common;

use std::ffi::{CStr, c_char, c_void};
use std::process::Command;
use std::time::Instant;

use common::safetensors::Folder;
use common::{Buffer, Failure, Vae, api, on_every_device, outcome, run_info, sized, small};
use video_vae::capi::*;

const LATENT: [i64; 5] = [1, 16, 2, 10, 11];
const VIDEO: [i64; 5] = [1, 3, 5, 80, 88];

fn node(report: &vvae_run_report) -> &str {
    // SAFETY: a text that is valid for ever.
    unsafe { CStr::from_ptr(report.node) }.to_str().unwrap()
}

fn decode(vae: &Vae) -> Result<i32, Failure> {
    vae.decode(&Buffer::new(VVAE_DTYPE_F32, LATENT), &mut Buffer::new(VVAE_DTYPE_F32, VIDEO))
}

unsafe extern "C" fn stop(_: *mut c_void, _: u64, _: u64, _: *const c_char) -> i32 {
    1
}

#[test]
fn the_last_run_is_as_planned() {
    on_every_device(|_| {
        let vae = Vae::open(&small()).unwrap();
        vae.last_run().unwrap_err().says(VVAE_ERROR_STATE, &["no run has finished"]);
        let (plan, words) = vae.plan("decode", LATENT).unwrap();
        vae.last_run().expect_err("a plan is no run");
        let started = Instant::now();
        decode(&vae).unwrap();
        let took = started.elapsed().as_secs_f64();
        let (report, text) = vae.last_run().unwrap();
        assert_eq!((node(&report), text), ("decode", words));
        assert_eq!((report.exact, report.tile_rows, report.tile_columns), (1, 1, 1));
        assert_eq!((report.device_bytes, report.host_bytes), (plan.device_bytes, plan.host_bytes));
        assert_eq!((report.slice_frames, report.estimated_seconds), (plan.slice_frames, plan.seconds));
        assert!(report.seconds > 0.0 && report.seconds <= took, "{} of {took}", report.seconds);
        assert_eq!(report.struct_size, size_of::<vvae_run_report>() as u32);

        // What fails or is cancelled does not count.
        let run = vvae_run_info { progress: Some(stop), ..run_info() };
        let mut latent = Buffer::new(VVAE_DTYPE_F32, LATENT);
        vae.encode_with(&Buffer::new(VVAE_DTYPE_F32, VIDEO), &mut latent, &run).unwrap_err();
        vae.encode(&latent, &mut Buffer::new(VVAE_DTYPE_F32, VIDEO)).unwrap_err();
        assert_eq!(vae.last_run().unwrap().0.seconds, report.seconds);
        vae.encode(&Buffer::new(VVAE_DTYPE_F32, VIDEO), &mut latent).unwrap();
        assert_eq!(node(&vae.last_run().unwrap().0), "encode");
    });
}

#[test]
fn tiles_are_told() {
    on_every_device(|_| {
        let vae = Vae::open(&small()).unwrap();
        for (key, value) in [("decode_tile_size", "64"), ("decode_tile_overlap", "16"), ("decode_tiled", "true")] {
            vae.configure(key, value).unwrap();
        }
        decode(&vae).unwrap();
        let (report, text) = vae.last_run().unwrap();
        assert_eq!((report.exact, report.tile_rows, report.tile_columns), (0, 2, 2), "{text}");
        assert!(text.contains("2 x 2 tiles"), "{text}");
    });
}

#[test]
fn a_stream_tells_about_its_last_pull_that_wrote() {
    let vae = Vae::open(&small()).unwrap();
    let stream = vae.stream("decode", LATENT).unwrap();
    let room = Buffer::new(VVAE_DTYPE_F32, VIDEO);
    assert_eq!(stream.pull(&room.tensor(), None).unwrap(), (VVAE_AGAIN, 0));
    vae.last_run().expect_err("nothing was pulled");
    stream.push(Some(&Buffer::new(VVAE_DTYPE_F32, LATENT).tensor())).unwrap();
    stream.push(None).unwrap();
    assert_eq!(stream.pull(&room.tensor(), None).unwrap(), (VVAE_OK, 5));
    let report = vae.last_run().unwrap().0;
    assert_eq!((node(&report), report.exact, report.estimated_seconds), ("decode", 1, 0.0));
    assert_eq!(stream.pull(&room.tensor(), None).unwrap(), (VVAE_END, 0));
    assert_eq!(vae.last_run().unwrap().0.seconds, report.seconds, "the end is no run");
}

#[test]
fn misuse_is_refused() {
    let vae = Vae::open(&small()).unwrap();
    decode(&vae).unwrap();
    let last_run = |report: *mut vvae_run_report, capacity| {
        // SAFETY: null pointers and sizes that are too small are refused.
        outcome(vae.0, unsafe { (api().vvae_last_run)(vae.0, report, std::ptr::null_mut(), capacity) })
    };
    last_run(std::ptr::null_mut(), 0).unwrap_err().says(VVAE_ERROR_ARGUMENT, &["out is null"]);
    let mut report = vvae_run_report { struct_size: 4, ..sized() };
    last_run(&mut report, 0).unwrap_err().says(VVAE_ERROR_ARGUMENT, &["struct_size is 4"]);
    // An older host's struct is filled as far as it goes.
    report = vvae_run_report { struct_size: 8, seconds: -1.0, ..sized() };
    last_run(&mut report, 99).unwrap();
    assert_eq!((report.exact, report.seconds), (1, -1.0));
    // SAFETY: null is refused.
    let status = unsafe { (api().vvae_last_run)(std::ptr::null_mut(), &mut report, std::ptr::null_mut(), 0) };
    assert_eq!(status, VVAE_ERROR_ARGUMENT);
}

/// The `vvae` command ends with what it is told.
#[test]
fn the_command_tells_of_tiles() {
    let test = std::env::current_exe().unwrap();
    let command =
        test.ancestors().nth(2).unwrap().join("examples/vvae").with_extension(std::env::consts::EXE_EXTENSION);
    let folder = Folder::new("last-run");
    let frames = b"FRAME\n".iter().copied().chain(vec![100; 96 * 80 * 3 / 2]);
    let clip = folder
        .file("clip.y4m", &b"YUV4MPEG2 W96 H80 F25:1 C420jpeg\n".iter().copied().chain(frames).collect::<Vec<_>>());
    let encode = |settings: &[&str]| {
        let mut run = Command::new(&command);
        run.arg("encode").arg(&clip).arg(folder.0.join("latents.safetensors")).args(["-y", "--device", "cpu"]);
        for setting in settings {
            run.args(["--set", setting]);
        }
        let output = run.env("VIDEO_VAE_WEIGHTS", small()).env_remove("VIDEO_VAE_LIBRARY").output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    assert!(!encode(&[]).contains("tiles"));
    let said = encode(&["encode_tile_size=64", "encode_tile_overlap=16", "encode_tiled=true"]);
    assert!(said.contains("in 2 x 2 tiles, which is not exact"), "{said}");
}
