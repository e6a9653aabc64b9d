//! What the layer above needs of a GPU's API: memory, queues, events, copies and launches. An API below it implements
//! these traits and nothing else of this folder.
//!
//! Memory on the device is named by its offset in a block, host memory by its offset in a host block: an API that has
//! no addresses can stand below. Queues may be the same queue; then events order nothing more.

use std::ops::Range;

use super::block::AddressedBlock;
use super::limit::LaunchLimit;
use super::rows::{RowSizes, tile_grid};
use crate::backend::{DeviceSpan, HostStream};
use crate::error::Result;
use crate::ir::{
    AddOp, AttentionOp, BlendTile, ConvFrame, ConvLayout, ConvOp, DType, DeviceOffset, FrameShape, LoadTensor, Offsets,
    PartialSums, PoolOp, Prologue, SplitColumns, StoreTensor,
};

/// Work in a queue runs in order. Two queues run beside each other, unless events order them.
pub trait Queue: Send + Sync {
    type Event;
    type Spans;
    /// Marks the end of the work so far.
    fn record(&self, event: &Self::Event) -> Result<()>;
    /// Later work waits until the event's last record has been passed; at once if there is none.
    #[track_caller]
    fn wait_for(&self, event: &Self::Event) -> Result<()>;
    /// Blocks the calling thread until the queue is empty.
    fn synchronise(&self) -> Result<()>;
    /// Notes from now on when copies run, under the name of a lane.
    fn set_spans(&mut self, spans: Option<&Self::Spans>, lane: &'static str);
}

pub trait Event: Send + Sync {
    /// Blocks the calling thread until the last record has been passed; returns at once if there is none.
    #[track_caller]
    fn synchronise(&self) -> Result<()>;
}

/// Host memory that copies reach.
pub trait HostBlock: Send + Sync {
    /// The address of a region, checked to lie in the block.
    fn at(&self, offset: u64, bytes: u64) -> Result<*mut u8>;
    /// Whether copies are as fast as planned.
    fn is_pinned(&self) -> bool;
}

/// Words that launches set when they meet values that are not finite.
pub trait NonFiniteFlags: Send {
    /// Whether launches that have ended set a word since it was last taken.
    fn take(&mut self, flag: NonFiniteFlag) -> bool;
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NonFiniteFlag {
    Loaded,
    Stored,
}

/// The prepared weights of a convolution.
pub trait GpuConv<G: GpuMemory>: Send + Sync {
    /// Resident weights, as launches take them.
    fn resident(&self) -> Result<G::Weights>;
    /// Offloaded weights: the block that they lie in, and the parts of it that are fetched for so many slabs.
    fn offloaded(&self, slabs: u64) -> Result<(&G::HostBlock, [Range<u64>; 2])>;
    /// The same after both parts were fetched, one after the other, to an offset in a job's block.
    fn fetched(&self, block: &G::Block, slabs: u64, at: DeviceOffset) -> G::Weights;
}

/// Notes when work runs on the device, for a trace.
pub trait Spans: Send + Sync + Clone {
    /// What follows belongs to this operation.
    fn set_op(&self, op: u64);
    /// What was noted since the last answer. Waits for it.
    fn take(&self) -> Result<Vec<DeviceSpan>>;
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopyDirection {
    ToDevice,
    ToHost,
}

/// `count` runs of `bytes` each, between a host block and a job's block. Pitches are from run to run.
#[derive(Debug, Clone, Copy)]
pub struct HostCopy<'a> {
    pub direction: CopyDirection,
    pub host: u64,
    pub device: u64,
    pub bytes: u64,
    pub count: u64,
    pub host_pitch: u64,
    pub device_pitch: u64,
    /// For errors, such as "fetching weights".
    pub doing: &'a str,
}

impl HostCopy<'_> {
    /// One run.
    pub fn run(direction: CopyDirection, host: u64, device: u64, bytes: u64, doing: &str) -> HostCopy<'_> {
        HostCopy { direction, host, device, bytes, count: 1, host_pitch: bytes, device_pitch: bytes, doing }
    }
}

/// Rows of a frame, as offsets into a block.
#[derive(Debug, Clone, Copy)]
pub struct RowCopy {
    pub from: u64,
    pub to: u64,
    pub bytes: u64,
}

/// Bytes of a row, and from one row to the next at either side.
#[derive(Debug, Clone, Copy)]
pub struct RowPitches {
    pub row: u64,
    pub from: u64,
    pub to: u64,
}

