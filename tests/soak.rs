//! Random work on several handles at once: shapes, limits, cancels, streams, ranges, device lists, threads, and
//! caches in 8 bits on a GPU. Every result has the right bits, and the process ends with the memory, descriptors and
//! threads it began with.
//!
//! VVAE_SOAK_SECONDS sets the duration, VVAE_SOAK_DEVICE another device than the CPU. One test only, so that nothing
//! else runs in the process.

#![cfg(all(target_os = "linux", target_env = "gnu"))]

mod common;

use std::collections::BTreeMap;
use std::ffi::{CString, c_char, c_void};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use common::process::{
    allocated_bytes, keep_no_freed_memory, settled_threads, status_bytes, threads_at_rest, threads_now,
};
use common::{Buffer, Failure, LATENT_CHANNELS, Random, Vae, api, create_info, run_info, small, tiny};
use video_vae::capi::*;

const WORKERS: u64 = 3;

/// A clip, its latent and the video of that, as one call on one device gives them.
struct Clip {
    video: Buffer,
    latent: Buffer,
    decoded: Buffer,
}

impl Clip {
    fn new([b, t, h, w]: [i64; 4], cache: &str) -> Clip {
        let vae = open(1, cache);
        let mut video = Buffer::new(VVAE_DTYPE_F32, [b, 3, t, h, w]);
        let mut random = Random((t * h * w) as u64);
        video.f32_mut().iter_mut().for_each(|value| *value = random.below(2001) as f32 / 1000.0 - 1.0);
        let latents = [b, LATENT_CHANNELS, (t + 2) / 4 + 1, (h + 7) / 8, (w + 7) / 8];
        let (mut latent, mut decoded) =
            (Buffer::new(VVAE_DTYPE_F32, latents), Buffer::new(VVAE_DTYPE_F32, video.shape));
        vae.encode(&video, &mut latent).unwrap();
        vae.decode(&latent, &mut decoded).unwrap();
        Clip { video, latent, decoded }
    }

    fn ends(&self, node: &str) -> (&Buffer, &Buffer) {
        if node == "encode" { (&self.video, &self.latent) } else { (&self.latent, &self.decoded) }
    }
}

/// Some frames of a compact buffer.
fn frames(of: &Buffer, first: i64, count: i64) -> Buffer {
    let [b, c, t, h, w] = of.shape;
    let mut part = Buffer::new(of.dtype, [b, c, count, h, w]);
    let (frame, all) = ((h * w) as usize, of.f32());
    for (plane, to) in part.f32_mut().chunks_exact_mut(count as usize * frame).enumerate() {
        to.copy_from_slice(&all[(plane * t as usize + first as usize) * frame..][..to.len()]);
    }
    part
}

/// Counts down to a cancel.
unsafe extern "C" fn count_down(user: *mut c_void, _: u64, _: u64, _: *const c_char) -> i32 {
    // SAFETY: the call passes a count that outlives it.
    let left = unsafe { &mut *user.cast::<u64>() };
    *left = left.saturating_sub(1);
    i32::from(*left == 0)
}

#[derive(Default)]
struct Tally {
    calls: u64,
    right: u64,
    errors: BTreeMap<i32, u64>,
}

impl Tally {
    /// The value, if the call did not fail. Other errors than those of limits, cancels and a device list are bugs.
    fn note<T>(&mut self, outcome: Result<T, Failure>) -> Option<T> {
        self.calls += 1;
        match outcome {
            Ok(value) => Some(value),
            Err(why) => {
                let expected = [VVAE_ERROR_MEMORY, VVAE_ERROR_CANCELLED, VVAE_ERROR_STATE];
                assert!(expected.contains(&why.status) && !why.text.is_empty(), "{why:?}");
                *self.errors.entry(why.status).or_default() += 1;
                None
            }
        }
    }

    fn compare(&mut self, what: &str, found: &Buffer, right: &Buffer) {
        assert!(found.bytes() == right.bytes(), "{what} of {:?} has other bits", right.shape);
        self.right += 1;
    }
}

