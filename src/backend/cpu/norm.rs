//! GroupNorm: statistics gathered by one convolution, applied in the prologue of the next. They are summed per area and
//! combined in a fixed order, so threads change no bit of them. And the norm of each pixel, which needs none.
//! Must not know how a convolution is divided.

use super::element::Element;
use super::simd::{PANEL, Simd, panel_count};
use crate::ir::Prologue;

const EPSILON: f64 = 1e-6;

/// Mean and sum of squared differences from it, of each channel of a panel. Stored in an operation's scratch.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Moments {
    mean: [f64; PANEL],
    square: [f64; PANEL],
}

impl Moments {
    pub const BYTES: u64 = size_of::<Moments>() as u64;

    /// Adds one row of `pixels` pixels to `rows` rows of as many pixels.
    pub fn add(&mut self, row: &RowSums, channels: usize, pixels: usize, rows: usize) {
        let n = pixels as f64;
        let (share, weight) = (1.0 / (rows + 1) as f64, n * rows as f64 / (rows + 1) as f64);
        for c in 0..channels {
            let (centre, d) = (f64::from(row.centre[c]), f64::from(row.difference[c]));
            let mean = centre + d / n;
            let square = f64::from(row.square[c]) - d * d / n;
            if rows == 0 {
                (self.mean[c], self.square[c]) = (mean, square);
            } else {
                let delta = mean - self.mean[c];
                self.mean[c] += delta * share;
                self.square[c] += square + delta * delta * weight;
            }
        }
    }
}

/// Sums of one row's differences from a centre near its mean, and of their squares.
pub(super) struct RowSums {
    pub centre: [f32; PANEL],
    pub difference: [f32; PANEL],
    pub square: [f32; PANEL],
}

impl RowSums {
    pub const ZERO: RowSums = RowSums { centre: [0.0; PANEL], difference: [0.0; PANEL], square: [0.0; PANEL] };
}

/// Mean and reciprocal deviation of each group of a frame, from the moments [area][phase][panel] of areas that have
/// `pixels` pixels each.
pub(super) fn statistics(moments: &[Moments], pixels: &[usize], phases: usize, cout: usize, into: &mut [f32]) {
    let groups = into.len() / 2;
    let (panels, per_group) = (panel_count(cout), cout / groups);
    let total = (pixels.iter().sum::<usize>() * phases * per_group) as f64;
    for (group, into) in into.chunks_exact_mut(2).enumerate() {
        let channels = group * per_group..(group + 1) * per_group;
        let all = |f: &mut dyn FnMut(f64, f64, f64)| {
            for (area, pixels) in pixels.iter().enumerate() {
                let n = *pixels as f64;
                for phase in 0..phases {
                    for c in channels.clone() {
                        let of = &moments[(area * phases + phase) * panels + c / PANEL];
                        f(n, of.mean[c % PANEL], of.square[c % PANEL]);
                    }
                }
            }
        };
        let mut sum = 0.0;
        all(&mut |n, mean, _| sum += n * mean);
        let mean = sum / total;
        let mut square = 0.0;
        all(&mut |n, part, within| square += within + n * (part - mean) * (part - mean));
        into[0] = mean as f32;
        into[1] = (1.0 / (square / total + EPSILON).sqrt()) as f32;
    }
}

/// Fills `into` with the mean, scale and shift of each channel: three rows, each padded to whole blocks. Without
/// statistics, pixels come [divided by their length](reciprocal_lengths).
pub(super) fn fill_table(into: &mut [f32], statistics: &[f32], gamma: &[f32], beta: &[f32]) {
    let (channels, padded) = (gamma.len(), into.len() / 3);
    into.fill(0.0);
    if statistics.is_empty() {
        into[padded..][..channels].copy_from_slice(gamma);
        return;
    }
    let per_group = channels / (statistics.len() / 2);
    for c in 0..channels {
        let group = c / per_group;
        into[c] = statistics[2 * group];
        into[padded + c] = gamma[c] * statistics[2 * group + 1];
        into[2 * padded + c] = beta[c];
    }
}

/// Partial sums of a pixel's length. Their number is fixed, so that no vector width changes a bit.
const LENGTH_SUMS: usize = 16;
/// Lanes of the narrowest vectors.
const LEAST_LANES: usize = 4;
/// The least length that a pixel is divided by.
const LEAST_LENGTH: f32 = 1e-12;

