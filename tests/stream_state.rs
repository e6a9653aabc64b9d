//! A stream saved at any point continues with the same bits, in the same handle or another, from memory or a file.
//! Anything but an intact state is refused.

mod common;

use std::sync::atomic::{AtomicU32, Ordering};

use common::safetensors::Folder;
use common::{Buffer, Failure, Random, Stream, Vae, api, error_text, golden, on_every_device, small};
use video_vae::capi::*;
use video_vae::checksum::Checksum;

struct Work {
    node: &'static str,
    input: Buffer,
    output: [i64; 5],
}

impl Work {
    fn new(node: &'static str, input: [i64; 5], output: [i64; 5]) -> Work {
        let buffer = Buffer::random(&mut Random(21), input);
        Work { node, input: buffer, output }
    }

    fn frames(&self) -> i64 {
        self.input.shape[2]
    }

    /// Frames `first..first + count` of a compact input.
    fn part(&self, first: i64, count: i64) -> Buffer {
        let [b, c, t, h, w] = self.input.shape;
        let mut part = Buffer::new(VVAE_DTYPE_F32, [b, c, count, h, w]);
        let (from, frame, count) = (self.input.f32(), (h * w) as usize, count as usize);
        for (plane, to) in part.f32_mut().chunks_exact_mut(count * frame).enumerate() {
            let start = (plane * t as usize + first as usize) * frame;
            to.copy_from_slice(&from[start..start + count * frame]);
        }
        part
    }
}

/// Lengths that end inside slices, at their ends and inside a latent frame; single clips and batches.
fn works() -> Vec<Work> {
    vec![
        Work::new("encode", [1, 3, 26, 24, 40], [1, 16, 8, 3, 5]),
        Work::new("encode", [2, 3, 18, 24, 16], [2, 16, 6, 3, 2]),
        Work::new("decode", [1, 16, 11, 3, 5], [1, 3, 41, 24, 40]),
        Work::new("decode", [2, 16, 8, 2, 3], [2, 3, 29, 16, 24]),
    ]
}

/// Pushes frames `from..to` and pulls until nothing is ready. Returns the output frames.
fn advance(stream: &Stream, work: &Work, from: i64, to: i64) -> Vec<Vec<u8>> {
    let (mut pushed, mut out) = (from, Vec::new());
    while pushed < to {
        let (_, taken) = stream.push(Some(&work.part(pushed, (to - pushed).min(3)).tensor())).unwrap();
        pushed += taken;
        out.extend(pull(stream, work));
    }
    out
}

fn pull(stream: &Stream, work: &Work) -> Vec<Vec<u8>> {
    let ([b, c, _, h, w], mut out) = (work.output, Vec::new());
    loop {
        let room = Buffer::new(VVAE_DTYPE_F32, [b, c, 1, h, w]);
        match stream.pull(&room.tensor(), None).unwrap() {
            (VVAE_OK, 1) => out.push(room.bytes().to_vec()),
            (VVAE_AGAIN | VVAE_END, 0) => return out,
            other => panic!("{other:?}"),
        }
    }
}

fn finish(stream: &Stream, work: &Work, from: i64) -> Vec<Vec<u8>> {
    let mut out = advance(stream, work, from, work.frames());
    stream.push(None).unwrap();
    out.extend(pull(stream, work));
    out
}

/// Saves after each of `points`, and continues from there in three ways. All must end like the stream itself.
fn interrupt(vae: &Vae, other: &Vae, work: &Work, points: &[i64]) {
    let whole = finish(&vae.stream(work.node, work.input.shape).unwrap(), work, 0);
    assert_eq!(whole.len() as i64, work.output[2]);
    // Tests run concurrently, each in its own folder.
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let folder = Folder::new(&format!("state-{}", COUNT.fetch_add(1, Ordering::Relaxed)));
    let stream = vae.stream(work.node, work.input.shape).unwrap();
    let (mut at, mut pulled) = (0, 0);
    for point in points {
        let out = advance(&stream, work, at, *point);
        assert!(out == whole[pulled..pulled + out.len()], "saving changes no bit");
        (at, pulled) = (*point, pulled + out.len());
        let state = stream.save().unwrap();
        assert!(state == stream.save().unwrap(), "two saves are equal");
        let path = folder.0.join(format!("{at}.state"));
        stream.save_file(&path).unwrap();
        assert!(std::fs::read(&path).unwrap() == state, "the file equals the state in memory");
        assert_eq!(std::fs::read_dir(&folder.0).unwrap().count(), 1, "there is no other file");
        for restored in [vae.restore(&state), other.restore(&state), other.restore_file(&path)] {
            let restored = restored.unwrap();
            let what = format!("{} of {:?} after {at}", work.node, work.input.shape);
            assert!(restored.save().unwrap() == state, "{what}: the state of a restored stream");
            assert!(finish(&restored, work, at) == whole[pulled..], "{what}");
        }
        std::fs::remove_file(&path).unwrap();
    }
    assert!(finish(&stream, work, at) == whole[pulled..]);
}