struct Worker<'a> {
    random: Random,
    /// The parameter `cache` of all its handles, and the clips with that.
    cache: &'static str,
    clips: &'a [Clip],
    tally: Tally,
    vae: Vae,
    /// Whether the device list has several entries.
    several: bool,
    /// What the handle was configured with, its last job, and the steps that its handle has done, for a report.
    settings: BTreeMap<&'static str, &'static str>,
    job: String,
    steps: Vec<&'static str>,
}

/// What is needed to do it again.
impl Drop for Worker<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let Worker { cache, several, settings, job, steps, tally, .. } = self;
            let devices = if *several { "two entries" } else { "one entry" };
            eprintln!("a worker of cache {cache} and {devices} failed in call {}: {job}; {settings:?}", tally.calls);
            eprintln!("its steps on this handle: {}", steps.join(" "));
        }
    }
}

fn device() -> String {
    std::env::var("VVAE_SOAK_DEVICE").unwrap_or("cpu".into())
}

/// A handle on one device, or on a list of the same several times.
fn open(times: usize, cache: &str) -> Vae {
    let device = device();
    // No kernel of a GPU has as few channels as the tiny checkpoint.
    let weights = if device == "cpu" { tiny().to_owned() } else { small() };
    let list = vec![device; times].join(",");
    let (path, device) = (CString::new(weights.to_str().unwrap()).unwrap(), CString::new(list).unwrap());
    let vae = Vae::create(&vvae_create_info { device: device.as_ptr(), ..create_info(&path) }).unwrap();
    vae.configure("tiles", "never").unwrap();
    vae.configure("cache", cache).unwrap();
    vae
}

