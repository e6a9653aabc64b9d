//! Packed weights: in the order in which a microkernel reads them.

use super::grid::{COMPONENTS, uses_winograd};
use super::winograd::transform_weight;
use crate::backend::HostAllocator;
use crate::backend::cpu::memory::{ALIGN, HostBlock};
use crate::backend::cpu::simd::{BLOCK, DOT_CHANNELS, PANEL, panel_count, panel_width};
use crate::error::{Error, Result};
use crate::ir::{ConvLayout, ConvSource, Prologue};

/// The packed weights of one convolution.
///
/// Order: [slab][phase][panel][component][block of 16 input channels][tap][input channel][output channel]. Panels have
/// 32 output channels; a last panel of up to 16 is padded to 16. One of up to 4 ends in [output channel][input
/// channel], for `dot_tile`. After the slabs: bias vectors, then the norm's gamma and beta.
pub struct ConvWeights {
    pub(super) layout: ConvLayout,
    block: HostBlock,
}

/// Floats of one panel of one tap.
fn panel_size(cout: usize, cin: usize, index: usize) -> usize {
    let (_, width) = panel_width(cout, index);
    width * if width <= DOT_CHANNELS { cin.next_multiple_of(BLOCK) } else { cin }
}

/// Floats of all panels of one tap.
fn tap_size(cout: usize, cin: usize) -> usize {
    let last = panel_count(cout) - 1;
    last * PANEL * cin + panel_size(cout, cin, last)
}

/// Components of a slab: one unless Winograd's algorithm is used.
fn components(layout: &ConvLayout, slab: usize) -> usize {
    if uses_winograd(layout) && (slab as u64) < layout.slabs { COMPONENTS } else { 1 }
}

/// Taps of one phase in all components, and input channels, of a slab.
fn depth(layout: &ConvLayout, slab: usize) -> (usize, usize) {
    let side = layout.window.side() as usize;
    match layout.shortcut {
        Some(cin) if slab as u64 == layout.slabs => (1, cin as usize),
        _ if uses_winograd(layout) => (COMPONENTS * side, layout.cin as usize),
        _ => (side * side, layout.cin as usize),
    }
}

fn phases(layout: &ConvLayout, slab: usize) -> usize {
    // A shortcut has the same weights in all phases.
    if slab as u64 == layout.slabs { 1 } else { layout.window.phases() as usize }
}

fn slab_start(layout: &ConvLayout, slab: usize) -> usize {
    let (taps, cin) = depth(layout, 0);
    slab * phases(layout, 0) * taps * tap_size(layout.cout as usize, cin)
}

/// Offsets of the bias vectors, gamma, beta and the end.
fn tail(layout: &ConvLayout) -> [usize; 4] {
    let mut biases = slab_start(layout, layout.slabs as usize);
    if let Some(cin) = layout.shortcut {
        biases += tap_size(layout.cout as usize, cin as usize);
    }
    let gamma = biases + (layout.biases * layout.bias_elements()) as usize;
    let channels = if layout.prologue == Prologue::None { 0 } else { layout.cin as usize };
    [biases, gamma, gamma + channels, gamma + 2 * channels]
}

pub fn packed_bytes(layout: &ConvLayout) -> u64 {
    (tail(layout)[3] as u64 * 4).next_multiple_of(ALIGN)
}

impl ConvWeights {
    pub fn prepare(layout: &ConvLayout, source: &mut dyn ConvSource, memory: &HostAllocator) -> Result<ConvWeights> {
        check(layout)?;
        let conv = ConvWeights { layout: *layout, block: memory.block(packed_bytes(layout))? };
        let largest = (0..layout.slab_count()).map(|slab| layout.slab_elements(slab)).max().unwrap_or(0);
        let plain = memory.block(largest * 4)?;
        for slab in 0..layout.slab_count() {
            // SAFETY: the block has room for the largest slab, which is zeroed before it is a slice.
            let plain = unsafe {
                let (start, len) = (plain.start(), layout.slab_elements(slab) as usize);
                start.write_bytes(0, len * 4);
                std::slice::from_raw_parts_mut(start.cast::<f32>(), len)
            };
            source.slab(slab, plain)?;
            conv.pack(slab as usize, plain);
        }
        let [biases, gamma, beta, end] = tail(layout);
        let step = layout.bias_elements() as usize;
        for bias in 0..layout.biases {
            source.bias(bias, conv.range(biases + bias as usize * step, step));
        }
        if layout.prologue != Prologue::None {
            source.norm(conv.range(gamma, beta - gamma), conv.range(beta, end - beta));
        }
        Ok(conv)
    }

