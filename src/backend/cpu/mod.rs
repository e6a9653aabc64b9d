//! The CPU backend: f32 or bf16 on the processor's vectors and tiles, and a pool of threads.
//! May touch host memory through [`memory`] only. Must not know models, plans or clips.

mod attention;
mod attention_bf16;
mod conv;
mod element;
mod level;
mod memory;
mod noise;
mod norm;
mod pixels;
mod simd;
#[cfg(test)]
mod tests;

pub use conv::ConvWeights;
pub use memory::CpuMemory;
pub use simd::Instructions;

use std::sync::Arc;

use super::{
    DeviceFacts, Diagnosis, Execution, HostAllocator, JobAllocation, NonFinite, Note, Precision, Residency, RunArgs,
    Stop, WeightStorage,
};
use crate::error::{Error, Result};
use crate::ir::{
    BandPart, BandShape, BlendTile, Buffers, ConvLayout, ConvOp, ConvProducts, ConvSource, DeviceProfile, FrameShape,
    LoadTensor, Offsets, Op, PairCosts, PartialSumsSize, PinnedBytes, Rates, Sizes, StoreTensor, WeightPart,
};
use crate::thread_pool::Pool;
use element::with_element;
use simd::{with_bf16_simd, with_simd};

/// In the Winograd domain, where products take nearly all the time: two a frame together, three alone.
const PAIR_COSTS: PairCosts = PairCosts { together: 1.0, alone: 1.5 };
/// In bf16, where sums and differences of frames take their time beside the products: as measured with AMX.
const BF16_PAIR_COSTS: PairCosts = PairCosts { together: 1.2, alone: 1.7 };

/// Products that take as long as an element of a convolution takes to be normalised, transformed and packed, or summed
/// and written. With the rates of [`Cpu::profile`], fitted to eight jobs on two cores of a Xeon: within 21 % of each.
fn element_products(precision: Precision) -> f64 {
    if precision == Precision::Bf16 { 620.0 } else { 54.0 }
}

#[derive(Debug, Clone, Default)]
pub struct CpuOptions {
    /// Threads that compute, including the caller's; by default one per core.
    pub threads: Option<usize>,
    pub instructions: Instructions,
    /// Of activations and weights: f32 by default, or bf16.
    pub precision: Option<Precision>,
    pub allocator: HostAllocator,
}

pub struct Cpu {
    pool: Arc<Pool>,
    precision: Precision,
    /// Never `Auto`.
    instructions: Instructions,
    /// `Auto` would be AMX, but for the system.
    lacks_permission: bool,
    allocator: HostAllocator,
}

impl Cpu {
    pub fn new(options: CpuOptions) -> Result<Cpu> {
        let precision = options.precision.unwrap_or(Precision::Fp32);
        if precision == Precision::Fp16 {
            let text = "precision: fp16 needs a GPU; device \"cpu\" computes in fp32 or bf16: use one of them or auto";
            return Err(Error::Argument(text.into()));
        }
        let instructions = match options.instructions {
            Instructions::Auto => Instructions::available(precision)[0],
            given => given,
        };
        let missing = instructions.missing_features();
        if !missing.is_empty() {
            return Err(Error::Device(format!(
                "instructions {instructions:?}: this processor lacks {}; use auto",
                missing.join(" and ")
            )));
        }
        if !instructions.computes(precision) {
            return Err(Error::Argument(format!(
                "instruction_set: {instructions:?} computes in bf16 only, and precision is {}; use auto, or bf16",
                precision.name()
            )));
        }
        let threads = match options.threads {
            Some(0) => return Err(Error::Argument("threads is 0; at least 1 is needed".into())),
            Some(given) => given,
            None => std::thread::available_parallelism().map_or(1, usize::from),
        };
        let lacks_permission =
            options.instructions == Instructions::Auto && precision == Precision::Bf16 && simd::lacks_permission();
        Ok(Cpu { pool: Pool::of(threads), precision, instructions, lacks_permission, allocator: options.allocator })
    }

    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// The instruction set in use.
    pub fn instructions(&self) -> Instructions {
        self.instructions
    }
}

impl Sizes for Cpu {
    fn frame_bytes(&self, shape: FrameShape, groups: u64) -> u64 {
        (element::pixel_bytes(self.precision, shape) + groups * 8).next_multiple_of(memory::ALIGN)
    }

