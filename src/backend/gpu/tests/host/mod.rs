//! A GPU in host memory, for tests: the CPU's kernels, and queues whose work runs late and in random order. A missing
//! event shows as wrong bits, because work then finds what an earlier or later operation left.

mod kernels;
mod memory;
mod queues;
mod weights;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use self::kernels::{ConvWork, Norm};
use self::memory::SharedBytes;
pub use self::queues::WaitSite;
use self::queues::{Clock, HostEvent, HostQueue, NoSpans};
use self::weights::{PlainConv, PlainWeights, weight_bytes};
use crate::backend::cpu::{Cpu, CpuOptions};
use crate::backend::gpu::{
    ConvBand, ConvLaunch, CopyDirection, GpuApi, GpuBackend, GpuMemory, HostCopy, JobMemory, LaunchConv, LaunchCopies,
    LaunchLevels, LaunchLimit, LaunchNorm, LaunchPixels, NonFiniteFlag, NonFiniteFlags, NormInPlace, NormOf, NormRows,
    RowCopy, RowPitches, RowSizes, TensorFrame, U8Copy, U8Rows, conv_whole,
};
use crate::backend::tests::RawMemory;
use crate::backend::{DeviceFacts, HostStream, NonFinite, Precision, Residency, WeightStorage};
use crate::error::{Error, Result};
use crate::ir::{
    AddOp, AttentionOp, BandPart, BandShape, BlendTile, CacheFormat, ConvFrame, ConvLayout, ConvOp, ConvProducts,
    ConvSource, DeviceOffset, DeviceProfile, FrameShape, LoadTensor, Offsets, PartialSumsSize, PoolOp, Rates, Sizes,
    StoreTensor, WeightBlock, WeightPart,
};

/// As the CPU aligns frames.
const ALIGN: u64 = 64;

/// Frames are as on the CPU, in f32. A row in 8 bits has a scale for each block of channels after its pixels.
#[derive(Clone, Copy)]
pub struct HostSizes;

impl RowSizes for HostSizes {
    const FRAME_ALIGN: u64 = ALIGN;

    fn element(self) -> u64 {
        4
    }

    fn channel_stride(self, channels: u64) -> u64 {
        channels
    }

    fn u8_row_bytes(self, shape: FrameShape) -> u64 {
        let scales = shape.channels / CacheFormat::block(shape.channels);
        (shape.width * (shape.channels + 4 * scales)).next_multiple_of(16)
    }

    fn data_bytes(self, shape: FrameShape) -> u64 {
        shape.elements() * 4
    }

    /// So many that every band has the fewest rows, and small frames have more bands than are in flight.
    fn channel_tiles(self, _: &ConvLayout) -> u64 {
        1 << 20
    }
}

impl Sizes for HostSizes {
    fn frame_bytes(&self, shape: FrameShape, groups: u64) -> u64 {
        (self.data_bytes(shape) + self.statistics_bytes(groups)).next_multiple_of(ALIGN)
    }

    fn u8_frame_bytes(&self, shape: FrameShape) -> Option<u64> {
        Some((self.u8_row_bytes(shape) * shape.height).next_multiple_of(ALIGN))
    }

    fn weight_bytes(&self, layout: &ConvLayout) -> u64 {
        weight_bytes(layout)
    }

    /// A copy of each output frame, of which statistics are made.
    fn conv_scratch(&self, layout: &ConvLayout, input: FrameShape, frames: u64) -> u64 {
        frames * self.data_bytes(layout.window.output(input, layout.cout))
    }

    fn attention_scratch(&self, _: FrameShape, _: u64) -> u64 {
        0
    }

    fn band_bytes(&self, shape: &BandShape, parts: &[BandPart], outputs: u64) -> Option<u64> {
        Some(self.band_buffers(shape, parts, outputs))
    }

    fn normalises_itself(&self, _: &ConvLayout) -> bool {
        false
    }

    fn partial_sums(&self, _: &ConvLayout, _: FrameShape, _: u64) -> Option<PartialSumsSize> {
        None
    }

    fn staging_bytes(&self, shape: FrameShape) -> u64 {
        (shape.elements() * 4).next_multiple_of(ALIGN)
    }

    fn fade_bytes(&self, _: FrameShape) -> u64 {
        0
    }

    fn least_band_offset(&self, _: FrameShape) -> u64 {
        0
    }

    fn effective_products(&self, _: &ConvLayout, work: ConvProducts) -> f64 {
        work.products
    }

    fn block_bytes(&self, bytes: u64) -> u64 {
        bytes
    }

    fn mapping_bytes(&self, _: u64) -> u64 {
        0
    }
}

