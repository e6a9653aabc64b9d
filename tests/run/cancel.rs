//! Progress and cancel act within a chunk of work, and leave the handle and its streams usable.

use std::alloc::{Layout, alloc, dealloc};
use std::ffi::{CStr, CString, c_char, c_void};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

use crate::common::process::least_time;
use crate::common::progress::{ProgressLog, with_progress};
use crate::common::{Buffer, Failure, Random, Vae, create_info, on_every_device, run_info, small};
use video_vae::capi::*;

const SECOND: Duration = Duration::from_secs(1);

/// Sets a flag when operations have run, after planning and loading.
unsafe extern "C" fn tell_of_work(user: *mut c_void, done: u64, _: u64, stage: *const c_char) -> i32 {
    // SAFETY: the test passes a flag that outlives the run, and a stage is a C string.
    let (computing, stage) = unsafe { (&*user.cast::<AtomicBool>(), CStr::from_ptr(stage)) };
    computing.fetch_or(stage == c"decode" && done > 0, SeqCst);
    0
}

fn latent(frames: i64, rows: i64, columns: i64) -> Buffer {
    let mut random = Random(9);
    let mut buffer = Buffer::new(VVAE_DTYPE_F32, [1, 16, frames, rows, columns]);
    buffer.f32_mut().iter_mut().for_each(|v| *v = random.below(2000) as f32 / 1000.0 - 1.0);
    buffer
}

fn video(latent: &Buffer) -> Buffer {
    let [b, _, t, h, w] = latent.shape;
    Buffer::new(VVAE_DTYPE_F32, [b, 3, 4 * t - 3, 8 * h, 8 * w])
}

#[test]
fn progress_rises_to_its_total() {
    on_every_device(|_| {
        let vae = Vae::open(&small()).unwrap();
        let latent = latent(6, 3, 4);
        let mut log = ProgressLog::default();
        vae.decode_with(&latent, &mut video(&latent), &with_progress(&mut log)).unwrap();
        assert_eq!(log.stages, ["plan", "load", "decode"]);
        assert!(log.calls > 20 && !log.fell && log.last.0 == log.last.1 && log.last.1 > 0);
    });
}

#[test]
fn cancelled_runs_leave_a_working_handle() {
    on_every_device(|_| {
        let vae = Vae::open(&small()).unwrap();
        let latent = latent(4, 3, 2);
        let mut expected = video(&latent);
        let mut log = ProgressLog::default();
        vae.decode_with(&latent, &mut expected, &with_progress(&mut log)).unwrap();
        for stop_at in (1..=log.calls).step_by(7) {
            let mut log = ProgressLog { stop_at, ..ProgressLog::default() };
            match vae.decode_with(&latent, &mut video(&latent), &with_progress(&mut log)) {
                Err(stopped) => {
                    stopped.says(VVAE_ERROR_CANCELLED, &["cancelled"]);
                    assert_eq!(log.calls, stop_at, "no progress call after a stop");
                }
                // Long operations of a busy machine have more calls than short ones.
                Ok(_) => assert!(log.calls < stop_at && stop_at > 20, "stopped at call {stop_at} of {}", log.calls),
            }
            let mut again = video(&latent);
            vae.decode(&latent, &mut again).unwrap();
            assert!(again.bytes() == expected.bytes(), "after a stop at call {stop_at}");
        }
    });
}

#[test]
fn cancel_from_another_thread_stops_a_large_frame_within_a_second() {
    let vae = Vae::open(&small()).unwrap();
    // A 1080p frame takes several seconds, and its largest convolution nearly one.
    let latent = latent(3, 135, 240);
    let mut out = video(&latent);
    let attempt = || {
        let computing = AtomicBool::new(false);
        let user = std::ptr::from_ref(&computing).cast_mut().cast();
        let run = vvae_run_info { progress: Some(tell_of_work), progress_user: user, ..run_info() };
        std::thread::scope(|scope| {
            let (vae, computing) = (&vae, &computing);
            let canceller = scope.spawn(move || {
                while !computing.load(SeqCst) {
                    std::thread::sleep(Duration::from_millis(5));
                }
                // Into the large frames.
                std::thread::sleep(Duration::from_millis(300));
                vae.cancel().unwrap();
                Instant::now()
            });
            vae.decode_with(&latent, &mut out, &run).unwrap_err().says(VVAE_ERROR_CANCELLED, &[]);
            let returned = Instant::now();
            returned.saturating_duration_since(canceller.join().unwrap())
        })
    };
    let took = least_time(SECOND, attempt);
    assert!(took < SECOND, "it took {took:?}");
    let latent = self::latent(1, 2, 2);
    vae.decode(&latent, &mut video(&latent)).unwrap();
}

