//! Reorders a convolution's weights: output channels are outermost in the file and innermost in a slab.

use super::vectors::on_vectors;
use crate::error::Result;
use crate::ir::WeightBlock;
use crate::model::checkpoint::FileTensor;
use crate::model::lower::Slab;

/// Output channels at a time: enough to write whole cache lines, few enough to stay in cache.
const COLUMNS: usize = 16;
/// Of a kernel: 3 x 3 x 3.
const MOST_TAPS: usize = 27;

/// The type of folded weights: f32 for a backend, f64 for tests of the values before rounding.
pub(super) trait Rounded: Copy + Default + Send {
    fn round(exact: f64) -> Self;
}

impl Rounded for f32 {
    fn round(exact: f64) -> f32 {
        exact as f32
    }
}

impl Rounded for f64 {
    fn round(exact: f64) -> f64 {
        exact
    }
}

/// Weight and bias of a convolution, a projection or a norm.
pub(super) struct WeightAndBias<'a> {
    pub weight: FileTensor<'a>,
    pub bias: FileTensor<'a>,
    /// How many of the first outputs are multiplied by `scale`, where they are a matrix.
    pub scaled: usize,
    pub scale: f64,
}

/// The temporal taps of a slab, and what each is multiplied by.
pub(super) fn taps_of(slab: &Slab) -> Vec<(usize, f64)> {
    slab.products.iter().zip(&slab.factors).map(|((tap, _), factor)| (*tap, *factor)).collect()
}

/// The values of a block as the file orders them: output channel, input channel, and the `volume` taps of both.
pub(super) fn read(
    weight: &FileTensor,
    block: &WeightBlock,
    volume: usize,
    bytes: &mut Vec<u8>,
    kernels: &mut [f32],
) -> Result<()> {
    let (rows, cin) = (block.rows() as usize, weight.shape[1] as usize);
    let place = |output: usize| (output * cin + block.inputs.start as usize) * volume;
    // Whole output channels follow each other in the file.
    let run = if rows == cin { kernels.len() } else { rows * volume };
    for (at, run_of) in kernels.chunks_mut(run).enumerate() {
        weight.read(place(block.outputs.start as usize + at), bytes, run_of)?;
    }
    Ok(())
}

/// The channels in and out of a block, and the taps of a frame.
#[derive(Clone, Copy)]
pub(super) struct BlockSize {
    pub rows: usize,
    pub columns: usize,
    pub area: usize,
}

/// A block of a slab of a convolution without a folded 1x1x1: the sum over the temporal `taps`. `kernels` are as
/// [`read`] reads them; `into` has the order tap, input channel, output channel.
pub(super) fn sum<T: Rounded>(kernels: &[f32], size: BlockSize, taps: &[(usize, f64)], into: &mut [T]) {
    on_vectors!(sum_columns[T: Rounded](kernels: &[f32], size: BlockSize, taps: &[(usize, f64)], into: &mut [T]));
}

#[inline(always)]
fn sum_columns<T: Rounded>(kernels: &[f32], size: BlockSize, taps: &[(usize, f64)], into: &mut [T]) {
    let BlockSize { rows, columns, area } = size;
    let run = kernels.len() / columns;
    let volume = run / rows;
    debug_assert!(kernels.len() == rows * columns * volume && into.len() == area * rows * columns);
    assert!(volume <= MOST_TAPS && taps.iter().all(|(tap, _)| (tap + 1) * area <= volume));
    // Of the output channels at hand: [tap][output channel].
    let mut values = [[0.0; COLUMNS]; MOST_TAPS];
    for (column, kernels) in kernels.chunks(COLUMNS * run).enumerate().map(|(at, part)| (at * COLUMNS, part)) {
        let width = kernels.len() / run;
        for row in 0..rows {
            for (c, kernel) in kernels.chunks_exact(run).enumerate() {
                let kernel = &kernel[row * volume..][..volume];
                for (tap, _) in taps {
                    let frame = tap * area..(tap + 1) * area;
                    values[frame.clone()].iter_mut().zip(&kernel[frame]).for_each(|(to, value)| to[c] = *value);
                }
            }
            for position in 0..area {
                let into = &mut into[(position * rows + row) * columns + column..][..width];
                let sums = sum_taps(&values[position..], area, taps);
                into.iter_mut().zip(sums).for_each(|(to, sum)| *to = T::round(sum));
            }
        }
    }
}

/// The sum over the temporal `taps`, which are `area` values apart.
#[inline(always)]
fn sum_taps(values: &[[f32; COLUMNS]], area: usize, taps: &[(usize, f64)]) -> [f64; COLUMNS] {
    let scaled = |(tap, factor): (usize, f64)| values[tap * area].map(|value| f64::from(value) * factor);
    let Some((first, others)) = taps.split_first() else { return [0.0; COLUMNS] };
    let mut sums = scaled(*first);
    for tap in others {
        sums.iter_mut().zip(scaled(*tap)).for_each(|(sum, value)| *sum += value);
    }
    sums
}
