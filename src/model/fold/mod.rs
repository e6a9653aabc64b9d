//! The algebra done once at load time: folds a checkpoint's tensors into the weights of convolutions.
//! Everything is summed and multiplied in f64 and rounded once. Must not know how a backend packs weights.

mod taps;
#[cfg(test)]
mod tests;
mod upsampler;

use std::sync::OnceLock;

use super::causal::{Product, Time};
use super::checkpoint::Checkpoint;
use super::network::{Layer, NamedWeights};
use crate::error::{Error, Result};
use crate::ir::{ConvLayout, ConvSource, Window};
use crate::workers;
use taps::{Rounded, WeightAndBias, taps_of};
use upsampler::Upsampler;

/// The weights of one layer, folded slab by slab. Holds the layer's tensors as the file has them.
pub struct LayerWeights<'a> {
    layout: ConvLayout,
    time: Time,
    norm: Option<WeightAndBias<'a>>,
    /// Those of [`Layer::weights`].
    weights: Vec<WeightAndBias<'a>>,
    /// See [`Upsampler::bias`].
    upsampler_bias_terms: OnceLock<Vec<f64>>,
}

impl<'a> LayerWeights<'a> {
    /// Reads the layer's tensors. `layer` must belong to the network of the checkpoint's configuration.
    pub fn new(checkpoint: &'a Checkpoint, layer: &Layer) -> Result<LayerWeights<'a>> {
        let read = |affine: &NamedWeights| read(checkpoint, affine);
        Ok(LayerWeights {
            layout: layer.layout,
            time: layer.time,
            norm: layer.norm.as_ref().map(read).transpose()?,
            weights: layer.weights.iter().map(read).collect::<Result<_>>()?,
            upsampler_bias_terms: OnceLock::new(),
        })
    }

    fn fill_slab<T: Rounded>(&self, slab: u64, into: &mut [T]) -> Result<()> {
        let cout = self.layout.cout as usize;
        match self.layout.window {
            Window::Up => self.upsampler().slab(self.products(slab), into)?,
            Window::Point => {
                let mut column = 0;
                for (part, matrix) in self.weights.iter().enumerate() {
                    taps::transpose(&matrix.weight, self.scale(part), &mut into[column..], cout);
                    column += matrix.bias.elements();
                }
            }
            _ if slab == self.layout.slabs => taps::transpose(&self.weights[1].weight, 1.0, into, cout),
            _ => {
                let taps = taps_of(self.products(slab), self.time.factors(slab as usize));
                taps::sum(&self.weights[0].weight, &taps, into);
            }
        }
        Ok(())
    }

    fn fill_bias<T: Rounded>(&self, bias: u64, into: &mut [T]) {
        let mut exact = vec![0.0; into.len()];
        match self.layout.window {
            Window::Up => {
                let products = self.time.biases()[bias as usize];
                self.upsampler().bias(products, &self.upsampler_bias_terms, &mut exact);
            }
            Window::Point => {
                let mut rest = exact.as_mut_slice();
                for (part, matrix) in self.weights.iter().enumerate() {
                    let (values, others) = rest.split_at_mut(matrix.bias.elements());
                    matrix.bias.widen_f64(0, values);
                    values.iter_mut().for_each(|value| *value *= self.scale(part));
                    rest = others;
                }
            }
            Window::Same | Window::Down => {
                self.weights[0].bias.widen_f64(0, &mut exact);
                for shortcut in &self.weights[1..] {
                    let mut more = vec![0.0; exact.len()];
                    shortcut.bias.widen_f64(0, &mut more);
                    exact.iter_mut().zip(more).for_each(|(sum, term)| *sum += term);
                }
            }
        }
        into.iter_mut().zip(exact).for_each(|(rounded, exact)| *rounded = T::round(exact));
    }

    /// Of a matrix. Attention divides scores by the square root of the head's width; scaling the queries, the first of
    /// three matrices, does the same.
    fn scale(&self, part: usize) -> f64 {
        if self.weights.len() == 3 && part == 0 { (self.layout.cin as f64).sqrt().recip() } else { 1.0 }
    }

    fn upsampler(&self) -> Upsampler<'_> {
        Upsampler::new(&self.weights[0], &self.weights[1])
    }

    fn products(&self, slab: u64) -> &'static [Product] {
        self.time.slabs()[slab as usize]
    }
}

impl ConvSource for LayerWeights<'_> {
    fn slab(&mut self, slab: u64, into: &mut [f32]) -> Result<()> {
        self.fill_slab(slab, into)
    }

    fn bias(&mut self, bias: u64, into: &mut [f32]) {
        self.fill_bias(bias, into);
    }

    fn norm(&mut self, gamma: &mut [f32], beta: &mut [f32]) {
        if let Some(norm) = &self.norm {
            norm.weight.widen(0, gamma);
            norm.bias.widen(0, beta);
        }
    }
}

/// Upper bound of the memory that folding a layer takes, besides the slab or bias that it fills.
pub fn transient_bytes(layer: &Layer) -> u64 {
    // No type in the file is larger than f32.
    let elements: u64 = layer.affine().map(|affine| affine.shape.iter().product::<u64>() + affine.shape[0]).sum();
    let bias = 2 * 8 * layer.layout.bias_elements() + size_of::<f32>() as u64 * elements;
    let threads = workers::threads_for(usize::MAX).max(1) as u64;
    match layer.layout.window {
        Window::Up => bias + upsampler::transient_bytes(&layer.layout, layer.time, threads),
        _ => bias + taps::transient_bytes(layer.layout.cin, threads),
    }
}

/// A wrong shape is an internal error: opening the checkpoint has compared its tensors with the model's.
fn read<'a>(checkpoint: &'a Checkpoint, affine: &NamedWeights) -> Result<WeightAndBias<'a>> {
    let [weight, bias] = affine.tensors().map(|(name, shape)| {
        let tensor = checkpoint.tensor(&name)?;
        if tensor.shape != shape {
            let (found, file) = (tensor.shape, checkpoint.path().display());
            return Err(Error::Internal(format!("{file}: tensor {name} has shape {found:?}, not {shape:?}")));
        }
        Ok(tensor)
    });
    Ok(WeightAndBias { weight: weight?, bias: bias? })
}