#[test]
fn cancel_between_runs_has_no_effect() {
    on_every_device(|_| {
        let vae = Vae::open(&small()).unwrap();
        vae.cancel().unwrap();
        let latent = latent(2, 2, 2);
        vae.decode(&latent, &mut video(&latent)).unwrap();
    });
}

/// Frame `t` of a compact video.
fn frame(buffer: &Buffer, t: i64) -> Vec<f32> {
    let [_, _, frames, h, w] = buffer.shape;
    let planes = (0..3).map(|c| buffer.f32()[((c * frames + t) * h * w) as usize..][..(h * w) as usize].to_vec());
    planes.collect::<Vec<_>>().concat()
}

/// Pulls a stream, cancels every pull after `stop_at` progress calls, and compares the output.
fn pull_with_cancels(vae: &Vae, whole: &Buffer, stop_at: u64) {
    let mut expected = video(whole);
    vae.decode(whole, &mut expected).unwrap();
    let stream = vae.stream("decode", whole.shape).unwrap();
    assert_eq!(stream.push(Some(&whole.tensor())).unwrap(), (VVAE_OK, whole.shape[2]));
    stream.push(None).unwrap();
    let [_, _, frames, h, w] = expected.shape;
    let (mut pulled, mut cancels) = (0, 0);
    let room = Buffer::new(VVAE_DTYPE_F32, [1, 3, 2, h, w]);
    loop {
        let mut log = ProgressLog { stop_at, ..ProgressLog::default() };
        let mut written = 0;
        let run = with_progress(&mut log);
        // SAFETY: all pointers are valid.
        let status = unsafe { (crate::common::api().vvae_stream_pull)(stream.s, &room.tensor(), &run, &mut written) };
        for t in 0..written {
            assert!(frame(&room, t) == frame(&expected, pulled + t), "frame {}", pulled + t);
        }
        pulled += written;
        match status {
            VVAE_OK => {}
            VVAE_ERROR_CANCELLED => cancels += 1,
            VVAE_END => break,
            other => panic!("{other}"),
        }
    }
    assert_eq!(pulled, frames);
    assert!(cancels > 3, "{cancels}");
}

#[test]
fn cancelled_stream_continues_where_it_stopped() {
    on_every_device(|_| pull_with_cancels(&Vae::open(&small()).unwrap(), &latent(3, 2, 3), 5));
}

#[test]
fn cancelled_tiled_stream_blends_nothing_twice() {
    on_every_device(|_| {
        let vae = Vae::open(&small()).unwrap();
        for (key, value) in [("decode_tiled", "true"), ("decode_tile_size", "64"), ("decode_tile_overlap", "16")] {
            vae.configure(key, value).unwrap();
        }
        // Every step, blends too, is followed by a progress call, so each is stopped once.
        pull_with_cancels(&vae, &latent(2, 10, 11), 1);
    });
}

/// A host's allocator that blocks until opened, so that a load of weights takes as long as a test wants.
#[derive(Default)]
struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Default)]
struct GateState {
    waiting: u32,
    open: bool,
}

impl Gate {
    /// A handle with this allocator. It shares weights with others of the same gate.
    fn vae(&self) -> Vae {
        let weights = CString::new(small().to_str().unwrap()).unwrap();
        let user = std::ptr::from_ref(self).cast_mut().cast();
        let info = vvae_create_info { alloc: Some(take), free: Some(give), alloc_user: user, ..create_info(&weights) };
        Vae::create(&info).unwrap()
    }

