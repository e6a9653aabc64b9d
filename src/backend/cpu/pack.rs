//! Weights in the order in which the kernel reads them.
//!
//! Output channels come in panels of 32; a rest of up to 16 makes a panel of 16. For each slab, phase, panel and part
//! (see [`pairs`]) the weights lie as [block of 16 input channels][tap][input channel][output channel], so that a tile
//! streams through them; a rest of up to 4 has the last two the other way round, see [`super::kernel::dots`]. Behind the
//! slabs: the bias vectors, then gamma and beta of the norm.

use super::kernel::{BLOCK, FEW, PANEL};
use super::memory::{ALIGN, Block, HostAllocator};
use super::pairs::{self, PARTS};
use crate::backend::{ConvLayout, ConvSource, Prologue};
use crate::error::{Error, Result};

/// The prepared weights of one convolution.
pub struct Conv {
    pub(super) layout: ConvLayout,
    block: Block,
}

/// Panels that `cout` channels make.
pub(super) fn panels(cout: usize) -> usize {
    cout.div_ceil(PANEL)
}

/// Channels of a panel, and the width it is padded to.
pub(super) fn panel(cout: usize, panel: usize) -> (usize, usize) {
    let channels = (cout - panel * PANEL).min(PANEL);
    let width = if channels <= FEW { channels } else { channels.next_multiple_of(BLOCK) };
    (channels, width)
}

/// Floats of one panel of one tap.
fn panel_size(cout: usize, cin: usize, index: usize) -> usize {
    let (_, width) = panel(cout, index);
    width * if width <= FEW { cin.next_multiple_of(BLOCK) } else { cin }
}

/// Floats of all panels of one tap.
fn tap_size(cout: usize, cin: usize) -> usize {
    let last = panels(cout) - 1;
    last * PANEL * cin + panel_size(cout, cin, last)
}

/// Parts of a slab.
fn parts(layout: &ConvLayout, slab: usize) -> usize {
    if pairs::paired(layout) && (slab as u64) < layout.slabs { PARTS } else { 1 }
}

/// Taps of one phase, those of all parts together, and input channels of a slab.
fn depth(layout: &ConvLayout, slab: usize) -> (usize, usize) {
    let side = layout.window.side() as usize;
    match layout.shortcut {
        Some(cin) if slab as u64 == layout.slabs => (1, cin as usize),
        _ if pairs::paired(layout) => (PARTS * side, layout.cin as usize),
        _ => (side * side, layout.cin as usize),
    }
}

fn phases(layout: &ConvLayout, slab: usize) -> usize {
    // A shortcut has one set of weights, whatever the phase.
    if slab as u64 == layout.slabs { 1 } else { layout.window.phases() as usize }
}

fn slab_start(layout: &ConvLayout, slab: usize) -> usize {
    let (taps, cin) = depth(layout, 0);
    slab * phases(layout, 0) * taps * tap_size(layout.cout as usize, cin)
}

/// Where the bias vectors, gamma, beta and the end lie.
fn tail(layout: &ConvLayout) -> [usize; 4] {
    let mut biases = slab_start(layout, layout.slabs as usize);
    if let Some(cin) = layout.shortcut {
        biases += tap_size(layout.cout as usize, cin as usize);
    }
    let gamma = biases + (layout.biases * layout.bias_elements()) as usize;
    let channels = if layout.prologue == Prologue::None { 0 } else { layout.cin as usize };
    [biases, gamma, gamma + channels, gamma + 2 * channels]
}

pub(super) fn bytes(layout: &ConvLayout) -> u64 {
    (tail(layout)[3] as u64 * 4).next_multiple_of(ALIGN)
}

impl Conv {
    pub(super) fn prepare(layout: &ConvLayout, source: &mut dyn ConvSource, memory: &HostAllocator) -> Result<Conv> {
        check(layout)?;
        let conv = Conv { layout: *layout, block: memory.block(bytes(layout))? };
        let largest = (0..layout.slab_count()).map(|slab| layout.slab_elements(slab)).max().unwrap_or(0);
        let plain = memory.block(largest * 4)?;
        for slab in 0..layout.slab_count() {
            // SAFETY: the block has room for the largest slab; every byte of it is set before it is read as a number.
            let plain = unsafe {
                let (start, len) = (plain.start(), layout.slab_elements(slab) as usize);
                start.write_bytes(0, len * 4);
                std::slice::from_raw_parts_mut(start.cast::<f32>(), len)
            };
            source.slab(slab, plain);
            conv.pack(slab as usize, plain);
        }
        let [biases, gamma, beta, end] = tail(layout);
        let step = layout.bias_elements() as usize;
        for bias in 0..layout.biases {
            source.bias(bias, conv.part(biases + bias as usize * step, step));
        }
        if layout.prologue != Prologue::None {
            source.norm(conv.part(gamma, beta - gamma), conv.part(beta, end - beta));
        }
        Ok(conv)
    }

