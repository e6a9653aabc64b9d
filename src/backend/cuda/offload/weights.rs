//! The weights of a network: resident, or offloaded to host memory until a layer needs them.

use std::sync::Arc;

use half::{bf16, f16};

use super::pack::{self, PackedElement};
use crate::backend::Precision;
use crate::backend::cuda::driver::{CudaStream, DeviceBlock, PinnedMemory};
use crate::backend::cuda::launch::tiling::ConvKernel;
use crate::backend::cuda::launch::{CudaSizes, WeightLayout, WeightPointers};
use crate::error::{Error, Result};
use crate::ir::{ConvLayout, ConvSource, PAIR_SLABS, Window};
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
    layout: WeightLayout,
}

impl PreparedConv {
    pub fn prepare(
        store: &WeightStore,
        offset: u64,
        stream: &CudaStream,
        sizes: CudaSizes,
        layout: &ConvLayout,
        source: &mut dyn ConvSource,
    ) -> Result<PreparedConv> {
        let conv = PreparedConv { store: store.clone(), offset, layout: sizes.weight_layout(layout) };
        match sizes.precision {
            Precision::Fp16 => conv.write::<f16>(stream, layout, source)?,
            Precision::Bf16 => conv.write::<bf16>(stream, layout, source)?,
            Precision::Fp32 => conv.write::<f32>(stream, layout, source)?,
        }
        Ok(conv)
    }

    fn write<E: PackedElement>(
        &self,
        stream: &CudaStream,
        layout: &ConvLayout,
        source: &mut dyn ConvSource,
    ) -> Result<()> {
        let (kernel, offsets) = (ConvKernel::of(layout)?, &self.layout);
        let largest = (0..layout.slab_count()).map(|slab| layout.slab_elements(slab)).max().unwrap_or(0);
        let mut plain = reserve::filled("weights", 0.0, largest as usize)?;
        let mut pair: Vec<E> = Vec::new();
        for slab in 0..layout.slab_count() {
            source.slab(slab, &mut plain[..layout.slab_elements(slab) as usize])?;
            let plain = &plain[..layout.slab_elements(slab) as usize];
            let shortcut = slab == layout.slabs;
            // Two and two lie side by side.
            if layout.pairs && slab < u64::from(PAIR_SLABS) {
                if slab % 2 == 0 {
                    pair =
                        reserve::filled("packed weights", E::ZERO, 2 * offsets.slab_bytes as usize / size_of::<E>())?;
                }
                pack::pair_slab((layout.cin, layout.cout), slab % 2 == 1, plain, &mut pair);
                if slab % 2 == 1 {
                    self.put(stream, (slab - 1) * offsets.slab_bytes, &pair)?;
                }
                continue;
            }
            let packed: Vec<E> = match kernel {
                ConvKernel::In => pack::conv_in(layout, plain),
                ConvKernel::Out => pack::conv_out(layout, plain),
                ConvKernel::Main if shortcut => {
                    pack::main(Window::Point, layout.shortcut.unwrap_or(0), layout.cout, plain)?
                }
                ConvKernel::Main => pack::main(layout.window, layout.cin, layout.cout, plain)?,
            };
            self.put(stream, if shortcut { offsets.shortcut } else { slab * offsets.slab_bytes }, &packed)?;
        }
        self.put(stream, offsets.bias, &pack::biases(layout, source))?;
        if offsets.beta > offsets.gamma {
            let padded = layout.cin.next_multiple_of(64) as usize;
            let (mut gamma, mut beta) = (vec![0.0f32; padded], vec![0.0f32; padded]);
            let cin = layout.cin as usize;
            source.norm(&mut gamma[..cin], &mut beta[..cin]);
            self.put(stream, offsets.gamma, &gamma)?;
            self.put(stream, offsets.beta, &beta)?;
        }
        Ok(())
    }

    fn put<T: Copy>(&self, stream: &CudaStream, offset: u64, from: &[T]) -> Result<()> {
        match &self.store {
            WeightStore::Device(block) => block.write(stream, self.offset + offset, from),
            WeightStore::Host(memory) => {
                let bytes = size_of_val(from);
                let to = memory.at(self.offset + offset, bytes as u64)?;
                // SAFETY: both are that long, and nobody else knows this part of the store yet.
                unsafe { std::ptr::copy_nonoverlapping(from.as_ptr().cast(), to, bytes) };
                Ok(())
            }
        }
    }

    /// The first `slabs` slabs, and everything after the slabs, in host memory.
    pub fn offloaded(&self, slabs: u64) -> Result<[&[u8]; 2]> {
        let WeightStore::Host(memory) = &self.store else {
            return Err(Error::Internal("weights are fetched that are resident".into()));
        };
        let part = |from: u64, to: u64| -> Result<&[u8]> {
            let address = memory.at(self.offset + from, to - from)?;
            // SAFETY: that long, and not written any more once it is prepared.
            Ok(unsafe { std::slice::from_raw_parts(address, (to - from) as usize) })
        };
        Ok([part(0, slabs * self.layout.slab_bytes)?, part(self.layout.shortcut, self.layout.end)?])
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
