//! Rates by measurement: this card's own kernels on the layers that take most of the time, in memory of their own.
//! Owns what the process has measured or read. Bits never depend on it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};

use super::driver::{DeviceBlock, driver_version, uuid};
use super::launch::tiling::PAIRS;
use super::launch::{CudaSizes, Launcher, checksum};
use super::rate_table::{self, COSTS, MeasuredRates, RATES};
use super::weights::{PreparedConv, WeightStore};
use super::{Cuda, JobMemory};
use crate::backend::{DeviceAllocator, DeviceFacts, Execution, Note, RunArgs, Stop, WeightStorage};
use crate::error::{Error, Result};
use crate::ir::{
    BandBuffers, Buffers, ConvFrame, ConvLayout, ConvOp, DeviceOffset, FrameShape, Norm, NormaliseOp, Offsets, Op,
    PairCosts, PairSlabs, PartialSums, PinnedBytes, Prologue, Rates, Sizes, Term, Window,
};

/// The narrowest and the widest layers of the published model. Rates of the others lie between theirs.
const CHANNELS: [u64; 2] = [128, 512];
const GROUPS: u64 = 32;
/// Rows of the narrow frames in 16 bits, fewer if memory is short. With less than the second, wide frames would have
/// less than a tile.
const ROWS: [u64; 2] = [128, 64];
const TILE_WIDTH: u64 = 16;
/// The width is a tile for each multiprocessor, so that all are busy until the end, but no more than on an H200: 66 MiB
/// a frame.
const MOST_TILES: u32 = 132;
/// Four input frames, and the pair that is computed from them.
const INPUTS: u64 = 4;
const FRAMES: u64 = INPUTS + 2;
/// Long enough for clocks to settle at the power limit. The first half of the rounds is not counted.
const MEASURED_FOR: Duration = Duration::from_millis(1500);
const FEWEST_ROUNDS: usize = 4;
/// A probe repeats its operation until it takes about so long, and the call's own time does not matter.
const PROBE: Duration = Duration::from_millis(4);
const MOST_REPEATS: usize = 64;
/// The part of the probes' rate that whole networks reach. They have narrow layers and ends of launches, and they stay
/// at the power limit. From 0.81 to 0.93 on an H200, with the kernels of 9.0 and of 8.6.
const NETWORKS_REACH: f64 = 0.88;

/// How often a wait for another handle's measurement asks whether to stop.
const POLL: Duration = Duration::from_millis(10);

/// Rates of a card, once they are known. Locked while they are measured.
type RateCell = Arc<Mutex<Option<MeasuredRates>>>;

/// Where the process keeps the rates of a card by a table. Cards do not wait for each other.
fn rate_cell(path: &Option<PathBuf>, card: &str) -> RateCell {
    type Known = (Option<PathBuf>, String, RateCell);
    static KNOWN: Mutex<Vec<Known>> = Mutex::new(Vec::new());
    let mut known = KNOWN.lock();
    if let Some((.., cell)) = known.iter().find(|(at, of, _)| at == path && of == card) {
        return Arc::clone(cell);
    }
    let cell = RateCell::default();
    known.push((path.clone(), card.to_owned(), Arc::clone(&cell)));
    cell
}

fn lock<'a, T>(cell: &'a Mutex<T>, stop: &mut Stop) -> Result<MutexGuard<'a, T>> {
    loop {
        if stop() {
            return Err(Error::Cancelled);
        }
        if let Some(guard) = cell.try_lock_for(POLL) {
            return Ok(guard);
        }
    }
}