    fn pass(&self) {
        let mut state = self.state.lock().unwrap();
        state.waiting += 1;
        self.changed.notify_all();
        drop(self.changed.wait_while(state, |state| !state.open).unwrap());
    }

    /// Returns when a thread waits for memory.
    fn await_waiter(&self) {
        drop(self.changed.wait_while(self.state.lock().unwrap(), |state| state.waiting == 0).unwrap());
    }

    fn open(&self) {
        self.state.lock().unwrap().open = true;
        self.changed.notify_all();
    }
}

fn block(bytes: u64) -> Layout {
    Layout::from_size_align(bytes as usize, 64).unwrap()
}

unsafe extern "C" fn take(user: *mut c_void, bytes: u64, align: u64) -> *mut c_void {
    assert!(align <= 64 && bytes > 0);
    // SAFETY: every test passes a gate that outlives its handles, and the layout is not empty.
    unsafe {
        (*user.cast::<Gate>()).pass();
        alloc(block(bytes)).cast()
    }
}

unsafe extern "C" fn give(_: *mut c_void, memory: *mut c_void, bytes: u64) {
    // SAFETY: `take` made it with this layout.
    unsafe { dealloc(memory.cast(), block(bytes)) };
}

/// Cancels a call that waits for another handle to load the weights.
fn cancel_while_waiting(call: impl Fn(&Vae) -> Result<(), Failure> + Sync) {
    let took = least_time(SECOND, || time_to_cancel_while_waiting(&call));
    assert!(took < SECOND, "it took {took:?}");
}

fn time_to_cancel_while_waiting(call: &(impl Fn(&Vae) -> Result<(), Failure> + Sync)) -> Duration {
    let gate = Gate::default();
    let (loading, waiting) = (gate.vae(), gate.vae());
    // Assert only after the gate is open: a failure before would block forever.
    let (loaded, stopped, unaffected, took) = std::thread::scope(|scope| {
        let loads = scope.spawn(|| call(&loading));
        gate.await_waiter();
        let waits = scope.spawn(|| call(&waiting));
        std::thread::sleep(Duration::from_millis(100));
        let cancelled = Instant::now();
        // Repeated, because a cancel before the call has no effect.
        while !waits.is_finished() && cancelled.elapsed() < Duration::from_secs(120) {
            let _ = waiting.cancel();
            std::thread::sleep(Duration::from_millis(5));
        }
        let (took, unaffected) = (cancelled.elapsed(), !loads.is_finished());
        gate.open();
        (loads.join().unwrap(), waits.join().unwrap(), unaffected, took)
    });
    stopped.unwrap_err().says(VVAE_ERROR_CANCELLED, &["cancelled"]);
    assert!(unaffected, "the other handle still loads");
    loaded.unwrap();
    call(&waiting).unwrap();
    took
}

#[test]
fn cancel_stops_a_run_that_waits_for_another_handles_load() {
    let latent = latent(2, 2, 2);
    cancel_while_waiting(|vae| vae.decode(&latent, &mut video(&latent)).map(drop));
}

#[test]
fn cancel_stops_a_stream_that_waits_for_another_handles_load() {
    cancel_while_waiting(|vae| vae.stream("decode", [1, 16, 0, 2, 2]).map(drop));
}

#[test]
fn cancel_stops_a_stream_open_that_loads() {
    let gate = Gate::default();
    let vae = gate.vae();
    let open = || vae.stream("encode", [1, 3, 0, 16, 16]).map(drop);
    let stopped = std::thread::scope(|scope| {
        let opens = scope.spawn(open);
        gate.await_waiter();
        let cancelled = vae.cancel();
        gate.open();
        cancelled.and(opens.join().unwrap())
    });
    stopped.unwrap_err().says(VVAE_ERROR_CANCELLED, &["cancelled"]);
    assert_eq!(vae.memory().streams, 0);
    vae.cancel().unwrap();
    open().expect("a cancel between calls has no effect");
}
