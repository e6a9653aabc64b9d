//! Times of operations and copies on the GPU's clock, for a trace. Without one, nothing here runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use cudarc::driver::sys::CUstream;
use parking_lot::Mutex;

use super::context::Context;
use super::event::Event;
use crate::backend::DeviceSpan;
use crate::backend::gpu::{Event as _, Spans};
use crate::error::Result;

/// Pairs of events around work in streams.
pub struct SpanRecorder {
    context: Arc<Context>,
    /// Passed at `begun`.
    origin: Event,
    begun: Instant,
    /// The operation that work belongs to.
    op: AtomicU64,
    spans: Mutex<Vec<(u64, &'static str, [Event; 2])>>,
}

impl SpanRecorder {
    /// The context has to be current, here and for every method.
    pub fn new(context: &Arc<Context>, stream: CUstream) -> Result<SpanRecorder> {
        let origin = Event::timed(context)?;
        origin.record(stream)?;
        origin.synchronise()?;
        let (context, op, spans) = (Arc::clone(context), AtomicU64::new(0), Mutex::default());
        Ok(SpanRecorder { context, origin, begun: Instant::now(), op, spans })
    }

    /// Notes when the work runs that `launch` puts into a stream.
    pub fn record(&self, lane: &'static str, stream: CUstream, launch: impl FnOnce() -> Result<()>) -> Result<()> {
        let [start, end] = [Event::timed(&self.context)?, Event::timed(&self.context)?];
        start.record(stream)?;
        launch()?;
        end.record(stream)?;
        self.spans.lock().push((self.op.load(Ordering::Relaxed), lane, [start, end]));
        Ok(())
    }
}

impl Spans for Arc<SpanRecorder> {
    fn set_op(&self, op: u64) {
        self.op.store(op, Ordering::Relaxed);
    }

    fn take(&self) -> Result<Vec<DeviceSpan>> {
        let spans = std::mem::take(&mut *self.spans.lock());
        let span = |(op, lane, events): &(u64, &'static str, [Event; 2])| {
            events[1].synchronise()?;
            let [start, end] = [events[0].since(&self.origin)?, events[1].since(&self.origin)?];
            Ok(DeviceSpan { op: *op, lane, start: self.begun + start, end: self.begun + end })
        };
        spans.iter().map(span).collect()
    }
}
