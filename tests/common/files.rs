//! Files of the project for tests.

use std::path::{Path, PathBuf};

/// The repository. Packages below it use this module too.
pub fn root() -> &'static Path {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    package.ancestors().find(|folder| folder.join("include/video_vae.h").exists()).expect("within the repository")
}

pub fn golden(name: &str) -> PathBuf {
    root().join("tests/golden").join(name)
}

/// A checkpoint of 16 to 32 channels and 16 groups: quick.
pub fn small() -> PathBuf {
    golden("small.safetensors")
}

/// A quick checkpoint of each family of video models. `Vae::fitted` has the shapes of their tensors.
pub fn video_models() -> [PathBuf; 3] {
    [small(), golden("families/wan21.safetensors"), golden("families/wan22.safetensors")]
}

/// The trained model of the demo.
pub fn demo() -> PathBuf {
    root().join("host-examples/assets/demo.safetensors")
}
