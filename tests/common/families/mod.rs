//! Families of autoencoders as data. A family's file says how to recognise its checkpoints, which sizes their tensors
//! give and what they are called. It builds the graphs and has the numbers of the latents. Knows no layer, no device.

pub mod qwen21;
pub mod wan22;

use std::collections::BTreeMap;
use video_vae::internals::model::graph::Graph;

pub use video_vae::internals::model::families::LatentScaling as Latent;

/// The shapes of a checkpoint's tensors, by name.
pub type Shapes = BTreeMap<String, Vec<u64>>;

/// What a family makes of a checkpoint.
#[derive(Debug, Clone, PartialEq)]
pub struct Model {
    /// From video to mean and log-variance, one after the other in the channels.
    pub encoder: Graph,
    /// From a latent to video.
    pub decoder: Graph,
    pub latent: Latent,
}
