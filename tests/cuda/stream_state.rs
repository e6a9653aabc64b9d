//! Saving a stream while its work is in flight on the host's CUDA stream.

use std::time::Duration;

use crate::common::{Buffer, Stream, Vae, run_info, small};
use crate::driver::Gpu;
use crate::{latent, on_device, open, video};
use video_vae::capi::*;

/// Long enough that a save that does not wait is too early.
const DELAY: Duration = Duration::from_millis(60);
const FRAMES: i64 = 7;
const SAVED_AFTER: i64 = 4;

/// Pushes latent frames `from..to` of a compact clip, and calls `pull` after each push.
fn push(stream: &Stream, clip: &Buffer, mut from: i64, to: i64, mut pull: impl FnMut(&Stream)) {
    let [b, c, t, h, w] = clip.shape;
    let strides = [c * t * h * w, t * h * w, h * w, w, 1];
    while from < to {
        let shape = [b, c, to - from, h, w];
        let byte_offset = (from * h * w * 4) as u64;
        let part = vvae_tensor { shape: shape.as_ptr(), strides: strides.as_ptr(), byte_offset, ..clip.tensor() };
        from += stream.push(Some(&part)).unwrap().1;
        pull(stream);
    }
}

/// Pulls into host memory, and appends the frames.
fn pull_all(stream: &Stream, whole: &Buffer, frames: &mut Vec<Vec<u8>>) {
    let [b, c, _, h, w] = whole.shape;
    loop {
        let room = Buffer::new(VVAE_DTYPE_F32, [b, c, 1, h, w]);
        match stream.pull(&room.tensor(), None).unwrap() {
            (VVAE_OK, _) => frames.push(room.bytes().to_vec()),
            _ => return,
        }
    }
}

/// All output from latent frame `from` on.
fn finish(stream: &Stream, clip: &Buffer, whole: &Buffer, from: i64) -> Vec<Vec<u8>> {
    let mut frames = Vec::new();
    push(stream, clip, from, FRAMES, |stream| pull_all(stream, whole, &mut frames));
    stream.push(None).unwrap();
    pull_all(stream, whole, &mut frames);
    frames
}

fn check(gpu: &Gpu, vae: &Vae, clip: &Buffer) {
    let whole = video(clip, VVAE_DTYPE_F32);
    let expected = finish(&vae.stream("decode", clip.shape).unwrap(), clip, &whole, 0);
    let (busy, room) = (gpu.stream(), gpu.copy_of(&vec![0xff; whole.bytes().len()]));
    let run = vvae_run_info { flags: VVAE_RUN_HAS_STREAM, cuda_stream: busy.handle, ..run_info() };
    let stream = vae.stream("decode", clip.shape).unwrap();
    let mut pulled = 0;
    push(&stream, clip, 0, SAVED_AFTER, |stream| {
        loop {
            busy.delay(DELAY);
            match stream.pull(&on_device(&whole, &room), Some(&run)).unwrap() {
                (VVAE_OK, written) => pulled += written as usize,
                _ => return,
            }
        }
    });
    let state = stream.save().unwrap();
    let restored = vae.restore(&state).unwrap();
    assert!(finish(&restored, clip, &whole, SAVED_AFTER) == expected[pulled..]);
    assert!(finish(&stream, clip, &whole, SAVED_AFTER) == expected[pulled..]);
    // A restore must wait for a run that still uses the workspace.
    drop((stream, restored));
    let (latents, mut decoded) = (gpu.copy_of(clip.bytes()), whole.clone());
    for _ in 0..2 {
        busy.delay(DELAY);
        vae.run("decode", &on_device(clip, &latents), &on_device(&whole, &room), &run).unwrap();
        assert!(finish(&vae.restore(&state).unwrap(), clip, &whole, SAVED_AFTER) == expected[pulled..]);
    }
    vae.decode(clip, &mut decoded).unwrap();
    busy.wait();
    assert!(room.read() == decoded.bytes());
}

#[test]
fn save_waits_for_work_on_the_hosts_stream() {
    let Some(gpu) = Gpu::open() else { return };
    let (vae, clip) = (open(&small()), latent(FRAMES, 50, 66));
    let free = vae.plan("decode", [1, 16, 0, 50, 66]).unwrap().0.device_bytes;
    let mut offloaded = 0;
    for percent in [100, 70, 55, 45] {
        vae.configure("memory_limit", &(free * percent / 100).to_string()).unwrap();
        let Ok((plan, _)) = vae.plan("decode", [1, 16, 0, 50, 66]) else { break };
        offloaded += u64::from(plan.past_bytes > 0);
        check(&gpu, &vae, &clip);
    }
    assert!(offloaded > 0, "no limit offloaded a causal cache");
}
