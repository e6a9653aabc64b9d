//! Packed weights: in the order in which a microkernel reads them.

use half::bf16;

use super::grid::{square_of, uses_winograd};
use super::square::Square;
use crate::backend::cpu::element::{Number, block_channels};
use crate::backend::cpu::memory::{ALIGN, HostBlock};
use crate::backend::cpu::simd::{BLOCK, DOT_CHANNELS, PANEL, TILE, WEIGHT_TILE, panel_count, panel_width};
use crate::backend::{HostAllocator, Precision};
use crate::error::{Error, Result};
use crate::ir::{ConvLayout, ConvSource, Norm, Prologue, WeightBlock, WeightPart};

/// Input channels of a part: few enough to stay in cache with the output channels of a panel. Whole blocks in every
/// precision.
const PART_INPUTS: u64 = 128;

/// The packed weights of one convolution.
///
/// Order: [slab][phase][panel][block of 16 input channels][tap][input channel][output channel]; in the Winograd domain
/// [slab][component][panel][input channel][output channel]. Panels have 32 output channels; a last panel of up to 16 is
/// padded to 16. Outside the Winograd domain one of up to 4 ends in [output channel][input channel], for `dot_tile`.
/// After the slabs: bias vectors, then the norm's gamma and beta.
///
/// In bf16: [slab][phase][panel][half of the panel][block of 32 input channels][tap][pair of input channels][16 output
/// channels][2 of the pair]. The last panel is padded to 16 or 32 output channels. Biases and the norm's are f32.
pub struct ConvWeights {
    pub(super) layout: ConvLayout,
    pub(super) precision: Precision,
    block: HostBlock,
}

/// Sizes and offsets of packed weights, in units of f32.
#[derive(Clone, Copy)]
struct Packing<'a> {
    layout: &'a ConvLayout,
    precision: Precision,
}

impl Packing<'_> {
    /// One panel of one tap.
    fn panel_size(&self, cin: usize, index: usize) -> usize {
        let (channels, width) = panel_width(self.layout.cout as usize, index);
        match self.precision {
            Precision::Bf16 => {
                channels.next_multiple_of(TILE) * cin.next_multiple_of(block_channels(Precision::Bf16)) / 2
            }
            _ if self.uses_winograd() => channels.next_multiple_of(BLOCK) * cin,
            _ => width * if width <= DOT_CHANNELS { cin.next_multiple_of(BLOCK) } else { cin },
        }
    }

    /// All panels of one tap.
    fn tap_size(&self, cin: usize) -> usize {
        let last = panel_count(self.layout.cout as usize) - 1;
        self.panels_before(cin, last) + self.panel_size(cin, last)
    }

    /// The full panels before this one, of one tap.
    fn panels_before(&self, cin: usize, panel: usize) -> usize {
        if panel == 0 { 0 } else { panel * self.panel_size(cin, 0) }
    }

    fn uses_winograd(&self) -> bool {
        uses_winograd(self.layout, self.precision)
    }

    /// The squares of a slab, if Winograd's algorithm is used.
    fn square(&self, slab: usize) -> Option<Square> {
        let first = self.layout.first_frame_slab.is_some_and(|first| usize::from(first) == slab);
        square_of(self.layout, self.precision, first).filter(|_| (slab as u64) < self.layout.slabs)
    }

    /// Components of a slab: one unless Winograd's algorithm is used.
    fn components(&self, slab: usize) -> usize {
        self.square(slab).map_or(1, |square| square.components().pow(2))
    }

    /// Taps of one phase or component, and input channels, of a slab.
    fn depth(&self, slab: usize) -> (usize, usize) {
        let side = self.layout.window.side() as usize;
        match self.layout.shortcut {
            Some(cin) if slab as u64 == self.layout.slabs => (1, cin as usize),
            _ if self.uses_winograd() => (1, self.layout.cin as usize),
            _ => (side * side, self.layout.cin as usize),
        }
    }

    fn phases(&self, slab: usize) -> usize {
        // A shortcut has the same weights in all phases.
        if slab as u64 == self.layout.slabs { 1 } else { self.layout.window.phases() as usize }
    }

    fn slab_start(&self, slab: usize) -> usize {
        let (taps, cin) = self.depth(0);
        let components: usize = (0..slab).map(|slab| self.components(slab)).sum();
        components * self.phases(0) * taps * self.tap_size(cin)
    }

    /// Offsets of the bias vectors, gamma, beta and the end.
    fn tail(&self) -> [usize; 4] {
        let layout = self.layout;
        let mut biases = self.slab_start(layout.slabs as usize);
        if let Some(cin) = layout.shortcut {
            biases += self.tap_size(cin as usize);
        }
        let gamma = biases + (layout.biases * layout.bias_elements()) as usize;
        let channels = if layout.prologue == Prologue::None { 0 } else { layout.cin as usize };
        [biases, gamma, gamma + channels, gamma + 2 * channels]
    }
}

