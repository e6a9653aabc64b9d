//! After all handles are freed, no thread, file mapping or memory is left in the process.
//! One test only, so that nothing else runs in the process.

// Elsewhere the C library does not tell how many bytes are allocated.
#![cfg(all(target_os = "linux", target_env = "gnu"))]

mod common;

use common::process::{allocated_bytes, settled_threads, threads_at_rest};
use common::{Buffer, Vae, library_path, run_info, small, tiny};
use video_vae::capi::*;

fn mappings_of(name: &str) -> usize {
    std::fs::read_to_string("/proc/self/maps").unwrap().lines().filter(|line| line.contains(name)).count()
}

unsafe extern "C" fn stop(_: *mut std::ffi::c_void, _: u64, _: u64, stage: *const std::ffi::c_char) -> i32 {
    // SAFETY: a stage is a C string.
    i32::from(unsafe { std::ffi::CStr::from_ptr(stage) } == c"decode")
}

fn one_round(round: usize) {
    assert!(Vae::open(&small().with_file_name("absent.safetensors")).is_err(), "a missing file is refused");
    let vae = Vae::open(&small()).unwrap();
    assert_eq!(mappings_of("small.safetensors"), 0, "the file is never mapped");
    vae.configure("threads", "3").unwrap();
    let latent = Buffer::new(VVAE_DTYPE_F32, [1, 16, 2, 3, 3]);
    let mut video = Buffer::new(VVAE_DTYPE_F32, [1, 3, 5, 24, 24]);
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

/// Opens the library, as a host does that loads plugins, and closes it.
fn load_and_unload() {
    type Version = unsafe extern "C" fn() -> u32;
    // SAFETY: the library under test, and the signature of its header.
    unsafe {
        let library = libloading::Library::new(library_path()).unwrap();
        assert_eq!(library.get::<Version>("vvae_abi_version").unwrap()(), VVAE_ABI_VERSION);
        library.close().unwrap();
    }
}

/// Asserts that rounds leave no byte, thread or mapping, after a few to warm up.
fn leaves_nothing(what: &str, rounds: usize, round: impl Fn(usize)) {
    // A multiple of 6, so that both counts are taken after the same kind of round.
    const WARM_UP: usize = 12;
    // What glibc counts blocks in.
    const SMALLEST_BLOCK: usize = 16;
    let before = threads_at_rest();
    (0..WARM_UP).for_each(&round);
    let settled = allocated_bytes();
    (0..rounds).for_each(&round);
    let left = allocated_bytes() as i64 - settled as i64;
    println!("{rounds} rounds of {what}: {left} bytes left");
    // A leak in every sixth round, of the smallest block. The C library may round one block up by as much.
    let leak = (rounds / 6 * SMALLEST_BLOCK) as i64;
    assert!(left.abs() < leak, "{left} bytes are left after {rounds} rounds of {what}");
    assert_eq!(settled_threads(before), before, "all threads were joined");
    assert_eq!(mappings_of("small.safetensors"), 0);
}

#[test]
fn process_has_no_leaks() {
    // Without the caches of freed blocks that each thread has, the count is exact.
    const EXACT: (&str, &str) = ("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0");
    if std::env::var(EXACT.0).as_deref() != Ok(EXACT.1) {
        let test = std::env::current_exe().unwrap();
        let status = std::process::Command::new(test).arg("--nocapture").env(EXACT.0, EXACT.1).status().unwrap();
        assert!(status.success());
        return;
    }
    leaves_nothing("runs", 204, one_round);
    leaves_nothing("create and free", 1000, |_| assert_eq!(Vae::open(tiny()).unwrap().free(), VVAE_OK));
    leaves_nothing("loading and unloading the library", 1000, |_| load_and_unload());
}
