//! What a hostile folder, a signal, a fork, a callback or a strange caller does to the library: an error or a right
//! result, never a hang, a foreign file overwritten or other bits.

#![cfg(unix)]

mod common;

use std::ffi::{CString, c_char, c_int, c_void};
use std::fs;
use std::os::unix::fs::{FileTypeExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Stdio};
use std::ptr::{null, null_mut, without_provenance_mut};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use common::safetensors::Folder;
use common::{Buffer, Failure, Stream, Vae, api, create_info, error_text, outcome, run_info, sized, small};
use video_vae::capi::*;

unsafe extern "C" {
    fn mkfifo(path: *const c_char, mode: u32) -> c_int;
    fn signal(number: c_int, handler: usize) -> usize;
    fn fork() -> c_int;
    fn waitpid(child: c_int, status: *mut c_int, options: c_int) -> c_int;
    fn alarm(seconds: u32) -> u32;
    fn _exit(code: c_int) -> !;
    fn pthread_self() -> usize;
    fn pthread_kill(thread: usize, number: c_int) -> c_int;
}

#[cfg(target_os = "linux")]
const SIGUSR1: c_int = 10;
#[cfg(not(target_os = "linux"))]
const SIGUSR1: c_int = 30;

const LATENT: [i64; 5] = [1, 16, 1, 2, 2];

fn new_stream(vae: &Vae) -> Stream<'_> {
    vae.stream("decode", LATENT).unwrap()
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// A trace of one run, written to `path`.
fn write_trace(vae: &Vae, path: &Path) -> Result<i32, Failure> {
    vae.configure("trace", path.to_str().unwrap())?;
    vae.decode(&Buffer::new(VVAE_DTYPE_F32, LATENT), &mut Buffer::new(VVAE_DTYPE_F32, [1, 3, 1, 16, 16])).unwrap();
    vae.configure("trace", "")
}

fn is_trace(file: &Path) -> bool {
    serde_json::from_slice::<serde_json::Value>(&fs::read(file).unwrap()).is_ok()
}

#[test]
fn a_planted_link_does_not_lead_a_file_astray() {
    let (folder, vae) = (Folder::new("planted"), Vae::open(&small()).unwrap());
    let victim = folder.file("victim", b"precious");
    let path = folder.0.join("trace");
    // The names that earlier versions used.
    for count in 0..64 {
        symlink(&victim, folder.0.join(format!("trace.{}-{count}.partial", std::process::id()))).unwrap();
    }
    write_trace(&vae, &path).unwrap();
    assert!(fs::read(&victim).unwrap() == b"precious");
    assert!(fs::symlink_metadata(&path).unwrap().is_file() && is_trace(&path));
    assert_eq!(names(&folder.0).len(), 66, "no file is left behind");
}

#[test]
fn a_file_replaces_regular_files_only() {
    let (folder, vae) = (Folder::new("regular"), Vae::open(&small()).unwrap());
    let at = |name: &str| folder.0.join(name);
    let fifo = CString::new(at("fifo").to_str().unwrap()).unwrap();
    // SAFETY: a path.
    assert_eq!(unsafe { mkfifo(fifo.as_ptr(), 0o600) }, 0);
    let _socket = UnixListener::bind(at("socket")).unwrap();
    fs::create_dir(at("folder")).unwrap();
    symlink("fifo", at("to-fifo")).unwrap();
    symlink("absent", at("to-nothing")).unwrap();
    let before = names(&folder.0);
    for name in ["fifo", "socket", "folder", "to-fifo"] {
        write_trace(&vae, &at(name)).unwrap_err().says(VVAE_ERROR_CHECKPOINT, &[name, "not a regular file"]);
    }
    write_trace(&vae, &at("to-nothing")).unwrap_err().says(VVAE_ERROR_CHECKPOINT, &["to-nothing", "written"]);
    write_trace(&vae, &at("..")).unwrap_err().says(VVAE_ERROR_CHECKPOINT, &["written"]);
    assert_eq!(names(&folder.0), before, "nothing was made or removed");
    assert!(fs::symlink_metadata(at("fifo")).unwrap().file_type().is_fifo());
    assert!(fs::symlink_metadata(at("socket")).unwrap().file_type().is_socket());

    fs::create_dir(at("elsewhere")).unwrap();
    let real = folder.file("elsewhere/real", b"old");
    symlink("elsewhere/real", at("to-file")).unwrap();
    write_trace(&vae, &at("to-file")).unwrap();
    assert!(fs::symlink_metadata(at("to-file")).unwrap().is_symlink(), "the link stays");
    assert!(is_trace(&real), "the file that it leads to is replaced");
    assert_eq!(names(&at("elsewhere")), ["real"]);
}