pub struct HostFlags(Arc<[AtomicBool; 2]>);

impl NonFiniteFlags for HostFlags {
    fn take(&mut self, flag: NonFiniteFlag) -> bool {
        self.0[flag as usize].swap(false, Ordering::Relaxed)
    }
}

impl HostFlags {
    fn set(flags: &[AtomicBool; 2], found: NonFinite) {
        for (flag, found) in flags.iter().zip([found.loaded, found.stored]) {
            flag.fetch_or(found, Ordering::Relaxed);
        }
    }
}

pub struct HostGpu {
    clock: Arc<Mutex<Clock>>,
    main: HostQueue,
    cpu: Arc<Cpu>,
    precision: Precision,
    /// Whether calls cannot end well any more.
    pub is_lost: AtomicBool,
}

impl HostGpu {
    /// `seed`: of the order in which work runs. `dropped`: a place in the code whose waits are left out.
    pub fn new(seed: u64, dropped: Option<WaitSite>) -> Result<HostGpu> {
        let clock = Arc::new(Mutex::new(Clock::new(seed, dropped)));
        let cpu = Cpu::new(CpuOptions { threads: Some(1), ..CpuOptions::default() })?;
        let (main, is_lost) = (HostQueue::new(&clock), AtomicBool::new(false));
        Ok(HostGpu { main, clock, cpu: Arc::new(cpu), precision: Precision::Fp32, is_lost })
    }

    /// Rounds what layers give to a precision, so that values overflow as on a GPU that computes in it. Frames keep the
    /// size of f32.
    pub fn rounding(self, precision: Precision) -> HostGpu {
        HostGpu { precision, ..self }
    }

    /// Every place in the code that has waited.
    pub fn wait_sites(&self) -> Vec<WaitSite> {
        self.clock.lock().wait_sites()
    }

    /// Puts work with a block into a queue.
    fn launch(
        &self,
        queue: Option<&HostQueue>,
        block: &SharedBytes,
        work: impl FnOnce(&Cpu, &SharedBytes) + Send + 'static,
    ) {
        let (cpu, block) = (Arc::clone(&self.cpu), block.clone());
        queue.unwrap_or(&self.main).push(move || work(&cpu, &block));
    }
}

impl GpuMemory for HostGpu {
    type Event = HostEvent;
    type Queue = HostQueue;
    type Block = SharedBytes;
    type HostBlock = SharedBytes;
    type Flags = HostFlags;
    type Spans = NoSpans;
    type Weights = PlainWeights;
    type Launched = ();
    type Current<'a> = ();

    const MAX_PITCH: u64 = 1 << 20;

    fn enter(&self) -> Result<()> {
        Ok(())
    }

    fn event(&self) -> Result<HostEvent> {
        Ok(HostEvent::new(&self.clock))
    }

    fn queue(&self) -> Result<HostQueue> {
        Ok(HostQueue::new(&self.clock))
    }

    fn host_block(&self, bytes: u64) -> Result<SharedBytes> {
        Ok(SharedBytes::new(bytes))
    }

    fn flags(&self) -> Result<HostFlags> {
        Ok(HostFlags(Arc::default()))
    }

    fn copy(&self, queue: &HostQueue, block: &SharedBytes, host: &SharedBytes, copy: &HostCopy) -> Result<()> {
        let (host, HostCopy { direction, bytes, count, host_pitch, device_pitch, .. }) = (host.clone(), *copy);
        let (host_start, device_start) = (copy.host, copy.device);
        self.launch(Some(queue), block, move |_, block| {
            for run in 0..count {
                let (on_host, on_device) = (host_start + run * host_pitch, device_start + run * device_pitch);
                let mut moved = vec![0; bytes as usize];
                match direction {
                    CopyDirection::ToDevice => {
                        host.read(on_host, &mut moved);
                        block.write(on_device, &moved);
                    }
                    CopyDirection::ToHost => {
                        block.read(on_device, &mut moved);
                        host.write(on_host, &moved);
                    }
                }
            }
        });
        Ok(())
    }

    fn spans(&self) -> Result<NoSpans> {
        Err(Error::State("trace: this device notes no times".into()))
    }

    /// Its work is done already.
    fn check_stream(&self, _: HostStream) -> Result<()> {
        Ok(())
    }
}

impl GpuApi for HostGpu {
    type Sizes = HostSizes;
    type Conv = PlainConv;

    const MAX_FRAMES: usize = 32;

    fn sizes(&self) -> HostSizes {
        HostSizes
    }

    fn limit(&self) -> LaunchLimit {
        LaunchLimit(u64::MAX)
    }

    fn main_queue(&self) -> &HostQueue {
        &self.main
    }

