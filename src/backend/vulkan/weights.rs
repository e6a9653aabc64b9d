//! The weights of a network: resident, or offloaded to host memory until a layer needs them. A slab is
//! [tap][input channel][output channel], with channels that fill up blocks and tiles.

use std::ops::Range;
use std::sync::Arc;

use ash::vk;
use half::{bf16, f16};

use super::driver::{Context, DeviceBlock, VulkanQueue};
use super::host_memory::HostMemory;
use super::launch::WeightAddresses;
use super::sizes::{self, K_BLOCK, VulkanSizes, WeightLayout, channel_stride, padded_outputs};
use crate::backend::Precision;
use crate::backend::gpu::HostBlock;
use crate::error::{Error, Result};
use crate::ir::{ConvLayout, ConvSource, Prologue, WeightBlock, WeightPart};

/// Input channels of a part.
const PART_CHANNELS: u64 = 64;

/// Memory for the weights of a network, or for some of them.
#[derive(Clone)]
pub enum WeightStore {
    Device(Arc<DeviceBlock>),
    Host(Arc<HostMemory>),
}

/// What a thread that writes weights keeps: packed weights, and their way to the device.
#[derive(Default)]
pub struct PackBuffers {
    packed: Vec<u8>,
    staging: Option<(VulkanQueue, HostMemory)>,
}

/// The weights of one convolution, packed.
pub struct PreparedConv {
    store: WeightStore,
    /// Where in the store they begin.
    offset: u64,
    sizes: VulkanSizes,
    conv: ConvLayout,
    layout: WeightLayout,
    order: WeightOrder,
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
    /// The parts are to be written.
    pub fn new(
        store: &WeightStore,
        offset: u64,
        sizes: VulkanSizes,
        order: WeightOrder,
        layout: &ConvLayout,
    ) -> PreparedConv {
        PreparedConv { store: store.clone(), offset, sizes, conv: *layout, layout: sizes.weight_layout(layout), order }
    }