/// The rates of this card from the table at `path`, or beside the driver's cache. Measured and stored if they are not
/// there, once for all handles of the process. `None` if that fails; the notes say why. The only error is a stop.
pub fn measured(gpu: &Cuda, path: Option<&Path>, stop: &mut Stop) -> Result<(Option<MeasuredRates>, Vec<Note>)> {
    let mut notes = Vec::new();
    let mut note = |is_warning, text| notes.push(Note { is_warning, text: format!("autotune: {text}") });
    let path = path.map(Path::to_owned).or_else(rate_table::default_path);
    let found = card(gpu).and_then(|card| {
        let cell = rate_cell(&path, &card);
        let mut known = lock(&cell, stop)?;
        if let Some(rates) = *known {
            return Ok(rates);
        }
        let place = path.as_ref().map_or("nowhere".into(), |path| path.display().to_string());
        let stored = path.as_deref().and_then(|path| rate_table::read(path, &card, gpu.rates.copy_contention));
        let rates = match stored {
            Some(rates) => {
                note(false, format!("{} were read from {place}", described(&rates)));
                rates
            }
            None => {
                let begun = Instant::now();
                let (rates, is_short) = measure(gpu, stop)?;
                let seconds = begun.elapsed().as_secs_f64();
                note(false, format!("{} were measured in {seconds:.1} s, for {place}", described(&rates)));
                match path.as_deref() {
                    _ if is_short => {
                        note(true, "not stored: too little of the GPU's memory is free to be exact".into())
                    }
                    None => note(true, "there is no folder for the table; set autotune_path".into()),
                    Some(path) => {
                        if let Err(why) = rate_table::store(path, &card, &rates) {
                            note(true, format!("{why}; other processes measure again"));
                        }
                    }
                }
                rates
            }
        };
        *known = Some(rates);
        Ok(rates)
    });
    match found {
        Ok(rates) => Ok((Some(rates), notes)),
        Err(Error::Cancelled) => Err(Error::Cancelled),
        Err(why) => {
            note(true, format!("rates could not be measured: {why}; those from the GPU's properties are used"));
            Ok((None, notes))
        }
    }
}

/// What rates depend on: the card, its driver, and the kernels.
fn card(gpu: &Cuda) -> Result<String> {
    let (of, precision) = (&gpu.context().gpu, gpu.precision());
    let (uuid, version) = (uuid(of)?, driver_version()?);
    let (arch, name) = (gpu.kernel_arch(), precision.name());
    Ok(format!("{uuid} {}, CUDA {version}, kernels {:016x} of {arch} in {name}", of.name, checksum(precision)))
}

fn described(measured: &MeasuredRates) -> String {
    let pairs = measured.pairs.map_or(String::new(), |costs| {
        format!(" and costs of pairs (together {}, alone {})", costs.together, costs.alone)
    });
    format!("rates {}{pairs}", measured.rates)
}

/// A layer that is probed, directly or with pairs of frames.
fn layout(channels: u64, pairs: bool) -> ConvLayout {
    ConvLayout {
        cin: channels,
        cout: channels,
        window: Window::Same,
        prologue: Prologue::NormSilu,
        slabs: if pairs { 4 } else { 3 },
        shortcut: None,
        biases: 1,
        norm: Norm::Group { groups: GROUPS },
        pairs: pairs.then_some(PAIRS),
        first_frame_slab: None,
    }
}

/// All that are probed, by width, direct ones first.
fn layouts(has_pairs: bool) -> Vec<ConvLayout> {
    let forms = if has_pairs { &[false, true][..] } else { &[false] };
    forms.iter().flat_map(|pairs| CHANNELS.map(|channels| layout(channels, *pairs))).collect()
}

/// The memory of all probes: frames of one size whatever their channels, one after the other, then scratch.
struct ProbeFrames {
    /// Of the narrow frames; wide ones have as many bytes.
    rows: u64,
    width: u64,
    frame_bytes: u64,
}

impl ProbeFrames {
    fn new(sizes: &CudaSizes, multiprocessors: u32, rows: u64) -> ProbeFrames {
        let width = u64::from(multiprocessors.min(MOST_TILES)) * TILE_WIDTH;
        let frames = ProbeFrames { rows: rows * 2 / sizes.precision.bytes(), width, frame_bytes: 0 };
        let bytes = CHANNELS.map(|channels| sizes.frame_bytes(frames.shape(channels), GROUPS));
        ProbeFrames { frame_bytes: bytes[0].max(bytes[1]), ..frames }
    }

    fn shape(&self, channels: u64) -> FrameShape {
        FrameShape::new(self.rows * CHANNELS[0] / channels, self.width, channels)
    }

    fn bytes(&self, sizes: &CudaSizes) -> u64 {
        let scratch = |channels| sizes.conv_scratch(&layout(channels, false), self.shape(channels), 2);
        FRAMES * self.frame_bytes + CHANNELS.map(scratch).into_iter().max().unwrap_or(0)
    }

    fn at(&self, frame: u64) -> DeviceOffset {
        DeviceOffset(frame * self.frame_bytes)
    }