    fn flush(&self) -> Result<()> {
        match self.is_lost.load(Ordering::Relaxed) {
            true => Err(Error::Device("the device is lost".into())),
            false => Ok(()),
        }
    }

    fn record_span(&self, _: &NoSpans, _: &'static str, launch: impl FnOnce() -> Result<()>) -> Result<()> {
        launch()
    }

    fn attention(&self, block: &SharedBytes, op: &AttentionOp<Offsets>) -> Result<()> {
        let op = op.clone();
        self.launch(None, block, move |cpu, block| kernels::attention(cpu, block, &op));
        Ok(())
    }
}

impl LaunchLevels for HostGpu {
    fn pool(&self, block: &SharedBytes, op: &PoolOp<Offsets>) -> Result<()> {
        let op = op.clone();
        self.launch(None, block, move |cpu, block| kernels::pool(cpu, block, &op));
        Ok(())
    }

    fn add(&self, block: &SharedBytes, op: &AddOp<Offsets>) -> Result<()> {
        let op = op.clone();
        self.launch(None, block, move |cpu, block| kernels::add(cpu, block, &op));
        Ok(())
    }
}

impl LaunchConv for HostGpu {
    fn conv(&self, block: &SharedBytes, weights: &PlainWeights, op: &ConvOp<Offsets>, scratch: u64) -> Result<()> {
        conv_whole(self, block, weights, &ConvLaunch::of(op, scratch), &op.frames, usize::MAX)
    }

    fn conv_band(
        &self,
        block: &SharedBytes,
        weights: &PlainWeights,
        conv: &ConvLaunch,
        frames: &[ConvFrame<Offsets>],
        band: &ConvBand<HostGpu>,
    ) -> Result<()> {
        let next_norm = band.next_norm.as_ref().map(|next| (Norm::of(&next.of), next.statistics.to_vec()));
        let work = ConvWork {
            weights: weights.clone(),
            layout: *conv.layout,
            input: conv.input,
            scratch: conv.statistics.then_some(conv.scratch),
            frames: frames.to_vec(),
            rows: band.rows.clone(),
            input_rows: band.input_rows.clone(),
            split: band.split.map(|split| (split.columns, split.frames.to_vec())),
            next_norm,
            precision: self.precision,
        };
        self.launch(band.queue, block, move |cpu, block| work.run(cpu, block));
        Ok(())
    }

    /// From pixels, as on CUDA: so both ways are tested.
    fn normalises_output(&self, layout: &ConvLayout) -> Result<bool> {
        Ok(layout.cin <= 3)
    }
}

impl LaunchNorm for HostGpu {
    fn statistics(&self, block: &SharedBytes, conv: &ConvLaunch, (): &(), into: &[DeviceOffset]) -> Result<()> {
        if conv.statistics {
            let output = conv.layout.window.output(conv.input, conv.layout.cout);
            let (groups, scratch, into) = (conv.layout.norm.groups(), conv.scratch, into.to_vec());
            self.launch(None, block, move |_, block| kernels::statistics(block, output, groups, scratch, &into));
        }
        Ok(())
    }

    fn norm(
        &self,
        block: &SharedBytes,
        norm: &NormOf<HostGpu>,
        frames: &[(DeviceOffset, DeviceOffset)],
        rows: Option<NormRows>,
    ) -> Result<()> {
        let (shape, of, frames) = (norm.shape, Norm::of(norm), frames.to_vec());
        let rows = rows.map_or(0..shape.height, |rows| rows.rows);
        self.launch(None, block, move |_, block| {
            let row = HostSizes.row_bytes(shape);
            for (from, to) in frames {
                let statistics = DeviceOffset(from.0 + HostSizes.data_bytes(shape));
                let pixels = (rows.end - rows.start) * shape.width;
                of.run(block, from.0 + rows.start * row, to.0, pixels, statistics);
            }
        });
        Ok(())
    }

    fn norm_in_place(&self, block: &SharedBytes, norm: &NormOf<HostGpu>, frame: NormInPlace) -> Result<()> {
        let of = Norm::of(norm);
        self.launch(None, block, move |_, block| {
            of.run(block, frame.first.0, frame.first.0, frame.pixels, frame.statistics);
        });
        Ok(())
    }
}

impl LaunchCopies for HostGpu {
    fn copy_rows(
        &self,
        queue: Option<&HostQueue>,
        block: &SharedBytes,
        copies: &[RowCopy],
        pitches: Option<RowPitches>,
    ) -> Result<()> {
        let copies = copies.to_vec();
        self.launch(queue, block, move |_, block| {
            for RowCopy { from, to, bytes } in copies {
                let whole = RowPitches { row: bytes.max(1), from: bytes, to: bytes };
                let RowPitches { row, from: from_pitch, to: to_pitch } = pitches.unwrap_or(whole);
                for number in 0..bytes.div_ceil(row) {
                    let mut moved = vec![0; row.min(bytes - number * row) as usize];
                    block.read(from + number * from_pitch, &mut moved);
                    block.write(to + number * to_pitch, &moved);
                }
            }
        });
        Ok(())
    }