#[test]
fn stream_continues_from_any_saved_point() {
    on_every_device(|_| {
        let (vae, other) = (Vae::open(&small()).unwrap(), Vae::open(&small()).unwrap());
        // The second handle's own settings do not affect a restored stream.
        other.configure("slice_frames", "3").unwrap();
        other.configure("chunk_frames", "1").unwrap();
        for work in works() {
            for slice in ["auto", "1", "2"] {
                vae.configure("slice_frames", slice).unwrap();
                let last = work.frames() - 1;
                interrupt(&vae, &other, &work, &[0, 1, 2, 4, 5, last - 1, last]);
            }
        }
    });
}

/// States of the CPU in bf16 are the same whatever the instruction set, and are refused in f32.
#[test]
fn stream_in_bf16_continues_in_bf16() {
    let open = |settings: &[(&str, &str)]| {
        let vae = Vae::open(&small()).unwrap();
        settings.iter().for_each(|(key, value)| assert_eq!(vae.configure(key, value).unwrap(), VVAE_OK));
        vae
    };
    let bf16 = ("precision", "bf16");
    let (vae, other) = (open(&[bf16]), open(&[bf16, ("chunk_frames", "1")]));
    for work in works() {
        interrupt(&vae, &other, &work, &[0, 1, 5, work.frames() - 1]);
        let stream = vae.stream(work.node, work.input.shape).unwrap();
        let before = advance(&stream, &work, 0, 5).len() as i64;
        let state = stream.save().unwrap();
        let portable = open(&[bf16, ("instruction_set", "portable")]);
        let restored = portable.restore(&state).unwrap();
        assert_eq!(finish(&restored, &work, 5).len() as i64, work.output[2] - before);
        let why = open(&[]).restore(&state).err().expect("refused");
        why.says(VVAE_ERROR_CHECKPOINT, &["precision is bf16, here it is fp32"]);
    }
}

#[test]
fn tiled_stream_continues_exactly() {
    on_every_device(|_| {
        let (vae, other) = (Vae::open(&small()).unwrap(), Vae::open(&small()).unwrap());
        for (key, value) in [("tiled", "true"), ("tile_size", "64"), ("tile_overlap", "16")] {
            vae.configure(&format!("encode_{key}"), value).unwrap();
            vae.configure(&format!("decode_{key}"), value).unwrap();
        }
        vae.configure("slice_frames", "1").unwrap();
        for work in [
            Work::new("encode", [1, 3, 14, 80, 72], [1, 16, 5, 10, 9]),
            Work::new("decode", [2, 16, 5, 9, 10], [2, 3, 17, 72, 80]),
        ] {
            interrupt(&vae, &other, &work, &[0, 2, work.frames() - 1]);
        }
    });
}

/// Limits that offload more and more of the causal caches.
#[test]
fn offloaded_causal_caches_continue_exactly() {
    on_every_device(|device| {
        if device == "cpu" {
            return;
        }
        let (vae, other) = (Vae::open(&small()).unwrap(), Vae::open(&small()).unwrap());
        for work in [
            Work::new("decode", [1, 16, 6, 50, 66], [1, 3, 21, 400, 528]),
            Work::new("encode", [1, 3, 18, 400, 528], [1, 16, 6, 50, 66]),
        ] {
            let [b, c, _, h, w] = work.input.shape;
            let free = vae.plan(work.node, [b, c, 0, h, w]).unwrap().0.device_bytes;
            let mut offloaded = 0;
            for percent in [80, 60, 45, 35, 25] {
                vae.configure("memory_limit", &(free * percent / 100).to_string()).unwrap();
                let Ok((plan, _)) = vae.plan(work.node, [b, c, 0, h, w]) else { break };
                offloaded += u64::from(plan.past_bytes > 0);
                interrupt(&vae, &other, &work, &[2, work.frames() - 2]);
            }
            assert!(offloaded > 1, "{}: {offloaded}", work.node);
            vae.configure("memory_limit", "auto").unwrap();
        }
    });
}

#[test]
fn state_includes_settings_that_change_results() {
    on_every_device(|_| {
        let work = &works()[1];
        let (vae, other) = (Vae::open(&small()).unwrap(), Vae::open(&small()).unwrap());
        for (key, value) in
            [("posterior", "sample"), ("seed", "77"), ("scaling_factor", "0.9152"), ("pixel_range", "0..1")]
        {
            vae.configure(key, value).unwrap();
        }
        interrupt(&vae, &other, work, &[6]);
    });
}

