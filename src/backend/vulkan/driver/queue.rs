//! Queues of work. A queue of ours is a timeline semaphore: work is recorded into command buffers, and each submission
//! sets the semaphore to the next number. An event is such a number. Several queues of ours may share one of the
//! device: a wait is for work that is submitted already, so none can wait for a later one.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};

use ash::vk;
use parking_lot::Mutex;

use super::context::{Context, OpenQueue};
use super::device::Role;
use super::memory::MappedMemory;
use super::pipeline::Shader;
use super::spans::SpanRecorder;
use crate::backend::gpu::{self, Queue};
use crate::error::{Error, Result};

/// Parameters of so many bytes are in one piece of memory.
const PARAMETER_BYTES: u64 = 64 << 10;
/// Alignment of parameters.
const PARAMETER_ALIGN: u64 = 64;
/// Launches that are recorded before they are given to the device.
const MOST_RECORDED: usize = 32;

/// Workgroups of a launch.
pub type LaunchSize = [u32; 3];

/// A semaphore that counts.
pub struct Timeline {
    context: Arc<Context>,
    handle: vk::Semaphore,
}

impl Timeline {
    fn new(context: &Arc<Context>) -> Result<Timeline> {
        let mut kind = vk::SemaphoreTypeCreateInfo::default().semaphore_type(vk::SemaphoreType::TIMELINE);
        let info = vk::SemaphoreCreateInfo::default().push_next(&mut kind);
        // SAFETY: the structures live during the call.
        let made = context.device.check("making a queue", unsafe { context.device.raw.create_semaphore(&info, None) });
        Ok(Timeline { handle: made?, context: Arc::clone(context) })
    }

    fn wait(&self, number: u64) -> Result<()> {
        let (semaphores, numbers) = ([self.handle], [number]);
        let info = vk::SemaphoreWaitInfo::default().semaphores(&semaphores).values(&numbers);
        // SAFETY: the structures live during the call.
        let answer = unsafe { self.context.device.raw.wait_semaphores(&info, u64::MAX) };
        self.context.device.check("waiting for the GPU", answer)
    }

    fn reached(&self) -> Result<u64> {
        // SAFETY: a timeline semaphore of this device.
        let answer = unsafe { self.context.device.raw.get_semaphore_counter_value(self.handle) };
        self.context.device.check("asking the GPU how far it is", answer)
    }
}

impl Drop for Timeline {
    fn drop(&mut self) {
        // SAFETY: every submission that names it holds it.
        unsafe { self.context.device.raw.destroy_semaphore(self.handle, None) };
    }
}

/// A place in a queue.
type Mark = (Arc<Timeline>, u64);

/// The last place in a queue that it was recorded at.
#[derive(Default)]
pub struct Event(Mutex<Option<Mark>>);

impl gpu::Event for Event {
    fn synchronise(&self) -> Result<()> {
        let mark = self.0.lock().clone();
        mark.map_or(Ok(()), |(timeline, number)| timeline.wait(number))
    }
}

/// Commands, and what they need until they have run.
struct Commands {
    role: Role,
    buffer: vk::CommandBuffer,
    parameters: Vec<MappedMemory>,
    /// Bytes of the last piece of parameters that are taken.
    taken: u64,
    recorded: usize,
}

struct InFlight {
    number: u64,
    commands: Option<Commands>,
    _waits: Vec<Mark>,
}

/// What was submitted, and what is about to be.
struct Submitted {
    timeline: Arc<Timeline>,
    queue: usize,
    last: u64,
    last_role: Role,
    waits: Vec<Mark>,
    open: Option<Commands>,
    in_flight: VecDeque<InFlight>,
    /// Of work that was given to the device for somebody else.
    failure: Option<Error>,
    /// For each role, if it was used.
    pools: [Option<vk::CommandPool>; 2],
    free: [Vec<vk::CommandBuffer>; 2],
}

impl Submitted {
    /// Gives what is recorded to the device.
    fn submit(&mut self, context: &Context) -> Result<()> {
        self.tell_failure()?;
        let commands = self.open.take();
        if commands.is_none() && self.waits.is_empty() {
            return Ok(());
        }
        let role = commands.as_ref().map_or(self.last_role, |commands| commands.role);
        let mut waits = std::mem::take(&mut self.waits);
        if role != self.last_role && self.last > 0 {
            waits.push((Arc::clone(&self.timeline), self.last));
        }
        let number = self.last + 1;
        let given = self.submit_to(context, role, commands.as_ref().map(|commands| commands.buffer), &waits, number);
        if given.is_err() {
            commands.into_iter().for_each(|commands| self.take_back(context, commands));
            return given;
        }
        (self.last, self.last_role) = (number, role);
        self.in_flight.push_back(InFlight { number, commands, _waits: waits });
        Ok(())
    }

