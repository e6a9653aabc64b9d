//! Every misuse gives a status and a text with the fault and the remedy, and leaves the handle working.

mod common;

use std::ffi::{CStr, CString, c_char, c_void};
use std::ptr::{null, null_mut, without_provenance, without_provenance_mut};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use common::{Buffer, Failure, Vae, api, create_info, error_text, outcome, run_info, sized, small};
use video_vae::capi::*;

/// Calls a function of the library and returns its failure.
macro_rules! failure {
    ($v:expr, $function:ident($($arg:expr),* $(,)?)) => {{
        // SAFETY: every pointer of these tests is null or valid.
        let status = unsafe { (api().$function)($($arg),*) };
        outcome($v, status).expect_err(stringify!($function))
    }};
}

const VIDEO: [i64; 5] = [1, 3, 1, 16, 16];
const LATENT: [i64; 5] = [1, 16, 1, 2, 2];

fn video() -> Buffer {
    let mut video = Buffer::new(VVAE_DTYPE_F32, VIDEO);
    video.f32_mut().iter_mut().enumerate().for_each(|(i, x)| *x = (i as f32 * 0.37).sin());
    video
}

fn latent() -> Buffer {
    Buffer::new(VVAE_DTYPE_F32, LATENT)
}

fn weights() -> CString {
    CString::new(small().to_str().unwrap()).unwrap()
}

fn create_fails(change: impl FnOnce(&mut vvae_create_info)) -> Failure {
    let weights = weights();
    let mut info = create_info(&weights);
    change(&mut info);
    Vae::create(&info).err().expect("refused")
}

#[test]
fn create_refuses_bad_arguments() {
    let weights = weights();
    let mut v = null_mut();
    failure!(null_mut(), vvae_create(null(), &mut v)).says(VVAE_ERROR_ARGUMENT, &["info is null", "vvae_create_info"]);
    failure!(null_mut(), vvae_create(&create_info(&weights), null_mut())).says(VVAE_ERROR_ARGUMENT, &["v is null"]);
    create_fails(|i| i.weights = null()).says(VVAE_ERROR_ARGUMENT, &["weights is null"]);
    create_fails(|i| i.weights = c"\xff\xfe".as_ptr()).says(VVAE_ERROR_ARGUMENT, &["weights", "UTF-8"]);
    create_fails(|i| i.weights = c"no-such-file".as_ptr()).says(VVAE_ERROR_CHECKPOINT, &["no-such-file"]);
    create_fails(|i| i.device = c"tpu".as_ptr()).says(VVAE_ERROR_DEVICE, &["\"tpu\"", "cpu", "cuda:0"]);
    create_fails(|i| i.device = c"cuda:77".as_ptr()).says(VVAE_ERROR_DEVICE, &["cuda:77"]);
    unsafe extern "C" fn alloc(_: *mut c_void, _: u64, _: u64) -> *mut c_void {
        null_mut()
    }
    create_fails(|i| i.alloc = Some(alloc)).says(VVAE_ERROR_ARGUMENT, &["alloc and free", "together"]);
    unsafe extern "C" fn device_alloc(_: *mut c_void, _: i32, _: u64) -> *mut c_void {
        null_mut()
    }
    unsafe extern "C" fn device_free(_: *mut c_void, _: i32, _: *mut c_void, _: u64) {}
    create_fails(|i| i.device_alloc = Some(device_alloc))
        .says(VVAE_ERROR_ARGUMENT, &["device_alloc and device_free", "together"]);
    create_fails(|i| i.device_free = Some(device_free))
        .says(VVAE_ERROR_ARGUMENT, &["device_alloc and device_free", "together"]);
    let (device_alloc, device_free) = (Some(device_alloc as _), Some(device_free as _));
    let both = vvae_create_info { device_alloc, device_free, ..create_info(&weights) };
    Vae::create(&both).expect("the CPU ignores them");
}

#[test]
fn create_refuses_another_major_version() {
    create_fails(|i| i.abi_version = 9 << 16 | 4)
        .says(VVAE_ERROR_ARGUMENT, &["ABI 9.4", "ABI 2.1", "VVAE_ABI_VERSION"]);
    create_fails(|i| i.abi_version = 1 << 16 | 6).says(VVAE_ERROR_ARGUMENT, &["ABI 1.6", "ABI 2.1"]);
    create_fails(|i| i.abi_version = 0).says(VVAE_ERROR_ARGUMENT, &["ABI 0.0"]);
    let weights = weights();
    let newer = vvae_create_info { abi_version: VVAE_ABI_VERSION + 1, ..create_info(&weights) };
    Vae::create(&newer).expect("a newer minor version is accepted");
}

