//! The ABI around a mock session: panics, callbacks and races that no host can cause from outside.

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_void};
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

use super::facts::ModelFacts;
use super::log::Log;
use super::table::{self, Handle};
use super::*;
use crate::error::{Error, Result};
use crate::exec::{
    Allocators, Call, Control, FrameStream, JobShape, Ledger, OpenModel, Opening, Outputs, Progress, Pull, Session,
    Settings, Timelines, Trim,
};
use crate::ir::{Rates, Shape, TensorDevice, View};
use crate::model::{Checkpoint, Direction, FrameRange};
use crate::node;
use crate::report::PlanReport;
use crate::testing::golden;

/// Panics where a test wants it; counts sessions and streams that are alive.
struct Mock {
    ledger: Arc<Ledger>,
    alive: Arc<AtomicU32>,
    panics_in_drop: bool,
}

impl Mock {
    fn open(alive: &Arc<AtomicU32>, log: vvae_log_fn, panics_in_drop: bool) -> *mut vvae {
        alive.fetch_add(1, Ordering::SeqCst);
        let mock = Mock { ledger: Arc::default(), alive: alive.clone(), panics_in_drop };
        let checkpoint = &Checkpoint::open(&golden("small")).unwrap();
        let opening = Opening { checkpoint, allocators: Allocators::default(), settings: node::defaults() };
        let opened = OpenModel::new(opening, vec![TensorDevice::Cpu], Box::new(mock));
        table::insert(Handle::new(opened, ModelFacts::default(), Log { callback: log, user: null_mut() }))
    }
}

impl Drop for Mock {
    fn drop(&mut self) {
        self.alive.fetch_sub(1, Ordering::SeqCst);
        assert!(!self.panics_in_drop, "a panic in drop");
    }
}

impl Session for Mock {
    fn configure(&mut self, _: Settings) -> Result<()> {
        Ok(())
    }
    fn plan(&self, _: &JobShape, timelines: Timelines, _: &AtomicBool) -> Result<PlanReport> {
        assert!(timelines.is_none(), "a panic in a timeline");
        panic!("a panic with {}", "an argument");
    }
    fn run(&mut self, _: &Call, control: &mut Control) -> Result<PlanReport> {
        if let Some(progress) = &mut control.progress {
            progress(Progress { done: 0, total: 1, stage: "encode" });
        }
        if control.cancel.load(Ordering::Relaxed) { Err(Error::Cancelled) } else { Ok(plan()) }
    }
    fn open_stream(&mut self, _: &JobShape, control: &Control) -> Result<Box<dyn FrameStream>> {
        if let Some(v) = CANCELLED_HANDLE.get() {
            // SAFETY: null, or a handle.
            unsafe { vvae_cancel(std::ptr::without_provenance_mut(v)) };
        }
        crate::error::check_cancel(control.cancel)?;
        self.alive.fetch_add(1, Ordering::SeqCst);
        Ok(Box::new(MockStream(self.alive.clone())))
    }
    fn ledger(&self) -> Arc<Ledger> {
        self.ledger.clone()
    }
    fn trim(&mut self, _: Trim) {
        panic!("a panic");
    }
}

struct MockStream(Arc<AtomicU32>);

thread_local! {
    /// The handle that is cancelled as soon as a stream is being opened.
    static CANCELLED_HANDLE: Cell<Option<usize>> = const { Cell::new(None) };
}

