//! What the GPU layer asks of CUDA: queues are streams, host blocks are pinned memory, and the launches are those of
//! `launch`.

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUmemorytype};

use super::driver::{
    CopySide, CudaStream, Current, Event, HostFlags, MAX_PITCH, PART, PinnedMemory, SpanRecorder, check,
    check_not_captured, pitched_copy,
};
use super::launch::tiling::MAX_FRAMES;
use super::launch::{ConvParams, CudaSizes, JobBlock, Launcher, WeightPointers};
use super::weights::PreparedConv;
use crate::backend::gpu::{
    self, CopyDirection, GpuApi, GpuConv, GpuMemory, HostBlock, HostCopy, LaunchLimit, NonFiniteFlag, NonFiniteFlags,
    Queue, Spans,
};
use crate::backend::{DeviceSpan, HostStream};
use crate::error::Result;
use crate::ir::{AttentionOp, DeviceOffset, Offsets};

impl Queue for CudaStream {
    type Event = Event;
    type Spans = Arc<SpanRecorder>;

    fn record(&self, event: &Event) -> Result<()> {
        CudaStream::record(self, event)
    }

    fn wait_for(&self, event: &Event) -> Result<()> {
        CudaStream::wait_for(self, event)
    }

    fn synchronise(&self) -> Result<()> {
        CudaStream::synchronise(self)
    }

    fn set_spans(&mut self, spans: Option<&Arc<SpanRecorder>>, lane: &'static str) {
        CudaStream::set_spans(self, spans.map(|spans| (Arc::clone(spans), lane)));
    }
}

impl gpu::Event for Event {
    fn synchronise(&self) -> Result<()> {
        Event::synchronise(self)
    }
}

impl HostBlock for PinnedMemory {
    fn at(&self, offset: u64, bytes: u64) -> Result<*mut u8> {
        PinnedMemory::at(self, offset, bytes)
    }

    fn is_pinned(&self) -> bool {
        PinnedMemory::is_pinned(self)
    }
}

impl NonFiniteFlags for HostFlags {
    fn take(&mut self, flag: NonFiniteFlag) -> bool {
        HostFlags::take(self, flag as usize)
    }
}

impl Spans for Arc<SpanRecorder> {
    fn set_op(&self, op: u64) {
        SpanRecorder::set_op(self, op);
    }

    fn take(&self) -> Result<Vec<DeviceSpan>> {
        SpanRecorder::take(self)
    }
}

impl GpuConv<Launcher> for PreparedConv {
    fn resident(&self) -> Result<WeightPointers> {
        self.pointers()
    }

    fn offloaded(&self, slabs: u64) -> Result<(&PinnedMemory, [Range<u64>; 2])> {
        PreparedConv::offloaded(self, slabs)
    }

    fn fetched(&self, block: &JobBlock, slabs: u64, at: DeviceOffset) -> WeightPointers {
        PreparedConv::fetched(self, slabs, block.address(at))
    }
}

impl GpuMemory for Launcher {
    type Event = Event;
    type Queue = CudaStream;
    type Block = JobBlock;
    type HostBlock = PinnedMemory;
    type Flags = HostFlags;
    type Spans = Arc<SpanRecorder>;
    type Weights = WeightPointers;
    type Launched = ConvParams;
    type Current<'a> = Current<'a>;

    const MAX_PITCH: u64 = MAX_PITCH;

    fn enter(&self) -> Result<Current<'_>> {
        self.context.enter()
    }

    fn event(&self) -> Result<Event> {
        Event::new(&self.context)
    }

    fn queue(&self) -> Result<CudaStream> {
        CudaStream::new(&self.context)
    }

    fn host_block(&self, bytes: u64) -> Result<PinnedMemory> {
        PinnedMemory::new(&self.context, bytes)
    }

    fn flags(&self) -> Result<HostFlags> {
        HostFlags::new(&self.context)
    }

    fn copy(&self, queue: &CudaStream, block: &JobBlock, host: &PinnedMemory, copy: &HostCopy) -> Result<()> {
        within_parts(copy, PART).iter().try_for_each(|piece| copy_piece(queue, block, host, piece))
    }

    fn spans(&self) -> Result<Arc<SpanRecorder>> {
        SpanRecorder::new(&self.context, self.queue.stream().handle()).map(Arc::new)
    }

    fn check_stream(&self, host: HostStream) -> Result<()> {
        check_not_captured(host.0.cast())
    }

    fn wait_for_host(&self, host: HostStream) -> Result<()> {
        let main = self.queue.stream().handle();
        Event::new(&self.context)?.order(host.0.cast(), main)
    }

    fn host_waits(&self, host: HostStream) -> Result<()> {
        let main = self.queue.stream().handle();
        Event::new(&self.context)?.order(main, host.0.cast())
    }
}

