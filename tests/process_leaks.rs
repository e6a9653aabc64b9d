//! After all handles are freed, no thread, file mapping or memory is left in the process.
//! One test only, so that nothing else runs in the process.

#![cfg(target_os = "linux")]

mod common;

use common::{Buffer, Vae, run_info, small};
use video_vae::capi::*;

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

fn mappings_of(name: &str) -> usize {
    std::fs::read_to_string("/proc/self/maps").unwrap().lines().filter(|line| line.contains(name)).count()
}

fn resident_bytes() -> i64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split_whitespace().nth(1).unwrap().parse::<i64>().unwrap() * 4096
}

unsafe extern "C" fn stop(_: *mut std::ffi::c_void, _: u64, _: u64, stage: *const std::ffi::c_char) -> i32 {
    // SAFETY: a stage is a C string.
    i32::from(unsafe { std::ffi::CStr::from_ptr(stage) } == c"decode")
}

fn one_round(round: usize) {
    assert!(Vae::open(&small().with_file_name("absent.safetensors")).is_err(), "a missing file is refused");
    let vae = Vae::open(&small()).unwrap();
    assert_eq!(mappings_of("small.safetensors"), 0, "the file is mapped only while it is read");
    vae.configure("threads", "3").unwrap();
    let latent = Buffer::new(VVAE_DTYPE_F32, [1, 16, 3, 6, 6]);
    let mut video = Buffer::new(VVAE_DTYPE_F32, [1, 3, 9, 48, 48]);
    if round.is_multiple_of(2) {
        let run = vvae_run_info { progress: Some(stop), ..run_info() };
        vae.decode_with(&latent, &mut video, &run).unwrap_err().says(VVAE_ERROR_CANCELLED, &[]);
    }
    vae.decode(&latent, &mut video).unwrap();
    let stream = vae.stream("decode", latent.shape).unwrap();
    stream.push(Some(&latent.tensor())).unwrap();
    if round.is_multiple_of(3) {
        // Freeing the handle closes the stream.
        std::mem::forget(stream);
    }
}

#[test]
fn process_has_no_leaks() {
    let before = threads();
    (0..10).for_each(one_round);
    let settled = resident_bytes();
    (0..100).for_each(one_round);
    let grown = resident_bytes() - settled;
    assert_eq!(threads(), before, "all threads were joined");
    assert_eq!(mappings_of("small.safetensors"), 0);
    assert!(grown < 8 << 20, "{grown} bytes more after 100 rounds");
}
