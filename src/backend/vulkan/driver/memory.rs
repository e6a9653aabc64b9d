//! Memory of the device, and host memory that it reaches.

use std::sync::Arc;

use ash::vk;

use super::device::{Device, Role};
use crate::backend::gpu::check_region;
use crate::error::{Error, Result};

/// A buffer with an address, and the allocations that back it. Whoever drops it knows that no queue uses it.
pub struct Buffer {
    device: Arc<Device>,
    pub handle: vk::Buffer,
    memory: Vec<vk::DeviceMemory>,
    pub address: u64,
    pub bytes: u64,
}

impl Buffer {
    pub fn new(device: &Arc<Device>, bytes: u64, kinds: &[vk::MemoryPropertyFlags], doing: &str) -> Result<Buffer> {
        let whole = Buffer::with_flags(device, bytes, vk::BufferCreateFlags::empty(), kinds, doing);
        if whole.is_ok() || !device.physical.features.sparse || bytes <= device.physical.largest_allocation {
            return whole;
        }
        Buffer::with_flags(device, bytes, vk::BufferCreateFlags::SPARSE_BINDING, kinds, doing)
    }

    /// `kinds`: of memory, the best first.
    fn with_flags(
        device: &Arc<Device>,
        bytes: u64,
        flags: vk::BufferCreateFlags,
        kinds: &[vk::MemoryPropertyFlags],
        doing: &str,
    ) -> Result<Buffer> {
        let families = device.families();
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
        let handle = device.check(doing, unsafe { device.raw.create_buffer(&info, None) })?;
        let mut buffer = Buffer { device: Arc::clone(device), handle, memory: Vec::new(), address: 0, bytes };
        if flags.is_empty() {
            buffer.bind(kinds, doing)?
        } else {
            buffer.bind_pieces(kinds, doing)?
        }
        let info = vk::BufferDeviceAddressInfo::default().buffer(handle);
        // SAFETY: the buffer is bound.
        buffer.address = unsafe { device.raw.get_buffer_device_address(&info) };
        Ok(buffer)
    }

    fn requirements(&self) -> vk::MemoryRequirements {
        // SAFETY: a buffer of this device.
        unsafe { self.device.raw.get_buffer_memory_requirements(self.handle) }
    }

    /// One allocation of the first kind that has room.
    fn allocate(&mut self, bytes: u64, kinds: &[vk::MemoryPropertyFlags], doing: &str) -> Result<vk::DeviceMemory> {
        let (device, allowed) = (&self.device, self.requirements().memory_type_bits);
        let memory = &device.physical.memory;
        let types = &memory.memory_types[..memory.memory_type_count as usize];
        let mut answer = Err(Error::Device(format!("{doing}: {} has no memory of that kind", device.physical.name)));
        for kind in kinds {
            let is_fit = |i: &usize| allowed >> i & 1 == 1 && types[*i].property_flags.contains(*kind);
            let Some(index) = (0..types.len()).find(is_fit) else { continue };
            let mut flags = vk::MemoryAllocateFlagsInfo::default().flags(vk::MemoryAllocateFlags::DEVICE_ADDRESS);
            let info = vk::MemoryAllocateInfo::default()
                .allocation_size(bytes)
                .memory_type_index(index as u32)
                .push_next(&mut flags);
            // SAFETY: the structures live during the call.
            answer = device.check(doing, unsafe { device.raw.allocate_memory(&info, None) });
            if answer.is_ok() {
                break;
            }
        }
        let memory = answer?;
        self.memory.push(memory);
        Ok(memory)
    }

    fn bind(&mut self, kinds: &[vk::MemoryPropertyFlags], doing: &str) -> Result<()> {
        let memory = self.allocate(self.requirements().size, kinds, doing)?;
        // SAFETY: the memory is as large as the buffer needs, and of an allowed type.
        self.device.check(doing, unsafe { self.device.raw.bind_buffer_memory(self.handle, memory, 0) })
    }

