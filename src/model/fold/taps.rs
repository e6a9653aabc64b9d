//! Reorders a convolution's weights: output channels are outermost in the file and innermost in a slab.

use crate::error::Result;
use crate::ir::WeightBlock;
use crate::model::causal::Product;
use crate::model::checkpoint::FileTensor;

/// Output channels at a time: enough to write whole cache lines, few enough to stay in cache.
const COLUMNS: usize = 16;

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
}

/// The temporal taps of products, and what each is multiplied by.
pub(super) fn taps_of(products: &[Product], factors: &[f64]) -> Vec<(usize, f64)> {
    products.iter().zip(factors).map(|((tap, _), factor)| (*tap, *factor)).collect()
}

/// The values of a block as the file orders them: output channel, input channel, and the `volume` taps of both.
pub(super) fn read(
    weight: &FileTensor,
    (block, volume): (&WeightBlock, usize),
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

/// A block of a slab of a convolution without a folded 1x1x1: the sum over the temporal `taps`. `kernels` are as
/// [`read`] reads them, `area` the taps of a frame; `into` has the order tap, input channel, output channel.
pub(super) fn sum<T: Rounded>(
    kernels: &[f32],
    (rows, columns, area): (usize, usize, usize),
    taps: &[(usize, f64)],
    into: &mut [T],
) {
    let run = kernels.len() / columns;
    let volume = run / rows;
    debug_assert!(kernels.len() == rows * columns * volume && into.len() == area * rows * columns);
    for column in (0..columns).step_by(COLUMNS) {
        let kernels = &kernels[column * run..];
        let width = COLUMNS.min(columns - column);
        for row in 0..rows {
            for position in 0..area {
                let into = &mut into[(position * rows + row) * columns + column..][..width];
                gather(kernels, row * volume + position, run, taps, area, into);
            }
        }
    }
}

/// Element c of `row` becomes the sum over taps of the value at `start + c * run + tap * area`.
fn gather<T: Rounded>(values: &[f32], start: usize, run: usize, taps: &[(usize, f64)], area: usize, row: &mut [T]) {
    let at = |c: usize, (tap, factor): (usize, f64)| f64::from(values[start + c * run + tap * area]) * factor;
    match *taps {
        [tap] => row.iter_mut().enumerate().for_each(|(c, to)| *to = T::round(at(c, tap))),
        _ => row.iter_mut().enumerate().for_each(|(c, to)| *to = T::round(taps.iter().map(|tap| at(c, *tap)).sum())),
    }
}