#[test]
fn save_needs_a_drained_stream_and_enough_room() {
    let (vae, work) = (Vae::open(&small()).unwrap(), &works()[2]);
    vae.configure("slice_frames", "1").unwrap();
    let stream = vae.stream(work.node, work.input.shape).unwrap();
    advance(&stream, work, 0, 3);
    let size = stream.save().unwrap().len() as u64;
    let (mut told, mut small_room) = (0, vec![7u8; size as usize - 1]);
    let (v, s) = (vae.0, stream.s);
    // SAFETY: the buffer has the given size; null pointers are refused.
    unsafe {
        let status = (api().vvae_stream_save)(s, small_room.as_mut_ptr().cast(), size - 1, &mut told);
        Failure { status, text: error_text(v) }.says(VVAE_ERROR_ARGUMENT, &["capacity", &size.to_string()]);
        assert!(told == size && small_room.iter().all(|byte| *byte == 7), "nothing is written");
        let status = (api().vvae_stream_save)(s, small_room.as_mut_ptr().cast(), size, std::ptr::null_mut());
        Failure { status, text: error_text(v) }.says(VVAE_ERROR_ARGUMENT, &["size is null"]);
        let status = (api().vvae_stream_save_file)(s, std::ptr::null());
        Failure { status, text: error_text(v) }.says(VVAE_ERROR_ARGUMENT, &["path is null"]);
    }
    let folder = Folder::new("state-time");
    stream.save_file(&folder.0.join("no/such/folder")).unwrap_err().says(VVAE_ERROR_CHECKPOINT, &["path", "written"]);

    let (status, taken) = stream.push(Some(&work.part(3, 1).tensor())).unwrap();
    assert_eq!((status, taken), (VVAE_OK, 1));
    stream.save().unwrap_err().says(VVAE_ERROR_STATE, &["pull until VVAE_AGAIN"]);
    let existing = folder.file("existing", b"old contents");
    stream.save_file(&existing).unwrap_err().says(VVAE_ERROR_STATE, &["pull until VVAE_AGAIN"]);
    assert_eq!(std::fs::read(&existing).unwrap(), b"old contents");
    assert_eq!(std::fs::read_dir(&folder.0).unwrap().count(), 1);
    pull(&stream, work);
    stream.save_file(&existing).unwrap();
    assert!(std::fs::read(&existing).unwrap() == stream.save().unwrap(), "the new state replaces the file");
    stream.push(None).unwrap();
    stream.save().unwrap_err().says(VVAE_ERROR_STATE, &["complete"]);
    pull(&stream, work);
    stream.save().unwrap_err().says(VVAE_ERROR_STATE, &["complete"]);
}

#[test]
fn state_is_refused_by_another_model_or_device() {
    let (vae, work) = (Vae::open(&small()).unwrap(), &works()[2]);
    let stream = vae.stream(work.node, work.input.shape).unwrap();
    advance(&stream, work, 0, 6);
    let state = stream.save().unwrap();
    // A copy of the checkpoint is the same model.
    let folder = Folder::new("state-model");
    let copy = folder.file("copy.safetensors", &std::fs::read(small()).unwrap());
    assert_eq!(finish(&Vae::open(&copy).unwrap().restore(&state).unwrap(), work, 6), finish(&stream, work, 6));

    let refused = |vae: &Vae, words: &[&str]| {
        let why = vae.restore(&state).err().expect("refused");
        why.says(VVAE_ERROR_CHECKPOINT, words);
        assert_eq!(vae.memory().streams, 0);
    };
    refused(&Vae::open(&golden("medium.safetensors")).unwrap(), &["another checkpoint"]);
    let cramped = Vae::open(&small()).unwrap();
    let needs = vae.plan("decode", [1, 16, 0, 3, 5]).unwrap().0.device_bytes;
    cramped.configure("memory_limit", &(needs - 1).to_string()).unwrap();
    let why = cramped.restore(&state).err().unwrap();
    why.says(VVAE_ERROR_MEMORY, &["memory_limit", &needs.to_string()]);
    cramped.configure("memory_limit", &needs.to_string()).unwrap();
    drop(cramped.restore(&state).expect("exactly enough"));
    on_every_device(|device| {
        if device != "cpu" {
            refused(&Vae::open(&small()).unwrap(), &["device is cpu, here it is cuda"]);
        }
    });

    let mut s = std::ptr::null_mut();
    // SAFETY: null pointers are refused.
    unsafe {
        let status = (api().vvae_stream_restore)(vae.0, std::ptr::null(), 10, &mut s);
        Failure { status, text: error_text(vae.0) }.says(VVAE_ERROR_ARGUMENT, &["state is null"]);
        let status = (api().vvae_stream_restore)(vae.0, state.as_ptr().cast(), u64::MAX, &mut s);
        Failure { status, text: error_text(vae.0) }.says(VVAE_ERROR_ARGUMENT, &["size"]);
        let status = (api().vvae_stream_restore)(vae.0, state.as_ptr().cast(), 10, std::ptr::null_mut());
        Failure { status, text: error_text(vae.0) }.says(VVAE_ERROR_ARGUMENT, &["s is null"]);
    }
    vae.restore_file(&folder.0).err().unwrap().says(VVAE_ERROR_CHECKPOINT, &["path", "not a regular file"]);
    vae.restore_file(&folder.0.join("none")).err().unwrap().says(VVAE_ERROR_CHECKPOINT, &["path", "none"]);
    vae.restore_file(&small()).err().unwrap().says(VVAE_ERROR_CHECKPOINT, &["is not what vvae_stream_save writes"]);
}

