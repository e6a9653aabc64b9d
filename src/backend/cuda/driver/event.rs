//! Events: marks in a stream that other streams, or the calling thread, wait for.

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys::{self, CUevent, CUstream};

use super::context::Context;
use super::error::check;
use crate::backend::gpu;
use crate::error::Result;

pub struct Event {
    context: Arc<Context>,
    handle: CUevent,
}

// SAFETY: events may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: as above; the driver locks what it must.
unsafe impl Sync for Event {}

impl Event {
    pub fn new(context: &Arc<Context>) -> Result<Event> {
        Event::with_flags(context, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }

    /// One that notes when it is passed.
    pub fn timed(context: &Arc<Context>) -> Result<Event> {
        Event::with_flags(context, sys::CUevent_flags::CU_EVENT_DEFAULT)
    }

    fn with_flags(context: &Arc<Context>, flags: sys::CUevent_flags) -> Result<Event> {
        let _current = context.enter()?;
        let (mut handle, flags) = (std::ptr::null_mut(), flags as u32);
        // SAFETY: a context is current.
        check("creating an event", unsafe { sys::cuEventCreate(&mut handle, flags) })?;
        Ok(Event { context: Arc::clone(context), handle })
    }

    pub fn handle(&self) -> CUevent {
        self.handle
    }

    /// Later work in `then` waits for the work in `first`. Either may be the host's stream. The context has to be
    /// current.
    pub fn order(&self, first: CUstream, then: CUstream) -> Result<()> {
        // SAFETY: the event lives, and the caller vouches for the streams.
        unsafe {
            check("recording an event", sys::cuEventRecord(self.handle, first))?;
            check("joining two streams", sys::cuStreamWaitEvent(then, self.handle, 0))
        }
    }

    /// Records it in a stream, which lives. The context has to be current.
    pub fn record(&self, stream: CUstream) -> Result<()> {
        // SAFETY: the event lives, and the caller vouches for the stream.
        check("recording an event", unsafe { sys::cuEventRecord(self.handle, stream) })
    }

    /// The time from an earlier event to this one. Both are timed and have been passed.
    pub fn since(&self, earlier: &Event) -> Result<Duration> {
        let mut millis = 0.0;
        // SAFETY: both live.
        let answer = unsafe { sys::cuEventElapsedTime(&mut millis, earlier.handle, self.handle) };
        check("reading the GPU's clock", answer)?;
        Ok(Duration::from_secs_f64(f64::from(millis.max(0.0)) / 1000.0))
    }
}

impl gpu::Event for Event {
    fn synchronise(&self) -> Result<()> {
        // SAFETY: the event lives.
        check("waiting for the GPU", unsafe { sys::cuEventSynchronize(self.handle) })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(_current) = self.context.enter() {
            // SAFETY: created in `new`.
            unsafe { sys::cuEventDestroy_v2(self.handle) };
        }
    }
}