#[test]
fn struct_sizes_are_checked() {
    for size in [0, 1, 8, 15, 17, 4104, u32::MAX] {
        let words = [
            format!("struct_size is {size}"),
            format!("sizeof(vvae_create_info), which is {}", size_of::<vvae_create_info>()),
        ];
        create_fails(|i| i.struct_size = size).says(VVAE_ERROR_ARGUMENT, &words.each_ref().map(|w| w.as_str()));
    }
    let weights = weights();
    let mut shorter = create_info(&weights);
    shorter.struct_size = 16;
    // Fields beyond an older host's struct are not read.
    shorter.device = without_provenance(1);
    Vae::create(&shorter).expect("an older struct ends after the weights");

    #[repr(C)]
    struct Longer(vvae_create_info, u64);
    let mut longer = Longer(create_info(&weights), 0);
    longer.0.struct_size = size_of::<Longer>() as u32;
    let mut v = null_mut();
    // SAFETY: `struct_size` is right.
    assert_eq!(unsafe { (api().vvae_create)((&raw const longer).cast(), &mut v) }, VVAE_OK);
    drop(Vae(v));
    longer.1 = 1;
    let failure = failure!(null_mut(), vvae_create((&raw const longer).cast(), &mut v));
    failure.says(VVAE_ERROR_ARGUMENT, &[&format!("byte {}", size_of::<vvae_create_info>()), "newer"]);
    assert!(v.is_null());

    let v = Vae::open(&small()).unwrap();
    let mut memory = sized::<vvae_memory_info>();
    memory.struct_size = 4;
    failure!(v.0, vvae_memory(v.0, &mut memory)).says(VVAE_ERROR_ARGUMENT, &["struct_size is 4", "vvae_memory_info"]);
    let mut plan = sized::<vvae_plan_info>();
    plan.struct_size = 0;
    failure!(v.0, vvae_plan(v.0, c"encode".as_ptr(), VIDEO.as_ptr(), &mut plan, null_mut(), 0))
        .says(VVAE_ERROR_ARGUMENT, &["struct_size is 0", "vvae_plan_info"]);
    plan.struct_size = 16;
    // SAFETY: the struct is longer than `struct_size`.
    unsafe { (api().vvae_plan)(v.0, c"encode".as_ptr(), VIDEO.as_ptr(), &mut plan, null_mut(), 0) };
    assert!(
        plan.struct_size == 16 && plan.device_bytes > 0 && plan.workspace_bytes == 0,
        "only fields inside the struct are written"
    );
}

/// Calls every function that takes a handle, with valid other arguments.
fn all_refuse(v: *mut vvae, status: i32, words: &[&str]) {
    let (video, latent) = (video().tensor(), latent().tensor());
    let (mut s, node) = (null_mut(), c"encode".as_ptr());
    let says = |failure: Failure| failure.says(status, words);
    says(failure!(v, vvae_configure(v, c"seed".as_ptr(), c"1".as_ptr())));
    says(failure!(v, vvae_encode(v, &video, &latent, null())));
    says(failure!(v, vvae_decode(v, &latent, &video, null())));
    says(failure!(v, vvae_plan(v, node, VIDEO.as_ptr(), &mut sized(), null_mut(), 0)));
    says(failure!(v, vvae_stream_open(v, node, VIDEO.as_ptr(), &mut s)));
    says(failure!(v, vvae_stream_open_at(v, node, VIDEO.as_ptr(), 1, &mut s)));
    says(failure!(v, vvae_range_inputs(v, node, 5, 0, 1, &mut 0, &mut 0)));
    says(failure!(v, vvae_encode_range(v, &video, 5, 0, &latent, null())));
    says(failure!(v, vvae_decode_range(v, &latent, 2, 0, &video, null())));
    says(failure!(v, vvae_plan_range(v, node, VIDEO.as_ptr(), 0, 1, &mut sized(), null_mut(), 0)));
    says(failure!(v, vvae_plan_timeline(v, node, VIDEO.as_ptr(), null_mut(), 0, &mut 0)));
    says(failure!(v, vvae_model_info(v, &mut sized())));
    says(failure!(v, vvae_memory(v, &mut sized())));
    says(failure!(v, vvae_handle_device(v, 0, &mut sized())));
    says(failure!(v, vvae_trim(v, VVAE_TRIM_WORKSPACE)));
    says(failure!(v, vvae_cancel(v)));
}

