//! Host tensors on their way to and from the device through staging buffers, and weights that are fetched. Each
//! direction has a queue of its own, so copies overlap with the operations before and after them.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ops::Range;

use super::api::{CopyDirection, Event, GpuApi, HostBlock, HostCopy, Queue, TensorFrame, TensorPlace};
use super::bands::join;
use super::rows::RowSizes;
use crate::error::{Error, Result};
use crate::ir::{Buffers, DeviceOffset, LoadTensor, PinnedBytes, StoreTensor, TensorDevice, View};

/// One direction. Pinned memory is double-buffered: the host fills or empties one half while the other is copied. The
/// device has a single staging buffer, sized for the widest elements; narrower frames double-buffer in its halves.
struct StagingChannel<G: GpuApi> {
    pinned: Option<G::HostBlock>,
    queue: G::Queue,
    /// Bytes of a half of the pinned memory.
    half_bytes: u64,
    /// The last copy from or to each half has ended.
    copied: [G::Event; 2],
    /// The last launch that reads or writes each half's frame on the device has ended.
    used: [G::Event; 2],
    next_half: usize,
    /// Whether the last frame took all of the device's buffer. Loads know that by both of `used`.
    was_whole: bool,
}

impl<G: GpuApi> StagingChannel<G> {
    fn new(gpu: &G, bytes: u64) -> Result<StagingChannel<G>> {
        Ok(StagingChannel {
            queue: gpu.queue()?,
            pinned: if bytes > 0 { Some(gpu.host_block(bytes)?) } else { None },
            half_bytes: bytes / 2,
            copied: [gpu.event()?, gpu.event()?],
            used: [gpu.event()?, gpu.event()?],
            next_half: 0,
            was_whole: false,
        })
    }

    /// Where a frame of so many bytes goes in the device's buffer, and which halves it has to wait for.
    fn on_device(&self, bytes: u64, half: usize) -> (u64, &'static [usize]) {
        let offset = if bytes > self.device_half() { 0 } else { half as u64 * self.device_half() };
        let halves: &[usize] = match half {
            _ if bytes > self.device_half() || self.was_whole => &[0, 1],
            0 => &[0],
            _ => &[1],
        };
        (offset, halves)
    }

    fn device_half(&self) -> u64 {
        let align = G::Sizes::FRAME_ALIGN;
        self.half_bytes / 2 / align * align
    }

    /// Takes the next half of the pinned memory.
    fn take_half(&mut self, bytes: u64) -> Result<usize> {
        self.pinned(bytes)?;
        let half = self.next_half;
        self.next_half = 1 - half;
        self.was_whole = bytes > self.device_half();
        Ok(half)
    }

    /// The pinned memory, whose halves have room for so many bytes.
    fn pinned(&self, bytes: u64) -> Result<&G::HostBlock> {
        let pinned = self.pinned.as_ref().filter(|_| bytes <= self.half_bytes);
        pinned.ok_or_else(|| Error::Internal(format!("{bytes} bytes of staging were not planned")))
    }

    /// Where a half begins.
    fn half_address(&self, half: usize, bytes: u64) -> Result<*mut u8> {
        self.pinned(bytes)?.at(half as u64 * self.half_bytes, bytes)
    }

    /// Copies a half from or to the device's buffer.
    fn copy(&self, gpu: &G, block: &G::Block, half: usize, copy: HostCopy) -> Result<()> {
        let host = half as u64 * self.half_bytes;
        gpu.copy(&self.queue, block, self.pinned(copy.bytes)?, &HostCopy { host, ..copy })?;
        self.queue.record(&self.copied[half])
    }
}

/// Both directions of a job. Every method wants the device to be entered.
pub struct Staging<G: GpuApi> {
    loads: StagingChannel<G>,
    stores: StagingChannel<G>,
    /// Frames on their way to each half of pinned memory, and from there to the host's tensor.
    pending: [Option<CompactFrame>; 2],
    /// When the weights at an offset have arrived.
    fetched: HashMap<u64, G::Event>,
    /// Whether a load or a store met values that are not finite.
    pub flags: G::Flags,
}

