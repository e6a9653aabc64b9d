//! The weights of a network: resident, or offloaded to host memory until a layer needs them.

use std::ops::Range;
use std::sync::Arc;

use half::{bf16, f16};

use super::pack::{self, BlockPacking, PackBuffers, PackedElement};
use crate::backend::Precision;
use crate::backend::cuda::driver::{CudaStream, DeviceBlock, PinnedMemory};
use crate::backend::cuda::launch::tiling::WeightOrder;
use crate::backend::cuda::launch::{CudaSizes, WeightLayout, WeightPointers};
use crate::error::{Error, Result};
use crate::ir::{ConvLayout, ConvSource, WeightBlock, WeightPart};
use crate::reserve;

/// Memory for the weights of a network, or for some of them.
#[derive(Clone)]
pub enum WeightStore {
    Device(Arc<DeviceBlock>),
    Host(Arc<PinnedMemory>),
}

/// The weights of one convolution, packed.
pub struct PreparedConv {
    store: WeightStore,
    /// Where in the store they begin.
    offset: u64,
    precision: Precision,
    order: WeightOrder,
    conv: ConvLayout,
    layout: WeightLayout,
}

impl PreparedConv {
    /// The parts are to be written.
    pub fn new(
        store: &WeightStore,
        offset: u64,
        sizes: CudaSizes,
        order: WeightOrder,
        layout: &ConvLayout,
    ) -> PreparedConv {
        let (store, precision) = (store.clone(), sizes.precision);
        PreparedConv { store, offset, precision, order, conv: *layout, layout: sizes.weight_layout(layout) }
    }

    /// Returns when the part is where it belongs.
    pub fn write(
        &self,
        stream: &CudaStream,
        part: &WeightPart,
        source: &mut dyn ConvSource,
        buffers: &mut PackBuffers,
    ) -> Result<()> {
        match (part, self.precision) {
            (WeightPart::Vectors, _) => self.write_vectors(stream, source),
            (WeightPart::Block(block), Precision::Fp16) => self.write_block::<f16>(stream, block, source, buffers),
            (WeightPart::Block(block), Precision::Bf16) => self.write_block::<bf16>(stream, block, source, buffers),
            (WeightPart::Block(block), Precision::Fp32) => self.write_block::<f32>(stream, block, source, buffers),
        }
    }

    fn write_block<E: PackedElement>(
        &self,
        stream: &CudaStream,
        block: &WeightBlock,
        source: &mut dyn ConvSource,
        buffers: &mut PackBuffers,
    ) -> Result<()> {
        let packing = BlockPacking::new::<E>(&self.conv, block, self.order)?;
        let slabs = block.slabs(&self.conv);
        let elements = packing.slab_elements * (slabs.end - slabs.start) as usize;
        let packed = reserve::grown("packed weights", E::buffer(buffers), elements)?;
        // Channels that fill up a tile.
        packed.fill(E::default());
        source.block(block, &mut |slab, plain| {
            packing.pack(slab, plain, &mut packed[..]);
            Ok(())
        })?;
        let start = if block.shortcut { self.layout.shortcut } else { 0 };
        let pieces = packing.pieces(self.layout.slab_bytes).map(|(to, from)| (start + to, &packed[from]));
        self.put(stream, pieces)
    }

    fn write_vectors(&self, stream: &CudaStream, source: &mut dyn ConvSource) -> Result<()> {
        let (layout, offsets) = (&self.conv, &self.layout);
        let biases = pack::biases(layout, source)?;
        let mut pieces = vec![(offsets.bias, &biases[..])];
        let padded = layout.cin.next_multiple_of(64) as usize;
        let (mut gamma, mut beta) = (vec![0.0f32; padded], vec![0.0f32; padded]);
        if offsets.beta > offsets.gamma {
            let cin = layout.cin as usize;
            source.norm(&mut gamma[..cin], &mut beta[..cin])?;
            pieces.extend([(offsets.gamma, &gamma[..]), (offsets.beta, &beta[..])]);
        }
        self.put(stream, pieces.into_iter())
    }

    /// Copies pieces, each to its offset, and waits.
    fn put<'a, T: Copy + 'a>(&self, stream: &CudaStream, pieces: impl Iterator<Item = (u64, &'a [T])>) -> Result<()> {
        let mut pieces = pieces.map(|(offset, from)| (self.offset + offset, from));
        match &self.store {
            WeightStore::Device(block) => block.write_all(stream, pieces),
            WeightStore::Host(memory) => pieces.try_for_each(|(offset, from)| {
                let bytes = size_of_val(from);
                let to = memory.at(offset, bytes as u64)?;
                // SAFETY: both are that long, and nobody else knows this part of the store yet.
                unsafe { std::ptr::copy_nonoverlapping(from.as_ptr().cast(), to, bytes) };
                Ok(())
            }),
        }
    }

    /// Where in host memory the first `slabs` slabs are, and everything after the slabs.
    pub fn offloaded(&self, slabs: u64) -> Result<(&PinnedMemory, [Range<u64>; 2])> {
        let WeightStore::Host(memory) = &self.store else {
            return Err(Error::Internal("weights are fetched that are resident".into()));
        };
        let part = |from: u64, to: u64| self.offset + from..self.offset + to;
        Ok((memory, [part(0, slabs * self.layout.slab_bytes), part(self.layout.shortcut, self.layout.end)]))
    }

    /// Resident weights.
    pub fn pointers(&self) -> Result<WeightPointers> {
        let WeightStore::Device(block) = &self.store else {
            return Err(Error::Internal("weights are needed that were not fetched".into()));
        };
        Ok(self.pointers_at(block.at(self.offset, self.layout.end)?, 0))
    }

    /// Weights whose [`PreparedConv::offloaded`] parts lie one after the other at an address.
    pub fn fetched(&self, slabs: u64, address: u64) -> WeightPointers {
        self.pointers_at(address, self.layout.shortcut - slabs * self.layout.slab_bytes)
    }

    /// `omitted`: bytes of slabs that are not there.
    fn pointers_at(&self, address: u64, omitted: u64) -> WeightPointers {
        let WeightLayout { shortcut, bias, gamma, beta, .. } = self.layout;
        let [shortcut, bias, gamma, beta] = [shortcut, bias, gamma, beta].map(|offset| address + offset - omitted);
        WeightPointers { slabs: address, shortcut, bias, gamma, beta }
    }
}
