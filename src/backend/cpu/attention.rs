//! Attention in f32 with a running softmax, transposed: scores are [key][query] and sums [channel][query], for 32
//! queries. So scores are the weights of the second product, the softmax is a vector over queries, and only queries
//! need a transposition. Every query reads the keys in the same tiles and order, so sharing a task changes no bit.

use super::element::Element;
use super::memory::{ALIGN, CpuMemory, SharedPointer};
use super::simd::{BLOCK, MicroTile, Microkernels, OuterProduct, PANEL, Simd, SimdOp, exp};
use crate::backend::Stop;
use crate::error::{Error, Result};
use crate::ir::{AttentionOp, FrameShape, Offsets};
use crate::thread_pool::Pool;

/// Keys of a tile: a multiple of a microkernel's pixels. Their values fit in the second-level cache.
const KEYS: usize = 56;
/// The most panels of queries that share the copy of a tile of keys.
const PANELS: usize = 8;

/// Scratch of a slot, in floats: keys and values of a tile; queries; sums; scores; then maximum, total and factor of
/// each query.
#[derive(Clone, Copy)]
struct AttentionScratch {
    panels: usize,
    channels: usize,
    padded: usize,
}

impl AttentionScratch {
    fn new(shape: FrameShape) -> AttentionScratch {
        let channels = shape.channels as usize;
        let panels = (shape.pixels() as usize).div_ceil(PANEL).min(PANELS);
        AttentionScratch { panels, channels, padded: channels.next_multiple_of(BLOCK) }
    }

    fn keys(&self) -> usize {
        self.padded * KEYS
    }

    fn queries(&self) -> usize {
        self.panels * self.channels * PANEL
    }

    fn sums(&self) -> usize {
        self.panels * self.padded * PANEL
    }

    fn floats(&self) -> usize {
        2 * self.keys() + self.queries() + self.sums() + KEYS * PANEL + 3 * self.panels * PANEL
    }

    fn bytes(&self) -> u64 {
        (self.floats() as u64 * 4).next_multiple_of(ALIGN)
    }
}

pub(super) fn scratch_bytes(shape: FrameShape, frames: u64, threads: usize) -> u64 {
    AttentionScratch::new(shape).bytes() * (threads as u64).min(frames * shape.pixels().div_ceil(PANEL as u64))
}

/// Refuses empty frames, and frames and scratch outside of their block. `element`: bytes of an element.
pub(super) fn check(
    memory: &CpuMemory,
    op: &AttentionOp<Offsets>,
    scratch_offset: u64,
    scratch_bytes: u64,
    element: u64,
) -> Result<()> {
    let shape = op.shape;
    if shape.elements() == 0 {
        return Err(Error::Internal(format!("attention over an empty frame of shape {shape:?}")));
    }
    memory.block.region("scratch of attention", scratch_offset, scratch_bytes)?;
    for (input, output) in &op.frames {
        memory.block.region("input of attention", input.0, shape.elements() * 3 * element)?;
        memory.block.region("output of attention", output.0, shape.elements() * element)?;
    }
    Ok(())
}

pub(super) fn run<S: Microkernels>(
    pool: &Pool,
    memory: &mut CpuMemory,
    op: &AttentionOp<Offsets>,
    scratch_offset: u64,
    stop: &mut Stop,
) -> Result<()> {
    let (shape, frames) = (op.shape, op.frames.len());
    check(memory, op, scratch_offset, scratch_bytes(shape, frames as u64, pool.threads()), f32::BYTES)?;
    let base = SharedPointer::new(memory.block.start().cast());
    let layout = AttentionScratch::new(shape);
    let pixels = shape.pixels() as usize;
    let panels = pixels.div_ceil(PANEL);
    // Queries should share tiles of keys, as long as every thread has some queries.
    let time = |share: usize| {
        let rounds = (frames * panels.div_ceil(share)).div_ceil(pool.threads());
        rounds as f64 * (share as f64 + 0.3)
    };
    let share = (1..=layout.panels).min_by(|a, b| time(*a).total_cmp(&time(*b))).unwrap_or(1);
    let shares = panels.div_ceil(share);
    pool.run(frames * shares, stop, &|task, slot, stop| {
        let (frame, first) = (task / shares, task % shares * share * PANEL);
        let at = |offset: u64| base.get().wrapping_byte_add(offset as usize);
        let queries = Queries {
            layout,
            input: at(op.frames[frame].0.0),
            output: at(op.frames[frame].1.0),
            scratch: at(scratch_offset + slot as u64 * layout.bytes()),
            pixels,
            first,
            count: (pixels - first).min(share * PANEL),
        };
        // SAFETY: all regions were checked. Tasks have their own queries, and slots their own scratch.
        unsafe { queries.attend::<S>(stop) }
    })
}

/// `count` queries of a frame, from `first` on.
struct Queries {
    layout: AttentionScratch,
    input: *const f32,
    output: *mut f32,
    scratch: *mut f32,
    pixels: usize,
    first: usize,
    count: usize,
}