    /// A part of a block that is still being filled. Parts handed out at the same time never overlap.
    #[allow(clippy::mut_from_ref)]
    fn part(&self, start: usize, len: usize) -> &mut [f32] {
        debug_assert!((start + len) as u64 * 4 <= self.block.bytes());
        // SAFETY: inside the block by `tail`; zeroed before it is a slice of numbers; only `prepare` calls this, with
        // disjoint parts, before anyone else has the block.
        unsafe {
            let start = self.block.start().cast::<f32>().add(start);
            start.write_bytes(0, len);
            std::slice::from_raw_parts_mut(start, len)
        }
    }

    fn pack(&self, slab: usize, plain: &[f32]) {
        let cout = self.layout.cout as usize;
        let (taps, cin) = depth(&self.layout, slab);
        let mut at = slab_start(&self.layout, slab);
        for phase in 0..phases(&self.layout, slab) {
            for index in 0..panels(cout) {
                let (channels, width) = panel(cout, index);
                let packed = self.part(at, taps * panel_size(cout, cin, index));
                at += packed.len();
                let from = |tap, k| ((phase * taps + tap) * cin + k) * cout + index * PANEL;
                if width <= FEW {
                    for (i, row) in packed.chunks_exact_mut(BLOCK).enumerate() {
                        let (block, tap, c) = (i / channels / taps * BLOCK, i / channels % taps, i % channels);
                        for (k, weight) in (block..cin.min(block + BLOCK)).zip(row) {
                            *weight = plain[from(tap, k) + c];
                        }
                    }
                    continue;
                }
                let mut rows = packed.chunks_exact_mut(width);
                let parts = parts(&self.layout, slab);
                for (part, block) in (0..parts).flat_map(|part| (0..cin).step_by(BLOCK).map(move |b| (part, b))) {
                    for tap in 0..taps / parts {
                        for (k, row) in (block..cin.min(block + BLOCK)).zip(&mut rows) {
                            if parts == 1 {
                                row[..channels].copy_from_slice(&plain[from(tap, k)..][..channels]);
                                continue;
                            }
                            let [g0, g1, g2] = [0, 1, 2].map(|j| &plain[from(3 * tap + j, k)..][..channels]);
                            for (c, weight) in row[..channels].iter_mut().enumerate() {
                                *weight = pairs::weight(part, [g0[c], g1[c], g2[c]]);
                            }
                        }
                    }
                }
            }
        }
    }

    fn at(&self, offset: usize) -> *const f32 {
        debug_assert!(offset as u64 * 4 <= self.block.bytes());
        // SAFETY: every offset comes from the same functions that made the block's size.
        unsafe { self.block.start().cast::<f32>().add(offset) }
    }

    pub(super) fn weights(&self, slab: usize, phase: usize, panel: usize, part: usize) -> *const f32 {
        let (taps, cin) = depth(&self.layout, slab);
        let cout = self.layout.cout as usize;
        let part = part * taps / parts(&self.layout, slab) * panel_size(cout, cin, panel);
        let phase = if slab as u64 == self.layout.slabs { 0 } else { phase };
        let before = phase * tap_size(cout, cin) + panel * PANEL * cin;
        self.at(slab_start(&self.layout, slab) + taps * before + part)
    }

    /// The bias of a phase and edge (both 0 but for [`crate::backend::Window::Up`]), channel 0.
    pub(super) fn bias(&self, bias: usize, phase: usize, edge: usize) -> *const f32 {
        let [biases, ..] = tail(&self.layout);
        let (step, cout) = (self.layout.bias_elements() as usize, self.layout.cout as usize);
        self.at(biases + bias * step + (phase * 4 + edge) * cout)
    }

    /// Gamma and beta of the norm in the prologue.
    pub(super) fn norm(&self) -> [&[f32]; 2] {
        let [_, gamma, beta, end] = tail(&self.layout);
        // SAFETY: inside the block, and written by `prepare`, after which nothing writes.
        [(gamma, beta), (beta, end)].map(|(a, b)| unsafe { std::slice::from_raw_parts(self.at(a), b - a) })
    }
}

fn check(layout: &ConvLayout) -> Result<()> {
    let grouped = layout.prologue == Prologue::None || (layout.groups > 0 && layout.cin.is_multiple_of(layout.groups));
    let sized = layout.cin > 0 && layout.cout > 0 && layout.shortcut != Some(0);
    if sized && grouped && layout.biases > 0 {
        return Ok(());
    }
    Err(Error::Internal(format!("{layout:?}: no channels, no bias, or channels that its groups do not divide")))
}
