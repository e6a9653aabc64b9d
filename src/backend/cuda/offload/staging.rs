//! Host tensors on their way to and from the device through staging buffers, and weights that are fetched. Each
//! direction has a stream of its own, so copies overlap with the operations before and after them.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use crate::backend::NonFinite;
use crate::backend::cuda::driver::{Context, CudaStream, DeviceBlock, Event, HostFlags, PinnedMemory, SpanRecorder};
use crate::backend::cuda::launch::tiling::FRAME_ALIGN;
use crate::backend::cuda::launch::{Launcher, Strided};
use crate::error::{Error, Result};
use crate::ir::{Buffers, LoadTensor, PinnedBytes, StoreTensor, TensorDevice, View};

/// One direction. Pinned memory is double-buffered: the host fills or empties one half while the other is copied. The
/// device has a single staging buffer, sized for the widest elements; narrower frames double-buffer in its halves.
struct StagingChannel {
    pinned: Option<PinnedMemory>,
    stream: CudaStream,
    /// Bytes of a half of the pinned memory.
    half_bytes: u64,
    /// The last copy from or to each half has ended.
    copied: [Event; 2],
    /// The last kernel that reads or writes each half's frame on the device has ended.
    used: [Event; 2],
    next_half: usize,
    /// Whether the last frame took all of the device's buffer. Loads know that by both of `used`.
    was_whole: bool,
}

