//! Reorders a convolution's weights: output channels are outermost in the file and innermost in a slab.

use crate::model::causal::Product;
use crate::model::checkpoint::FileTensor;
use crate::workers;

/// Input channels of a work unit: enough for long reads.
const ROWS: usize = 32;
/// Output channels at a time: enough to write whole cache lines, few enough to stay in cache.
const COLUMNS: usize = 16;
/// The largest kernel, 3 x 3 x 3.
const MOST_TAPS: usize = 27;

/// The type of folded weights: f32 for a backend, f64 for tests of the values before rounding.
pub(super) trait Rounded: Send {
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

/// A slab of a convolution without a folded 1x1x1: the sum over the temporal `taps` of `weight` [cout, cin, depth,
/// height, width], in the order tap row, tap column, input channel, output channel.
pub(super) fn sum<T: Rounded>(weight: &FileTensor, taps: &[(usize, f64)], into: &mut [T]) {
    let shape: Vec<usize> = weight.shape.iter().map(|dim| *dim as usize).collect();
    let &[cout, cin, depth, height, width] = shape.as_slice() else {
        unreachable!("a convolution's weight has five dimensions");
    };
    let (area, volume) = (height * width, depth * height * width);
    debug_assert!(volume <= MOST_TAPS && into.len() == area * cin * cout);

    // A unit has the same rows of every tap, so that a thread reads each kernel once.
    let mut units: Vec<(usize, Vec<&mut [T]>)> = (0..cin).step_by(ROWS).map(|first| (first, Vec::new())).collect();
    for tap in into.chunks_mut(cin * cout) {
        for (unit, rows) in units.iter_mut().zip(tap.chunks_mut(ROWS * cout)) {
            unit.1.push(rows);
        }
    }
    workers::for_each(
        workers::threads_for(area * cin * cout),
        units,
        || vec![0.0; COLUMNS * ROWS.min(cin) * volume],
        |kernels, (first, mut unit)| {
            let rows = ROWS.min(cin - first);
            for column in (0..cout).step_by(COLUMNS) {
                let columns = COLUMNS.min(cout - column);
                let run = rows * volume;
                for (c, kernels) in kernels.chunks_exact_mut(run).take(columns).enumerate() {
                    weight.widen(((column + c) * cin + first) * volume, kernels);
                }
                for (position, rows) in unit.iter_mut().enumerate() {
                    for (r, row) in rows.chunks_exact_mut(cout).enumerate() {
                        let row = &mut row[column..column + columns];
                        gather(kernels, r * volume + position, run, taps, area, row);
                    }
                }
            }
        },
    );
}

/// Element c of `row` becomes the sum over taps of the value at `start + c * run + tap * area`.
fn gather<T: Rounded>(values: &[f32], start: usize, run: usize, taps: &[(usize, f64)], area: usize, row: &mut [T]) {
    let at = |c: usize, (tap, factor): (usize, f64)| f64::from(values[start + c * run + tap * area]) * factor;
    match *taps {
        [tap] => row.iter_mut().enumerate().for_each(|(c, to)| *to = T::round(at(c, tap))),
        _ => row.iter_mut().enumerate().for_each(|(c, to)| *to = T::round(taps.iter().map(|tap| at(c, *tap)).sum())),
    }
}

/// A matrix [cout, cin], scaled and transposed: element (cout, cin) goes to `cin * stride + cout`.
pub(super) fn transpose<T: Rounded>(weight: &FileTensor, scale: f64, into: &mut [T], stride: usize) {
    let (cout, cin) = (weight.shape[0] as usize, weight.shape[1] as usize);
    let mut rows = vec![0.0; COLUMNS.min(cout) * cin];
    for column in (0..cout).step_by(COLUMNS) {
        let columns = COLUMNS.min(cout - column);
        weight.widen(column * cin, &mut rows[..columns * cin]);
        for (input, row) in into.chunks_mut(stride).enumerate().take(cin) {
            for (c, to) in row[column..column + columns].iter_mut().enumerate() {
                *to = T::round(f64::from(rows[c * cin + input]) * scale);
            }
        }
    }
}

pub(super) fn transient_bytes(cin: u64, threads: u64) -> u64 {
    let (rows, columns, taps) = (ROWS as u64, COLUMNS as u64, MOST_TAPS as u64);
    let bookkeeping = 64 * cin + (64 << 10);
    (threads * columns * rows * taps * 4).max(columns * cin * 4) + bookkeeping
}
