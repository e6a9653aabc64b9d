//! The weights of a network on the GPU.

use std::sync::Arc;

use half::{bf16, f16};

use super::geometry::{ALIGN, COLUMNS, Kind, WEIGHT_TILE, column_tiles};
use super::memory::Block;
use super::pack::{self, Element};
use super::stream::Stream;
use crate::backend::{ConvLayout, ConvSource, Precision, Prologue, Window};
use crate::error::Result;

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

fn places(precision: Precision, layout: &ConvLayout) -> Places {
    let (element, chunk) = (precision.bytes(), precision.chunk());
    let tiles = column_tiles(layout) * COLUMNS;
    let slab_bytes = match Kind::of(layout) {
        Ok(Kind::In) => tiles * 9 * 4 * element,
        Ok(Kind::Out) => layout.cin.div_ceil(chunk / 2) * (chunk / 2) * 32 * element,
        _ => layout.window.taps() * layout.cin.div_ceil(chunk) * column_tiles(layout) * WEIGHT_TILE,
    };
    let shortcut = layout.slabs * slab_bytes;
    let bias = shortcut + layout.shortcut.map_or(0, |cin| cin.div_ceil(chunk) * column_tiles(layout) * WEIGHT_TILE);
    let edges = layout.bias_elements() / layout.cout;
    let gamma = bias + layout.biases * edges * tiles * 4;
    let norm = if layout.prologue == Prologue::None { 0 } else { layout.cin.next_multiple_of(64) * 4 };
    Places { slab_bytes, shortcut, bias, gamma, beta: gamma + norm, end: gamma + 2 * norm }
}

pub fn bytes(precision: Precision, layout: &ConvLayout) -> u64 {
    places(precision, layout).end.next_multiple_of(ALIGN)
}

impl Conv {
    pub fn prepare(
        block: &Arc<Block>,
        start: u64,
        stream: &Stream,
        precision: Precision,
        layout: &ConvLayout,
        source: &mut dyn ConvSource,
    ) -> Result<Conv> {
        let conv = Conv { block: Arc::clone(block), start, places: places(precision, layout) };
        match precision {
            Precision::Fp16 => conv.write::<f16>(stream, layout, source)?,
            Precision::Bf16 => conv.write::<bf16>(stream, layout, source)?,
            Precision::Fp32 => conv.write::<f32>(stream, layout, source)?,
        }
        Ok(conv)
    }

    fn write<E: Element>(&self, stream: &Stream, layout: &ConvLayout, source: &mut dyn ConvSource) -> Result<()> {
        let (kind, places) = (Kind::of(layout)?, &self.places);
        let mut plain = Vec::new();
        for slab in 0..layout.slab_count() {
            plain.resize(layout.slab_elements(slab) as usize, 0.0);
            source.slab(slab, &mut plain);
            let shortcut = slab == layout.slabs;
            let packed: Vec<E> = match kind {
                Kind::In => pack::from_pixels(layout, &plain),
                Kind::Out => pack::to_pixels(layout, &plain),
                Kind::Main if shortcut => pack::main(Window::Point, layout.shortcut.unwrap_or(0), layout.cout, &plain),
                Kind::Main => pack::main(layout.window, layout.cin, layout.cout, &plain),
            };
            self.put(stream, if shortcut { places.shortcut } else { slab * places.slab_bytes }, &packed)?;
        }
        self.put(stream, places.bias, &pack::biases(layout, source))?;
        if places.beta > places.gamma {
            let padded = layout.cin.next_multiple_of(64) as usize;
            let (mut gamma, mut beta) = (vec![0.0f32; padded], vec![0.0f32; padded]);
            let cin = layout.cin as usize;
            source.norm(&mut gamma[..cin], &mut beta[..cin]);
            self.put(stream, places.gamma, &gamma)?;
            self.put(stream, places.beta, &beta)?;
        }
        Ok(())
    }

    fn put<T: Copy>(&self, stream: &Stream, place: u64, from: &[T]) -> Result<()> {
        self.block.write(stream, self.start + place, from)
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
