//! The operations of many plans do not change by accident: hashes of a listing, compared with a committed table.
//!
//! The listing names no slot and no offset: each operation with its layer, its frames, the slabs of their terms, and
//! what is cached, in order. `VVAE_UPDATE_SCHEDULES=1` writes the table, `VVAE_LIST_SCHEDULES=FOLDER` the listings.

#![cfg(feature = "cuda")]

use std::fmt::Write;
use std::path::Path;
use std::sync::Arc;

use crate::common::planner::{self, H200, published};
use video_vae::internals::backend::Precision;
use video_vae::internals::backend::cuda::{CudaSizes, KernelArch, device_profile};
use video_vae::internals::ir::{BandInput, BandTerm, FrameRef, Location, Op};
use video_vae::internals::model::{Direction, Network};
use video_vae::internals::plan::{Plan, Target, search};
use xxhash_rust::xxh64::xxh64;

/// Frames, height, width, limit in GiB (0 is the whole device).
const JOBS: [([u64; 3], f64); 17] = [
    ([1, 256, 256], 0.0),
    ([21, 256, 256], 0.0),
    ([57, 256, 256], 0.75),
    ([5, 512, 512], 0.0),
    ([21, 512, 512], 0.9),
    ([21, 720, 1280], 0.0),
    ([22, 720, 1280], 2.7),
    ([45, 720, 1280], 2.0),
    ([1, 1080, 1920], 0.0),
    ([1, 1080, 1920], 1.5),
    ([41, 1080, 1920], 10.0),
    ([41, 1080, 1920], 6.0),
    ([41, 1080, 1920], 5.0),
    ([21, 1080, 1920], 4.0),
    ([1, 2160, 3840], 4.0),
    ([21, 2160, 3840], 16.0),
    ([9, 2160, 3840], 6.0),
];

fn place<L: Location>(at: &FrameRef<L>) -> String {
    match at {
        FrameRef::Resident(_) => "r".into(),
        FrameRef::Offloaded { .. } => "o".into(),
        FrameRef::Rematerialised { index, .. } => format!("m{index}"),
    }
}

