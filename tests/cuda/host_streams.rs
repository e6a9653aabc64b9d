//! With all tensors on the device, work is ordered on the host's CUDA stream. Otherwise it is finished on return.

use std::ffi::{c_char, c_void};
use std::time::{Duration, Instant};

use crate::common::{Buffer, Vae, run_info, small};
use crate::driver::{Gpu, Memory, Stream};
use crate::{latent, on_device, open, video};
use video_vae::capi::*;

/// Long enough that work that does not wait is too early.
const DELAY: Duration = Duration::from_millis(60);
/// Longer than queueing a whole clip takes.
const LONG: Duration = Duration::from_millis(500);
/// NaN as floats, so that results that depend on it are wrong.
const POISON: u8 = 0xff;

fn on(stream: &Stream) -> vvae_run_info {
    vvae_run_info { flags: VVAE_RUN_HAS_STREAM, cuda_stream: stream.handle, ..run_info() }
}

/// A clip and its decoded frames.
struct DecodedClip {
    vae: Vae,
    latent: Buffer,
    expected: Buffer,
}

impl DecodedClip {
    fn new() -> DecodedClip {
        let (vae, latent) = (open(&small()), latent(5, 9, 7));
        let mut expected = video(&latent, VVAE_DTYPE_F32);
        vae.decode(&latent, &mut expected).unwrap();
        DecodedClip { vae, latent, expected }
    }

    /// Poisoned device memory for both tensors.
    fn memory<'a>(&self, gpu: &'a Gpu) -> (Memory<'a>, Memory<'a>) {
        let poisoned = |like: &Buffer| gpu.copy_of(&vec![POISON; like.bytes().len()]);
        (poisoned(&self.latent), poisoned(&self.expected))
    }

    fn decode(&self, from: &Memory, to: &Memory, info: &vvae_run_info) {
        self.vae.run("decode", &on_device(&self.latent, from), &on_device(&self.expected, to), info).unwrap();
    }

    /// The input arrives late on the stream. The result is read on it at once, then both tensors are overwritten.
    fn ordered_on(&self, gpu: &Gpu, stream: &Stream) {
        let (from, to) = self.memory(gpu);
        let (input, output) = (gpu.pinned(self.latent.bytes()), gpu.pinned(self.expected.bytes()));
        for round in 0..3 {
            stream.fill(&from, POISON);
            stream.fill(&to, POISON);
            stream.fill(&to, POISON);
            stream.wait();
            stream.delay(DELAY);
            stream.write(&from, &input);
            self.decode(&from, &to, &on(stream));
            println!("round {round}: the stream was {} on return", if stream.is_idle() { "idle" } else { "busy" });
            stream.read(&to, &output);
            stream.fill(&from, POISON);
            stream.fill(&to, POISON);
            stream.wait();
            assert!(output.bytes() == self.expected.bytes(), "round {round}");
        }
    }
}

#[test]
fn work_is_ordered_on_the_hosts_stream() {
    let Some(gpu) = Gpu::open() else { return };
    DecodedClip::new().ordered_on(&gpu, &gpu.stream());
}

#[test]
fn work_is_ordered_on_stream_0() {
    let Some(gpu) = Gpu::open() else { return };
    DecodedClip::new().ordered_on(&gpu, &gpu.default_stream());
}

#[test]
fn runs_on_two_streams_do_not_mix() {
    let Some(gpu) = Gpu::open() else { return };
    let clip = DecodedClip::new();
    let streams = [gpu.stream(), gpu.stream(), gpu.default_stream()];
    let input = gpu.pinned(clip.latent.bytes());
    let runs: Vec<_> = streams.iter().map(|stream| (stream, clip.memory(&gpu))).collect();
    // The same handle and workspace, without waiting in between.
    for (stream, (from, to)) in &runs {
        stream.delay(DELAY);
        stream.write(from, &input);
        clip.decode(from, to, &on(stream));
    }
    for (stream, (_, to)) in &runs {
        stream.wait();
        assert!(to.read() == clip.expected.bytes());
    }
}