/// Puts a pipe and a checkpoint in turn at `path`, each by one rename, until `done`.
fn swap(folder: &Path, path: &Path, done: &AtomicBool) {
    let [pipe, file, next] = ["pipe", "file", "next"].map(|name| folder.join(name));
    let c_path = CString::new(pipe.to_str().unwrap()).unwrap();
    // SAFETY: a valid text.
    assert_eq!(unsafe { mkfifo(c_path.as_ptr(), 0o600) }, 0);
    fs::copy(small(), &file).unwrap();
    while !done.load(Relaxed) {
        for kind in [&pipe, &file] {
            fs::hard_link(kind, &next).unwrap();
            fs::rename(&next, path).unwrap();
        }
    }
}

#[test]
fn a_pipe_in_place_of_a_checkpoint_is_not_waited_for() {
    if !is_alone() {
        alone("a_pipe_in_place_of_a_checkpoint_is_not_waited_for");
        return;
    }
    let (folder, done) = (Folder::new("swapped"), AtomicBool::new(false));
    let path = folder.0.join("weights.safetensors");
    thread::scope(|scope| {
        scope.spawn(|| swap(&folder.0, &path, &done));
        let (mut opened, mut refused) = (0, 0);
        while opened < 100 || refused < 100 {
            match Vae::open(&path) {
                Ok(_) => opened += 1,
                Err(failure) => {
                    failure.says(VVAE_ERROR_CHECKPOINT, &["weights.safetensors"]);
                    refused += 1;
                }
            }
        }
        done.store(true, Relaxed);
    });
}

/// A tensor inside the memory of a buffer.
fn within(buffer: &Buffer, byte_offset: u64, shape: &[i64; 5], strides: Option<&[i64; 5]>) -> vvae_tensor {
    let strides = strides.map_or(null(), |strides| strides.as_ptr());
    vvae_tensor { byte_offset, shape: shape.as_ptr(), strides, ..buffer.tensor() }
}

#[test]
fn an_output_needs_memory_of_its_own() {
    const VIDEO: [i64; 5] = [1, 3, 1, 16, 16];
    let vae = Vae::open(&small()).unwrap();
    let encode = |video: &vvae_tensor, latent: &vvae_tensor, logvar: *const vvae_tensor| {
        let run = vvae_run_info { logvar, ..run_info() };
        // SAFETY: the tensors describe memory of their buffers.
        outcome(vae.0, unsafe { (api().vvae_encode)(vae.0, video, latent, &run) })
    };
    // Room for two frames: what begins in the last element must not reach into another buffer.
    let mut video = Buffer::new(VVAE_DTYPE_F32, [1, 3, 2, 16, 16]);
    video.f32_mut().iter_mut().enumerate().for_each(|(i, v)| *v = (i as f32 * 0.37).sin());
    let before = video.bytes().to_vec();
    let one_frame = within(&video, 0, &VIDEO, None);
    let (mean, logvar) = (Buffer::new(VVAE_DTYPE_F32, LATENT), Buffer::new(VVAE_DTYPE_F32, LATENT));
    encode(&one_frame, &mean.tensor(), &logvar.tensor()).unwrap();

    let last = 3 * 16 * 16 * 4 - 4;
    for offset in [0, 256, last] {
        let inside = within(&video, offset, &LATENT, None);
        encode(&one_frame, &inside, null()).unwrap_err().says(VVAE_ERROR_TENSOR, &["latent and video"]);
        encode(&one_frame, &mean.tensor(), &inside)
            .unwrap_err()
            .says(VVAE_ERROR_TENSOR, &["logvar and video", "memory of its own"]);
    }
    assert!(video.bytes() == before, "nothing was written");
    encode(&one_frame, &mean.tensor(), &mean.tensor()).unwrap_err().says(VVAE_ERROR_TENSOR, &["logvar and latent"]);
    // SAFETY: the tensors describe memory of their buffers.
    let decoded = unsafe { (api().vvae_decode)(vae.0, &within(&video, 64, &LATENT, None), &one_frame, null()) };
    outcome(vae.0, decoded).unwrap_err().says(VVAE_ERROR_TENSOR, &["video and latent"]);

    let stream = vae.stream("encode", VIDEO).unwrap();
    stream.push(Some(&one_frame)).unwrap();
    let both = mean.tensor();
    let run = vvae_run_info { logvar: &both, ..run_info() };
    stream.pull(&both, Some(&run)).unwrap_err().says(VVAE_ERROR_TENSOR, &["logvar and latent"]);

    // Halves of one buffer, as planes and with channels last.
    let planes = [128, 4, 4, 2, 1];
    let channels_last = [128, 1, 128, 64, 32];
    for (strides, second) in [(planes, 16 * 4 * 4), (channels_last, 16 * 4)] {
        let whole = Buffer::new(VVAE_DTYPE_F32, [1, 32, 1, 2, 2]);
        let halves = [0, second].map(|offset| within(&whole, offset, &LATENT, Some(&strides)));
        encode(&one_frame, &halves[0], &halves[1]).unwrap();
        for (half, expected) in [(0, &mean), (second, &logvar)] {
            for (n, expected) in expected.f32().iter().enumerate() {
                let (c, h, w) = (n / 4, n / 2 % 2, n % 2);
                let at = c as i64 * strides[1] + h as i64 * strides[3] + w as i64 * strides[4];
                assert_eq!(whole.f32()[half as usize / 4 + at as usize].to_bits(), expected.to_bits());
            }
        }
    }
}