#[test]
fn invalid_handles_are_refused() {
    all_refuse(null_mut(), VVAE_ERROR_ARGUMENT, &["v is null"]);
    for made_up in [1, 24, 0x7fff_ffff_fff0, usize::MAX] {
        all_refuse(without_provenance_mut(made_up), VVAE_ERROR_STATE, &["is not an open handle"]);
    }
    let v = Vae::open(&small()).unwrap();
    let closed = v.0;
    let stream = v.stream("encode", VIDEO).unwrap();
    all_refuse(stream.s.cast(), VVAE_ERROR_STATE, &["is not an open handle"]);
    let s = stream.s;
    std::mem::forget(stream);
    assert_eq!(v.free(), VVAE_OK);
    all_refuse(closed, VVAE_ERROR_STATE, &["is not an open handle", "freed"]);
    failure!(closed, vvae_free(closed)).says(VVAE_ERROR_STATE, &["is not an open handle"]);
    // SAFETY: null is allowed.
    assert_eq!(unsafe { (api().vvae_free)(null_mut()) }, VVAE_OK);

    let (mut count, frames) = (7, video().tensor());
    for s in [s, closed.cast(), without_provenance_mut(48 << 40)] {
        let words = ["is not an open stream"];
        failure!(null_mut(), vvae_stream_push(s, &frames, &mut count)).says(VVAE_ERROR_STATE, &words);
        failure!(null_mut(), vvae_stream_pull(s, &frames, null(), &mut count)).says(VVAE_ERROR_STATE, &words);
        failure!(null_mut(), vvae_stream_close(s)).says(VVAE_ERROR_STATE, &words);
    }
    failure!(null_mut(), vvae_stream_push(null_mut(), null(), &mut count)).says(VVAE_ERROR_ARGUMENT, &["s is null"]);
    // SAFETY: null is allowed.
    assert_eq!(unsafe { (api().vvae_stream_close)(null_mut()) }, VVAE_OK);
}

#[test]
fn invalid_settings_are_refused() {
    let v = Vae::open(&small()).unwrap();
    failure!(v.0, vvae_configure(v.0, null(), c"1".as_ptr())).says(VVAE_ERROR_ARGUMENT, &["key is null"]);
    failure!(v.0, vvae_configure(v.0, c"seed".as_ptr(), null())).says(VVAE_ERROR_ARGUMENT, &["value is null"]);
    failure!(v.0, vvae_configure(v.0, c"\xff".as_ptr(), c"1".as_ptr())).says(VVAE_ERROR_ARGUMENT, &["key", "UTF-8"]);
    let refused = |key: &str, value: &str, words: &[&str]| {
        let failure = v.configure(key, value).unwrap_err();
        failure.says(VVAE_ERROR_ARGUMENT, &[key, &format!("\"{value}\"")]);
        failure.says(VVAE_ERROR_ARGUMENT, words);
    };
    v.configure("memory_limits", "1")
        .unwrap_err()
        .says(VVAE_ERROR_ARGUMENT, &["\"memory_limits\"", "keys are memory_limit, "]);
    v.configure("", "1").unwrap_err().says(VVAE_ERROR_ARGUMENT, &["\"\" is unknown", "decode_tile_size"]);
    refused("threads", "1025", &["from 1 to 1024"]);
    refused("threads", "", &["from 1 to 1024"]);
    refused("seed", "18446744073709551616", &["from 0 to 18446744073709551615"]);
    refused("memory_limit", "8 GB", &["8GiB"]);
    refused("memory_limit", "999999999999GiB", &["auto"]);
    refused("scaling_factor", "nan", &["a number from"]);
    refused("scaling_factor", "1e39", &["a number from"]);
    refused("posterior", "mode", &["mean, sample"]);
    refused("decode_tiled", "maybe", &["true, false, 1 or 0"]);
    refused("encode_tile_size", "63", &["from 64"]);
    refused("slice_frames", "4097", &["4096"]);
}