/// The factors that bring as many pixels as `factors` has, `step` elements apart, to length 1.
///
/// # Safety
/// The pixels have so many channels, and the processor has `S`.
#[inline(always)]
pub(super) unsafe fn reciprocal_lengths<S: Simd, E: Element>(
    pixels: *const E,
    step: usize,
    channels: usize,
    factors: &mut [f32],
) {
    for (pixel, factor) in factors.iter_mut().enumerate() {
        // SAFETY: by this function's contract.
        *factor = unsafe { squared_length::<S, E>(pixels.wrapping_add(pixel.wrapping_mul(step)), channels) };
    }
    // Apart from the sums, so that several roots and quotients are taken at a time.
    for factor in factors {
        *factor = 1.0 / factor.sqrt().max(LEAST_LENGTH);
    }
}

/// # Safety
/// As [`reciprocal_lengths`].
#[inline(always)]
unsafe fn squared_length<S: Simd, E: Element>(pixel: *const E, channels: usize) -> f32 {
    let (vectors, whole) = (LENGTH_SUMS / S::LANES, channels / LENGTH_SUMS * LENGTH_SUMS);
    let mut sums = [S::splat(0.0); LENGTH_SUMS / LEAST_LANES];
    for first in (0..whole).step_by(LENGTH_SUMS) {
        for (i, sum) in sums[..vectors].iter_mut().enumerate() {
            // SAFETY: by this function's contract.
            let value = unsafe { E::load::<S>(pixel.wrapping_add(first + i * S::LANES)) };
            *sum = S::add(*sum, S::mul(value, value));
        }
    }
    let mut lanes = [0.0_f32; LENGTH_SUMS];
    for (i, sum) in sums[..vectors].iter().enumerate() {
        // SAFETY: the lanes of all vectors.
        unsafe { S::store(lanes.as_mut_ptr().add(i * S::LANES), *sum) };
    }
    for (i, sum) in lanes.iter_mut().enumerate().take(channels - whole) {
        // SAFETY: by this function's contract.
        let value = unsafe { *pixel.wrapping_add(whole + i) }.value();
        *sum += value * value;
    }
    let mut half = LENGTH_SUMS / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
        half /= 2;
    }
    lanes[0]
}

/// Mean, scale and shift of one vector of channels; zeros without a norm.
///
/// # Safety
/// With a norm, the table has these channels; the processor has `S`.
#[inline(always)]
pub(super) unsafe fn table_vectors<S: Simd, const NORM: bool>(table: &[f32], channel: usize) -> [S::V; 3] {
    if !NORM {
        return [S::splat(0.0); 3];
    }
    let (padded, table) = (table.len() / 3, table.as_ptr().wrapping_add(channel));
    // SAFETY: by this function's contract.
    unsafe { [S::load(table), S::load(table.add(padded)), S::load(table.add(2 * padded))] }
}

/// The prologue of one vector.
#[inline(always)]
pub(super) fn normalise<S: Simd, E: Element, const NORM: bool, const SILU: bool>(
    value: S::V,
    [mean, scale, shift]: [S::V; 3],
) -> S::V {
    let value = if NORM { S::fma(S::sub(value, mean), scale, shift) } else { value };
    if SILU { E::silu::<S>(value) } else { value }
}

/// Work that applies a prologue, compiled for each prologue.
pub(super) trait Normalise {
    /// # Safety
    /// As [`SimdOp::run`](super::simd::SimdOp::run).
    unsafe fn run_with<S: Simd, const NORM: bool, const SILU: bool>(&self);
}

/// Chooses the prologue, outside of all loops.
///
/// # Safety
/// As [`Normalise::run_with`].
#[inline(always)]
pub(super) unsafe fn normalise_with<S: Simd>(work: &impl Normalise, prologue: Prologue) {
    // SAFETY: by this function's contract.
    unsafe {
        match prologue {
            Prologue::None => work.run_with::<S, false, false>(),
            Prologue::Norm => work.run_with::<S, true, false>(),
            Prologue::NormSilu => work.run_with::<S, true, true>(),
        }
    }
}