/// Runs a test of this file in a process of its own, which may hang or crash. Returns what it wrote, if it passed.
fn alone(test: &str) -> String {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture", "--include-ignored"])
        .env("VVAE_ALONE", "1")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let started = Instant::now();
    let status = loop {
        match child.try_wait().unwrap() {
            Some(status) => break Some(status),
            None if started.elapsed() > Duration::from_secs(240) => break None,
            None => thread::sleep(Duration::from_millis(20)),
        }
    };
    child.kill().ok();
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(status.expect("it hangs").success(), "{text}");
    text
}

fn is_alone() -> bool {
    std::env::var_os("VVAE_ALONE").is_some()
}

static CANCELLED: AtomicPtr<vvae> = AtomicPtr::new(null_mut());
static CANCELS: AtomicU32 = AtomicU32::new(0);

extern "C" fn cancel_in_handler(_: c_int) {
    // SAFETY: a handle that stays open.
    if unsafe { (api().vvae_cancel)(CANCELLED.load(Relaxed)) } == VVAE_OK {
        CANCELS.fetch_add(1, Relaxed);
    }
}

/// Signals interrupt a thread wherever it is, also while it holds a lock of the library.
#[test]
fn cancel_works_in_a_signal_handler() {
    if !is_alone() {
        alone("cancel_works_in_a_signal_handler");
        return;
    }
    let vae = Vae::open(&small()).unwrap();
    CANCELLED.store(vae.0, Relaxed);
    // SAFETY: the handler calls a function that is safe in handlers.
    let me = unsafe {
        signal(SIGUSR1, cancel_in_handler as extern "C" fn(c_int) as usize);
        pthread_self()
    };
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Relaxed) {
                // SAFETY: the thread outlives this one.
                unsafe { pthread_kill(me, SIGUSR1) };
                thread::sleep(Duration::from_micros(20));
            }
        });
        let (mut latent, started) = (Buffer::new(VVAE_DTYPE_F32, LATENT), Instant::now());
        let video = Buffer::new(VVAE_DTYPE_F32, [1, 3, 1, 16, 16]);
        let mut stopped = 0;
        // A busy machine needs longer for as many signals.
        let patience = |stopped| if stopped > 0 && CANCELS.load(Relaxed) > 100 { 3 } else { 120 };
        while started.elapsed() < Duration::from_secs(patience(stopped)) {
            for _ in 0..1000 {
                vae.memory();
                // SAFETY: nothing to trim is an error, but takes the handle.
                unsafe { (api().vvae_trim)(vae.0, 0) };
            }
            stopped += u32::from(vae.encode(&video, &mut latent).is_err_and(|e| e.status == VVAE_ERROR_CANCELLED));
        }
        done.store(true, Relaxed);
        assert!(stopped > 0 && CANCELS.load(Relaxed) > 100, "{stopped} stopped, {CANCELS:?} cancels");
    });
}

/// The statuses of calls that an allocator of the host made.
static INNER: Mutex<Vec<i32>> = Mutex::new(Vec::new());

