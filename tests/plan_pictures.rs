//! The pictures of plans in the docs, compared with those that the `vvae` command draws of today's plans.
//!
//! Needs no GPU: sizes follow from shapes, and the rates are fixed. `VVAE_UPDATE_PICTURES=1` writes the pictures.

#![cfg(feature = "cuda")]

use std::path::Path;
use std::sync::Arc;

use serde_json::{Value, json};
use video_vae::backend::Precision;
use video_vae::backend::cuda::{CudaSizes, device_profile};
use video_vae::ir::{Rates, Shape};
use video_vae::model::{Cone, Config, Direction, FrameRange, Network};
use video_vae::plan::{Request, Target, search};

#[path = "../host-examples/rust/picture.rs"]
mod picture;

/// As in the planner corpus.
const H200: Rates = Rates { products: 3.2e14, memory: 3.6e12, copies: 50e9, copy_contention: 0.06 };
const DEVICE_BYTES: u64 = 139 << 30;
const HOST_BYTES: u64 = 110 << 30;

/// The timeline of decoding 81 frames of 1080p on an H200, as `vvae_plan_timeline` tells it.
fn timeline(limit: u64) -> Value {
    let config = Config { channels: vec![128, 256, 512, 512], layers: 2, groups: 32, latent: 16, temporal_levels: 2 };
    let network = Arc::new(Network::new(&config, Direction::Decode));
    let sizes = CudaSizes { precision: Precision::Fp16 };
    let target = Target::new(device_profile(H200), &sizes, config.groups);
    let request = Request {
        cone: Arc::new(Cone::new(&network, FrameRange::WHOLE)),
        network,
        input: Shape::new(1, 16, 21, 135, 240),
        limit,
        host_limit: HOST_BYTES,
        load_bytes: 0,
        tiles: None,
        allow_tiles: true,
        overlap: 128,
        slice: None,
        chunk: None,
    };
    let plan = search(&request, &target).unwrap_or_else(|why| panic!("{why:?}"));
    json!({ "devices": [plan.timeline((limit, HOST_BYTES), &target).json("NVIDIA H200")] })
}

#[test]
fn plan_pictures_are_current() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/pictures");
    for (name, limit) in [("plan-no-limit.svg", DEVICE_BYTES), ("plan-6gib.svg", 6 << 30)] {
        let found = picture::plan(&timeline(limit)).unwrap();
        if std::env::var_os("VVAE_UPDATE_PICTURES").is_some() {
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(folder.join(name), found).unwrap();
            continue;
        }
        let expected = std::fs::read_to_string(folder.join(name)).unwrap();
        assert!(
            expected == found,
            "docs/pictures/{name} is not what is planned; if that is meant, run VVAE_UPDATE_PICTURES=1 cargo test \
             --release --test plan_pictures, and look at it"
        );
    }
}
