//! Ten thousand random sequences of calls with bad arguments, on one handle: see `fuzz/src/bodies/calls.rs`.

#[path = "fuzz/src/bodies/mod.rs"]
mod bodies;
mod common;

use bodies::{VIDEOS, World};
use common::{Buffer, Random, Vae};
use video_vae::capi::*;

const SEQUENCES: u64 = 10_000;

#[test]
fn random_calls_give_errors_or_results() {
    let first = Vae::open(common::tiny()).unwrap();
    let (mut world, mut random) = (World::new(&first), Random(2024));
    for _ in 0..SEQUENCES {
        let bytes: Vec<u8> = (0..1024).map(|_| random.next() as u8).collect();
        world.sequence(&bytes, 1 + random.below(8) as usize);
    }
    println!("{} results, {} failures", world.results, world.failures);
    assert!(world.results > 1000 && world.failures > 1000, "both must be frequent");
    world.end();

    for (key, value) in [("memory_limit", "auto"), ("scaling_factor", "1.0"), ("encode_tiled", "false")] {
        first.configure(key, value).unwrap();
    }
    let mut latent = Buffer::new(VVAE_DTYPE_F32, [1, 16, 1, 1, 1]);
    first.encode(&Buffer::new(VVAE_DTYPE_F32, VIDEOS[0]), &mut latent).expect("the handle still works");
}
