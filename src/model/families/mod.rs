//! The families of autoencoders that the library knows, one file each. A family says how it is recognised, what its
//! tensors are called, what its graphs are, and what it says about pixels and latents. Nothing else names a tensor.

pub mod blocks;
pub mod kl2d;
mod latents;
pub mod seedvr2;
pub mod wan;
pub mod wan21;
pub mod wan22;

pub use kl2d::SCALED_NAMES;
pub use latents::{LatentFacts, LatentMaps, LatentValues};

use std::borrow::Cow;

use super::checkpoint::FileTensors;
use super::geometry::{Direction, Geometry};
use super::graph::{Graph, TensorShape};
use crate::safetensors::Check;

/// A family of autoencoders.
#[derive(Debug)]
pub struct Family {
    pub name: &'static str,
    /// The names that the graphs have for the tensors of a file, which may follow another naming scheme.
    pub canonical: for<'a> fn(&[&'a str]) -> Vec<Cow<'a, str>>,
    /// Whether a tensor, by its canonical name, may be in a file and is not needed.
    pub is_unread: fn(&str) -> bool,
    /// The model whose tensors these are, under their canonical names. An error says what does not fit.
    pub model: fn(&FileTensors) -> Check<Model>,
    pub published: &'static [PublishedModel],
}

/// A model that people use.
#[derive(Debug)]
pub struct PublishedModel {
    pub name: &'static str,
    pub model: fn() -> Model,
}

/// A file that is nearest to two families is of the first.
pub const FAMILIES: [&Family; 5] =
    [&seedvr2::FAMILY, &kl2d::FAMILY, &wan21::FAMILY, &wan22::FAMILY, &wan22::QWEN_IMAGE];

/// Where a checkpoint of a whole diffusion model has its autoencoder. No other tensor of such a file is read.
pub const PREFIXES: [&str; 2] = ["first_stage_model.", "vae."];

/// An autoencoder: what a family says about one checkpoint.
#[derive(Debug, Clone)]
pub struct Model {
    pub family: &'static Family,
    /// Its sizes, for people.
    pub sizes: String,
    pub geometry: Geometry,
    /// Of each published model whose tensors these may be.
    pub latents: Vec<LatentFormat>,
    pub encoder: Graph,
    pub decoder: Graph,
}

/// The latents of a published model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LatentFormat {
    pub name: &'static str,
    pub scaling: LatentScaling,
}

/// How a diffusion model reads the mean that the encoder gives.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum LatentScaling {
    /// `(z - shift) * scale`.
    Scaled { scale: f64, shift: f64 },
    /// `(z - mean) / deviation`, with numbers for each channel.
    Standardised { mean: &'static [f64], deviation: &'static [f64] },
    /// `side` x `side` pixels become channels: `(c * side + row) * side + column`. Then
    /// `(z - mean) / sqrt(variance + epsilon)`, with tensors of the checkpoint.
    Packed { side: u64, mean: &'static str, variance: &'static str, epsilon: f64 },
}

impl Model {
    pub fn graph(&self, direction: Direction) -> &Graph {
        match direction {
            Direction::Encode => &self.encoder,
            Direction::Decode => &self.decoder,
        }
    }

    /// Every tensor of a checkpoint.
    pub fn tensors(&self) -> Vec<TensorShape> {
        let graphs = [&self.encoder, &self.decoder].into_iter().flat_map(Graph::tensors);
        graphs.chain(self.latents.iter().flat_map(|latents| self.statistics(latents.scaling))).collect()
    }

    /// The tensors of a latent scaling.
    fn statistics(&self, scaling: LatentScaling) -> Vec<TensorShape> {
        let LatentScaling::Packed { side, mean, variance, .. } = scaling else { return Vec::new() };
        let shape = vec![self.geometry.latent_channels * side * side];
        [mean, variance].map(|name| TensorShape { name: name.into(), shape: shape.clone() }).into()
    }
}
