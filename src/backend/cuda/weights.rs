//! Writes the weights of a network to where they are kept.

use half::{bf16, f16};

use super::pack::{BlockPacking, PackBuffers, PackedElement};
use crate::backend::Precision;
use crate::backend::cuda::driver::{CudaStream, DeviceBlock, PinnedMemory};
use crate::backend::cuda::launch::tiling::WeightOrder;
use crate::backend::gpu::{self, StoredConv, write_pieces};
use crate::error::Result;
use crate::ir::{ConvSource, WeightBlock, WeightPart};
use crate::reserve;

pub type WeightStore = gpu::WeightStore<DeviceBlock, PinnedMemory>;
pub type PreparedConv = StoredConv<DeviceBlock, PinnedMemory, WeightOrder>;

impl PreparedConv {
    /// Returns when the part is where it belongs.
    pub fn write(
        &self,
        stream: &CudaStream,
        part: &WeightPart,
        source: &mut dyn ConvSource,
        buffers: &mut PackBuffers,
    ) -> Result<()> {
        match (part, self.precision) {
            (WeightPart::Vectors, _) => {
                let vectors = self.layout.vectors(&self.conv, source)?;
                self.put(stream, std::iter::once((self.layout.bias, &vectors[..])))
            }
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

    /// Copies pieces, each to its offset, and waits.
    fn put<'a, T: Copy + 'a>(&self, stream: &CudaStream, pieces: impl Iterator<Item = (u64, &'a [T])>) -> Result<()> {
        let pieces = pieces.map(|(offset, from)| (self.offset + offset, from));
        match &*self.store {
            WeightStore::Device(block) => block.write_all(stream, pieces),
            WeightStore::Host(memory) => write_pieces(memory, pieces),
        }
    }
}
