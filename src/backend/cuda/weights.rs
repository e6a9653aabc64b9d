//! Weights in the form the kernels read: tiles of 128 output channels by 64 input channels in 16-bit floats, swizzled as
//! shared memory wants them.

use std::sync::Arc;

use half::f16;

use super::geometry::{ALIGN, CHUNK, COLUMNS, ELEMENT, Kind, WEIGHT_TILE, column_tiles, tap_order};
use super::memory::Block;
use super::stream::Stream;
use crate::backend::{ConvLayout, ConvSource, Window};
use crate::error::Result;
use crate::workers;

/// One convolution's weights, side by side in the block of its network.
pub struct Conv {
    block: Arc<Block>,
    start: u64,
    places: Places,
}

/// Where the parts lie from the start.
#[derive(Debug, Clone, Copy)]
struct Places {
    slab_bytes: u64,
    shortcut: u64,
    bias: u64,
    gamma: u64,
    beta: u64,
    end: u64,
}

fn places(layout: &ConvLayout) -> Places {
    let tiles = column_tiles(layout) * COLUMNS;
    let slab_bytes = match Kind::of(layout) {
        Ok(Kind::In) => tiles * 9 * 4 * ELEMENT,
        Ok(Kind::Out) => layout.cin.div_ceil(32) * 32 * 32 * ELEMENT,
        _ => layout.window.taps() * layout.cin.div_ceil(CHUNK) * column_tiles(layout) * WEIGHT_TILE,
    };
    let shortcut = layout.slabs * slab_bytes;
    let bias = shortcut + layout.shortcut.map_or(0, |cin| cin.div_ceil(CHUNK) * column_tiles(layout) * WEIGHT_TILE);
    let edges = layout.bias_elements() / layout.cout;
    let gamma = bias + layout.biases * edges * tiles * 4;
    let norm = if layout.prologue == crate::backend::Prologue::None { 0 } else { layout.cin.next_multiple_of(64) * 4 };
    Places { slab_bytes, shortcut, bias, gamma, beta: gamma + norm, end: gamma + 2 * norm }
}

pub fn bytes(layout: &ConvLayout) -> u64 {
    places(layout).end.next_multiple_of(ALIGN)
}

impl Conv {
    pub fn prepare(
        block: &Arc<Block>,
        start: u64,
        stream: &Stream,
        layout: &ConvLayout,
        source: &mut dyn ConvSource,
    ) -> Result<Conv> {
        let kind = Kind::of(layout)?;
        let places = places(layout);
        let mut plain = Vec::new();
        for slab in 0..layout.slab_count() {
            plain.resize(layout.slab_elements(slab) as usize, 0.0);
            source.slab(slab, &mut plain);
            let shortcut = slab == layout.slabs;
            let packed = match kind {
                Kind::In => pack_in(layout, &plain),
                Kind::Out => pack_out(layout, &plain),
                Kind::Main if shortcut => pack(Window::Point, layout.shortcut.unwrap_or(0), layout.cout, &plain),
                Kind::Main => pack(layout.window, layout.cin, layout.cout, &plain),
            };
            block.write(stream, start + if shortcut { places.shortcut } else { slab * places.slab_bytes }, &packed)?;
        }
        block.write(stream, start + places.bias, &pack_biases(layout, source))?;
        if places.beta > places.gamma {
            let padded = layout.cin.next_multiple_of(64) as usize;
            let (mut gamma, mut beta) = (vec![0.0f32; padded], vec![0.0f32; padded]);
            let cin = layout.cin as usize;
            source.norm(&mut gamma[..cin], &mut beta[..cin]);
            block.write(stream, start + places.gamma, &gamma)?;
            block.write(stream, start + places.beta, &beta)?;
        }
        Ok(Conv { block: Arc::clone(block), start, places })
    }

    pub fn slabs(&self) -> Result<u64> {
        self.block.at(self.start, self.places.shortcut)
    }

    pub fn shortcut(&self) -> Result<u64> {
        self.block.at(self.start + self.places.shortcut, self.places.bias - self.places.shortcut)
    }

    pub fn bias(&self) -> Result<u64> {
        self.block.at(self.start + self.places.bias, self.places.gamma - self.places.bias)
    }

