//! The inner loops, where nearly all the time goes: small matrix products with their sums in registers.
//! Fixes the blocking of channels that patches and weights are packed in.

#[cfg(target_arch = "aarch64")]
use super::neon::Neon;
use super::portable::Portable;
use super::vector::{PANEL, Simd, SimdOp};
#[cfg(target_arch = "x86_64")]
use super::x86::{Avx2, Avx512};

/// Input channels that are contiguous in a patch.
pub const BLOCK: usize = 16;
/// A last panel of at most this many channels is computed by [`dot_tile`].
pub const DOT_CHANNELS: usize = 4;
/// Pixels of the largest [`dot_tile`].
pub const DOT_PIXELS: usize = 4;
/// Input channels that weights are prefetched ahead, to cover the latency of the second-level cache.
const AHEAD: usize = 32;

/// Panels that `cout` channels make.
pub fn panel_count(cout: usize) -> usize {
    cout.div_ceil(PANEL)
}

/// Channels of a panel, and the width that it is padded to.
pub fn panel_width(cout: usize, panel: usize) -> (usize, usize) {
    let channels = (cout - panel * PANEL).min(PANEL);
    let width = if channels <= DOT_CHANNELS { channels } else { channels.next_multiple_of(BLOCK) };
    (channels, width)
}

/// A few neighbouring pixels of a row times one panel of weights. Strides are in floats.
#[derive(Clone, Copy)]
pub struct MicroTile<'a> {
    /// The first pixel's first channel in the first block of the patch.
    pub patch: *const f32,
    /// Stride of blocks of channels in `patch`.
    pub block: usize,
    /// Stride of the tile's pixels in `patch`: [`BLOCK`], or twice that for every second pixel.
    pub step: usize,
    /// Offset of each tap in `patch`.
    pub taps: &'a [usize],
    pub cin: usize,
    /// [block][tap][input channel][`width` output channels]
    pub weights: *const f32,
    /// [`PANEL`] or half of it; at most [`DOT_CHANNELS`] for [`dot_tile`].
    pub width: usize,
    pub out: *mut f32,
    /// Stride of pixels in `out`.
    pub out_step: usize,
    /// Whether to add to the values in `out`.
    pub add: bool,
    /// Where to prefetch weights for later, [`LATER`] floats for each block and tap. They need not be there.
    pub later: *const f32,
}

/// Floats of [`MicroTile::later`]: a share of a block that leaves time for the products.
const LATER: usize = 4 * 16;

impl MicroTile<'_> {
    /// Lets tile `index` of those with the same weights prefetch its share of the next `floats` weights.
    pub fn prefetch_later(&mut self, next: *const f32, floats: usize, index: usize) {
        let at = index * self.taps.len() * (self.cin / BLOCK) * LATER;
        self.later = if at < floats { next.wrapping_add(at) } else { self.weights };
    }
}

/// An instruction set with its microkernels.
pub trait Microkernels: Simd {
    /// Pixels of the largest tile: as many as keep its sums in registers.
    const PIXELS: usize;

    /// Computes a tile of `pixels` pixels, at most [`Microkernels::PIXELS`].
    ///
    /// # Safety
    /// As [`SimdOp::run`].
    unsafe fn tile(tile: &MicroTile, pixels: usize);
}

/// A tile of exactly `M` pixels and `N` vectors at a time, of a panel `W` wide.
struct TileProduct<'a, const M: usize, const N: usize, const W: usize, const STEP: usize>(&'a MicroTile<'a>);

impl<const M: usize, const N: usize, const W: usize, const STEP: usize> SimdOp for TileProduct<'_, M, N, W, STEP> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let tile = self.0;
        for first in (0..W).step_by(N * S::LANES) {
            // SAFETY: the tile is valid, by this function's contract.
            unsafe {
                let out = tile.out.add(first);
                let mut sum = [[S::splat(0.0); N]; M];
                let mut w = tile.weights.add(first);
                let mut patch = tile.patch;
                let mut left = tile.cin;
                let mut later = tile.later;
                while left >= BLOCK {
                    for tap in tile.taps {
                        let mut a = patch.add(*tap);
                        for _ in 0..BLOCK / 4 {
                            S::prefetch_later(later);
                            later = later.wrapping_add(LATER / 4);
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
                    patch = patch.add(tile.block);
                    left -= BLOCK;
                }
                if left > 0 {
                    for tap in tile.taps {
                        let a = patch.add(*tap);
                        for k in 0..left {
                            step::<S, M, N, STEP>(&mut sum, a.add(k), w);
                            w = w.add(W);
                        }
                    }
                }
                for (m, sum) in sum.iter().enumerate() {
                    for (n, sum) in sum.iter().enumerate() {
                        let out = out.add(m * tile.out_step + n * S::LANES);
                        S::store(out, if tile.add { S::add(S::load(out), *sum) } else { *sum });
                    }
                }
            }
        }
    }
}

/// One input channel: `M` values, `STEP` apart, times `N` vectors of weights.
///
/// # Safety
/// `a` has the values and `w` the weights.
#[inline(always)]
unsafe fn step<S: Simd, const M: usize, const N: usize, const STEP: usize>(
    sum: &mut [[S::V; N]; M],
    a: *const f32,
    w: *const f32,
) {
    let mut weights = [S::splat(0.0); N];
    for (n, weights) in weights.iter_mut().enumerate() {
        // SAFETY: by this function's contract.
        *weights = unsafe { S::load(w.add(n * S::LANES)) };
    }
    for (m, sum) in sum.iter_mut().enumerate() {
        // SAFETY: by this function's contract.
        let value = S::splat(unsafe { *a.add(m * STEP) });
        for (n, sum) in sum.iter_mut().enumerate() {
            *sum = S::fma(value, weights[n], *sum);
        }
    }
}

