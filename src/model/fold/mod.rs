//! The algebra done once at load time: folds a checkpoint's tensors into the weights of convolutions, block by block.
//! Everything is summed and multiplied in f64 and rounded once, except upsamplers, which may be multiplied out in f32.
//! Must not know how a backend packs weights.

mod buffers;
mod nearest;
mod phases;
mod points;
mod product;
mod taps;
#[cfg(test)]
mod tests;
mod upsampler;
mod vectors;

pub use buffers::{FoldBuffers, FoldBytes};

use std::slice;
use std::sync::Arc;

use super::checkpoint::{Checkpoint, FileTensor};
use super::lower::Recipes;
use super::network::{Layer, LayerTensors, NamedWeights, NormTensors};
use crate::error::{Error, Result};
use crate::ir::{ConvLayout, ConvSource, EachSlab, Norm, WeightBlock, WeightPart, Window};
use crate::reserve;
use taps::{BlockSize, Rounded, WeightAndBias, taps_of};
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
    time: Arc<Recipes>,
    product_type: ProductType,
    norm: Option<FoundNorm<'a>>,
    tensors: FoundTensors<'a>,
}

/// Those of [`LayerTensors`], in the file.
enum FoundTensors<'a> {
    Conv { conv: WeightAndBias<'a>, shortcut: Option<WeightAndBias<'a>> },
    Projected { conv: WeightAndBias<'a>, projection: WeightAndBias<'a> },
    Matrices(Vec<WeightAndBias<'a>>),
    Unfolded { upscale: WeightAndBias<'a>, conv: WeightAndBias<'a> },
    Nearest { conv: WeightAndBias<'a> },
}

/// Those of [`NormTensors`], in the file.
struct FoundNorm<'a> {
    weight: FileTensor<'a>,
    bias: Option<FileTensor<'a>>,
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
        let tensors = match &layer.tensors {
            LayerTensors::Conv { conv, shortcut } => {
                FoundTensors::Conv { conv: find(conv)?, shortcut: shortcut.as_ref().map(find).transpose()? }
            }
            LayerTensors::Projected { conv, projection } => {
                FoundTensors::Projected { conv: find(conv)?, projection: find(projection)? }
            }
            LayerTensors::Matrices(parts) => FoundTensors::Matrices(parts.iter().map(find).collect::<Result<_>>()?),
            LayerTensors::Unfolded { upscale, conv } => {
                FoundTensors::Unfolded { upscale: find(upscale)?, conv: find(conv)? }
            }
            LayerTensors::Nearest { conv } => FoundTensors::Nearest { conv: find(conv)? },
        };
        let find_norm = |norm: &NormTensors| {
            Ok(match norm {
                NormTensors::WeightAndBias(affine) => {
                    let WeightAndBias { weight, bias, .. } = find(affine)?;
                    FoundNorm { weight, bias: Some(bias) }
                }
                NormTensors::Gamma { name, shape } => {
                    FoundNorm { weight: find_tensor(checkpoint, name, shape)?, bias: None }
                }
            })
        };
        let norm = layer.norm.as_ref().map(find_norm).transpose()?;
        Ok(LayerWeights { layout: layer.layout, time: Arc::clone(&layer.time), product_type, norm, tensors })
    }

    fn fold<T: Rounded>(
        &self,
        block: &WeightBlock,
        buffers: &mut FoldBuffers<T>,
        each: &mut dyn FnMut(u64, &[T]) -> Result<()>,
    ) -> Result<()> {
        let conv = match &self.tensors {
            FoundTensors::Unfolded { upscale, conv } => {
                let upsampler = Upsampler::new(upscale, conv);
                return match self.product_type {
                    ProductType::F32 => upsampler.fold::<f32, T>(block, &self.time, buffers, each),
                    ProductType::F64 => upsampler.fold::<f64, T>(block, &self.time, buffers, each),
                };
            }
            FoundTensors::Projected { conv, projection } => {
                return self.fold_projected([conv, projection], block, buffers, each);
            }
            FoundTensors::Matrices(parts) => return self.fold_matrices(parts, block, buffers, each),
            FoundTensors::Conv { shortcut: Some(shortcut), .. } if block.shortcut => {
                return self.fold_matrices(slice::from_ref(shortcut), block, buffers, each);
            }
            FoundTensors::Conv { conv, .. } | FoundTensors::Nearest { conv } => conv,
        };
        let FoldBuffers { bytes, kernels, plain, .. } = buffers;
        let (rows, columns) = (block.rows() as usize, block.columns() as usize);
        let plain = reserve::grown("weights", plain, block.slab_elements(&self.layout) as usize)?;
        let volume = volume_of(&conv.weight);
        let kernels = reserve::grown("weights", kernels, rows * columns * volume)?;
        let area = self.layout.window.taps() as usize;
        let mut read_part = None;
        for slab in block.slabs(&self.layout) {
            let slab_products = &self.time.slabs()[slab as usize];
            let part = slab_products.output_part(&self.time);
            if read_part.replace(part) != Some(part) {
                taps::read(&conv.weight, &block.later_outputs(part * self.layout.cout), volume, bytes, kernels)?;
            }
            let taps = taps_of(slab_products);
            match self.layout.window {
                Window::Up => nearest::sum(kernels, (rows, columns), &taps, plain),
                _ => taps::sum(kernels, BlockSize { rows, columns, area }, &taps, plain),
            }
            each(slab, plain)?;
        }
        Ok(())
    }

    /// A block of a convolution whose output goes through a matrix.
    fn fold_projected<T: Rounded>(
        &self,
        [conv, projection]: [&WeightAndBias; 2],
        block: &WeightBlock,
        buffers: &mut FoldBuffers<T>,
        each: &mut dyn FnMut(u64, &[T]) -> Result<()>,
    ) -> Result<()> {
        let FoldBuffers { bytes, kernels, upscale, plain, .. } = buffers;
        let inner = WeightBlock { outputs: 0..conv.weight.shape[0], ..block.clone() };
        let (rows, columns, volume) = (block.rows() as usize, inner.columns() as usize, volume_of(&conv.weight));
        let kernels = reserve::grown("weights", kernels, rows * columns * volume)?;
        taps::read(&conv.weight, &inner, volume, bytes, kernels)?;
        let matrix = reserve::grown("weights", upscale, columns * block.columns() as usize)?;
        projection.weight.read(block.outputs.start as usize * columns, bytes, matrix)?;
        let plain = reserve::grown("weights", plain, block.slab_elements(&self.layout) as usize)?;
        let mut sums = reserve::filled("weights", 0.0, inner.slab_elements(&self.layout) as usize)?;
        for slab in block.slabs(&self.layout) {
            let taps = taps_of(&self.time.slabs()[slab as usize]);
            let area = self.layout.window.taps() as usize;
            taps::sum(kernels, BlockSize { rows, columns, area }, &taps, &mut sums);
            for (sums, into) in sums.chunks_exact(columns).zip(plain.chunks_exact_mut(block.columns() as usize)) {
                for (to, row) in into.iter_mut().zip(matrix.chunks_exact(columns)) {
                    *to = T::round(row.iter().zip(sums).map(|(factor, sum)| f64::from(*factor) * sum).sum());
                }
            }
            each(slab, plain)?;
        }
        Ok(())
    }

    /// A block of matrices, or of a shortcut.
    fn fold_matrices<T: Rounded>(
        &self,
        parts: &[WeightAndBias],
        block: &WeightBlock,
        buffers: &mut FoldBuffers<T>,
        each: &mut dyn FnMut(u64, &[T]) -> Result<()>,
    ) -> Result<()> {
        let FoldBuffers { bytes, kernels, plain, .. } = buffers;
        let plain = reserve::grown("weights", plain, block.slab_elements(&self.layout) as usize)?;
        let kernels = reserve::grown("weights", kernels, plain.len())?;
        transpose(parts, block, bytes, kernels, plain)?;
        each(block.slabs(&self.layout).start, plain)
    }

    /// All bias vectors.
    fn fold_biases<T: Rounded>(&self, into: &mut [T]) -> Result<()> {
        let mut exact = reserve::filled("biases", 0.0, into.len())?;
        match &self.tensors {
            FoundTensors::Unfolded { upscale, conv } => Upsampler::new(upscale, conv).biases(&self.time, &mut exact)?,
            // The same at every edge: what is repeated has no bias of its own.
            FoundTensors::Nearest { conv } => {
                let (own, others) = exact.split_at_mut(conv.bias.elements());
                conv.bias.read_f64(own)?;
                others.chunks_exact_mut(own.len()).for_each(|edge| edge.copy_from_slice(own));
            }
            FoundTensors::Projected { conv, projection } => {
                let mut inner = reserve::filled("biases", 0.0, conv.bias.elements())?;
                conv.bias.read_f64(&mut inner)?;
                projection.bias.read_f64(&mut exact)?;
                let mut row = reserve::filled("biases", 0.0, inner.len())?;
                for (channel, sum) in exact.iter_mut().enumerate() {
                    projection.weight.read(channel * inner.len(), &mut Vec::new(), &mut row)?;
                    *sum += row.iter().zip(&inner).map(|(factor, bias)| f64::from(*factor) * bias).sum::<f64>();
                }
            }
            FoundTensors::Matrices(parts) => {
                let mut rest = exact.as_mut_slice();
                for matrix in parts {
                    let (values, others) = rest.split_at_mut(matrix.bias.elements());
                    matrix.bias.read_f64(values)?;
                    values[..matrix.scaled].iter_mut().for_each(|value| *value *= matrix.scale);
                    rest = others;
                }
            }
            FoundTensors::Conv { conv, shortcut } => {
                conv.bias.read_f64(&mut exact)?;
                if let Some(shortcut) = shortcut {
                    let mut more = reserve::filled("biases", 0.0, exact.len())?;
                    shortcut.bias.read_f64(&mut more)?;
                    exact.iter_mut().zip(more).for_each(|(sum, term)| *sum += term);
                }
            }
        }
        into.iter_mut().zip(exact).for_each(|(rounded, exact)| *rounded = T::round(exact));
        Ok(())
    }
}