/// What happens to rows of a cache in 8 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum U8Copy {
    /// To 8 bits.
    Store,
    /// From 8 bits.
    Restore,
    /// To 8 bits and back.
    Round,
}

/// Columns of rows. `width`: of the whole rows where they are not in 8 bits. In 8 bits there are the columns alone.
#[derive(Debug, Clone, Copy)]
pub struct U8Rows {
    pub part: FrameShape,
    pub width: u64,
    pub rows: u64,
}

impl U8Rows {
    /// As they are read, and as they are written.
    pub fn sides(self, sizes: impl RowSizes, copy: U8Copy) -> [PitchedRows; 2] {
        let U8Rows { part, width, rows } = self;
        let (stored, row) = (sizes.u8_row_bytes(part), sizes.row_bytes(part));
        let exact = PitchedRows { rows, row, pitch: sizes.row_bytes(FrameShape { width, ..part }) };
        let stored = PitchedRows { rows, row: stored, pitch: stored };
        match copy {
            U8Copy::Store => [exact, stored],
            U8Copy::Restore => [stored, exact],
            U8Copy::Round => [exact, exact],
        }
    }
}

/// Rows of so many bytes, and the bytes from one row to the next.
#[derive(Debug, Clone, Copy)]
pub struct PitchedRows {
    pub rows: u64,
    pub row: u64,
    pub pitch: u64,
}

impl PitchedRows {
    /// From the first byte to the last.
    pub fn reach(self) -> u64 {
        (self.rows - 1) * self.pitch + self.row
    }
}

/// What all launches of a convolution share.
#[derive(Clone, Copy)]
pub struct ConvLaunch<'a> {
    pub layout: &'a ConvLayout,
    pub input: FrameShape,
    pub statistics: bool,
    pub scratch: u64,
    pub partial_sums: &'a PartialSums<Offsets>,
}

impl<'a> ConvLaunch<'a> {
    pub fn of(op: &'a ConvOp<Offsets>, scratch: u64) -> ConvLaunch<'a> {
        let (layout, input, statistics, partial_sums) = (&op.layout, op.input, op.statistics, &op.partial_sums);
        ConvLaunch { layout, input, statistics, scratch, partial_sums }
    }

    pub fn output(&self) -> FrameShape {
        self.layout.window.output(self.input, self.layout.cout)
    }
}

/// A band of a convolution. Frames that are read begin at the first of `input_rows`, those of a shortcut at the first
/// of `rows`. Outputs and residuals begin where the whole frame would; only the band's rows are backed by memory.
pub struct ConvBand<'a, G: GpuMemory> {
    /// Rows of the tile grid.
    pub rows: Range<u64>,
    /// Rows of the input that they read.
    pub input_rows: Range<u64>,
    pub split: Option<SplitFrames<'a>>,
    /// Where it runs, if not in the main queue.
    pub queue: Option<&'a G::Queue>,
    pub next_norm: Option<NextNorm<'a, G>>,
}

impl<G: GpuMemory> ConvBand<'_, G> {
    pub fn whole(layout: &ConvLayout, input: FrameShape) -> Self {
        let rows = 0..tile_grid(layout, input).height;
        ConvBand { rows, input_rows: 0..input.height, split: None, queue: None, next_norm: None }
    }

    /// The prologue that is applied to the output.
    pub fn next_prologue(&self) -> Prologue {
        self.next_norm.as_ref().map_or(Prologue::None, |norm| norm.of.layout.prologue)
    }
}

/// Cached frames that are split by column: (resident part, host part), both from the first input row of a band. Terms
/// name them by the resident part.
#[derive(Clone, Copy)]
pub struct SplitFrames<'a> {
    pub columns: SplitColumns,
    pub frames: &'a [(DeviceOffset, DeviceOffset)],
}

impl SplitFrames<'_> {
    pub fn host_part(&self, resident: DeviceOffset) -> Option<DeviceOffset> {
        self.frames.iter().find(|(frame, _)| *frame == resident).map(|(_, host)| *host)
    }
}

/// The norm in the prologue of a layer, and the shape of its input.
pub struct NormOf<'a, G: GpuMemory> {
    pub weights: &'a G::Weights,
    pub layout: &'a ConvLayout,
    pub shape: FrameShape,
}

/// The norm of the layer that reads the output, where [`LaunchConv::normalises_output`]. The statistics of its frames
/// are known.
pub struct NextNorm<'a, G: GpuMemory> {
    pub of: NormOf<'a, G>,
    pub statistics: &'a [DeviceOffset],
}

