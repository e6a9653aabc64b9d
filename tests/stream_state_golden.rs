//! States of earlier builds continue: the persisted regions of a stream are those that the committed states have.
//!
//! If this fails by intent, raise REVISION in src/exec/state/header.rs, and write the states again:
//! VVAE_UPDATE_STATES=1 cargo test --release --test stream_state_golden

mod common;

use common::{Buffer, Random, Stream, Vae, golden, small};
use video_vae::capi::*;

struct Clip {
    node: &'static str,
    input: Buffer,
    output: [i64; 5],
    /// Frames before the stream is saved.
    before: i64,
}

fn clips() -> [Clip; 2] {
    let clip = |node, input, output, before| {
        let buffer = Buffer::random(&mut Random(33), input);
        Clip { node, input: buffer, output, before }
    };
    [clip("encode", [1, 3, 20, 16, 8], [1, 16, 1, 2, 1], 10), clip("decode", [1, 16, 5, 2, 1], [1, 3, 1, 16, 8], 3)]
}

/// A plan that depends on nothing but these settings.
fn open() -> Vae {
    let vae = Vae::open(&small()).unwrap();
    for (key, value) in [("slice_frames", "2"), ("chunk_frames", "2"), ("instruction_set", "portable")] {
        vae.configure(key, value).unwrap();
    }
    vae
}

/// Pushes some frames, one at a time, and pulls what there is.
fn advance(stream: &Stream, clip: &Clip, frames: std::ops::Range<i64>) -> Vec<f32> {
    let [_, c, t, h, w] = clip.input.shape;
    let (plane, mut out) = ((h * w) as usize, Vec::new());
    for frame in frames {
        let mut one = Buffer::new(VVAE_DTYPE_F32, [1, c, 1, h, w]);
        for (channel, to) in one.f32_mut().chunks_exact_mut(plane).enumerate() {
            to.copy_from_slice(&clip.input.f32()[(channel * t as usize + frame as usize) * plane..][..plane]);
        }
        assert_eq!(stream.push(Some(&one.tensor())).unwrap(), (VVAE_OK, 1));
        let room = Buffer::new(VVAE_DTYPE_F32, clip.output);
        while stream.pull(&room.tensor(), None).unwrap() == (VVAE_OK, 1) {
            out.extend(room.f32());
        }
    }
    out
}

#[test]
fn a_committed_state_continues() {
    for clip in clips() {
        let (vae, path) = (open(), golden(&format!("small-{}.state", clip.node)));
        let whole = vae.stream(clip.node, clip.input.shape).unwrap();
        advance(&whole, &clip, 0..clip.before);
        let saved = whole.save().unwrap();
        if std::env::var_os("VVAE_UPDATE_STATES").is_some() {
            std::fs::write(&path, &saved).unwrap();
        }
        let committed = std::fs::read(&path).unwrap();
        assert_eq!(saved.len(), committed.len(), "{}: other regions are persisted", clip.node);
        let restored = vae.restore(&committed).unwrap();
        let expected = advance(&whole, &clip, clip.before..clip.input.shape[2]);
        let found = advance(&restored, &clip, clip.before..clip.input.shape[2]);
        assert!(!found.is_empty() && found.len() == expected.len(), "{}: {} values", clip.node, found.len());
        // Processors differ in the last bits of weights that are folded.
        let worst = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst < 1e-3, "{}: {worst}; persisted regions lie in another order", clip.node);
    }
}