    /// Several allocations, one after the other, where one is limited.
    fn bind_pieces(&mut self, kinds: &[vk::MemoryPropertyFlags], doing: &str) -> Result<()> {
        let needed = self.requirements();
        let piece = self.device.physical.largest_allocation / needed.alignment * needed.alignment;
        let mut binds = Vec::new();
        let mut offset = 0;
        while offset < needed.size {
            let size = piece.min(needed.size - offset);
            let memory = self.allocate(size, kinds, doing)?;
            binds.push(vk::SparseMemoryBind::default().resource_offset(offset).size(size).memory(memory));
            offset += size;
        }
        let buffer = [vk::SparseBufferMemoryBindInfo::default().buffer(self.handle).binds(&binds)];
        let (device, info) = (&self.device, vk::BindSparseInfo::default().buffer_binds(&buffer));
        // SAFETY: the structures live during the calls; the fence is destroyed after it was waited for.
        unsafe {
            let fence = device.check(doing, device.raw.create_fence(&vk::FenceCreateInfo::default(), None))?;
            let queue = device.queues(Role::Compute).of(0).lock();
            let bound = device.check(doing, device.raw.queue_bind_sparse(*queue, &[info], fence));
            let waited = bound.and_then(|()| device.check(doing, device.raw.wait_for_fences(&[fence], true, u64::MAX)));
            device.raw.destroy_fence(fence, None);
            waited
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: no queue uses it any more; so its owners promise.
        unsafe {
            self.device.raw.destroy_buffer(self.handle, None);
            self.memory.iter().for_each(|memory| self.device.raw.free_memory(*memory, None));
        }
    }
}

/// Host memory that the device reaches.
pub struct MappedMemory {
    buffer: Buffer,
    host: *mut u8,
}

// SAFETY: an address and a length. Its owners say who touches the bytes.
unsafe impl Send for MappedMemory {}
// SAFETY: as above.
unsafe impl Sync for MappedMemory {}

impl MappedMemory {
    /// Cached memory of the host, as the host reads it too.
    pub fn new(device: &Arc<Device>, bytes: u64) -> Result<MappedMemory> {
        MappedMemory::of_kind(device, bytes, vk::MemoryPropertyFlags::HOST_CACHED)
    }

    /// Memory of the device that the host writes, where there is some. For what kernels read again and again.
    pub fn near_device(device: &Arc<Device>, bytes: u64) -> Result<MappedMemory> {
        MappedMemory::of_kind(device, bytes, vk::MemoryPropertyFlags::DEVICE_LOCAL)
    }

    fn of_kind(device: &Arc<Device>, bytes: u64, best: vk::MemoryPropertyFlags) -> Result<MappedMemory> {
        let coherent = vk::MemoryPropertyFlags::HOST_VISIBLE | vk::MemoryPropertyFlags::HOST_COHERENT;
        let kinds = [coherent | best, coherent];
        let doing = format!("allocating {bytes} bytes of host memory for {}", device.physical.name);
        let buffer = Buffer::with_flags(device, bytes, vk::BufferCreateFlags::empty(), &kinds, &doing);
        let buffer = buffer.map_err(|why| match why {
            Error::Memory(_) => {
                Error::HostMemory(format!("{doing}: there is not so much left; lower host_memory_limit"))
            }
            other => other,
        })?;
        let (memory, flags) = (buffer.memory[0], vk::MemoryMapFlags::empty());
        // SAFETY: the memory is host-visible and not mapped yet.
        let mapped = unsafe { device.raw.map_memory(memory, 0, vk::WHOLE_SIZE, flags) };
        Ok(MappedMemory { host: device.check(&doing, mapped)?.cast(), buffer })
    }

    pub fn bytes(&self) -> u64 {
        self.buffer.bytes
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
        check_region(self.bytes(), offset, bytes)?;
        Ok(self.host.wrapping_add(offset as usize))
    }
}
