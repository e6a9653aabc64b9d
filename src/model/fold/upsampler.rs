//! The upsampler multiplied out: a 1x1x1 convolution to 4 or 8 times the channels, the unfolding into space and time
//! and a causal 3x3x3 convolution become four convolutions with 2 x 2 taps. Slabs share products of a temporal tap and
//! an unfolded frame, so each is computed once, for a few output channels at a time and at the [`points`] of space.

use std::array::from_fn;

use super::buffers::{FoldBuffers, FoldBytes, aligned};
use super::phases::{KERNEL, PHASES, SIDE, TAPS, offsets};
use super::points::{self, POINTS, PixelPoints};
use super::product::{self, COLUMNS, ROWS, Real, TERMS};
use super::taps::{Rounded, WeightAndBias};
use crate::error::Result;
use crate::ir::{ConvLayout, WeightBlock};
use crate::model::lower::{Product, Recipes};
use crate::reserve;

const KERNEL_AREA: usize = KERNEL * KERNEL;
const KERNEL_TAPS: usize = KERNEL * KERNEL_AREA;

pub(super) struct Upsampler<'a> {
    upscale: &'a WeightAndBias<'a>,
    conv: &'a WeightAndBias<'a>,
    /// Frames that one frame is unfolded into.
    frames: usize,
    cin: usize,
    cout: usize,
}

/// The kernel offset that leaves the image in the outermost row (or column) of a phase.
fn outermost(phase: usize) -> usize {
    if phase == 0 { 0 } else { KERNEL - 1 }
}

/// The place of a product among those of every temporal tap and unfolded frame. Slabs need all of them.
fn product_index((tap, frame): Product) -> usize {
    frame * KERNEL + tap
}