    fn copy_u8(
        &self,
        queue: &HostQueue,
        block: &SharedBytes,
        copy: U8Copy,
        of: U8Rows,
        frames: &[(u64, u64)],
    ) -> Result<()> {
        let frames = frames.to_vec();
        self.launch(Some(queue), block, move |_, block| {
            frames.iter().for_each(|(from, to)| kernels::copy_u8(block, copy, of, *from, *to));
        });
        Ok(())
    }
}

impl LaunchPixels for HostGpu {
    fn load(&self, block: &SharedBytes, op: &LoadTensor, from: &TensorFrame, flags: &HostFlags) -> Result<()> {
        let (from, flags, op) = (*from, Arc::clone(&flags.0), kernels::OwnedLoad::new(op));
        self.launch(None, block, move |cpu, block| HostFlags::set(&flags, op.run(cpu, block, &from)));
        Ok(())
    }

    fn store(
        &self,
        block: &SharedBytes,
        op: &StoreTensor,
        into: &TensorFrame,
        _: u64,
        flags: &HostFlags,
    ) -> Result<()> {
        let (into, flags, op) = (*into, Arc::clone(&flags.0), kernels::OwnedStore::new(op));
        self.launch(None, block, move |cpu, block| HostFlags::set(&flags, op.run(cpu, block, &into)));
        Ok(())
    }

    fn blend(&self, block: &SharedBytes, op: &BlendTile, _: u64) -> Result<()> {
        let op = kernels::OwnedBlend::new(op);
        self.launch(None, block, move |cpu, block| op.run(cpu, block));
        Ok(())
    }
}

impl GpuBackend for HostGpu {
    type Api = HostGpu;

    fn api(&self) -> &HostGpu {
        self
    }

    fn block(&self, bytes: u64) -> Result<SharedBytes> {
        Ok(SharedBytes::new(bytes))
    }
}

impl DeviceFacts for HostGpu {
    const HOST_MEMORY: bool = false;

    fn precision(&self) -> Precision {
        self.precision
    }

    fn arithmetic(&self) -> String {
        "queues in host memory".into()
    }

    fn profile(&self) -> DeviceProfile {
        DeviceProfile {
            rates: Rates { products: 1e10, memory: 1e10, copies: 1e10, copy_contention: 0.0 },
            busy_pixels: 1 << 12,
            chunk_frames: 8,
            column_step: 8,
            fuses_norm: false,
            pairs: None,
            upsampler_pairs: false,
            attention_cost: 1.0,
            adds_in_place: true,
            offloads: true,
        }
    }

    fn sizes(&self) -> &dyn Sizes {
        &HostSizes
    }

    fn free_bytes(&self) -> u64 {
        1 << 30
    }
}

impl WeightStorage for HostGpu {
    type Store = (SharedBytes, Residency);
    type Conv = PlainConv;
    type PackBuffers = ();

    fn allocate_weights(&self, bytes: u64, residency: Residency) -> Result<(SharedBytes, Residency)> {
        Ok((SharedBytes::new(bytes), residency))
    }

    fn allocate_conv(&self, store: &Self::Store, offset: u64, layout: &ConvLayout) -> Result<PlainConv> {
        let (memory, is_resident) = (store.0.clone(), store.1 == Residency::Device);
        Ok(PlainConv { is_resident, memory, offset, layout: *layout })
    }

    fn weight_parts(&self, layout: &ConvLayout) -> Vec<WeightPart> {
        let blocks = WeightBlock::all(layout, layout.cin.max(layout.shortcut.unwrap_or(0)), layout.cout);
        blocks.into_iter().map(WeightPart::Block).chain([WeightPart::Vectors]).collect()
    }

    fn write_part(&self, conv: &PlainConv, part: &WeightPart, source: &mut dyn ConvSource, (): &mut ()) -> Result<()> {
        conv.write(part, source)
    }
}

impl RawMemory for HostGpu {
    /// It is from the beginning.
    fn poison(&self, _: &mut JobMemory<HostGpu>, _: u64) {}

    fn read(&self, memory: &JobMemory<HostGpu>, from: DeviceOffset, into: &mut [u8]) {
        memory.synchronise(self).unwrap();
        memory.block.read(from.0, into);
    }
}
