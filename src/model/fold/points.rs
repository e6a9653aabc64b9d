//! Toom-Cook: the taps of an upsampler are coefficients of a product of polynomials, computed from its values at a few
//! points. Each point takes a matrix product: 16 instead of 36 in both directions of space.

use super::phases::{KERNEL, PHASES, SIDE, TAPS};
use super::product::{COLUMNS, ROWS, Real, TERMS};
use super::vectors::on_vectors;

/// In one direction. Let k0 to k2 be the offsets of the 3x3x3 kernel and u0, u1 the phases of an unfolded pixel. The
/// taps of both output phases are coefficients:
///
///     (k0 + k1 x + k2 x²) (u1 + u0 x) = k0 u1  +  (k0 u0 + k1 u1) x  +  (k1 u0 + k2 u1) x²  +  k2 u0 x³
///                           phase, tap: 0, 0      1, 0                  0, 1                   1, 1
///
/// The points are 0, -1, 1 and infinity (the leading coefficients): four products instead of six. In time there is
/// nothing to gain: the slabs of the first frames need all six. A point has the number of the coefficient that replaces
/// it, 2 * phase + tap.
pub(super) const POINTS: usize = 4;

/// The number of a point of rows and a point of columns. Its bits are phase row, phase column, tap row and tap column,
/// as in a slab.
#[inline(always)]
pub(super) fn index(row: usize, column: usize) -> usize {
    (row & 2) << 2 | (column & 2) << 1 | (row & 1) << 1 | column & 1
}

/// Values of an unfolded pixel's polynomial at the points.
#[inline(always)]
fn of_pixel<E: Real>(u0: E, u1: E) -> [E; POINTS] {
    [u1, u1 - u0, u1 + u0, u0]
}

/// Values of a kernel's polynomial at the points.
#[inline(always)]
fn of_kernel<E: Real>([k0, k1, k2]: [E; KERNEL]) -> [E; POINTS] {
    [k0, k0 + k2 - k1, k0 + k2 + k1, k2]
}

/// The coefficients of the product that has these values at the points.
#[inline(always)]
fn coefficients<E: Real>([zero, minus, plus, infinity]: [E; POINTS]) -> [E; POINTS] {
    let half = E::from(0.5);
    [zero, (plus + minus) * half - zero, (plus - minus) * half - infinity, infinity]
}

/// [point of columns][term][input channel], from the start of a cache line.
#[repr(align(64))]
pub(super) struct PixelPoints<E>(pub [[[E; ROWS]; TERMS]; POINTS]);

impl<E: Real> Default for PixelPoints<E> {
    fn default() -> PixelPoints<E> {
        PixelPoints([[[E::default(); ROWS]; TERMS]; POINTS])
    }
}

/// Unfolded pixels at the point `row` of rows and every point of columns. `pixels` is [phase][term][input channel], of
/// at most [`TERMS`] terms.
pub(super) fn evaluate_pixels<E: Real>(pixels: &[[f32; ROWS]], row: usize, into: &mut PixelPoints<E>) {
    on_vectors!(evaluate_each_pixel[E: Real](pixels: &[[f32; ROWS]], row: usize, into: &mut PixelPoints<E>));
}

#[inline(always)]
fn evaluate_each_pixel<E: Real>(pixels: &[[f32; ROWS]], row: usize, into: &mut PixelPoints<E>) {
    match row {
        0 => evaluate_columns::<E, 0>(pixels, into),
        1 => evaluate_columns::<E, 1>(pixels, into),
        2 => evaluate_columns::<E, 2>(pixels, into),
        _ => evaluate_columns::<E, 3>(pixels, into),
    }
}

#[inline(always)]
fn evaluate_columns<E: Real, const ROW: usize>(pixels: &[[f32; ROWS]], into: &mut PixelPoints<E>) {
    let pixels = pixels.as_flattened();
    let values = pixels.len() / PHASES;
    let (top, bottom) = pixels.split_at(SIDE * values);
    let ((top_left, top_right), (bottom_left, bottom_right)) = (top.split_at(values), bottom.split_at(values));
    let [zero, minus, plus, infinity] = into.0.each_mut().map(|point| &mut point.as_flattened_mut()[..values]);
    for at in 0..values {
        let left = of_pixel(E::from(top_left[at]), E::from(bottom_left[at]))[ROW];
        let right = of_pixel(E::from(top_right[at]), E::from(bottom_right[at]))[ROW];
        [zero[at], minus[at], plus[at], infinity[at]] = of_pixel(left, right);
    }
}

