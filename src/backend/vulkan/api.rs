//! What the GPU layer asks of Vulkan.

use std::sync::Arc;

use ash::vk;

use super::driver::{DeviceBlock, Event, HostFlags, HostMemory, Role, SpanRecorder, VulkanQueue};
use super::launch::Launcher;
use super::sizes::{MAX_FRAMES, VulkanSizes};
use super::weights::PreparedConv;
use crate::backend::HostStream;
use crate::backend::gpu::{
    AddressedBlock, CopyDirection, GpuApi, GpuMemory, HostBlock, HostCopy, LaunchLimit, WeightAddresses, check_region,
};
use crate::error::{Error, Result};
use crate::ir::{AttentionOp, Offsets};

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
        check_region(block.bytes(), copy.device, reach(copy.device_pitch))?;
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
        let (device, host) = (block.handle, host.buffer());
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

    /// Launches are given to the device when an event is recorded after them.
    fn main_queue(&self) -> &VulkanQueue {
        &self.queue
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
