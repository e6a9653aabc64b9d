//! What the GPU layer asks of CUDA: queues are streams, host blocks are pinned memory, and the launches are those of
//! `launch`.

use std::sync::Arc;

use cudarc::driver::sys::{self, CUmemorytype};

use super::driver::{
    CopySide, CudaStream, Current, Event, HostFlags, MAX_PITCH, PinnedMemory, SpanRecorder, check, check_not_captured,
    pitched_copy,
};
use super::launch::tiling::MAX_FRAMES;
use super::launch::{ConvParams, CudaSizes, JobBlock, Launcher};
use super::weights::PreparedConv;
use crate::backend::HostStream;
use crate::backend::gpu::{
    AddressedBlock, CopyDirection, GpuApi, GpuMemory, HostBlock, HostCopy, LaunchLimit, WeightAddresses,
};
use crate::error::Result;
use crate::ir::{AttentionOp, Offsets};

impl GpuMemory for Launcher {
    type Event = Event;
    type Queue = CudaStream;
    type Block = JobBlock;
    type HostBlock = PinnedMemory;
    type Flags = HostFlags;
    type Spans = Arc<SpanRecorder>;
    type Weights = WeightAddresses;
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
        let reach = |pitch: u64| (copy.count - 1) * pitch + copy.bytes;
        let device = block.at(copy.device, reach(copy.device_pitch))?;
        let host = host.at(copy.host, reach(copy.host_pitch))?;
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
