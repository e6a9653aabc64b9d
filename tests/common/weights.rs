//! Checkpoints with random values.

use super::Random;
use super::safetensors::{Tensor, Tensors};

use video_vae::internals::model::Model;
pub use video_vae::internals::model::families::seedvr2::Sizes;
use video_vae::internals::model::graph::TensorShape;

/// Every tensor of a model, with random values that keep activations near 1. Norms get theirs last.
pub fn random_weights(model: &Model, seed: u64) -> Tensors {
    let mut random = Random(seed);
    let mut uniform = move || random.below(1 << 24) as f64 / (1 << 23) as f64 - 1.0;
    let (norms, others): (Vec<TensorShape>, Vec<TensorShape>) =
        model.tensors().into_iter().partition(|tensor| tensor.name.contains("norm"));
    let mut tensor = |TensorShape { name, shape }: TensorShape| {
        let shape: Vec<usize> = shape.iter().map(|d| *d as usize).collect();
        let fan_in: usize = shape[1..].iter().product();
        let (base, scale) = match shape.len() {
            1 if name.contains("norm") && name.ends_with("weight") => (1.0, 0.17),
            1 => (0.0, 0.17),
            _ => (0.0, (3.0 / fan_in as f64).sqrt()),
        };
        let values = (0..shape.iter().product()).map(|_| (base + scale * uniform()) as f32).collect();
        (name, Tensor { shape, values })
    };
    others.into_iter().chain(norms).map(&mut tensor).collect()
}
