//! Packs weights. A slab is [tap][input channel][output channel], with channels that fill up blocks and tiles.

use std::ops::Range;
use std::sync::Arc;

use ash::vk;
use half::{bf16, f16};

use super::driver::{Context, DeviceBlock, HostMemory, VulkanQueue};
use super::sizes::{K_BLOCK, channel_stride, padded_outputs};
use crate::backend::Precision;
use crate::backend::gpu::{self, AddressedBlock, Queue, StoredConv, write_pieces};
use crate::error::Result;
use crate::ir::{ConvLayout, ConvSource, WeightBlock, WeightPart};

/// Input channels of a part.
const PART_CHANNELS: u64 = 64;

pub type WeightStore = gpu::WeightStore<DeviceBlock, HostMemory>;
pub type PreparedConv = StoredConv<DeviceBlock, HostMemory, WeightOrder>;

/// What a thread that writes weights keeps: packed weights, and their way to the device.
#[derive(Default)]
pub struct PackBuffers {
    packed: Vec<u8>,
    staging: Option<(VulkanQueue, HostMemory)>,
}

/// How the weights of a tap lie in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightOrder {
    /// [input channel][output channel]
    Plain,
    /// [block of input channels][output channel][input channel], as matrix units read them.
    Matrices,
}

impl WeightOrder {
    /// The place of an element, in elements from the first of a tap.
    fn place(self, padded_outputs: usize, input: usize, output: usize) -> usize {
        let block = K_BLOCK as usize;
        match self {
            WeightOrder::Plain => input * padded_outputs + output,
            WeightOrder::Matrices => (input / block * padded_outputs + output) * block + input % block,
        }
    }
}

/// The parts that a convolution's weights are written in: all output channels of some input channels.
pub fn parts(layout: &ConvLayout) -> Vec<WeightPart> {
    let blocks = WeightBlock::all(layout, PART_CHANNELS, layout.cout);
    blocks.into_iter().map(WeightPart::Block).chain([WeightPart::Vectors]).collect()
}

fn put_element(precision: Precision, value: f32, into: &mut [u8]) {
    match precision {
        Precision::Fp16 => into.copy_from_slice(&f16::from_f32(value).to_ne_bytes()),
        Precision::Bf16 => into.copy_from_slice(&bf16::from_f32(value).to_ne_bytes()),
        Precision::Fp32 => into.copy_from_slice(&value.to_ne_bytes()),
    }
}

impl PreparedConv {
    /// Returns when the part is where it belongs.
    pub fn write(
        &self,
        context: &Arc<Context>,
        part: &WeightPart,
        source: &mut dyn ConvSource,
        buffers: &mut PackBuffers,
    ) -> Result<()> {
        match part {
            WeightPart::Vectors => {
                let vectors = self.layout.vectors(&self.conv, source)?;
                buffers.packed.clear();
                buffers.packed.extend(vectors.iter().flat_map(|value| value.to_ne_bytes()));
                let place = self.layout.bias..self.layout.end;
                self.put(context, buffers, std::slice::from_ref(&place))
            }
            WeightPart::Block(block) => self.write_block(context, block, source, buffers),
        }
    }

    fn write_block(
        &self,
        context: &Arc<Context>,
        block: &WeightBlock,
        source: &mut dyn ConvSource,
        buffers: &mut PackBuffers,
    ) -> Result<()> {
        let (conv, precision, padded) = (&self.conv, self.precision, padded_outputs(&self.conv) as usize);
        let element = precision.bytes() as usize;
        let inputs = if block.shortcut { conv.shortcut.unwrap_or(0) } else { conv.cin };
        let all_rows = channel_stride(inputs).next_multiple_of(K_BLOCK);
        // The last block has the rows that fill up.
        let rows = if block.inputs.end == inputs { all_rows - block.inputs.start } else { block.rows() };
        let (row_bytes, taps) = ((padded * element) as u64, block.taps(conv));
        let columns = block.columns() as usize;
        source.block(block, &mut |slab, plain| {
            let packed = &mut buffers.packed;
            packed.clear();
            packed.resize((taps * rows * row_bytes) as usize, 0);
            for (index, values) in plain.chunks_exact(columns).enumerate() {
                let (tap, row) = (index as u64 / block.rows(), index % block.rows() as usize);
                let into = &mut packed[(tap * rows * row_bytes) as usize..][..(rows * row_bytes) as usize];
                for (column, value) in values.iter().enumerate() {
                    let at = self.order.place(padded, row, column) * element;
                    put_element(precision, *value, &mut into[at..at + element]);
                }
            }
            let first = if block.shortcut { self.layout.shortcut } else { slab * self.layout.slab_bytes };
            let place = |tap: u64| first + (tap * all_rows + block.inputs.start) * row_bytes;
            let runs: Vec<Range<u64>> = (0..taps).map(|tap| place(tap)..place(tap) + rows * row_bytes).collect();
            self.put(context, buffers, &runs)
        })
    }

    /// Copies what is packed: runs that lie one after the other, each to its place in the weights. Waits.
    fn put(&self, context: &Arc<Context>, buffers: &mut PackBuffers, runs: &[Range<u64>]) -> Result<()> {
        let PackBuffers { packed, staging } = buffers;
        let mut src_offset = 0;
        let placed = runs.iter().map(|run| {
            let (size, dst_offset) = (run.end - run.start, self.offset + run.start);
            src_offset += size;
            vk::BufferCopy { src_offset: src_offset - size, dst_offset, size }
        });
        let placed: Vec<vk::BufferCopy> = placed.collect();
        match &*self.store {
            WeightStore::Host(memory) => {
                let piece = |run: &vk::BufferCopy| &packed[run.src_offset as usize..][..run.size as usize];
                write_pieces(memory, placed.iter().map(|run| (run.dst_offset, piece(run))))
            }
            WeightStore::Device(block) => {
                placed.iter().try_for_each(|run| block.at(run.dst_offset, run.size).map(|_| ()))?;
                let bytes = packed.len() as u64;
                if staging.as_ref().is_none_or(|(_, memory)| memory.bytes() < bytes) {
                    *staging = Some((VulkanQueue::new(context)?, HostMemory::new(context, bytes)?));
                }
                let Some((queue, memory)) = staging else { return Ok(()) };
                // The last copy from it was waited for.
                write_pieces(memory, std::iter::once((0, &packed[..])))?;
                // SAFETY: the regions were checked; both buffers live until the copy was waited for.
                unsafe { queue.copy(memory.buffer(), block.handle, &placed)? };
                queue.synchronise()
            }
        }
    }
}
