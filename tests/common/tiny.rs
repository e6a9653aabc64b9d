//! A checkpoint of a few kilobytes, for tests that make many calls.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use super::safetensors::to_bytes;
use super::weights::{Sizes, random_weights};

/// Every layer of the model with two to four channels: calls take microseconds.
const TINY: Sizes =
    Sizes { channels: Vec::new(), layers: 1, groups: 2, latent: LATENT_CHANNELS as u64, temporal_levels: 2 };
pub const LATENT_CHANNELS: i64 = 16;

/// The bytes of the tiny checkpoint.
pub fn tiny_bytes() -> &'static [u8] {
    static BYTES: OnceLock<Vec<u8>> = OnceLock::new();
    let sizes = Sizes { channels: vec![2, 2, 4, 4], ..TINY };
    BYTES.get_or_init(|| to_bytes(&random_weights(&sizes.model(), 4), TINY.groups))
}

/// The file of the tiny checkpoint. It stays: every process writes the same bytes.
pub fn tiny() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| {
        let path = std::env::temp_dir().join("video-vae-fuzz-tiny.safetensors");
        if std::fs::read(&path).ok().as_deref() != Some(tiny_bytes()) {
            let fresh = path.with_extension(std::process::id().to_string());
            std::fs::write(&fresh, tiny_bytes()).expect("a folder for temporary files");
            std::fs::rename(&fresh, &path).expect("the same folder");
        }
        path
    })
}
