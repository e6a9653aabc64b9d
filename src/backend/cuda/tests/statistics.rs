//! The statistics that convolutions leave for the next norm, against those of the frames that they have stored.

use super::pairs::{ClipCase, FRAMES};
use super::*;
use crate::backend::Precision;
use crate::backend::cuda::launch::tiling::{EPSILON, PAIRS};
use crate::testing::paired;

/// Mean and 1 / deviation of each group of a frame's channels. `values` are [channel][frame][pixel].
fn expected(values: &[f32], frame: usize, shape: FrameShape, groups: u64) -> Vec<[f64; 2]> {
    let pixels = shape.pixels() as usize;
    let group_channels = (shape.channels / groups) as usize;
    let group = |group: usize| {
        let channels = group * group_channels..(group + 1) * group_channels;
        let of_channel = |channel: usize| &values[(channel * FRAMES + frame) * pixels..][..pixels];
        let values = || channels.clone().flat_map(of_channel).map(|value| f64::from(*value));
        let count = (group_channels * pixels) as f64;
        let mean = values().sum::<f64>() / count;
        let variance = values().map(|value| (value - mean).powi(2)).sum::<f64>() / count;
        [mean, 1.0 / (variance + f64::from(EPSILON)).sqrt()]
    };
    (0..groups as usize).map(group).collect()
}

/// Compares the statistics of all frames of a case. `most`: the largest relative error.
fn check(gpu: &Cuda, case: &ClipCase, most: f64) {
    let (values, frames) = case.run(gpu, std::slice::from_ref(&(0..FRAMES)));
    let groups = case.layout.norm.groups();
    let output = case.layout.window.output(case.input, case.layout.cout);
    for (t, bytes) in frames.iter().enumerate() {
        let floats = bytes[gpu.launcher.sizes.data_bytes(output) as usize..].chunks_exact(4);
        let found: Vec<f64> = floats.map(|float| f64::from(f32::from_le_bytes(float.try_into().unwrap()))).collect();
        let right = expected(&values, t, output, groups);
        assert!(found.len() >= 2 * right.len());
        for (group, (found, right)) in found.chunks_exact(2).zip(&right).enumerate() {
            let FrameShape { height, width, .. } = case.input;
            let ConvLayout { window, pairs, .. } = case.layout;
            let what = format!("{window:?} {height}x{width}, bias {:?}, pairs {pairs:?}", case.bias);
            let what = format!("{what}, frame {t}, group {group} in {}: {found:?} for {right:?}", name(gpu));
            let distance = (found[0] - right[0]).abs() * right[1];
            assert!(distance <= most + 1e-6 * right[0].abs() * right[1], "{what}");
            assert!((found[1] / right[1] - 1.0).abs() <= most, "{what}");
        }
    }
}

/// Values far from zero must not cancel, and differences of large ones must not leave the range of f16.
fn check_window(window: Window) {
    let base = ConvLayout { biases: 1, ..layout(64, 128, window, Prologue::None) };
    let paired = ConvLayout { pairs: Some(PAIRS), slabs: paired(Window::Same).slabs().len() as u64, ..base };
    let single = ConvLayout { slabs: 1, prologue: Prologue::NormSilu, ..base };
    // Of one pixel, Down leaves none.
    let smallest = if window == Window::Down { (2, 2) } else { (1, 1) };
    for gpu in &gpus() {
        let most = match gpu.precision() {
            Precision::Fp32 | Precision::Fp16 => 1e-3,
            Precision::Bf16 => 8e-3,
        };
        let profile = gpu.profile();
        let has_pairs = match window {
            Window::Same => profile.pairs.is_some(),
            Window::Up => profile.upsampler_pairs,
            _ => false,
        };
        for (height, width) in [smallest, (7, 5), (8, 16), (18, 34), (37, 53)] {
            for bias in [(0.0, 1.0), (1000.0, 1.0), (0.0, 5e4)] {
                let input = FrameShape::new(height, width, base.cin);
                check(gpu, &ClipCase { layout: base, input, factor: 1.0, bias }, most);
                check(gpu, &ClipCase { layout: single, input, factor: 1.0, bias }, most);
                if has_pairs {
                    check(gpu, &ClipCase { layout: paired, input, factor: 1.0, bias }, most);
                }
            }
        }
    }
}

#[test]
fn statistics_are_those_of_the_frames() {
    check_window(Window::Same);
}

#[test]
fn statistics_of_upsamplers_are_those_of_the_frames() {
    check_window(Window::Up);
}

#[test]
fn statistics_of_downsamplers_are_those_of_the_frames() {
    check_window(Window::Down);
}
