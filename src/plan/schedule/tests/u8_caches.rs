//! Causal caches in 8 bits: every plan reads the same frames rounded, as the definition says.

use super::symbols::hash;
use super::*;
use crate::ir::{CacheFormat, Repeat};
use crate::model::{LevelMap, LevelShortcut, RecipeTerm, Source, pair_of};

impl Request {
    fn with_u8_caches(self) -> Request {
        Request { network: Arc::new(Network::clone(&self.network).with_u8_caches()), ..self }
    }
}

/// The contents of frames 0, 1 and so on.
type Contents = Vec<u64>;

/// The layer's output frames by definition. `shortcut`: frames that the layer's last slab reads. `residual`: added.
fn layer_outputs(
    network: &Network,
    layer: usize,
    inputs: &Contents,
    shortcut: Option<&Contents>,
    residual: Option<&Contents>,
) -> Contents {
    let facts = &network.layers[layer];
    let normalised = |content: u64| if facts.norm.is_some() { hash(("norm", layer, content)) } else { content };
    let outputs = 0..facts.time.outputs(inputs.len() as u64);
    let output = |frame: u64| {
        let recipe = facts.time.recipe(frame);
        if recipe.is_passed {
            return inputs[recipe.terms()[0].input as usize];
        }
        let term = |term: &RecipeTerm| {
            let content = normalised(inputs[term.input as usize]);
            let is_rounded = facts.cache == CacheFormat::U8 && pair_of(term.input) < pair_of(frame);
            (if is_rounded { hash(("rounded", content)) } else { content }, term.slab)
        };
        let mut terms: Vec<(u64, u8)> = recipe.terms().iter().map(term).collect();
        terms.extend(shortcut.map(|x| (x[frame as usize], facts.layout.slabs as u8)));
        hash((layer, terms, recipe.bias, residual.map(|x| x[frame as usize])))
    };
    outputs.map(output).collect()
}

/// Adds what goes around a level to a layer's output frames, by definition.
fn add_around(network: &Network, layer: usize, level: &LevelShortcut, from: &Contents, made: &mut Contents) {
    let (parts, cout) = (level.parts as usize, |layer: usize| network.layers[layer].layout.cout);
    // The frame of the value that is a part of frame t.
    let source = |t: usize, part: usize| {
        if level.still { (part == parts - 1).then_some(t) } else { (parts * t + part).checked_sub(parts - 1) }
    };
    for (f, content) in made.iter_mut().enumerate() {
        let (repeat, part, addend) = match level.map {
            LevelMap::Mean => {
                let mean = |before: Option<u64>, part: usize| match source(f, part) {
                    Some(frame) => Some(hash(("mean", before, part as u64, from[frame]))),
                    None => before,
                };
                let repeat = Repeat { channels: cout(layer), side: 1, parts: 1 };
                (repeat, 0, (0..parts).fold(None, mean).unwrap())
            }
            LevelMap::Repeat { side } => {
                let repeat = Repeat { channels: cout(level.from), side, parts: level.parts };
                let is_of = |(t, part): &(usize, usize)| source(*t, *part) == Some(f);
                let all = (0..=f).flat_map(|t| (0..parts).map(move |part| (t, part)));
                let (t, part) = all.into_iter().find(is_of).unwrap();
                (repeat, part as u64, from[t])
            }
        };
        *content = hash(("sum", repeat, *content, part, addend));
    }
}

/// A network's output frames by definition.
fn defined_outputs(network: &Network, inputs: Contents) -> Contents {
    let mut outputs: Vec<Contents> = Vec::new();
    for (id, layer) in network.layers.iter().enumerate() {
        let value = |source: Source| match source {
            Source::Input => &inputs,
            Source::Layer(from) => &outputs[from],
        };
        let mixed: Contents;
        let mut input = value(layer.input);
        if layer.attends {
            mixed = input.iter().map(|content| hash(("attention", *content))).collect();
            input = &mixed;
        }
        let added = layer.addend.map(value);
        let (shortcut, residual) = if layer.layout.shortcut.is_some() { (added, None) } else { (None, added) };
        let mut made = layer_outputs(network, id, input, shortcut, residual);
        if let Some(level) = layer.level {
            add_around(network, id, &level, &outputs[level.from], &mut made);
        }
        outputs.push(made);
    }
    outputs.pop().unwrap()
}

