//! Ranges: any frames of a clip, with the bits of the whole clip, on every device.
//!
//! VVAE_RANGES=1000 tries as many random ranges.

use std::ffi::{c_char, c_void};
use std::ops::Range;
use std::path::Path;

use crate::common::{Buffer, Random, Stream, Vae, golden, on_every_device, run_info, small, video_models};
use video_vae::capi::*;

/// A clip and what becomes of it as a whole.
struct Clip {
    node: &'static str,
    input: Buffer,
    output: Buffer,
}

impl Clip {
    fn new(vae: &Vae, random: &mut Random, node: &'static str, input: [i64; 5], output: [i64; 5]) -> Clip {
        let (input, output) = (Buffer::random(random, vae.fitted(input)), Buffer::poisoned(vae.fitted(output)));
        let clip = Clip { node, input, output };
        vae.run(node, &clip.input.tensor(), &clip.output.tensor(), &run_info()).unwrap();
        clip
    }

    fn frames(&self) -> i64 {
        self.input.shape[2]
    }

    fn outputs(&self) -> i64 {
        self.output.shape[2]
    }

    /// A random range, not always within reach of the clip's beginning.
    fn random_range(&self, random: &mut Random) -> (i64, i64) {
        let first = random.below(self.outputs() as u64) as i64;
        let most = (self.outputs() - first).min(random.pick(&[1, 2, 5, 9, 100]));
        (first, 1 + random.below(most as u64) as i64)
    }

    /// Runs a range, and checks it against the whole.
    fn check(&self, vae: &Vae, first: i64, count: i64) {
        let (from, frames) = vae.range_inputs(self.node, self.frames(), first, count).unwrap();
        let (input, mut output) = (self.input.part(from, frames), self.output.part(first, count));
        let expected = output.bytes().to_vec();
        output.f32_mut().fill(f32::NAN);
        vae.run_range(self.node, &input.tensor(), (self.frames(), first), &output.tensor(), &run_info()).unwrap();
        let what = format!("{} {first} + {count} of {:?}", self.node, self.output.shape);
        assert!(output.bytes() == expected, "{what}: other bits");
    }
}

/// Long enough for ranges that depend on nothing at the clip's beginning; some are padded.
fn clips(vae: &Vae, random: &mut Random) -> Vec<Clip> {
    let mut clip = |node, input, output| Clip::new(vae, random, node, input, output);
    vec![
        clip("decode", [1, 16, 53, 2, 3], [1, 3, 209, 16, 24]),
        clip("encode", [1, 3, 181, 16, 24], [1, 16, 46, 2, 3]),
        clip("decode", [2, 16, 9, 3, 2], [2, 3, 31, 24, 16]),
        clip("encode", [2, 3, 62, 16, 8], [2, 16, 17, 2, 1]),
    ]
}

fn models() -> [std::path::PathBuf; 4] {
    let [small, wan21, wan22] = video_models();
    [small, golden("medium.safetensors"), wan21, wan22]
}

fn tries(usual: u64) -> u64 {
    std::env::var("VVAE_RANGES").map_or(usual, |tries| tries.parse().expect("VVAE_RANGES is a number"))
}

fn random_ranges(model: &Path, tries: u64) {
    let (vae, mut random) = (Vae::open(model).unwrap(), Random(77));
    // Frames are so small that threads would only wait for each other.
    vae.configure("threads", "1").unwrap();
    let clips = clips(&vae, &mut random);
    for i in 0..tries {
        let clip = &clips[(i % 4) as usize];
        for (key, values) in [("slice_frames", ["auto", "1", "2", "3"]), ("chunk_frames", ["auto", "1", "2", "5"])] {
            vae.configure(key, random.pick(&values)).unwrap();
        }
        let (first, count) = clip.random_range(&mut random);
        clip.check(&vae, first, count);
    }
}

#[test]
fn random_ranges_have_the_bits_of_the_whole_clip() {
    on_every_device(|_| {
        let each = tries(48) / 2;
        models().iter().for_each(|model| random_ranges(model, each));
    });
}

#[test]
fn ranges_under_limits_have_the_bits_of_the_whole_clip() {
    on_every_device(|device| video_models().iter().for_each(|model| ranges_under_limits(device, model)));
}

