//! Memory of the device, and host memory that it reaches.

use std::sync::Arc;

use ash::vk;

use super::context::{Context, Role};
use crate::error::{Error, Result};

/// A buffer with an address, and the allocations that back it.
struct Buffer {
    handle: vk::Buffer,
    memory: Vec<vk::DeviceMemory>,
    address: u64,
}

impl Buffer {
    fn new(context: &Context, bytes: u64, kinds: &[vk::MemoryPropertyFlags], doing: &str) -> Result<Buffer> {
        let whole = Buffer::with_flags(context, bytes, vk::BufferCreateFlags::empty(), kinds, doing);
        if whole.is_ok() || !context.physical.sparse || bytes <= context.physical.largest_allocation {
            return whole;
        }
        Buffer::with_flags(context, bytes, vk::BufferCreateFlags::SPARSE_BINDING, kinds, doing)
    }

    /// `kinds`: of memory, the best first.
    fn with_flags(
        context: &Context,
        bytes: u64,
        flags: vk::BufferCreateFlags,
        kinds: &[vk::MemoryPropertyFlags],
        doing: &str,
    ) -> Result<Buffer> {
        let families = context.families();
        let usage = vk::BufferUsageFlags::SHADER_DEVICE_ADDRESS
            | vk::BufferUsageFlags::STORAGE_BUFFER
            | vk::BufferUsageFlags::TRANSFER_SRC
            | vk::BufferUsageFlags::TRANSFER_DST;
        let shared = if families.len() > 1 { vk::SharingMode::CONCURRENT } else { vk::SharingMode::EXCLUSIVE };
        let info = vk::BufferCreateInfo::default()
            .flags(flags)
            .size(bytes.max(1))
            .usage(usage)
            .sharing_mode(shared)
            .queue_family_indices(&families);
        // SAFETY: the structures live during the call.
        let handle = context.check(doing, unsafe { context.device.create_buffer(&info, None) })?;
        let mut buffer = Buffer { handle, memory: Vec::new(), address: 0 };
        let bound = if flags.is_empty() {
            buffer.bind(context, kinds, doing)
        } else {
            buffer.bind_pieces(context, kinds, doing)
        };
        if let Err(why) = bound {
            buffer.free(&context.device);
            return Err(why);
        }
        let info = vk::BufferDeviceAddressInfo::default().buffer(handle);
        // SAFETY: the buffer is bound.
        buffer.address = unsafe { context.device.get_buffer_device_address(&info) };
        Ok(buffer)
    }

    fn requirements(&self, context: &Context) -> vk::MemoryRequirements {
        // SAFETY: a buffer of this device.
        unsafe { context.device.get_buffer_memory_requirements(self.handle) }
    }

    /// One allocation of the first kind that has room.
    fn allocate(
        &mut self,
        context: &Context,
        bytes: u64,
        kinds: &[vk::MemoryPropertyFlags],
        doing: &str,
    ) -> Result<vk::DeviceMemory> {
        let allowed = self.requirements(context).memory_type_bits;
        let memory = &context.physical.memory;
        let types = &memory.memory_types[..memory.memory_type_count as usize];
        let mut answer = Err(Error::Device(format!("{doing}: {} has no memory of that kind", context.physical.name)));
        for kind in kinds {
            let is_fit = |i: &usize| allowed >> i & 1 == 1 && types[*i].property_flags.contains(*kind);
            let Some(index) = (0..types.len()).find(is_fit) else { continue };
            let mut flags = vk::MemoryAllocateFlagsInfo::default().flags(vk::MemoryAllocateFlags::DEVICE_ADDRESS);
            let info = vk::MemoryAllocateInfo::default()
                .allocation_size(bytes)
                .memory_type_index(index as u32)
                .push_next(&mut flags);
            // SAFETY: the structures live during the call.
            answer = context.check(doing, unsafe { context.device.allocate_memory(&info, None) });
            if answer.is_ok() {
                break;
            }
        }
        let memory = answer?;
        self.memory.push(memory);
        Ok(memory)
    }

    fn bind(&mut self, context: &Context, kinds: &[vk::MemoryPropertyFlags], doing: &str) -> Result<()> {
        let memory = self.allocate(context, self.requirements(context).size, kinds, doing)?;
        // SAFETY: the memory is as large as the buffer needs, and of an allowed type.
        context.check(doing, unsafe { context.device.bind_buffer_memory(self.handle, memory, 0) })
    }

    /// Several allocations, one after the other, where one is limited.
    fn bind_pieces(&mut self, context: &Context, kinds: &[vk::MemoryPropertyFlags], doing: &str) -> Result<()> {
        let needed = self.requirements(context);
        let piece = context.physical.largest_allocation / needed.alignment * needed.alignment;
        let mut binds = Vec::new();
        let mut offset = 0;
        while offset < needed.size {
            let size = piece.min(needed.size - offset);
            let memory = self.allocate(context, size, kinds, doing)?;
            binds.push(vk::SparseMemoryBind::default().resource_offset(offset).size(size).memory(memory));
            offset += size;
        }
        let buffer = [vk::SparseBufferMemoryBindInfo::default().buffer(self.handle).binds(&binds)];
        let info = vk::BindSparseInfo::default().buffer_binds(&buffer);
        // SAFETY: the structures live during the calls; the fence is destroyed after it was waited for.
        unsafe {
            let fence = context.check(doing, context.device.create_fence(&vk::FenceCreateInfo::default(), None))?;
            let queue = context.queues(Role::Compute).of(0).lock();
            let bound = context.check(doing, context.device.queue_bind_sparse(*queue, &[info], fence));
            let waited =
                bound.and_then(|()| context.check(doing, context.device.wait_for_fences(&[fence], true, u64::MAX)));
            context.device.destroy_fence(fence, None);
            waited
        }
    }