/// (clip, frame, content) of all frames of `request`.
pub fn defined(request: &Request) -> Vec<(u64, u64, u64)> {
    let clip = |batch: u64| {
        let frames = request.frames.unwrap();
        let padded = request.network.padded_frames(frames);
        let load = |frame: u64| hash((batch, frame.min(frames - 1), 0u64, 0u64));
        let outputs = defined_outputs(&request.network, (0..padded).map(load).collect());
        (0..).zip(outputs).map(move |(frame, content)| (batch, frame, content)).collect::<Vec<_>>()
    };
    (0..request.batch).flat_map(clip).collect()
}

#[test]
fn plans_compute_what_the_definition_says() {
    for direction in Direction::ALL {
        for frames in [1, 2, 5, 14] {
            let plain = request(direction, clip(direction, 2, frames));
            for request in [plain.clone(), plain.clone().with_pairs()] {
                assert_eq!(run(&request.plan(&SEPARATE).unwrap(), &SEPARATE), defined(&request));
            }
            for request in [plain.clone().with_u8_caches(), plain.with_pairs().with_u8_caches()] {
                let (plan, rounds) = (request.plan(&FAST_COPIES).unwrap(), frames > 1);
                assert_eq!(run(&plan, &FAST_COPIES), defined(&request));
                assert_eq!(plan.spec.policy.layers.iter().any(|own| own.form == Form::Banded), rounds);
            }
        }
    }
}

#[test]
fn u8_caches_do_not_depend_on_the_cut() {
    for direction in Direction::ALL {
        let (mut seen, mut rematerialised, mut smaller) = (HashSet::new(), 0, 0);
        for frames in [2, 23] {
            let exact = request(direction, clip(direction, 1, frames)).with_pairs();
            let free = exact.clone().with_u8_caches();
            let expected = defined(&free);
            let whole = free.plan(&FAST_COPIES).unwrap().device_bytes();
            for device in [SLOW_COPIES, FAST_COPIES] {
                for percent in [85, 55, 40] {
                    for (slice, chunk) in [(None, None), (Some(1), Some(1)), (Some(2), Some(3))] {
                        let cut = Request { limit: whole * percent / 100, slice, chunk, ..free.clone() };
                        let Some(plan) = cut.plan(&device).ok().filter(|plan| plan.spec.grid.is_none()) else {
                            continue;
                        };
                        assert!(plan.device_bytes() <= cut.limit);
                        seen.extend(
                            plan.spec.policy.layers.iter().filter(|own| own.form == Form::Banded).map(|own| own.cache),
                        );
                        rematerialised += u32::from(rematerialises(&plan.spec.policy, &plan.spec.network));
                        assert_eq!(run(&plan, &device), expected, "{frames} {percent} {slice:?} {chunk:?}");
                        let stream = Request { frames: None, ..cut.clone() };
                        if let Some(plan) = stream.plan(&device).ok().filter(|plan| plan.spec.grid.is_none()) {
                            assert_eq!(
                                run_pushed(&plan, &device, frames, 3),
                                expected,
                                "{direction:?} {:?}",
                                plan.spec.policy
                            );
                        }
                        let exact = Request { limit: cut.limit, slice, chunk, ..exact.clone() }.plan(&device);
                        let offloaded = |plan: &Plan| plan.pinned().offloaded;
                        smaller += u32::from(exact.is_ok_and(|exact| offloaded(&plan) * 10 < offloaded(&exact) * 7));
                    }
                }
            }
        }
        let split = |cache: &Placement| cache.uses_host() && *cache != Placement::HOST;
        let all = [Placement::HOST, Placement::RESIDENT, Placement::Recomputed];
        assert!(all.iter().all(|cache| seen.contains(cache)) && seen.iter().any(split), "{direction:?}: {seen:?}");
        assert!(direction == Direction::Encode || rematerialised > 0);
        assert!(smaller > 0, "{direction:?}: no plan needs less host memory");
    }
}
