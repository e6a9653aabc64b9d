//! The trace of a handle: when each operation and copy ran, as a file that chrome://tracing and Perfetto read.
//!
//! Owns the file. Knows names and times; must not know what an operation does.

use std::io::{self, BufWriter, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use serde_json::{Value, json};

use super::operations::{op_frames, op_name};
use crate::backend::DeviceSpan;
use crate::error::Result;
use crate::file::{Replacement, cannot_write};
use crate::ir::{Offsets, Op, TensorDevice};
use crate::model::Network;

/// The key of the trace, for errors.
const KEY: &str = "trace";

/// Written from the call that sets it until another is set, or until its handle is freed. Clones are the same trace.
#[derive(Debug, Clone)]
pub struct Trace(Arc<TraceFile>);

impl PartialEq for Trace {
    fn eq(&self, other: &Trace) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

#[derive(Debug)]
struct TraceFile {
    path: PathBuf,
    begun: Instant,
    /// `None` before it is opened and after it is finished.
    open: Mutex<Option<OpenTrace>>,
}

#[derive(Debug)]
struct OpenTrace {
    file: BufWriter<Replacement>,
    /// Why the file lacks events.
    failure: Option<io::Error>,
    /// Devices by an address of their own, and their lanes. Their places are their numbers.
    lanes: Vec<(usize, &'static str)>,
    has_events: bool,
}

/// An operation whose times are not known yet.
#[derive(Debug)]
pub struct TracedOp {
    name: String,
    frames: usize,
}

impl TracedOp {
    pub fn new(op: &Op<Offsets>, network: &Network) -> TracedOp {
        TracedOp { name: op_name(op, network), frames: op_frames(op) }
    }
}

/// The device that a lane belongs to: an address that no other device has meanwhile, and its place.
#[derive(Clone, Copy)]
pub struct TracedDevice {
    pub address: usize,
    pub place: TensorDevice,
}

impl Trace {
    pub fn new(path: PathBuf) -> Trace {
        Trace(Arc::new(TraceFile { path, begun: Instant::now(), open: Mutex::new(None) }))
    }

    /// Creates the file under a temporary name. Does nothing if that is done.
    pub fn open(&self) -> Result<()> {
        let mut open = self.0.open.lock();
        if open.is_none() {
            let mut file = BufWriter::new(Replacement::new(KEY, &self.0.path)?);
            let failure = file.write_all(b"{\"displayTimeUnit\":\"ms\",\"traceEvents\":[").err();
            *open = Some(OpenTrace { file, failure, lanes: Vec::new(), has_events: false });
        }
        Ok(())
    }

    /// Completes the file and gives it its name. Later events are not written.
    pub fn finish(&self) -> Result<()> {
        self.0.finish()
    }

    /// Whether anything is written any more.
    pub fn is_open(&self) -> bool {
        self.0.open.lock().is_some()
    }

    /// Writes when operations of a device ran. A span says which of `ops` it is of.
    pub fn write(&self, ops: &[TracedOp], spans: &[DeviceSpan], by: TracedDevice) {
        let Some(open) = &mut *self.0.open.lock() else { return };
        for span in spans {
            if let Some(op) = ops.get(span.op as usize) {
                open.event(op, by, span.lane, self.0.micros(span.start), self.0.micros(span.end));
            }
        }
    }
}

impl TraceFile {
    fn micros(&self, at: Instant) -> f64 {
        at.saturating_duration_since(self.begun).as_secs_f64() * 1e6
    }

    fn finish(&self) -> Result<()> {
        let Some(mut open) = self.open.lock().take() else { return Ok(()) };
        let failed = |why| cannot_write(KEY, &self.path, &why);
        if open.failure.is_none() {
            open.failure = open.file.write_all(b"\n]}\n").err();
        }
        if let Some(why) = open.failure {
            return Err(failed(why));
        }
        open.file.into_inner().map_err(|why| failed(why.into_error()))?.commit()
    }
}

impl Drop for TraceFile {
    /// Nobody is left to hear of a failure.
    fn drop(&mut self) {
        let _ = self.finish();
    }
}

impl OpenTrace {
    fn event(&mut self, op: &TracedOp, by: TracedDevice, lane: &'static str, start: f64, end: f64) {
        let (pid, tid) = self.lane(by, lane);
        // To a tenth of a microsecond, rounded so that neighbours cannot overlap.
        let [ts, end] = [start, end].map(|micros| (micros * 10.0).round());
        self.write(&json!({
            "name": op.name, "ph": "X", "pid": pid, "tid": tid, "ts": ts / 10.0, "dur": (end - ts).max(0.0) / 10.0,
            "args": { "frames": op.frames },
        }));
    }

    /// Numbers of a device and its lane. New ones are named in the file.
    fn lane(&mut self, by: TracedDevice, lane: &'static str) -> (usize, usize) {
        let known = self.lanes.iter().position(|known| *known == (by.address, lane));
        let tid = known.unwrap_or(self.lanes.len());
        let first = self.lanes.iter().position(|(address, _)| *address == by.address).unwrap_or(tid);
        if known.is_none() {
            self.lanes.push((by.address, lane));
            let device = by.place.to_string();
            for (what, name) in [("process_name", &*device), ("thread_name", lane)] {
                let named = json!({ "name": what, "ph": "M", "pid": first, "tid": tid, "args": { "name": name } });
                self.write(&named);
            }
        }
        (first, tid)
    }

    fn write(&mut self, event: &Value) {
        if self.failure.is_none() {
            let comma = if std::mem::replace(&mut self.has_events, true) { "," } else { "" };
            self.failure = write!(self.file, "{comma}\n{event}").err();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::{DeviceOffset, LoadOp};
    use crate::model::Direction;
    use crate::model::families::seedvr2::Sizes;
    use crate::testing;

    /// As the members of a fleet do, which share a trace.
    #[test]
    fn devices_of_one_place_have_lanes_of_their_own() {
        let sizes = Sizes { channels: vec![16; 4], layers: 1, groups: 16, latent: 16, temporal_levels: 2 };
        let network = testing::network(&sizes, Direction::Decode);
        let path = std::env::temp_dir().join(format!("vvae-trace-{}.json", std::process::id()));
        let trace = Trace::new(path.clone());
        trace.open().unwrap();
        let op = Op::Load(LoadOp { item: 0, batch: 0, frame: 0, into: DeviceOffset(0) });
        let devices = [1, 2].map(|address| TracedDevice { address, place: TensorDevice::Cpu });
        let now = Instant::now();
        let span = DeviceSpan { op: 0, lane: "operations", start: now, end: now };
        for by in devices {
            trace.write(&[TracedOp::new(&op, &network)], &[span], by);
        }
        trace.finish().unwrap();
        assert!(!trace.is_open());
        let written: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        std::fs::remove_file(path).unwrap();
        let events: Vec<_> =
            written["traceEvents"].as_array().unwrap().iter().filter(|event| event["ph"] == "X").collect();
        assert!(events.len() == 2 && events[0]["pid"] != events[1]["pid"], "{written}");
    }
}
