//! Memory of the device, and host memory that it reaches.

use ash::vk;

use super::device::{Device, Role};
use crate::error::{Error, Result};

/// A buffer with an address, and the allocations that back it.
pub struct Buffer {
    pub handle: vk::Buffer,
    memory: Vec<vk::DeviceMemory>,
    pub address: u64,
}

impl Buffer {
    pub fn new(device: &Device, bytes: u64, kinds: &[vk::MemoryPropertyFlags], doing: &str) -> Result<Buffer> {
        let whole = Buffer::with_flags(device, bytes, vk::BufferCreateFlags::empty(), kinds, doing);
        if whole.is_ok() || !device.physical.sparse || bytes <= device.physical.largest_allocation {
            return whole;
        }
        Buffer::with_flags(device, bytes, vk::BufferCreateFlags::SPARSE_BINDING, kinds, doing)
    }

    /// `kinds`: of memory, the best first.
    fn with_flags(
        device: &Device,
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
        let mut buffer = Buffer { handle, memory: Vec::new(), address: 0 };
        let bound =
            if flags.is_empty() { buffer.bind(device, kinds, doing) } else { buffer.bind_pieces(device, kinds, doing) };
        if let Err(why) = bound {
            buffer.free(device);
            return Err(why);
        }
        let info = vk::BufferDeviceAddressInfo::default().buffer(handle);
        // SAFETY: the buffer is bound.
        buffer.address = unsafe { device.raw.get_buffer_device_address(&info) };
        Ok(buffer)
    }

    fn requirements(&self, device: &Device) -> vk::MemoryRequirements {
        // SAFETY: a buffer of this device.
        unsafe { device.raw.get_buffer_memory_requirements(self.handle) }
    }

    /// One allocation of the first kind that has room.
    fn allocate(
        &mut self,
        device: &Device,
        bytes: u64,
        kinds: &[vk::MemoryPropertyFlags],
        doing: &str,
    ) -> Result<vk::DeviceMemory> {
        let allowed = self.requirements(device).memory_type_bits;
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

    fn bind(&mut self, device: &Device, kinds: &[vk::MemoryPropertyFlags], doing: &str) -> Result<()> {
        let memory = self.allocate(device, self.requirements(device).size, kinds, doing)?;
        // SAFETY: the memory is as large as the buffer needs, and of an allowed type.
        device.check(doing, unsafe { device.raw.bind_buffer_memory(self.handle, memory, 0) })
    }

    /// Several allocations, one after the other, where one is limited.
    fn bind_pieces(&mut self, device: &Device, kinds: &[vk::MemoryPropertyFlags], doing: &str) -> Result<()> {
        let needed = self.requirements(device);
        let piece = device.physical.largest_allocation / needed.alignment * needed.alignment;
        let mut binds = Vec::new();
        let mut offset = 0;
        while offset < needed.size {
            let size = piece.min(needed.size - offset);
            let memory = self.allocate(device, size, kinds, doing)?;
            binds.push(vk::SparseMemoryBind::default().resource_offset(offset).size(size).memory(memory));
            offset += size;
        }
        let buffer = [vk::SparseBufferMemoryBindInfo::default().buffer(self.handle).binds(&binds)];
        let info = vk::BindSparseInfo::default().buffer_binds(&buffer);
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

    pub fn free(&self, device: &Device) {
        // SAFETY: no queue uses it any more; so its owners promise.
        unsafe {
            device.raw.destroy_buffer(self.handle, None);
            self.memory.iter().for_each(|memory| device.raw.free_memory(*memory, None));
        }
    }
}

pub fn check_region(all: u64, offset: u64, bytes: u64) -> Result<()> {
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
    pub fn new(device: &Device, bytes: u64) -> Result<MappedMemory> {
        MappedMemory::of_kind(device, bytes, vk::MemoryPropertyFlags::HOST_CACHED)
    }

    /// Memory of the device that the host writes, where there is some. For what kernels read again and again.
    pub fn near_device(device: &Device, bytes: u64) -> Result<MappedMemory> {
        MappedMemory::of_kind(device, bytes, vk::MemoryPropertyFlags::DEVICE_LOCAL)
    }

    fn of_kind(device: &Device, bytes: u64, best: vk::MemoryPropertyFlags) -> Result<MappedMemory> {
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
        match device.check(&doing, mapped) {
            Ok(host) => Ok(MappedMemory { buffer, host: host.cast(), bytes }),
            Err(why) => {
                buffer.free(device);
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
    pub fn free(self, device: &Device) {
        self.buffer.free(device);
    }
}