    fn tell_failure(&mut self) -> Result<()> {
        self.failure.take().map_or(Ok(()), Err)
    }

    /// Takes back the buffer and the memory of commands that do not run, or have run.
    fn take_back(&mut self, context: &Context, commands: Commands) {
        self.free[commands.role as usize].push(commands.buffer);
        context.parameters.lock().extend(commands.parameters);
    }

    fn submit_to(
        &self,
        context: &Context,
        role: Role,
        commands: Option<vk::CommandBuffer>,
        waits: &[Mark],
        number: u64,
    ) -> Result<()> {
        let doing = "giving work to the GPU";
        let stages = vk::PipelineStageFlags2::ALL_COMMANDS;
        let semaphore = |(timeline, number): &Mark| {
            vk::SemaphoreSubmitInfo::default().semaphore(timeline.handle).value(*number).stage_mask(stages)
        };
        let waits: Vec<_> = waits.iter().map(semaphore).collect();
        let signals = [semaphore(&(Arc::clone(&self.timeline), number))];
        let buffers: Vec<_> =
            commands.iter().map(|buffer| vk::CommandBufferSubmitInfo::default().command_buffer(*buffer)).collect();
        let info = vk::SubmitInfo2::default()
            .wait_semaphore_infos(&waits)
            .command_buffer_infos(&buffers)
            .signal_semaphore_infos(&signals);
        // SAFETY: the buffer is being recorded by this thread alone; the structures live during the calls.
        unsafe {
            if let Some(buffer) = commands {
                // What the host reads, once it has waited.
                barrier(context, buffer, vk::PipelineStageFlags2::HOST, vk::AccessFlags2::HOST_READ);
                context.device.check(doing, context.device.raw.end_command_buffer(buffer))?;
            }
            let queue = context.device.queues(role).of(self.queue).lock();
            context.device.check(doing, context.device.raw.queue_submit2(*queue, &[info], vk::Fence::null()))
        }
    }

    /// Takes back what has run.
    fn reclaim(&mut self, context: &Context) -> Result<()> {
        if self.in_flight.is_empty() {
            return Ok(());
        }
        let reached = self.timeline.reached()?;
        while self.in_flight.front().is_some_and(|first| first.number <= reached) {
            let done = self.in_flight.pop_front().and_then(|first| first.commands);
            done.into_iter().for_each(|commands| self.take_back(context, commands));
        }
        Ok(())
    }

    /// The commands being recorded, for this role.
    fn record(&mut self, context: &Context, role: Role) -> Result<&mut Commands> {
        self.tell_failure()?;
        if self.open.as_ref().is_some_and(|open| open.role != role || open.recorded >= MOST_RECORDED) {
            self.submit(context)?;
        }
        if self.open.is_none() {
            self.reclaim(context)?;
            let buffer = self.command_buffer(context, role)?;
            let begin = vk::CommandBufferBeginInfo::default().flags(vk::CommandBufferUsageFlags::ONE_TIME_SUBMIT);
            // SAFETY: the buffer is in no submission.
            let begun = unsafe { context.device.raw.begin_command_buffer(buffer, &begin) };
            context.device.check("recording work", begun)?;
            self.open = Some(Commands { role, buffer, parameters: Vec::new(), taken: 0, recorded: 0 });
        }
        let open = self.open.as_mut().expect("made above");
        open.recorded += 1;
        // Work of a queue runs in order.
        let access = vk::AccessFlags2::MEMORY_READ | vk::AccessFlags2::MEMORY_WRITE;
        barrier(context, open.buffer, vk::PipelineStageFlags2::ALL_COMMANDS, access);
        Ok(open)
    }

    fn command_buffer(&mut self, context: &Context, role: Role) -> Result<vk::CommandBuffer> {
        if let Some(free) = self.free[role as usize].pop() {
            return Ok(free);
        }
        let doing = "making a queue";
        // SAFETY: the structures live during the calls; the pool is used under this queue's lock.
        unsafe {
            let pool = match self.pools[role as usize] {
                Some(pool) => pool,
                None => {
                    let info = vk::CommandPoolCreateInfo::default()
                        .flags(vk::CommandPoolCreateFlags::RESET_COMMAND_BUFFER)
                        .queue_family_index(context.device.queues(role).family);
                    let pool = context.device.check(doing, context.device.raw.create_command_pool(&info, None))?;
                    *self.pools[role as usize].insert(pool)
                }
            };
            let info = vk::CommandBufferAllocateInfo::default().command_pool(pool).command_buffer_count(1);
            Ok(context.device.check(doing, context.device.raw.allocate_command_buffers(&info))?[0])
        }
    }
}

