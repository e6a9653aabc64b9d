//! Plans of any shape, range, limit and setting: within a second or so, within the limit, and told whole.

use std::sync::OnceLock;

use super::{Bytes, timed};
use crate::common::{Failure, LATENT_CHANNELS, Vae, tiny};
use video_vae::capi::*;

const DEFAULTS: [(&str, &str); 11] = [
    ("rates", "products=1e11,memory=1e10,copies=1e10"),
    ("threads", "1"),
    ("memory_limit", "1GiB"),
    ("slice_frames", "auto"),
    ("chunk_frames", "auto"),
    ("tiles", "auto"),
    ("encode_tiled", "false"),
    ("decode_tiled", "false"),
    ("precision", "auto"),
    ("encode_tile_size", "1024"),
    ("decode_tile_size", "1024"),
];

fn vae() -> &'static Vae {
    static VAE: OnceLock<Vae> = OnceLock::new();
    VAE.get_or_init(|| Vae::open(tiny()).expect("the tiny checkpoint"))
}

/// Sizes of videos are mostly small, so that most plans are quick. A long clip takes as long as a hundred short ones.
fn size(bytes: &mut Bytes) -> u64 {
    match bytes.below(256) {
        0..=239 => 1 + bytes.below(64),
        240..=247 => 1 + bytes.below(512),
        248..=250 => 8 << bytes.below(14),
        251 | 252 => 1 + bytes.below(1 << 16),
        _ => bytes.number(),
    }
}

fn frames(bytes: &mut Bytes) -> u64 {
    match bytes.below(256) {
        0..=245 => 1 + bytes.below(3),
        246..=249 => bytes.below(16),
        250 => bytes.below(64),
        251 => bytes.below(1 << 12),
        252 => 1 << bytes.below(33),
        _ => bytes.number(),
    }
}

/// Sets a few parameters. The limit, if it is one in bytes.
fn configure(bytes: &mut Bytes) -> Option<u64> {
    for (key, value) in DEFAULTS {
        vae().configure(key, value).expect("a default");
    }
    let mut limit = Some(1 << 30);
    for _ in 0..bytes.below(5) {
        let tiled = bytes.pick(&["encode", "decode"]);
        let (key, value) = match bytes.below(9) {
            0 => ("memory_limit".into(), (1u64 << (12 + bytes.below(32))).to_string()),
            1 => ("memory_limit".into(), (1 + bytes.below(1 << 40)).to_string()),
            2 => ("slice_frames".into(), bytes.below(4097).to_string()),
            3 => ("chunk_frames".into(), bytes.below(4097).to_string()),
            4 => ("tiles".into(), bytes.pick(&["never", "auto"]).into()),
            5 => (format!("{tiled}_tiled"), "true".into()),
            6 => (format!("{tiled}_tile_size"), (64 + bytes.below(1 << 12)).to_string()),
            7 => (format!("{tiled}_tile_overlap"), bytes.below(1 << 12).to_string()),
            _ => ("precision".into(), bytes.pick(&["fp32", "bf16", "auto"]).into()),
        };
        if vae().configure(&key, &value).is_ok() && key == "memory_limit" {
            limit = value.parse().ok();
        }
    }
    limit
}

fn check(answer: Result<(vvae_plan_info, String), Failure>, limit: Option<u64>) {
    match answer {
        Ok((plan, text)) => {
            assert!(limit.is_none_or(|limit| plan.device_bytes <= limit), "{} of {limit:?}", plan.device_bytes);
            assert!(plan.weight_bytes.checked_add(plan.workspace_bytes).is_some_and(|sum| sum <= plan.device_bytes));
            assert_eq!(plan.exact == 1, plan.tile_rows == 1 && plan.tile_columns == 1, "{text}");
            assert!(plan.seconds.is_finite() && plan.seconds >= 0.0);
            assert!(plan.text_length as usize >= text.len() && !text.is_empty());
            assert!(plan.input_shape.iter().chain(&plan.output_shape).all(|dim| *dim >= 0));
        }
        Err(why) => {
            let expected = [VVAE_ERROR_ARGUMENT, VVAE_ERROR_TENSOR, VVAE_ERROR_MEMORY, VVAE_ERROR_DEVICE];
            assert!(expected.contains(&why.status) && !why.text.is_empty(), "{why:?}");
        }
    }
}

pub fn run(data: &[u8]) {
    let mut bytes = Bytes::new(data);
    let node = bytes.pick(&["decode", "encode"]);
    let limit = configure(&mut bytes);
    let clips = if bytes.one_in(32) { bytes.number() } else { 1 + bytes.below(3) };
    let channels = if node == "encode" { 3 } else { LATENT_CHANNELS as u64 };
    let shape = [clips, channels, frames(&mut bytes), size(&mut bytes), size(&mut bytes)].map(u64::cast_signed);
    if bytes.one_in(3) {
        let (first, count) = (frames(&mut bytes).cast_signed(), frames(&mut bytes).cast_signed());
        check(timed("plan_range", || vae().plan_range(node, shape, first, count)), limit);
        let inputs = timed("range_inputs", || vae().range_inputs(node, shape[2], first, count));
        if let Ok((from, frames)) = inputs {
            assert!(from >= 0 && frames > 0 && from.checked_add(frames).is_some_and(|end| end <= shape[2]));
        }
    } else {
        check(timed("plan", || vae().plan(node, shape)), limit);
    }
}
