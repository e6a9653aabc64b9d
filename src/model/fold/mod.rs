//! The algebra done once at load time: folds a checkpoint's tensors into the weights of convolutions, block by block.
//! Everything is summed and multiplied in f64 and rounded once, except upsamplers, which may be multiplied out in f32.
//! Must not know how a backend packs weights.

mod buffers;
mod points;
mod product;
mod taps;
#[cfg(test)]
mod tests;
mod upsampler;

pub use buffers::{FoldBuffers, FoldBytes};

use super::causal::{Product, Time};
use super::checkpoint::{Checkpoint, FileTensor};
use super::network::{Layer, NamedWeights};
use crate::error::{Error, Result};
use crate::ir::{ConvLayout, ConvSource, EachSlab, WeightBlock, WeightPart, Window};
use crate::reserve;
use taps::{Rounded, WeightAndBias, taps_of};
use upsampler::Upsampler;

/// The type that upsamplers are multiplied out in. On processors without fused multiplication the last bit of a product
/// may be another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProductType {
    /// Takes half the time. Errors are below 1e-6 of the largest weight: for weights that are rounded to 16 bits.
    F32,
    F64,
}

/// The weights of one layer, folded block by block. Reads from the file what a block needs.
pub struct LayerWeights<'a> {
    layout: ConvLayout,
    time: Time,
    product_type: ProductType,
    norm: Option<WeightAndBias<'a>>,
    /// Those of [`Layer::weights`].
    weights: Vec<WeightAndBias<'a>>,
}

/// The weights of a layer, with the buffers of a thread.
pub struct BufferedWeights<'a, 'b> {
    pub weights: &'b LayerWeights<'a>,
    pub buffers: &'b mut FoldBuffers,
}

