//! Convolutions against a reference in f64, bit identity, cancellation and refusals.

use super::case::{ConvCase, layout};
use super::*;
use crate::model::lower::PAIR_SLABS;

#[test]
fn convolution_matches_f64_in_all_kinds_and_sizes() {
    let sizes = [(1, 1), (2, 2), (1, 13), (13, 1), (4, 14), (3, 15), (7, 29), (6, 44)];
    let channels = [(1, 1, 1), (3, 16, 1), (16, 3, 1), (10, 24, 2), (24, 10, 2), (35, 70, 5), (48, 48, 16)];
    for precision in [Precision::Fp32, Precision::Bf16] {
        matches_f64_in_all_kinds_and_sizes(precision, &sizes, &channels);
    }
}

fn matches_f64_in_all_kinds_and_sizes(precision: Precision, sizes: &[(u64, u64)], channels: &[(u64, u64, u64)]) {
    let cpus = cpus(precision);
    let mut seed = 1;
    for window in [Window::Point, Window::Same, Window::Down, Window::Up] {
        for &(height, width) in sizes {
            if window == Window::Down && (height % 2 != 0 || width % 2 != 0) {
                continue;
            }
            for &(cin, cout, groups) in channels {
                seed += 1;
                let prologue = [Prologue::None, Prologue::Norm, Prologue::NormSilu][seed as usize % 3];
                let shortcut = [None, Some(5), Some(33)][seed as usize / 3 % 3];
                let layout =
                    ConvLayout { shortcut, norm: Norm::Group { groups }, ..layout(cin, cout, window, prologue) };
                ConvCase::new(precision, layout, height, width, seed).check(&cpus);
            }
        }
    }
}

#[test]
fn convolution_matches_f64_over_many_areas() {
    let windows = [
        (Window::Same, 512, 35, 33),
        (Window::Up, 512, 31, 27),
        (Window::Down, 256, 30, 54),
        (Window::Same, 2, 90, 61),
    ];
    let all = [Precision::Fp32, Precision::Bf16].into_iter().flat_map(|p| windows.map(|window| (p, window)));
    for (precision, (window, cin, height, width)) in all {
        let layout = ConvLayout { norm: Norm::Group { groups: 2 }, ..layout(cin, 6, window, Prologue::NormSilu) };
        let areas =
            crate::backend::cpu::conv::OutputGrid::new(&layout, FrameShape::new(height, width, cin), precision, false)
                .areas();
        assert!(areas > 1, "{layout:?}");
        ConvCase::new(precision, layout, height, width, 5).check(&cpus(precision));
    }
}

/// A layout whose frames share products by pairs.
fn paired(cin: u64, cout: u64) -> ConvLayout {
    let recipes = crate::testing::paired(Window::Same);
    let (slabs, first_frame_slab) = (recipes.slabs().len() as u64, recipes.first_frame_slab());
    let pairs = Some(PAIR_SLABS);
    ConvLayout { slabs, pairs, first_frame_slab, ..layout(cin, cout, Window::Same, Prologue::NormSilu) }
}

#[test]
fn pairs_match_f64() {
    for precision in [Precision::Fp32, Precision::Bf16] {
        pairs_match_f64_in(precision);
    }
}

fn pairs_match_f64_in(precision: Precision) {
    let cpus = cpus(precision);
    let channels = [(1, 1, 1), (3, 16, 1), (16, 3, 1), (10, 24, 2), (35, 70, 5), (48, 48, 16)];
    let mut seed = 1;
    for (height, width) in [(1, 1), (2, 2), (1, 13), (13, 1), (3, 15), (7, 29)] {
        for (cin, cout, groups) in channels {
            seed += 1;
            let shortcut = [None, Some(5), Some(33)][seed as usize % 3];
            let layout = ConvLayout { shortcut, norm: Norm::Group { groups }, ..paired(cin, cout) };
            ConvCase::new(precision, layout, height, width, seed).check(&cpus);
        }
    }
}

/// Channels with which all slabs have large squares, and with which only that of the first frame has.
const LARGE: [(u64, u64); 2] = [(136, 132), (264, 260)];

#[test]
fn large_squares_match_f64() {
    let cpus = cpus(Precision::Fp32);
    for (height, width) in [(1, 1), (2, 9), (5, 4)] {
        for (cin, cout) in LARGE {
            let single = layout(cin, cout, Window::Same, Prologue::NormSilu);
            for layout in [single, ConvLayout { shortcut: Some(33), ..paired(cin, cout) }] {
                let layout = ConvLayout { norm: Norm::Group { groups: 2 }, ..layout };
                ConvCase::new(Precision::Fp32, layout, height, width, cin + height).check(&cpus);
            }
        }
    }
}

