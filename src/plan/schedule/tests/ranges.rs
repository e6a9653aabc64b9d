//! Ranges: the same frames as in a run of the whole clip, from no more work than they depend on.

use super::*;

/// (clip, frame, content) of each stored frame.
type Stored = Vec<(u64, u64, u64)>;

impl Request {
    /// The same for a range of this clip.
    fn range(&self, range: FrameRange) -> Request {
        let cone = Cone::new(&self.network, range);
        let inputs = cone.inputs(self.frames.unwrap_or(0));
        Request { frames: Some(inputs.end - inputs.start), cone: Arc::new(cone), ..self.clone() }
    }

    /// A stream that begins with output frame `first`.
    fn stream_at(&self, first: u64) -> Request {
        let range = self.range(FrameRange { first, end: None });
        Request { frames: None, ..range }
    }
}

fn part(of: &Stored, range: FrameRange) -> Stored {
    let within = |frame: u64| frame >= range.first && range.end.is_none_or(|end| frame < end);
    of.iter().filter(|(_, frame, _)| within(*frame)).copied().collect()
}

fn check(whole: &Request, expected: &Stored, range: FrameRange, device: &Device) -> Plan {
    let request = whole.range(range);
    let plan = request.plan(device).unwrap_or_else(|why| panic!("{range:?}: {why:?}"));
    assert_eq!(run(&plan, device), part(expected, range), "{range:?}");
    let end = request.input_end().unwrap();
    assert_eq!(u128::from(work_of(&plan, device)), work(&plan.spec, end), "{range:?}: what is done again counts once");
    plan
}

/// Near the beginning, where the cone reaches it, and beyond; long and short.
fn ranges(outputs: u64) -> impl Iterator<Item = FrameRange> {
    let all = [
        (1, 2),
        (2, 9),
        (3, 4),
        (6, 23),
        (9, 10),
        (13, 14),
        (15, 17),
        (22, 24),
        (31, 60),
        (50, 53),
        (71, 93),
        (88, 90),
    ];
    all.into_iter().filter(move |(_, end)| *end <= outputs).map(|(first, end)| FrameRange { first, end: Some(end) })
}

fn frames_of(direction: Direction, latents: u64) -> u64 {
    if direction == Direction::Encode { 1 + 4 * (latents - 1) } else { latents }
}

#[test]
fn a_range_has_the_frames_of_the_whole_clip() {
    for direction in Direction::ALL {
        for device in [FUSED, SEPARATE, FAST_COPIES] {
            let frames = frames_of(direction, 24);
            let free = request(direction, clip(direction, 1, frames));
            let expected = run(&free.plan(&device).unwrap(), &device);
            for range in ranges(free.network.output_frames(frames)) {
                for (slice, chunk) in [(None, None), (Some(1), Some(1))] {
                    check(&Request { slice, chunk, ..free.clone() }, &expected, range, &device);
                }
            }
        }
    }
}

/// The input ends within a latent frame, and is padded.
#[test]
fn a_range_at_the_end_of_a_clip_is_padded_as_the_clip_is() {
    for frames in [46, 47, 48] {
        let free = request(Direction::Encode, clip(Direction::Encode, 2, frames));
        let expected = run(&free.plan(&FAST_COPIES).unwrap(), &FAST_COPIES);
        for (first, end) in [(3, 13), (12, 13), (9, 12)] {
            check(&free, &expected, FrameRange { first, end: Some(end) }, &FAST_COPIES);
        }
    }
}

#[test]
fn a_long_range_keeps_to_a_plan_made_from_a_few_slices() {
    for direction in Direction::ALL {
        let free = request(direction, clip(direction, 2, frames_of(direction, 100)));
        for device in [FUSED, FAST_COPIES] {
            let expected = run(&free.plan(&device).unwrap(), &device);
            for (slice, latents) in [(Some(1), 61..90), (Some(3), 13..98)] {
                let [first, last] =
                    [latents.start, latents.end].map(|n| if direction == Direction::Encode { n } else { 4 * n });
                for end in [last - 1, last] {
                    let plan = check(
                        &Request { slice, ..free.clone() },
                        &expected,
                        FrameRange { first, end: Some(end) },
                        &device,
                    );
                    assert!(slice.is_none() || is_periodic(&plan.spec), "{slice:?} {latents:?}");
                }
            }
        }
    }
}