/// Dispatches a tile of a run-time size to the product compiled for that size.
macro_rules! sized {
    ($tile:ident, $pixels:ident, $full:literal, $half:literal, $($m:literal)*) => {
        // SAFETY: by this function's contract.
        unsafe {
            match ($tile.width, $tile.step, $pixels) {
                $(
                    (PANEL, BLOCK, $m) => Self::enter(TileProduct::<$m, $full, 32, 16>($tile)),
                    (PANEL, _, $m) => Self::enter(TileProduct::<$m, $full, 32, 32>($tile)),
                    (_, BLOCK, $m) => Self::enter(TileProduct::<$m, $half, 16, 16>($tile)),
                    (_, _, $m) => Self::enter(TileProduct::<$m, $half, 16, 32>($tile)),
                )*
                (_, _, pixels) => unreachable!("no tile of {pixels} pixels"),
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
impl Microkernels for Avx512 {
    const PIXELS: usize = 14;

    unsafe fn tile(tile: &MicroTile, pixels: usize) {
        sized!(tile, pixels, 2, 1, 1 2 3 4 5 6 7 8 9 10 11 12 13 14)
    }
}

#[cfg(target_arch = "x86_64")]
impl Microkernels for Avx2 {
    const PIXELS: usize = 6;

    unsafe fn tile(tile: &MicroTile, pixels: usize) {
        sized!(tile, pixels, 2, 2, 1 2 3 4 5 6)
    }
}

#[cfg(target_arch = "aarch64")]
impl Microkernels for Neon {
    const PIXELS: usize = 6;

    unsafe fn tile(tile: &MicroTile, pixels: usize) {
        sized!(tile, pixels, 4, 4, 1 2 3 4 5 6)
    }
}

impl Microkernels for Portable {
    const PIXELS: usize = 4;

    unsafe fn tile(tile: &MicroTile, pixels: usize) {
        sized!(tile, pixels, 2, 2, 1 2 3 4)
    }
}

/// A tile of exactly `M` pixels and `C` output channels, as dot products over input channels. So no lane is spent on
/// padding of output channels. Weights are [block][tap][output channel][input channel], padded to whole blocks.
struct DotProducts<'a, const M: usize, const C: usize>(&'a MicroTile<'a>);

impl<const M: usize, const C: usize> SimdOp for DotProducts<'_, M, C> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let tile = self.0;
        let mut sum = [[S::splat(0.0); C]; M];
        let (mut patch, mut w) = (tile.patch, tile.weights);
        // SAFETY: the tile is valid, by this function's contract.
        unsafe {
            for _ in 0..tile.cin.div_ceil(BLOCK) {
                for tap in tile.taps {
                    for lane in (0..BLOCK).step_by(S::LANES) {
                        let mut weights = [S::splat(0.0); C];
                        for (c, weights) in weights.iter_mut().enumerate() {
                            *weights = S::load(w.add(c * BLOCK + lane));
                        }
                        for (m, sum) in sum.iter_mut().enumerate() {
                            let values = S::load(patch.add(*tap + m * tile.step + lane));
                            for (c, sum) in sum.iter_mut().enumerate() {
                                *sum = S::fma(values, weights[c], *sum);
                            }
                        }
                    }
                    w = w.add(C * BLOCK);
                }
                patch = patch.add(tile.block);
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

/// A tile of up to [`DOT_PIXELS`] pixels and [`DOT_CHANNELS`] output channels.
///
/// # Safety
/// As [`SimdOp::run`].
pub unsafe fn dot_tile<S: Simd>(tile: &MicroTile, pixels: usize) {
    macro_rules! sized {
        ($($m:literal: $($c:literal)*;)*) => {
            match (pixels, tile.width) {
                $($(($m, $c) => S::enter(DotProducts::<$m, $c>(tile)),)*)*
                (pixels, channels) => unreachable!("no tile of {pixels} pixels and {channels} channels"),
            }
        };
    }
    // SAFETY: by this function's contract.
    unsafe { sized!(1: 1 2 3 4; 2: 1 2 3 4; 3: 1 2 3 4; 4: 1 2 3 4;) }
}

/// `out[c][q] += sum over k of values[k][c] * weights[k][q]` for one block of channels c and one panel q: the second
/// product of attention.
pub struct OuterProduct {
    pub values: *const f32,
    pub weights: *const f32,
    pub out: *mut f32,
    pub count: usize,
}

impl SimdOp for OuterProduct {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: by this function's contract.
        unsafe {
            match S::LANES {
                16 => self.rounds::<S, 8>(),
                _ => self.rounds::<S, 4>(),
            }
        }
    }
}

impl OuterProduct {
    /// `M` channels at a time: as many as keep their sums in registers.
    ///
    /// # Safety
    /// As [`SimdOp::run`].
    #[inline(always)]
    unsafe fn rounds<S: Simd, const M: usize>(&self) {
        for channel in (0..BLOCK).step_by(M) {
            for first in (0..PANEL).step_by(2 * S::LANES) {
                // SAFETY: inside the block and the panel.
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