/// Rows of frames to normalise, and the bytes from one frame's rows to the next's at the destination.
pub struct NormRows {
    pub rows: Range<u64>,
    pub out_bytes: u64,
}

/// Rows without gaps that are normalised in place. Their statistics are elsewhere.
#[derive(Debug, Clone, Copy)]
pub struct NormInPlace {
    pub first: DeviceOffset,
    pub pixels: u64,
    pub statistics: DeviceOffset,
}

/// Where a frame of a tensor lies for a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TensorPlace {
    /// An offset in the job's block.
    Staged(u64),
    /// The host's own memory on the device.
    Address(u64),
}

/// An area of a frame of a tensor in device memory. Strides are in elements.
#[derive(Debug, Clone, Copy)]
pub struct TensorFrame {
    pub at: TensorPlace,
    pub dtype: DType,
    pub channels: u64,
    pub rows: u64,
    pub columns: u64,
    pub by_channel: i64,
    pub by_row: i64,
    pub by_column: i64,
}

impl TensorFrame {
    /// The frame for kernels.
    pub fn strided(&self, block: &impl AddressedBlock) -> Result<Strided> {
        let bytes = self.channels * self.rows * self.columns * self.dtype.bytes();
        Ok(Strided {
            data: match self.at {
                TensorPlace::Staged(offset) => block.at(offset, bytes)?,
                TensorPlace::Address(address) => address,
            },
            by_channel: self.by_channel,
            by_row: self.by_row,
            by_column: self.by_column,
            dtype: self.dtype as u32,
            channels: self.channels as i32,
            height: self.rows as i32,
            width: self.columns as i32,
        })
    }
}

/// A frame of a tensor, field for field as the kernels of every API declare it. Strides are in elements.
#[repr(C)]
#[derive(Clone, Copy, Default, PartialEq)]
pub struct Strided {
    pub data: u64,
    pub by_channel: i64,
    pub by_row: i64,
    pub by_column: i64,
    /// The code of [`DType`].
    pub dtype: u32,
    pub channels: i32,
    pub height: i32,
    pub width: i32,
}

/// Memory, queues, events and copies of one device.
pub trait GpuMemory: Send + Sync + Sized + 'static {
    type Event: Event;
    type Queue: Queue<Event = Self::Event, Spans = Self::Spans>;
    /// A job's device memory.
    type Block: Send;
    type HostBlock: HostBlock;
    type Flags: NonFiniteFlags;
    type Spans: Spans;
    /// A convolution's weights on the device.
    type Weights;
    /// What the statistics of a convolution need of its launches.
    type Launched;
    /// While one lives on a thread, the thread may call the other methods.
    type Current<'a>;

    /// The longest pitch of a [`HostCopy`].
    const MAX_PITCH: u64;

    fn enter(&self) -> Result<Self::Current<'_>>;
    fn event(&self) -> Result<Self::Event>;
    fn queue(&self) -> Result<Self::Queue>;
    fn host_block(&self, bytes: u64) -> Result<Self::HostBlock>;
    fn flags(&self) -> Result<Self::Flags>;
    /// Puts a copy into a queue. Until it has run, nothing else writes what it reads, or touches what it writes.
    fn copy(&self, queue: &Self::Queue, block: &Self::Block, host: &Self::HostBlock, copy: &HostCopy) -> Result<()>;
    fn spans(&self) -> Result<Self::Spans>;

    /// Whether work may be put in order with the host's queue. An API that takes none refuses all.
    fn check_stream(&self, host: HostStream) -> Result<()>;
    /// Later work in the main queue waits for what the host's queue holds.
    fn wait_for_host(&self, host: HostStream) -> Result<()> {
        self.check_stream(host)
    }
    /// Later work in the host's queue waits for what the main queue holds.
    fn host_waits(&self, host: HostStream) -> Result<()> {
        self.check_stream(host)
    }
}

/// Convolutions. Launches without a queue go to the main queue, where operations run in order.
pub trait LaunchConv: GpuMemory {
    /// Whole frames, with their statistics.
    fn conv(&self, block: &Self::Block, weights: &Self::Weights, op: &ConvOp<Offsets>, scratch: u64) -> Result<()>;
    /// A band, without the statistics, which need all bands.
    fn conv_band(
        &self,
        block: &Self::Block,
        weights: &Self::Weights,
        conv: &ConvLaunch,
        frames: &[ConvFrame<Offsets>],
        band: &ConvBand<Self>,
    ) -> Result<Self::Launched>;
    /// Whether a convolution of this layout takes a [`NextNorm`].
    fn normalises_output(&self, _layout: &ConvLayout) -> Result<bool> {
        Ok(false)
    }
}