impl OpenQueue for Mutex<Submitted> {
    /// A failure is told to whoever uses the queue next.
    fn submit(&self, context: &Context) {
        let mut state = self.lock();
        state.failure = state.submit(context).err();
    }
}

impl Commands {
    /// Copies parameters to memory that kernels read. Their address.
    fn put_parameters(&mut self, context: &Context, bytes: &[u8]) -> Result<u64> {
        let length = bytes.len() as u64;
        if self.parameters.last().is_none_or(|last| self.taken + length > last.bytes()) {
            let mut free = context.parameters.lock();
            let fits = free.iter().position(|memory| memory.bytes() >= length);
            let piece = match fits.map(|at| free.swap_remove(at)) {
                Some(piece) => piece,
                None => MappedMemory::near_device(&context.device, length.max(PARAMETER_BYTES))?,
            };
            self.parameters.push(piece);
            self.taken = 0;
        }
        let memory = self.parameters.last().expect("pushed above");
        let to = memory.at(self.taken, length)?;
        // SAFETY: that long, and no launch reads this part yet.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        let address = memory.address() + self.taken;
        self.taken += length.next_multiple_of(PARAMETER_ALIGN);
        Ok(address)
    }
}

/// Everything so far before `stage`.
fn barrier(context: &Context, buffer: vk::CommandBuffer, stage: vk::PipelineStageFlags2, access: vk::AccessFlags2) {
    let all = vk::AccessFlags2::MEMORY_READ | vk::AccessFlags2::MEMORY_WRITE;
    let memory = [vk::MemoryBarrier2::default()
        .src_stage_mask(vk::PipelineStageFlags2::ALL_COMMANDS)
        .src_access_mask(all)
        .dst_stage_mask(stage)
        .dst_access_mask(access)];
    let info = vk::DependencyInfo::default().memory_barriers(&memory);
    // SAFETY: the buffer is being recorded.
    unsafe { context.device.raw.cmd_pipeline_barrier2(buffer, &info) };
}

/// The bytes of a kernel's parameters.
fn bytes_of<P>(params: &P) -> &[u8] {
    // SAFETY: parameters are plain numbers without padding: `launch/params.rs` checks that.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(params).cast(), size_of::<P>()) }
}

pub struct VulkanQueue {
    context: Arc<Context>,
    state: Arc<Mutex<Submitted>>,
    /// Who notes when copies run, and in which lane.
    spans: Option<(Arc<SpanRecorder>, &'static str)>,
}

impl VulkanQueue {
    pub fn new(context: &Arc<Context>) -> Result<VulkanQueue> {
        let state = Arc::new(Mutex::new(Submitted {
            timeline: Arc::new(Timeline::new(context)?),
            queue: context.device.number_queue(),
            last: 0,
            last_role: Role::Compute,
            waits: Vec::new(),
            open: None,
            in_flight: VecDeque::new(),
            failure: None,
            pools: [None; 2],
            free: [Vec::new(), Vec::new()],
        }));
        let open: Weak<Mutex<Submitted>> = Arc::downgrade(&state);
        context.add_queue(open);
        Ok(VulkanQueue { context: Arc::clone(context), state, spans: None })
    }

    /// Notes when the work runs that `put` puts into this queue.
    pub fn record_span(
        &self,
        spans: &SpanRecorder,
        lane: &'static str,
        role: Role,
        put: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        if !self.context.device.queues(role).has_clock {
            return put();
        }
        let [start, end] = spans.queries()?;
        self.stamp(role, start)?;
        put()?;
        self.stamp(role, end)?;
        spans.note(lane, [start, end]);
        Ok(())
    }

    /// Tells a recorder what the device's clock shows now.
    pub fn set_origin(&self, spans: &SpanRecorder) -> Result<()> {
        if !self.context.device.queues(Role::Compute).has_clock {
            return Err(Error::State(format!(
                "trace: {} notes no times; trace on another device",
                self.context.device.physical.name
            )));
        }
        let [start, end] = spans.queries()?;
        self.stamp(Role::Compute, start)?;
        self.stamp(Role::Compute, end)?;
        self.synchronise()?;
        spans.set_origin(end)
    }