#[test]
fn frames_of_a_pair_have_the_same_bits_alone() {
    for (precision, instructions) in sets() {
        const CUTS: [(usize, usize); 7] = [(1, 1), (2, 1), (2, 2), (3, 3), (16, 4), (5, 5), (2, 6)];
        let small = [(None, (264, 36), &CUTS[..]), (Some(7), (264, 36), &CUTS)];
        let large = [(Some(7), LARGE[0], &CUTS[1..3]), (None, LARGE[1], &CUTS[3..4])];
        let squares = if precision == Precision::Fp32 { &large[..] } else { &[] };
        for (shortcut, (cin, cout), cuts) in small.iter().chain(squares).copied() {
            let layout = ConvLayout { shortcut, norm: Norm::Group { groups: 4 }, ..paired(cin, cout) };
            let mut case = ConvCase::new(precision, layout, 34, 40, 3);
            let grid = crate::backend::cpu::conv::OutputGrid::new(&layout, case.input, precision, false);
            assert!(grid.areas() > 1);
            let expected = bits(&case.run(&cpu_in(precision, instructions, 1), 6, &mut || false).unwrap());
            for &(threads, per_call) in cuts {
                let cpu = cpu_in(precision, instructions, threads);
                let got = bits(&case.run(&cpu, per_call, &mut || false).unwrap());
                assert!(got == expected, "{precision:?} {instructions:?}, {threads} threads, {per_call} a call");
            }
        }
    }
}

#[test]
fn convolution_may_have_no_terms() {
    for precision in [Precision::Fp32, Precision::Bf16] {
        for window in [Window::Same, Window::Up] {
            let mut case = ConvCase::new(precision, layout(4, 40, window, Prologue::None), 3, 5, 9);
            case.frames[0].0.clear();
            case.check(&cpus(precision));
        }
    }
}

#[test]
fn convolution_bits_depend_on_neither_threads_nor_frames_per_call() {
    for (precision, instructions) in sets() {
        for window in [Window::Point, Window::Same, Window::Down, Window::Up] {
            let layout = ConvLayout {
                shortcut: Some(7),
                norm: Norm::Group { groups: 4 },
                ..layout(264, 36, window, Prologue::NormSilu)
            };
            let mut case = ConvCase::new(precision, layout, 34, 40, 3);
            assert!(crate::backend::cpu::conv::OutputGrid::new(&layout, case.input, precision, false).areas() > 1);
            let expected = bits(&case.run(&cpu_in(precision, instructions, 1), 3, &mut || false).unwrap());
            for (threads, per_call) in [(1, 1), (2, 3), (3, 1)] {
                let cpu = cpu_in(precision, instructions, threads);
                let got = bits(&case.run(&cpu, per_call, &mut || false).unwrap());
                let cut = format!("{threads} threads, {per_call} a call");
                assert!(got == expected, "{precision:?} {instructions:?} {window:?}, {cut}");
            }
        }
    }
}

#[test]
fn convolution_can_be_run_again_after_a_stop() {
    for precision in [Precision::Fp32, Precision::Bf16] {
        runs_again_after_a_stop(precision, 1);
        runs_again_after_a_stop(precision, 2);
    }
}

