//! The weights of a network: resident, or offloaded to host memory until a layer needs them. Where their parts lie, and
//! their addresses for launches. For APIs whose memory has addresses.

use std::borrow::Borrow;
use std::ops::Range;
use std::sync::Arc;

use super::api::{GpuConv, GpuMemory, HostBlock};
use super::block::AddressedBlock;
use crate::backend::Precision;
use crate::error::{Error, Result};
use crate::ir::{ConvLayout, ConvSource, DeviceOffset, Prologue};
use crate::reserve;

/// Where the parts of a convolution's weights begin. Slabs come first.
#[derive(Debug, Clone, Copy)]
pub struct WeightLayout {
    pub slab_bytes: u64,
    pub shortcut: u64,
    pub bias: u64,
    pub gamma: u64,
    pub beta: u64,
    pub end: u64,
}

/// What a convolution's weights take, with all that fills up blocks and tiles.
pub struct PaddedWeights {
    pub slab_bytes: u64,
    pub shortcut_bytes: u64,
    /// Channels of a vector of the norm.
    pub inputs: u64,
    /// Channels of a bias.
    pub outputs: u64,
}

impl WeightLayout {
    pub fn new(conv: &ConvLayout, padded: &PaddedWeights) -> WeightLayout {
        let slab_bytes = padded.slab_bytes;
        let shortcut = conv.slabs * slab_bytes;
        let bias = shortcut + padded.shortcut_bytes;
        // Phases and edges of an upsampler have biases of their own.
        let gamma = bias + conv.biases * (conv.bias_elements() / conv.cout) * padded.outputs * 4;
        let norm = if conv.prologue == Prologue::None { 0 } else { padded.inputs * 4 };
        WeightLayout { slab_bytes, shortcut, bias, gamma, beta: gamma + norm, end: gamma + 2 * norm }
    }

    /// Everything from the biases on: [bias][phase][edge][padded output channel], then weight and bias of the norm.
    pub fn vectors(&self, conv: &ConvLayout, source: &mut dyn ConvSource) -> Result<Vec<f32>> {
        let floats = |bytes: u64| (bytes / 4) as usize;
        let (cin, cout) = (conv.cin as usize, conv.cout as usize);
        let mut biases = reserve::filled("biases", 0.0, (conv.biases * conv.bias_elements()) as usize)?;
        source.biases(&mut biases)?;
        let mut vectors = reserve::filled("biases", 0.0, floats(self.end - self.bias))?;
        let (padded, norm) = vectors.split_at_mut(floats(self.gamma - self.bias));
        let outputs = padded.len() / (biases.len() / cout);
        for (vector, into) in biases.chunks_exact(cout).zip(padded.chunks_exact_mut(outputs)) {
            into[..cout].copy_from_slice(vector);
        }
        if self.beta > self.gamma {
            let (gamma, beta) = norm.split_at_mut(floats(self.beta - self.gamma));
            source.norm(&mut gamma[..cin], &mut beta[..cin])?;
        }
        Ok(vectors)
    }

    /// `omitted`: bytes of slabs that are not there.
    fn addresses(&self, address: u64, omitted: u64) -> WeightAddresses {
        let part = |offset: u64| address + offset - omitted;
        WeightAddresses {
            slabs: address,
            shortcut: part(self.shortcut),
            bias: part(self.bias),
            gamma: part(self.gamma),
            beta: part(self.beta),
        }
    }
}

/// Device addresses of a convolution's weights.
#[derive(Debug, Clone, Copy)]
pub struct WeightAddresses {
    pub slabs: u64,
    pub shortcut: u64,
    pub bias: u64,
    pub gamma: u64,
    pub beta: u64,
}

/// Memory for the weights of a network, or for some of them.
pub enum WeightStore<D, H> {
    Device(D),
    Host(H),
}

/// The weights of one convolution, packed. `Order`: how those of a slab lie in memory.
pub struct StoredConv<D, H, Order> {
    pub store: Arc<WeightStore<D, H>>,
    /// Where in the store they begin.
    pub offset: u64,
    pub conv: ConvLayout,
    pub layout: WeightLayout,
    pub precision: Precision,
    pub order: Order,
}

impl<G, D, H, Order> GpuConv<G> for StoredConv<D, H, Order>
where
    G: GpuMemory<HostBlock = H, Weights = WeightAddresses>,
    G::Block: Borrow<D>,
    D: AddressedBlock + Send + Sync,
    H: Send + Sync,
    Order: Send + Sync,
{
    fn resident(&self) -> Result<WeightAddresses> {
        let WeightStore::Device(block) = &*self.store else {
            return Err(Error::Internal("weights are needed that were not fetched".into()));
        };
        block.check_alive()?;
        Ok(self.layout.addresses(block.at(self.offset, self.layout.end)?, 0))
    }

    /// The first slabs, and everything after all slabs.
    fn offloaded(&self, slabs: u64) -> Result<(&H, [Range<u64>; 2])> {
        let WeightStore::Host(memory) = &*self.store else {
            return Err(Error::Internal("weights are fetched that are resident".into()));
        };
        let part = |from: u64, to: u64| self.offset + from..self.offset + to;
        Ok((memory, [part(0, slabs * self.layout.slab_bytes), part(self.layout.shortcut, self.layout.end)]))
    }

    fn fetched(&self, block: &G::Block, slabs: u64, at: DeviceOffset) -> WeightAddresses {
        let (block, omitted): (&D, u64) = (block.borrow(), self.layout.shortcut - slabs * self.layout.slab_bytes);
        self.layout.addresses(block.address(at), omitted)
    }
}

/// Copies pieces to host memory, each to its offset. Nobody else knows this part of the memory yet.
pub fn write_pieces<'a, T: Copy + 'a>(
    memory: &impl HostBlock,
    mut pieces: impl Iterator<Item = (u64, &'a [T])>,
) -> Result<()> {
    pieces.try_for_each(|(offset, from)| {
        let to = memory.at(offset, size_of_val(from) as u64)?;
        // SAFETY: both are that long, and nobody else touches the region.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr().cast(), to, size_of_val(from)) };
        Ok(())
    })
}