    fn u8_frame_bytes(&self, _: FrameShape) -> Option<u64> {
        None
    }

    fn weight_bytes(&self, layout: &ConvLayout) -> u64 {
        conv::packed_bytes(layout, self.precision)
    }

    fn conv_scratch(&self, layout: &ConvLayout, input: FrameShape, frames: u64) -> u64 {
        conv::scratch_bytes(layout, input, self.precision, frames, self.threads())
    }

    fn attention_scratch(&self, shape: FrameShape, frames: u64) -> u64 {
        match self.precision {
            Precision::Bf16 => attention_bf16::scratch_bytes(shape, self.threads()),
            _ => attention::scratch_bytes(shape, frames, self.threads()),
        }
    }

    fn band_bytes(&self, _: &BandShape, _: &[BandPart], _: u64) -> Option<u64> {
        None
    }

    fn normalises_itself(&self, _: &ConvLayout) -> bool {
        false
    }

    fn partial_sums(&self, _: &ConvLayout, _: FrameShape, _: u64) -> Option<PartialSumsSize> {
        None
    }

    fn staging_bytes(&self, _: FrameShape) -> u64 {
        0
    }

    fn fade_bytes(&self, _: FrameShape) -> u64 {
        0
    }

    fn least_band_offset(&self, _: FrameShape) -> u64 {
        0
    }

    fn effective_products(&self, layout: &ConvLayout, work: ConvProducts) -> f64 {
        let share = conv::product_share(layout, self.precision, work.starts_clip);
        work.products * share + work.elements * element_products(self.precision)
    }

    fn block_bytes(&self, bytes: u64) -> u64 {
        bytes
    }

    fn mapping_bytes(&self, _: u64) -> u64 {
        0
    }
}

impl Cpu {
    fn conv(
        &self,
        memory: &mut CpuMemory,
        op: &ConvOp<Offsets>,
        args: &RunArgs<ConvWeights>,
        stop: &mut Stop,
    ) -> Result<()> {
        if !op.partial_sums.is_none() || op.weights.is_some() {
            return Err(not_planned("partial sums, or offloaded weights"));
        }
        let compute: fn(&conv::AreaTask, &mut Stop) = match self.precision {
            Precision::Bf16 => with_bf16_simd!(self.instructions, S => conv::compute_bf16::<S>),
            _ => with_simd!(self.instructions, S => conv::compute_f32::<S>),
        };
        conv::run(&self.pool, memory, op, args, stop, &compute)
    }
}

fn not_planned(what: &str) -> Error {
    Error::Internal(format!("{what}: the profile of this device rules it out"))
}

impl DeviceFacts for Cpu {
    const HOST_MEMORY: bool = true;

    fn precision(&self) -> Precision {
        self.precision
    }

    fn arithmetic(&self) -> String {
        format!("CPU with {:?}", self.instructions)
    }

    fn notes(&self) -> Vec<Note> {
        let note = |is_warning, text: &str| vec![Note { is_warning, text: format!("instruction_set: {text}") }];
        if self.lacks_permission {
            return note(
                true,
                "the system does not permit AMX, perhaps as a thread has a small signal stack; results have other bits \
                 than with AMX. Create the handle before signal stacks are set, or set it to avx512bf16",
            );
        }
        match self.instructions {
            Instructions::Amx => note(
                false,
                "AMX is used. The system permits it to the whole process, for good, and refuses signal stacks \
                 (sigaltstack) that are too small for it from then on; avx512bf16 does without",
            ),
            _ => Vec::new(),
        }
    }

