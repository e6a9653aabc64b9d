//! States of streams, by the places of their fields.

use std::path::Path;

use super::{Buffer, Vae};
use video_vae::capi::*;
use video_vae::checksum::Checksum;

/// Magic, format and length; the body of the header follows.
const PREAMBLE: usize = 24;
pub const SEAL: usize = 8;

pub fn number(state: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(state[at..at + 8].try_into().unwrap())
}

pub fn set(state: &mut [u8], at: usize, value: u64) {
    state[at..at + 8].copy_from_slice(&value.to_le_bytes());
}

/// Where the numbers of a header are, by what they mean.
pub struct Fields {
    pub all: Vec<usize>,
    pub batch: usize,
    pub height: usize,
    pub width: usize,
    pub slice: usize,
    pub chunks: Vec<usize>,
    /// Height, width and overlap, if there are tiles.
    pub tiles: Vec<usize>,
    pub loaded: usize,
    pub end: usize,
}

impl Fields {
    pub fn of(state: &[u8]) -> Fields {
        let end = PREAMBLE + number(state, 16) as usize;
        let mut at = PREAMBLE;
        // The library's version, a number, device, precision and cache format.
        let mut texts = Vec::new();
        for text in [true, false, true, true, true] {
            texts.push(at);
            at += 8 + if text { number(state, at) as usize } else { 0 };
        }
        let numbers: Vec<usize> = (at..end).step_by(8).collect();
        let list = |first: usize| {
            let count = number(state, numbers[first]) as usize;
            (numbers[first + 1..first + 1 + count].to_vec(), first + 1 + count)
        };
        // Model and direction; batch, channels, height, width; four settings; slice.
        let (chunks, mut next) = list(11);
        // Materialised outputs of heads and hidden frames; cache policies and offloaded weights.
        for _ in 0..4 {
            (_, next) = list(next);
        }
        let (tiles, next) = list(next);
        // The first output frame, and the next input frame.
        assert_eq!(numbers[next] + 16, end, "the header has changed");
        let [batch, height, width, slice, loaded] = [2, 4, 5, 10, next + 1].map(|field| numbers[field]);
        Fields { all: [texts, numbers].concat(), batch, height, width, slice, chunks, tiles, loaded, end }
    }
}

/// Makes the checksums right.
pub fn seal(state: &mut [u8], header: usize) {
    for at in [header, state.len().saturating_sub(SEAL)] {
        if at + SEAL <= state.len() {
            let sum = Checksum::of(&state[..at]).to_le_bytes();
            state[at..at + SEAL].copy_from_slice(&sum);
        }
    }
}

/// Streams of both directions, with and without tiles, batches and `long` slices, saved at several frames.
pub fn saved_states(weights: &Path, [usual, long]: [&str; 2]) -> Vec<Vec<u8>> {
    let mut states = Vec::new();
    for (node, shape) in [("encode", [1, 3, 1, 72, 8]), ("decode", [1, 16, 1, 9, 1]), ("decode", [3, 16, 1, 2, 3])] {
        for (tiled, slice) in [("false", usual), ("true", "1"), ("false", long)] {
            let vae = Vae::open(weights).unwrap();
            vae.configure("slice_frames", slice).unwrap();
            for (key, value) in [("tiled", tiled), ("tile_size", "64"), ("tile_overlap", "16")] {
                vae.configure(&format!("{node}_{key}"), value).unwrap();
            }
            let stream = vae.stream(node, shape).unwrap();
            let room = if node == "encode" { [1, 16, 4, 9, 1] } else { [shape[0], 3, 40, 8 * shape[3], 8 * shape[4]] };
            for frames in [0, 1, 2, 9] {
                let mut pushed = 0;
                while pushed < frames {
                    pushed += stream.push(Some(&Buffer::new(VVAE_DTYPE_F32, shape).tensor())).unwrap().1;
                    while stream.pull(&Buffer::new(VVAE_DTYPE_F32, room).tensor(), None).unwrap().1 > 0 {}
                }
                states.push(stream.save().unwrap());
            }
        }
    }
    states
}

/// A restored stream has the state that it was restored from, but for the version of the library.
pub fn is_right(saved: &[u8], state: &[u8]) -> bool {
    let version = PREAMBLE + 8..PREAMBLE + 8 + number(saved, PREAMBLE) as usize;
    let sums = [Fields::of(saved).end, saved.len() - SEAL];
    let may_differ = |at: usize| version.contains(&at) || sums.iter().any(|sum| (*sum..sum + SEAL).contains(&at));
    let same = |(at, (a, b)): (usize, (&u8, &u8))| a == b || may_differ(at);
    saved.len() == state.len() && saved.iter().zip(state).enumerate().all(same)
}