/// A block of matrices [output channel, input channel] that lie side by side.
fn transpose<T: Rounded>(
    parts: &[WeightAndBias],
    block: &WeightBlock,
    bytes: &mut Vec<u8>,
    kernels: &mut [f32],
    into: &mut [T],
) -> Result<()> {
    let (rows, columns) = (block.rows() as usize, block.columns() as usize);
    let (mut first, mut column) = (0, 0);
    for matrix in parts {
        let end = first + matrix.weight.shape[0];
        let outputs = block.outputs.start.max(first) - first..block.outputs.end.min(end).max(first) - first;
        if outputs.start < outputs.end {
            let of_part = WeightBlock { outputs, ..block.clone() };
            let width = of_part.columns() as usize;
            let kernels = &mut kernels[..rows * width];
            taps::read(&matrix.weight, &of_part, 1, bytes, kernels)?;
            for (c, kernels) in kernels.chunks_exact(rows).enumerate() {
                let scale = if of_part.outputs.start as usize + c < matrix.scaled { matrix.scale } else { 1.0 };
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

impl ConvSource for BufferedWeights<'_, '_> {
    fn block(&mut self, block: &WeightBlock, each: &mut EachSlab) -> Result<()> {
        self.weights.fold(block, self.buffers, each)
    }

    fn biases(&mut self, into: &mut [f32]) -> Result<()> {
        self.weights.fold_biases(into)
    }

    fn norm(&mut self, gamma: &mut [f32], beta: &mut [f32]) -> Result<()> {
        let Some(norm) = &self.weights.norm else { return Ok(()) };
        norm.weight.read(0, &mut self.buffers.bytes, gamma)?;
        if self.weights.layout.norm == Norm::Pixel {
            let factor = (gamma.len() as f64).sqrt();
            gamma.iter_mut().for_each(|value| *value = (f64::from(*value) * factor) as f32);
        }
        match &norm.bias {
            Some(bias) => bias.read(0, &mut self.buffers.bytes, beta),
            None => {
                beta.fill(0.0);
                Ok(())
            }
        }
    }
}

/// Upper bound of the memory that folding a part takes.
pub fn bytes(layer: &Layer, part: &WeightPart) -> FoldBytes {
    let layout = &layer.layout;
    let WeightPart::Block(block) = part else {
        let biases = layout.biases * layout.bias_elements();
        let vectors = match &layer.tensors {
            LayerTensors::Unfolded { .. } => upsampler::bias_bytes(layout, &layer.time),
            LayerTensors::Projected { conv, .. } => 24 * conv.shape[0],
            _ => 0,
        };
        return FoldBytes { bytes: 4 * layout.cin, vectors: 24 * biases + vectors, ..FoldBytes::default() };
    };
    let volume = match &layer.tensors {
        LayerTensors::Unfolded { .. } => return upsampler::fold_bytes(layout, &layer.time, block),
        LayerTensors::Projected { conv, .. } => {
            let inner = WeightBlock { outputs: 0..conv.shape[0], ..block.clone() };
            let kernels = 4 * conv.shape.iter().product::<u64>() / layout.cin * block.rows();
            let upscale = 4 * conv.shape[0] * block.columns();
            let (vectors, plain) = (8 * inner.slab_elements(layout), 4 * block.slab_elements(layout));
            return FoldBytes { bytes: kernels.max(upscale), kernels, upscale, plain, vectors, ..FoldBytes::default() };
        }
        LayerTensors::Conv { conv, .. } | LayerTensors::Nearest { conv } if !block.shortcut => {
            conv.shape[2..].iter().product()
        }
        LayerTensors::Conv { .. } | LayerTensors::Nearest { .. } | LayerTensors::Matrices(_) => 1,
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

fn find<'a>(checkpoint: &'a Checkpoint, affine: &NamedWeights) -> Result<WeightAndBias<'a>> {
    let [weight, bias] = affine.tensors().map(|(name, shape)| find_tensor(checkpoint, &name, shape));
    Ok(WeightAndBias { weight: weight?, bias: bias?, scaled: affine.scaled as usize, scale: affine.scale })
}

/// A wrong shape is an internal error: opening the checkpoint has compared its tensors with the model's.
fn find_tensor<'a>(checkpoint: &'a Checkpoint, name: &str, shape: &[u64]) -> Result<FileTensor<'a>> {
    let tensor = checkpoint.tensor(name)?;
    if tensor.shape != shape {
        let (found, file) = (tensor.shape, checkpoint.path().display());
        return Err(Error::Internal(format!("{file}: tensor {name} has shape {found:?}, not {shape:?}")));
    }
    Ok(tensor)
}
