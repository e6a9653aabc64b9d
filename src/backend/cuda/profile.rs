//! What the planner knows about a GPU. Arithmetic and memory rates follow from its properties; copies are measured.
//! With `autotune` all are, but for the copy contention.

use std::sync::Arc;
use std::time::Instant;

use cudarc::driver::sys;

use crate::backend::cuda::driver::{Context, CudaStream, DeviceBlock, Gpu, KernelArch, PinnedMemory, check};
use crate::backend::cuda::launch::tiling::{BUSY_PIXELS, CHUNK_FRAMES, COLUMN_STEP};
use crate::backend::gpu::{AddressedBlock, HostBlock, Queue};
use crate::backend::{DeviceAllocator, Precision};
use crate::error::Result;
use crate::ir::{DeviceProfile, PairCosts, Rates};

/// Of the kernels that compute pairs of frames.
fn pair_costs(precision: Precision, arch: KernelArch) -> Option<PairCosts> {
    // Of residual blocks, measured on an H200. The last upsampler takes 1.31 together, by the time of its layer.
    let wgmma = PairCosts { together: 1.15, alone: 1.95 };
    // Pairs as measured there. By count, half of the warps have nothing to do in half of the time of a frame alone.
    let mma = PairCosts { together: 1.15, alone: 2.1 };
    (precision != Precision::Fp32).then_some(if arch.has_wgmma() { wgmma } else { mma })
}

/// Of [`DeviceProfile::attention_cost`]. An H200 has 1.0 to 1.4 with `attention_wgmma`, more for smaller frames. With
/// the kernels of 8.6 it has 2.2.
fn attention_cost(precision: Precision, arch: KernelArch) -> f64 {
    if precision != Precision::Fp32 && arch.has_wgmma() { 1.2 } else { 2.2 }
}

/// The profile of any GPU with these rates and kernels. Needs no device.
pub fn device_profile(rates: Rates, precision: Precision, arch: KernelArch) -> DeviceProfile {
    let pairs = pair_costs(precision, arch);
    DeviceProfile {
        rates,
        busy_pixels: BUSY_PIXELS,
        chunk_frames: CHUNK_FRAMES,
        column_step: COLUMN_STEP,
        fuses_norm: false,
        pairs,
        upsampler_pairs: pairs.is_some(),
        attention_cost: attention_cost(precision, arch),
        adds_in_place: true,
        offloads: true,
    }
}

/// Products of 16-bit floats, summed in f32, that a multiprocessor does in a cycle with the instructions of our
/// kernels. Data-centre cards first; all others are GeForce cards and their kin.
fn products_per_cycle(arch: KernelArch) -> f64 {
    match (arch.major, arch.minor) {
        (8, 0) => 1024.0,
        (9, 0) => 2048.0,
        (10, _) => 1024.0,
        _ => 256.0,
    }
}

/// Multiplications a second that whole networks reach.
pub fn products_reached(arch: KernelArch, multiprocessors: u32, clock_hz: f64, precision: Precision) -> f64 {
    // Three tf32 products at half the rate.
    let slower = if precision == Precision::Fp32 { 6.0 } else { 1.0 };
    products_per_cycle(arch) * f64::from(multiprocessors) * clock_hz * PRODUCTS_REACHED / slower
}

/// The part of that rate that whole networks reach, norms included; measured on an H200.
const PRODUCTS_REACHED: f64 = 0.6;
/// The part of the memory's rate that passes over frames reach, likewise.
pub const MEMORY_REACHED: f64 = 0.75;
/// The part of the bus's rate that bands reach, likewise: the engine pauses between copies.
pub const COPIES_REACHED: f64 = 0.97;
/// Copy contention: what copies cost the arithmetic, as a part of their time. Measured from 0.03 to 0.1.
pub const COPY_CONTENTION: f64 = 0.06;
/// So many bytes that a copy's latency does not matter.
const PROBE_BYTES: u64 = 16 << 20;
/// Others may use the bus: the fastest of these is its rate.
const PROBES: usize = 6;

pub fn measure_rates(context: &Arc<Context>, precision: Precision) -> Result<Rates> {
    let gpu = &context.gpu;
    Ok(Rates {
        products: products_reached(gpu.kernel_arch(), gpu.multiprocessors, gpu.clock_hz, precision),
        memory: memory_rate(gpu) * MEMORY_REACHED,
        copies: copy_rate(context)? * COPIES_REACHED,
        copy_contention: COPY_CONTENTION,
    })
}

/// Double data rate: a word of the bus on both clock edges.
fn memory_rate(gpu: &Gpu) -> f64 {
    2.0 * gpu.memory_clock_hz * gpu.memory_bus_bytes
}

/// Bytes a second to the device while as many come from it.
fn copy_rate(context: &Arc<Context>) -> Result<f64> {
    let (block, host) = (
        DeviceBlock::new(context, DeviceAllocator::System, 2 * PROBE_BYTES)?,
        PinnedMemory::new(context, 2 * PROBE_BYTES)?,
    );
    let (upload, download) = (CudaStream::new(context)?, CudaStream::new(context)?);
    let (to, from) = (block.at(0, PROBE_BYTES)?, host.at(0, PROBE_BYTES)?);
    let (back_from, back_to) = (block.at(PROBE_BYTES, PROBE_BYTES)?, host.at(PROBE_BYTES, PROBE_BYTES)?);
    let _current = context.enter()?;
    // SAFETY: the block is that long. The download below reads it.
    let answer = unsafe { sys::cuMemsetD8Async(back_from, 0, PROBE_BYTES as usize, download.handle()) };
    check("measuring copies", answer)?;
    let both_ways = || -> Result<()> {
        // SAFETY: both blocks are that long, and live until the copies have ended.
        unsafe {
            upload.upload("measuring copies", from, to, PROBE_BYTES as usize)?;
            download.download("measuring copies", back_from, back_to, PROBE_BYTES as usize)?;
        }
        upload.synchronise().and(download.synchronise())
    };
    // The first copy of a kind pays for more than itself.
    both_ways()?;
    let mut fastest = f64::MAX;
    for _ in 0..PROBES {
        let begun = Instant::now();
        both_ways()?;
        fastest = fastest.min(begun.elapsed().as_secs_f64());
    }
    Ok(PROBE_BYTES as f64 / fastest)
}
