//! A plan's bytes are known before the job runs, and the job takes no more.

use std::alloc::{Layout, alloc, dealloc};
use std::ffi::{CStr, CString, c_char, c_void};
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::SeqCst};

use crate::common::{Buffer, Random, Vae, create_info, golden, on_every_device, run_info, small};
use video_vae::capi::*;

/// A host's allocator that counts, and fails on demand.
#[derive(Default)]
struct Counter {
    now: AtomicU64,
    peak: AtomicU64,
    calls: AtomicU64,
    /// Calls until the one that fails; negative: never.
    fails_at: AtomicI64,
}

impl Counter {
    fn new() -> Counter {
        Counter { fails_at: AtomicI64::new(-1), ..Counter::default() }
    }
}

fn layout(bytes: u64, align: u64) -> Layout {
    Layout::from_size_align(bytes as usize, align as usize).unwrap()
}

const ALIGN: u64 = 64;

unsafe extern "C" fn take(user: *mut c_void, bytes: u64, align: u64) -> *mut c_void {
    // SAFETY: every test passes a counter that outlives its handles.
    let counter = unsafe { &*user.cast::<Counter>() };
    counter.calls.fetch_add(1, SeqCst);
    if counter.fails_at.fetch_sub(1, SeqCst) == 0 {
        return std::ptr::null_mut();
    }
    assert!(align <= ALIGN && bytes > 0);
    let now = counter.now.fetch_add(bytes, SeqCst) + bytes;
    counter.peak.fetch_max(now, SeqCst);
    // SAFETY: the layout is not empty.
    unsafe { alloc(layout(bytes, ALIGN)).cast() }
}

unsafe extern "C" fn give(user: *mut c_void, block: *mut c_void, bytes: u64) {
    // SAFETY: as in `take`, which made the block with this layout.
    unsafe {
        (*user.cast::<Counter>()).now.fetch_sub(bytes, SeqCst);
        dealloc(block.cast(), layout(bytes, ALIGN));
    }
}

fn open_counted(path: &std::path::Path, counter: &Counter) -> Vae {
    let weights = CString::new(path.to_str().unwrap()).unwrap();
    let user = std::ptr::from_ref(counter).cast_mut().cast();
    Vae::create(&vvae_create_info { alloc: Some(take), free: Some(give), alloc_user: user, ..create_info(&weights) })
        .unwrap()
}

fn noise(shape: [i64; 5]) -> Buffer {
    Buffer::random(&mut Random(5), shape)
}

fn run(vae: &Vae, node: &str, input: [i64; 5], output: [i64; 5]) -> Result<i32, crate::common::Failure> {
    let (input, output) = (noise(input), Buffer::new(VVAE_DTYPE_F32, output));
    vae.run(node, &input.tensor(), &output.tensor(), &run_info())
}

const MODELS: [&str; 4] =
    ["small.safetensors", "medium.safetensors", "families/wan21.safetensors", "families/wan22.safetensors"];

/// (node, input, output) for a clip of this many latent frames, rows and columns.
fn shapes(node: &'static str, batch: i64, latents: i64, rows: i64, columns: i64) -> (&'static str, [i64; 5], [i64; 5]) {
    let latent = [batch, 16, latents, rows, columns];
    let video = [batch, 3, 4 * latents - 3, 8 * rows, 8 * columns];
    if node == "encode" { (node, video, latent) } else { (node, latent, video) }
}

