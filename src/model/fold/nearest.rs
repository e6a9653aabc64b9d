//! Nearest neighbour and a 3x3 convolution multiplied out: four convolutions with 2 x 2 taps, one for each phase of the
//! output. Kernel offsets that fall on one pixel of the smaller input are summed. Zeros outside the image stay zeros,
//! so this is exact at the border too.

use super::phases::{KERNEL, SIDE, TAPS, offsets};
use super::taps::Rounded;

/// Rows and columns of the kernel.
const AREA: usize = KERNEL * KERNEL;

/// A block of a slab: the sum over the temporal `taps`. `kernels` has the order output channel, input channel, temporal
/// tap, row, column; `into` the order phase, tap row, tap column, input channel, output channel.
pub(super) fn sum<T: Rounded>(kernels: &[f32], (rows, columns): (usize, usize), taps: &[(usize, f64)], into: &mut [T]) {
    let volume = kernels.len() / (rows * columns);
    for (index, into) in into.chunks_exact_mut(rows * columns).enumerate().take(TAPS) {
        let (phase, tap) = (index / (SIDE * SIDE), index % (SIDE * SIDE));
        let rows_of = offsets(phase / SIDE, tap / SIDE);
        let places: Vec<usize> = rows_of
            .flat_map(|(row, _)| offsets(phase % SIDE, tap % SIDE).map(move |(column, _)| row * KERNEL + column))
            .collect();
        for (at, into) in into.iter_mut().enumerate() {
            let kernel = &kernels[(at % columns * rows + at / columns) * volume..][..volume];
            let of_tap = |(tap, factor): &(usize, f64)| {
                places.iter().map(|place| f64::from(kernel[tap * AREA + place])).sum::<f64>() * factor
            };
            *into = T::round(taps.iter().map(of_tap).sum());
        }
    }
}
