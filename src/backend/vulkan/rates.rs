//! Rates by measurement, because drivers do not tell how fast their devices are: a convolution and a norm, in memory of
//! their own. Bits never depend on them.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::Vulkan;
use crate::backend::{DeviceFacts, Execution, JobAllocation, Precision, Residency, RunArgs, WeightStorage};
use crate::error::Result;
use crate::ir::{
    Buffers, ConvFrame, ConvLayout, ConvOp, DeviceOffset, FrameShape, Norm, NormaliseOp, Offsets, Op, PartialSums,
    PinnedBytes, Prologue, Rates, Term, Window,
};

/// Of the layers of large frames, which take most of the time.
const CHANNELS: u64 = 128;
const GROUPS: u64 = 32;
/// Frames in 16 bits are 16 MiB, and so many are more than the caches of most GPUs hold.
const SIDE: u64 = 256;
const FRAMES: u64 = 4;
/// An operation is repeated for so long at least, so that the call's own time does not matter.
const PROBE: Duration = Duration::from_millis(5);
/// The fastest counts: others may use the device meanwhile.
const TRIES: usize = 4;

/// The rates of a device, measured once for all handles of the process. Where they cannot be measured now, as where
/// others have the memory, they are those estimated, and the next handle tries again.
pub fn measured_once(gpu: &Vulkan) -> Result<Rates> {
    static KNOWN: Mutex<Vec<([u8; 16], Precision, Rates)>> = Mutex::new(Vec::new());
    let (uuid, precision) = (gpu.context().device.physical.uuid, gpu.precision());
    let mut known = KNOWN.lock();
    if let Some((.., rates)) = known.iter().find(|(of, used, _)| (*of, *used) == (uuid, precision)) {
        return Ok(*rates);
    }
    match measured(gpu, SIDE) {
        Ok(rates) => known.push((uuid, precision, rates)),
        Err(why) if gpu.context().device.is_lost() => return Err(why),
        Err(_) => return Ok(gpu.rates),
    }
    Ok(known[known.len() - 1].2)
}

/// With frames of so many rows and columns.
pub fn measured(gpu: &Vulkan, side: u64) -> Result<Rates> {
    let (sizes, shape) = (gpu.sizes(), FrameShape::new(side, side, CHANNELS));
    let (layout, frame_bytes) = (layout(), sizes.frame_bytes(shape, GROUPS));
    let store = gpu.allocate_weights(sizes.weight_bytes(&layout), Residency::Device)?;
    let weights = [gpu.allocate_conv(&store, 0, &layout)?];
    let nothing = PinnedBytes { load: 0, store: 0, offloaded: 0 };
    let mut memory = gpu.allocate(2 * FRAMES * frame_bytes, nothing)?;
    let at = |frame: u64| DeviceOffset(frame * frame_bytes);
    let one = ConvFrame { terms: vec![Term { frame: at(0), slab: 0 }], bias: 0, residual: None, out: at(FRAMES) };
    let conv = Op::Conv(ConvOp {
        layer: 0,
        layout,
        weights: None,
        input: shape,
        frames: vec![one],
        statistics: false,
        partial_sums: PartialSums::NONE,
    });
    let frames = (0..FRAMES).map(|frame| (at(frame), at(FRAMES + frame))).collect();
    let norm = Op::Normalise(NormaliseOp { layer: 0, layout, weights: None, shape, frames });
    let args = RunArgs { weights: &weights, buffers: Buffers::default() };
    let mut run = |op: &Op<Offsets>, times: u32| -> Result<Duration> {
        let begun = Instant::now();
        (0..times).try_for_each(|_| gpu.run(&mut memory, op, &args, &mut || false))?;
        gpu.finish(&mut memory, None).map(|()| begun.elapsed())
    };
    let mut seconds = |op: &Op<Offsets>| -> Result<f64> {
        // The first one compiles the kernel.
        run(op, 1)?;
        let mut times = 1;
        let mut fastest = run(op, times)?;
        while fastest < PROBE {
            times *= 2;
            fastest = run(op, times)?;
        }
        for _ in 1..TRIES {
            fastest = fastest.min(run(op, times)?);
        }
        Ok(fastest.as_secs_f64() / f64::from(times))
    };
    let products = (Window::Same.taps() * CHANNELS * CHANNELS * shape.pixels()) as f64;
    let moved = (2 * FRAMES * frame_bytes) as f64;
    Ok(Rates { products: rounded(products / seconds(&conv)?), memory: rounded(moved / seconds(&norm)?), ..gpu.rates })
}

fn layout() -> ConvLayout {
    ConvLayout {
        cin: CHANNELS,
        cout: CHANNELS,
        window: Window::Same,
        prologue: Prologue::NormSilu,
        slabs: 1,
        shortcut: None,
        biases: 1,
        norm: Norm::Group { groups: GROUPS },
        pairs: None,
        first_frame_slab: None,
    }
}

/// To four digits, which is more than is known, and which every parser reads back as the same number.
fn rounded(number: f64) -> f64 {
    format!("{number:.3e}").parse().unwrap_or(number)
}