#[test]
fn call_on_the_hosts_stream_does_not_wait_for_it() {
    let Some(gpu) = Gpu::open() else { return };
    let (clip, stream) = (DecodedClip::new(), gpu.stream());
    let ((from, to), input) = (clip.memory(&gpu), gpu.pinned(clip.latent.bytes()));
    // Twice before, for one-time setup.
    for _ in 0..2 {
        clip.decode(&from, &to, &on(&stream));
    }
    stream.wait();
    stream.delay(LONG);
    stream.write(&from, &input);
    let began = Instant::now();
    clip.decode(&from, &to, &on(&stream));
    let took = began.elapsed();
    println!("the call returned after {took:?}");
    assert!(!stream.is_idle() && took < LONG / 2, "the call returned after {took:?}");
    // The next call uses the same memory, and its thread waits.
    let mut next = video(&clip.latent, VVAE_DTYPE_F32);
    clip.vae.decode(&clip.latent, &mut next).unwrap();
    assert!(next.bytes() == clip.expected.bytes());
    stream.wait();
    assert!(to.read() == clip.expected.bytes());
}

#[test]
fn call_on_the_hosts_stream_is_cancelled_between_launches() {
    unsafe extern "C" fn stop(_: *mut c_void, done: u64, _: u64, _: *const c_char) -> i32 {
        i32::from(done > 0)
    }

    let Some(gpu) = Gpu::open() else { return };
    let (clip, stream) = (DecodedClip::new(), gpu.stream());
    let ((from, to), input) = (clip.memory(&gpu), gpu.pinned(clip.latent.bytes()));
    stream.delay(DELAY);
    stream.write(&from, &input);
    let (latent, frames) = (on_device(&clip.latent, &from), on_device(&clip.expected, &to));
    let info = vvae_run_info { progress: Some(stop), ..on(&stream) };
    clip.vae.run("decode", &latent, &frames, &info).unwrap_err().says(VVAE_ERROR_CANCELLED, &[]);
    clip.decode(&from, &to, &on(&stream));
    stream.wait();
    assert!(to.read() == clip.expected.bytes());
}

#[test]
fn work_without_a_stream_is_finished_on_return() {
    let Some(gpu) = Gpu::open() else { return };
    let clip = DecodedClip::new();
    let (from, to) = clip.memory(&gpu);
    from.write(clip.latent.bytes());
    clip.decode(&from, &to, &run_info());
    // A stream that does not wait for the library.
    let (other, output) = (gpu.stream(), gpu.pinned(clip.expected.bytes()));
    other.fill(&from, POISON);
    other.read(&to, &output);
    other.wait();
    assert!(output.bytes() == clip.expected.bytes());
}

#[test]
fn work_with_a_host_tensor_is_finished_on_return() {
    let Some(gpu) = Gpu::open() else { return };
    let clip = DecodedClip::new();
    let (from, to) = clip.memory(&gpu);
    from.write(clip.latent.bytes());
    let stream = gpu.stream();
    let into = video(&clip.latent, VVAE_DTYPE_F32);
    clip.vae.run("decode", &on_device(&clip.latent, &from), &into.tensor(), &on(&stream)).unwrap();
    assert!(into.bytes() == clip.expected.bytes(), "to host memory");
    clip.vae.run("decode", &clip.latent.tensor(), &on_device(&clip.expected, &to), &on(&stream)).unwrap();
    let (other, output) = (gpu.stream(), gpu.pinned(clip.expected.bytes()));
    other.read(&to, &output);
    other.wait();
    assert!(output.bytes() == clip.expected.bytes(), "from host memory");
}

#[test]
fn stream_without_the_flag_is_refused() {
    let Some(gpu) = Gpu::open() else { return };
    let clip = DecodedClip::new();
    let (from, to) = clip.memory(&gpu);
    let info = vvae_run_info { flags: 0, ..on(&gpu.stream()) };
    let (input, output) = (on_device(&clip.latent, &from), on_device(&clip.expected, &to));
    let refused = clip.vae.run("decode", &input, &output, &info).unwrap_err();
    refused.says(VVAE_ERROR_ARGUMENT, &["cuda_stream", "VVAE_RUN_HAS_STREAM"]);
}

#[test]
fn handle_may_be_freed_while_its_work_is_in_the_stream() {
    let Some(gpu) = Gpu::open() else { return };
    let clip = DecodedClip::new();
    let (from, to) = clip.memory(&gpu);
    let (input, output) = (gpu.pinned(clip.latent.bytes()), gpu.pinned(clip.expected.bytes()));
    let stream = gpu.stream();
    stream.delay(DELAY);
    stream.write(&from, &input);
    clip.decode(&from, &to, &on(&stream));
    let DecodedClip { vae, expected, .. } = clip;
    assert_eq!(vae.free(), VVAE_OK);
    stream.read(&to, &output);
    stream.wait();
    assert!(output.bytes() == expected.bytes());
}