    /// The last `count` of two output frames, the first from inputs 0 to 2, the second from 1 to 3. One of them has a
    /// residual, as every second layer does.
    fn conv(&self, layer: usize, layout: &ConvLayout, count: usize) -> Op<Offsets> {
        let paired = |PairSlabs { shared: [a, b], own: [first, second] }| [[first, a, b], [a, b, second]];
        let slabs = layout.pairs.map_or([[0, 1, 2]; 2], paired);
        let frames = (0..2).zip(slabs).map(|(i, slabs)| ConvFrame {
            terms: (i..).zip(slabs).map(|(input, slab)| Term { frame: self.at(input), slab }).collect(),
            bias: 0,
            residual: (i == 0).then(|| self.at(INPUTS - 1)),
            out: self.at(INPUTS + i),
        });
        let (input, frames) = (self.shape(layout.cin), frames.skip(2 - count).collect());
        let partial_sums = PartialSums::NONE;
        Op::Conv(ConvOp { layer, layout: *layout, weights: None, input, frames, statistics: true, partial_sums })
    }

    fn norm(&self, layer: usize, layout: &ConvLayout) -> Op<Offsets> {
        let frames = (0..2).map(|i| (self.at(i), self.at(INPUTS + i))).collect();
        Op::Normalise(NormaliseOp { layer, layout: *layout, weights: None, shape: self.shape(layout.cin), frames })
    }

    /// Multiplications of an output frame of so many terms.
    fn products(&self, channels: u64, terms: u64) -> f64 {
        (Window::Same.taps() * terms * channels * channels * self.shape(channels).pixels()) as f64
    }
}

/// Values of random bits between 2^-15 and 2 in every precision: with zeros the card would clock higher.
fn random_values() -> Vec<u16> {
    let mut state = 1u64;
    let next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 48) as u16 & 0x87ff | 0x3800
    };
    std::iter::repeat_with(next).take(1 << 19).collect()
}

/// Runs operations on random values.
struct Prober<'a, 'b> {
    gpu: &'a Cuda,
    memory: JobMemory<Launcher>,
    weights: Vec<PreparedConv>,
    buffers: Buffers,
    stop: &'a mut Stop<'b>,
}

impl<'a, 'b> Prober<'a, 'b> {
    fn new(
        gpu: &'a Cuda,
        frames: &ProbeFrames,
        layouts: &[ConvLayout],
        stop: &'a mut Stop<'b>,
    ) -> Result<Prober<'a, 'b>> {
        let bytes = frames.bytes(&gpu.launcher.sizes);
        let sizes: Vec<u64> = layouts.iter().map(|layout| gpu.sizes().weight_bytes(layout)).collect();
        let total = sizes.iter().sum();
        let values = random_values();
        let fill = |bytes: u64| {
            let piece = size_of_val(&values[..]) as u64;
            (0..bytes / 2 * 2).step_by(piece as usize).map({
                let values = &values;
                move |at| (at, &values[..(piece.min(bytes - at) / 2) as usize])
            })
        };
        let stream = gpu.launcher.queue.stream();
        // Not from the host's allocator: no plan reports this memory.
        let block = DeviceBlock::new(gpu.context(), DeviceAllocator::System, total)?;
        block.write_all(stream, fill(total))?;
        let store = Arc::new(WeightStore::Device(block));
        let mut offset = 0;
        let mut weights = Vec::new();
        for (layout, bytes) in layouts.iter().zip(&sizes) {
            weights.push(gpu.allocate_conv(&store, offset, layout)?);
            offset += bytes;
        }
        let memory = gpu.job_memory(DeviceAllocator::System, bytes, PinnedBytes { load: 0, store: 0, offloaded: 0 })?;
        for frame in 0..INPUTS {
            if stop() {
                return Err(Error::Cancelled);
            }
            let start = frames.at(frame).0;
            memory.block.write_all(stream, fill(frames.frame_bytes).map(|(at, values)| (start + at, values)))?;
        }
        let buffers = Buffers { scratch: FRAMES * frames.frame_bytes, bands: BandBuffers::default(), staging: [0; 2] };
        Ok(Prober { gpu, memory, weights, buffers, stop })
    }

    /// Seconds of an operation, from so many in a row.
    fn seconds(&mut self, op: &Op<Offsets>, repeats: usize) -> Result<f64> {
        let args = RunArgs { weights: &self.weights, buffers: self.buffers };
        let begun = Instant::now();
        for _ in 0..repeats {
            self.gpu.run(&mut self.memory, op, &args, self.stop)?;
        }
        self.gpu.finish(&mut self.memory, None)?;
        Ok(begun.elapsed().as_secs_f64() / repeats as f64)
    }

