//! The weights of a network: on the GPU, or in host memory until they are needed.

use std::sync::Arc;

use half::{bf16, f16};

use crate::backend::cuda::driver::context::Context;
use crate::backend::cuda::driver::memory::Block;
use crate::backend::cuda::driver::pinned::Pinned;
use crate::backend::cuda::driver::stream::{self, Stream};
use crate::backend::cuda::launch::tiling::{ALIGN, COLUMNS, Kind, WEIGHT_TILE, column_tiles};
use crate::backend::cuda::offload::pack::{self, Element};
use crate::backend::{ConvLayout, ConvSource, Precision, Prologue, Window};
use crate::error::{Error, Result};

/// Room for the weights of a network, or for some of them.
#[derive(Clone)]
pub enum Store {
    Device(Arc<Block>),
    Host(Arc<HostWeights>),
}

/// Weights that wait in host memory.
pub struct HostWeights {
    memory: Pinned,
    context: Arc<Context>,
}

impl HostWeights {
    pub fn new(context: &Arc<Context>, bytes: u64) -> Result<HostWeights> {
        Ok(HostWeights { memory: Pinned::new(context, bytes)?, context: Arc::clone(context) })
    }

    pub fn is_pinned(&self) -> bool {
        self.memory.is_pinned()
    }
}

impl Drop for HostWeights {
    /// Any handle that shares them may have left copies under way, on a stream of its host's.
    fn drop(&mut self) {
        if let Ok(_current) = self.context.enter() {
            stream::wait_for_all(self.context.gpu.index);
        }
    }
}

/// One convolution's weights, side by side.
pub struct Conv {
    home: Home,
    places: Places,
}

enum Home {
    /// From there on in a store.
    Stored(Store, u64),
    /// At this address in the block of a job, which has them fetched.
    Fetched(u64),
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
        store: &Store,
        start: u64,
        stream: &Stream,
        precision: Precision,
        layout: &ConvLayout,
        source: &mut dyn ConvSource,
    ) -> Result<Conv> {
        let conv = Conv { home: Home::Stored(store.clone(), start), places: places(precision, layout) };
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
        match &self.home {
            Home::Stored(Store::Device(block), start) => block.write(stream, start + place, from),
            Home::Stored(Store::Host(weights), start) => {
                let bytes = size_of_val(from);
                let to = weights.memory.at(start + place, bytes as u64)?;
                // SAFETY: both are that long, and nobody else knows this part of the store yet.
                unsafe { std::ptr::copy_nonoverlapping(from.as_ptr().cast(), to, bytes) };
                Ok(())
            }
            Home::Fetched(_) => Err(Error::Internal("weights are prepared in the block of a job".into())),
        }
    }

    /// The first slabs, and all that comes after the slabs, where they wait in host memory.
    pub fn waiting(&self, slabs: u64) -> Result<[&[u8]; 2]> {
        let Home::Stored(Store::Host(weights), start) = &self.home else {
            return Err(Error::Internal("weights are fetched that are on the device".into()));
        };
        let part = |from: u64, to: u64| -> Result<&[u8]> {
            let address = weights.memory.at(start + from, to - from)?;
            // SAFETY: that long, and not written any more once it is prepared.
            Ok(unsafe { std::slice::from_raw_parts(address, (to - from) as usize) })
        };
        Ok([part(0, slabs * self.places.slab_bytes)?, part(self.places.shortcut, self.places.end)?])
    }

    /// The same at an address in the block of a job, side by side.
    pub fn fetched(&self, slabs: u64, address: u64) -> Conv {
        let Places { slab_bytes, shortcut, bias, gamma, beta, end } = self.places;
        let left_out = shortcut - slabs * slab_bytes;
        let [shortcut, bias, gamma, beta, end] = [shortcut, bias, gamma, beta, end].map(|place| place - left_out);
        Conv { home: Home::Fetched(address), places: Places { slab_bytes, shortcut, bias, gamma, beta, end } }
    }

    fn at(&self, from: u64, to: u64) -> Result<u64> {
        match &self.home {
            Home::Stored(Store::Device(block), start) => block.at(start + from, to - from),
            Home::Stored(Store::Host(_), _) => Err(Error::Internal("weights are needed that were not fetched".into())),
            Home::Fetched(address) => Ok(address + from),
        }
    }

    pub fn slabs(&self) -> Result<u64> {
        self.at(0, self.places.shortcut)
    }

    pub fn shortcut(&self) -> Result<u64> {
        self.at(self.places.shortcut, self.places.bias)
    }

    pub fn bias(&self) -> Result<u64> {
        self.at(self.places.bias, self.places.gamma)
    }

    pub fn gamma(&self) -> Result<u64> {
        self.at(self.places.gamma, self.places.beta)
    }

    pub fn beta(&self) -> Result<u64> {
        self.at(self.places.beta, self.places.end)
    }
}