/// The failure of encode after a change to one of its tensors.
fn encode_fails(v: &Vae, which: usize, change: impl FnOnce(&mut vvae_tensor)) -> Failure {
    let buffers = [video(), latent()];
    let mut tensors = buffers.each_ref().map(Buffer::tensor);
    change(&mut tensors[which]);
    failure!(v.0, vvae_encode(v.0, &tensors[0], &tensors[1], null()))
}

#[test]
fn invalid_tensors_are_refused() {
    let v = Vae::open(&small()).unwrap();
    let (good_video, mut before, mut after) = (video(), latent(), latent());
    v.encode(&good_video, &mut before).unwrap();

    let (tensor, null_tensor) = (good_video.tensor(), null());
    failure!(v.0, vvae_encode(v.0, null_tensor, &tensor, null())).says(VVAE_ERROR_ARGUMENT, &["video is null"]);
    failure!(v.0, vvae_encode(v.0, &tensor, null_tensor, null())).says(VVAE_ERROR_ARGUMENT, &["latent is null"]);
    failure!(v.0, vvae_decode(v.0, null_tensor, &tensor, null())).says(VVAE_ERROR_ARGUMENT, &["latent is null"]);
    for (which, name) in ["video", "latent"].into_iter().enumerate() {
        let says = |words: &[&str], change: &dyn Fn(&mut vvae_tensor)| {
            let failure = encode_fails(&v, which, change);
            failure.says(VVAE_ERROR_TENSOR, &[name]);
            failure.says(VVAE_ERROR_TENSOR, words);
        };
        let shape = if which == 0 { VIDEO } else { LATENT };
        says(&["data is null"], &|t| t.data = null_mut());
        says(&["ndim is 4", "must be 5"], &|t| t.ndim = 4);
        says(&["shape is null"], &|t| t.shape = null());
        says(&["negative in H"], &|t| t.shape = [1, 3, 1, -16, 16].as_ptr());
        says(&["T is 0"], &|t| t.shape = [1, 3, 0, 16, 16].as_ptr());
        says(&["64 bits", "u8, u16, f16, bf16, f32"], &|t| t.dtype = 2 | 64 << 8 | 1 << 16);
        says(&["2 lanes"], &|t| t.dtype = 2 | 32 << 8 | 2 << 16);
        says(&["device_type 13", "1 (CPU)"], &|t| t.device_type = 13);
        says(&["device_id is -1"], &|t| (t.device_type, t.device_id) = (VVAE_DEVICE_CUDA, -1));
        says(&["works on", "host memory"], &|t| t.device_type = VVAE_DEVICE_CUDA);
        says(&["aligned"], &|t| t.byte_offset = 1);
        says(&["byte_offset"], &|t| t.byte_offset = u64::MAX);
        says(&["addressed"], &|t| t.strides = [0, i64::MAX, 1, i64::MIN, 1].as_ptr());
        says(&["C is 7"], &|t| t.shape = [1, 7, 1, 16, 16].as_ptr());
        let huge = [shape[0], shape[1], 1 << 40, 1 << 20, 1 << 20];
        says(&["addressed"], &|t| t.shape = huge.as_ptr());
    }
    encode_fails(&v, 1, |t| t.strides = [0; 5].as_ptr()).says(VVAE_ERROR_TENSOR, &["latent", "overlap"]);
    let floats = "latents must be one of f16, bf16, f32";
    encode_fails(&v, 1, |t| t.dtype = VVAE_DTYPE_U16).says(VVAE_ERROR_TENSOR, &["latent: dtype is u16", floats]);
    let bytes = Buffer::new(VVAE_DTYPE_U8, LATENT);
    v.decode(&bytes, &mut video()).unwrap_err().says(VVAE_ERROR_TENSOR, &["latent: dtype is u8", floats]);
    encode_fails(&v, 1, |t| t.shape = [1, 16, 1, 2, 3].as_ptr()).says(VVAE_ERROR_TENSOR, &["latent", "3", "2"]);
    encode_fails(&v, 1, |t| t.shape = [2, 16, 1, 2, 2].as_ptr()).says(VVAE_ERROR_TENSOR, &["latent"]);

    // A wrong shape may reach into the other tensor. The shape is the fault.
    let both = Buffer::new(VVAE_DTYPE_F32, [1, 7, 1, 16, 16]);
    let (mut wide, mut inside) = (both.tensor(), both.tensor());
    (wide.shape, inside.shape) = ([1, 7, 1, 16, 16].as_ptr(), LATENT.as_ptr());
    failure!(v.0, vvae_encode(v.0, &wide, &inside, null())).says(VVAE_ERROR_TENSOR, &["video", "C is 7"]);
    wide.shape = VIDEO.as_ptr();
    failure!(v.0, vvae_encode(v.0, &wide, &inside, null()))
        .says(VVAE_ERROR_TENSOR, &["latent and video", "share memory"]);

    let (latents, mut frames) = (latent(), Buffer::new(VVAE_DTYPE_F32, [1, 3, 1, 16, 40]));
    v.decode(&latents, &mut frames).unwrap_err().says(VVAE_ERROR_TENSOR, &["video", "40", "16"]);

    v.encode(&good_video, &mut after).unwrap();
    assert_eq!(before.f32(), after.f32(), "the handle works as before");
    let (pinned, out) = (vvae_tensor { device_type: VVAE_DEVICE_CUDA_HOST, ..good_video.tensor() }, after.tensor());
    let repeated = vvae_tensor { strides: [0, 0, 0, 16, 1].as_ptr(), ..pinned };
    for (video, what) in [(&pinned, "pinned memory is host memory"), (&repeated, "elements of an input may overlap")] {
        // SAFETY: tensors of this test.
        outcome(v.0, unsafe { (api().vvae_encode)(v.0, video, &out, null()) }).expect(what);
    }
}

