//! The algebra done once at load time: folds a checkpoint's tensors into the weights of convolutions.
//! Everything is summed and multiplied in f64 and rounded once. Must not know how a backend packs weights.

mod taps;
#[cfg(test)]
mod tests;
mod upsampler;

use super::causal::{Product, Time};
use super::checkpoint::Checkpoint;
use super::network::{Layer, Tensors};
use crate::error::{Error, Result};
use crate::ir::{ConvLayout, ConvSource, Window};
use crate::workers;
use taps::{Rounded, WeightAndBias, taps_of};
use upsampler::Upsampler;

/// The weights of one layer, folded slab by slab. Holds the layer's tensors as the file has them.
pub struct LayerWeights<'a> {
    layout: ConvLayout,
    time: Time,
    inputs: FoldInputs<'a>,
}

/// The tensors that a layer is folded from.
enum FoldInputs<'a> {
    Conv {
        conv: WeightAndBias<'a>,
        norm: Option<WeightAndBias<'a>>,
        shortcut: Option<WeightAndBias<'a>>,
    },
    Upsampler(Upsampler<'a>),
    /// Concatenated, each with its scale.
    Projections {
        all: Vec<(WeightAndBias<'a>, f64)>,
        norm: Option<WeightAndBias<'a>>,
    },
}

impl<'a> LayerWeights<'a> {
    /// Reads the layer's tensors. `layer` must belong to the network of the checkpoint's configuration.
    pub fn new(checkpoint: &'a Checkpoint, layer: &Layer) -> Result<LayerWeights<'a>> {
        let ConvLayout { cin, cout, window, .. } = layer.layout;
        let affine = |name: &str, weight: &[u64]| weight_and_bias(checkpoint, name, weight);
        let norm = |name: &str| affine(name, &[cin]);
        let inputs = match &layer.tensors {
            Tensors::Conv { conv, norm: before, shortcut } => {
                let depth = if layer.time == Time::Still { 1 } else { 3 };
                FoldInputs::Conv {
                    conv: affine(conv, &[cout, cin, depth, window.side(), window.side()])?,
                    norm: before.as_deref().map(norm).transpose()?,
                    shortcut: match (shortcut, layer.layout.shortcut) {
                        (Some(name), Some(cin)) => Some(affine(name, &[cout, cin, 1, 1, 1])?),
                        _ => None,
                    },
                }
            }
            Tensors::Upsampler { upscale, conv } => {
                let frames = if layer.time == Time::Double { 2 } else { 1 };
                let upscale = affine(upscale, &[4 * frames * cin, cin, 1, 1, 1])?;
                FoldInputs::Upsampler(Upsampler::new(upscale, affine(conv, &[cout, cin, 3, 3, 3])?, frames as usize))
            }
            Tensors::Qkv { attention } => {
                // Attention divides scores by the square root of the head's width. Scaling the queries does the same.
                let scales = [("to_q", (cin as f64).sqrt().recip()), ("to_k", 1.0), ("to_v", 1.0)];
                let projection = |(name, scale): (&str, f64)| -> Result<_> {
                    Ok((affine(&format!("{attention}.{name}"), &[cout / 3, cin])?, scale))
                };
                let all = scales.into_iter().map(projection).collect::<Result<_>>()?;
                FoldInputs::Projections { all, norm: Some(norm(&format!("{attention}.group_norm"))?) }
            }
            Tensors::Project { attention } => {
                let projection = affine(&format!("{attention}.to_out.0"), &[cout, cin])?;
                FoldInputs::Projections { all: vec![(projection, 1.0)], norm: None }
            }
        };
        Ok(LayerWeights { layout: layer.layout, time: layer.time, inputs })
    }

    fn fill_slab<T: Rounded>(&self, slab: u64, into: &mut [T]) {
        match &self.inputs {
            FoldInputs::Conv { shortcut: Some(shortcut), .. } if slab == self.layout.slabs => {
                taps::transpose(&shortcut.weight, 1.0, into, self.layout.cout as usize);
            }
            FoldInputs::Conv { conv, .. } => taps::sum(&conv.weight, &taps_of(self.products(slab)), into),
            FoldInputs::Upsampler(upsampler) => upsampler.slab(self.products(slab), into),
            FoldInputs::Projections { all, .. } => {
                let mut column = 0;
                for (projection, scale) in all {
                    taps::transpose(&projection.weight, *scale, &mut into[column..], self.layout.cout as usize);
                    column += projection.bias.elements();
                }
            }
        }
    }

    fn fill_bias<T: Rounded>(&self, bias: u64, into: &mut [T]) {
        let mut exact = vec![0.0; into.len()];
        match &self.inputs {
            FoldInputs::Conv { conv, shortcut, .. } => {
                conv.bias.widen_f64(0, &mut exact);
                if let Some(shortcut) = shortcut {
                    let mut more = vec![0.0; exact.len()];
                    shortcut.bias.widen_f64(0, &mut more);
                    exact.iter_mut().zip(more).for_each(|(sum, term)| *sum += term);
                }
            }
            FoldInputs::Upsampler(upsampler) => upsampler.bias(self.time.biases()[bias as usize], &mut exact),
            FoldInputs::Projections { all, .. } => {
                let mut rest = exact.as_mut_slice();
                for (projection, scale) in all {
                    let (values, others) = rest.split_at_mut(projection.bias.elements());
                    projection.bias.widen_f64(0, values);
                    values.iter_mut().for_each(|value| *value *= *scale);
                    rest = others;
                }
            }
        }
        into.iter_mut().zip(exact).for_each(|(rounded, exact)| *rounded = T::round(exact));
    }

    fn products(&self, slab: u64) -> &'static [Product] {
        self.time.slabs()[slab as usize]
    }
}

impl ConvSource for LayerWeights<'_> {
    fn slab(&mut self, slab: u64, into: &mut [f32]) {
        self.fill_slab(slab, into);
    }

    fn bias(&mut self, bias: u64, into: &mut [f32]) {
        self.fill_bias(bias, into);
    }

    fn norm(&mut self, gamma: &mut [f32], beta: &mut [f32]) {
        if let FoldInputs::Conv { norm: Some(norm), .. } | FoldInputs::Projections { norm: Some(norm), .. } =
            &self.inputs
        {
            norm.weight.widen(0, gamma);
            norm.bias.widen(0, beta);
        }
    }
}

