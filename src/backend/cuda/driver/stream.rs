//! A stream of our own, and events to wait for places in it.

use std::sync::{Arc, Weak};

use cudarc::driver::sys::{self, CUevent, CUstream};
use parking_lot::Mutex;

use crate::backend::cuda::driver::context::Context;
use crate::backend::cuda::driver::device::check;
use crate::backend::cuda::launch::graph::{Forget, Launch, Launches};
use crate::error::Result;

/// Non-blocking: independent of the legacy default stream, so that the host's work and ours do not wait for each other.
pub struct Stream {
    raw: Arc<Raw>,
    /// What is collected for it. Whoever uses the stream itself has it flushed first, so that nothing is out of order.
    launches: Arc<Mutex<Launches>>,
}

/// The driver's stream, ended when nobody uses it or waits for it.
struct Raw {
    context: Arc<Context>,
    handle: CUstream,
}

// SAFETY: streams may be used from any thread.
unsafe impl Send for Raw {}
// SAFETY: as above; the driver locks what it must.
unsafe impl Sync for Raw {}

/// The streams of all handles.
static ALL: Mutex<Vec<Weak<Raw>>> = Mutex::new(Vec::new());

/// Waits for whatever is in our streams on a GPU now, but for none of the host's. The context has to be current.
pub fn wait_for_all(index: u32) {
    let live: Vec<Arc<Raw>> = ALL.lock().iter().filter_map(Weak::upgrade).collect();
    for stream in live.iter().filter(|stream| stream.context.gpu.index == index) {
        // SAFETY: the stream lives. If the GPU has failed, nothing runs on it any more.
        unsafe { sys::cuStreamSynchronize(stream.handle) };
    }
}

impl Stream {
    pub fn new(context: &Arc<Context>) -> Result<Stream> {
        let _current = context.enter()?;
        let mut handle = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: a context is current.
        check("making a stream", unsafe { sys::cuStreamCreate(&mut handle, flags) })?;
        let raw = Arc::new(Raw { context: Arc::clone(context), handle });
        let mut all = ALL.lock();
        all.retain(|stream| stream.strong_count() > 0);
        all.push(Arc::downgrade(&raw));
        Ok(Stream { raw, launches: Arc::default() })
    }

    /// For whatever else is put into the stream: everything collected is in it before. The context has to be current.
    pub fn handle(&self) -> CUstream {
        self.launches.lock().flush(&self.raw.context, self.raw.handle);
        self.raw.handle
    }

    /// An operation of so many elements begins.
    pub fn begin(&self, elements: u64) {
        self.launches.lock().begin(elements);
    }

    /// The operation ended; whether its launches are in the stream, or still being collected.
    pub fn end(&self) -> Result<bool> {
        let mut launches = self.launches.lock();
        let complete = launches.end();
        if complete {
            launches.flush(&self.raw.context, self.raw.handle);
        }
        launches.outcome().map(|()| complete)
    }

    pub fn is_collecting(&self) -> bool {
        self.launches.lock().is_collecting()
    }

    pub fn collect(&self, launch: Launch) {
        self.launches.lock().collect(launch);
    }

    /// Puts everything collected into the stream. The context has to be current.
    pub fn flush(&self) -> Result<()> {
        let mut launches = self.launches.lock();
        launches.flush(&self.raw.context, self.raw.handle);
        launches.outcome()
    }

    /// Drops what was made of launches that were collected, with the memory they work in.
    pub fn forget_with(&self) -> Forget {
        Forget(Arc::clone(&self.launches))
    }

    /// What comes now waits until the other stream has passed the place that the event marked last; at once if none was.
    /// The context has to be current.
    pub fn wait_for(&self, event: &Event) -> Result<()> {
        // SAFETY: both live.
        check("joining two streams", unsafe { sys::cuStreamWaitEvent(self.handle(), event.handle, 0) })
    }

    /// Waits for everything in the stream. The context has to be current.
    pub fn wait(&self) -> Result<()> {
        self.flush()?;
        // SAFETY: the stream lives.
        check("waiting for the GPU", unsafe { sys::cuStreamSynchronize(self.raw.handle) })
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        if let Ok(_current) = self.context.enter() {
            // SAFETY: made in `Stream::new`. Work that is still in it goes on to its end.
            unsafe { sys::cuStreamDestroy_v2(self.handle) };
        }
    }
}

pub struct Event {
    context: Arc<Context>,
    handle: CUevent,
}

// SAFETY: events may be used from any thread.
unsafe impl Send for Event {}

impl Event {
    pub fn new(context: &Arc<Context>) -> Result<Event> {
        let _current = context.enter()?;
        let mut handle = std::ptr::null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: a context is current.
        check("making an event", unsafe { sys::cuEventCreate(&mut handle, flags) })?;
        Ok(Event { context: Arc::clone(context), handle })
    }

    /// Marks this place in the stream. The context has to be current.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        stream.flush()?;
        // SAFETY: both live.
        check("marking a place in the stream", unsafe { sys::cuEventRecord(self.handle, stream.raw.handle) })
    }

    /// Lets one stream wait for what is in another. The event itself is not needed afterwards. The context has to be current.
    pub fn between(&self, first: CUstream, then: CUstream) -> Result<()> {
        // SAFETY: the event lives, and whoever gave the streams vouches for them.
        unsafe {
            check("marking a place in a stream", sys::cuEventRecord(self.handle, first))?;
            check("joining two streams", sys::cuStreamWaitEvent(then, self.handle, 0))
        }
    }

    /// Waits until the stream has passed the place that was marked last; at once if none was.
    pub fn wait(&self) -> Result<()> {
        // SAFETY: the event lives.
        check("waiting for the GPU", unsafe { sys::cuEventSynchronize(self.handle) })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(_current) = self.context.enter() {
            // SAFETY: made in `new`.
            unsafe { sys::cuEventDestroy_v2(self.handle) };
        }
    }
}