#[test]
fn invalid_run_infos_are_refused() {
    let v = Vae::open(&small()).unwrap();
    let (video, mut latent) = (video(), latent());
    let mut run_with = |change: &dyn Fn(&mut vvae_run_info)| {
        let mut run = run_info();
        change(&mut run);
        v.encode_with(&video, &mut latent, &run)
    };
    let pointer = without_provenance_mut(8);
    run_with(&|r| r.struct_size = 0).unwrap_err().says(VVAE_ERROR_ARGUMENT, &["run: struct_size is 0"]);
    run_with(&|r| r.flags = 6).unwrap_err().says(VVAE_ERROR_ARGUMENT, &["flags 0x6", "VVAE_RUN_HAS_STREAM"]);
    run_with(&|r| r.cuda_stream = pointer).unwrap_err().says(VVAE_ERROR_ARGUMENT, &["cuda_stream", "flags"]);
    run_with(&|r| (r.flags, r.cuda_stream) = (VVAE_RUN_HAS_STREAM, pointer)).expect("the CPU ignores streams");
    let logvar = Buffer::new(VVAE_DTYPE_F32, [1, 16, 1, 2, 3]);
    let tensor = logvar.tensor();
    run_with(&|r| r.logvar = &tensor).unwrap_err().says(VVAE_ERROR_TENSOR, &["logvar"]);
    let run = vvae_run_info { logvar: &tensor, ..run_info() };
    let (latent, mut video) = (common::Buffer::new(VVAE_DTYPE_F32, LATENT), video.clone());
    v.decode_with(&latent, &mut video, &run).unwrap_err().says(VVAE_ERROR_ARGUMENT, &["logvar", "only encode"]);
}