    /// Seconds of each operation: the median of rounds of all of them, so that they share clocks and temperature.
    fn medians(&mut self, ops: &[Op<Offsets>]) -> Result<Vec<f64>> {
        let mut repeats = Vec::new();
        for op in ops {
            // The first loads its kernel.
            self.seconds(op, 1)?;
            let once = self.seconds(op, 1)?;
            repeats.push(((PROBE.as_secs_f64() / once) as usize).clamp(1, MOST_REPEATS));
        }
        let (mut rounds, begun) = (Vec::new(), Instant::now());
        while rounds.len() < FEWEST_ROUNDS || begun.elapsed() < MEASURED_FOR {
            let round = ops.iter().zip(&repeats).map(|(op, repeats)| self.seconds(op, *repeats));
            rounds.push(round.collect::<Result<Vec<f64>>>()?);
        }
        let counted = &rounds[rounds.len() / 2..];
        let median = |probe: usize| {
            let mut times: Vec<f64> = counted.iter().map(|round| round[probe]).collect();
            times.sort_by(f64::total_cmp);
            times[times.len() / 2]
        };
        Ok((0..ops.len()).map(median).collect())
    }
}

/// The rates, and whether memory was short, so that they are less certain.
fn measure(gpu: &Cuda, stop: &mut Stop) -> Result<(MeasuredRates, bool)> {
    let has_pairs = gpu.profile().pairs.is_some();
    let (sizes, layouts) = (&gpu.launcher.sizes, layouts(has_pairs));
    let weight_bytes: u64 = layouts.iter().map(|layout| sizes.weight_bytes(layout)).sum();
    let free = gpu.free_bytes() / 4 * 3;
    let frames = ROWS.map(|rows| ProbeFrames::new(sizes, gpu.context().gpu.multiprocessors, rows));
    let Some(at) = frames.iter().position(|frames| frames.bytes(sizes) + weight_bytes <= free) else {
        return Err(Error::Memory(format!("too little of the GPU's memory is free, {} MiB", gpu.free_bytes() >> 20)));
    };
    let (frames, is_short) = (&frames[at], at > 0);
    let mut ops: Vec<_> = (0..).zip(&layouts).map(|(layer, layout)| frames.conv(layer, layout, 2)).collect();
    ops.extend((2..).zip(&layouts[2..]).map(|(layer, layout)| frames.conv(layer, layout, 1)));
    ops.push(frames.norm(0, &layouts[0]));
    let seconds = Prober::new(gpu, frames, &layouts, stop)?.medians(&ops)?;
    // Seconds of a product in an output frame of `terms` terms, for `count` frames of both widths from `first` on.
    let product = |first: usize, terms: u64, count: f64| {
        let of = |i: usize| seconds[first + i] / (count * frames.products(CHANNELS[i], terms));
        (of(0) + of(1)) / 2.0
    };
    let direct = product(0, 3, 2.0);
    let passes = 4 * sizes.frame_bytes(frames.shape(CHANNELS[0]), GROUPS);
    let rate = |rate: f64| rounded(rate.clamp(*RATES.start(), *RATES.end()));
    let cost = |seconds: f64| rounded((seconds / direct).clamp(*COSTS.start(), *COSTS.end()));
    let measured = MeasuredRates {
        rates: Rates {
            products: rate(NETWORKS_REACH / direct),
            memory: rate(passes as f64 / seconds[ops.len() - 1]),
            copies: rate(gpu.rates.copies),
            ..gpu.rates
        },
        pairs: has_pairs.then(|| PairCosts { together: cost(product(2, 2, 2.0)), alone: cost(product(4, 2, 1.0)) }),
    };
    Ok((measured, is_short))
}

/// To four digits, which is more than is known, and which every parser reads back as the same number.
fn rounded(number: f64) -> f64 {
    format!("{number:.3e}").parse().unwrap_or(number)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Precision;
    use crate::backend::cuda::driver::KernelArch;

    /// What the help of `autotune` says.
    #[test]
    fn probes_take_500_mb_at_most() {
        for (precision, has_pairs) in [(Precision::Fp16, true), (Precision::Bf16, true), (Precision::Fp32, false)] {
            let sizes = CudaSizes::new(precision, KernelArch::HOPPER);
            let frames = ProbeFrames::new(&sizes, 1000, ROWS[0]);
            let weights: u64 = layouts(has_pairs).iter().map(|layout| sizes.weight_bytes(layout)).sum();
            let total = frames.bytes(&sizes) + weights;
            assert!((400_000_000..500_000_000).contains(&total), "{precision:?}: {total}");
            assert!(frames.frame_bytes.div_ceil(1 << 20) <= 67, "{precision:?}: {}", frames.frame_bytes);
        }
    }
}