impl<G: GpuApi> Staging<G> {
    pub fn new(gpu: &G, bytes: PinnedBytes) -> Result<Staging<G>> {
        let (loads, stores) = (StagingChannel::new(gpu, bytes.load)?, StagingChannel::new(gpu, bytes.store)?);
        Ok(Staging { loads, stores, pending: [None, None], fetched: HashMap::new(), flags: gpu.flags()? })
    }

    /// Notes when copies run.
    pub fn set_spans(&mut self, spans: Option<&G::Spans>) {
        self.loads.queue.set_spans(spans, "frames and weights to device");
        self.stores.queue.set_spans(spans, "frames to host");
    }

    /// Host tensor to activations. A tensor on the device is read in place.
    pub fn load(&mut self, gpu: &G, block: &G::Block, op: &LoadTensor, staging: u64) -> Result<()> {
        check_frame(op.from, op.batch, op.frame)?;
        let area = PixelArea::of_load(op);
        if op.from.device() != TensorDevice::Cpu {
            return gpu.load(block, op, &in_place(op.from, op.batch, op.frame, area), &self.flags);
        }
        let frame = CompactFrame::new(op.from, op.batch, op.frame, area);
        let (offset, _) = self.loads.on_device(frame.bytes(), self.loads.next_half);
        self.upload(gpu, block, &frame, staging + offset)?;
        gpu.load(block, op, &frame.staged(staging + offset), &self.flags)?;
        // The half that was just filled is free again once the launch has read it.
        let (_, halves) = self.loads.on_device(frame.bytes(), 1 - self.loads.next_half);
        halves.iter().try_for_each(|half| gpu.main_queue().record(&self.loads.used[*half]))
    }

    /// Activations to host tensor, which is written by [`Staging::finish`]. A tensor on the device is written in place.
    pub fn store(&mut self, gpu: &G, block: &G::Block, op: &StoreTensor, buffers: &Buffers) -> Result<()> {
        check_frame(op.into, op.batch, op.frame)?;
        let area = PixelArea::whole(op.into);
        if op.into.device() != TensorDevice::Cpu {
            let frame = in_place(op.into, op.batch, op.frame, area);
            return gpu.store(block, op, &frame, buffers.scratch, &self.flags);
        }
        let frame = CompactFrame::new(op.into, op.batch, op.frame, area);
        let (offset, halves) = self.stores.on_device(frame.bytes(), self.stores.next_half);
        let staged = buffers.staging[1] + offset;
        let main = gpu.main_queue();
        halves.iter().try_for_each(|half| main.wait_for(&self.stores.copied[*half]))?;
        gpu.store(block, op, &frame.staged(staged), buffers.scratch, &self.flags)?;
        self.download(gpu, block, frame, staged)
    }

    /// Later work in the main queue waits until the frame has arrived.
    fn upload(&mut self, gpu: &G, block: &G::Block, frame: &CompactFrame, staged: u64) -> Result<()> {
        let (bytes, channel) = (frame.bytes(), &mut self.loads);
        let half = channel.take_half(bytes)?;
        channel.copied[half].synchronise()?;
        // SAFETY: the half is that long and no copy reads it any more; the view's maker vouches for its memory during
        // the call.
        unsafe { frame.gather(channel.half_address(half, bytes)?) };
        let (_, halves) = channel.on_device(bytes, half);
        halves.iter().try_for_each(|half| channel.queue.wait_for(&channel.used[*half]))?;
        let copy = HostCopy::run(CopyDirection::ToDevice, 0, staged, bytes, "copying a frame to the GPU");
        channel.copy(gpu, block, half, copy)?;
        gpu.main_queue().wait_for(&channel.copied[half])
    }

    /// Copies what the main queue has just written.
    fn download(&mut self, gpu: &G, block: &G::Block, frame: CompactFrame, staged: u64) -> Result<()> {
        let half = self.stores.next_half;
        gpu.main_queue().record(&self.stores.used[half])?;
        self.complete_store(half)?;
        let (bytes, channel) = (frame.bytes(), &mut self.stores);
        let half = channel.take_half(bytes)?;
        channel.queue.wait_for(&channel.used[half])?;
        let copy = HostCopy::run(CopyDirection::ToHost, 0, staged, bytes, "copying a frame to the host");
        channel.copy(gpu, block, half, copy)?;
        self.pending[half] = Some(frame);
        Ok(())
    }

