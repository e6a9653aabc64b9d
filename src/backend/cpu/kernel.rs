//! The inner loops, where nearly all the time goes: small matrix products whose sums stay in registers.

use super::simd::{Op, Portable, Simd};
#[cfg(target_arch = "x86_64")]
use super::x86::{Avx2, Avx512};

/// Input channels that lie side by side in a band, see [`super::band`].
pub(super) const BLOCK: usize = 16;
/// Output channels that a full panel of weights makes.
pub(super) const PANEL: usize = 32;

/// A last panel of so few channels is no panel: its products are sums over vectors of input channels, see [`dots`].
pub(super) const FEW: usize = 4;
/// Pixels of the widest tile of [`dots`].
pub(super) const FEW_PIXELS: usize = 4;
/// Input channels between the weights that are used and those that are sent for, as far as the second-level cache is away.
const AHEAD: usize = 32;

/// A few neighbouring pixels of a row times one panel of weights.
#[derive(Clone, Copy)]
pub(super) struct Tile<'a> {
    /// The first pixel's first channel in the first block of the band.
    pub band: *const f32,
    /// From a block of channels to the next.
    pub block: usize,
    /// From a pixel to the next of the tile: [`BLOCK`], or twice that for every second pixel.
    pub step: usize,
    /// Where each tap looks, relative to `band`.
    pub taps: &'a [usize],
    pub cin: usize,
    /// For each block, tap and channel: as many weights as the panel is wide.
    pub weights: *const f32,
    /// Width of the panel, [`PANEL`] or half of it; or at most [`FEW`], for [`dots`].
    pub width: usize,
    pub out: *mut f32,
    /// From a pixel to the next in `out`.
    pub out_step: usize,
    /// Whether to add to what is in `out`.
    pub add: bool,
}

/// A tile of exactly `M` pixels and `N` vectors of a panel `W` wide; a panel wider than that takes several rounds.
struct Product<'a, const M: usize, const N: usize, const W: usize, const STEP: usize>(&'a Tile<'a>);

impl<const M: usize, const N: usize, const W: usize, const STEP: usize> Op for Product<'_, M, N, W, STEP> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let tile = self.0;
        for first in (0..W).step_by(N * S::LANES) {
            // SAFETY: whoever made the tile vouches for its pointers, sizes and strides.
            unsafe {
                let out = tile.out.add(first);
                let mut sum = [[S::splat(0.0); N]; M];
                if tile.add {
                    for (m, sum) in sum.iter_mut().enumerate() {
                        for (n, sum) in sum.iter_mut().enumerate() {
                            *sum = S::load(out.add(m * tile.out_step + n * S::LANES));
                        }
                    }
                }
                let mut w = tile.weights.add(first);
                let mut band = tile.band;
                let mut left = tile.cin;
                while left >= BLOCK {
                    for tap in tile.taps {
                        let mut a = band.add(*tap);
                        for _ in 0..BLOCK / 4 {
                            for line in (0..4 * W).step_by(16) {
                                S::prefetch(w.wrapping_add(AHEAD * W + line));
                            }
                            step::<S, M, N, STEP>(&mut sum, a, w);
                            step::<S, M, N, STEP>(&mut sum, a.add(1), w.add(W));
                            step::<S, M, N, STEP>(&mut sum, a.add(2), w.add(2 * W));
                            step::<S, M, N, STEP>(&mut sum, a.add(3), w.add(3 * W));
                            a = a.add(4);
                            w = w.add(4 * W);
                        }
                    }
                    band = band.add(tile.block);
                    left -= BLOCK;
                }
                if left > 0 {
                    for tap in tile.taps {
                        let a = band.add(*tap);
                        for k in 0..left {
                            step::<S, M, N, STEP>(&mut sum, a.add(k), w);
                            w = w.add(W);
                        }
                    }
                }
                for (m, sum) in sum.iter().enumerate() {
                    for (n, sum) in sum.iter().enumerate() {
                        S::store(out.add(m * tile.out_step + n * S::LANES), *sum);
                    }
                }
            }
        }
    }
}

/// One input channel: `M` values, `STEP` apart, times `N` vectors of weights.
///
/// # Safety
/// The values and weights are there.
#[inline(always)]
unsafe fn step<S: Simd, const M: usize, const N: usize, const STEP: usize>(
    sum: &mut [[S::V; N]; M],
    a: *const f32,
    w: *const f32,
) {
    let mut weights = [S::splat(0.0); N];
    for (n, weights) in weights.iter_mut().enumerate() {
        // SAFETY: as the caller vouches.
        *weights = unsafe { S::load(w.add(n * S::LANES)) };
    }
    for (m, sum) in sum.iter_mut().enumerate() {
        // SAFETY: as the caller vouches.
        let value = S::splat(unsafe { *a.add(m * STEP) });
        for (n, sum) in sum.iter_mut().enumerate() {
            *sum = S::fma(value, weights[n], *sum);
        }
    }
}

/// The tile of a run-time size, by way of the one made for that size.
macro_rules! sized {
    ($tile:ident, $pixels:ident, $simd:ty, $full:literal, $half:literal, $($m:literal)*) => {
        // SAFETY: the caller vouches for the tile and the processor.
        unsafe {
            match ($tile.width, $tile.step, $pixels) {
                $(
                    (PANEL, BLOCK, $m) => <$simd>::enter(Product::<$m, $full, 32, 16>($tile)),
                    (PANEL, _, $m) => <$simd>::enter(Product::<$m, $full, 32, 32>($tile)),
                    (_, BLOCK, $m) => <$simd>::enter(Product::<$m, $half, 16, 16>($tile)),
                    (_, _, $m) => <$simd>::enter(Product::<$m, $half, 16, 32>($tile)),
                )*
                (_, _, pixels) => unreachable!("no tile of {pixels} pixels"),
            }
        }
    };
}