#[test]
fn planned_bytes_are_what_a_run_allocates() {
    let mut random = Random(1);
    for round in 0..60 {
        let node = random.pick(&["encode", "decode"]);
        let (batch, latents) = (1 + random.below(2) as i64, 1 + random.below(9) as i64);
        let (rows, columns) = (1 + random.below(12) as i64, 1 + random.below(12) as i64);
        let (node, input, output) = shapes(node, batch, latents, rows, columns);
        let weights = golden(random.pick(&MODELS));
        let counter = Counter::new();
        let vae = open_counted(&weights, &counter);
        let [input, output] = [input, output].map(|shape| vae.fitted(shape));
        vae.configure("threads", &(1 + random.below(4)).to_string()).unwrap();
        vae.configure("slice_frames", random.pick(&["auto", "1", "3"])).unwrap();
        vae.configure("chunk_frames", random.pick(&["auto", "1", "2"])).unwrap();
        if random.one_in(3) {
            vae.configure(&format!("{node}_tiled"), "true").unwrap();
            vae.configure(&format!("{node}_tile_size"), "64").unwrap();
            vae.configure(&format!("{node}_tile_overlap"), random.pick(&["0", "16", "40"])).unwrap();
        }
        let (plan, text) = vae.plan(node, input).unwrap();
        run(&vae, node, input, output).unwrap();
        let what = format!("round {round}: {node} {input:?}\n{text}");
        for (measure, peak) in [("allocator", counter.peak.load(SeqCst)), ("vvae_memory", vae.memory().peak)] {
            assert!(peak <= plan.device_bytes, "{measure}: {peak}, planned {} in {what}", plan.device_bytes);
            assert!(
                peak * 10 >= plan.device_bytes * 8,
                "{measure}: {peak} is less than 80 % of {} in {what}",
                plan.device_bytes
            );
        }
        assert_eq!(counter.peak.load(SeqCst), plan.weight_bytes + plan.workspace_bytes, "{what}");
        drop(vae);
        assert_eq!(counter.now.load(SeqCst), 0, "all memory is freed");
    }
}

#[test]
fn planned_bytes_hold_on_every_device() {
    on_every_device(|device| {
        let mut random = Random(8);
        for _ in 0..20 {
            let node = random.pick(&["encode", "decode"]);
            let (latents, rows, columns) =
                (1 + random.below(6) as i64, 1 + random.below(9) as i64, 1 + random.below(9) as i64);
            let (node, input, output) = shapes(node, 1, latents, rows, columns);
            let vae = Vae::open(&golden(random.pick(&MODELS))).unwrap();
            let [input, output] = [input, output].map(|shape| vae.fitted(shape));
            vae.configure("slice_frames", random.pick(&["auto", "1", "3"])).unwrap();
            let (plan, text) = vae.plan(node, input).unwrap();
            run(&vae, node, input, output).unwrap();
            let memory = vae.memory();
            assert!(memory.peak <= plan.device_bytes, "{} on {device}: {text}", memory.peak);
            assert!(memory.peak * 10 >= plan.device_bytes * 8, "{} on {device}: {text}", memory.peak);
            assert!(device == "cpu" || memory.host == plan.host_bytes, "{} on {device}: {text}", memory.host);
        }
    });
}

#[test]
fn planned_bytes_do_not_grow_with_the_clip() {
    let measure = |latents| {
        let counter = Counter::new();
        let vae = open_counted(&small(), &counter);
        let (node, input, output) = shapes("decode", 1, latents, 4, 4);
        run(&vae, node, input, output).unwrap();
        (output[2], counter.peak.load(SeqCst))
    };
    // Clips of fewer slices than the planner rehearses may take less.
    let (short, long) = (measure(61), measure(121));
    assert_eq!((short.0, long.0), (241, 481));
    assert!(long.1 <= short.1, "481 frames took {}, 241 frames {}", long.1, short.1);
}

#[test]
fn stream_memory_is_constant() {
    let counter = Counter::new();
    let vae = open_counted(&small(), &counter);
    // 0 frames: the plan of a stream.
    let (plan, _) = vae.plan("decode", [1, 16, 0, 3, 3]).unwrap();
    let stream = vae.stream("decode", [1, 16, 0, 3, 3]).unwrap();
    let held = counter.now.load(SeqCst);
    let (latent, video) = (noise([1, 16, 1, 3, 3]), Buffer::new(VVAE_DTYPE_F32, [1, 3, 4, 24, 24]));
    let mut frames = 0;
    for _ in 0..300 {
        while stream.push(Some(&latent.tensor())).unwrap().1 == 0 {
            frames += stream.pull(&video.tensor(), None).unwrap().1;
        }
        assert_eq!(counter.now.load(SeqCst), held);
    }
    assert!(frames > 1000, "{frames}");
    assert_eq!(held, plan.weight_bytes + plan.workspace_bytes);
    assert_eq!(counter.peak.load(SeqCst), held);
    drop(stream);
    assert_eq!(counter.now.load(SeqCst), plan.weight_bytes);
}