    /// Copies the parts of a layer's weights, one after the other, to an offset that no later work in the main queue
    /// uses.
    pub fn fetch_weights(
        &mut self,
        gpu: &G,
        block: &G::Block,
        host: &G::HostBlock,
        parts: [Range<u64>; 2],
        to: DeviceOffset,
    ) -> Result<()> {
        let queue = &self.loads.queue;
        let arrived = match self.fetched.entry(to.0) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => new.insert(gpu.event()?),
        };
        gpu.main_queue().record(arrived)?;
        queue.wait_for(arrived)?;
        let mut device = to.0;
        for part in parts {
            let bytes = part.end - part.start;
            let copy = HostCopy::run(CopyDirection::ToDevice, part.start, device, bytes, "fetching weights");
            gpu.copy(queue, block, host, &copy)?;
            device += bytes;
        }
        queue.record(arrived)
    }

    /// Later work in `main` waits for the weights at an offset.
    pub fn await_weights(&self, at: DeviceOffset, main: &G::Queue) -> Result<()> {
        match self.fetched.get(&at.0) {
            Some(arrived) => main.wait_for(arrived),
            None => Err(Error::Internal("weights are needed that were not fetched".into())),
        }
    }

    /// Waits for pending stores and writes them to the host's tensors. They are forgotten in any case: the tensors are
    /// the host's again.
    pub fn finish(&mut self) -> Result<()> {
        let [first, second] = [0, 1].map(|half| self.complete_store((self.stores.next_half + half) % 2));
        first.and(second)
    }

    fn complete_store(&mut self, half: usize) -> Result<()> {
        if let Some(frame) = self.pending[half].take() {
            self.stores.copied[half].synchronise()?;
            let from = self.stores.half_address(half, frame.bytes())?;
            // SAFETY: the event says that the copy has ended; the view's maker vouches for its memory during the call.
            unsafe { frame.scatter(from) };
        }
        Ok(())
    }

    /// Later work in the main queue waits for all copies, and later uploads wait for the main queue: the job before may
    /// still read their destination.
    pub fn join(&self, gpu: &G) -> Result<()> {
        join(gpu, &self.loads.queue, &[&self.loads.queue, &self.stores.queue])
    }

    pub fn synchronise(&self) -> Result<()> {
        self.loads.queue.synchronise().and(self.stores.queue.synchronise())
    }
}

/// The view's maker vouches for the frames it has, and for no others.
fn check_frame(view: &View, batch: u64, frame: u64) -> Result<()> {
    let shape = view.shape();
    if batch < shape.batch && frame < shape.frames {
        return Ok(());
    }
    Err(Error::Internal(format!("frame {frame} of clip {batch} is not in a tensor {shape}")))
}

/// An area of a tensor on the device.
fn in_place(view: &View, batch: u64, frame: u64, area: PixelArea) -> TensorFrame {
    let [_, by_channel, _, by_row, by_column] = view.strides();
    let offset = (area.top as i64 * by_row + area.left as i64 * by_column) * view.dtype().bytes() as i64;
    let address = (view.frame(batch, frame).addr() as u64).wrapping_add_signed(offset);
    tensor_frame(TensorPlace::Address(address), view, area, [by_channel, by_row, by_column])
}

fn tensor_frame(at: TensorPlace, view: &View, area: PixelArea, strides: [i64; 3]) -> TensorFrame {
    let [by_channel, by_row, by_column] = strides;
    TensorFrame {
        at,
        dtype: view.dtype(),
        channels: view.shape().channels,
        rows: area.rows,
        columns: area.columns,
        by_channel,
        by_row,
        by_column,
    }
}

/// Rows and columns of a tensor.
#[derive(Clone, Copy)]
struct PixelArea {
    top: u64,
    left: u64,
    rows: u64,
    columns: u64,
}