fn ranges_under_limits(device: &str, model: &Path) {
    let (vae, mut random) = (Vae::open(model).unwrap(), Random(5));
    let (clips, mut all) = (clips(&vae, &mut random), 0);
    for clip in &clips {
        let (first, count) = (clip.outputs() / 2, (clip.outputs() / 4).max(2));
        let free = vae.plan_range(clip.node, clip.input.shape, first, count).unwrap().0;
        let (mut limit, mut plans) = (free.device_bytes, 0);
        while plans < 4 {
            vae.configure("memory_limit", &limit.to_string()).unwrap();
            let Ok((plan, text)) = vae.plan_range(clip.node, clip.input.shape, first, count) else { break };
            if plan.exact == 0 {
                break;
            }
            clip.check(&vae, first, count);
            let memory = vae.memory();
            assert_eq!(memory.now, plan.weight_bytes + plan.workspace_bytes, "{text}");
            assert!(memory.now <= plan.device_bytes && plan.device_bytes <= limit, "{text}");
            (limit, plans) = (plan.device_bytes - 1, plans + 1);
        }
        assert!(plans > 0, "{}", clip.node);
        all += plans;
        vae.configure("memory_limit", "auto").unwrap();
    }
    // How many plans there are depends on the processor.
    assert!(all > clips.len() || device != "cpu", "no smaller plan was tried");
}

#[test]
fn tiles_of_a_range_are_those_of_the_whole_clip() {
    on_every_device(|_| {
        let (vae, mut random) = (Vae::open(&small()).unwrap(), Random(6));
        for node in ["encode", "decode"] {
            for (key, value) in [("tiled", "true"), ("tile_size", "64"), ("tile_overlap", "16")] {
                vae.configure(&format!("{node}_{key}"), value).unwrap();
            }
        }
        let decode = Clip::new(&vae, &mut random, "decode", [1, 16, 12, 9, 10], [1, 3, 45, 72, 80]);
        decode.check(&vae, 30, 7);
        let encode = Clip::new(&vae, &mut random, "encode", [1, 3, 45, 72, 80], [1, 16, 12, 9, 10]);
        encode.check(&vae, 9, 2);
        let (plan, text) = vae.plan_range("decode", decode.input.shape, 30, 7).unwrap();
        assert!(plan.exact == 0 && text.contains("tiled: not exact"), "{text}");
    });
}

/// Samples of the posterior and log-variances are those of the frame, not of its place in the range.
#[test]
fn samples_and_log_variances_are_those_of_the_whole_clip() {
    on_every_device(|_| {
        let (vae, mut random) = (Vae::open(&small()).unwrap(), Random(7));
        vae.configure("posterior", "sample").unwrap();
        let clip = Clip::new(&vae, &mut random, "encode", [1, 3, 61, 16, 16], [1, 16, 16, 2, 2]);
        let mut run = run_info();
        let (mut latent, logvar) = (Buffer::poisoned(clip.output.shape), Buffer::poisoned(clip.output.shape));
        let tensor = logvar.tensor();
        run.logvar = &raw const tensor;
        vae.encode_with(&clip.input, &mut latent, &run).unwrap();
        let (first, count) = (11, 4);
        let (from, frames) = vae.range_inputs("encode", clip.frames(), first, count).unwrap();
        let (latent, found) = (Buffer::poisoned([1, 16, count, 2, 2]), Buffer::poisoned([1, 16, count, 2, 2]));
        let tensor = found.tensor();
        run.logvar = &raw const tensor;
        let input = clip.input.part(from, frames);
        vae.run_range("encode", &input.tensor(), (clip.frames(), first), &latent.tensor(), &run).unwrap();
        assert!(latent.bytes() == clip.output.part(first, count).bytes());
        assert!(found.bytes() == logvar.part(first, count).bytes());
    });
}

/// Pushes the frames `inputs` and pulls everything that they make, some frames at a time. The clip's last frame ends
/// the stream.
fn run_stream(stream: &Stream, clip: &Clip, inputs: Range<i64>) -> Vec<Buffer> {
    let [b, c, _, h, w] = clip.output.shape;
    let (mut next, mut out) = (inputs.start, Vec::new());
    loop {
        if next < inputs.end {
            let piece = clip.input.part(next, 1);
            let (_, taken) = stream.push(Some(&piece.tensor())).unwrap();
            next += taken;
        } else if inputs.end < clip.frames() {
            return out;
        } else {
            stream.push(None).unwrap();
        }
        loop {
            let room = Buffer::poisoned([b, c, 1, h, w]);
            match stream.pull(&room.tensor(), None).unwrap() {
                (VVAE_OK, 1) => out.push(room),
                (VVAE_AGAIN, 0) => break,
                (VVAE_END, 0) => return out,
                other => panic!("{other:?}"),
            }
        }
    }
}