    pub fn gamma(&self) -> Result<u64> {
        self.block.at(self.start + self.places.gamma, self.places.beta - self.places.gamma)
    }

    pub fn beta(&self) -> Result<u64> {
        self.block.at(self.start + self.places.beta, self.places.end - self.places.beta)
    }
}

/// [bias][phase][edge][padded output channel].
fn pack_biases(layout: &ConvLayout, source: &mut dyn ConvSource) -> Vec<f32> {
    let (cout, padded) = (layout.cout as usize, (column_tiles(layout) * COLUMNS) as usize);
    let mut plain = vec![0.0; layout.bias_elements() as usize];
    let mut packed = Vec::new();
    for bias in 0..layout.biases {
        source.bias(bias, &mut plain);
        for vector in plain.chunks_exact(cout) {
            packed.extend_from_slice(vector);
            packed.resize(packed.len() + padded - cout, 0.0);
        }
    }
    packed
}

/// [phase][column tile][chunk][tap][128 columns][64 channels], 16-byte units of a row swizzled by the row.
fn pack(window: Window, cin: u64, cout: u64, plain: &[f32]) -> Vec<f16> {
    let (cin, cout) = (cin as usize, cout as usize);
    let (chunk, columns) = (CHUNK as usize, COLUMNS as usize);
    let (chunks, tiles, phases) = (cin.div_ceil(chunk), cout.div_ceil(columns), window.phases() as usize);
    let taps = tap_order(window);
    let tile_elements = chunk * columns;
    let mut packed = vec![f16::ZERO; phases * tiles * chunks * taps.len() * tile_elements];
    let work: Vec<(usize, &mut [f16])> = packed.chunks_mut(taps.len() * tile_elements).enumerate().collect();
    workers::for_each(
        workers::threads_for(plain.len()),
        work,
        || (),
        |(), (index, into)| {
            let (phase, tile, first) = (index / chunks / tiles, index / chunks % tiles, index % chunks * chunk);
            for (tap, into) in taps.iter().zip(into.chunks_exact_mut(tile_elements)) {
                let from = &plain[(phase * taps.len() + *tap as usize) * cin * cout..][..cin * cout];
                for k in 0..chunk.min(cin - first) {
                    let row = &from[(first + k) * cout + tile * columns..][..columns.min(cout - tile * columns)];
                    for (n, value) in row.iter().enumerate() {
                        into[n * chunk + ((k / 8) ^ (n & 7)) * 8 + k % 8] = f16::from_f32(*value);
                    }
                }
            }
        },
    );
    packed
}

/// [padded output channel][tap][4].
fn pack_in(layout: &ConvLayout, plain: &[f32]) -> Vec<f16> {
    let (cin, cout) = (layout.cin as usize, layout.cout as usize);
    let mut packed = vec![f16::ZERO; (column_tiles(layout) * COLUMNS) as usize * 9 * 4];
    for (at, value) in plain.iter().enumerate() {
        let (tap, c, n) = (at / cout / cin, at / cout % cin, at % cout);
        packed[(n * 9 + tap) * 4 + c] = f16::from_f32(*value);
    }
    packed
}

/// Fragments of a matrix product whose columns are tap x output: [32 channels][step][lane][block of 8 columns][half][2].
/// Lane 4 n + t holds, of column n of a block, channels 8 t + 4 step + 2 half + e.
fn pack_out(layout: &ConvLayout, plain: &[f32]) -> Vec<f16> {
    let (cin, cout) = (layout.cin as usize, layout.cout as usize);
    let mut packed = vec![f16::ZERO; cin.div_ceil(32) * 32 * 32];
    for (at, value) in plain.iter().enumerate() {
        let (tap, c, o) = (at / cout / cin, at / cout % cin, at % cout);
        let (column, within) = (tap * 3 + o, c % 32);
        let (t, step, half, e) = (within / 8, within / 4 % 2, within / 2 % 2, within % 2);
        let (block, n) = (column / 8, column % 8);
        packed[((((c / 32 * 2 + step) * 32 + 4 * n + t) * 4 + block) * 2 + half) * 2 + e] = f16::from_f32(*value);
    }
    packed
}