impl<'a> LayerWeights<'a> {
    /// Finds the layer's tensors. `layer` must belong to the network of the checkpoint's configuration.
    pub fn new(checkpoint: &'a Checkpoint, layer: &Layer, product_type: ProductType) -> Result<LayerWeights<'a>> {
        let find = |affine: &NamedWeights| find(checkpoint, affine);
        Ok(LayerWeights {
            layout: layer.layout,
            time: layer.time,
            product_type,
            norm: layer.norm.as_ref().map(find).transpose()?,
            weights: layer.weights.iter().map(find).collect::<Result<_>>()?,
        })
    }

    fn fold<T: Rounded>(
        &self,
        block: &WeightBlock,
        buffers: &mut FoldBuffers<T>,
        each: &mut dyn FnMut(u64, &[T]) -> Result<()>,
    ) -> Result<()> {
        if self.layout.window == Window::Up {
            return match self.product_type {
                ProductType::F32 => self.upsampler().fold::<f32, T>(block, self.time, buffers, each),
                ProductType::F64 => self.upsampler().fold::<f64, T>(block, self.time, buffers, each),
            };
        }
        let FoldBuffers { bytes, kernels, plain, .. } = buffers;
        let (rows, columns) = (block.rows() as usize, block.columns() as usize);
        let plain = reserve::grown("weights", plain, block.slab_elements(&self.layout) as usize)?;
        if block.shortcut || self.layout.window == Window::Point {
            let kernels = reserve::grown("weights", kernels, plain.len())?;
            let parts = if block.shortcut { &self.weights[1..] } else { &self.weights };
            self.transpose(parts, block, bytes, kernels, plain)?;
            return each(block.slabs(&self.layout).start, plain);
        }
        let weight = &self.weights[0].weight;
        let volume = volume_of(weight);
        let kernels = reserve::grown("weights", kernels, rows * columns * volume)?;
        taps::read(weight, (block, volume), bytes, kernels)?;
        let area = self.layout.window.taps() as usize;
        for slab in block.slabs(&self.layout) {
            let taps = taps_of(self.products(slab), self.time.factors(self.layout.window, slab as usize));
            taps::sum(kernels, (rows, columns, area), &taps, plain);
            each(slab, plain)?;
        }
        Ok(())
    }

    /// A block of matrices [output channel, input channel] that lie side by side.
    fn transpose<T: Rounded>(
        &self,
        parts: &[WeightAndBias],
        block: &WeightBlock,
        bytes: &mut Vec<u8>,
        kernels: &mut [f32],
        into: &mut [T],
    ) -> Result<()> {
        let (rows, columns) = (block.rows() as usize, block.columns() as usize);
        let (mut first, mut column) = (0, 0);
        for (part, matrix) in parts.iter().enumerate() {
            let end = first + matrix.weight.shape[0];
            let outputs = block.outputs.start.max(first) - first..block.outputs.end.min(end).max(first) - first;
            if outputs.start < outputs.end {
                let scale = if block.shortcut { 1.0 } else { self.scale(part) };
                let of_part = WeightBlock { outputs, ..block.clone() };
                let width = of_part.columns() as usize;
                let kernels = &mut kernels[..rows * width];
                taps::read(&matrix.weight, (&of_part, 1), bytes, kernels)?;
                for (c, kernels) in kernels.chunks_exact(rows).enumerate() {
                    for (value, into) in kernels.iter().zip(into.chunks_exact_mut(columns)) {
                        into[column + c] = T::round(f64::from(*value) * scale);
                    }
                }
                column += width;
            }
            first = end;
        }
        Ok(())
    }

    /// All bias vectors.
    fn fold_biases<T: Rounded>(&self, into: &mut [T]) -> Result<()> {
        let mut exact = reserve::filled("biases", 0.0, into.len())?;
        match self.layout.window {
            Window::Up => self.upsampler().biases(self.time, &mut exact)?,
            Window::Point => {
                let mut rest = exact.as_mut_slice();
                for (part, matrix) in self.weights.iter().enumerate() {
                    let (values, others) = rest.split_at_mut(matrix.bias.elements());
                    matrix.bias.read_f64(values)?;
                    values.iter_mut().for_each(|value| *value *= self.scale(part));
                    rest = others;
                }
            }
            Window::Same | Window::Down => {
                self.weights[0].bias.read_f64(&mut exact)?;
                for shortcut in &self.weights[1..] {
                    let mut more = reserve::filled("biases", 0.0, exact.len())?;
                    shortcut.bias.read_f64(&mut more)?;
                    exact.iter_mut().zip(more).for_each(|(sum, term)| *sum += term);
                }
            }
        }
        into.iter_mut().zip(exact).for_each(|(rounded, exact)| *rounded = T::round(exact));
        Ok(())
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

impl ConvSource for BufferedWeights<'_, '_> {
    fn block(&mut self, block: &WeightBlock, each: &mut EachSlab) -> Result<()> {
        self.weights.fold(block, self.buffers, each)
    }

    fn biases(&mut self, into: &mut [f32]) -> Result<()> {
        self.weights.fold_biases(into)
    }

    fn norm(&mut self, gamma: &mut [f32], beta: &mut [f32]) -> Result<()> {
        self.weights.norm.iter().try_for_each(|norm| {
            norm.weight.read(0, &mut self.buffers.bytes, gamma)?;
            norm.bias.read(0, &mut self.buffers.bytes, beta)
        })
    }
}

/// Upper bound of the memory that folding a part takes.
pub fn bytes(layer: &Layer, part: &WeightPart) -> FoldBytes {
    let layout = &layer.layout;
    let WeightPart::Block(block) = part else {
        let biases = layout.biases * layout.bias_elements();
        let vectors = match layout.window {
            Window::Up => upsampler::bias_bytes(layout, layer.time),
            _ => 0,
        };
        return FoldBytes { bytes: 4 * layout.cin, vectors: 24 * biases + vectors, ..FoldBytes::default() };
    };
    if layout.window == Window::Up {
        return upsampler::fold_bytes(layout, layer.time, block);
    }
    let volume = match layer.weights[0].shape.get(2..) {
        Some(kernel) if !block.shortcut => kernel.iter().product(),
        _ => 1,
    };
    let kernels = 4 * block.rows() * block.columns() * volume;
    // No type in the file is larger than f32. What follows in the file is read at once.
    let cin = if block.shortcut { layout.shortcut.unwrap_or(0) } else { layout.cin };
    let bytes = if block.rows() == cin { kernels } else { 4 * block.rows() * volume };
    FoldBytes { bytes, kernels, plain: 4 * block.slab_elements(layout), ..FoldBytes::default() }
}

/// Values of a kernel between an input and an output channel.
fn volume_of(weight: &FileTensor) -> usize {
    weight.shape[2..].iter().product::<u64>() as usize
}

/// A wrong shape is an internal error: opening the checkpoint has compared its tensors with the model's.
fn find<'a>(checkpoint: &'a Checkpoint, affine: &NamedWeights) -> Result<WeightAndBias<'a>> {
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