pub fn packed_bytes(layout: &ConvLayout, precision: Precision) -> u64 {
    (Packing { layout, precision }.tail()[3] as u64 * 4).next_multiple_of(ALIGN)
}

/// The parts in which the weights of a convolution are written.
pub fn parts(layout: &ConvLayout) -> Vec<WeightPart> {
    let blocks = WeightBlock::all(layout, PART_INPUTS, PANEL as u64).into_iter().map(WeightPart::Block);
    std::iter::once(WeightPart::Vectors).chain(blocks).collect()
}

impl ConvWeights {
    /// The parts are to be written.
    pub fn allocate(layout: &ConvLayout, precision: Precision, memory: &HostAllocator) -> Result<ConvWeights> {
        check(layout)?;
        let block = memory.block(packed_bytes(layout, precision))?;
        Ok(ConvWeights { layout: *layout, precision, block })
    }

    /// Each part is written once, before anyone reads.
    pub fn write(&self, part: &WeightPart, source: &mut dyn ConvSource) -> Result<()> {
        let layout = &self.layout;
        match part {
            WeightPart::Block(block) => source.block(block, &mut |slab, plain| {
                self.pack(slab as usize, block, plain);
                Ok(())
            }),
            WeightPart::Vectors => {
                let [biases, gamma, beta, end] = self.packing().tail();
                source.biases(self.range(biases, gamma - biases))?;
                match layout.prologue {
                    Prologue::None => Ok(()),
                    _ => source.norm(self.range(gamma, beta - gamma), self.range(beta, end - beta)),
                }
            }
        }
    }

    fn packing(&self) -> Packing<'_> {
        Packing { layout: &self.layout, precision: self.precision }
    }

    /// A range of the block that is still being filled. Ranges in use at the same time must not overlap.
    #[allow(clippy::mut_from_ref)]
    fn range(&self, start: usize, len: usize) -> &mut [f32] {
        debug_assert!((start + len) as u64 * 4 <= self.block.bytes());
        // SAFETY: inside the block by `tail`, and zeroed before it is a slice. Only `write` calls this, once for each
        // part, and parts are disjoint.
        unsafe {
            let start = self.block.start().cast::<f32>().add(start);
            start.write_bytes(0, len);
            std::slice::from_raw_parts_mut(start, len)
        }
    }

    /// A block of a slab. It is one panel wide, and begins with a block of input channels.
    fn pack(&self, slab: usize, block: &WeightBlock, plain: &[f32]) {
        let (packing, panel) = (self.packing(), block.outputs.start as usize / PANEL);
        if let Some(square) = packing.square(slab) {
            return self.pack_components(slab, square, block, plain);
        }
        let (taps, cin) = packing.depth(slab);
        let (first, rows, channels) = (block.inputs.start as usize, block.rows() as usize, block.columns() as usize);
        let width = panel_width(self.layout.cout as usize, panel).1;
        for phase in 0..packing.phases(slab) {
            let before = phase * packing.tap_size(cin) + packing.panels_before(cin, panel);
            let start = packing.slab_start(slab) + taps * before;
            let from = |tap, k| &plain[((phase * taps + tap) * rows + k) * channels..][..channels];
            if self.precision == Precision::Bf16 {
                // Both halves of the panel have all blocks of input channels.
                let [blocks, before, here] = [cin, first, rows].map(|channels| channels.div_ceil(2 * TILE));
                for half in 0..channels.div_ceil(TILE) {
                    let tile = (half * blocks + before) * taps;
                    let packed = self.range(start + tile * WEIGHT_TILE / 2, here * taps * WEIGHT_TILE / 2);
                    pack_bf16_half(packed, half, from, taps, rows);
                }
                continue;
            }
            let [before, here] = [first, rows].map(|rows| taps * packing.panel_size(rows, panel));
            let packed = self.range(start + before, here);
            if width <= DOT_CHANNELS && !packing.uses_winograd() {
                pack_dot_panel(packed, from, channels, taps, rows);
            } else {
                pack_panel(packed, from, channels.next_multiple_of(BLOCK), taps, rows);
            }
        }
    }

    /// The same in the Winograd domain.
    fn pack_components(&self, slab: usize, square: Square, block: &WeightBlock, plain: &[f32]) {
        let (packing, cin, panel) = (self.packing(), self.layout.cin as usize, block.outputs.start as usize / PANEL);
        let (rows, channels) = (block.rows() as usize, block.columns() as usize);
        let width = channels.next_multiple_of(BLOCK);
        let start = packing.slab_start(slab) + packing.panels_before(cin, panel) + block.inputs.start as usize * width;
        let components = square.components();
        let mut into: Vec<&mut [f32]> = (0..components * components)
            .map(|component| self.range(start + component * packing.tap_size(cin), rows * width))
            .collect();
        for k in 0..rows {
            let window = std::array::from_fn(|tap| &plain[(tap * rows + k) * channels..][..channels]);
            let all = square.transform_window(window);
            let weights = all[..components].iter().flat_map(|row| &row[..components]);
            for (into, weights) in into.iter_mut().zip(weights) {
                into[k * width..][..channels].copy_from_slice(&weights[..channels]);
            }
        }
    }

    fn at(&self, offset: usize) -> *const f32 {
        debug_assert!(offset as u64 * 4 <= self.block.bytes());
        // SAFETY: offsets come from the functions that the block's size comes from.
        unsafe { self.block.start().cast::<f32>().add(offset) }
    }

    /// The weights of a panel, in a phase or a component.
    pub fn panel(&self, slab: usize, part: usize, panel: usize) -> *const f32 {
        let packing = self.packing();
        let (taps, cin) = packing.depth(slab);
        let part = if slab as u64 == self.layout.slabs { 0 } else { part };
        let before = part * packing.tap_size(cin) + packing.panels_before(cin, panel);
        self.at(packing.slab_start(slab) + taps * before)
    }

    /// The bias of a phase and edge, which are both 0 except with [`crate::backend::Window::Up`].
    pub fn bias(&self, bias: usize, phase: usize, edge: usize) -> *const f32 {
        let [biases, ..] = self.packing().tail();
        let (step, cout) = (self.layout.bias_elements() as usize, self.layout.cout as usize);
        self.at(biases + bias * step + (phase * 4 + edge) * cout)
    }

    /// Gamma and beta of the norm in the prologue.
    pub fn norm(&self) -> [&[f32]; 2] {
        let [_, gamma, beta, end] = self.packing().tail();
        // SAFETY: inside the block; all parts were written before.
        [(gamma, beta), (beta, end)].map(|(a, b)| unsafe { std::slice::from_raw_parts(self.at(a), b - a) })
    }
}