/// Under limits: offloaded, recomputed and rematerialised, also with offloaded weights.
#[test]
fn a_range_within_a_limit_has_the_frames_of_the_whole_clip() {
    for direction in Direction::ALL {
        let (mut seen, mut rematerialised, mut fetched) = (HashSet::new(), 0, 0);
        let free = request(direction, clip(direction, 2, frames_of(direction, 24)));
        let expected = run(&free.plan(&SEPARATE).unwrap(), &SEPARATE);
        for device in [SLOW_COPIES, FAST_COPIES] {
            for (first, end) in [(7, 20), (13, 24), (33, 44), (61, 75)] {
                let range = FrameRange { first, end: Some(end) };
                if end > free.network.output_frames(free.frames.unwrap()) {
                    continue;
                }
                let whole = free.range(range).plan(&device).unwrap().device_bytes();
                for percent in [70, 40] {
                    for slice in [None, Some(2)] {
                        let cut = Request { limit: whole * percent / 100, slice, ..free.clone() };
                        let plan = cut.range(range).plan(&device).ok();
                        let Some(plan) = plan.filter(|plan| plan.report().exact) else { continue };
                        assert!(plan.device_bytes() <= cut.limit);
                        seen.extend(
                            plan.spec.policy.layers.iter().filter(|own| own.form == Form::Banded).map(|own| own.cache),
                        );
                        rematerialised += u32::from(rematerialises(&plan.spec.policy, &plan.spec.network));
                        fetched += u32::from(plan.spec.policy.offloaded_weights().contains(&true));
                        check(&cut, &expected, range, &device);
                    }
                }
            }
        }
        assert!(seen.contains(&Placement::HOST) && seen.contains(&Placement::Recomputed), "{direction:?}: {seen:?}");
        assert!(seen.iter().any(|cache| cache.uses_host() && *cache != Placement::HOST), "{direction:?}: {seen:?}");
        assert!((direction == Direction::Encode || rematerialised > 0) && fetched > 0, "{direction:?}");
    }
}

#[test]
fn tiles_of_a_range_are_those_of_the_whole_clip() {
    for direction in Direction::ALL {
        for device in [FUSED, SEPARATE, FAST_COPIES] {
            let free = request(direction, clip(direction, 2, frames_of(direction, 24)));
            let tiled = Request { tiles: TILES, slice: Some(2), ..free };
            let expected = run(&tiled.plan(&device).unwrap(), &device);
            for (first, end) in [(9, 11), (20, 24), (61, 75)] {
                let range = FrameRange { first, end: Some(end) };
                if end > tiled.network.output_frames(tiled.frames.unwrap()) {
                    continue;
                }
                let plan = check(&tiled, &expected, range, &device);
                let spec = ScheduleSpec { order: ItemOrder::SliceBySlice, ..plan.spec.clone() };
                let by_slice = Plan::rehearse(&tiled.range(range), spec, &device.target()).packed(&device.target());
                assert_eq!(run(&by_slice, &device), part(&expected, range), "{range:?}");
            }
        }
    }
}

#[test]
fn a_stream_that_begins_in_the_middle_has_the_frames_of_the_whole_clip() {
    for direction in Direction::ALL {
        for (device, batch, tiles) in
            [(FUSED, 2, None), (SEPARATE, 1, None), (FAST_COPIES, 2, None), (FAST_COPIES, 1, TILES)]
        {
            let frames = frames_of(direction, 40);
            let free = Request { tiles, slice: Some(2), ..request(direction, clip(direction, batch, frames)) };
            let expected = run(&free.plan(&device).unwrap(), &device);
            for first in [2, 17, 38, 90] {
                let range = FrameRange { first, end: None };
                if first >= free.network.output_frames(frames) {
                    continue;
                }
                for slice in [1, 3] {
                    let plan = Request { slice: Some(slice), ..free.clone() }.stream_at(first).plan(&device).unwrap();
                    for piece in [1, 7] {
                        assert_eq!(run_pushed(&plan, &device, frames, piece), part(&expected, range), "{first}");
                    }
                }
            }
        }
    }
}