/// A copy, cut where it crosses from one part of pinned memory to the next.
fn within_parts<'a>(copy: &HostCopy<'a>, part: u64) -> Vec<HostCopy<'a>> {
    let (mut pieces, mut row) = (Vec::with_capacity(1), 0);
    while row < copy.count {
        let (host, device) = (copy.host + row * copy.host_pitch, copy.device + row * copy.device_pitch);
        let left = part - host % part;
        if copy.bytes <= left {
            let count = ((left - copy.bytes) / copy.host_pitch.max(1) + 1).min(copy.count - row);
            pieces.push(HostCopy { host, device, count, ..*copy });
            row += count;
            continue;
        }
        let mut done = 0;
        while done < copy.bytes {
            let bytes = (part - (host + done) % part).min(copy.bytes - done);
            pieces.push(HostCopy::run(copy.direction, host + done, device + done, bytes, copy.doing));
            done += bytes;
        }
        row += 1;
    }
    pieces
}

/// A copy within a part.
fn copy_piece(queue: &CudaStream, block: &JobBlock, host: &PinnedMemory, copy: &HostCopy) -> Result<()> {
    let reach = |pitch: u64| (copy.count - 1) * pitch + copy.bytes;
    let device = block.at(copy.device, reach(copy.device_pitch))?;
    let host = host.copied_at(copy.host, reach(copy.host_pitch))?;
    if copy.count == 1 {
        // SAFETY: both regions are that long; the layer above orders all that touches them by events, and memory
        // waits for all streams before it is freed.
        return unsafe {
            match copy.direction {
                CopyDirection::ToDevice => queue.upload(copy.doing, host, device, copy.bytes as usize),
                CopyDirection::ToHost => queue.download(copy.doing, device, host, copy.bytes as usize),
            }
        };
    }
    let side = |memory, pitch: u64| CopySide { memory, host: host.cast(), device, pitch: pitch as usize };
    let in_host = side(CUmemorytype::CU_MEMORYTYPE_HOST, copy.host_pitch);
    let on_device = side(CUmemorytype::CU_MEMORYTYPE_DEVICE, copy.device_pitch);
    let (source, target) = match copy.direction {
        CopyDirection::ToDevice => (in_host, on_device),
        CopyDirection::ToHost => (on_device, in_host),
    };
    let described = pitched_copy(source, target, copy.bytes as usize, copy.count as usize);
    queue.copy(|| {
        // SAFETY: as above.
        let answer = unsafe { sys::cuMemcpy2DAsync_v2(&described, queue.handle()) };
        check(copy.doing, answer)
    })
}

impl GpuApi for Launcher {
    type Sizes = CudaSizes;
    type Conv = PreparedConv;

    const MAX_FRAMES: usize = MAX_FRAMES;

    fn sizes(&self) -> CudaSizes {
        self.sizes
    }

    fn limit(&self) -> LaunchLimit {
        self.limit
    }

    fn main_queue(&self) -> &CudaStream {
        self.queue.stream()
    }

    fn begin_operation(&self, elements: Option<u64>) {
        self.queue.begin(elements);
    }

    fn end_operation(&self) -> Result<bool> {
        self.queue.end()
    }

    fn flush(&self) -> Result<()> {
        self.queue.flush()
    }

    fn record_span(
        &self,
        spans: &Arc<SpanRecorder>,
        lane: &'static str,
        launch: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        spans.record(lane, self.queue.stream().handle(), launch)
    }

    fn attention(&self, block: &JobBlock, op: &AttentionOp<Offsets>) -> Result<()> {
        self.launch_attention(block, op)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// (offset on the host, offset on the device) of each byte.
    fn bytes_of(copies: &[HostCopy]) -> Vec<(u64, u64)> {
        let row = |copy: &HostCopy, row: u64| {
            let (host, device) = (copy.host + row * copy.host_pitch, copy.device + row * copy.device_pitch);
            (0..copy.bytes).map(move |byte| (host + byte, device + byte)).collect::<Vec<_>>()
        };
        copies.iter().flat_map(|copy| (0..copy.count).flat_map(|i| row(copy, i)).collect::<Vec<_>>()).collect()
    }

    #[test]
    fn copies_are_cut_at_parts_and_copy_the_same_bytes() {
        const PART: u64 = 32;
        for host in [0, 5, 31, 32, 60] {
            for (bytes, count, host_pitch) in
                [(1, 1, 1), (8, 9, 8), (8, 7, 13), (40, 3, 40), (33, 4, 70), (100, 2, 200)]
            {
                let device_pitch = bytes + 3;
                let one = HostCopy::run(CopyDirection::ToHost, host, 1000, bytes, "");
                let copy = HostCopy { count, host_pitch, device_pitch, ..one };
                let pieces = within_parts(&copy, PART);
                assert_eq!(bytes_of(&pieces), bytes_of(&[copy]), "{copy:?}");
                for piece in &pieces {
                    let end = piece.host + (piece.count - 1) * piece.host_pitch + piece.bytes;
                    assert_eq!(piece.host / PART, (end - 1) / PART, "{piece:?} of {copy:?}");
                }
                let within = host % PART + (count - 1) * host_pitch + bytes <= PART;
                assert!(!within || pieces.len() == 1, "{copy:?}");
            }
        }
    }
}
