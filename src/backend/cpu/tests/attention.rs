//! Attention against a reference in f64.

use super::*;

fn attend(cpu: &Cpu, shape: FrameShape, inputs: &[Vec<f32>], per_call: usize) -> Vec<Vec<f32>> {
    let mut arena = GuardedFrames::new(cpu);
    let inputs: Vec<DeviceOffset> =
        inputs.iter().map(|data| arena.frame(shape.with_channels(3 * shape.channels), 0, data)).collect();
    let frames: Vec<(DeviceOffset, DeviceOffset)> =
        inputs.iter().map(|input| (*input, DeviceOffset(arena.reserve(cpu.frame_bytes(shape, 0))))).collect();
    let bytes = cpu.attention_scratch(shape, per_call as u64);
    let scratch = arena.reserve(bytes);
    let mut memory = arena.build();
    for frames in frames.chunks(per_call) {
        let op = Op::Attention(AttentionOp { shape, frames: frames.to_vec() });
        run_op(cpu, &mut memory, op, &[], scratch, &mut || false).unwrap();
    }
    assert_guard(&memory, scratch + bytes);
    frames.iter().map(|f| read(cpu, &memory, f.1.0, shape, 0)).collect()
}

#[test]
fn attention_matches_f64_at_all_sizes() {
    let sizes = [(1, 1, 1), (1, 2, 16), (3, 11, 24), (8, 7, 5), (19, 16, 40), (5, 57, 64)];
    for (precision, instructions) in sets() {
        for (height, width, channels) in sizes {
            let shape = FrameShape::new(height, width, channels);
            let (n, c) = (shape.pixels() as usize, channels as usize);
            let mut random = Lcg(7);
            let inputs: Vec<Vec<f32>> =
                (0..3).map(|_| random.fill(3 * n * c).iter().map(|v| rounded(precision, v * 3.0)).collect()).collect();
            let got = attend(&cpu_in(precision, instructions, 2), shape, &inputs, 3);
            for (input, got) in inputs.iter().zip(&got) {
                let at = |pixel: usize, part: usize, c0: usize| f64::from(input[(pixel * 3 + part) * c + c0]);
                for q in 0..n {
                    let scores: Vec<f64> =
                        (0..n).map(|k| (0..c).map(|i| at(q, 0, i) * at(k, 1, i)).sum::<f64>()).collect();
                    let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    let p: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
                    let total: f64 = p.iter().sum();
                    for i in 0..c {
                        let exact = (0..n).map(|k| p[k] * at(k, 2, i)).sum::<f64>() / total;
                        let error = (f64::from(got[q * c + i]) - exact).abs();
                        // In bf16 probabilities are rounded too.
                        let most = (0..n).map(|k| p[k] * at(k, 2, i).abs()).sum::<f64>() / total;
                        let rounding = if precision == Precision::Bf16 { most / 128.0 } else { 0.0 };
                        assert!(error < 6e-5 + rounding, "{instructions:?} {shape:?}: {} not {exact}", got[q * c + i]);
                    }
                }
            }
            for threads in [1, 3] {
                for per_call in [1, 3] {
                    let again = attend(&cpu_in(precision, instructions, threads), shape, &inputs, per_call);
                    assert!(bits(&again) == bits(&got), "{threads} threads, {per_call} a call");
                }
            }
        }
    }
}
