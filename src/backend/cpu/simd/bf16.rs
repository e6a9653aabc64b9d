//! Products of bf16 with f32 sums: blocks of positions times a panel of weights.
//! Positions and output channels come in tiles of 16, and input channels in blocks of 32, as AMX has them.

use half::bf16;

use super::portable::Portable;
use super::vector::{PANEL, Simd, SimdOp};
#[cfg(target_arch = "x86_64")]
use super::x86::{Avx2, Avx512, Avx512Bf16};

/// Positions of a tile, and output channels of half a panel.
pub const TILE: usize = 16;
/// Elements of a tile of weights: 16 pairs of input channels x 16 output channels.
pub const WEIGHT_TILE: usize = TILE * TILE * 2;
/// Most tiles of positions that share a read of weights: with their sums in AMX tiles, two are left for operands.
pub const MOST_TILES: usize = 6;

/// A few tiles of positions times half a panel of a term. Strides are in elements.
pub struct BlockProduct<'a> {
    /// The first position of each tile in the patch's first block of channels.
    pub at: [*const bf16; MOST_TILES],
    pub tiles: usize,
    /// Stride of a tile's positions.
    pub step: usize,
    /// Stride of blocks of channels.
    pub block: usize,
    pub blocks: usize,
    /// Offset of each tap.
    pub taps: &'a [usize],
    /// [block][tap][pair of input channels][16 output channels][2 of the pair]
    pub weights: *const bf16,
    /// Where to prefetch weights for later, [`AHEAD`] elements for each block and tap. They need not be there.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "AMX alone prefetches"))]
    pub ahead: *const bf16,
    /// [position][`PANEL`]
    pub out: *mut f32,
    /// Whether to add to the values in `out`.
    pub add: bool,
}

/// Elements of [`BlockProduct::ahead`]: a share of a tile that leaves time for the products.
pub const AHEAD: usize = 8 * 32;

/// An instruction set that multiplies bf16.
pub trait Bf16Kernels: Simd {
    /// Runs `work`, in which this thread may call [`Bf16Kernels::product`].
    ///
    /// # Safety
    /// The processor has `Self`.
    unsafe fn with_tiles(work: impl FnOnce()) {
        work();
    }

    /// # Safety
    /// As [`SimdOp::run`]. A tile may read [`TILE`] steps past the last position of its patch.
    unsafe fn product(block: &BlockProduct) {
        // SAFETY: by this function's contract.
        unsafe { Self::enter(PairProducts(block)) }
    }
}

impl Bf16Kernels for Portable {}
#[cfg(target_arch = "x86_64")]
impl Bf16Kernels for Avx2 {}
#[cfg(target_arch = "x86_64")]
impl Bf16Kernels for Avx512 {}
#[cfg(target_arch = "x86_64")]
impl Bf16Kernels for Avx512Bf16 {}

/// A block on vectors: each lane is an output channel, and takes two input channels at a time.
struct PairProducts<'a>(&'a BlockProduct<'a>);

impl SimdOp for PairProducts<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        for tile in 0..self.0.tiles {
            // SAFETY: by this function's contract. Sums of `M` x `N` vectors stay in registers.
            unsafe {
                match S::LANES {
                    16 => self.tile::<S, 8, 1>(tile),
                    8 => self.tile::<S, 4, 2>(tile),
                    _ => self.tile::<S, 2, 4>(tile),
                }
            }
        }
    }
}

impl PairProducts<'_> {
    /// `M` positions at a time, times `N` vectors of output channels.
    ///
    /// # Safety
    /// As [`SimdOp::run`].
    #[inline(always)]
    unsafe fn tile<S: Simd, const M: usize, const N: usize>(&self, tile: usize) {
        let block = self.0;
        for first in (0..TILE).step_by(M) {
            // SAFETY: inside the tile's positions and the panel, by this function's contract.
            unsafe {
                let out = block.out.add((tile * TILE + first) * PANEL);
                let mut sum = [[S::splat(0.0); N]; M];
                if block.add {
                    for (m, sum) in sum.iter_mut().enumerate() {
                        for (n, sum) in sum.iter_mut().enumerate() {
                            *sum = S::load(out.add(m * PANEL + n * S::LANES));
                        }
                    }
                }
                let mut weights = block.weights;
                for channels in 0..block.blocks {
                    let at = block.at[tile].add(channels * block.block + first * block.step);
                    for tap in block.taps {
                        pair_products::<S, M, N>(&mut sum, at.add(*tap), block.step, weights);
                        weights = weights.wrapping_add(WEIGHT_TILE);
                    }
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

/// `M` positions of one block of channels times one tile of weights.
///
/// # Safety
/// `at` has the positions, `step` apart, and `weights` the tile.
#[inline(always)]
unsafe fn pair_products<S: Simd, const M: usize, const N: usize>(
    sum: &mut [[S::V; N]; M],
    at: *const bf16,
    step: usize,
    weights: *const bf16,
) {
    for pair in 0..TILE {
        // SAFETY: by this function's contract.
        unsafe {
            let row = weights.add(pair * 2 * TILE);
            let mut vectors = [S::load_pairs(row); N];
            for (n, vector) in vectors.iter_mut().enumerate() {
                *vector = S::load_pairs(row.add(n * 2 * S::LANES));
            }
            for (m, sum) in sum.iter_mut().enumerate() {
                let value = S::splat_pair(at.add(m * step + 2 * pair));
                for (n, sum) in sum.iter_mut().enumerate() {
                    *sum = S::dot_pairs(value, vectors[n], *sum);
                }
            }
        }
    }
}
