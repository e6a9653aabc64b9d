//! The CPU backend: f32 on the processor's vectors, and a pool of threads.
//! May touch host memory through [`memory`] only. Must not know models, plans or clips.

mod attention;
mod conv;
mod memory;
mod noise;
mod norm;
mod pixels;
mod pool;
mod simd;
#[cfg(test)]
mod tests;

pub use conv::ConvWeights;
pub use memory::{AllocFn, CpuMemory, FreeFn, HostAllocator, HostCallbacks};
pub use simd::Instructions;

use super::{
    AttentionOp, Backend, BandedOp, BlendOp, ConvLayout, ConvOp, ConvSource, HostMemory, HostStream, Kept, LoadOp,
    NormOp, Precision, Stop, StoreOp,
};
use crate::error::{Error, Result};
use crate::tensor::{BandFrames, FrameShape, Rates};
use pool::Pool;
use simd::with_simd;

#[derive(Debug, Clone, Default)]
pub struct CpuOptions {
    /// Threads that compute, including the caller's; by default one per core.
    pub threads: Option<usize>,
    pub instructions: Instructions,
    pub allocator: HostAllocator,
}

pub struct Cpu {
    pool: Pool,
    /// Never `Auto`.
    instructions: Instructions,
    allocator: HostAllocator,
}

impl Cpu {
    pub fn new(options: CpuOptions) -> Result<Cpu> {
        let missing = options.instructions.missing_features();
        if !missing.is_empty() {
            return Err(Error::Device(format!(
                "instructions {:?}: this processor lacks {}; use auto",
                options.instructions,
                missing.join(" and ")
            )));
        }
        let instructions = match options.instructions {
            Instructions::Auto => Instructions::available()[0],
            given => given,
        };
        let threads = match options.threads {
            Some(0) => return Err(Error::Argument("threads is 0; at least 1 is needed".into())),
            Some(given) => given,
            None => std::thread::available_parallelism().map_or(1, usize::from),
        };
        Ok(Cpu { pool: Pool::new(threads)?, instructions, allocator: options.allocator })
    }

    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// The instruction set in use.
    pub fn instructions(&self) -> Instructions {
        self.instructions
    }

    pub fn allocator(&self) -> &HostAllocator {
        &self.allocator
    }
}

impl Backend for Cpu {
    const HOST_MEMORY: bool = true;

    type Memory = CpuMemory;
    type Store = ();
    type Conv = ConvWeights;

    fn precision(&self) -> Precision {
        Precision::Fp32
    }

    fn busy_pixels(&self) -> u64 {
        1 << 14
    }

    fn frame_bytes(&self, shape: FrameShape, groups: u64) -> u64 {
        (shape.elements() * 4 + groups * 8).next_multiple_of(memory::ALIGN)
    }

    fn conv_scratch(&self, layout: &ConvLayout, input: FrameShape, frames: u64) -> u64 {
        conv::scratch_bytes(layout, input, frames, self.threads())
    }

    fn attention_scratch(&self, shape: FrameShape, frames: u64) -> u64 {
        attention::scratch_bytes(shape, frames, self.threads())
    }

    fn weight_bytes(&self, layout: &ConvLayout) -> u64 {
        conv::packed_bytes(layout)
    }

    fn block_bytes(&self, bytes: u64) -> u64 {
        bytes
    }

    fn free_bytes(&self) -> u64 {
        super::device::host_memory().1
    }

    fn staging_bytes(&self, _: FrameShape) -> u64 {
        0
    }

    fn rates(&self) -> Rates {
        // Multiplications per second and core: AVX-512 measured on a Xeon, the others scaled by their width.
        let products = match self.instructions {
            Instructions::Avx512 => 60e9,
            Instructions::Avx2 => 35e9,
            Instructions::Auto | Instructions::Portable => 4e9,
        };
        let memory = 20e9;
        Rates { products: products * self.threads() as f64, memory, copies: memory, beside: 0.0 }
    }

    fn band_bytes(&self, _: &ConvLayout, _: FrameShape, _: BandFrames) -> Option<u64> {
        None
    }

    fn allocate(&self, bytes: u64, _: HostMemory) -> Result<CpuMemory> {
        Ok(CpuMemory { block: self.allocator.block(bytes)? })
    }

    fn begin(&self, _: &mut CpuMemory, _: Option<HostStream>) -> Result<()> {
        Ok(())
    }

    fn finish(&self, _: &mut CpuMemory, _: Option<HostStream>) -> Result<()> {
        Ok(())
    }

    fn allocate_weights(&self, _: u64) -> Result<()> {
        Ok(())
    }

    fn prepare(&self, (): &(), _: u64, layout: &ConvLayout, source: &mut dyn ConvSource) -> Result<ConvWeights> {
        ConvWeights::prepare(layout, source, &self.allocator)
    }

    fn load(&self, memory: &mut CpuMemory, op: &LoadOp, stop: &mut Stop) -> Result<()> {
        pixels::load(&self.pool, memory, op, stop)
    }

    fn fuses_norm(&self, _: &ConvLayout) -> bool {
        true
    }

    fn normalise(&self, _: &mut CpuMemory, _: &ConvWeights, op: &NormOp, _: &mut Stop) -> Result<()> {
        Err(Error::Internal(format!("normalise: this device fuses the norm of {:?} into its convolution", op.layout)))
    }

    fn adds_in_place(&self) -> bool {
        false
    }

    fn banded(&self, _: &mut CpuMemory, op: &BandedOp<ConvWeights>, _: &mut Stop) -> Result<()> {
        Err(Error::Internal(format!("banded: this device offloads nothing, so {:?} does not run in bands", op.layout)))
    }

    fn conv(&self, memory: &mut CpuMemory, weights: &ConvWeights, op: &ConvOp, stop: &mut Stop) -> Result<()> {
        if !op.sums.is_none() {
            return Err(Error::Internal("conv: this device takes no partial sums".into()));
        }
        with_simd!(self.instructions, S => conv::run::<S>(&self.pool, memory, weights, op, stop))
    }

    fn attention(&self, memory: &mut CpuMemory, op: &AttentionOp, stop: &mut Stop) -> Result<()> {
        with_simd!(self.instructions, S => attention::run::<S>(&self.pool, memory, op, stop))
    }

    fn blend(&self, memory: &mut CpuMemory, op: &BlendOp, stop: &mut Stop) -> Result<()> {
        pixels::blend(&self.pool, memory, op, stop)
    }

    fn store(&self, memory: &mut CpuMemory, op: &StoreOp, stop: &mut Stop) -> Result<()> {
        pixels::store(&self.pool, memory, op, stop)
    }

    fn read(&self, memory: &mut CpuMemory, from: Kept, into: &mut [u8]) -> Result<()> {
        memory.read(from, into)
    }

    fn write(&self, memory: &mut CpuMemory, to: Kept, from: &[u8]) -> Result<()> {
        memory.write(to, from)
    }
}