#[test]
fn invalid_plans_are_refused() {
    let v = Vae::open(&small()).unwrap();
    v.plan("upscale", VIDEO).unwrap_err().says(VVAE_ERROR_ARGUMENT, &["\"upscale\"", "\"encode\" and \"decode\""]);
    v.plan("encode", [1, 3, -5, 16, 16]).unwrap_err().says(VVAE_ERROR_TENSOR, &["negative in T"]);
    v.plan("encode", [1, 3, 5, 0, 16]).unwrap_err().says(VVAE_ERROR_TENSOR, &["H is 0"]);
    v.plan("decode", [1, 3, 5, 16, 16]).unwrap_err().says(VVAE_ERROR_TENSOR, &["C is 3", "16"]);
    v.plan("decode", [i64::MAX; 5]).unwrap_err().says(VVAE_ERROR_TENSOR, &[]);
    let (node, mut info) = (c"encode".as_ptr(), sized());
    failure!(v.0, vvae_plan(v.0, null(), VIDEO.as_ptr(), &mut info, null_mut(), 0))
        .says(VVAE_ERROR_ARGUMENT, &["node is null"]);
    failure!(v.0, vvae_plan(v.0, node, null(), &mut info, null_mut(), 0)).says(VVAE_ERROR_ARGUMENT, &["shape is null"]);
    failure!(v.0, vvae_plan(v.0, node, VIDEO.as_ptr(), null_mut(), null_mut(), 0))
        .says(VVAE_ERROR_ARGUMENT, &["out is null"]);
    v.configure("decode_tiled", "true").unwrap();
    v.configure("decode_tile_size", "64").unwrap();
    v.configure("decode_tile_overlap", "64").unwrap();
    v.plan("decode", LATENT).unwrap_err().says(VVAE_ERROR_ARGUMENT, &["decode_tile_overlap: 64", "decode_tile_size"]);
    v.configure("memory_limit", "1").unwrap();
    v.plan("encode", VIDEO).unwrap_err().says(VVAE_ERROR_MEMORY, &["memory_limit"]);
    v.trim(0).unwrap_err().says(VVAE_ERROR_ARGUMENT, &["VVAE_TRIM_WORKSPACE"]);
    v.trim(4).unwrap_err().says(VVAE_ERROR_ARGUMENT, &["0x4"]);
}

#[test]
fn invalid_ranges_are_refused() {
    let v = Vae::open(&small()).unwrap();
    let (node, mut info, mut s) = (c"encode".as_ptr(), sized(), null_mut());
    failure!(v.0, vvae_range_inputs(v.0, null(), 5, 0, 1, &mut 0, &mut 0)).says(VVAE_ERROR_ARGUMENT, &["node is null"]);
    failure!(v.0, vvae_range_inputs(v.0, node, 5, 0, 1, null_mut(), &mut 0))
        .says(VVAE_ERROR_ARGUMENT, &["input_first is null"]);
    failure!(v.0, vvae_range_inputs(v.0, node, 5, 0, 1, &mut 0, null_mut()))
        .says(VVAE_ERROR_ARGUMENT, &["input_count is null"]);
    v.range_inputs("upscale", 5, 0, 1).unwrap_err().says(VVAE_ERROR_ARGUMENT, &["\"upscale\""]);
    v.range_inputs("decode", i64::MAX, 0, 1).unwrap_err().says(VVAE_ERROR_ARGUMENT, &["clip_frames"]);
    failure!(v.0, vvae_plan_range(v.0, node, null(), 0, 1, &mut info, null_mut(), 0))
        .says(VVAE_ERROR_ARGUMENT, &["shape is null"]);
    failure!(v.0, vvae_plan_range(v.0, node, VIDEO.as_ptr(), 0, 1, null_mut(), null_mut(), 0))
        .says(VVAE_ERROR_ARGUMENT, &["out is null"]);
    v.plan_range("encode", [1, 3, 0, 16, 16], 0, 1).unwrap_err().says(VVAE_ERROR_TENSOR, &["T is 0"]);
    v.plan_range("decode", [1, 16, 1 << 45, 2, 2], 0, 9).unwrap_err().says(VVAE_ERROR_TENSOR, &["the most is"]);
    v.plan_range("decode", [1, 16, 1 << 33, 2, 2], 1 << 34, 9).expect("clips that ranges are of may be longer");
    failure!(v.0, vvae_stream_open_at(v.0, node, VIDEO.as_ptr(), 1, null_mut()))
        .says(VVAE_ERROR_ARGUMENT, &["s is null"]);
    failure!(v.0, vvae_stream_open_at(v.0, node, null(), 1, &mut s)).says(VVAE_ERROR_ARGUMENT, &["shape is null"]);
    let video = video();
    let tensor = video.tensor();
    failure!(v.0, vvae_encode_range(v.0, null(), 5, 0, &tensor, null())).says(VVAE_ERROR_ARGUMENT, &["video is null"]);
    failure!(v.0, vvae_encode_range(v.0, &tensor, 5, 0, null(), null())).says(VVAE_ERROR_ARGUMENT, &["latent is null"]);
}

