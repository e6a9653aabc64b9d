//! The bodies of the fuzz targets without instrumentation: the committed inputs, and random ones from them.
//! `VVAE_FUZZ_ROUNDS` sets how many of the latter, `VVAE_FUZZ_CORPUS` other inputs.

#[path = "fuzz/src/bodies/mod.rs"]
mod bodies;
mod common;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use common::Random;
use common::process::least_time;

/// No call may take longer.
const MOST_TIME: Duration = Duration::from_secs(2);

/// The inputs of a target, by name.
fn corpus(target: &str) -> Vec<Vec<u8>> {
    let folder = std::env::var_os("VVAE_FUZZ_CORPUS").map_or(common::root().join("tests/fuzz/corpus"), PathBuf::from);
    let files = |folder: &Path| std::fs::read_dir(folder).unwrap_or_else(|why| panic!("{}: {why}", folder.display()));
    let mut paths: Vec<PathBuf> = files(&folder.join(target)).map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths.iter().map(|path| std::fs::read(path).unwrap()).collect()
}

/// Changes bytes, inserts and removes them, joins two inputs.
fn mutate(inputs: &[Vec<u8>], random: &mut Random) -> Vec<u8> {
    let mut data = inputs[random.below(inputs.len() as u64) as usize].clone();
    for _ in 0..1 + random.below(6) {
        let at = random.below(data.len() as u64 + 1) as usize;
        match random.below(6) {
            0 => data.truncate(at),
            1 => data.extend((0..random.below(32)).map(|_| random.next() as u8)),
            2 => data.insert(at, random.next() as u8),
            3 => {
                let other = &inputs[random.below(inputs.len() as u64) as usize];
                data.extend_from_slice(&other[random.below(other.len() as u64 + 1) as usize..]);
            }
            _ if at < data.len() => data[at] = random.next() as u8,
            _ => data.push(random.next() as u8),
        }
    }
    data
}

// Rounds that take about five seconds.

#[test]
fn checkpoints_hold() {
    run("checkpoint", 1500);
}

#[test]
fn settings_hold() {
    run("configure", 20_000);
}

#[test]
fn plans_hold() {
    run("plan", 300);
}

#[test]
fn structs_hold() {
    run("structs", 4000);
}

#[test]
fn calls_hold() {
    run("calls", 400);
}

/// Runs a target's body. `usual`: rounds where the environment names none.
fn run(target: &str, usual: u64) {
    let start = Instant::now();
    let (inputs, mut random) = (corpus(target), Random(25));
    let run = |data: &[u8]| {
        let attempt = || std::panic::catch_unwind(|| bodies::slowest_call(target, data));
        let took = least_time(MOST_TIME, || attempt().unwrap_or_else(|_| panic!("{target} fails for {data:?}")));
        assert!(took < MOST_TIME, "{target}: a call took {took:?} for {data:?}");
    };
    inputs.iter().for_each(|input| run(input));
    let rounds = std::env::var("VVAE_FUZZ_ROUNDS").map_or(usual, |rounds| rounds.parse::<u64>().expect("a number"));
    for _ in 0..rounds {
        run(&mutate(&inputs, &mut random));
    }
    println!("{target}: {} inputs and {rounds} random ones in {:.1?}", inputs.len(), start.elapsed());
}