#[test]
fn frames_are_pulled_on_the_hosts_stream() {
    let Some(gpu) = Gpu::open() else { return };
    let clip = DecodedClip::new();
    let from = gpu.copy_of(clip.latent.bytes());
    let [_, _, frames, h, w] = clip.expected.shape;
    let room = Buffer::new(VVAE_DTYPE_F32, [1, 3, 1, h, w]);
    let (to, output) = (gpu.memory(room.bytes().len()), gpu.pinned(room.bytes()));
    let pulling = clip.vae.stream("decode", clip.latent.shape).unwrap();
    let taken = pulling.push(Some(&on_device(&clip.latent, &from))).unwrap().1;
    assert_eq!(taken, clip.latent.shape[2]);
    pulling.push(None).unwrap();
    let stream = gpu.stream();
    let plane = (h * w * 4) as usize;
    let mut pulled = 0;
    loop {
        stream.delay(Duration::from_millis(1));
        let (status, written) = pulling.pull(&on_device(&room, &to), Some(&on(&stream))).unwrap();
        if status == VVAE_END {
            break;
        }
        assert_eq!(written, 1);
        stream.read(&to, &output);
        stream.fill(&to, POISON);
        stream.wait();
        for c in 0..3 {
            let expected = &clip.expected.bytes()[(c * frames as usize + pulled) * plane..][..plane];
            assert!(output.bytes()[c * plane..][..plane] == *expected, "frame {pulled}, channel {c}");
        }
        pulled += 1;
    }
    assert_eq!(pulled, frames as usize);
}

/// It gets the memory of the run before it, which still works there.
#[test]
fn stream_that_is_opened_waits_for_work_on_the_hosts_stream() {
    let Some(gpu) = Gpu::open() else { return };
    let (clip, busy) = (DecodedClip::new(), gpu.stream());
    let (from, to) = (gpu.copy_of(clip.latent.bytes()), gpu.copy_of(clip.expected.bytes()));
    let [b, c, frames, h, w] = clip.expected.shape;
    for _ in 0..2 {
        busy.fill(&to, POISON);
        busy.delay(DELAY);
        clip.decode(&from, &to, &on(&busy));
        let stream = clip.vae.stream("decode", clip.latent.shape).unwrap();
        let (mut pushed, mut made) = (0, 0);
        while made < frames {
            let left = clip.latent.shape[2] - pushed;
            let part = (left > 0).then(|| clip.latent.part(pushed, left));
            pushed += stream.push(part.as_ref().map(Buffer::tensor).as_ref()).unwrap().1;
            let room = Buffer::poisoned([b, c, 1, h, w]);
            while stream.pull(&room.tensor(), None).unwrap().1 == 1 {
                assert!(room.bytes() == clip.expected.part(made, 1).bytes(), "frame {made}");
                made += 1;
            }
        }
        busy.wait();
        assert!(to.read() == clip.expected.bytes());
    }
}

#[test]
fn stream_that_is_being_captured_is_refused_and_its_capture_goes_on() {
    let Some(gpu) = Gpu::open() else { return };
    let clip = DecodedClip::new();
    let ((from, to), input) = (clip.memory(&gpu), gpu.pinned(clip.latent.bytes()));
    let stream = gpu.stream();
    let (latent, frames) = (on_device(&clip.latent, &from), on_device(&clip.expected, &to));
    let pulling = clip.vae.stream("decode", clip.latent.shape).unwrap();
    // A handle that has loaded nothing yet would allocate within the capture.
    for vae in [&clip.vae, &open(&small())] {
        stream.begin_capture();
        stream.write(&from, &input);
        let refused = vae.run("decode", &latent, &frames, &on(&stream)).unwrap_err();
        refused.says(VVAE_ERROR_STATE, &["cuda_stream", "captured"]);
        let refused = pulling.pull(&frames, Some(&on(&stream))).unwrap_err();
        refused.says(VVAE_ERROR_STATE, &["cuda_stream", "captured"]);
        // The host's own copy is a node of the graph, so the capture is whole.
        assert_eq!(stream.end_capture(), 1);
        stream.write(&from, &input);
        vae.run("decode", &latent, &frames, &on(&stream)).unwrap();
        stream.wait();
        assert!(to.read() == clip.expected.bytes());
    }
    assert_eq!(pulling.push(Some(&latent)).unwrap().1, clip.latent.shape[2], "the stream is intact");
}