unsafe extern "C" fn calling_alloc(other: *mut c_void, bytes: u64, align: u64) -> *mut c_void {
    let other = other.cast::<vvae>();
    let (video, latent) = (Buffer::new(VVAE_DTYPE_F32, [1, 3, 1, 16, 16]), Buffer::new(VVAE_DTYPE_F32, LATENT));
    let weights = CString::new(small().to_str().unwrap()).unwrap();
    let mut v = without_provenance_mut(16);
    // SAFETY: the arguments are valid, and `other` is open.
    unsafe {
        assert_eq!((api().vvae_cancel)(other), VVAE_OK);
        let mut inner = INNER.lock().unwrap();
        inner.push((api().vvae_memory)(other, &mut sized()));
        inner.push((api().vvae_encode)(other, &video.tensor(), &latent.tensor(), null()));
        inner.push((api().vvae_trim)(other, VVAE_TRIM_WEIGHTS));
        inner.push((api().vvae_create)(&create_info(&weights), &mut v));
        assert!(v.is_null());
        assert!(error_text(null_mut()).contains("allocator of the host"));
        inner.push((api().vvae_free)(other));
        std::alloc::alloc(std::alloc::Layout::from_size_align(bytes as usize, align as usize).unwrap()).cast()
    }
}

unsafe extern "C" fn free_of_alloc(_: *mut c_void, block: *mut c_void, bytes: u64) {
    // SAFETY: from `calling_alloc`, which got this alignment.
    unsafe { std::alloc::dealloc(block.cast(), std::alloc::Layout::from_size_align(bytes as usize, 64).unwrap()) };
}

#[test]
fn an_allocator_that_calls_the_library_gets_an_error() {
    if !is_alone() {
        alone("an_allocator_that_calls_the_library_gets_an_error");
        return;
    }
    let (weights, other) = (CString::new(small().to_str().unwrap()).unwrap(), Vae::open(&small()).unwrap());
    let (alloc, free, alloc_user) = (Some(calling_alloc as _), Some(free_of_alloc as _), other.0.cast());
    let vae = Vae::create(&vvae_create_info { alloc, free, alloc_user, ..create_info(&weights) }).unwrap();
    let video = Buffer::new(VVAE_DTYPE_F32, [1, 3, 1, 16, 16]);
    vae.encode(&video, &mut Buffer::new(VVAE_DTYPE_F32, LATENT)).unwrap();
    let inner = INNER.lock().unwrap();
    assert!(!inner.is_empty() && inner.iter().all(|status| *status == VVAE_ERROR_STATE), "{inner:?}");
    drop(vae);
    other.encode(&video, &mut Buffer::new(VVAE_DTYPE_F32, LATENT)).expect("the other handle is as it was");
}

#[test]
fn a_relative_checkpoint_survives_chdir() {
    if !is_alone() {
        alone("a_relative_checkpoint_survives_chdir");
        return;
    }
    let folder = Folder::new("chdir");
    std::env::set_current_dir(small().parent().unwrap()).unwrap();
    let vae = Vae::open(Path::new("small.safetensors")).unwrap();
    std::env::set_current_dir(&folder.0).unwrap();
    let video = Buffer::new(VVAE_DTYPE_F32, [1, 3, 1, 16, 16]);
    vae.encode(&video, &mut Buffer::new(VVAE_DTYPE_F32, LATENT)).expect("the weights are loaded from where they were");
}

/// The calls of a forked child. Returns the number of the first that is wrong.
fn calls_after_fork(vae: &Vae, stream: &Stream, weights: &CString) -> c_int {
    let (video, latent) = (Buffer::new(VVAE_DTYPE_F32, [1, 3, 1, 16, 16]), Buffer::new(VVAE_DTYPE_F32, LATENT));
    let mut v = null_mut();
    // SAFETY: the arguments are valid.
    let statuses = unsafe {
        [
            (api().vvae_memory)(vae.0, &mut sized()),
            (api().vvae_encode)(vae.0, &video.tensor(), &latent.tensor(), null()),
            (api().vvae_trim)(vae.0, VVAE_TRIM_WEIGHTS),
            (api().vvae_cancel)(vae.0),
            (api().vvae_create)(&create_info(weights), &mut v),
            (api().vvae_stream_push)(stream.s, null(), null_mut()),
            (api().vvae_stream_close)(stream.s),
            (api().vvae_free)(vae.0),
        ]
    };
    match statuses.iter().position(|status| *status != VVAE_ERROR_STATE) {
        Some(wrong) => 1 + wrong as c_int,
        None if !error_text(vae.0).contains("fork") => 100,
        None => 0,
    }
}

