//! Shortcuts around levels, element by element, against their definitions.

use super::*;
use crate::ir::{AddOp, AddedFrame, PoolOp, PooledFrame, Repeat};

fn random(cpu: &Cpu, shape: FrameShape, seed: u64) -> Vec<f32> {
    Lcg(seed).fill(shape.elements() as usize).into_iter().map(|value| rounded(cpu.precision, value)).collect()
}

#[test]
fn means_are_those_of_the_definition() {
    for precision in [Precision::Fp32, Precision::Bf16] {
        for (threads, parts) in [(1, 1), (3, 2)] {
            let cpu = cpu_in(precision, Instructions::Auto, threads);
            let input = FrameShape::new(10, 6, 3);
            let frames = [1, 2].map(|seed| random(&cpu, input, seed));
            let mut arena = GuardedFrames::new(&cpu);
            let from = frames.each_ref().map(|data| arena.frame(input, 0, data));
            let output = FrameShape::new(5, 3, 3 * parts);
            let [both, last] = [0; 2].map(|_| DeviceOffset(arena.reserve(cpu.frame_bytes(output, 0))));
            let mut memory = arena.build();
            // Both parts of one frame, and the last part alone of another.
            let mut pooled = vec![PooledFrame { from: from[1], into: last, part: parts - 1, clear: true }];
            let of_both = |part| PooledFrame { from: from[part as usize], into: both, part, clear: part == 0 };
            pooled.extend((0..parts).map(of_both));
            let op = Op::Pool(PoolOp { input, parts, frames: pooled });
            run_op(&cpu, &mut memory, op, &[], 0, &mut || false).unwrap();
            let mean = |frame: usize, y: u64, x: u64, c: u64| {
                let at = |row, column| frames[frame][(((2 * y + row) * 6 + 2 * x + column) * 3 + c) as usize];
                rounded(precision, (((at(0, 0) + at(0, 1)) + at(1, 0)) + at(1, 1)) / 4.0)
            };
            let [both, last] = [both, last].map(|at| read(&cpu, &memory, at.0, output, 0));
            for i in 0..output.elements() {
                let (channel, x, y) = (i % (3 * parts), i / (3 * parts) % 3, i / (3 * parts) / 3);
                let (c, part) = (channel / parts, channel % parts);
                assert_eq!(both[i as usize], mean(part as usize, y, x, c));
                assert_eq!(last[i as usize], if part == parts - 1 { mean(1, y, x, c) } else { 0.0 });
            }
        }
    }
}

#[test]
fn sums_are_those_of_the_definition() {
    for precision in [Precision::Fp32, Precision::Bf16] {
        for (channels, side, parts) in [(4, 1, 1), (4, 2, 2), (8, 2, 1), (8, 2, 2), (2, 2, 1)] {
            let cpu = cpu_in(precision, Instructions::Auto, 2);
            let (shape, small) = (FrameShape::new(6, 10, 4), FrameShape::new(6 / side, 10 / side, channels));
            let (x, addend) = (random(&cpu, shape, 1), random(&cpu, small, 2));
            let mut arena = GuardedFrames::new(&cpu);
            let at = [arena.frame(shape, 0, &x), arena.frame(small, 0, &addend)];
            let out = DeviceOffset(arena.reserve(cpu.frame_bytes(shape, 0)));
            let mut memory = arena.build();
            let repeat = Repeat { channels, side, parts };
            // Into another frame, then in place.
            for (out, part) in [(out, parts - 1), (at[0], 0)] {
                let frames = vec![AddedFrame { x: at[0], addend: at[1], part, out }];
                let op = Op::Add(AddOp { shape, repeat, frames });
                run_op(&cpu, &mut memory, op, &[], 0, &mut || false).unwrap();
                let repeats = 4 * parts * side * side / channels;
                for (i, found) in (0..).zip(read(&cpu, &memory, out.0, shape, 0)) {
                    let (o, column, y) = (i % 4, i / 4 % 10, i / 40);
                    let source = (((o * parts + part) * side + y % side) * side + column % side) / repeats;
                    let added = addend[((y / side * small.width + column / side) * channels + source) as usize];
                    assert_eq!(found, rounded(precision, x[i as usize] + added), "{repeat:?}, part {part}");
                }
            }
        }
    }
}