    /// Returns when the part is where it belongs.
    pub fn write(
        &self,
        context: &Arc<Context>,
        part: &WeightPart,
        source: &mut dyn ConvSource,
        buffers: &mut PackBuffers,
    ) -> Result<()> {
        match part {
            WeightPart::Vectors => self.write_vectors(context, source, buffers),
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
        let (conv, element, padded) = (&self.conv, self.sizes.element() as usize, padded_outputs(&self.conv) as usize);
        let inputs = if block.shortcut { conv.shortcut.unwrap_or(0) } else { conv.cin };
        let all_rows = channel_stride(inputs).next_multiple_of(K_BLOCK);
        // The last block has the rows that fill up.
        let rows = if block.inputs.end == inputs { all_rows - block.inputs.start } else { block.rows() };
        let (row_bytes, taps) = ((padded * element) as u64, block.taps(conv));
        let (columns, precision) = (block.columns() as usize, self.sizes.precision);
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
            let runs: Vec<(u64, u64)> = (0..taps).map(|tap| (place(tap), rows * row_bytes)).collect();
            self.put(context, buffers, &runs)
        })
    }

    fn write_vectors(
        &self,
        context: &Arc<Context>,
        source: &mut dyn ConvSource,
        buffers: &mut PackBuffers,
    ) -> Result<()> {
        let conv = &self.conv;
        let (cout, padded) = (conv.cout as usize, padded_outputs(conv) as usize);
        let mut biases = vec![0.0; (conv.biases * conv.bias_elements()) as usize];
        source.biases(&mut biases)?;
        let mut floats = vec![0.0; (conv.biases * sizes::bias_rows(conv)) as usize * padded];
        floats
            .chunks_exact_mut(padded)
            .zip(biases.chunks_exact(cout))
            .for_each(|(to, from)| to[..cout].copy_from_slice(from));
        if conv.prologue != Prologue::None {
            let (cin, padded) = (conv.cin as usize, channel_stride(conv.cin) as usize);
            let (mut gamma, mut beta) = (vec![0.0; padded], vec![0.0; padded]);
            source.norm(&mut gamma[..cin], &mut beta[..cin])?;
            floats.extend(gamma.into_iter().chain(beta));
        }
        buffers.packed.clear();
        buffers.packed.extend(floats.iter().flat_map(|value| value.to_ne_bytes()));
        self.put(context, buffers, &[(self.layout.bias, buffers.packed.len() as u64)])
    }

    /// Copies what is packed: runs that lie one after the other, each to its place. Waits.
    fn put(&self, context: &Arc<Context>, buffers: &mut PackBuffers, runs: &[(u64, u64)]) -> Result<()> {
        let PackBuffers { packed, staging } = buffers;
        let mut from = 0;
        let placed = runs.iter().map(|(to, bytes)| {
            let start = from;
            from += bytes;
            vk::BufferCopy { src_offset: start, dst_offset: self.offset + to, size: *bytes }
        });
        let placed: Vec<vk::BufferCopy> = placed.collect();
        match &self.store {
            WeightStore::Host(memory) => placed.iter().try_for_each(|run| {
                let to = memory.at(run.dst_offset, run.size)?;
                let from = &packed[run.src_offset as usize..][..run.size as usize];
                // SAFETY: both are that long, and nobody else knows this part of the store yet.
                unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) };
                Ok(())
            }),
            WeightStore::Device(block) => {
                placed.iter().try_for_each(|run| block.check_region(run.dst_offset, run.size))?;
                let bytes = packed.len() as u64;
                if staging.as_ref().is_none_or(|(_, memory)| memory.memory().bytes < bytes) {
                    *staging = Some((VulkanQueue::new(context)?, HostMemory::new(context, bytes)?));
                }
                let Some((queue, memory)) = staging else { return Ok(()) };
                let to = memory.at(0, bytes)?;
                // SAFETY: that long, and the last copy from it was waited for.
                unsafe { std::ptr::copy_nonoverlapping(packed.as_ptr(), to, packed.len()) };
                // SAFETY: the regions were checked; both buffers live until the copy was waited for.
                unsafe { queue.copy(memory.memory().buffer(), block.buffer(), &placed)? };
                queue.synchronise()
            }
        }
    }

    /// Where in host memory the first `slabs` slabs are, and everything after the slabs.
    pub fn offloaded(&self, slabs: u64) -> Result<(&HostMemory, [Range<u64>; 2])> {
        let WeightStore::Host(memory) = &self.store else {
            return Err(Error::Internal("weights are fetched that are resident".into()));
        };
        let part = |from: u64, to: u64| self.offset + from..self.offset + to;
        Ok((memory, [part(0, slabs * self.layout.slab_bytes), part(self.layout.shortcut, self.layout.end)]))
    }

    /// Resident weights.
    pub fn addresses(&self) -> Result<WeightAddresses> {
        let WeightStore::Device(block) = &self.store else {
            return Err(Error::Internal("weights are needed that were not fetched".into()));
        };
        block.check_alive()?;
        Ok(self.addresses_at(block.at(self.offset, self.layout.end)?, 0))
    }

    /// Weights whose [`PreparedConv::offloaded`] parts lie one after the other at an address.
    pub fn fetched(&self, slabs: u64, address: u64) -> WeightAddresses {
        self.addresses_at(address, self.layout.shortcut - slabs * self.layout.slab_bytes)
    }

    /// `omitted`: bytes of slabs that are not there.
    fn addresses_at(&self, address: u64, omitted: u64) -> WeightAddresses {
        let WeightLayout { shortcut, bias, gamma, beta, .. } = self.layout;
        let [shortcut, bias, gamma, beta] = [shortcut, bias, gamma, beta].map(|offset| address + offset - omitted);
        WeightAddresses { slabs: address, shortcut, bias, gamma, beta }
    }
}
