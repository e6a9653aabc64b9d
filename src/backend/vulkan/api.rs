//! What the GPU layer asks of Vulkan.

use std::ops::Range;
use std::sync::Arc;

use ash::vk;

use super::driver::{DeviceBlock, Event, Role, SpanRecorder, VulkanQueue};
use super::host_memory::{HostFlags, HostMemory};
use super::launch::{Launcher, WeightAddresses};
use super::sizes::{MAX_FRAMES, VulkanSizes};
use super::weights::PreparedConv;
use crate::backend::gpu::{
    self, CopyDirection, GpuApi, GpuConv, GpuMemory, HostBlock, HostCopy, LaunchLimit, Queue, Spans,
};
use crate::backend::{DeviceSpan, HostStream};
use crate::error::{Error, Result};
use crate::ir::{AttentionOp, DeviceOffset, Offsets};

impl Spans for Arc<SpanRecorder> {
    fn set_op(&self, op: u64) {
        SpanRecorder::set_op(self, op);
    }

    fn take(&self) -> Result<Vec<DeviceSpan>> {
        SpanRecorder::take(self)
    }
}

impl Queue for VulkanQueue {
    type Event = Event;
    type Spans = Arc<SpanRecorder>;

    fn record(&self, event: &Event) -> Result<()> {
        VulkanQueue::record(self, event)
    }

    fn wait_for(&self, event: &Event) -> Result<()> {
        VulkanQueue::wait_for(self, event)
    }

    fn synchronise(&self) -> Result<()> {
        VulkanQueue::synchronise(self)
    }

    fn set_spans(&mut self, spans: Option<&Arc<SpanRecorder>>, lane: &'static str) {
        VulkanQueue::set_spans(self, spans.map(|spans| (Arc::clone(spans), lane)));
    }
}

impl gpu::Event for Event {
    fn synchronise(&self) -> Result<()> {
        Event::synchronise(self)
    }
}

impl GpuConv<Launcher> for PreparedConv {
    fn resident(&self) -> Result<WeightAddresses> {
        self.addresses()
    }

    fn offloaded(&self, slabs: u64) -> Result<(&HostMemory, [Range<u64>; 2])> {
        PreparedConv::offloaded(self, slabs)
    }

    fn fetched(&self, block: &DeviceBlock, slabs: u64, at: DeviceOffset) -> WeightAddresses {
        PreparedConv::fetched(self, slabs, block.address(at.0))
    }
}

impl GpuMemory for Launcher {
    type Event = Event;
    type Queue = VulkanQueue;
    type Block = DeviceBlock;
    type HostBlock = HostMemory;
    type Flags = HostFlags;
    type Spans = Arc<SpanRecorder>;
    type Weights = WeightAddresses;
    type Launched = ();
    type Current<'a> = ();

    /// Copies name regions by 64-bit offsets.
    const MAX_PITCH: u64 = u64::MAX;

    fn enter(&self) -> Result<()> {
        Ok(())
    }

    fn event(&self) -> Result<Event> {
        Ok(Event::default())
    }

    fn queue(&self) -> Result<VulkanQueue> {
        VulkanQueue::new(&self.context)
    }

    fn host_block(&self, bytes: u64) -> Result<HostMemory> {
        HostMemory::new(&self.context, bytes)
    }

    fn flags(&self) -> Result<HostFlags> {
        HostFlags::new(&self.context)
    }

    fn copy(&self, queue: &VulkanQueue, block: &DeviceBlock, host: &HostMemory, copy: &HostCopy) -> Result<()> {
        if copy.bytes == 0 || copy.count == 0 {
            return Ok(());
        }
        let reach = |pitch: u64| (copy.count - 1) * pitch + copy.bytes;
        block.check_region(copy.device, reach(copy.device_pitch))?;
        host.at(copy.host, reach(copy.host_pitch))?;
        let region = |run: u64| {
            let (in_host, on_device) = (copy.host + run * copy.host_pitch, copy.device + run * copy.device_pitch);
            let (from, to) = match copy.direction {
                CopyDirection::ToDevice => (in_host, on_device),
                CopyDirection::ToHost => (on_device, in_host),
            };
            vk::BufferCopy { src_offset: from, dst_offset: to, size: copy.bytes }
        };
        let regions: Vec<vk::BufferCopy> = (0..copy.count).map(region).collect();
        let (device, host) = (block.buffer(), host.memory().buffer());
        let (from, to) = match copy.direction {
            CopyDirection::ToDevice => (host, device),
            CopyDirection::ToHost => (device, host),
        };
        // SAFETY: the regions were checked; the layer above orders all that touches them by events, and memory waits
        // for all queues before it is freed.
        unsafe { queue.copy(from, to, &regions) }
    }

    fn spans(&self) -> Result<Arc<SpanRecorder>> {
        let spans = SpanRecorder::new(&self.context)?;
        self.queue.set_origin(&spans)?;
        Ok(Arc::new(spans))
    }

    fn check_stream(&self, _: HostStream) -> Result<()> {
        Err(Error::State("stream: a Vulkan device takes no CUDA stream; pass none".into()))
    }

    fn wait_for_host(&self, host: HostStream) -> Result<()> {
        self.check_stream(host)
    }

    fn host_waits(&self, host: HostStream) -> Result<()> {
        self.check_stream(host)
    }
}

impl GpuApi for Launcher {
    type Sizes = VulkanSizes;
    type Conv = PreparedConv;

    const MAX_FRAMES: usize = MAX_FRAMES;

    fn sizes(&self) -> VulkanSizes {
        self.sizes
    }

    fn limit(&self) -> LaunchLimit {
        self.limit
    }

    fn main_queue(&self) -> &VulkanQueue {
        &self.queue
    }

    fn begin_operation(&self, _: Option<u64>) {}

    /// Its launches are given to the device when an event is recorded after it.
    fn end_operation(&self) -> Result<bool> {
        Ok(true)
    }

    fn flush(&self) -> Result<()> {
        Ok(())
    }

    fn record_span(
        &self,
        spans: &Arc<SpanRecorder>,
        lane: &'static str,
        launch: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        self.queue.record_span(spans, lane, Role::Compute, launch)
    }

    fn attention(&self, block: &DeviceBlock, op: &AttentionOp<Offsets>) -> Result<()> {
        self.launch_attention(block, op)
    }
}