impl Drop for MockStream {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl FrameStream for MockStream {
    fn plan(&self) -> PlanReport {
        plan()
    }
    fn push(&mut self, input: Option<&View>) -> Result<u64> {
        assert!(input.is_some(), "a panic in a stream");
        Ok(0)
    }
    fn pull(&mut self, _: &Outputs, _: &mut Control, _: &mut u64) -> Result<Pull> {
        Ok(Pull::Ended)
    }
}

/// A plan of an image in two tiles.
fn plan() -> PlanReport {
    PlanReport {
        direction: Direction::Encode,
        absent: None,
        arithmetic: String::new(),
        range: FrameRange::WHOLE,
        input: Shape::new(1, 3, 1, 8, 8),
        output: Shape::new(1, 16, 1, 1, 1),
        device_bytes: 1000,
        host_bytes: 200,
        offloaded_bytes: 0,
        moved_per_frame: 0,
        seconds: 0.5,
        weight_bytes: 600,
        offloaded_weight_bytes: 0,
        workspace_bytes: 400,
        slice_frames: 4,
        chunk_frames: vec![1],
        rematerialised_frames: vec![0],
        rematerialised_hidden: vec![0],
        tiles: (1, 2),
        tile_size: (8, 4),
        tile_overlap: 0,
        exact: false,
        cache: crate::ir::CacheFormat::Exact,
        rates: Rates { products: 1e12, memory: 1e11, copies: 1e10, copy_contention: 0.0 },
        division: None,
    }
}

const SHAPE: [i64; 5] = [1, 3, 1, 8, 8];

fn tensor() -> vvae_tensor {
    vvae_tensor {
        data: std::ptr::without_provenance_mut(64),
        device_type: VVAE_DEVICE_CPU,
        device_id: 0,
        ndim: 5,
        dtype: VVAE_DTYPE_F32,
        shape: SHAPE.as_ptr(),
        strides: std::ptr::null(),
        byte_offset: 0,
    }
}

fn error(v: *mut vvae) -> String {
    let mut text = [0; 512];
    // SAFETY: the buffer has the capacity given.
    unsafe { vvae_error(v, text.as_mut_ptr(), text.len() as u64) };
    // SAFETY: `vvae_error` ends it with a NUL.
    unsafe { CStr::from_ptr(text.as_ptr()) }.to_str().unwrap().into()
}

fn open_stream(v: *mut vvae) -> *mut vvae_stream {
    let mut s = null_mut();
    // SAFETY: every pointer is valid.
    assert_eq!(unsafe { vvae_stream_open(v, c"encode".as_ptr(), SHAPE.as_ptr(), &mut s) }, VVAE_OK);
    s
}

fn free(v: *mut vvae) -> i32 {
    // SAFETY: any number is allowed.
    unsafe { vvae_free(v) }
}

fn trim(v: *mut vvae, what: u32) -> i32 {
    // SAFETY: any number is allowed, and any flags.
    unsafe { vvae_trim(v, what) }
}

/// `run`: may be null.
fn encode(v: *mut vvae, run: *const vvae_run_info) -> i32 {
    // SAFETY: the tensors share no memory, and the mock touches no element.
    unsafe { vvae_encode(v, &tensor(), &vvae_tensor { byte_offset: 4096, ..tensor() }, run) }
}

fn end_stream(s: *mut vvae_stream) -> i32 {
    // SAFETY: null is allowed.
    unsafe { vvae_stream_push(s, std::ptr::null(), null_mut()) }
}

fn close(s: *mut vvae_stream) -> i32 {
    // SAFETY: any number is allowed.
    unsafe { vvae_stream_close(s) }
}

#[test]
fn a_panic_breaks_the_handle_and_nothing_else() {
    let alive = Arc::new(AtomicU32::new(0));
    let v = Mock::open(&alive, None, false);
    let s = open_stream(v);
    assert_eq!(alive.load(Ordering::SeqCst), 2);
    assert_eq!(trim(v, 1), VVAE_ERROR_INTERNAL);
    assert_eq!(error(v), "internal error: a panic");
    assert_eq!(alive.load(Ordering::SeqCst), 0, "what the panic went through is gone at once");

    // SAFETY: handles and texts.
    assert_eq!(unsafe { vvae_configure(v, c"seed".as_ptr(), c"1".as_ptr()) }, VVAE_ERROR_STATE);
    assert!(error(v).contains("broken"), "{}", error(v));
    // SAFETY: a handle.
    assert_eq!(unsafe { vvae_cancel(v) }, VVAE_ERROR_STATE);
    assert_eq!(end_stream(s), VVAE_ERROR_STATE);
    // A stream of a broken handle can be closed, once; a broken handle can be freed, once.
    assert_eq!((close(s), close(s)), (VVAE_OK, VVAE_ERROR_STATE));
    assert_eq!((free(v), free(v)), (VVAE_OK, VVAE_ERROR_STATE));
    assert!(error(v).contains("is not an open handle"), "{}", error(v));
}

#[test]
fn a_panic_with_arguments_keeps_its_words() {
    let v = Mock::open(&Arc::default(), None, false);
    // SAFETY: integers only.
    let mut info = unsafe { std::mem::zeroed::<vvae_plan_info>() };
    info.struct_size = size_of::<vvae_plan_info>() as u32;
    // SAFETY: every pointer is valid or null.
    let status = unsafe { vvae_plan(v, c"encode".as_ptr(), SHAPE.as_ptr(), &mut info, null_mut(), 0) };
    assert_eq!((status, error(v).as_str()), (VVAE_ERROR_INTERNAL, "internal error: a panic with an argument"));
    assert_eq!(free(v), VVAE_OK);
}

#[test]
fn a_panic_in_drop_stops_at_the_boundary_too() {
    let alive = Arc::new(AtomicU32::new(0));
    let v = Mock::open(&alive, None, true);
    assert_eq!((trim(v, 1), free(v)), (VVAE_ERROR_INTERNAL, VVAE_OK));
    let v = Mock::open(&alive, None, true);
    assert_eq!((free(v), free(v)), (VVAE_ERROR_INTERNAL, VVAE_ERROR_STATE));
    assert_eq!(alive.load(Ordering::SeqCst), 0);
}

#[test]
fn a_panic_in_a_stream_breaks_its_handle() {
    let v = Mock::open(&Arc::default(), None, false);
    let s = open_stream(v);
    assert_eq!(end_stream(s), VVAE_ERROR_INTERNAL);
    assert!(error(v).contains("a panic in a stream"));
    assert_eq!((free(v), close(s)), (VVAE_OK, VVAE_ERROR_STATE), "the stream goes with its handle");
}

/// Does, from within a run, what is refused there and what is not.
unsafe extern "C" fn meddle(v: *mut c_void, _: u64, _: u64, stage: *const c_char) -> i32 {
    let v = v.cast::<vvae>();
    // SAFETY: the stage is a text.
    assert_eq!(unsafe { CStr::from_ptr(stage) }, c"encode");
    let mut memory = vvae_memory_info { struct_size: 40, streams: 0, now: 0, peak: 0, reserved: 0, host: 0 };
    assert_eq!(free(v), VVAE_ERROR_STATE);
    assert_eq!(encode(v, std::ptr::null()), VVAE_ERROR_STATE);
    assert!(error(v).contains("busy"), "{}", error(v));
    // SAFETY: a handle, and a struct as long as it says.
    assert_eq!((unsafe { vvae_memory(v, &mut memory) }, memory.struct_size), (VVAE_OK, 40));
    // SAFETY: a handle.
    assert_eq!(unsafe { vvae_cancel(v) }, VVAE_OK);
    0
}

#[test]
fn a_callback_may_look_and_cancel_but_not_run() {
    let v = Mock::open(&Arc::default(), None, false);
    let mut run = vvae_run_info {
        struct_size: size_of::<vvae_run_info>() as u32,
        flags: 0,
        cuda_stream: null_mut(),
        progress: Some(meddle),
        progress_user: v.cast(),
        logvar: std::ptr::null(),
    };
    assert_eq!(encode(v, &run), VVAE_ERROR_CANCELLED);
    assert!(error(v).contains("cancelled"));
    run.progress = None;
    assert_eq!(encode(v, &run), VVAE_OK, "a cancel is for one call only");
    assert_eq!(free(v), VVAE_OK);
}

#[test]
fn a_cancel_right_after_the_start_of_a_call_acts() {
    let v = Mock::open(&Arc::default(), None, false);
    let (input, mut s) = ([1, 3, 0, 8, 8], null_mut());
    CANCELLED_HANDLE.set(Some(v.addr()));
    // SAFETY: a handle, a text, a shape and where the stream goes.
    let status = unsafe { vvae_stream_open(v, c"encode".as_ptr(), input.as_ptr(), &mut s) };
    CANCELLED_HANDLE.set(None);
    assert_eq!((status, free(v)), (VVAE_ERROR_CANCELLED, VVAE_OK));
}

#[test]
fn a_log_costs_no_second_plan() {
    // The mock's plan panics; a run plans by itself.
    let v = Mock::open(&Arc::default(), Some(ignore_log), false);
    assert_eq!((encode(v, std::ptr::null()), free(v)), (VVAE_OK, VVAE_OK));
}

unsafe extern "C" fn ignore_log(_: *mut c_void, _: i32, _: *const c_char) {}

static LOGGED: AtomicU32 = AtomicU32::new(0);

unsafe extern "C" fn count_log(_: *mut c_void, level: i32, message: *const c_char) {
    // SAFETY: the message is a text.
    assert!(!unsafe { CStr::from_ptr(message) }.is_empty());
    LOGGED.fetch_add(1 << (8 * level), Ordering::SeqCst);
}

#[test]
fn failures_reach_the_log() {
    let v = Mock::open(&Arc::default(), Some(count_log), false);
    assert_eq!([0, 8, 1].map(|what| trim(v, what)), [VVAE_ERROR_ARGUMENT, VVAE_ERROR_ARGUMENT, VVAE_ERROR_INTERNAL]);
    assert_eq!(free(v), VVAE_OK);
    assert_eq!(LOGGED.load(Ordering::SeqCst), 1 << (8 * VVAE_LOG_ERROR) | 2 << (8 * VVAE_LOG_WARNING));
}

/// Numbers of handles that other threads free at the same time find an open handle or none.
#[test]
fn threads_open_use_and_free_handles_at_once() {
    let rounds = if cfg!(miri) { 3 } else { 300 };
    let (alive, known) = (Arc::default(), [const { AtomicUsize::new(0) }; 3]);
    let work = |mine: &AtomicUsize| {
        for _ in 0..rounds {
            let v = Mock::open(&alive, None, false);
            mine.store(v.addr(), Ordering::Relaxed);
            for other in &known {
                let v = std::ptr::without_provenance_mut(other.load(Ordering::Relaxed));
                let struct_size = size_of::<vvae_memory_info>() as u32;
                let mut info = vvae_memory_info { struct_size, streams: 0, now: 0, peak: 0, reserved: 0, host: 0 };
                // SAFETY: null, or a number that is or was a handle; texts and a struct of the right size.
                let found = unsafe {
                    [vvae_cancel(v), vvae_configure(v, c"seed".as_ptr(), c"7".as_ptr()), vvae_memory(v, &mut info)]
                };
                let expected = if v.is_null() { VVAE_ERROR_ARGUMENT } else { VVAE_ERROR_STATE };
                assert!(found.iter().all(|status| [VVAE_OK, expected].contains(status)), "{found:?}");
            }
            // Only this thread frees it, so an error says that another one uses it.
            // SAFETY: an open handle.
            while unsafe { vvae_free(v) } != VVAE_OK {
                std::thread::yield_now();
            }
        }
    };
    std::thread::scope(|scope| known.iter().for_each(|mine| drop(scope.spawn(|| work(mine)))));
    assert_eq!(alive.load(Ordering::SeqCst), 0, "sessions are left");
}
