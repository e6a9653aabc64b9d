//! Times of operations and copies on the device's clock, for a trace. Without one, nothing here runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ash::vk;
use parking_lot::Mutex;

use super::context::Context;
use crate::backend::DeviceSpan;
use crate::backend::gpu::Spans;
use crate::error::{Error, Result};

/// Queries of a pool: two for each span.
const POOL_QUERIES: u32 = 512;

/// A query and its pool.
type Query = (vk::QueryPool, u32);

struct Noted {
    op: u64,
    lane: &'static str,
    queries: [Query; 2],
}

#[derive(Default)]
struct State {
    noted: Vec<Noted>,
    pools: Vec<vk::QueryPool>,
    /// Queries that are taken, in the order of the pools.
    taken: u32,
}

/// Pairs of queries around work in queues.
pub struct SpanRecorder {
    context: Arc<Context>,
    /// The operation that work belongs to.
    op: AtomicU64,
    state: Mutex<State>,
    /// Ticks of the device's clock, and when that was.
    origin: Mutex<Option<(u64, Instant)>>,
}

impl SpanRecorder {
    pub fn new(context: &Arc<Context>) -> Result<SpanRecorder> {
        if !context.device.physical.features.resets_queries {
            let name = &context.device.physical.name;
            return Err(Error::State(format!(
                "trace: {name} lacks the Vulkan feature hostQueryReset; trace on another device"
            )));
        }
        let context = Arc::clone(context);
        Ok(SpanRecorder { context, op: AtomicU64::new(0), state: Mutex::default(), origin: Mutex::default() })
    }

    /// Queries for the start and the end of a span.
    pub fn queries(&self) -> Result<[Query; 2]> {
        let mut state = self.state.lock();
        Ok([state.query(&self.context)?, state.query(&self.context)?])
    }

    /// Notes a span whose queries are both in the queue. Whoever asks for its times waits for them.
    pub fn note(&self, lane: &'static str, queries: [Query; 2]) {
        self.state.lock().noted.push(Noted { op: self.op.load(Ordering::Relaxed), lane, queries });
    }

    /// Says that the clock has just passed a query.
    pub fn set_origin(&self, query: Query) -> Result<()> {
        let now = Instant::now();
        *self.origin.lock() = Some((self.ticks(query)?, now));
        Ok(())
    }

    /// Of a query that was passed.
    fn ticks(&self, (pool, query): Query) -> Result<u64> {
        let mut ticks = [0u64];
        let flags = vk::QueryResultFlags::TYPE_64 | vk::QueryResultFlags::WAIT;
        // SAFETY: a query of this device, whose work was waited for.
        let answer = unsafe { self.context.device.raw.get_query_pool_results(pool, query, &mut ticks, flags) };
        self.context.device.check("reading the GPU's clock", answer)?;
        Ok(ticks[0])
    }
}

impl Spans for Arc<SpanRecorder> {
    fn set_op(&self, op: u64) {
        self.op.store(op, Ordering::Relaxed);
    }

    fn take(&self) -> Result<Vec<DeviceSpan>> {
        self.context.wait_idle();
        let Some((first, begun)) = *self.origin.lock() else { return Ok(Vec::new()) };
        let mut state = self.state.lock();
        let noted = std::mem::take(&mut state.noted);
        let nanoseconds = f64::from(self.context.device.physical.tick_nanoseconds);
        let at = |query: Query| -> Result<Instant> {
            let ticks = self.ticks(query)?.saturating_sub(first);
            Ok(begun + Duration::from_nanos((ticks as f64 * nanoseconds) as u64))
        };
        let span = |of: &Noted| {
            let [start, end] = [at(of.queries[0])?, at(of.queries[1])?];
            Ok(DeviceSpan { op: of.op, lane: of.lane, start, end })
        };
        let spans = noted.iter().map(span).collect();
        state.reset(&self.context);
        spans
    }
}

impl State {
    fn query(&mut self, context: &Context) -> Result<Query> {
        let (pool, query) = ((self.taken / POOL_QUERIES) as usize, self.taken % POOL_QUERIES);
        if pool == self.pools.len() {
            let kind = vk::QueryType::TIMESTAMP;
            let info = vk::QueryPoolCreateInfo::default().query_type(kind).query_count(POOL_QUERIES);
            // SAFETY: the structure lives during the call.
            let made = unsafe { context.device.raw.create_query_pool(&info, None) };
            let made = context.device.check("preparing a trace", made)?;
            // SAFETY: the feature was asked for, and no work uses the pool.
            unsafe { context.device.raw.reset_query_pool(made, 0, POOL_QUERIES) };
            self.pools.push(made);
        }
        self.taken += 1;
        Ok((self.pools[pool], query))
    }

    /// No work uses any query.
    fn reset(&mut self, context: &Context) {
        for pool in &self.pools {
            // SAFETY: as above.
            unsafe { context.device.raw.reset_query_pool(*pool, 0, POOL_QUERIES) };
        }
        self.taken = 0;
    }
}

impl Drop for SpanRecorder {
    fn drop(&mut self) {
        self.context.wait_idle();
        for pool in &self.state.get_mut().pools {
            // SAFETY: no work uses it any more.
            unsafe { self.context.device.raw.destroy_query_pool(*pool, None) };
        }
    }
}