    fn free(&self, device: &ash::Device) {
        // SAFETY: no queue uses it any more; so its owners promise.
        unsafe {
            device.destroy_buffer(self.handle, None);
            self.memory.iter().for_each(|memory| device.free_memory(*memory, None));
        }
    }
}

/// A block of device memory. Its drop waits for all queues.
pub struct DeviceBlock {
    context: Arc<Context>,
    buffer: Buffer,
    bytes: u64,
}

impl DeviceBlock {
    pub fn new(context: &Arc<Context>, bytes: u64) -> Result<DeviceBlock> {
        let doing = format!("allocating {bytes} bytes on {}", context.physical.name);
        let kinds = [vk::MemoryPropertyFlags::DEVICE_LOCAL];
        let buffer = Buffer::new(context, bytes, &kinds, &doing).map_err(|why| match why {
            Error::Memory(text) if !context.physical.sparse && bytes > context.physical.largest_allocation => {
                let most = context.physical.largest_allocation;
                Error::Memory(format!("{text}. The device allocates at most {most} bytes at a time"))
            }
            other => other,
        })?;
        Ok(DeviceBlock { context: Arc::clone(context), buffer, bytes })
    }

    pub fn buffer(&self) -> vk::Buffer {
        self.buffer.handle
    }

    /// The address of an offset, which may lie outside.
    pub fn address(&self, offset: u64) -> u64 {
        self.buffer.address.wrapping_add(offset)
    }

    /// The address of a region, checked to lie in the block.
    pub fn at(&self, offset: u64, bytes: u64) -> Result<u64> {
        self.check_region(offset, bytes)?;
        Ok(self.address(offset))
    }

    pub fn check_region(&self, offset: u64, bytes: u64) -> Result<()> {
        check_region(self.bytes, offset, bytes)
    }

    /// An error once the device is lost: other memory of it is in use by nobody.
    pub fn check_alive(&self) -> Result<()> {
        if self.context.is_lost() {
            return Err(Error::Device("the GPU was lost. Free all handles on it and open new ones".into()));
        }
        Ok(())
    }
}

impl Drop for DeviceBlock {
    fn drop(&mut self) {
        self.context.wait_idle();
        self.buffer.free(&self.context.device);
    }
}

fn check_region(all: u64, offset: u64, bytes: u64) -> Result<()> {
    if offset.checked_add(bytes).is_none_or(|end| end > all) {
        return Err(Error::Internal(format!("{bytes} bytes at {offset} are not in a block of {all}")));
    }
    Ok(())
}

/// Host memory that the device reaches. Whoever has it frees it.
pub struct MappedMemory {
    buffer: Buffer,
    host: *mut u8,
    pub bytes: u64,
}

// SAFETY: an address and a length. Its owners say who touches the bytes.
unsafe impl Send for MappedMemory {}
// SAFETY: as above.
unsafe impl Sync for MappedMemory {}

impl MappedMemory {
    /// Cached memory of the host, as the host reads it too.
    pub fn new(context: &Context, bytes: u64) -> Result<MappedMemory> {
        MappedMemory::of_kind(context, bytes, vk::MemoryPropertyFlags::HOST_CACHED)
    }

    /// Memory of the device that the host writes, where there is some. For what kernels read again and again.
    pub fn near_device(context: &Context, bytes: u64) -> Result<MappedMemory> {
        MappedMemory::of_kind(context, bytes, vk::MemoryPropertyFlags::DEVICE_LOCAL)
    }

    fn of_kind(context: &Context, bytes: u64, best: vk::MemoryPropertyFlags) -> Result<MappedMemory> {
        let coherent = vk::MemoryPropertyFlags::HOST_VISIBLE | vk::MemoryPropertyFlags::HOST_COHERENT;
        let kinds = [coherent | best, coherent];
        let doing = format!("allocating {bytes} bytes of host memory for {}", context.physical.name);
        let buffer = Buffer::with_flags(context, bytes, vk::BufferCreateFlags::empty(), &kinds, &doing);
        let buffer = buffer.map_err(|why| match why {
            Error::Memory(_) => {
                Error::HostMemory(format!("{doing}: there is not so much left; lower host_memory_limit"))
            }
            other => other,
        })?;
        let (memory, flags) = (buffer.memory[0], vk::MemoryMapFlags::empty());
        // SAFETY: the memory is host-visible and not mapped yet.
        let mapped = unsafe { context.device.map_memory(memory, 0, vk::WHOLE_SIZE, flags) };
        match context.check(&doing, mapped) {
            Ok(host) => Ok(MappedMemory { buffer, host: host.cast(), bytes }),
            Err(why) => {
                buffer.free(&context.device);
                Err(why)
            }
        }
    }

    pub fn buffer(&self) -> vk::Buffer {
        self.buffer.handle
    }

    /// For the device.
    pub fn address(&self) -> u64 {
        self.buffer.address
    }

    /// For the host. Checked to lie in the block.
    pub fn at(&self, offset: u64, bytes: u64) -> Result<*mut u8> {
        check_region(self.bytes, offset, bytes)?;
        Ok(self.host.wrapping_add(offset as usize))
    }

    /// Nothing uses it any more.
    pub fn free(self, device: &ash::Device) {
        self.buffer.free(device);
    }
}
