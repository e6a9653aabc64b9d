//! Forged states are answered with an error or a stream that is right, soon and within little memory, whatever they
//! claim. Alone in its process, as it measures the memory of that.
//!
//! `VVAE_FORGED=100000` tries that many. Every number gives the same states each time.
#![cfg(target_os = "linux")]

mod common;

use std::time::{Duration, Instant};

use common::process::{least_time, processor_time, status_bytes};
use common::state::{Fields, SEAL, is_right, number, saved_states, seal, set};
use common::{Random, Vae, small};
use video_vae::capi::*;

const MEMORY_LIMIT: u64 = 32 << 20;
/// Above the size of the state, the plan's memory included.
const MOST_BYTES: u64 = 64 << 20;
const MOST_TIME: Duration = Duration::from_secs(1);
const VALUES: [u64; 26] = [
    0,
    1,
    2,
    3,
    4,
    5,
    7,
    8,
    9,
    16,
    17,
    64,
    100,
    255,
    256,
    257,
    1000,
    4096,
    4097,
    16384,
    1 << 16,
    1 << 17,
    1 << 20,
    1 << 32,
    1 << 40,
    u64::MAX,
];

/// All that multiplies, at once, in a state of a few hundred bytes.
fn bomb(state: &mut Vec<u8>, fields: &Fields, random: &mut Random) {
    set(state, fields.batch, random.pick(&[1, 2, 64, 255, 256]));
    let side = |random: &mut Random| random.pick(&[1, 8, 64, 128, 1000, 1024, 16384]);
    let rate = if number(state, fields.height) > 9 { 8 } else { 1 };
    for at in [fields.height, fields.width] {
        let value = rate * side(random);
        set(state, at, value);
    }
    let slice = random.pick(&[1, 4, 6, 7, 64, 65, 1000, 4095, 4096]) * if rate > 1 { 4 } else { 1 };
    set(state, fields.slice, slice);
    let chunk = random.pick(&[0, 1, 3, 5, 8]);
    for (stage, at) in fields.chunks.iter().enumerate() {
        set(state, *at, if chunk == 0 { 5 + stage as u64 } else { chunk });
    }
    for (at, values) in fields.tiles.iter().zip([[8, 16, 64, 4096], [8, 16, 64, 131_072], [0, 7, 8, 4088]]) {
        set(state, *at, random.pick(&values));
    }
    let loaded = random.pick(&[0, 0, 1, slice, slice + 1, 2 * slice + 3, 5 * slice + 7, 1 << 40]);
    set(state, fields.loaded, loaded);
    if random.one_in(2) {
        state.truncate(fields.end + 2 * SEAL);
    }
}

fn forge(state: &[u8], random: &mut Random) -> Vec<u8> {
    let (mut state, fields) = (state.to_vec(), Fields::of(state));
    match random.below(10) {
        // Fields, with checksums that are right.
        0..6 => {
            for _ in 0..1 + random.below(4) {
                let at = random.pick(&fields.all);
                let old = number(&state, at);
                let value = match random.below(6) {
                    0 => old.wrapping_add(1),
                    1 => old.wrapping_sub(1),
                    2 => old.wrapping_mul(2),
                    3 => random.next() << random.below(48),
                    _ => random.pick(&VALUES),
                };
                set(&mut state, at, value);
            }
            seal(&mut state, fields.end);
        }
        6..8 => {
            bomb(&mut state, &fields, random);
            seal(&mut state, fields.end);
        }
        8 => {
            // Bytes anywhere, with checksums that are right or not.
            for _ in 0..1 + random.below(8) {
                let at = random.below(state.len() as u64) as usize;
                state[at] = random.next() as u8;
            }
            if random.one_in(2) {
                seal(&mut state, fields.end);
            }
        }
        _ => {
            let length = random.below(state.len() as u64 + 1) as usize;
            state.truncate(length);
            if random.one_in(2) {
                let more = random.below(64);
                state.extend((0..more).map(|_| random.next() as u8));
            }
            if random.one_in(2) {
                seal(&mut state, fields.end);
            }
        }
    }
    state
}

#[test]
fn forged_states_cost_little() {
    let count: u64 = std::env::var("VVAE_FORGED").map_or(3000, |count| count.parse().expect("a number"));
    let (states, mut random) = (saved_states(&small(), ["auto", "9"]), Random(17));
    let vae = Vae::open(&small()).unwrap();
    vae.configure("memory_limit", &MEMORY_LIMIT.to_string()).unwrap();
    states.iter().for_each(|state| drop(vae.restore(state).expect("a real state")));
    let before = status_bytes("VmRSS");
    // The peak starts anew.
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    let (mut restored, mut no_memory, mut refused) = (0, 0, 0);
    let (mut slowest, mut largest) = ((Duration::ZERO, 0), 0);
    for turn in 0..count {
        let forged = forge(&states[random.below(states.len() as u64) as usize], &mut random);
        largest = largest.max(forged.len() as u64);
        let took = least_time(MOST_TIME, || {
            let (start, processor) = (Instant::now(), processor_time());
            let answer = vae.restore(&forged);
            let took = start.elapsed().min(processor_time() - processor);
            match &answer {
                Ok(stream) => {
                    assert!(is_right(&stream.save().unwrap(), &forged), "{turn}: the stream has another state");
                    restored += 1;
                }
                Err(why) if why.status == VVAE_ERROR_MEMORY => no_memory += 1,
                Err(why) => {
                    assert_eq!(why.status, VVAE_ERROR_CHECKPOINT, "{turn}: {}", why.text);
                    refused += 1;
                }
            }
            took
        });
        slowest = slowest.max((took, turn));
        assert!(took < MOST_TIME, "{turn} took {took:?}: {:?}", vae.restore(&forged).err().map(|why| why.text));
    }
    let peak = status_bytes("VmHWM").saturating_sub(before);
    println!(
        "{count} forged states: {restored} restored, {refused} refused, {no_memory} over the limit; slowest {:?} \
         (number {}); peak {} KiB above {} KiB, states of up to {} KiB",
        slowest.0,
        slowest.1,
        peak >> 10,
        before >> 10,
        largest >> 10
    );
    assert!(peak <= MOST_BYTES + largest, "{peak} bytes");
    assert!(restored > 0 && no_memory > 0 && refused > 0);
    states.iter().for_each(|state| drop(vae.restore(state).expect("the handle still works")));
}