#[test]
fn a_forked_child_gets_errors() {
    if !is_alone() {
        let text = alone("a_forked_child_gets_errors");
        assert!(!text.contains("panicked"), "{text}");
        return;
    }
    let (vae, weights) = (Vae::open(&small()).unwrap(), CString::new(small().to_str().unwrap()).unwrap());
    vae.configure("threads", "3").unwrap();
    let video = Buffer::new(VVAE_DTYPE_F32, [1, 3, 1, 16, 16]);
    let encode = || vae.encode(&video, &mut Buffer::new(VVAE_DTYPE_F32, LATENT)).unwrap();
    encode();
    let stream = new_stream(&vae);
    // SAFETY: the child calls the library, and ends without running anything else.
    unsafe {
        let child = fork();
        if child == 0 {
            alarm(20);
            _exit(calls_after_fork(&vae, &stream, &weights));
        }
        let mut status = -1;
        assert_eq!(waitpid(child, &mut status, 0), child);
        assert_eq!(status, 0, "the child's exit code is the number of the wrong call, times 256");
    }
    encode();
    assert_eq!(stream.push(None).expect("the parent goes on"), (VVAE_OK, 0));
}

#[cfg(target_os = "linux")]
#[test]
fn handles_share_threads_that_start_with_the_first_run() {
    use common::process::{settled_threads, threads_at_rest};
    if !is_alone() {
        alone("handles_share_threads_that_start_with_the_first_run");
        return;
    }
    let before = threads_at_rest();
    let open = |_| {
        let vae = Vae::open(&small()).unwrap();
        vae.configure("threads", "3").unwrap();
        vae
    };
    let handles: Vec<Vae> = (0..40).map(open).collect();
    assert_eq!(threads_at_rest(), before, "no thread starts before the first run");
    let video = Buffer::new(VVAE_DTYPE_F32, [1, 3, 1, 64, 64]);
    for vae in &handles {
        vae.encode(&video, &mut Buffer::new(VVAE_DTYPE_F32, [1, 16, 1, 8, 8])).unwrap();
    }
    assert_eq!(threads_at_rest(), before + 2, "two beside the calling thread");
    drop(handles);
    assert_eq!(settled_threads(before), before);
}

#[test]
fn a_fork_after_a_failed_create_can_use_the_library() {
    if !is_alone() {
        alone("a_fork_after_a_failed_create_can_use_the_library");
        return;
    }
    assert!(Vae::open(Path::new("missing.safetensors")).is_err());
    // SAFETY: the process has one thread that matters, and the child ends without running anything else.
    unsafe {
        let child = fork();
        if child == 0 {
            alarm(60);
            let video = Buffer::new(VVAE_DTYPE_F32, [1, 3, 1, 16, 16]);
            let encode = |vae: Vae| vae.encode(&video, &mut Buffer::new(VVAE_DTYPE_F32, LATENT));
            let encoded = Vae::open(&small()).and_then(encode);
            _exit(c_int::from(encoded.is_err()));
        }
        let mut status = -1;
        assert_eq!(waitpid(child, &mut status, 0), child);
        assert_eq!(status, 0, "the child was refused");
    }
}

/// What the header says that a calling thread needs.
const STACK_BYTES: usize = 256 << 10;

#[test]
fn calls_need_half_of_the_stack_that_the_header_asks_for() {
    assert!(include_str!("../include/video_vae.h").contains(&format!("needs a stack of {} KiB", STACK_BYTES >> 10)));
    if !is_alone() {
        alone("calls_need_half_of_the_stack_that_the_header_asks_for");
        return;
    }
    let calls = || {
        assert!(Vae::open(Path::new("missing.safetensors")).is_err());
        for (threads, precision) in [("1", "fp32"), ("2", "bf16")] {
            let vae = Vae::open(&small()).unwrap();
            vae.configure("threads", threads).unwrap();
            vae.configure("precision", precision).unwrap();
            vae.plan("decode", [1, 16, 21, 270, 480]).unwrap();
            vae.configure("memory_limit", "1GiB").unwrap();
            vae.plan("encode", [1, 3, 81, 1080, 1920]).ok();
            vae.timeline("decode", [1, 16, 3, 8, 8]).unwrap();
            let mut latent = Buffer::new(VVAE_DTYPE_F32, LATENT);
            vae.encode(&Buffer::new(VVAE_DTYPE_F32, [1, 3, 1, 16, 16]), &mut latent).unwrap();
            vae.decode(&latent, &mut Buffer::new(VVAE_DTYPE_F32, [1, 3, 1, 16, 16])).unwrap();
            let stream = new_stream(&vae);
            assert_eq!(stream.push(Some(&latent.tensor())).unwrap(), (VVAE_OK, 1));
            stream.push(None).unwrap();
            stream.pull(&Buffer::new(VVAE_DTYPE_F32, [1, 3, 1, 16, 16]).tensor(), None).unwrap();
        }
    };
    thread::Builder::new().stack_size(STACK_BYTES / 2).spawn(calls).unwrap().join().unwrap();
}