    fn profile(&self) -> DeviceProfile {
        // Multiplications per second and core: AMX and AVX-512 measured on a Xeon, the others by their width.
        let products = match self.instructions {
            Instructions::Amx => 1050e9,
            Instructions::Avx512Bf16 | Instructions::Avx512 => 62e9,
            Instructions::Avx2 => 35e9,
            Instructions::NeonBf16 => 70e9,
            Instructions::Neon => 17e9,
            Instructions::Auto | Instructions::Portable => 4e9,
        };
        let memory = 20e9;
        DeviceProfile {
            rates: Rates { products: products * self.threads() as f64, memory, copies: memory, copy_contention: 0.0 },
            // In bf16 the frames of a chunk share patches, and a few of them each read of weights.
            busy_pixels: if self.precision == Precision::Bf16 { 1 << 16 } else { 1 << 14 },
            chunk_frames: 8,
            column_step: 1,
            fuses_norm: true,
            pairs: Some(if self.precision == Precision::Bf16 { BF16_PAIR_COSTS } else { PAIR_COSTS }),
            upsampler_pairs: false,
            attention_cost: 1.0,
            adds_in_place: false,
            offloads: false,
        }
    }

    fn sizes(&self) -> &dyn Sizes {
        self
    }

    fn pool(&self) -> Option<&Arc<Pool>> {
        Some(&self.pool)
    }

    fn free_bytes(&self) -> u64 {
        super::device::host_memory().available
    }
}

impl JobAllocation for Cpu {
    type Memory = CpuMemory;

    fn allocate(&self, bytes: u64, _: PinnedBytes) -> Result<CpuMemory> {
        Ok(CpuMemory { block: self.allocator.block(bytes)?, nonfinite: NonFinite::default() })
    }
}

impl Diagnosis for Cpu {
    fn take_nonfinite(&self, memory: &mut CpuMemory) -> NonFinite {
        std::mem::take(&mut memory.nonfinite)
    }
}

impl WeightStorage for Cpu {
    type Store = ();
    type Conv = ConvWeights;
    type PackBuffers = ();

    fn allocate_weights(&self, _: u64, _: Residency) -> Result<()> {
        Ok(())
    }

    fn allocate_conv(&self, (): &(), _: u64, layout: &ConvLayout) -> Result<ConvWeights> {
        ConvWeights::allocate(layout, self.precision, &self.allocator)
    }

    fn weight_parts(&self, layout: &ConvLayout) -> Vec<WeightPart> {
        conv::parts(layout)
    }

    fn write_part(
        &self,
        conv: &ConvWeights,
        part: &WeightPart,
        source: &mut dyn ConvSource,
        (): &mut (),
    ) -> Result<()> {
        conv.write(part, source)
    }
}

impl Execution for Cpu {
    fn run(
        &self,
        memory: &mut CpuMemory,
        op: &Op<Offsets>,
        args: &RunArgs<ConvWeights>,
        stop: &mut Stop,
    ) -> Result<()> {
        match op {
            Op::Conv(op) => self.conv(memory, op, args, stop),
            Op::Attention(op) => {
                let scratch = args.buffers.scratch;
                match self.precision {
                    Precision::Bf16 => with_bf16_simd!(
                        self.instructions,
                        S => attention_bf16::run::<S>(&self.pool, memory, op, scratch, stop)
                    ),
                    _ => with_simd!(
                        self.instructions,
                        S => attention::run::<S>(&self.pool, memory, op, scratch, stop)
                    ),
                }
            }
            Op::Pool(op) => with_element!(self.precision, E => level::pool::<E>(&self.pool, memory, op, stop)),
            Op::Add(op) => with_element!(self.precision, E => level::add::<E>(&self.pool, memory, op, stop)),
            Op::Normalise(_) => Err(not_planned("a norm of its own")),
            Op::BandedConv(_) => Err(not_planned("a banded convolution")),
            Op::Fetch(_) => Err(not_planned("offloaded weights")),
            Op::Load(_) | Op::Blend(_) | Op::Store(_) => Err(not_planned("an operation on host tensors")),
        }
    }

    fn load(&self, memory: &mut CpuMemory, op: &LoadTensor, _: &Buffers, stop: &mut Stop) -> Result<()> {
        with_element!(self.precision, E => pixels::load::<E>(&self.pool, memory, op, stop))
    }

    fn blend(&self, memory: &mut CpuMemory, op: &BlendTile, _: &Buffers) -> Result<()> {
        with_element!(self.precision, E => pixels::blend::<E>(&self.pool, memory, op, &mut || false))
    }

    fn store(&self, memory: &mut CpuMemory, op: &StoreTensor, _: &Buffers) -> Result<()> {
        with_element!(self.precision, E => pixels::store::<E>(&self.pool, memory, op, &mut || false))
    }
}