/// Every point of both directions from the taps of a frame: [row and column][channel][output channel].
pub(super) fn evaluate_kernels<E: Real, const N: usize>(
    taps: &[[[E; COLUMNS]; N]; KERNEL * KERNEL],
    into: &mut [[[E; COLUMNS]; N]; TAPS],
) {
    on_vectors!(evaluate_each_kernel[E: Real, const N: usize](
        taps: &[[[E; COLUMNS]; N]; KERNEL * KERNEL],
        into: &mut [[[E; COLUMNS]; N]; TAPS]
    ));
}

#[inline(always)]
fn evaluate_each_kernel<E: Real, const N: usize>(
    taps: &[[[E; COLUMNS]; N]; KERNEL * KERNEL],
    into: &mut [[[E; COLUMNS]; N]; TAPS],
) {
    for channel in 0..N {
        for lane in 0..COLUMNS {
            let tap = |row: usize, column: usize| taps[row * KERNEL + column][channel][lane];
            let at_rows = |column| of_kernel([tap(0, column), tap(1, column), tap(2, column)]);
            let columns = [at_rows(0), at_rows(1), at_rows(2)];
            for row in 0..POINTS {
                let values = of_kernel([columns[0][row], columns[1][row], columns[2][row]]);
                for column in 0..POINTS {
                    into[index(row, column)][channel][lane] = values[column];
                }
            }
        }
    }
}

/// Turns products at the points into the taps of all phases, in place: [tap][input channel][output channel].
pub(super) fn interpolate<E: Real>(products: &mut [[E; COLUMNS]]) {
    on_vectors!(interpolate_rows[E: Real](products: &mut [[E; COLUMNS]]));
}

#[inline(always)]
fn interpolate_rows<E: Real>(products: &mut [[E; COLUMNS]]) {
    let channels = products.len() / TAPS;
    // Apart from the products, whose places depend on the number of channels, lanes become vectors.
    let (mut values, mut taps) = ([[E::default(); COLUMNS]; TAPS], [[E::default(); COLUMNS]; TAPS]);
    for channel in 0..channels {
        for point in 0..TAPS {
            values[point] = products[point * channels + channel];
        }
        for lane in 0..COLUMNS {
            let value = |row, column| values[index(row, column)][lane];
            let of_row = |row| coefficients([value(row, 0), value(row, 1), value(row, 2), value(row, 3)]);
            let rows = [of_row(0), of_row(1), of_row(2), of_row(3)];
            for column in 0..POINTS {
                let of_column = coefficients([rows[0][column], rows[1][column], rows[2][column], rows[3][column]]);
                for row in 0..POINTS {
                    taps[index(row, column)][lane] = of_column[row];
                }
            }
        }
        for tap in 0..TAPS {
            products[tap * channels + channel] = taps[tap];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::phases::offsets;
    use super::super::product;
    use super::*;
    use crate::testing::Lcg;
    use std::array::from_fn;

    #[test]
    fn interpolated_products_are_the_taps_of_all_phases() {
        const CHANNELS: usize = 3;
        let mut random = Lcg(7);
        let taps: [[[f64; COLUMNS]; CHANNELS]; KERNEL * KERNEL] =
            from_fn(|_| from_fn(|_| from_fn(|_| f64::from(random.next()))));
        let pixels: [[f32; ROWS]; PHASES * CHANNELS] = from_fn(|_| from_fn(|_| random.next()));

        let (mut kernels, mut left) = ([[[0.0; COLUMNS]; CHANNELS]; TAPS], PixelPoints::default());
        let mut found = [[[0.0; COLUMNS]; ROWS]; TAPS];
        evaluate_kernels(&taps, &mut kernels);
        for row in 0..POINTS {
            evaluate_pixels(&pixels, row, &mut left);
            for column in 0..POINTS {
                let point = index(row, column);
                product::add(&left.0[column][..CHANNELS], [&kernels[point]], [&mut found[point]]);
            }
        }
        interpolate(found.as_flattened_mut());

        for (index, found) in found.iter().enumerate() {
            let digit = |place: usize| index >> place & 1;
            let mut expected = [[0.0; COLUMNS]; ROWS];
            for (kernel_row, row) in offsets(digit(3), digit(1)) {
                for (kernel_column, column) in offsets(digit(2), digit(0)) {
                    let tap = &taps[kernel_row * KERNEL + kernel_column];
                    let pixels = pixels[(row * SIDE + column) * CHANNELS..][..CHANNELS].iter();
                    let pixels: Vec<[f64; ROWS]> = pixels.map(|pixel| pixel.map(f64::from)).collect();
                    product::add(&pixels, [tap], [&mut expected]);
                }
            }
            for (found, expected) in found.as_flattened().iter().zip(expected.as_flattened()) {
                assert!((found - expected).abs() < 1e-14, "tap {index}: {found} instead of {expected}");
            }
        }
    }
}