impl<'a> Upsampler<'a> {
    pub fn new(upscale: &'a WeightAndBias<'a>, conv: &'a WeightAndBias<'a>) -> Upsampler<'a> {
        let (cin, cout) = (conv.weight.shape[1] as usize, conv.weight.shape[0] as usize);
        Upsampler { upscale, conv, frames: upscale.bias.elements() / (PHASES * cin), cin, cout }
    }

    /// Multiplied in `E`, summed in f64.
    pub fn fold<E: Real, T: Rounded>(
        &self,
        block: &WeightBlock,
        time: &Recipes,
        buffers: &mut FoldBuffers<T>,
        each: &mut dyn FnMut(u64, &[T]) -> Result<()>,
    ) -> Result<()> {
        let (rows, columns) = (block.rows() as usize, block.columns() as usize);
        let padded = rows.next_multiple_of(ROWS);
        let slabs = time.slabs();
        self.read_upscale(block, padded, buffers)?;
        reserve::grown("weights", &mut buffers.plain, slabs.len() * TAPS * rows * columns)?;
        for first in (0..columns).step_by(COLUMNS) {
            let width = COLUMNS.min(columns - first);
            self.read_conv::<E, T>(block.outputs.start as usize + first, width, buffers)?;
            let FoldBuffers { upscale, conv, products, plain, .. } = buffers;
            let products = aligned(products, self.frames * KERNEL * TAPS * padded * COLUMNS)?;
            products.fill(E::default());
            let products = products.as_chunks_mut::<COLUMNS>().0;
            self.multiply(upscale, aligned(conv, self.conv_values())?, products);
            products.chunks_exact_mut(TAPS * padded).for_each(points::interpolate);
            for (slab, of) in slabs.iter().enumerate() {
                let place = |product: &Product| product_index(*product) * TAPS * padded;
                let summed = of.products.iter().zip(&of.factors);
                let places: Vec<(usize, f64)> = summed.map(|(product, factor)| (place(product), *factor)).collect();
                for row in 0..TAPS * rows {
                    let at = row / rows * padded + row % rows;
                    let into = &mut plain[(slab * TAPS * rows + row) * columns + first..][..width];
                    let mut sums = [0.0; COLUMNS];
                    for (place, factor) in &places {
                        let products = products[place + at].map(Into::<f64>::into);
                        sums.iter_mut().zip(products).for_each(|(sum, product)| *sum += factor * product);
                    }
                    into.iter_mut().zip(sums).for_each(|(to, sum)| *to = T::round(sum));
                }
            }
        }
        let slabs = buffers.plain.chunks_exact(TAPS * rows * columns).take(slabs.len());
        slabs.enumerate().try_for_each(|(slab, plain)| each(slab as u64, plain))
    }

    /// The 1x1x1 convolution: for every [`TERMS`] unfolded channels, [unfolded frame][tile of input channels][phase]
    /// [unfolded channel][input channel].
    fn read_upscale<T>(&self, block: &WeightBlock, padded: usize, buffers: &mut FoldBuffers<T>) -> Result<()> {
        let (rows, first, tiles) = (block.rows() as usize, block.inputs.start as usize, padded / ROWS);
        let FoldBuffers { bytes, kernels, upscale, .. } = buffers;
        let upscale = reserve::grown("folding", upscale, PHASES * self.frames * self.cin * padded)?;
        let upscale = upscale.as_chunks_mut::<ROWS>().0;
        let parts = PHASES * self.frames;
        // Whole rows of the file, because each read takes a microsecond, and few at a time.
        let kernels = reserve::grown("folding", kernels, TERMS * self.cin)?;
        for (group, into) in upscale.chunks_mut(TERMS * parts * tiles).enumerate() {
            let terms = into.len() / (parts * tiles);
            let kernels = &mut kernels[..terms * self.cin];
            for part in 0..parts {
                let (phase, frame) = (part / self.frames, part % self.frames);
                self.upscale.weight.read((part * self.cin + group * TERMS) * self.cin, bytes, kernels)?;
                for tile in 0..tiles {
                    let width = ROWS.min(rows - tile * ROWS);
                    let into = &mut into[((frame * tiles + tile) * PHASES + phase) * terms..][..terms];
                    for (row, into) in kernels.chunks_exact(self.cin).zip(into) {
                        into[..width].copy_from_slice(&row[first + tile * ROWS..][..width]);
                        into[width..].fill(0.0);
                    }
                }
            }
        }
        Ok(())
    }

    /// The 3x3x3 convolution to `width` output channels: for every [`TERMS`] unfolded channels, [point][frame][unfolded
    /// channel][output channel].
    fn read_conv<E: Real, T>(&self, first: usize, width: usize, buffers: &mut FoldBuffers<T>) -> Result<()> {
        let FoldBuffers { bytes, kernels, conv, .. } = buffers;
        let run = self.cin * KERNEL_TAPS;
        let kernels = reserve::grown("folding", kernels, width * run)?;
        self.conv.weight.read(first * run, bytes, kernels)?;
        let conv = aligned(conv, self.conv_values())?;
        // Taps are so far apart that the cache has no room for a line of each. So a few channels are reordered apart.
        let mut values = [[[E::default(); COLUMNS]; CONV_CHANNELS]; KERNEL_TAPS];
        let mut at_points = [[[E::default(); COLUMNS]; CONV_CHANNELS]; TAPS];
        for (group, conv) in conv.as_chunks_mut().0.chunks_mut(TAPS * KERNEL * TERMS).enumerate() {
            let terms = conv.len() / (TAPS * KERNEL);
            for first in (0..terms).step_by(CONV_CHANNELS) {
                let channels = CONV_CHANNELS.min(terms - first);
                for (column, kernels) in kernels.chunks_exact(run).enumerate() {
                    let kernels = &kernels[(group * TERMS + first) * KERNEL_TAPS..][..channels * KERNEL_TAPS];
                    for (channel, kernel) in kernels.as_chunks::<KERNEL_TAPS>().0.iter().enumerate() {
                        for (value, tap) in kernel.iter().zip(&mut values) {
                            tap[channel][column] = E::from(*value);
                        }
                    }
                }
                for (frame, taps) in values.as_chunks::<KERNEL_AREA>().0.iter().enumerate() {
                    points::evaluate_kernels(taps, &mut at_points);
                    for (values, conv) in at_points.iter().zip(conv.chunks_exact_mut(KERNEL * terms)) {
                        conv[frame * terms + first..][..channels].copy_from_slice(&values[..channels]);
                    }
                }
            }
        }
        Ok(())
    }

    /// Of the 3x3x3 convolution to a few output channels, at every point.
    fn conv_values(&self) -> usize {
        TAPS * KERNEL * self.cin * COLUMNS
    }

    /// Adds every product at every point: [product][point][input channel][output channel].
    fn multiply<E: Real>(&self, upscale: &[f32], conv: &[E], into: &mut [[E; COLUMNS]]) {
        let into = into.as_chunks_mut().0;
        let tiles = into.len() / (self.frames * KERNEL * TAPS);
        let parts = PHASES * self.frames;
        let upscale = upscale.as_chunks().0[..parts * self.cin * tiles].chunks(TERMS * parts * tiles);
        let conv = conv.as_chunks().0.chunks(TAPS * KERNEL * TERMS);
        let mut at_points = PixelPoints::<E>::default();
        for (upscale, conv) in upscale.zip(conv) {
            let terms = conv.len() / (TAPS * KERNEL);
            for (at, pixels) in upscale.chunks_exact(PHASES * terms).enumerate() {
                let (frame, tile) = (at / tiles, at % tiles);
                for row in 0..POINTS {
                    points::evaluate_pixels(pixels, row, &mut at_points);
                    for (column, left) in at_points.0.iter().enumerate() {
                        let point = points::index(row, column);
                        let right: [_; KERNEL] = from_fn(|tap| &conv[(point * KERNEL + tap) * terms..][..terms]);
                        let place = |tap| (product_index((tap, frame)) * TAPS + point) * tiles + tile;
                        let into = into.get_disjoint_mut(from_fn(place)).expect("taps have places of their own");
                        product::add(&left[..terms], right, into);
                    }
                }
            }
        }
    }

    /// The convolution's bias, plus the 1x1x1's through every kernel offset inside the image: [bias, phase row, phase
    /// column, edge, output channel].
    pub fn biases(&self, time: &Recipes, into: &mut [f64]) -> Result<()> {
        let (cout, frames) = (self.cout, self.frames);
        let mut own = reserve::filled("biases", 0.0, cout)?;
        self.conv.bias.read_f64(&mut own)?;
        let terms = self.multiply_bias()?;
        let edges = TAPS * cout;
        for (products, into) in time.biases().iter().zip(into.chunks_exact_mut(edges)) {
            for (index, into) in into.chunks_exact_mut(cout).enumerate() {
                let (r, s, outer_row, outer_column) =
                    (index >> 3 & 1, index >> 2 & 1, index & 1 == 1, index >> 1 & 1 == 1);
                into.copy_from_slice(&own);
                let rows = (0..SIDE).flat_map(|tap| offsets(r, tap)).filter(|(k, _)| !outer_row || *k != outermost(r));
                for (kernel_row, row) in rows {
                    let columns = (0..SIDE).flat_map(|tap| offsets(s, tap));
                    for (kernel_column, column) in columns.filter(|(k, _)| !outer_column || *k != outermost(s)) {
                        for (tap, frame) in products {
                            let kernel = (tap * KERNEL + kernel_row) * KERNEL + kernel_column;
                            let unfolded = (row * SIDE + column) * frames + frame;
                            let term = kernel * PHASES * frames + unfolded;
                            let terms = terms.chunks_exact(KERNEL_TAPS * PHASES * frames);
                            into.iter_mut().zip(terms).for_each(|(sum, terms)| *sum += terms[term]);
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// Every tap's weights times every phase and frame of the 1x1x1 bias: [output channel, tap, phase and frame].
    fn multiply_bias(&self) -> Result<Vec<f64>> {
        let (cin, parts) = (self.cin, PHASES * self.frames);
        let mut stored = reserve::filled("biases", 0.0, parts * cin)?;
        self.upscale.bias.read_f64(&mut stored)?;
        // Channels outermost, so that the innermost loop runs over phases and frames.
        let mut bias = reserve::vec("biases", cin * parts)?;
        bias.extend((0..cin * parts).map(|at| stored[at % parts * cin + at / parts]));

        let mut terms = reserve::filled("biases", 0.0, self.cout * KERNEL_TAPS * parts)?;
        let (mut bytes, mut weights) = (Vec::new(), reserve::filled("biases", 0.0, cin * KERNEL_TAPS)?);
        for (channel, sums) in terms.chunks_exact_mut(KERNEL_TAPS * parts).enumerate() {
            self.conv.weight.read(channel * cin * KERNEL_TAPS, &mut bytes, &mut weights)?;
            for (weights, bias) in weights.chunks_exact(KERNEL_TAPS).zip(bias.chunks_exact(parts)) {
                for (weight, sums) in weights.iter().zip(sums.chunks_exact_mut(parts)) {
                    sums.iter_mut().zip(bias).for_each(|(sum, bias)| *sum += f64::from(*weight) * bias);
                }
            }
        }
        Ok(terms)
    }
}

/// Channels of the 3x3x3 convolution that are reordered at a time.
const CONV_CHANNELS: usize = 4;

pub(super) fn fold_bytes(layout: &ConvLayout, time: &Recipes, block: &WeightBlock) -> FoldBytes {
    let (cin, rows) = (layout.cin, block.rows().next_multiple_of(ROWS as u64));
    let (columns, taps, kernel) = (COLUMNS as u64, TAPS as u64, KERNEL_TAPS as u64);
    let kernels = 4 * cin * (kernel * columns.min(block.columns())).max(TERMS as u64);
    // No product has a larger type than f64.
    FoldBytes {
        bytes: kernels,
        kernels,
        upscale: 4 * PHASES as u64 * time.rule.unfold * cin * rows,
        conv: 8 * taps * KERNEL as u64 * cin * columns,
        products: 8 * time.rule.unfold * KERNEL as u64 * taps * rows * columns,
        plain: 4 * layout.slabs * block.slab_elements(layout),
        ..FoldBytes::default()
    }
}

/// What the biases take beside their own bytes.
pub(super) fn bias_bytes(layout: &ConvLayout, time: &Recipes) -> u64 {
    let (cin, cout, parts, kernel) = (layout.cin, layout.cout, PHASES as u64 * time.rule.unfold, KERNEL_TAPS as u64);
    8 * cout * kernel * parts + 24 * cin * parts + 8 * cin * kernel + 16 * cout
}