    /// A range of the block that is still being filled. Ranges in use at the same time must not overlap.
    #[allow(clippy::mut_from_ref)]
    fn range(&self, start: usize, len: usize) -> &mut [f32] {
        debug_assert!((start + len) as u64 * 4 <= self.block.bytes());
        // SAFETY: inside the block by `tail`, and zeroed before it is a slice. Only `prepare` calls this, with disjoint
        // ranges, before anyone else has the block.
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
            for panel in 0..panel_count(cout) {
                let packed = self.range(at, taps * panel_size(cout, cin, panel));
                at += packed.len();
                let (channels, width) = panel_width(cout, panel);
                let from = |tap, k| &plain[((phase * taps + tap) * cin + k) * cout + panel * PANEL..][..channels];
                if width <= DOT_CHANNELS {
                    pack_dot_panel(packed, from, channels, taps, cin);
                } else {
                    pack_panel(packed, from, width, components(&self.layout, slab), taps, cin);
                }
            }
        }
    }

    fn at(&self, offset: usize) -> *const f32 {
        debug_assert!(offset as u64 * 4 <= self.block.bytes());
        // SAFETY: offsets come from the functions that the block's size comes from.
        unsafe { self.block.start().cast::<f32>().add(offset) }
    }

    /// The weights of a panel's component.
    pub fn panel(&self, slab: usize, phase: usize, panel: usize, component: usize) -> *const f32 {
        let (taps, cin) = depth(&self.layout, slab);
        let cout = self.layout.cout as usize;
        let component = component * taps / components(&self.layout, slab) * panel_size(cout, cin, panel);
        let phase = if slab as u64 == self.layout.slabs { 0 } else { phase };
        let before = phase * tap_size(cout, cin) + panel * PANEL * cin;
        self.at(slab_start(&self.layout, slab) + taps * before + component)
    }

    /// The bias of a phase and edge, which are both 0 except with [`crate::backend::Window::Up`].
    pub fn bias(&self, bias: usize, phase: usize, edge: usize) -> *const f32 {
        let [biases, ..] = tail(&self.layout);
        let (step, cout) = (self.layout.bias_elements() as usize, self.layout.cout as usize);
        self.at(biases + bias * step + (phase * 4 + edge) * cout)
    }

    /// Gamma and beta of the norm in the prologue.
    pub fn norm(&self) -> [&[f32]; 2] {
        let [_, gamma, beta, end] = tail(&self.layout);
        // SAFETY: inside the block; nothing writes after `prepare`.
        [(gamma, beta), (beta, end)].map(|(a, b)| unsafe { std::slice::from_raw_parts(self.at(a), b - a) })
    }
}

/// `from` gives the output channels of a tap and an input channel.
fn pack_dot_panel<'a>(
    packed: &mut [f32],
    from: impl Fn(usize, usize) -> &'a [f32],
    channels: usize,
    taps: usize,
    cin: usize,
) {
    for (i, row) in packed.chunks_exact_mut(BLOCK).enumerate() {
        let (block, tap, c) = (i / channels / taps * BLOCK, i / channels % taps, i % channels);
        for (k, weight) in (block..cin.min(block + BLOCK)).zip(row) {
            *weight = from(tap, k)[c];
        }
    }
}

/// `from` gives the output channels of a tap and an input channel. `taps` are those of all components.
fn pack_panel<'a>(
    packed: &mut [f32],
    from: impl Fn(usize, usize) -> &'a [f32],
    width: usize,
    components: usize,
    taps: usize,
    cin: usize,
) {
    let mut rows = packed.chunks_exact_mut(width);
    for (component, block) in (0..components).flat_map(|c| (0..cin).step_by(BLOCK).map(move |block| (c, block))) {
        for tap in 0..taps / components {
            for (k, row) in (block..cin.min(block + BLOCK)).zip(&mut rows) {
                if components == 1 {
                    let weights = from(tap, k);
                    row[..weights.len()].copy_from_slice(weights);
                    continue;
                }
                let [g0, g1, g2] = [0, 1, 2].map(|j| from(3 * tap + j, k));
                for (c, weight) in row[..g0.len()].iter_mut().enumerate() {
                    *weight = transform_weight(component, [g0[c], g1[c], g2[c]]);
                }
            }
        }
    }
}

fn check(layout: &ConvLayout) -> Result<()> {
    let grouped = layout.prologue == Prologue::None || (layout.groups > 0 && layout.cin.is_multiple_of(layout.groups));
    let sized = layout.cin > 0 && layout.cout > 0 && layout.shortcut != Some(0);
    if sized && grouped && layout.biases > 0 {
        return Ok(());
    }
    Err(Error::Internal(format!("{layout:?}: no channels, no bias, or groups that do not divide the channels")))
}