static LOGGED: AtomicPtr<vvae> = AtomicPtr::new(null_mut());
static REFUSED: AtomicU32 = AtomicU32::new(0);

/// Calls the handle that it logs for.
unsafe extern "C" fn meddle(_: *mut c_void, _: i32, _: *const c_char) {
    let v = LOGGED.load(Relaxed);
    if v.is_null() {
        return;
    }
    // SAFETY: a handle that stays open, and valid texts.
    let statuses = unsafe {
        let configured = (api().vvae_configure)(v, c"threads".as_ptr(), c"1".as_ptr());
        [configured, (api().vvae_trim)(v, VVAE_TRIM_WEIGHTS), (api().vvae_free)(v)]
    };
    assert_eq!(statuses, [VVAE_ERROR_STATE; 3]);
    REFUSED.fetch_add(1, Relaxed);
}

#[test]
fn a_log_callback_of_a_failing_call_cannot_use_its_handle() {
    if !is_alone() {
        let text = alone("a_log_callback_of_a_failing_call_cannot_use_its_handle");
        assert!(!text.contains("panicked"), "{text}");
        return;
    }
    let weights = CString::new(small().to_str().unwrap()).unwrap();
    let vae = Vae::create(&vvae_create_info { log: Some(meddle), ..create_info(&weights) }).unwrap();
    LOGGED.store(vae.0, Relaxed);
    vae.configure("threads", "none").unwrap_err().says(VVAE_ERROR_ARGUMENT, &["threads"]);
    // SAFETY: the struct says that it is too short.
    let status = unsafe { (api().vvae_memory)(vae.0, &mut vvae_memory_info { struct_size: 1, ..sized() }) };
    assert_eq!((status, REFUSED.load(Relaxed)), (VVAE_ERROR_ARGUMENT, 2));
    LOGGED.store(null_mut(), Relaxed);
    vae.configure("threads", "1").expect("the handle can be used afterwards");
}

#[cfg(target_arch = "x86_64")]
mod float_mode {
    use super::*;
    use std::arch::asm;

    const DEFAULT: u32 = 0x1f80;
    /// Rounds up; denormals are zero.
    const STRANGE: u32 = DEFAULT | 0x4000 | 0x8040;

    fn set(mode: u32) {
        // SAFETY: a valid mode. What is computed in it is not relied on.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &mode, options(nostack, readonly)) };
    }

    fn get() -> u32 {
        let mut mode = 0u32;
        // SAFETY: writes the number.
        unsafe { asm!("stmxcsr [{}]", in(reg) &mut mode, options(nostack)) };
        mode
    }

    /// Loads weights and runs in a mode. A handle of its own: weights are shared while one is open.
    fn results(mode: u32, video: &Buffer) -> [Vec<u8>; 2] {
        set(mode);
        let vae = Vae::open(&small()).unwrap();
        vae.configure("threads", "2").unwrap();
        let (mut latent, mut decoded) = (Buffer::new(VVAE_DTYPE_F32, [1, 16, 2, 4, 4]), video.clone());
        vae.encode(video, &mut latent).unwrap();
        vae.decode(&latent, &mut decoded).unwrap();
        let left = get() & !0x3f;
        set(DEFAULT);
        assert_eq!(left, mode, "the caller's mode is as it was");
        [latent.bytes().to_vec(), decoded.bytes().to_vec()]
    }

    #[test]
    fn bits_do_not_depend_on_the_callers_float_mode() {
        if !is_alone() {
            alone("float_mode::bits_do_not_depend_on_the_callers_float_mode");
            return;
        }
        let mut video = Buffer::new(VVAE_DTYPE_F32, [1, 3, 5, 32, 32]);
        video.f32_mut().iter_mut().enumerate().for_each(|(i, v)| *v = (i as f32 * 0.37).sin());
        let strange = results(STRANGE, &video);
        assert!(strange == results(DEFAULT, &video));
    }
}
