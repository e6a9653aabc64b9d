//! Streams of our own. Non-blocking: the host's default stream and ours do not wait for each other.

use std::sync::{Arc, Weak};

use cudarc::driver::sys::{self, CUstream};
use parking_lot::Mutex;

use super::context::Context;
use super::error::check;
use super::event::Event;
use super::spans::SpanRecorder;
use crate::backend::gpu::Queue;
use crate::error::{Error, Result};

/// Every method but `new` wants the context to be current.
pub struct CudaStream {
    raw: Arc<RawStream>,
    /// Notes when copies run, and the name of their lane.
    spans: Option<(Arc<SpanRecorder>, &'static str)>,
}

/// The driver's stream, destroyed when nobody uses it or waits for it.
struct RawStream {
    context: Arc<Context>,
    handle: CUstream,
}

// SAFETY: streams may be used from any thread.
unsafe impl Send for RawStream {}
// SAFETY: as above; the driver locks what it must.
unsafe impl Sync for RawStream {}

/// The streams of all handles.
static STREAMS: Mutex<Vec<Weak<RawStream>>> = Mutex::new(Vec::new());

/// Waits for all our streams on a GPU, of every handle, and for none of the host's. The context has to be current.
pub fn synchronise_all(gpu_index: u32) {
    let live: Vec<Arc<RawStream>> = STREAMS.lock().iter().filter_map(Weak::upgrade).collect();
    for stream in live.iter().filter(|stream| stream.context.gpu.index == gpu_index) {
        // SAFETY: the stream lives. If the GPU has failed, nothing runs on it any more.
        unsafe { sys::cuStreamSynchronize(stream.handle) };
    }
}

impl CudaStream {
    pub fn new(context: &Arc<Context>) -> Result<CudaStream> {
        let _current = context.enter()?;
        let mut handle = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: a context is current.
        check("creating a stream", unsafe { sys::cuStreamCreate(&mut handle, flags) })?;
        let raw = Arc::new(RawStream { context: Arc::clone(context), handle });
        let mut streams = STREAMS.lock();
        streams.retain(|stream| stream.strong_count() > 0);
        streams.push(Arc::downgrade(&raw));
        Ok(CudaStream { raw, spans: None })
    }

    pub fn handle(&self) -> CUstream {
        self.raw.handle
    }

    pub fn context(&self) -> &Arc<Context> {
        &self.raw.context
    }

    /// Puts a copy from host memory into the stream. `doing` names it in an error.
    ///
    /// # Safety
    /// Both regions have so many bytes, and until the copy has ended they live and nothing else touches them.
    pub unsafe fn upload(&self, doing: &str, from: *const u8, to: u64, bytes: usize) -> Result<()> {
        self.copy(|| {
            // SAFETY: the caller's promise.
            check(doing, unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.cast(), bytes, self.handle()) })
        })
    }

    /// The same to host memory.
    ///
    /// # Safety
    /// As for [`CudaStream::upload`].
    pub unsafe fn download(&self, doing: &str, from: u64, to: *mut u8, bytes: usize) -> Result<()> {
        self.copy(|| {
            // SAFETY: the caller's promise.
            check(doing, unsafe { sys::cuMemcpyDtoHAsync_v2(to.cast(), from, bytes, self.handle()) })
        })
    }

    /// Puts a copy into the stream, by `launch`.
    pub fn copy(&self, launch: impl FnOnce() -> Result<()>) -> Result<()> {
        match &self.spans {
            Some((spans, lane)) => spans.record(lane, self.raw.handle, launch),
            None => launch(),
        }
    }
}

impl Queue for CudaStream {
    type Event = Event;
    type Spans = Arc<SpanRecorder>;

    fn record(&self, event: &Event) -> Result<()> {
        event.record(self.raw.handle)
    }

    fn wait_for(&self, event: &Event) -> Result<()> {
        // SAFETY: both live.
        check("joining two streams", unsafe { sys::cuStreamWaitEvent(self.raw.handle, event.handle(), 0) })
    }

    fn synchronise(&self) -> Result<()> {
        // SAFETY: the stream lives.
        check("waiting for the GPU", unsafe { sys::cuStreamSynchronize(self.raw.handle) })
    }

    fn set_spans(&mut self, spans: Option<&Arc<SpanRecorder>>, lane: &'static str) {
        self.spans = spans.map(|spans| (Arc::clone(spans), lane));
    }
}

impl Drop for RawStream {
    fn drop(&mut self) {
        if let Ok(_current) = self.context.enter() {
            // SAFETY: created in `CudaStream::new`. Work that is still in it runs to its end.
            unsafe { sys::cuStreamDestroy_v2(self.handle) };
        }
    }
}

/// Refuses a host's stream that is being captured into a CUDA graph: allocating and waiting would break the capture.
/// The context has to be current.
pub fn check_not_captured(stream: CUstream) -> Result<()> {
    let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: the host vouches for its stream.
    let answer = unsafe { sys::cuStreamIsCapturing(stream, &mut status) };
    // The answer for stream 0 while another stream that waits for it is captured.
    let implicit = answer == sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    if !implicit {
        check("asking about the host's stream", answer)?;
    }
    match status {
        sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE if !implicit => Ok(()),
        _ => Err(Error::State(
            "cuda_stream: it is being captured into a CUDA graph, which this library cannot be a part of; end the \
             capture first, or use another stream"
                .into(),
        )),
    }
}