/// One operation, without the places of its frames.
fn line<L: Location>(op: &Op<L>) -> String {
    let mut text = String::new();
    match op {
        Op::Load(op) => write!(text, "load {} {} {}", op.item, op.batch, op.frame),
        Op::Fetch(op) => write!(text, "fetch {} {}", op.layer, op.into.slabs),
        Op::Conv(op) => {
            let frames: Vec<String> = op
                .frames
                .iter()
                .map(|frame| {
                    let slabs: Vec<u8> = frame.terms.iter().map(|term| term.slab).collect();
                    format!("{slabs:?}/{}/{}", frame.bias, frame.residual.is_some())
                })
                .collect();
            let after = op.partial_sums.after.as_ref().map(|after| {
                after.pending.iter().map(|terms| terms.iter().map(|t| t.slab).collect()).collect::<Vec<Vec<u8>>>()
            });
            write!(
                text,
                "conv {} {:?} weights {:?} frames {frames:?} sums {} {after:?} statistics {}",
                op.layer,
                op.input,
                op.weights.map(|weights| weights.slabs),
                op.partial_sums.before.is_some(),
                op.statistics
            )
        }
        Op::BandedConv(op) => {
            let parts = |resident: bool, host: bool| format!("{}{}", u8::from(resident), u8::from(host));
            let cached: Vec<String> =
                op.cached().map(|(_, frame)| parts(frame.resident.is_some(), frame.host.is_some())).collect();
            let fresh: Vec<_> = op.fresh().map(|(_, frame)| frame).collect();
            // Fresh inputs are counted without the cached ones; what is cached, without the recomputed ones too.
            let inputs = &op.inputs[cached.len()..];
            let numbers = |kept: fn(&BandInput<L>) -> bool| {
                let found = inputs.iter().enumerate().filter(|(_, input)| kept(input));
                found.map(|(i, _)| i).collect::<Vec<usize>>()
            };
            let rounded = numbers(|input| input.is_rounded);
            let saved = numbers(|input| input.statistics_to.is_some());
            let writes = numbers(|input| input.cached_to.is_some());
            let frames: Vec<String> = op
                .frames
                .iter()
                .map(|frame| {
                    let shortcut = frame.shortcut.map(|shortcut| format!("{}{}", place(&shortcut.from), shortcut.slab));
                    let residual = frame.residual.is_some();
                    // Rounded inputs are counted after all others.
                    let input = |term: &BandTerm| match term.is_rounded {
                        false => term.input,
                        true => op.inputs.len() + rounded.iter().position(|i| *i == term.input - cached.len()).unwrap(),
                    };
                    let terms: Vec<(usize, u8)> = frame.terms.iter().map(|term| (input(term), term.slab)).collect();
                    format!("{terms:?}/{shortcut:?}/{}/{residual}/{}", frame.bias, place(&frame.out))
                })
                .collect();
            let by = op.rematerialise.as_ref().map(|by| {
                let frames: Vec<Vec<u8>> =
                    by.frames.iter().map(|frame| frame.terms.iter().map(|term| term.slab).collect()).collect();
                format!("{} {:?} {} {frames:?}", by.layer, by.input, by.block_inputs.len())
            });
            write!(
                text,
                "banded {} {:?} weights {:?} cached {cached:?} fresh {:?} writes {writes:?} columns {} rounded {:?} saved \
                 {saved:?} frames {frames:?} by {by:?} statistics {}",
                op.layer,
                op.input,
                op.weights.map(|weights| weights.slabs),
                fresh.iter().map(place).collect::<Vec<_>>(),
                op.columns.split(),
                rounded,
                op.statistics
            )
        }
        Op::Normalise(op) => write!(text, "normalise {} {:?} {}", op.layer, op.shape, op.frames.len()),
        Op::Attention(op) => write!(text, "attention {:?} {}", op.shape, op.frames.len()),
        Op::Pool(op) => write!(text, "pool {:?} {} {}", op.input, op.parts, op.frames.len()),
        Op::Add(op) => write!(text, "add {:?} {:?} {}", op.shape, op.repeat, op.frames.len()),
        Op::Blend(op) => write!(text, "blend {} {}", op.item, op.clear),
        Op::Store(op) => write!(text, "store {} {}", op.batch, op.frame),
    }
    .unwrap();
    text
}

fn listing(plan: &Plan, target: &Target) -> String {
    let mut text = String::new();
    // A stream is not fed.
    let ended = plan.schedule(target).walk(None, |_, op| op.is_some_and(|op| writeln!(text, "{}", line(op)).is_ok()));
    assert!(ended);
    text
}

fn table() -> String {
    let config = published();
    let sizes = CudaSizes::new(Precision::Fp16, KernelArch::HOPPER);
    let profile = device_profile(H200, Precision::Fp16, KernelArch { major: 9, minor: 0 });
    let target = Target::new(profile, &sizes, config.groups);
    let folder = std::env::var_os("VVAE_LIST_SCHEDULES");
    let mut table = String::new();
    for direction in [Direction::Encode, Direction::Decode] {
        let network = Arc::new(Network::new(&config.model(), direction).unwrap().for_device(profile.paired_layers()));
        for (shape, limit) in JOBS {
            let plan = search(&planner::limited(&network, shape, limit), &target).unwrap();
            let text = listing(&plan, &target);
            let name = format!("{}-{}x{}x{}-{limit}", direction.name(), shape[0], shape[1], shape[2]);
            if let Some(folder) = &folder {
                std::fs::write(Path::new(folder).join(format!("{name}.txt")), &text).unwrap();
            }
            writeln!(table, "{name}: {} operations, {:016x}", text.lines().count(), xxh64(text.as_bytes(), 0)).unwrap();
        }
    }
    table
}

#[test]
fn schedules_are_those_of_the_table() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/planner_schedules.txt");
    let found = table();
    if std::env::var_os("VVAE_UPDATE_SCHEDULES").is_some() {
        std::fs::write(&path, found).unwrap();
        return;
    }
    let expected = std::fs::read_to_string(&path).unwrap();
    let differ = expected.lines().zip(found.lines()).filter(|(expected, found)| expected != found);
    let differ: Vec<String> = differ.map(|(expected, found)| format!("- {expected}\n+ {found}\n")).collect();
    assert!(expected == found, "{} schedules differ:\n{}", differ.len(), differ.concat());
}