#[test]
fn a_stream_from_the_middle_has_the_bits_of_the_whole_clip() {
    on_every_device(|_| {
        let (vae, mut random) = (Vae::open(&small()).unwrap(), Random(8));
        for clip in clips(&vae, &mut random) {
            for first in [1, clip.outputs() * 2 / 3, clip.outputs() - 1] {
                let (from, _) = vae.range_inputs(clip.node, clip.frames(), first, 0).unwrap();
                let stream = vae.stream_at(clip.node, clip.input.shape, first).unwrap();
                let made = run_stream(&stream, &clip, from..clip.frames());
                // A stream decodes whole latent frames; the clip was cropped.
                assert!(made.len() as i64 - (clip.outputs() - first) < 4, "{} {first}", clip.node);
                for (frame, made) in (first..clip.outputs()).zip(&made) {
                    assert!(made.bytes() == clip.output.part(frame, 1).bytes(), "{} {frame}", clip.node);
                }
            }
            // The clip ends before the first frame that the stream is to give.
            let beyond = vae.stream_at(clip.node, clip.input.shape, clip.outputs() + 40).unwrap();
            assert!(run_stream(&beyond, &clip, clip.frames() - 2..clip.frames()).is_empty());
        }
    });
}

/// A stream is left after some input, and another one begins with the frame that it would have given next.
#[test]
fn a_resumed_stream_has_the_bits_of_an_uninterrupted_one() {
    on_every_device(|_| {
        let (vae, other, mut random) = (Vae::open(&small()).unwrap(), Vae::open(&small()).unwrap(), Random(9));
        // Another policy of the second handle changes no bit.
        other.configure("slice_frames", "1").unwrap();
        for clip in clips(&vae, &mut random) {
            let whole = run_stream(&vae.stream(clip.node, clip.input.shape).unwrap(), &clip, 0..clip.frames());
            for left_after in [0, 1, clip.frames() / 2, clip.frames() - 1] {
                let stream = vae.stream(clip.node, clip.input.shape).unwrap();
                let mut made = run_stream(&stream, &clip, 0..left_after);
                drop(stream);
                let next = made.len() as i64;
                let (from, _) = vae.range_inputs(clip.node, clip.frames(), next, 0).unwrap();
                let resumed = other.stream_at(clip.node, clip.input.shape, next).unwrap();
                made.extend(run_stream(&resumed, &clip, from..clip.frames()));
                let same = whole.len() == made.len() && whole.iter().zip(&made).all(|(a, b)| a.bytes() == b.bytes());
                assert!(same, "{} resumed after {left_after} of {}", clip.node, clip.frames());
            }
        }
    });
}

#[test]
fn the_plan_of_a_range_is_of_its_own_work() {
    let vae = Vae::open(&small()).unwrap();
    let (video, latent) = ([1, 3, 4001, 16, 16], [1, 16, 1001, 2, 2]);
    for (node, shape, first, count) in [("decode", latent, 2000, 40), ("encode", video, 500, 10)] {
        let (from, frames) = vae.range_inputs(node, shape[2], first, count).unwrap();
        let (range, text) = vae.plan_range(node, shape, first, count).unwrap();
        let whole = vae.plan(node, shape).unwrap().0;
        assert!(range.seconds > 0.0 && range.seconds < whole.seconds / 5.0, "{} of {}", range.seconds, whole.seconds);
        assert_eq!((range.input_shape[2], range.output_shape[2]), (frames, count));
        assert!(from > 0 && text.contains(&format!(", frames {first} to {}", first + count - 1)), "{text}");
        assert!(range.device_bytes <= whole.device_bytes * 2, "{text}");
    }
}

unsafe extern "C" fn count(user: *mut c_void, done: u64, total: u64, _: *const c_char) -> i32 {
    // SAFETY: the test passes two numbers.
    unsafe { *user.cast::<(u64, u64)>() = (done, total) };
    0
}