impl StagingChannel {
    fn new(context: &Arc<Context>, bytes: u64) -> Result<StagingChannel> {
        Ok(StagingChannel {
            stream: CudaStream::new(context)?,
            pinned: if bytes > 0 { Some(PinnedMemory::new(context, bytes)?) } else { None },
            half_bytes: bytes / 2,
            copied: [Event::new(context)?, Event::new(context)?],
            used: [Event::new(context)?, Event::new(context)?],
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
        self.half_bytes / 2 / FRAME_ALIGN * FRAME_ALIGN
    }

    /// Takes the next half of the pinned memory.
    fn take_half(&mut self, bytes: u64) -> Result<(usize, *mut u8)> {
        let Some(pinned) = self.pinned.as_ref().filter(|_| bytes <= self.half_bytes) else {
            return Err(Error::Internal(format!("{bytes} bytes of staging were not planned")));
        };
        let half = self.next_half;
        self.next_half = 1 - half;
        self.was_whole = bytes > self.device_half();
        Ok((half, pinned.at(half as u64 * self.half_bytes, self.half_bytes)?))
    }
}

/// A frame on its way to pinned memory, and from there to the host's tensor.
struct PendingStore {
    frame: CompactFrame,
    pinned: *mut u8,
}

// SAFETY: an address in pinned memory that is owned together with this.
unsafe impl Send for PendingStore {}

/// Both directions of a job. Every method wants the context to be current.
pub struct Staging {
    loads: StagingChannel,
    stores: StagingChannel,
    pending: [Option<PendingStore>; 2],
    /// When the weights at an address have arrived.
    fetched: HashMap<u64, Event>,
    /// Whether a load or a store met values that are not finite.
    flags: HostFlags,
}

const LOADED: usize = 0;
const STORED: usize = 1;

impl Staging {
    pub fn new(context: &Arc<Context>, bytes: PinnedBytes) -> Result<Staging> {
        let (loads, stores) = (StagingChannel::new(context, bytes.load)?, StagingChannel::new(context, bytes.store)?);
        let flags = HostFlags::new(context)?;
        Ok(Staging { loads, stores, pending: [None, None], fetched: HashMap::new(), flags })
    }

    /// Notes when copies run.
    pub fn set_spans(&mut self, spans: Option<&Arc<SpanRecorder>>) {
        self.loads.stream.set_spans(spans.map(|spans| (Arc::clone(spans), "frames and weights to device")));
        self.stores.stream.set_spans(spans.map(|spans| (Arc::clone(spans), "frames to host")));
    }

    /// What finished loads and stores have met since the last answer.
    pub fn take_nonfinite(&mut self) -> NonFinite {
        NonFinite { loaded: self.flags.take(LOADED), stored: self.flags.take(STORED) }
    }

    /// Host tensor to activations. A tensor on the device is read in place.
    pub fn load(&mut self, launcher: &Launcher, block: &DeviceBlock, op: &LoadTensor, staging: u64) -> Result<()> {
        check_frame(op.from, op.batch, op.frame)?;
        let tensor = op.from.shape();
        let (top, left) = (op.top.min(tensor.height - 1), op.left.min(tensor.width - 1));
        let rows = (tensor.height - top).min(op.shape.height);
        let area = PixelArea { top, left, rows, columns: (tensor.width - left).min(op.shape.width) };
        if op.from.device() != TensorDevice::Cpu {
            return launcher.load(block, op, in_place(op.from, op.batch, op.frame, area), self.flags.at(LOADED));
        }
        let frame = CompactFrame::new(op.from, op.batch, op.frame, area);
        let (offset, _) = self.loads.on_device(frame.bytes(), self.loads.next_half);
        let staged = block.at(staging + offset, frame.bytes())?;
        let compute = launcher.queue.stream();
        self.upload(&frame, staged, compute)?;
        launcher.load(block, op, frame.strided(staged), self.flags.at(LOADED))?;
        // The half that was just filled is free again once the kernel has read it.
        let (_, halves) = self.loads.on_device(frame.bytes(), 1 - self.loads.next_half);
        halves.iter().try_for_each(|half| compute.record(&self.loads.used[*half]))
    }

    /// Activations to host tensor, which is written by [`Staging::finish`]. A tensor on the device is written in place.
    pub fn store(
        &mut self,
        launcher: &Launcher,
        block: &DeviceBlock,
        op: &StoreTensor,
        buffers: &Buffers,
    ) -> Result<()> {
        check_frame(op.into, op.batch, op.frame)?;
        let area = PixelArea::whole(op.into);
        if op.into.device() != TensorDevice::Cpu {
            let frame = in_place(op.into, op.batch, op.frame, area);
            return launcher.store(block, op, buffers.scratch, frame, self.flags.at(STORED));
        }
        let frame = CompactFrame::new(op.into, op.batch, op.frame, area);
        let (offset, halves) = self.stores.on_device(frame.bytes(), self.stores.next_half);
        let staged = block.at(buffers.staging[1] + offset, frame.bytes())?;
        let compute = launcher.queue.stream();
        halves.iter().try_for_each(|half| compute.wait_for(&self.stores.copied[*half]))?;
        launcher.store(block, op, buffers.scratch, frame.strided(staged), self.flags.at(STORED))?;
        self.download(&frame, staged, compute)
    }

    /// Later work in `compute` waits until the frame has arrived.
    fn upload(&mut self, frame: &CompactFrame, staged: u64, compute: &CudaStream) -> Result<()> {
        let (bytes, channel) = (frame.bytes(), &mut self.loads);
        let (half, pinned) = channel.take_half(bytes)?;
        channel.copied[half].synchronise()?;
        // SAFETY: the half is that long and no copy reads it any more; the view's maker vouches for its memory during
        // the call.
        unsafe { frame.gather(pinned) };
        let (_, halves) = channel.on_device(bytes, half);
        halves.iter().try_for_each(|half| channel.stream.wait_for(&channel.used[*half]))?;
        // SAFETY: both regions are that long; neither is touched before the events that say so.
        unsafe { channel.stream.upload("copying a frame to the GPU", pinned, staged, bytes as usize) }?;
        channel.stream.record(&channel.copied[half])?;
        compute.wait_for(&channel.copied[half])
    }

    /// Copies what `compute` has just written.
    fn download(&mut self, frame: &CompactFrame, staged: u64, compute: &CudaStream) -> Result<()> {
        let half = self.stores.next_half;
        compute.record(&self.stores.used[half])?;
        self.complete_store(half)?;
        let (bytes, channel) = (frame.bytes(), &mut self.stores);
        let (half, pinned) = channel.take_half(bytes)?;
        channel.stream.wait_for(&channel.used[half])?;
        // SAFETY: both regions are that long; the pinned one is read after its event alone, and was just emptied.
        unsafe { channel.stream.download("copying a frame to the host", staged, pinned, bytes as usize) }?;
        channel.stream.record(&channel.copied[half])?;
        self.pending[half] = Some(PendingStore { frame: *frame, pinned });
        Ok(())
    }

    /// Copies the parts of a layer's weights, one after the other, to an address that no later work in `compute` uses.
    pub fn fetch_weights(&mut self, weights: [&[u8]; 2], to: u64, compute: &CudaStream) -> Result<()> {
        let channel = &mut self.loads;
        let arrived = match self.fetched.entry(to) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => new.insert(Event::new(channel.stream.context())?),
        };
        arrived.order(compute.handle(), channel.stream.handle())?;
        let mut address = to;
        for part in weights {
            // SAFETY: the plan vouches for the region; pinned memory waits for all streams before it is freed.
            unsafe { channel.stream.upload("fetching weights", part.as_ptr(), address, part.len()) }?;
            address += part.len() as u64;
        }
        channel.stream.record(arrived)
    }

    /// Later work in `compute` waits for the weights at an address.
    pub fn await_weights(&self, at: u64, compute: &CudaStream) -> Result<()> {
        match self.fetched.get(&at) {
            Some(arrived) => compute.wait_for(arrived),
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
        if let Some(store) = self.pending[half].take() {
            self.stores.copied[half].synchronise()?;
            // SAFETY: the event says that the copy has ended; the view's maker vouches for its memory during the call.
            unsafe { store.frame.scatter(store.pinned) };
        }
        Ok(())
    }

    /// Later work in `compute` waits for all copies, and later uploads wait for `compute`: the job before may still
    /// read their destination.
    pub fn join(&self, compute: &CudaStream) -> Result<()> {
        self.loads.stream.join(compute, &[&self.loads.stream, &self.stores.stream])
    }

    pub fn synchronise(&self) -> Result<()> {
        self.loads.stream.synchronise().and(self.stores.stream.synchronise())
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
fn in_place(view: &View, batch: u64, frame: u64, area: PixelArea) -> Strided {
    let [_, by_channel, _, by_row, by_column] = view.strides();
    let offset = (area.top as i64 * by_row + area.left as i64 * by_column) * view.dtype().bytes() as i64;
    let data = (view.frame(batch, frame).addr() as u64).wrapping_add_signed(offset);
    strided(data, view, area, [by_channel, by_row, by_column])
}

fn strided(data: u64, view: &View, area: PixelArea, [by_channel, by_row, by_column]: [i64; 3]) -> Strided {
    Strided {
        data,
        by_channel,
        by_row,
        by_column,
        dtype: view.dtype() as u32,
        channels: view.shape().channels as i32,
        height: area.rows as i32,
        width: area.columns as i32,
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

    /// The compact copy, as kernels see it.
    fn strided(&self, staged: u64) -> Strided {
        let (rows, columns) = (self.area.rows as i64, self.area.columns as i64);
        let channels = self.view.shape().channels as i64;
        let strides = match self.interleaved {
            true => [1, columns * channels, channels],
            false => [rows * columns, columns, 1],
        };
        strided(staged, &self.view, self.area, strides)
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
        let (lines, run, steps, step) = match self.interleaved {
            true if by_column == channels as isize => (1, columns * channels, 1, 0),
            true => (1, channels, columns, by_column),
            false if by_column == 1 => (channels, columns, 1, 0),
            false => (channels, 1, columns, by_column),
        };
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