#[test]
fn memory_limit_holds_down_to_the_smallest_plan() {
    let (node, input, output) = shapes("decode", 1, 2, 16, 20);
    let counter = Counter::new();
    let vae = open_counted(&small(), &counter);
    vae.configure("decode_tile_overlap", "32").unwrap();
    let free = vae.plan(node, input).unwrap().0.device_bytes;
    let (mut tiled, mut limit) = (0, free);
    let smallest = loop {
        vae.configure("memory_limit", &limit.to_string()).unwrap();
        match vae.plan(node, input) {
            Ok((plan, _)) => {
                run(&vae, node, input, output).unwrap();
                assert!(vae.memory().now <= limit, "{} of {limit}", vae.memory().now);
                tiled += u32::from(plan.exact == 0);
                limit = plan.device_bytes - 1;
            }
            Err(refused) => {
                refused.says(VVAE_ERROR_MEMORY, &["memory_limit", "smallest plan"]);
                assert_eq!(run(&vae, node, input, output).unwrap_err(), refused);
                break limit + 1;
            }
        }
    };
    assert!(tiled > 0, "tiles were never tried between {free} and {smallest}");
}

#[test]
fn memory_limit_covers_both_directions() {
    let vae = Vae::open(&small()).unwrap();
    let jobs = ["encode", "decode"].map(|node| shapes(node, 1, 2, 3, 4));
    let plans = jobs.map(|(node, input, _)| vae.plan(node, input).unwrap().0);
    let limit = plans[0].device_bytes.max(plans[1].device_bytes);
    assert!(limit < plans[0].weight_bytes + plans[1].device_bytes);
    vae.configure("memory_limit", &limit.to_string()).unwrap();
    for (node, input, output) in [jobs[0], jobs[1], jobs[0]] {
        run(&vae, node, input, output).unwrap();
        assert!(vae.memory().peak <= limit, "{} of {limit} after {node}", vae.memory().peak);
    }
}

#[test]
fn handle_survives_every_failing_allocation() {
    let (node, input, output) = shapes("decode", 1, 2, 3, 4);
    let counter = Counter::new();
    let (expected, calls) = {
        let vae = open_counted(&small(), &counter);
        let mut video = Buffer::new(VVAE_DTYPE_F32, output);
        vae.decode(&noise(input), &mut video).unwrap();
        (video.bytes().to_vec(), counter.calls.load(SeqCst))
    };
    assert!(calls > 10);
    for fails in 0..calls {
        counter.fails_at.store(fails as i64, SeqCst);
        let vae = open_counted(&small(), &counter);
        run(&vae, node, input, output).unwrap_err().says(VVAE_ERROR_MEMORY, &["bytes"]);
        // The same handle works when memory is available again.
        counter.fails_at.store(-1, SeqCst);
        let mut video = Buffer::new(VVAE_DTYPE_F32, output);
        vae.decode(&noise(input), &mut video).unwrap();
        assert!(video.bytes() == expected, "after call {fails} failed");
        drop(vae);
        assert_eq!(counter.now.load(SeqCst), 0);
    }
}