/// Norms and their statistics.
pub trait LaunchNorm: GpuMemory {
    /// The statistics of all output frames after the last band, each to its place, if the convolution takes them.
    fn statistics(
        &self,
        block: &Self::Block,
        conv: &ConvLaunch,
        launched: &Self::Launched,
        into: &[DeviceOffset],
    ) -> Result<()>;
    /// (from, to) of each frame. `rows`: `None` for whole frames.
    fn norm(
        &self,
        block: &Self::Block,
        norm: &NormOf<Self>,
        frames: &[(DeviceOffset, DeviceOffset)],
        rows: Option<NormRows>,
    ) -> Result<()>;
    fn norm_in_place(&self, block: &Self::Block, norm: &NormOf<Self>, frame: NormInPlace) -> Result<()>;
}

/// Copies within a job's block.
pub trait LaunchCopies: GpuMemory {
    /// Rows, in the main queue unless another is given. Without pitches there are no gaps between them.
    fn copy_rows(
        &self,
        queue: Option<&Self::Queue>,
        block: &Self::Block,
        copies: &[RowCopy],
        pitches: Option<RowPitches>,
    ) -> Result<()>;
    /// (from, to) of each frame: offsets of the first row's first column.
    fn copy_u8(
        &self,
        queue: &Self::Queue,
        block: &Self::Block,
        copy: U8Copy,
        of: U8Rows,
        frames: &[(u64, u64)],
    ) -> Result<()>;
}

/// What lies between tensors and activations.
pub trait LaunchPixels: GpuMemory {
    fn load(&self, block: &Self::Block, op: &LoadTensor, from: &TensorFrame, flags: &Self::Flags) -> Result<()>;
    fn store(
        &self,
        block: &Self::Block,
        op: &StoreTensor,
        into: &TensorFrame,
        scratch: u64,
        flags: &Self::Flags,
    ) -> Result<()>;
    fn blend(&self, block: &Self::Block, op: &BlendTile, scratch: u64) -> Result<()>;
}

/// Shortcuts around levels, in the main queue. No output frame is there twice.
pub trait LaunchLevels: GpuMemory {
    fn pool(&self, block: &Self::Block, op: &PoolOp<Offsets>) -> Result<()>;
    fn add(&self, block: &Self::Block, op: &AddOp<Offsets>) -> Result<()>;
}

/// A device that operations run on.
pub trait GpuApi: LaunchConv + LaunchNorm + LaunchCopies + LaunchPixels + LaunchLevels {
    type Sizes: RowSizes;
    type Conv: GpuConv<Self>;

    /// The most frames of one launch.
    const MAX_FRAMES: usize;

    fn sizes(&self) -> Self::Sizes;
    fn limit(&self) -> LaunchLimit;
    /// The main queue, with all launches in it.
    fn main_queue(&self) -> &Self::Queue;
    /// Begins an operation of so many output elements; `None` for one that copies, or never repeats. An API may collect
    /// the launches of small ones.
    fn begin_operation(&self, _elements: Option<u64>) {}
    /// Ends it. `false` if its launches are still being collected.
    fn end_operation(&self) -> Result<bool> {
        Ok(true)
    }
    /// Puts everything collected into the main queue.
    fn flush(&self) -> Result<()> {
        Ok(())
    }
    /// Notes when the work runs that `launch` puts into the main queue.
    fn record_span(&self, spans: &Self::Spans, lane: &'static str, launch: impl FnOnce() -> Result<()>) -> Result<()>;
    fn attention(&self, block: &Self::Block, op: &AttentionOp<Offsets>) -> Result<()>;
}

/// Convolves whole frames, at most so many at a time, and takes their statistics.
pub fn conv_whole<G: GpuApi>(
    gpu: &G,
    block: &G::Block,
    weights: &G::Weights,
    conv: &ConvLaunch,
    frames: &[ConvFrame<Offsets>],
    most: usize,
) -> Result<()> {
    let bytes = gpu.sizes().data_bytes(conv.output());
    for frames in frames.chunks(most) {
        let launched = gpu.conv_band(block, weights, conv, frames, &ConvBand::whole(conv.layout, conv.input))?;
        let into: Vec<DeviceOffset> = frames.iter().map(|frame| DeviceOffset(frame.out.0 + bytes)).collect();
        gpu.statistics(block, conv, &launched, &into)?;
    }
    Ok(())
}
