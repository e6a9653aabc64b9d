//! Attention in bf16, by the products of convolutions. Keys and values of a frame are packed as weights, once. A task
//! has some tiles of queries and goes through the keys with a running softmax: scores in f32, then probabilities in
//! bf16. Every query reads the keys in the same tiles and order, so sharing a task changes no bit.

use half::bf16;

use super::attention;
use super::element::{Element, Number};
use super::memory::{ALIGN, CpuMemory, SharedPointer};
use super::simd::{Bf16Kernels, BlockProduct, MOST_TILES, PANEL, Simd, SimdOp, TILE, WEIGHT_TILE};
use crate::backend::Stop;
use crate::error::Result;
use crate::ir::{AttentionOp, FrameShape, Offsets};
use crate::thread_pool::Pool;

/// Keys of a step: their packed values and the scores fit in the second-level cache.
const KEYS: usize = 256;
/// Channels that are contiguous in queries, and keys in probabilities.
const BLOCK: usize = <bf16 as Element>::BLOCK;
const _: () = assert!(BLOCK == PANEL && KEYS.is_multiple_of(PANEL));

/// Scratch: the packed keys and values of one frame; then of each slot queries, probabilities, sums, scores, and of
/// each query maximum and total.
#[derive(Clone, Copy)]
struct AttentionScratch {
    pixels: usize,
    channels: usize,
    /// In whole panels.
    keys: usize,
    padded: usize,
    /// Queries of a slot, in whole tiles.
    rows: usize,
}

impl AttentionScratch {
    fn new(shape: FrameShape) -> AttentionScratch {
        let (pixels, channels) = (shape.pixels() as usize, shape.channels as usize);
        let (keys, padded) = (pixels.next_multiple_of(PANEL), channels.next_multiple_of(PANEL));
        AttentionScratch { pixels, channels, keys, padded, rows: MOST_TILES.min(pixels.div_ceil(TILE)) * TILE }
    }

    /// Elements of the packed keys of a frame, and of its values.
    fn packed(&self) -> usize {
        self.keys * self.padded
    }

    fn frame_bytes(&self) -> u64 {
        (2 * self.packed() * size_of::<bf16>()) as u64
    }

    fn step(&self) -> usize {
        KEYS.min(self.keys)
    }

    fn slot_bytes(&self) -> u64 {
        let halves = self.rows * (self.padded + self.step());
        let floats = self.rows * (self.padded + self.step() + 2);
        ((halves * size_of::<bf16>() + floats * size_of::<f32>()) as u64).next_multiple_of(ALIGN)
    }

    /// Tiles of queries.
    fn tiles(&self) -> usize {
        self.pixels.div_ceil(TILE)
    }
}

pub(super) fn scratch_bytes(shape: FrameShape, threads: usize) -> u64 {
    let layout = AttentionScratch::new(shape);
    layout.frame_bytes() + threads.min(layout.tiles()) as u64 * layout.slot_bytes()
}

pub(super) fn run<S: Bf16Kernels>(
    pool: &Pool,
    memory: &mut CpuMemory,
    op: &AttentionOp<Offsets>,
    scratch_offset: u64,
    stop: &mut Stop,
) -> Result<()> {
    let shape = op.shape;
    attention::check(memory, op, scratch_offset, scratch_bytes(shape, pool.threads()), bf16::BYTES)?;
    let base = SharedPointer::new(memory.block.start().cast());
    let layout = AttentionScratch::new(shape);
    let (panels, tiles) = (layout.keys / PANEL, layout.tiles());
    // Queries should share reads of keys and values, as long as every thread has some queries.
    let time = |share: usize| tiles.div_ceil(share).div_ceil(pool.threads()) * (share + 1);
    let share = (1..=layout.rows / TILE).min_by_key(|share| time(*share)).unwrap_or(1);
    for (input, output) in &op.frames {
        let frame = |slot: usize| {
            let at = |offset: u64| base.get().wrapping_byte_add(offset as usize);
            let keys: *mut bf16 = at(scratch_offset).cast();
            AttendedFrame {
                layout,
                input: at(input.0).cast::<bf16>(),
                output: at(output.0).cast(),
                keys,
                values: keys.wrapping_add(layout.packed()),
                scratch: at(scratch_offset + layout.frame_bytes() + slot as u64 * layout.slot_bytes()),
            }
        };
        pool.run(panels, stop, &|panel, slot, _| {
            // SAFETY: all regions were checked. Tasks have their own keys.
            unsafe { frame(slot).pack(panel) }
        })?;
        pool.run(tiles.div_ceil(share), stop, &|task, slot, stop| {
            let first = task * share * TILE;
            let count = (layout.pixels - first).min(share * TILE);
            // SAFETY: as above; keys and values are packed. Tasks have their own queries, slots their own scratch.
            unsafe { S::with_tiles(|| frame(slot).attend::<S>(first, count, stop)) }
        })?;
    }
    Ok(())
}

