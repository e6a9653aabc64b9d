//! Ranges under limits that offload caches, frames and weights; device tensors; the time of a cut.

use std::path::Path;
use std::time::Instant;

use crate::common::{Buffer, Random, Vae, demo, run_info, small};
use crate::driver::Gpu;
use crate::{latent, on_device, open, video};
use video_vae::capi::*;

fn range(vae: &Vae, node: &str, input: &Buffer, first: i64, output: &mut Buffer) {
    let (clip, count) = (input.shape[2], output.shape[2]);
    let (from, frames) = vae.range_inputs(node, clip, first, count).unwrap();
    output.f32_mut().fill(f32::NAN);
    let input = input.part(from, frames);
    vae.run_range(node, &input.tensor(), (clip, first), &output.tensor(), &run_info()).unwrap();
}

/// Runs a range under smaller and smaller limits. Returns the number of plans that offload, and that rematerialise.
fn within_limits(weights: &Path, node: &str, input: &Buffer, whole: &Buffer, first: i64, count: i64) -> (u32, u32) {
    let vae = open(weights);
    let expected = whole.part(first, count);
    let mut found = expected.clone();
    let free = vae.plan_range(node, input.shape, first, count).unwrap().0.device_bytes;
    let (mut offloaded, mut rematerialised) = (0, 0);
    for percent in (10..=100).rev().step_by(6) {
        vae.configure("memory_limit", &(free * percent / 100).to_string()).unwrap();
        let Ok((plan, text)) = vae.plan_range(node, input.shape, first, count) else { break };
        if plan.exact == 0 {
            break;
        }
        range(&vae, node, input, first, &mut found);
        assert!(found.bytes() == expected.bytes(), "{node} {first} + {count} within {percent} %:\n{text}");
        let memory = vae.memory();
        assert_eq!((memory.now, memory.host), (plan.device_bytes, plan.host_bytes), "{text}");
        offloaded += u32::from(plan.offloaded_frame_bytes > 0);
        rematerialised += u32::from(text.contains("rematerialised"));
    }
    (offloaded, rematerialised)
}

#[test]
fn ranges_under_limits_have_the_bits_of_the_whole_clip() {
    let Some(_gpu) = Gpu::open() else { return };
    let latent = latent(14, 50, 66);
    let mut frames = video(&latent, VVAE_DTYPE_F32);
    open(&small()).decode(&latent, &mut frames).unwrap();
    for (first, count) in [(1, 3), (22, 9), (45, 8), (51, 2)] {
        let (offloaded, _) = within_limits(&small(), "decode", &latent, &frames, first, count);
        assert!(offloaded > 0, "{first}");
    }
    let mut encoded = Buffer::new(VVAE_DTYPE_F32, latent.shape);
    open(&small()).encode(&frames, &mut encoded).unwrap();
    for (first, count) in [(1, 2), (9, 5), (12, 2)] {
        let (offloaded, _) = within_limits(&small(), "encode", &frames, &encoded, first, count);
        assert!(offloaded > 0, "{first}");
    }
}

/// With the demo's model, whose channels are as wide as the published model's.
#[test]
fn ranges_with_rematerialised_frames_have_the_bits_of_the_whole_clip() {
    let Some(_gpu) = Gpu::open() else { return };
    let latent = latent(12, 60, 80);
    let mut frames = video(&latent, VVAE_DTYPE_F32);
    open(&demo()).decode(&latent, &mut frames).unwrap();
    let mut rematerialised = 0;
    for (first, count) in [(30, 9), (41, 4)] {
        rematerialised += within_limits(&demo(), "decode", &latent, &frames, first, count).1;
    }
    assert!(rematerialised > 0);
}

#[test]
fn precisions_and_device_tensors_have_the_bits_of_the_whole_clip() {
    let Some(gpu) = Gpu::open() else { return };
    let mut random = Random(3);
    for precision in ["fp16", "bf16", "fp32"] {
        let vae = open(&small());
        vae.configure("precision", precision).unwrap();
        let latent = latent(24, 7, 9);
        let mut frames = video(&latent, VVAE_DTYPE_F32);
        vae.decode(&latent, &mut frames).unwrap();
        for _ in 0..12 {
            let first = random.below(93) as i64;
            let count = 1 + random.below((93 - first).min(9) as u64) as i64;
            let expected = frames.part(first, count);
            let mut found = expected.clone();
            range(&vae, "decode", &latent, first, &mut found);
            assert!(found.bytes() == expected.bytes(), "{precision} {first} + {count}");
            // The same with tensors in device memory.
            let (from, inputs) = vae.range_inputs("decode", 24, first, count).unwrap();
            let input = latent.part(from, inputs);
            let (source, target) = (gpu.memory(input.bytes().len()), gpu.memory(found.bytes().len()));
            source.write(input.bytes());
            let tensors = (on_device(&input, &source), on_device(&found, &target));
            vae.run_range("decode", &tensors.0, (24, first), &tensors.1, &run_info()).unwrap();
            assert!(target.read() == expected.bytes(), "{precision} {first} + {count} on the device");
        }
    }
}

/// VIDEO_VAE_WEIGHTS=FILE cargo test --release --test cuda cost_of_a_cut -- --ignored --nocapture
///
/// The time of a range in the middle, less that of as many frames of a longer range, in frames.
#[test]
#[ignore = "takes the published checkpoint and minutes"]
fn cost_of_a_cut_at_1080p() {
    let Some(_gpu) = Gpu::open() else { return };
    let Some(weights) = std::env::var_os("VIDEO_VAE_WEIGHTS") else { return println!("set VIDEO_VAE_WEIGHTS") };
    let vae = open(Path::new(&weights));
    let (latents, video) = ([1, 16, 1001, 135, 240], [1, 3, 4001, 1080, 1920]);
    for (node, shape, output, first, counts, most) in
        [("decode", latents, video, 2000, [40, 120], 27.0), ("encode", video, latents, 500, [10, 30], 105.0)]
    {
        let seconds = |count: i64| {
            let (_, frames) = vae.range_inputs(node, shape[2], first, count).unwrap();
            let dtype = |shape: [i64; 5]| if shape[1] == 3 { VVAE_DTYPE_U8 } else { VVAE_DTYPE_F16 };
            let part = |[b, c, _, h, w]: [i64; 5], frames| Buffer::new(dtype([b, c, 0, h, w]), [b, c, frames, h, w]);
            let (input, output) = (part(shape, frames), part(output, count));
            let run = || {
                let started = Instant::now();
                vae.run_range(node, &input.tensor(), (shape[2], first), &output.tensor(), &run_info()).unwrap();
                started.elapsed().as_secs_f64()
            };
            run();
            run().min(run())
        };
        let [short, long] = counts.map(seconds);
        let per_output = (long - short) / (counts[1] - counts[0]) as f64;
        let video_frames = if node == "decode" { 1.0 } else { 4.0 };
        let cost = (short / per_output - counts[0] as f64) * video_frames;
        println!("{node}: a cut takes {cost:.1} frames' time ({:.1} ms each)", per_output / video_frames * 1e3);
        assert!(cost <= most, "{node}: {cost:.1}");
    }
}
