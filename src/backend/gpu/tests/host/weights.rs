//! Weights as plain floats, slab after slab, so that fetching some slabs is a copy of bytes.

use std::ops::Range;

use super::memory::SharedBytes;
use super::{ALIGN, HostGpu};
use crate::backend::cpu::{ConvWeights, Cpu};
use crate::backend::gpu::GpuConv;
use crate::error::{Error, Result};
use crate::ir::{ConvLayout, ConvSource, DeviceOffset, Prologue, WeightPart};
use crate::testing::{SlabSource, prepare};

/// Weights on the device: as many slabs as are there, then the shortcut and the vectors.
#[derive(Clone)]
pub struct PlainWeights {
    memory: SharedBytes,
    offset: u64,
    layout: ConvLayout,
    slabs: u64,
}

/// The prepared weights of a convolution.
pub struct PlainConv {
    pub is_resident: bool,
    pub memory: SharedBytes,
    pub offset: u64,
    pub layout: ConvLayout,
}

/// Elements of each part: a slab, the shortcut, all biases, and weight and bias of the norm.
struct Elements {
    slab: u64,
    shortcut: u64,
    biases: u64,
    norm: u64,
}

fn elements(layout: &ConvLayout) -> Elements {
    Elements {
        slab: layout.window.taps() * layout.cin * layout.cout,
        shortcut: layout.shortcut.unwrap_or(0) * layout.cout,
        biases: layout.biases * layout.bias_elements(),
        norm: if layout.prologue == Prologue::None { 0 } else { layout.cin },
    }
}

/// Bytes of the weights with so many slabs.
fn bytes(layout: &ConvLayout, slabs: u64) -> u64 {
    let Elements { slab, shortcut, biases, norm } = elements(layout);
    4 * (slabs * slab + shortcut + biases + 2 * norm)
}

pub fn weight_bytes(layout: &ConvLayout) -> u64 {
    bytes(layout, layout.slabs).next_multiple_of(ALIGN)
}

impl PlainConv {
    pub fn write(&self, part: &WeightPart, source: &mut dyn ConvSource) -> Result<()> {
        let Elements { slab, shortcut, biases, norm } = elements(&self.layout);
        match part {
            WeightPart::Block(block) => source.block(block, &mut |number, values| {
                self.memory.write_floats(self.offset + 4 * number * slab, values);
                Ok(())
            }),
            WeightPart::Vectors => {
                let mut vectors = vec![0.0; (biases + 2 * norm) as usize];
                let (all, norms) = vectors.split_at_mut(biases as usize);
                source.biases(all)?;
                let (gamma, beta) = norms.split_at_mut(norm as usize);
                if norm > 0 {
                    source.norm(gamma, beta)?;
                }
                self.memory.write_floats(self.offset + 4 * (self.layout.slabs * slab + shortcut), &vectors);
                Ok(())
            }
        }
    }
}

impl GpuConv<HostGpu> for PlainConv {
    fn resident(&self) -> Result<PlainWeights> {
        let (memory, slabs) = (self.memory.clone(), self.layout.slabs);
        let found =
            self.is_resident.then_some(PlainWeights { memory, offset: self.offset, layout: self.layout, slabs });
        found.ok_or_else(|| Error::Internal("weights are needed that were not fetched".into()))
    }

    fn offloaded(&self, slabs: u64) -> Result<(&SharedBytes, [Range<u64>; 2])> {
        let slab = 4 * elements(&self.layout).slab;
        let [fetched, all] = [slabs, self.layout.slabs].map(|slabs| self.offset + slabs * slab);
        Ok((&self.memory, [self.offset..fetched, all..self.offset + bytes(&self.layout, self.layout.slabs)]))
    }

    fn fetched(&self, block: &SharedBytes, slabs: u64, at: DeviceOffset) -> PlainWeights {
        PlainWeights { memory: block.clone(), offset: at.0, layout: self.layout, slabs }
    }
}

impl PlainWeights {
    /// Weight and bias of the norm, as they are now.
    pub fn norm(&self) -> [Vec<f32>; 2] {
        let Elements { slab, shortcut, biases, norm } = elements(&self.layout);
        let gamma = self.offset + 4 * (self.slabs * slab + shortcut + biases);
        [gamma, gamma + 4 * norm].map(|at| self.memory.floats(at, norm))
    }

    /// In the form of the CPU's kernels, for inputs that are normalised already. As they are now.
    pub fn packed(&self, cpu: &Cpu) -> ConvWeights {
        let layout = ConvLayout { prologue: Prologue::None, ..self.layout };
        prepare(cpu, (&(), 0), &layout, &mut self.clone()).expect("the CPU has room for small weights")
    }
}

impl SlabSource for PlainWeights {
    /// Slabs that were not fetched are NaN.
    fn slab(&mut self, slab: u64, into: &mut [f32]) {
        let own = elements(&self.layout).slab;
        let place = if slab == self.layout.slabs { Some(self.slabs) } else { (slab < self.slabs).then_some(slab) };
        match place {
            Some(place) => {
                into.copy_from_slice(&self.memory.floats(self.offset + 4 * place * own, into.len() as u64));
            }
            None => into.fill(f32::NAN),
        }
    }

    fn bias(&mut self, bias: u64, into: &mut [f32]) {
        let Elements { slab, shortcut, .. } = elements(&self.layout);
        let first = self.slabs * slab + shortcut + bias * into.len() as u64;
        into.copy_from_slice(&self.memory.floats(self.offset + 4 * first, into.len() as u64));
    }

    fn norm(&mut self, _: &mut [f32], _: &mut [f32]) {}
}