/// A frame, and the scratch of a slot.
struct AttendedFrame {
    layout: AttentionScratch,
    /// [pixel][query, key, value][channel]
    input: *const bf16,
    output: *mut bf16,
    /// [tile of keys][block of channels][pair of channels][key][2]
    keys: *mut bf16,
    /// [tile of channels][panel of keys][pair of keys][channel][2]
    values: *mut bf16,
    scratch: *mut f32,
}

impl AttendedFrame {
    /// A block of channels from `c` on of the query (0), key (1) or value (2) of a pixel; zeros outside of the frame.
    ///
    /// # Safety
    /// The frame is valid.
    unsafe fn block(&self, pixel: usize, part: usize, c: usize) -> [bf16; BLOCK] {
        let AttentionScratch { pixels, channels, .. } = self.layout;
        let mut block = [bf16::ZERO; BLOCK];
        let count = if pixel < pixels { (channels - c).min(BLOCK) } else { 0 };
        let from = self.input.wrapping_add((pixel * 3 + part) * channels + c);
        // SAFETY: `count` channels from there on are inside the frame.
        unsafe { from.copy_to_nonoverlapping(block.as_mut_ptr(), count) };
        block
    }

    /// Packs a panel of keys and their values.
    ///
    /// # Safety
    /// The pointers are valid, and nobody else uses the panel.
    unsafe fn pack(&self, panel: usize) {
        let AttentionScratch { keys, padded, .. } = self.layout;
        let first = panel * PANEL;
        for c in (0..padded).step_by(BLOCK) {
            // SAFETY: inside the frame and the packed frame.
            unsafe {
                for key in first..first + PANEL {
                    let into = self.keys.add((key / TILE * (padded / BLOCK) + c / BLOCK) * WEIGHT_TILE);
                    for (pair, values) in self.block(key, 1, c).chunks_exact(2).enumerate() {
                        values.as_ptr().copy_to_nonoverlapping(into.add((pair * TILE + key % TILE) * 2), 2);
                    }
                }
                for pair in 0..TILE {
                    let [a, b] = [0, 1].map(|second| self.block(first + 2 * pair + second, 2, c));
                    for (tile, (a, b)) in a.chunks_exact(TILE).zip(b.chunks_exact(TILE)).enumerate() {
                        let tile = (c / TILE + tile) * (keys / PANEL) + panel;
                        let into = self.values.add(tile * WEIGHT_TILE + pair * 2 * TILE);
                        for i in 0..TILE {
                            (*into.add(2 * i), *into.add(2 * i + 1)) = (a[i], b[i]);
                        }
                    }
                }
            }
        }
    }

    /// Queries from `first` on, and the state of their softmax. Rows past the last query are computed and dropped.
    ///
    /// # Safety
    /// As [`attend`](Self::attend), whose scratch both are.
    unsafe fn load_queries(&self, first: usize, queries: *mut bf16, state: *mut f32) {
        let AttentionScratch { padded, rows, .. } = self.layout;
        for row in 0..rows {
            // SAFETY: by this function's contract.
            unsafe {
                for c in (0..padded).step_by(BLOCK) {
                    let block = self.block(first + row, 0, c);
                    block.as_ptr().copy_to_nonoverlapping(queries.add(c * rows + row * BLOCK), BLOCK);
                }
                (*state.add(row), *state.add(rows + row)) = (f32::NEG_INFINITY, 0.0);
            }
        }
    }

