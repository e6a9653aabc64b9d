//! The host's current context is the same after every call and in every callback.

use std::ffi::{c_char, c_void};

use crate::common::{Buffer, Vae, api, run_info, sized, small};
use crate::driver::Gpu;
use crate::{latent, open, video};
use video_vae::capi::*;

/// Compares the current context in every callback.
struct Watch<'a> {
    gpu: &'a Gpu,
    expected: usize,
    calls: u32,
    strayed: u32,
}

unsafe extern "C" fn watch(user: *mut c_void, _: u64, _: u64, _: *const c_char) -> i32 {
    // SAFETY: `every_entry` passes a `Watch` that outlives the run.
    let watch = unsafe { &mut *user.cast::<Watch>() };
    watch.calls += 1;
    watch.strayed += u32::from(watch.gpu.current() != watch.expected);
    0
}

/// Calls every function, some with bad arguments, and checks the current context after each.
fn every_entry(gpu: &Gpu, expected: usize) {
    let is_unchanged = |call: &str| assert_eq!(gpu.current(), expected, "after {call}");
    // SAFETY: takes nothing.
    let count = unsafe { (api().vvae_device_count)() };
    is_unchanged("vvae_device_count");
    for index in 0..=count {
        // SAFETY: `struct_size` is right.
        unsafe { (api().vvae_device_info)(index, &mut sized::<vvae_device_desc>()) };
        is_unchanged("vvae_device_info");
    }
    assert!(Vae::open_on(c"cuda:99", &small()).is_err());
    is_unchanged("a vvae_create that fails");
    assert!(Vae::open_on(c"cuda:0", &small().with_file_name("absent")).is_err());
    is_unchanged("a vvae_create without a file");
    let vae = open(&small());
    is_unchanged("vvae_create");
    // SAFETY: `struct_size` is right.
    unsafe { (api().vvae_model_info)(vae.0, &mut sized()) };
    is_unchanged("vvae_model_info");
    vae.configure("threads", "2").unwrap();
    is_unchanged("vvae_configure");
    runs(gpu, &vae, expected);
    streams(gpu, &vae, expected);
    vae.memory();
    is_unchanged("vvae_memory");
    vae.cancel().unwrap();
    is_unchanged("vvae_cancel");
    vae.trim(VVAE_TRIM_WORKSPACE).unwrap();
    is_unchanged("vvae_trim of the workspace");
    vae.trim(VVAE_TRIM_WEIGHTS).unwrap();
    is_unchanged("vvae_trim of the weights");
    assert_eq!(vae.free(), VVAE_OK);
    is_unchanged("vvae_free");
}

fn runs(gpu: &Gpu, vae: &Vae, expected: usize) {
    let is_unchanged = |call: &str| assert_eq!(gpu.current(), expected, "after {call}");
    let latent = latent(2, 3, 3);
    vae.plan("decode", latent.shape).unwrap();
    is_unchanged("vvae_plan");
    let mut watching = Watch { gpu, expected, calls: 0, strayed: 0 };
    let info =
        vvae_run_info { progress: Some(watch), progress_user: std::ptr::from_mut(&mut watching).cast(), ..run_info() };
    let mut frames = video(&latent, VVAE_DTYPE_F32);
    vae.decode_with(&latent, &mut frames, &info).unwrap();
    is_unchanged("vvae_decode");
    assert!(watching.calls > 5 && watching.strayed == 0, "{} of {} callbacks", watching.strayed, watching.calls);
    vae.encode(&frames, &mut Buffer::new(VVAE_DTYPE_F32, latent.shape)).unwrap();
    is_unchanged("vvae_encode");
    assert!(vae.decode(&latent, &mut Buffer::new(VVAE_DTYPE_F32, [1, 3, 1, 8, 8])).is_err());
    is_unchanged("a vvae_decode that fails");
    vae.configure("memory_limit", "1MiB").unwrap();
    assert!(vae.decode(&latent, &mut frames).is_err());
    is_unchanged("a vvae_decode without room");
    vae.configure("memory_limit", "auto").unwrap();
}

fn streams(gpu: &Gpu, vae: &Vae, expected: usize) {
    let is_unchanged = |call: &str| assert_eq!(gpu.current(), expected, "after {call}");
    let latent = latent(2, 3, 3);
    let stream = vae.stream("decode", latent.shape).unwrap();
    is_unchanged("vvae_stream_open");
    stream.push(Some(&latent.tensor())).unwrap();
    is_unchanged("vvae_stream_push");
    let room = video(&latent, VVAE_DTYPE_F32);
    stream.pull(&room.tensor(), None).unwrap();
    is_unchanged("vvae_stream_pull");
    drop(stream);
    is_unchanged("vvae_stream_close");
}

#[test]
fn no_current_context_stays_none() {
    let Some(gpu) = Gpu::open() else { return };
    assert_eq!(gpu.current(), 0);
    every_entry(&gpu, 0);
}

#[test]
fn hosts_own_context_stays_current() {
    let Some(gpu) = Gpu::open() else { return };
    gpu.with_own_context(|own| {
        assert!(own != gpu.primary() && gpu.current() == own);
        every_entry(&gpu, own);
    });
    assert_eq!(gpu.current(), 0);
}

#[test]
fn context_stack_is_unchanged() {
    let Some(gpu) = Gpu::open() else { return };
    gpu.with_own_context(|own| {
        gpu.with_primary_context(|primary| every_entry(&gpu, primary));
        assert_eq!(gpu.current(), own);
    });
    assert_eq!(gpu.current(), 0);
}