/// The end of the header: magic, format and length, then that many bytes. Its checksum follows.
fn header_end(state: &[u8]) -> usize {
    24 + u64::from_le_bytes(state[16..24].try_into().unwrap()) as usize
}

/// Recomputes both checksums.
fn seal(state: &mut [u8]) {
    let (header, end) = (header_end(state), state.len() - 8);
    for at in [header, end] {
        let sum = Checksum::of(&state[..at]).to_le_bytes();
        state[at..at + 8].copy_from_slice(&sum);
    }
}

fn saved(vae: &Vae) -> Vec<u8> {
    let work = &works()[3];
    vae.configure("slice_frames", "1").unwrap();
    let stream = vae.stream(work.node, work.input.shape).unwrap();
    advance(&stream, work, 0, 4);
    stream.save().unwrap()
}

#[test]
fn damaged_states_are_refused() {
    on_every_device(|_| {
        let (vae, mut random) = (Vae::open(&small()).unwrap(), Random(5));
        let state = saved(&vae);
        let refused = |state: &[u8], what: &str| {
            let why = vae.restore(state).err().unwrap_or_else(|| panic!("{what} was accepted"));
            assert_eq!(why.status, VVAE_ERROR_CHECKPOINT, "{what}: {}", why.text);
        };
        let header = header_end(&state) + 8;
        let lengths = (0..header).step_by(7).chain((0..30).map(|_| random.below(state.len() as u64) as usize));
        for length in lengths.chain([state.len() - 1]).collect::<Vec<_>>() {
            refused(&state[..length], &format!("the first {length} bytes"));
        }
        refused(&[&state[..], &[0]].concat(), "one extra byte");
        for turn in 0..header + 60 {
            let at = if turn < header { turn } else { random.below(state.len() as u64) as usize };
            let mut damaged = state.clone();
            damaged[at] ^= 1 << random.below(8);
            refused(&damaged, &format!("a flip at {at}"));
        }
        assert_eq!(vae.memory().streams, 0);
        vae.restore(&state).expect("an intact state is restored");
    });
}

/// Checksums detect damage, not tampering. A forged state with valid checksums is refused or works, and the handle
/// survives.
#[test]
fn forged_states_do_no_harm() {
    on_every_device(|_| {
        let (vae, mut random) = (Vae::open(&small()).unwrap(), Random(6));
        vae.configure("memory_limit", "2GiB").unwrap();
        let (state, work) = (saved(&vae), &works()[3]);
        let header = header_end(&state);
        let mut worked = 0;
        for turn in 0..600 {
            let mut forged = state.clone();
            for _ in 0..1 + turn % 3 {
                let at = 24 + random.below(header as u64 - 24) as usize;
                match random.below(3) {
                    0 => forged[at] ^= 1 << random.below(8),
                    1 => forged[at] = random.next() as u8,
                    _ => {
                        let at = 24 + (at - 24) / 8 * 8;
                        let value = random.pick(&[0, 1, 2, 3, 8, 1 << 20, 1 << 33, u64::MAX, u64::MAX / 2]);
                        forged[at..(at + 8).min(header)].copy_from_slice(&value.to_le_bytes()[..(header - at).min(8)]);
                    }
                }
            }
            seal(&mut forged);
            match vae.restore(&forged) {
                Ok(stream) => {
                    worked += 1;
                    // It must do no harm. Its frames may have another size.
                    let _ = stream.push(Some(&work.part(4, 1).tensor()));
                    let [b, c, _, h, w] = work.output;
                    let _ = stream.pull(&Buffer::new(VVAE_DTYPE_F32, [b, c, 4, h, w]).tensor(), None);
                    let _ = stream.save();
                }
                Err(why) => assert!(
                    matches!(why.status, VVAE_ERROR_CHECKPOINT | VVAE_ERROR_MEMORY),
                    "{}: {}",
                    why.status,
                    why.text
                ),
            }
        }
        assert!(worked > 0, "some forgeries only change the seed");
        vae.restore(&state).expect("the handle still works");
    });
}