    /// `count` queries from `first` on.
    ///
    /// # Safety
    /// The pointers are valid, keys and values are packed, and this thread has the tiles of `S`.
    unsafe fn attend<S: Bf16Kernels>(&self, first: usize, count: usize, stop: &mut Stop) {
        let AttentionScratch { pixels, keys, padded, rows, .. } = self.layout;
        // SAFETY: the offsets are those of `AttentionScratch`.
        unsafe {
            let queries: *mut bf16 = self.scratch.cast();
            let probabilities = queries.add(rows * padded);
            let sums: *mut f32 = probabilities.add(rows * self.layout.step()).cast();
            let scores = sums.add(rows * padded);
            let state = scores.add(rows * self.layout.step());
            self.load_queries(first, queries, state);
            // The product of the rows with a tile of weights.
            let product = |from: *mut bf16, blocks: usize, weights: *mut bf16, out: *mut f32, add: bool| {
                let at = std::array::from_fn(|tile| from.cast_const().wrapping_add(tile * TILE * BLOCK));
                let ahead = weights.wrapping_add(blocks * WEIGHT_TILE);
                let (tiles, step, block, taps) = (count.div_ceil(TILE), BLOCK, rows * BLOCK, &[0][..]);
                S::product(&BlockProduct { at, tiles, step, block, blocks, taps, weights, ahead, out, add });
            };
            for key in (0..pixels).step_by(KEYS) {
                if stop() {
                    return;
                }
                let panels = (pixels - key).min(KEYS).div_ceil(PANEL);
                for tile in 0..2 * panels {
                    let weights = self.keys.add((key / TILE + tile) * padded / BLOCK * WEIGHT_TILE);
                    product(queries, padded / BLOCK, weights, row_start(scores, rows, tile), false);
                }
                S::enter(Softmax {
                    scores,
                    keys: (pixels - key).min(KEYS),
                    probabilities,
                    sums,
                    panels: padded / PANEL,
                    state,
                    rows,
                    count,
                });
                for tile in 0..padded / TILE {
                    let weights = self.values.add((tile * (keys / PANEL) + key / PANEL) * WEIGHT_TILE);
                    product(probabilities, panels, weights, row_start(sums, rows, tile), key > 0);
                }
            }
            S::enter(Finish {
                sums,
                totals: state.add(rows),
                rows,
                count,
                channels: self.layout.channels,
                output: self.output.add(first * self.layout.channels),
            });
        }
    }
}

/// Where a tile of columns begins in [panel of columns][row][column].
fn row_start(matrix: *mut f32, rows: usize, tile: usize) -> *mut f32 {
    let panel = tile * TILE / PANEL;
    matrix.wrapping_add(panel * rows * PANEL + tile * TILE % PANEL)
}

/// Turns scores into probabilities, and rescales the sums so far to the new maximum.
struct Softmax {
    /// [panel of keys][row][key]
    scores: *mut f32,
    keys: usize,
    /// As the scores.
    probabilities: *mut bf16,
    /// [panel of channels][row][channel]
    sums: *mut f32,
    panels: usize,
    /// Maximum, and `rows` further the total.
    state: *mut f32,
    rows: usize,
    count: usize,
}

impl SimdOp for Softmax {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let all = self.keys.next_multiple_of(PANEL);
        for row in 0..self.count {
            // SAFETY: inside the scores, the sums and the state.
            unsafe {
                let at = |key: usize| key / PANEL * self.rows * PANEL + row * PANEL + key % PANEL;
                for key in self.keys..all {
                    *self.scores.add(at(key)) = f32::NEG_INFINITY;
                }
                let (maximum, total) = (self.state.add(row), self.state.add(self.rows + row));
                let mut most = S::splat(*maximum);
                for key in (0..all).step_by(S::LANES) {
                    most = S::max(most, S::load(self.scores.add(at(key))));
                }
                let mut lanes = [f32::NEG_INFINITY; PANEL];
                S::store(lanes.as_mut_ptr(), most);
                let most = lanes.into_iter().fold(f32::NEG_INFINITY, f32::max);
                let scale = S::splat(std::f32::consts::LOG2_E);
                let factor = S::rough_exp2(S::mul(S::splat(*maximum - most), scale));
                let mut sum = S::splat(0.0);
                for key in (0..all).step_by(S::LANES) {
                    let score = S::sub(S::load(self.scores.add(at(key))), S::splat(most));
                    let p = bf16::rounded::<S>(S::rough_exp2(S::mul(score, scale)));
                    bf16::store::<S>(self.probabilities.add(at(key)), p);
                    sum = S::add(sum, p);
                }
                S::store(lanes.as_mut_ptr(), factor);
                *total = *total * lanes[0] + S::sum(sum);
                if *maximum != most && *maximum != f32::NEG_INFINITY {
                    for c in (0..self.panels * PANEL).step_by(S::LANES) {
                        let sums = self.sums.add(at(c));
                        S::store(sums, S::mul(S::load(sums), factor));
                    }
                }
                *maximum = most;
            }
        }
    }
}

/// Divides the sums by the totals.
struct Finish {
    sums: *const f32,
    totals: *const f32,
    rows: usize,
    count: usize,
    channels: usize,
    output: *mut bf16,
}

impl SimdOp for Finish {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let whole = self.channels / S::LANES * S::LANES;
        for row in 0..self.count {
            // SAFETY: inside the sums and the output.
            unsafe {
                let share = 1.0 / *self.totals.add(row);
                let at = |c: usize| self.sums.add(c / PANEL * self.rows * PANEL + row * PANEL + c % PANEL);
                let into = self.output.add(row * self.channels);
                for c in (0..whole).step_by(S::LANES) {
                    bf16::store::<S>(into.add(c), S::mul(S::load(at(c)), S::splat(share)));
                }
                for c in whole..self.channels {
                    *into.add(c) = bf16::of(*at(c) * share);
                }
            }
        }
    }
}