#[test]
fn progress_counts_the_work_of_the_range() {
    on_every_device(|_| {
        let (vae, mut random) = (Vae::open(&small()).unwrap(), Random(9));
        for clip in clips(&vae, &mut random) {
            let (first, frames) = (clip.outputs() / 2, 3);
            let (from, inputs) = vae.range_inputs(clip.node, clip.frames(), first, frames).unwrap();
            let (input, output) = (clip.input.part(from, inputs), clip.output.part(first, frames));
            let mut told = (0u64, 0u64);
            let user = (&raw mut told).cast();
            let run = vvae_run_info { progress: Some(count), progress_user: user, ..run_info() };
            vae.run_range(clip.node, &input.tensor(), (clip.frames(), first), &output.tensor(), &run).unwrap();
            assert!(told.0 == told.1 && told.1 > 0, "{}: {told:?}", clip.node);
        }
    });
}

#[test]
fn a_range_of_everything_is_the_clip() {
    let (vae, mut random) = (Vae::open(&small()).unwrap(), Random(10));
    for clip in clips(&vae, &mut random) {
        assert_eq!(vae.range_inputs(clip.node, clip.frames(), 0, clip.outputs()).unwrap(), (0, clip.frames()));
        clip.check(&vae, 0, clip.outputs());
        let [whole, range] = [
            vae.plan(clip.node, clip.input.shape).unwrap().0,
            vae.plan_range(clip.node, clip.input.shape, 0, clip.outputs()).unwrap().0,
        ];
        let crops = clip.node == "decode" && clip.outputs() % 4 != 1;
        assert!(crops || whole.device_bytes == range.device_bytes, "{}", clip.node);
    }
}

#[test]
fn mistakes_are_named_before_any_work() {
    let vae = Vae::open(&small()).unwrap();
    let plan = |first, count| vae.plan_range("decode", [1, 16, 9, 2, 2], first, count).unwrap_err();
    let inputs = |clip, first, count| vae.range_inputs("encode", clip, first, count).unwrap_err();
    for (failure, says) in [
        (plan(33, 1), "frames 33 to 33 are not all in the clip; its 9 latent frames make 33 video frames, 0 to 32"),
        (plan(30, 4), "frames 30 to 33 are not all in the clip"),
        (plan(i64::MAX, i64::MAX), "are not all in the clip"),
        (plan(3, 0), "count: 0 frames are no range"),
        (plan(-1, 3), "first: -1 is negative"),
        (plan(3, -2), "count: -2 is negative"),
        (inputs(0, 0, 1), "clip_frames: 0, but a clip has from 1"),
        (inputs(-4, 0, 1), "clip_frames: -4 is negative"),
        (inputs(18, 5, 2), "its 18 video frames make 6 latent frames, 0 to 5"),
        (inputs(18, 6, 0), "frames 6 to 6 are not all in the clip"),
        (vae.stream_at("decode", [1, 16, 0, 2, 2], -1).err().unwrap(), "first: -1 is negative"),
        (vae.stream_at("decode", [1, 16, 0, 2, 2], i64::MAX).err().unwrap(), "last frame that a stream may begin with"),
    ] {
        assert!(failure.status == VVAE_ERROR_ARGUMENT && failure.text.contains(says), "{failure:?}");
    }
    let (from, frames) = vae.range_inputs("decode", 100, 300, 8).unwrap();
    for (wrong, clip, first, status, says) in [
        (
            frames - 1,
            100,
            300,
            VVAE_ERROR_TENSOR,
            format!("the range needs frames {from} to {} of the clip", from + frames - 1),
        ),
        (frames, 100, 396, VVAE_ERROR_ARGUMENT, "frames 396 to 403 are not all in the clip".into()),
        (frames, 100, -8, VVAE_ERROR_ARGUMENT, "first: -8 is negative".into()),
    ] {
        let (latent, video) = (Buffer::new(VVAE_DTYPE_F32, [1, 16, wrong, 2, 2]), Buffer::poisoned([1, 3, 8, 16, 16]));
        let failure = vae.run_range("decode", &latent.tensor(), (clip, first), &video.tensor(), &run_info());
        let failure = failure.unwrap_err();
        assert!(failure.status == status && failure.text.contains(&says), "{failure:?}");
        assert!(video.f32().iter().all(|v| v.is_nan()));
    }
    assert_eq!(vae.memory().peak, 0, "nothing was loaded or allocated");
}
