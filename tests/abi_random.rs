//! Ten thousand random sequences of calls with bad arguments, on two handles: see `fuzz/src/bodies/calls.rs`.

#[path = "fuzz/src/bodies/mod.rs"]
mod bodies;
mod common;

use bodies::{VIDEOS, World};
use common::{Buffer, Random, Vae};
use video_vae::capi::*;

/// Of each of the two tests.
const SEQUENCES: u64 = 5_000;

#[test]
fn random_calls_give_errors_or_results() {
    run_sequences(2024);
}

#[test]
fn other_random_calls_give_errors_or_results() {
    run_sequences(2025);
}

fn run_sequences(seed: u64) {
    let first = Vae::open(common::tiny()).unwrap();
    let (mut world, mut random) = (World::new(&first), Random(seed));
    for _ in 0..SEQUENCES {
        let bytes: Vec<u8> = (0..1024).map(|_| random.next() as u8).collect();
        world.sequence(&bytes, 1 + random.below(8) as usize);
    }
    println!("{} results, {} failures", world.results, world.failures);
    assert!(world.results > 500 && world.failures > 500, "both must be frequent");
    world.end();

    for (key, value) in [("memory_limit", "auto"), ("scaling_factor", "1.0"), ("encode_tiled", "false")] {
        first.configure(key, value).unwrap();
    }
    let mut latent = Buffer::new(VVAE_DTYPE_F32, [1, 16, 1, 1, 1]);
    first.encode(&Buffer::new(VVAE_DTYPE_F32, VIDEOS[0]), &mut latent).expect("the handle still works");
}