/// Also before its first output frame.
#[test]
fn a_stream_that_begins_in_the_middle_may_end_anywhere() {
    for direction in Direction::ALL {
        for (slice, device) in [(1, FUSED), (3, SEPARATE), (2, FAST_COPIES)] {
            let free = Request { slice: Some(slice), ..request(direction, clip(direction, 2, 0)) };
            let plan = free.stream_at(21).plan(&device).unwrap();
            let start = plan.spec.cone.first_input;
            for end in (start..start + 90).step_by(if slice == 1 { 1 } else { 5 }) {
                let outputs = if end > start { free.network.output_frames(end) } else { 0 };
                let made = run_pushed(&plan, &device, end, 5).len() as u64;
                assert_eq!(made, 2 * outputs.saturating_sub(21), "{direction:?} {end}");
            }
        }
    }
}

/// Every cache that can be is offloaded or recomputed.
#[test]
fn a_stream_that_begins_in_the_middle_has_the_frames_of_the_whole_clip_in_every_policy() {
    for direction in Direction::ALL {
        let free = request(direction, clip(direction, 2, frames_of(direction, 20)));
        let expected = run(&free.plan(&SEPARATE).unwrap(), &SEPARATE);
        for (first, rematerialise) in [(0, false), (3, true), (11, false), (11, true), (19, true)] {
            let stream = Request { slice: Some(2), ..free.clone() }.stream_at(first);
            let policy = policies::without_caches(&stream, (1, rematerialise));
            let plan = stream.plan_by(policy, &FAST_COPIES);
            let found = run_pushed(&plan, &FAST_COPIES, free.frames.unwrap(), 5);
            let what = format!("{direction:?} from {first}, rematerialised {rematerialise}");
            assert_eq!(found, part(&expected, FrameRange { first, end: None }), "{what}");
        }
    }
}

#[test]
fn the_estimate_of_a_long_range_is_that_of_all_its_operations() {
    for direction in Direction::ALL {
        let free = Request { slice: Some(2), ..request(direction, clip(direction, 1, frames_of(direction, 120))) };
        let (first, end) = if direction == Direction::Encode { (50, 119) } else { (200, 475) };
        let plan = free.range(FrameRange { first, end: Some(end) }).plan(&SLOW_COPIES).unwrap();
        assert_estimated(&plan, 2e-3);
    }
}

/// What a cut costs, in output frames: the work that a range in the middle has beyond its frames' share of a long run.
#[test]
fn a_cut_costs_the_frames_that_the_arithmetic_says() {
    let sizes = Sizes::published();
    for (direction, input, most) in [
        (Direction::Decode, Shape::new(1, 16, 0, 135, 240), 27.0),
        (Direction::Encode, Shape::new(1, 3, 0, 1080, 1920), 105.0),
    ] {
        let network = network(&sizes, direction);
        let work_of = |first: u64, count: u64| {
            let cone = Cone::new(&network, FrameRange { first, end: Some(first + count) });
            let end = cone.inputs(u64::MAX).end;
            let input = FrameShape::new(input.height, input.width, input.channels);
            cone.work(&network, input, end) as f64
        };
        // In video frames for both directions.
        let (rate, per_output) = if direction == Direction::Decode { (4, 1.0) } else { (1, 4.0) };
        let period = (work_of(1000, 200 * rate) - work_of(1000, 100 * rate)) / (100 * rate) as f64;
        let costs = (0..4).map(|phase| {
            let count = 100;
            (work_of(1000 + phase, count) / period - count as f64) * per_output
        });
        let cost = costs.fold(0.0, f64::max);
        println!("{direction:?}: a cut costs {cost:.1} frames");
        assert!(cost > 0.0 && cost <= most, "{direction:?}: {cost:.1} frames");
    }
}