/// # Safety
/// As [`Simd::tile`].
#[cfg(target_arch = "x86_64")]
pub(super) unsafe fn avx512(tile: &Tile, pixels: usize) {
    sized!(tile, pixels, Avx512, 2, 1, 1 2 3 4 5 6 7 8 9 10 11 12 13 14)
}

/// # Safety
/// As [`Simd::tile`].
#[cfg(target_arch = "x86_64")]
pub(super) unsafe fn avx2(tile: &Tile, pixels: usize) {
    sized!(tile, pixels, Avx2, 2, 2, 1 2 3 4 5 6)
}

/// # Safety
/// As [`Simd::tile`].
pub(super) unsafe fn portable(tile: &Tile, pixels: usize) {
    sized!(tile, pixels, Portable, 2, 2, 1 2 3 4)
}

/// A tile of exactly `M` pixels and `C` output channels. Each sum is one of vectors over input channels, until the end,
/// so no lane is spent on channels that are not there. Weights lie as [block][tap][output channel][input channel], in
/// whole blocks.
struct Dots<'a, const M: usize, const C: usize>(&'a Tile<'a>);

impl<const M: usize, const C: usize> Op for Dots<'_, M, C> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let tile = self.0;
        let mut sum = [[S::splat(0.0); C]; M];
        let (mut band, mut w) = (tile.band, tile.weights);
        // SAFETY: whoever made the tile vouches for its pointers, sizes and strides.
        unsafe {
            for _ in 0..tile.cin.div_ceil(BLOCK) {
                for tap in tile.taps {
                    for lane in (0..BLOCK).step_by(S::LANES) {
                        let mut weights = [S::splat(0.0); C];
                        for (c, weights) in weights.iter_mut().enumerate() {
                            *weights = S::load(w.add(c * BLOCK + lane));
                        }
                        for (m, sum) in sum.iter_mut().enumerate() {
                            let values = S::load(band.add(*tap + m * tile.step + lane));
                            for (c, sum) in sum.iter_mut().enumerate() {
                                *sum = S::fma(values, weights[c], *sum);
                            }
                        }
                    }
                    w = w.add(C * BLOCK);
                }
                band = band.add(tile.block);
            }
            for (m, sum) in sum.iter().enumerate() {
                for (c, sum) in sum.iter().enumerate() {
                    let out = tile.out.add(m * tile.out_step + c);
                    *out = if tile.add { *out + S::sum(*sum) } else { S::sum(*sum) };
                }
            }
        }
    }
}

/// A tile of up to [`FEW_PIXELS`] pixels and [`FEW`] output channels.
///
/// # Safety
/// As [`Simd::tile`].
pub(super) unsafe fn dots<S: Simd>(tile: &Tile, pixels: usize) {
    macro_rules! sized {
        ($($m:literal: $($c:literal)*;)*) => {
            match (pixels, tile.width) {
                $($(($m, $c) => S::enter(Dots::<$m, $c>(tile)),)*)*
                (pixels, channels) => unreachable!("no tile of {pixels} pixels and {channels} channels"),
            }
        };
    }
    // SAFETY: the caller vouches for the tile and the processor.
    unsafe { sized!(1: 1 2 3 4; 2: 1 2 3 4; 3: 1 2 3 4; 4: 1 2 3 4;) }
}

/// `out[c][q] += sum over k of values[k][c] * weights[k][q]` for one block of channels c and one panel q; the
/// second product of the attention.
pub(super) struct Outer {
    pub values: *const f32,
    pub weights: *const f32,
    pub out: *mut f32,
    pub count: usize,
}

impl Op for Outer {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: whoever made the operation vouches for its pointers and count.
        unsafe {
            match S::CHANNELS {
                8 => self.rounds::<S, 8>(),
                _ => self.rounds::<S, 4>(),
            }
        }
    }
}

impl Outer {
    /// # Safety
    /// As [`Op::run`].
    #[inline(always)]
    unsafe fn rounds<S: Simd, const M: usize>(&self) {
        for channel in (0..BLOCK).step_by(M) {
            for first in (0..PANEL).step_by(2 * S::LANES) {
                // SAFETY: both lie inside the block and the panel.
                unsafe {
                    let out = self.out.add(channel * PANEL + first);
                    let mut sum = [[S::splat(0.0); 2]; M];
                    for (m, sum) in sum.iter_mut().enumerate() {
                        for (n, sum) in sum.iter_mut().enumerate() {
                            *sum = S::load(out.add(m * PANEL + n * S::LANES));
                        }
                    }
                    for k in 0..self.count {
                        let (a, w) = (self.values.add(k * BLOCK + channel), self.weights.add(k * PANEL + first));
                        step::<S, M, 2, 1>(&mut sum, a, w);
                    }
                    for (m, sum) in sum.iter().enumerate() {
                        for (n, sum) in sum.iter().enumerate() {
                            S::store(out.add(m * PANEL + n * S::LANES), *sum);
                        }
                    }
                }
            }
        }
    }
}