/// Upper bound of the memory that folding a layer takes, besides the slab or bias that it fills.
pub fn transient_bytes(layer: &Layer) -> u64 {
    let bias = 2 * 8 * layer.layout.bias_elements() + file_bytes(layer);
    let threads = workers::threads_for(usize::MAX).max(1) as u64;
    match layer.layout.window {
        Window::Up => bias + upsampler::transient_bytes(&layer.layout, layer.time, threads),
        _ => bias + taps::transient_bytes(layer.layout.cin, threads),
    }
}

/// Upper bound of the layer's tensors in the file, where no type is larger than f32.
fn file_bytes(layer: &Layer) -> u64 {
    let ConvLayout { cin, cout, window, shortcut, .. } = layer.layout;
    let weights = match layer.tensors {
        Tensors::Conv { .. } => {
            let depth = if layer.time == Time::Still { 1 } else { 3 };
            (cin * depth * window.side() * window.side() + shortcut.unwrap_or(0)) * cout
        }
        Tensors::Upsampler { .. } => {
            let frames = if layer.time == Time::Double { 2 } else { 1 };
            (4 * frames * (cin + 1) + 27 * cout) * cin
        }
        Tensors::Qkv { .. } | Tensors::Project { .. } => cin * cout,
    };
    // Biases, and weight and bias of the norm.
    size_of::<f32>() as u64 * (weights + 2 * cout + 2 * cin)
}

/// A wrong shape is an internal error: opening the checkpoint has compared its tensors with the model's table.
fn weight_and_bias<'a>(checkpoint: &'a Checkpoint, name: &str, weight: &[u64]) -> Result<WeightAndBias<'a>> {
    let tensor = |kind: &str, shape: &[u64]| {
        let tensor = checkpoint.tensor(&format!("{name}.{kind}"))?;
        if tensor.shape != shape {
            let (found, file) = (tensor.shape, checkpoint.path().display());
            return Err(Error::Internal(format!("{file}: tensor {name}.{kind} has shape {found:?}, not {shape:?}")));
        }
        Ok(tensor)
    };
    Ok(WeightAndBias { weight: tensor("weight", weight)?, bias: tensor("bias", &weight[..1])? })
}
