//! The families of autoencoders that the library knows, one file each. A family says how it is recognised, what its
//! tensors are called, what its graphs are, and what it says about pixels and latents. Nothing else names a tensor.

pub mod seedvr2;

use std::borrow::Cow;

use super::checkpoint::FileTensors;
use super::geometry::{Direction, Geometry};
use super::graph::{Graph, TensorShape};
use crate::safetensors::Check;

/// A family of autoencoders.
#[derive(Debug)]
pub struct Family {
    pub name: &'static str,
    /// The name that the graphs have for a tensor of a file, which may follow another naming scheme.
    pub canonical: fn(&str) -> Cow<'_, str>,
    /// The model whose tensors these are, under their canonical names. An error says what does not fit.
    pub model: fn(&FileTensors) -> Check<Model>,
}

/// In the order in which they are tried.
pub const FAMILIES: [&Family; 1] = [&seedvr2::FAMILY];

/// An autoencoder: what a family says about one checkpoint.
#[derive(Debug, Clone)]
pub struct Model {
    pub family: &'static Family,
    /// Its sizes, for people.
    pub sizes: String,
    pub geometry: Geometry,
    pub latent_scaling: LatentScaling,
    pub encoder: Graph,
    pub decoder: Graph,
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
        [&self.encoder, &self.decoder].into_iter().flat_map(Graph::tensors).collect()
    }
}
