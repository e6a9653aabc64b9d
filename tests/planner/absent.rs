//! Plans for cards that are not here: what the host is told, and how near the H200's are to those of the measured one.

#![cfg(feature = "cuda")]

use std::sync::Arc;

use crate::common::planner::{self, H200, published};
use crate::common::{Buffer, Vae, small};
use video_vae::capi::*;
use video_vae::internals::backend::cuda::{KernelArch, device_profile};
use video_vae::internals::backend::{AbsentDevice, DeviceFacts, Precision};
use video_vae::internals::ir::DeviceProfile;
use video_vae::internals::model::{Direction, Network};
use video_vae::internals::plan::{Target, search};

const SHAPE: [i64; 5] = [1, 16, 3, 10, 11];

#[test]
fn plans_say_that_they_are_estimates() {
    let vae = Vae::open(&small()).unwrap();
    let (own, _) = vae.plan("decode", SHAPE).unwrap();
    vae.configure("device_like", "rtx4090").unwrap();
    let (plan, words) = vae.plan("decode", SHAPE).unwrap();
    assert!(words.contains("for a GeForce RTX 4090, which is not here: an estimate"), "{words}");
    assert!(words.contains("kernels of 8.9 in fp16"), "{words}");
    assert_ne!((own.device_bytes, own.seconds), (plan.device_bytes, plan.seconds));
    let timeline = vae.timeline("decode", SHAPE).unwrap();
    let device = &timeline["devices"][0];
    assert_eq!((&device["device"], &device["absent"]), (&"rtx4090".into(), &"GeForce RTX 4090".into()));
    assert_eq!(device["text"], words);
    // A sixteenth is left to others.
    assert_eq!(device["limit_bytes"], 24 * (1u64 << 30) / 16 * 15);
    vae.configure("memory_limit", "6GiB").unwrap();
    assert_eq!(vae.timeline("decode", SHAPE).unwrap()["devices"][0]["limit_bytes"], 6u64 << 30);
    vae.configure("memory_limit", "1MiB").unwrap();
    vae.plan("decode", SHAPE).unwrap_err().says(VVAE_ERROR_MEMORY, &["memory_limit: 1.0 MiB", "smallest plan"]);
}

#[test]
fn settings_are_the_card_s_and_nothing_runs() {
    let vae = Vae::open(&small()).unwrap();
    vae.configure("precision", "fp16").unwrap_err().says(VVAE_ERROR_ARGUMENT, &["fp16 needs a GPU"]);
    vae.configure("device_like", "rtx3060").unwrap();
    for (key, value) in [("precision", "fp16"), ("cache", "u8")] {
        vae.configure(key, value).unwrap();
    }
    assert!(vae.plan("decode", SHAPE).unwrap().1.contains("GeForce RTX 3060 (12 GB)"));
    let latent = Buffer::from_f32(SHAPE, &[0.5; 16 * 3 * 110]);
    let mut video = Buffer::poisoned([1, 3, 9, 80, 88]);
    let refused = &["device_like: rtx3060", "set device_like to none"];
    vae.decode(&latent, &mut video).unwrap_err().says(VVAE_ERROR_ARGUMENT, refused);
    vae.stream("decode", [1, 16, 0, 10, 11]).err().unwrap().says(VVAE_ERROR_ARGUMENT, refused);
    // The CPU has neither; a failure changes nothing.
    vae.configure("device_like", "none").unwrap_err().says(VVAE_ERROR_ARGUMENT, &["precision", "GPU"]);
    assert!(vae.plan("decode", SHAPE).unwrap().1.contains("RTX 3060"));
    for (key, value) in [("precision", "auto"), ("cache", "exact"), ("device_like", "none")] {
        vae.configure(key, value).unwrap();
    }
    vae.decode(&latent, &mut video).unwrap();
    vae.configure("device_like", "rtx9999").unwrap_err().says(VVAE_ERROR_ARGUMENT, &["rtx9999", "rtx4090, rtx5090"]);
}

/// Rates in order of the cards: a plan of a slower card takes longer.
#[test]
fn slower_cards_take_longer() {
    let vae = Vae::open(&small()).unwrap();
    let seconds = ["rtx3060", "rtx4070", "rtx4090", "h200"].map(|card| {
        vae.configure("device_like", card).unwrap();
        vae.plan("decode", [1, 16, 5, 60, 104]).unwrap().0.seconds
    });
    assert!(seconds.is_sorted_by(|slower, faster| slower > faster), "{seconds:?}");
    vae.configure("rates", "products=1e10").unwrap();
    assert!(vae.plan("decode", [1, 16, 5, 60, 104]).unwrap().0.seconds > seconds[0], "given rates count here too");
}

#[test]
fn the_h200_s_estimates_are_within_5_percent() {
    let absent = AbsentDevice::new("h200", Precision::Fp16).unwrap();
    let measured = device_profile(H200, Precision::Fp16, KernelArch::HOPPER);
    let model = published();
    for (clip, limit) in [
        ([21, 720, 1280], 0.0),
        ([1, 1024, 1024], 0.0),
        ([81, 1080, 1920], 0.0),
        ([81, 1080, 1920], 10.0),
        ([81, 1080, 1920], 6.0),
        ([81, 1080, 1920], 4.0),
        ([21, 2160, 3840], 16.0),
    ] {
        for direction in Direction::ALL {
            let seconds = |profile: DeviceProfile| {
                let network = Network::new(&model.model(), direction).unwrap().for_device(profile.paired_layers());
                let target = Target::new(profile, absent.sizes(), model.groups);
                search(&planner::limited(&Arc::new(network), clip, limit), &target).unwrap().estimate.seconds
            };
            let (estimated, by_measured) = (seconds(absent.profile()), seconds(measured));
            let ratio = estimated / by_measured;
            println!("{} {clip:?} within {limit} GiB: {estimated:.3} s, {ratio:.3}", direction.name());
            assert!((0.95..=1.05).contains(&ratio), "{} {clip:?} within {limit} GiB: {ratio}", direction.name());
        }
    }
}