impl PixelArea {
    /// What a load reads.
    fn of_load(op: &LoadTensor) -> PixelArea {
        let (tensor, side) = (op.from.shape(), op.side());
        let span = |start: u64, length: u64, host: u64| {
            let first = (start * op.patch).min(host * side - 1);
            let end = (first + length * op.patch).min(host * side);
            (first / side, end.div_ceil(side) - first / side)
        };
        let (top, rows) = span(op.top, op.shape.height, tensor.height);
        let (left, columns) = span(op.left, op.shape.width, tensor.width);
        PixelArea { top, left, rows, columns }
    }

    fn whole(view: &View) -> PixelArea {
        PixelArea { top: 0, left: 0, rows: view.shape().height, columns: view.shape().width }
    }
}

/// An area of a frame of a host tensor, which is staged without gaps.
#[derive(Clone, Copy)]
struct CompactFrame {
    view: View,
    batch: u64,
    frame: u64,
    area: PixelArea,
    /// Channels innermost, as in the tensor; else planar.
    interleaved: bool,
}

impl CompactFrame {
    fn new(view: &View, batch: u64, frame: u64, area: PixelArea) -> CompactFrame {
        let interleaved = view.strides()[1] == 1 && view.shape().channels > 1;
        CompactFrame { view: *view, batch, frame, area, interleaved }
    }

    fn bytes(&self) -> u64 {
        self.area.rows * self.area.columns * self.view.shape().channels * self.view.dtype().bytes()
    }

    /// The compact copy at an offset of the block, as launches see it.
    fn staged(&self, offset: u64) -> TensorFrame {
        let (rows, columns) = (self.area.rows as i64, self.area.columns as i64);
        let channels = self.view.shape().channels as i64;
        let interleaved = [1, columns * channels, channels];
        let strides = if self.interleaved { interleaved } else { [rows * columns, columns, 1] };
        tensor_frame(TensorPlace::Staged(offset), &self.view, self.area, strides)
    }

    /// Tensor to compact copy.
    ///
    /// # Safety
    /// `into` has room for it, and the view is of host memory that may be read now.
    unsafe fn gather(&self, into: *mut u8) {
        // SAFETY: the caller's promise.
        unsafe { self.for_each_run(into, |tensor, compact, bytes| compact.copy_from_nonoverlapping(tensor, bytes)) }
    }

    /// Compact copy to tensor.
    ///
    /// # Safety
    /// `from` is one, and the view is of host memory that may be written now.
    unsafe fn scatter(&self, from: *mut u8) {
        // SAFETY: the caller's promise.
        unsafe { self.for_each_run(from, |tensor, compact, bytes| tensor.copy_from_nonoverlapping(compact, bytes)) }
    }

    /// Calls `visit` with every run of bytes that is contiguous both in the tensor and in the compact copy.
    ///
    /// # Safety
    /// `compact` has room for the area.
    unsafe fn for_each_run(&self, compact: *mut u8, visit: impl Fn(*mut u8, *mut u8, usize)) {
        let (view, area) = (&self.view, self.area);
        let element = view.dtype().bytes() as usize;
        let [_, by_channel, _, by_row, by_column] = view.strides().map(|stride| stride as isize);
        let channels = view.shape().channels as usize;
        let (rows, columns) = (area.rows as usize, area.columns as usize);
        let start = view.frame(self.batch, self.frame);
        // A line is `steps` runs, `step` elements of the tensor apart.
        let (lines, pixel_run) = if self.interleaved { (1, channels) } else { (channels, 1) };
        let is_contiguous = by_column == pixel_run as isize;
        let (run, steps, step) =
            if is_contiguous { (columns * pixel_run, 1, 0) } else { (pixel_run, columns, by_column) };
        let bytes = run * element;
        let mut compact = compact;
        for line in 0..lines {
            for y in 0..rows {
                let row = line as isize * by_channel + (area.top as isize + y as isize) * by_row;
                let at = row + area.left as isize * by_column;
                for s in 0..steps {
                    visit(start.wrapping_offset((at + s as isize * step) * element as isize), compact, bytes);
                    // SAFETY: the caller's promise.
                    compact = unsafe { compact.add(bytes) };
                }
            }
        }
    }
}