fn runs_again_after_a_stop(precision: Precision, threads: usize) {
    let layout = ConvLayout { norm: Norm::Group { groups: 4 }, ..layout(64, 64, Window::Same, Prologue::NormSilu) };
    let cpu = cpu_in(precision, Instructions::Auto, threads);
    let mut case = ConvCase::new(precision, layout, 120, 120, 3);
    let expected = bits(&case.run(&cpu, 3, &mut || false).unwrap());
    let output = case.output();
    let mut arena = GuardedFrames::new(&cpu);
    let input = arena.frame(case.input, 4, &case.inputs[0]);
    let residual = arena.frame(output, 0, &case.residual);
    let out = DeviceOffset(arena.reserve(cpu.frame_bytes(output, 4)));
    let scratch = arena.reserve(cpu.conv_scratch(&layout, case.input, 1));
    let mut memory = arena.build();
    let conv = crate::testing::prepare(&cpu, (&(), 0), &layout, &mut case.weights).unwrap();
    let terms = vec![Term { frame: input, slab: 0 }];
    let frames = [ConvFrame { terms, bias: 0, residual: Some(residual), out }];
    let op = conv_op(layout, case.input, &frames, true);
    let conv = std::slice::from_ref(&conv);
    for after in 0..6 {
        let mut asked = 0;
        let mut stop = || {
            asked += 1;
            asked > after
        };
        let result = run_op(&cpu, &mut memory, op.clone(), conv, scratch, &mut stop);
        // Only the calling thread asks. Another thread can finish the work before the caller has asked often enough.
        let finished = threads > 1 && after > 0 && result.is_ok();
        assert!(finished || result == Err(Error::Cancelled), "{threads} threads, {after} asked: {result:?}");
    }
    run_op(&cpu, &mut memory, op, conv, scratch, &mut || false).unwrap();
    assert!(bits(&[read(&cpu, &memory, out.0, output, 8)])[0] == expected[0]);
}

#[test]
fn convolution_refuses_invalid_operations() {
    let layout = layout(4, 4, Window::Down, Prologue::None);
    let cpu = cpu(Instructions::Auto, 1);
    let mut case = ConvCase::new(Precision::Fp32, layout, 4, 4, 3);
    let conv = crate::testing::prepare(&cpu, (&(), 0), &layout, &mut case.weights).unwrap();
    let mut memory = cpu.allocate(1 << 20, PinnedBytes::default()).unwrap();
    let terms = vec![Term { frame: DeviceOffset(0), slab: 0 }];
    let good = ConvFrame { terms, bias: 0, residual: None, out: DeviceOffset(4096) };
    let input = case.input;
    let mut run = |layout: &ConvLayout, input, frame, scratch| {
        let frames = [frame];
        let op = conv_op(*layout, input, &frames, false);
        run_op(&cpu, &mut memory, op, std::slice::from_ref(&conv), scratch, &mut || false)
    };
    assert_eq!(run(&layout, input, good.clone(), 8192), Ok(()));
    let refused = |result| matches!(result, Err(Error::Internal(_)));
    assert!(refused(run(&layout, FrameShape::new(3, 4, 4), good.clone(), 8192)));
    assert!(refused(run(&layout, FrameShape::new(4, 4, 5), good.clone(), 8192)));
    assert!(refused(run(&layout, input, good.clone(), (1 << 20) - 64)));
    assert!(refused(run(&layout, input, ConvFrame { out: DeviceOffset(1 << 20), ..good.clone() }, 8192)));
    assert!(refused(run(&layout, input, ConvFrame { bias: 2, ..good.clone() }, 8192)));
    assert!(refused(run(&ConvLayout { slabs: 2, ..layout }, input, good.clone(), 8192)));
    let terms = vec![Term { frame: DeviceOffset(0), slab: 3 }];
    assert!(refused(run(&layout, input, ConvFrame { terms, ..good.clone() }, 8192)));
    let own = Some(4);
    let five = ConvLayout { slabs: 5, first_frame_slab: own, window: Window::Same, cin: 16, cout: 16, ..layout };
    let mut case = ConvCase::new(Precision::Fp32, ConvLayout { slabs: 3, first_frame_slab: None, ..five }, 4, 4, 3);
    case.check(std::slice::from_ref(&cpu));
    let mut case = ConvCase::new(Precision::Fp32, five, 4, 4, 3);
    case.frames = vec![(vec![(0, 4), (1, 0)], 0, false)];
    assert!(refused(case.run(&cpu, 1, &mut || false).map(|_| ())));
    let mut case = ConvCase::new(
        Precision::Fp32,
        ConvLayout { slabs: 3, first_frame_slab: None, shortcut: Some(4), ..five },
        4,
        4,
        3,
    );
    for terms in [vec![(0, 0), (usize::MAX, 3), (usize::MAX, 3)], vec![(usize::MAX, 3), (0, 0)]] {
        case.frames = vec![(terms, 0, false)];
        assert!(refused(case.run(&cpu, 1, &mut || false).map(|_| ())));
    }
    let mut case =
        ConvCase::new(Precision::Fp32, ConvLayout { window: Window::Up, pairs: Some(PAIR_SLABS), ..five }, 4, 4, 3);
    case.frames = vec![(vec![(0, 4)], 0, false)];
    assert!(refused(case.run(&cpu, 1, &mut || false).map(|_| ())));
}
