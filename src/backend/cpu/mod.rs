//! The CPU: f32 on the vectors that the processor has.
//!
//! [`conv`] is where the time goes; its passes ([`pass`]) read bands ([`band`]) and weights ([`pack`]) with the kernels
//! ([`kernel`]) of an instruction set ([`simd`]), most of them in pairs of pixels ([`pairs`]), and finish rows with
//! [`norm`]. Large memory comes from [`memory`] and nowhere else.

mod attention;
mod band;
mod conv;
mod geometry;
mod kernel;
mod memory;
mod noise;
mod norm;
mod pack;
mod pairs;
mod pass;
mod pixels;
mod pool;
mod simd;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use memory::{AllocFn, FreeFn, HostAllocator, HostCallbacks, Memory};
pub use pack::Conv;

use super::{
    AttentionOp, Backend, BandedOp, BlendOp, ConvLayout, ConvOp, ConvSource, HostMemory, HostStream, Kept, LoadOp,
    NormOp, Precision, Stop, StoreOp,
};
use crate::error::{Error, Result};
use crate::tensor::{BandFrames, FrameShape, Rates};
use pool::Pool;

/// Which vectors to compute with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Instructions {
    /// The widest the processor has.
    #[default]
    Auto,
    Avx512,
    Avx2,
    Portable,
}

impl Instructions {
    /// Every instruction set that this processor has, the widest first.
    pub fn available() -> Vec<Instructions> {
        let all = [Instructions::Avx512, Instructions::Avx2, Instructions::Portable];
        all.into_iter().filter(|set| set.lacking().is_empty()).collect()
    }

    /// What the processor lacks for this set.
    #[cfg(target_arch = "x86_64")]
    fn lacking(self) -> Vec<&'static str> {
        let needs: &[(&str, bool)] = match self {
            Instructions::Auto | Instructions::Portable => &[],
            Instructions::Avx2 => {
                &[("AVX2", is_x86_feature_detected!("avx2")), ("FMA", is_x86_feature_detected!("fma"))]
            }
            Instructions::Avx512 => &[
                ("AVX-512F", is_x86_feature_detected!("avx512f")),
                ("AVX2", is_x86_feature_detected!("avx2")),
                ("FMA", is_x86_feature_detected!("fma")),
            ],
        };
        needs.iter().filter(|(_, has)| !has).map(|(name, _)| *name).collect()
    }

    /// What the processor lacks for this set.
    #[cfg(not(target_arch = "x86_64"))]
    fn lacking(self) -> Vec<&'static str> {
        match self {
            Instructions::Auto | Instructions::Portable => Vec::new(),
            Instructions::Avx2 | Instructions::Avx512 => vec!["the x86-64 architecture"],
        }
    }
}

#[derive(Debug, Clone, Default)]
pub struct CpuOptions {
    /// Threads that compute, the caller's among them; as many as the machine has cores unless given.
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
        let lacking = options.instructions.lacking();
        if !lacking.is_empty() {
            return Err(Error::Device(format!(
                "instructions {:?}: this processor lacks {}; leave the choice to us",
                options.instructions,
                lacking.join(" and ")
            )));
        }
        let instructions = match options.instructions {
            Instructions::Auto => Instructions::available()[0],
            given => given,
        };
        let threads = match options.threads {
            Some(0) => return Err(Error::Argument("threads is 0; at least one has to compute".into())),
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

/// Runs `$body` with `$simd` naming the type of an instruction set that the processor has.
macro_rules! with_simd {
    ($instructions:expr, $simd:ident => $body:expr) => {
        match $instructions {
            #[cfg(target_arch = "x86_64")]
            $crate::backend::cpu::Instructions::Avx512 => {
                type $simd = $crate::backend::cpu::x86::Avx512;
                $body
            }
            #[cfg(target_arch = "x86_64")]
            $crate::backend::cpu::Instructions::Avx2 => {
                type $simd = $crate::backend::cpu::x86::Avx2;
                $body
            }
            _ => {
                type $simd = $crate::backend::cpu::simd::Portable;
                $body
            }
        }
    };
}
#[cfg(test)]
use with_simd;

impl Backend for Cpu {
    const HOST_MEMORY: bool = true;

    type Memory = Memory;
    type Store = ();
    type Conv = Conv;

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
        conv::scratch(layout, input, frames, self.threads())
    }

    fn attention_scratch(&self, shape: FrameShape, frames: u64) -> u64 {
        attention::scratch(shape, frames, self.threads())
    }

    fn weight_bytes(&self, layout: &ConvLayout) -> u64 {
        pack::bytes(layout)
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
        // Multiplications a second and core: with AVX-512 as measured on a Xeon, the others guessed from their width.
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

    fn allocate(&self, bytes: u64, _: HostMemory) -> Result<Memory> {
        Ok(Memory { block: self.allocator.block(bytes)? })
    }

    fn begin(&self, _: &mut Memory, _: Option<HostStream>) -> Result<()> {
        Ok(())
    }

    fn finish(&self, _: &mut Memory, _: Option<HostStream>) -> Result<()> {
        Ok(())
    }

    fn allocate_weights(&self, _: u64) -> Result<()> {
        Ok(())
    }

    fn prepare(&self, (): &(), _: u64, layout: &ConvLayout, source: &mut dyn ConvSource) -> Result<Conv> {
        Conv::prepare(layout, source, &self.allocator)
    }

    fn load(&self, memory: &mut Memory, op: &LoadOp, stop: &mut Stop) -> Result<()> {
        pixels::load(&self.pool, memory, op, stop)
    }

    fn fuses_norm(&self, _: &ConvLayout) -> bool {
        true
    }

    fn normalise(&self, _: &mut Memory, _: &Conv, op: &NormOp, _: &mut Stop) -> Result<()> {
        Err(Error::Internal(format!("a norm on its own was asked for, but {:?} is fused", op.layout)))
    }

    fn adds_in_place(&self) -> bool {
        false
    }

    fn banded(&self, _: &mut Memory, op: &BandedOp<Conv>, _: &mut Stop) -> Result<()> {
        Err(Error::Internal(format!("{:?} was asked for in bands, but this device has nothing to move", op.layout)))
    }

    fn conv(&self, memory: &mut Memory, weights: &Conv, op: &ConvOp, stop: &mut Stop) -> Result<()> {
        if !op.sums.is_none() {
            return Err(Error::Internal("this device takes no sums along".into()));
        }
        with_simd!(self.instructions, S => conv::run::<S>(&self.pool, memory, weights, op, stop))
    }

    fn attention(&self, memory: &mut Memory, op: &AttentionOp, stop: &mut Stop) -> Result<()> {
        with_simd!(self.instructions, S => attention::run::<S>(&self.pool, memory, op, stop))
    }

    fn blend(&self, memory: &mut Memory, op: &BlendOp, stop: &mut Stop) -> Result<()> {
        pixels::blend(&self.pool, memory, op, stop)
    }

    fn store(&self, memory: &mut Memory, op: &StoreOp, stop: &mut Stop) -> Result<()> {
        pixels::store(&self.pool, memory, op, stop)
    }

    fn read(&self, memory: &mut Memory, from: Kept, into: &mut [u8]) -> Result<()> {
        memory.read(from, into)
    }

    fn write(&self, memory: &mut Memory, to: Kept, from: &[u8]) -> Result<()> {
        memory.write(to, from)
    }
}