    fn stamp(&self, role: Role, (pool, query): (vk::QueryPool, u32)) -> Result<()> {
        let mut state = self.state.lock();
        let commands = state.record(&self.context, role)?;
        let stage = vk::PipelineStageFlags2::ALL_COMMANDS;
        // SAFETY: the buffer is being recorded; the query was reset, and nobody else has it.
        unsafe { self.context.device.raw.cmd_write_timestamp2(commands.buffer, stage, pool, query) };
        Ok(())
    }

    /// Gives what it holds to the device.
    pub fn flush(&self) -> Result<()> {
        self.state.lock().submit(&self.context)
    }

    /// Puts a launch into the queue. `data`: beside the parameters, which are made of its address.
    ///
    /// # Safety
    /// The parameters are those of the kernel, and everything that they name lives until the queue is empty.
    pub unsafe fn launch<P>(
        &self,
        shader: Shader,
        size: LaunchSize,
        data: &[u8],
        params: impl FnOnce(u64) -> P,
    ) -> Result<()> {
        let (context, pipeline) = (&self.context, self.context.pipelines.get(shader)?);
        let mut state = self.state.lock();
        let commands = state.record(context, Role::Compute)?;
        let data = if data.is_empty() { 0 } else { commands.put_parameters(context, data)? };
        let address = commands.put_parameters(context, bytes_of(&params(data)))?;
        let [x, y, z] = size;
        // SAFETY: the buffer is being recorded; the rest is the caller's promise.
        unsafe {
            let (device, buffer) = (&context.device.raw, commands.buffer);
            device.cmd_bind_pipeline(buffer, vk::PipelineBindPoint::COMPUTE, pipeline);
            let stages = vk::ShaderStageFlags::COMPUTE;
            device.cmd_push_constants(buffer, context.pipelines.layout, stages, 0, &address.to_ne_bytes());
            device.cmd_dispatch(buffer, x, y, z);
        }
        Ok(())
    }

    /// Puts a copy between two buffers into the queue.
    ///
    /// # Safety
    /// The regions lie in the buffers, which live until the queue is empty.
    pub unsafe fn copy(&self, from: vk::Buffer, to: vk::Buffer, regions: &[vk::BufferCopy]) -> Result<()> {
        let put = || {
            let mut state = self.state.lock();
            let commands = state.record(&self.context, Role::Copy)?;
            // SAFETY: the buffer is being recorded; the rest is the caller's promise.
            unsafe { self.context.device.raw.cmd_copy_buffer(commands.buffer, from, to, regions) };
            Ok(())
        };
        match &self.spans {
            Some((spans, lane)) => self.record_span(spans, lane, Role::Copy, put),
            None => put(),
        }
    }
}

impl Queue for VulkanQueue {
    type Event = Event;
    type Spans = Arc<SpanRecorder>;

    fn record(&self, event: &Event) -> Result<()> {
        let mut state = self.state.lock();
        state.submit(&self.context)?;
        *event.0.lock() = (state.last > 0).then(|| (Arc::clone(&state.timeline), state.last));
        Ok(())
    }

    fn wait_for(&self, event: &Event) -> Result<()> {
        let Some(mark) = event.0.lock().clone() else { return Ok(()) };
        let mut state = self.state.lock();
        if Arc::ptr_eq(&mark.0, &state.timeline) {
            return Ok(());
        }
        // What is recorded already does not wait.
        if state.open.is_some() {
            state.submit(&self.context)?;
        }
        state.waits.push(mark);
        Ok(())
    }

    fn synchronise(&self) -> Result<()> {
        let (timeline, last) = {
            let mut state = self.state.lock();
            state.submit(&self.context)?;
            (Arc::clone(&state.timeline), state.last)
        };
        timeline.wait(last)
    }

    fn set_spans(&mut self, spans: Option<&Arc<SpanRecorder>>, lane: &'static str) {
        self.spans = spans.map(|spans| (Arc::clone(spans), lane));
    }
}

impl Drop for VulkanQueue {
    fn drop(&mut self) {
        // Errors were told when the work was waited for.
        let _ = self.synchronise();
        let mut state = self.state.lock();
        let _ = state.reclaim(&self.context);
        let left = state.in_flight.drain(..).filter_map(|left| left.commands);
        self.context.parameters.lock().extend(left.flat_map(|commands| commands.parameters));
        for pool in state.pools.iter().flatten() {
            // SAFETY: the queue is empty, or the device is lost.
            unsafe { self.context.device.raw.destroy_command_pool(*pool, None) };
        }
    }
}