#[test]
fn trim_and_free_return_memory() {
    let counter = Counter::new();
    let vae = open_counted(&small(), &counter);
    let (node, input, output) = shapes("encode", 1, 2, 3, 4);
    run(&vae, node, input, output).unwrap();
    let plan = vae.plan(node, input).unwrap().0;
    assert_eq!(counter.now.load(SeqCst), plan.device_bytes);
    assert_eq!(vae.memory().reserved, plan.device_bytes);
    vae.trim(VVAE_TRIM_WORKSPACE).unwrap();
    assert_eq!((counter.now.load(SeqCst), vae.memory().now), (plan.weight_bytes, plan.weight_bytes));
    vae.trim(VVAE_TRIM_WEIGHTS).unwrap();
    assert_eq!((counter.now.load(SeqCst), vae.memory().now, vae.memory().reserved), (0, 0, 0));
    run(&vae, node, input, output).unwrap();
    drop(vae);
    assert_eq!(counter.now.load(SeqCst), 0);
}

#[test]
fn handles_of_one_file_share_weights() {
    let counter = Counter::new();
    let (one, two) = (open_counted(&small(), &counter), open_counted(&small(), &counter));
    let (node, input, output) = shapes("decode", 1, 2, 3, 4);
    run(&one, node, input, output).unwrap();
    let plan = one.plan(node, input).unwrap().0;
    run(&two, node, input, output).unwrap();
    assert_eq!(counter.now.load(SeqCst), plan.weight_bytes + 2 * plan.workspace_bytes);
    drop(one);
    assert_eq!(counter.now.load(SeqCst), plan.device_bytes);
    // Another allocator means other memory.
    let other = Counter::new();
    let three = open_counted(&small(), &other);
    run(&three, node, input, output).unwrap();
    assert_eq!(other.now.load(SeqCst), plan.device_bytes);
}

#[test]
fn what_a_closed_stream_leaves_is_kept_for_the_next_call() {
    let counter = Counter::new();
    let vae = open_counted(&small(), &counter);
    let (node, input, _) = shapes("decode", 1, 2, 3, 4);
    let stream = vae.stream(node, input).unwrap();
    assert_eq!(vae.memory().reserved, 0, "the stream uses it");
    drop(stream);
    let memory = vae.memory();
    assert!(memory.now > 0 && memory.now == counter.now.load(SeqCst));
    assert_eq!(memory.reserved, memory.now);
}

#[test]
fn weights_that_a_stream_keeps_count_once() {
    let counter = Counter::new();
    let vae = open_counted(&small(), &counter);
    let (node, input, output) = shapes("decode", 1, 2, 3, 4);
    let stream = vae.stream(node, input).unwrap();
    vae.trim(VVAE_TRIM_WORKSPACE | VVAE_TRIM_WEIGHTS).unwrap();
    run(&vae, node, input, output).unwrap();
    assert_eq!(vae.memory().now, counter.now.load(SeqCst));
    drop(stream);
    vae.trim(VVAE_TRIM_WORKSPACE | VVAE_TRIM_WEIGHTS).unwrap();
    assert_eq!((vae.memory().now, counter.now.load(SeqCst)), (0, 0));
}

/// The handle that a run is of, and the most that was reserved meanwhile.
struct Watched<'a>(&'a Vae, u64);

unsafe extern "C" fn watch_reserved(user: *mut c_void, _: u64, _: u64, stage: *const c_char) -> i32 {
    // SAFETY: the test passes what it watches, and a stage is a C string.
    let (watched, stage) = unsafe { (&mut *user.cast::<Watched>(), CStr::from_ptr(stage)) };
    if stage == c"decode" {
        watched.1 = watched.1.max(watched.0.memory().reserved);
    }
    0
}

#[test]
fn what_a_run_uses_is_not_reserved() {
    let vae = Vae::open(&small()).unwrap();
    let (node, input, output) = shapes("decode", 1, 2, 3, 4);
    let (input, output) = (noise(input), Buffer::new(VVAE_DTYPE_F32, output));
    for _ in 0..2 {
        let mut watched = Watched(&vae, 0);
        let progress_user = (&raw mut watched).cast();
        let info = vvae_run_info { progress: Some(watch_reserved), progress_user, ..run_info() };
        vae.run(node, &input.tensor(), &output.tensor(), &info).unwrap();
        assert_eq!(watched.1, 0);
    }
}