#[test]
fn stream_misuse_is_refused() {
    let v = Vae::open(&small()).unwrap();
    let (node, mut s) = (c"encode".as_ptr(), null_mut());
    failure!(v.0, vvae_stream_open(v.0, node, VIDEO.as_ptr(), null_mut())).says(VVAE_ERROR_ARGUMENT, &["s is null"]);
    failure!(v.0, vvae_stream_open(v.0, node, null(), &mut s)).says(VVAE_ERROR_ARGUMENT, &["shape is null"]);
    failure!(v.0, vvae_stream_open(v.0, null(), VIDEO.as_ptr(), &mut s)).says(VVAE_ERROR_ARGUMENT, &["node is null"]);
    v.stream("encode", [1, 4, 1, 16, 16]).err().unwrap().says(VVAE_ERROR_TENSOR, &["C is 4"]);

    let stream = v.stream("encode", [1, 3, -1, 16, 16]).expect("the number of frames is ignored");
    let frames = video();
    let (mut count, other) = (7, Buffer::new(VVAE_DTYPE_F32, [1, 3, 1, 16, 24]));
    failure!(v.0, vvae_stream_push(stream.s, &frames.tensor(), null_mut()))
        .says(VVAE_ERROR_ARGUMENT, &["taken is null"]);
    failure!(v.0, vvae_stream_pull(stream.s, &latent().tensor(), null(), null_mut()))
        .says(VVAE_ERROR_ARGUMENT, &["written is null"]);
    failure!(v.0, vvae_stream_pull(stream.s, null(), null(), &mut count)).says(VVAE_ERROR_ARGUMENT, &["out is null"]);
    assert_eq!(count, 0, "a count is 0 after a failure");
    stream.push(Some(&other.tensor())).unwrap_err().says(VVAE_ERROR_TENSOR, &["24", "16"]);
    let out = latent();
    assert_eq!(stream.pull(&out.tensor(), None), Ok((VVAE_AGAIN, 0)));
    assert_eq!(stream.push(Some(&frames.tensor())), Ok((VVAE_OK, 1)));
    assert_eq!(stream.push(None), Ok((VVAE_OK, 0)));
    stream.push(Some(&frames.tensor())).unwrap_err().says(VVAE_ERROR_STATE, &["complete"]);
    assert_eq!(stream.pull(&out.tensor(), None), Ok((VVAE_OK, 1)));
    assert_eq!(stream.pull(&out.tensor(), None), Ok((VVAE_END, 0)));
    assert_eq!(v.memory().streams, 1);
    drop(stream);
    assert_eq!(v.memory().streams, 0);
}

/// Blocks a run until released.
struct Gate {
    entered: AtomicBool,
    leave: AtomicBool,
}

/// Opens the gate when dropped, also on a panic.
struct Opener<'a>(&'a Gate);

impl Drop for Opener<'_> {
    fn drop(&mut self) {
        self.0.leave.store(true, Ordering::SeqCst);
    }
}

unsafe extern "C" fn wait(user: *mut c_void, _: u64, _: u64, _: *const c_char) -> i32 {
    // SAFETY: the test passes its gate, which outlives the run.
    let gate = unsafe { &*user.cast::<Gate>() };
    gate.entered.store(true, Ordering::SeqCst);
    while !gate.leave.load(Ordering::SeqCst) {
        std::thread::yield_now();
    }
    0
}

#[test]
fn busy_handle_refuses_calls_and_can_be_cancelled() {
    let v = Vae::open(&small()).unwrap();
    let gate = Gate { entered: AtomicBool::new(false), leave: AtomicBool::new(false) };
    std::thread::scope(|scope| {
        let run = scope.spawn(|| {
            let run = vvae_run_info {
                progress: Some(wait),
                progress_user: (&raw const gate).cast_mut().cast(),
                ..run_info()
            };
            v.encode_with(&video(), &mut latent(), &run)
        });
        let opener = Opener(&gate);
        while !gate.entered.load(Ordering::SeqCst) {
            assert!(!run.is_finished());
            std::thread::yield_now();
        }
        v.configure("seed", "1").unwrap_err().says(VVAE_ERROR_STATE, &["busy"]);
        v.encode(&video(), &mut latent()).unwrap_err().says(VVAE_ERROR_STATE, &["busy"]);
        failure!(v.0, vvae_free(v.0)).says(VVAE_ERROR_STATE, &["busy"]);
        assert_eq!(v.memory().streams, 0, "memory figures are available at any time");
        v.cancel().unwrap();
        drop(opener);
        run.join().unwrap().unwrap_err().says(VVAE_ERROR_CANCELLED, &["cancelled"]);
    });
    v.encode(&video(), &mut latent()).expect("the handle works again");
}