/// `from` gives the output channels of a tap and an input channel.
fn pack_bf16_half<'a>(
    packed: &mut [f32],
    half: usize,
    from: impl Fn(usize, usize) -> &'a [f32],
    taps: usize,
    cin: usize,
) {
    let bits = |weight: Option<&f32>| weight.map_or(0, |weight| u32::from(bf16::of(*weight).to_bits()));
    for (i, tile) in packed.chunks_exact_mut(WEIGHT_TILE / 2).enumerate() {
        let (block, tap) = (i / taps, i % taps);
        for (pair, row) in tile.chunks_exact_mut(TILE).enumerate() {
            let first = block * 2 * TILE + 2 * pair;
            let [even, odd] = [first, first + 1].map(|k| if k < cin { &from(tap, k)[half * TILE..] } else { &[] });
            for (n, both) in row.iter_mut().enumerate() {
                *both = f32::from_bits(bits(even.get(n)) | bits(odd.get(n)) << 16);
            }
        }
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

/// `from` gives the output channels of a tap and an input channel.
fn pack_panel<'a>(packed: &mut [f32], from: impl Fn(usize, usize) -> &'a [f32], width: usize, taps: usize, cin: usize) {
    let mut rows = packed.chunks_exact_mut(width);
    for (block, tap) in (0..cin).step_by(BLOCK).flat_map(|block| (0..taps).map(move |tap| (block, tap))) {
        for (k, row) in (block..cin.min(block + BLOCK)).zip(&mut rows) {
            let weights = from(tap, k);
            row[..weights.len()].copy_from_slice(weights);
        }
    }
}

fn check(layout: &ConvLayout) -> Result<()> {
    let grouped = match layout.norm {
        Norm::Group { groups } => layout.prologue == Prologue::None || groups > 0 && layout.cin.is_multiple_of(groups),
        Norm::Pixel => true,
    };
    let sized = layout.cin > 0 && layout.cout > 0 && layout.shortcut != Some(0);
    if sized && grouped && layout.biases > 0 {
        return Ok(());
    }
    Err(Error::Internal(format!("{layout:?}: no channels, no bias, or groups that do not divide the channels")))
}