impl Worker<'_> {
    fn job(&mut self) -> (&'static str, usize) {
        let (node, clip) =
            (self.random.pick(&["encode", "decode"]), self.random.below(self.clips.len() as u64) as usize);
        self.job = format!("{node} of {:?}", self.clips[clip].ends(node).0.shape);
        (node, clip)
    }

    fn configure(&mut self) {
        let (key, values): (_, &[&str]) = self.random.pick(&[
            ("memory_limit", &["auto", "64MiB", "20MiB", "14MiB", "12MiB", "2MiB", "600KiB", "300KiB", "100KiB"][..]),
            // Of plans that fit, the rates decide.
            (
                "rates",
                &["auto", "products=3.2e14,memory=3.6e12,copies=5e10", "products=1e13,copies=1e12", "copies=1e8"],
            ),
            ("threads", &["1", "2", "3", "auto"][..]),
            ("slice_frames", &["auto", "1", "2", "7"][..]),
            ("chunk_frames", &["auto", "1", "3"][..]),
            ("host_memory_limit", &["auto", "1MiB"][..]),
        ]);
        let value = self.random.pick(values);
        let set = self.vae.configure(key, value);
        if self.tally.note(set).is_some() {
            self.settings.insert(key, value);
        }
    }

    fn whole(&mut self) {
        let ((node, clip), mut left) = (self.job(), self.random.below(60));
        let (input, right) = self.clips[clip].ends(node);
        let mut out = Buffer::new(VVAE_DTYPE_F32, right.shape);
        let mut run = run_info();
        if self.random.one_in(4) {
            run.progress = Some(count_down);
            run.progress_user = (&raw mut left).cast();
        }
        let done = match node {
            "encode" => self.vae.encode_with(input, &mut out, &run),
            _ => self.vae.decode_with(input, &mut out, &run),
        };
        if self.tally.note(done).is_some() {
            self.tally.compare(node, &out, right);
        }
    }

    fn range(&mut self) {
        let (node, clip) = self.job();
        let (input, right) = self.clips[clip].ends(node);
        let first = self.random.below(right.shape[2] as u64) as i64;
        let count = 1 + self.random.below((right.shape[2] - first) as u64) as i64;
        let inputs = self.vae.range_inputs(node, input.shape[2], first, count);
        let Some((from, needed)) = self.tally.note(inputs) else { return };
        let [b, c, _, h, w] = right.shape;
        let out = Buffer::new(VVAE_DTYPE_F32, [b, c, count, h, w]);
        let part = frames(input, from, needed).clone();
        let place = (input.shape[2], first);
        self.job += &format!(", output frames {first} + {count}");
        let done = self.vae.run_range(node, &part.tensor(), place, &out.tensor(), &run_info());
        if self.tally.note(done).is_some() {
            self.tally.compare("a range", &out, &frames(right, first, count));
        }
    }

    /// A clip in pieces, resumed on the way, sometimes not finished.
    fn stream(&mut self) {
        let (node, clip) = self.job();
        let (input, right) = self.clips[clip].ends(node);
        let vae = &self.vae;
        let Some(mut stream) = self.tally.note(vae.stream(node, input.shape)) else { return };
        let (mut next, mut done) = (0, 0);
        while !self.random.one_in(40) {
            let left = input.shape[2] - next;
            let piece = (left > 0).then(|| frames(input, next, 1 + self.random.below(left as u64) as i64));
            let pushed = stream.push(piece.as_ref().map(Buffer::tensor).as_ref());
            let Some((_, taken)) = self.tally.note(pushed) else { return };
            next += taken;
            self.job += &format!(", {taken} pushed");
            loop {
                let [b, c, _, h, w] = right.shape;
                let room = Buffer::new(VVAE_DTYPE_F32, [b, c, 1 + self.random.below(3) as i64, h, w]);
                let pulled = stream.pull(&room.tensor(), None);
                let Some((status, written)) = self.tally.note(pulled) else { return };
                // A decoded clip may be padded at its end.
                let count = written.min(right.shape[2] - done);
                if count > 0 {
                    self.tally.compare("a stream", &frames(&room, 0, count), &frames(right, done, count));
                }
                done += written;
                self.job += &format!(", {written} pulled");
                match status {
                    VVAE_END => return assert!(done >= right.shape[2]),
                    VVAE_AGAIN => break,
                    _ => {}
                }
            }
            if next < input.shape[2] && self.random.one_in(3) {
                let whole = input.shape[2];
                let Some((from, _)) = self.tally.note(vae.range_inputs(node, whole, done, 0)) else { return };
                let Some(resumed) = self.tally.note(vae.stream_at(node, input.shape, done)) else { continue };
                self.job += &format!(", resumed at {done}");
                (stream, next) = (resumed, from);
            }
        }
    }

    fn plan(&mut self) {
        let (node, clip) = self.job();
        let mut shape = self.clips[clip].ends(node).0.shape;
        shape[2] = self.random.pick(&[0, 1, 9, 1000]);
        self.job = format!("a plan of {node} of {shape:?}");
        let planned = self.vae.plan(node, shape);
        self.tally.note(planned);
    }

    fn reopen(&mut self) {
        self.several = self.random.one_in(3);
        self.vae = open(if self.several { 2 } else { 1 }, self.cache);
        self.settings.clear();
        self.steps.clear();
    }

    fn trim(&mut self) {
        let freed = self.vae.trim(1 + self.random.below(3) as u32);
        self.tally.note(freed);
    }

    fn step(&mut self) {
        let (name, step): (_, fn(&mut Self)) = match self.random.below(20) {
            0 => ("reopen", Self::reopen),
            1..=3 => ("configure", Self::configure),
            4..=9 => ("whole", Self::whole),
            10..=12 => ("range", Self::range),
            13..=16 => ("stream", Self::stream),
            17 => ("trim", Self::trim),
            _ => ("plan", Self::plan),
        };
        self.steps.push(name);
        step(self);
    }
}