unsafe extern "C" fn log(user: *mut c_void, level: i32, message: *const c_char) {
    // SAFETY: the test passes its counters; messages are C strings.
    let (counts, message) = unsafe { (&*user.cast::<[AtomicU32; 4]>(), CStr::from_ptr(message)) };
    assert!(!message.is_empty());
    counts[level as usize].fetch_add(1, Ordering::SeqCst);
}

#[test]
fn log_reports_opening_plans_and_failures() {
    let (weights, counts) = (weights(), [const { AtomicU32::new(0) }; 4]);
    let info =
        vvae_create_info { log: Some(log), log_user: (&raw const counts).cast_mut().cast(), ..create_info(&weights) };
    let v = Vae::create(&info).unwrap();
    let count = |level: i32| counts[level as usize].load(Ordering::SeqCst);
    assert!(count(VVAE_LOG_INFO) > 0);
    v.encode(&video(), &mut latent()).unwrap();
    assert!(count(VVAE_LOG_DEBUG) > 0);
    assert_eq!(count(VVAE_LOG_WARNING), 0);
    v.configure("seed", "").unwrap_err();
    assert_eq!((count(VVAE_LOG_WARNING), count(VVAE_LOG_ERROR)), (1, 0));
}

/// Waits at the first warning. The refusal that it causes is one too.
unsafe extern "C" fn wait_at_warning(user: *mut c_void, level: i32, _: *const c_char) {
    // SAFETY: the test passes its gate.
    let is_first = !unsafe { &*user.cast::<Gate>() }.entered.load(Ordering::SeqCst);
    if level == VVAE_LOG_WARNING && is_first {
        // SAFETY: as above.
        unsafe { wait(user, 0, 0, std::ptr::null()) };
    }
}

/// Once a handle is freed, its host may end what the log writes to.
#[test]
fn a_handle_is_not_freed_while_its_log_is_being_written() {
    let (weights, gate) = (weights(), Gate { entered: AtomicBool::new(false), leave: AtomicBool::new(false) });
    let log_user = (&raw const gate).cast_mut().cast();
    let v = Vae::create(&vvae_create_info { log: Some(wait_at_warning), log_user, ..create_info(&weights) }).unwrap();
    std::thread::scope(|scope| {
        let failing = scope.spawn(|| v.configure("seed", ""));
        let opener = Opener(&gate);
        while !gate.entered.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        failure!(v.0, vvae_free(v.0)).says(VVAE_ERROR_STATE, &["busy"]);
        drop(opener);
        failing.join().unwrap().unwrap_err().says(VVAE_ERROR_ARGUMENT, &[]);
    });
    assert_eq!(v.free(), VVAE_OK);
}

#[test]
fn error_texts_fit_any_buffer() {
    let v = Vae::open(&small()).unwrap();
    v.configure("\u{20ac}\u{20ac}", "1").unwrap_err();
    let whole = error_text(v.0);
    assert_eq!(whole, error_text(null_mut()), "the thread has the same text");
    for capacity in 0..whole.len() + 3 {
        let mut buffer = vec![b'#'; capacity + 1];
        // SAFETY: the buffer is longer than the capacity.
        let length = unsafe { (api().vvae_error)(v.0, buffer.as_mut_ptr().cast(), capacity as u64) };
        assert_eq!(length as usize, whole.len());
        assert_eq!(buffer[capacity], b'#', "nothing is written beyond the capacity");
        if capacity > 0 {
            let text = CStr::from_bytes_until_nul(&buffer).expect("a NUL").to_str().expect("whole characters");
            assert!(whole.starts_with(text) && text.len() + 3 >= whole.len().min(capacity - 1));
        }
    }
    // SAFETY: null is allowed.
    assert_eq!(unsafe { (api().vvae_error)(v.0, null_mut(), 100) } as usize, whole.len());
    let other = std::thread::spawn(|| error_text(null_mut())).join().unwrap();
    assert_eq!(other, "", "another thread has no error");
}
