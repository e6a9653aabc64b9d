//! How fast a GPU is: its arithmetic by what it is, its copies by trying. Once for each GPU, as kernels are loaded.

use std::sync::Arc;
use std::time::Instant;

use cudarc::driver::sys;

use crate::backend::cuda::driver::context::Context;
use crate::backend::cuda::driver::device::{Gpu, check};
use crate::backend::cuda::driver::memory::Block;
use crate::backend::cuda::driver::pinned::Pinned;
use crate::backend::cuda::driver::stream::Stream;
use crate::backend::{DeviceAllocator, Precision};
use crate::error::Result;
use crate::tensor::Rates;

/// Multiplications of 16-bit floats that one multiprocessor does in a cycle, with sums in f32, by the instructions that our
/// kernels use: data-centre cards first, all others are GeForce cards and their kin.
fn products_per_cycle(capability: (i32, i32)) -> f64 {
    match capability {
        (8, 0) => 1024.0,
        (9, 0) => 2048.0,
        (10, _) => 1024.0,
        _ => 256.0,
    }
}

/// The part of that which whole networks reach, norms included, measured on an H200.
const REACHED: f64 = 0.6;
/// The part of the memory's speed that passes over frames reach, likewise.
const MEMORY_REACHED: f64 = 0.75;
/// The part of the bus's rate that bands reach, likewise: between two copies the engine rests.
const COPIES_REACHED: f64 = 0.92;
/// What copies cost beside them, likewise: from 0.03 to 0.1 of their time.
const BESIDE: f64 = 0.06;
/// Enough to forget how long a copy takes to begin.
const TRIED_BYTES: u64 = 32 << 20;
/// Others may be at work: the fastest of these is what the bus can do.
const TRIES: usize = 6;

pub fn measure(context: &Arc<Context>, precision: Precision) -> Result<Rates> {
    let gpu = &context.gpu;
    // Three products of half the rate for each one.
    let slower = if precision == Precision::Fp32 { 6.0 } else { 1.0 };
    Ok(Rates {
        products: products_per_cycle(gpu.capability) * f64::from(gpu.multiprocessors) * gpu.cycles * REACHED / slower,
        memory: memory(gpu) * MEMORY_REACHED,
        copies: copies(context)? * COPIES_REACHED,
        beside: BESIDE,
    })
}

/// Both clock edges carry a word of the bus.
fn memory(gpu: &Gpu) -> f64 {
    2.0 * gpu.memory_cycles * gpu.memory_bus_bytes
}

/// Bytes a second to the device while as many come from it.
fn copies(context: &Arc<Context>) -> Result<f64> {
    let (block, host) =
        (Block::new(context, DeviceAllocator::Driver, 2 * TRIED_BYTES)?, Pinned::new(context, 2 * TRIED_BYTES)?);
    let (upload, download) = (Stream::new(context)?, Stream::new(context)?);
    let (to, from) = (block.at(0, TRIED_BYTES)?, host.at(0, TRIED_BYTES)?);
    let (back_from, back_to) = (block.at(TRIED_BYTES, TRIED_BYTES)?, host.at(TRIED_BYTES, TRIED_BYTES)?);
    let _current = context.enter()?;
    let both_ways = || -> Result<()> {
        // SAFETY: both blocks are that long, and live until the copies have ended.
        let answer = unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.cast(), TRIED_BYTES as usize, upload.handle()) };
        check("trying a copy", answer)?;
        // SAFETY: as above.
        let answer =
            unsafe { sys::cuMemcpyDtoHAsync_v2(back_to.cast(), back_from, TRIED_BYTES as usize, download.handle()) };
        check("trying a copy", answer)?;
        upload.wait().and(download.wait())
    };
    // The first copy of a kind pays for more than itself.
    both_ways()?;
    let mut fastest = f64::MAX;
    for _ in 0..TRIES {
        let begun = Instant::now();
        both_ways()?;
        fastest = fastest.min(begun.elapsed().as_secs_f64());
    }
    Ok(TRIED_BYTES as f64 / fastest)
}
