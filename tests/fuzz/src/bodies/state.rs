//! Saved states with other fields, bytes and lengths, mostly with checksums that are right. One that is restored has
//! the state that it was restored from, and can be run to its end.

use std::sync::OnceLock;

use super::{Bytes, timed};
use crate::common::state::{Fields, SEAL, is_right, number, saved_states, seal, set};
use crate::common::{Buffer, LATENT_CHANNELS, Stream, Vae, tiny};
use video_vae::capi::*;

struct Fixture {
    vae: Vae,
    states: Vec<Vec<u8>>,
}

fn fixture() -> &'static Fixture {
    static FIXTURE: OnceLock<Fixture> = OnceLock::new();
    FIXTURE.get_or_init(|| {
        let vae = Vae::open(tiny()).expect("the tiny checkpoint");
        vae.configure("memory_limit", "32MiB").expect("a limit");
        vae.configure("threads", "1").expect("a number");
        // Short slices: a state is rehearsed over a dozen of them.
        Fixture { vae, states: saved_states(tiny(), ["1", "2"]) }
    })
}

/// Sets fields, in a state that may be any.
fn set_fields(state: &mut [u8], fields: &Fields, bytes: &mut Bytes) {
    for _ in 0..1 + bytes.below(8) {
        let at = bytes.pick(&fields.all);
        let old = number(state, at);
        let value = match bytes.below(5) {
            0 => old.wrapping_add(1),
            1 => old.wrapping_sub(1),
            2 => old.wrapping_mul(2),
            _ => bytes.number(),
        };
        set(state, at, value);
    }
}

fn forged(bytes: &mut Bytes) -> Vec<u8> {
    let states = &fixture().states;
    let state = &states[bytes.below(states.len() as u64) as usize];
    let (mut state, fields) = (state.clone(), Fields::of(state));
    let (how, sealed) = (bytes.below(8), !bytes.one_in(8));
    match how {
        0..=3 => set_fields(&mut state, &fields, bytes),
        4 => {
            // What multiplies, at once.
            let places = [&fields.chunks[..], &fields.tiles, &[fields.batch, fields.height, fields.width]].concat();
            for at in [&places[..], &[fields.slice, fields.loaded]].concat() {
                let value = bytes.number();
                set(&mut state, at, value);
            }
            if bytes.one_in(2) {
                state.truncate(fields.end + 2 * SEAL);
            }
        }
        5 => {
            for _ in 0..1 + bytes.below(8) {
                let at = bytes.below(state.len() as u64) as usize;
                state[at] = bytes.byte();
            }
        }
        6 => {
            state.truncate(bytes.below(state.len() as u64 + 1) as usize);
            state.extend_from_slice(bytes.rest());
        }
        // Any body of a header.
        _ => {
            let body = bytes.rest();
            state.truncate(16);
            state.extend_from_slice(&(body.len() as u64).to_le_bytes());
            state.extend_from_slice(body);
            let end = state.len();
            state.resize(end + 2 * SEAL, 0);
            seal(&mut state, end);
            return state;
        }
    }
    if sealed {
        seal(&mut state, fields.end);
    }
    state
}

/// Ends the clip and pulls what is left.
fn finish(stream: &Stream, fields: &Fields, state: &[u8]) {
    let [batch, height, width] = [fields.batch, fields.height, fields.width].map(|at| number(state, at).cast_signed());
    if batch.saturating_mul(height).saturating_mul(width) > 1024 {
        return;
    }
    let channels = number(state, fields.height - 8);
    let shape = match channels {
        3 => [batch, LATENT_CHANNELS, 1, height.div_euclid(8) + (height % 8).min(1), (width + 7) / 8],
        _ => [batch, 3, 4, 8 * height, 8 * width],
    };
    let room = Buffer::new(VVAE_DTYPE_F32, shape);
    timed("the end of the stream", || {
        if stream.push(None).is_ok() {
            while stream.pull(&room.tensor(), None).is_ok_and(|(status, _)| status == VVAE_OK) {}
        }
    });
}

pub fn run(data: &[u8]) {
    let mut bytes = Bytes::new(data);
    // Computing finds less than restoring, and takes longer.
    let finishes = bytes.below(8) == 0;
    let state = forged(&mut bytes);
    match timed("restore", || fixture().vae.restore(&state)) {
        Ok(stream) => {
            let saved = stream.save().expect("it was just restored");
            assert!(is_right(&saved, &state), "the stream has another state");
            if finishes {
                finish(&stream, &Fields::of(&saved), &saved);
            }
        }
        Err(why) => assert!([VVAE_ERROR_CHECKPOINT, VVAE_ERROR_MEMORY].contains(&why.status), "{why:?}"),
    }
}