impl Queries {
    /// # Safety
    /// The pointers are valid for the frame and the scratch; the processor has `S`.
    unsafe fn attend<S: Microkernels>(&self, stop: &mut Stop) {
        let AttentionScratch { panels, channels, padded } = self.layout;
        // SAFETY: the offsets are those of `AttentionScratch`.
        unsafe {
            let keys = self.scratch;
            let values = keys.add(self.layout.keys());
            let queries = values.add(self.layout.keys());
            let sums = queries.add(self.layout.queries());
            let scores = sums.add(self.layout.sums());
            let state = scores.add(KEYS * PANEL);
            self.transpose(queries);
            sums.write_bytes(0, self.layout.sums());
            for i in 0..panels * PANEL {
                *state.add(i) = f32::NEG_INFINITY;
            }
            state.add(panels * PANEL).write_bytes(0, 2 * panels * PANEL);
            for tile in (0..self.pixels).step_by(KEYS) {
                if stop() {
                    return;
                }
                let count = (self.pixels - tile).min(KEYS);
                self.copy(keys, tile, count, channels);
                self.copy(values, tile, count, 2 * channels);
                for panel in 0..self.count.div_ceil(PANEL) {
                    let weights = queries.add(panel * channels * PANEL);
                    self.score::<S>(keys, weights, scores, count);
                    let state = state.add(panel * PANEL);
                    let sums = sums.add(panel * padded * PANEL);
                    let step = panels * PANEL;
                    S::enter(Softmax { scores, count, state, step, sums, channels: padded });
                    for channel in (0..padded).step_by(BLOCK) {
                        let values = values.add(channel * KEYS);
                        S::enter(OuterProduct { values, weights: scores, out: sums.add(channel * PANEL), count });
                    }
                }
            }
            self.finish(sums, state.add(panels * PANEL));
        }
    }

    /// Queries as the weights of the first product: [panel][channel][query].
    ///
    /// # Safety
    /// As [`Queries::attend`].
    unsafe fn transpose(&self, into: *mut f32) {
        let channels = self.layout.channels;
        for query in 0..self.count.next_multiple_of(PANEL) {
            // SAFETY: a query of the frame. Padding of the panel is zeros.
            unsafe {
                let into = into.add(query / PANEL * channels * PANEL + query % PANEL);
                let from = self.input.add((self.first + query.min(self.count - 1)) * 3 * channels);
                let scale = if query < self.count { 1.0 } else { 0.0 };
                for c in 0..channels {
                    *into.add(c * PANEL) = *from.add(c) * scale;
                }
            }
        }
    }

    /// Copies channels from `offset` on of `count` pixels: [block of channels][pixel][channel].
    ///
    /// # Safety
    /// As [`Queries::attend`].
    unsafe fn copy(&self, into: *mut f32, first: usize, count: usize, offset: usize) {
        let channels = self.layout.channels;
        for pixel in 0..count {
            // SAFETY: a pixel of the frame and of the tile.
            unsafe {
                let from = self.input.add((first + pixel) * 3 * channels + offset);
                for c in (0..channels).step_by(BLOCK) {
                    let into = std::slice::from_raw_parts_mut(into.add(c * KEYS + pixel * BLOCK), BLOCK);
                    into.fill(0.0);
                    for (c, value) in (c..channels).zip(into) {
                        *value = *from.add(c);
                    }
                }
            }
        }
    }

    /// Scores of a tile of keys: [key][query].
    ///
    /// # Safety
    /// As [`Queries::attend`].
    unsafe fn score<S: Microkernels>(&self, keys: *const f32, weights: *const f32, scores: *mut f32, count: usize) {
        for key in (0..count).step_by(S::PIXELS) {
            // SAFETY: keys of the tile.
            unsafe {
                let tile = MicroTile {
                    patch: keys.add(key * BLOCK),
                    block: KEYS * BLOCK,
                    step: BLOCK,
                    taps: &[0],
                    cin: self.layout.channels,
                    weights,
                    width: PANEL,
                    out: scores.add(key * PANEL),
                    out_step: PANEL,
                    add: false,
                    later: std::ptr::null(),
                };
                S::tile(&tile, (count - key).min(S::PIXELS));
            }
        }
    }

    /// Divides the sums by the totals.
    ///
    /// # Safety
    /// As [`Queries::attend`].
    unsafe fn finish(&self, sums: *const f32, totals: *const f32) {
        let AttentionScratch { channels, padded, .. } = self.layout;
        for query in 0..self.count {
            let (panel, lane) = (query / PANEL, query % PANEL);
            // SAFETY: a query of the frame.
            unsafe {
                let sums = sums.add(panel * padded * PANEL + lane);
                let into = self.output.add((self.first + query) * channels);
                let total = *totals.add(query);
                for c in 0..channels {
                    *into.add(c) = *sums.add(c * PANEL) / total;
                }
            }
        }
    }
}

/// Turns scores into exponentials, in place, and rescales the sums so far to the new maximum.
struct Softmax {
    scores: *mut f32,
    count: usize,
    /// Maximum, total and factor, at stride `step`.
    state: *mut f32,
    step: usize,
    sums: *mut f32,
    channels: usize,
}

impl SimdOp for Softmax {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        for lane in (0..PANEL).step_by(S::LANES) {
            // SAFETY: inside the panel and the tile of keys.
            unsafe {
                let scores = self.scores.add(lane);
                let (maximum, total) = (self.state.add(lane), self.state.add(self.step + lane));
                let old = S::load(maximum);
                let mut new = old;
                for key in 0..self.count {
                    new = S::max(new, S::load(scores.add(key * PANEL)));
                }
                let factor = exp::<S>(S::sub(old, new));
                let mut sum = S::mul(S::load(total), factor);
                for key in 0..self.count {
                    let p = exp::<S>(S::sub(S::load(scores.add(key * PANEL)), new));
                    S::store(scores.add(key * PANEL), p);
                    sum = S::add(sum, p);
                }
                S::store(maximum, new);
                S::store(total, sum);
                S::store(self.state.add(2 * self.step + lane), factor);
            }
        }
        for lane in (0..PANEL).step_by(S::LANES) {
            // SAFETY: as above.
            unsafe {
                let factor = S::load(self.state.add(2 * self.step + lane));
                for channel in 0..self.channels {
                    let sum = self.sums.add(channel * PANEL + lane);
                    S::store(sum, S::mul(S::load(sum), factor));
                }
            }
        }
    }
}
