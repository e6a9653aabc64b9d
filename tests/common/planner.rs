//! Jobs of the full-size model on an H200, for tests of the planner. No GPU is needed.

use std::sync::Arc;

use video_vae::internals::ir::{Rates, Shape};
use video_vae::internals::model::families::seedvr2::Sizes;
use video_vae::internals::model::{Cone, Direction, FrameRange, Network};
use video_vae::internals::plan::Request;

/// Products and memory as its kernels reach them, copies as bands do.
pub const H200: Rates = Rates { products: 3.2e14, memory: 3.6e12, copies: 50e9, copy_contention: 0.06 };
pub const DEVICE_BYTES: u64 = 139 << 30;
pub const HOST_BYTES: u64 = 110 << 30;

/// The sizes of the published checkpoint.
pub fn published() -> Sizes {
    Sizes::published()
}

/// A whole clip of so many pixels within a limit in GiB; 0 is the whole device. 0 frames are a stream.
pub fn limited(network: &Arc<Network>, [frames, height, width]: [u64; 3], gib: f64) -> Request {
    let of = network.geometry;
    let (latents, rows, columns) = (frames.div_ceil(of.time), height / of.space, width / of.space);
    let input = match network.direction {
        Direction::Encode => Shape::new(1, of.pixel_channels, frames, height, width),
        Direction::Decode => Shape::new(1, of.latent_channels, latents, rows, columns),
    };
    let whole = request(network, input);
    if gib == 0.0 { whole } else { Request { limit: (gib * (1u64 << 30) as f64) as u64, ..whole } }
}

/// A whole clip with all of the memory.
pub fn request(network: &Arc<Network>, input: Shape) -> Request {
    Request {
        cone: Arc::new(Cone::new(network, FrameRange::WHOLE)),
        network: Arc::clone(network),
        batch: input.batch,
        frames: input.known_frames(),
        image: input.into(),
        limit: DEVICE_BYTES,
        host_limit: HOST_BYTES,
        load_bytes: 0,
        tiles: None,
        allow_tiles: true,
        overlap: 128,
        slice: None,
        chunk: None,
    }
}