/// Works until `end`. The last number of each worker's handle is in `handles`, for the thread that cancels.
fn work(clips: &BTreeMap<&'static str, Vec<Clip>>, seed: u64, end: Instant) -> Tally {
    let (handles, stop) = ([const { AtomicUsize::new(0) }; WORKERS as usize], AtomicBool::new(false));
    let steps = AtomicUsize::new(0);
    let run = |(index, handle): (u64, &AtomicUsize)| {
        let random = Random((seed * WORKERS + index + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let (&cache, clips) = clips.iter().nth(index as usize % clips.len()).expect("clips");
        let vae = open(1, cache);
        let (tally, settings) = (Tally::default(), BTreeMap::new());
        let (job, done) = (String::new(), Vec::new());
        let mut worker = Worker { random, cache, clips, tally, vae, several: false, settings, job, steps: done };
        while Instant::now() < end {
            handle.store(worker.vae.0.addr(), Ordering::Relaxed);
            worker.step();
            steps.fetch_add(1, Ordering::Relaxed);
        }
        std::mem::take(&mut worker.tally)
    };
    let run = &run;
    let tallies = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..).zip(&handles).map(|worker| scope.spawn(move || run(worker))).collect();
        let canceller = scope.spawn(|| {
            let (mut random, mut next) = (Random(seed), 0);
            while !stop.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(1 + random.below(60)));
                // On a busy machine most calls would be cancelled otherwise.
                let done = steps.load(Ordering::Relaxed);
                if done < next {
                    continue;
                }
                next = done + 4;
                let v = handles[random.below(WORKERS) as usize].load(Ordering::Relaxed);
                // SAFETY: any number may be passed.
                unsafe { (api().vvae_cancel)(std::ptr::without_provenance_mut(v)) };
            }
        });
        let tallies: Vec<_> = workers.into_iter().map(|worker| worker.join()).collect();
        stop.store(true, Ordering::Relaxed);
        canceller.join().unwrap();
        tallies.into_iter().map(|tally| tally.expect("a worker's work")).collect::<Vec<Tally>>()
    });
    let add = |mut all: Tally, one: Tally| {
        (all.calls, all.right) = (all.calls + one.calls, all.right + one.right);
        one.errors.into_iter().for_each(|(status, count)| *all.errors.entry(status).or_default() += count);
        all
    };
    tallies.into_iter().fold(Tally::default(), add)
}

/// What the process holds: allocated bytes, resident bytes, descriptors, threads.
fn held() -> [usize; 4] {
    let count = |folder: &str| std::fs::read_dir(folder).unwrap().count();
    let resident = status_bytes("VmRSS") as usize;
    [allocated_bytes(), resident, count("/proc/self/fd"), threads_now()]
}

#[test]
fn random_work_gives_right_bits_and_leaves_nothing() {
    keep_no_freed_memory();
    let seconds = std::env::var("VVAE_SOAK_SECONDS").map_or(20, |seconds| seconds.parse().expect("a number"));
    let shapes = [[1, 1, 8, 8], [1, 9, 16, 24], [2, 5, 8, 16], [1, 21, 8, 8], [1, 4, 13, 9], [1, 2, 48, 32]];
    // The CPU has exact caches only.
    let caches = if device() == "cpu" { &["exact"][..] } else { &["exact", "u8"] };
    let clips_of = |&cache: &&'static str| (cache, shapes.map(|shape| Clip::new(shape, cache)).into());
    let clips = caches.iter().map(clips_of).collect();
    // What is allocated once, by the C library too, is allocated here.
    work(&clips, 0, Instant::now() + Duration::from_secs(2 + seconds / 20));
    threads_at_rest();
    let (before, start) = (held(), Instant::now());
    let tally = work(&clips, 1, start + Duration::from_secs(seconds));
    settled_threads(before[3]);
    let after = held();
    let Tally { calls, right, errors } = &tally;
    println!("{:.0?}: {calls} calls, {right} results compared, errors {errors:?}", start.elapsed());
    println!("| | start | end |\n|---|---|---|");
    for (what, (before, after)) in
        ["allocated bytes", "resident bytes", "descriptors", "threads"].iter().zip(before.iter().zip(after))
    {
        println!("| {what} | {before} | {after} |");
    }
    assert!(*right > 0 && errors.contains_key(&VVAE_ERROR_CANCELLED) && errors.contains_key(&VVAE_ERROR_MEMORY));
    assert_eq!(before[2..], after[2..], "descriptors and threads");
    assert!(after[0] <= before[0] + (1 << 20), "{} bytes are left", after[0] - before[0]);
}
