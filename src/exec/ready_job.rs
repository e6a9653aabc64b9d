//! A planned job with its weights and its memory, as a call or a stream runs it. Must not know how it was planned.

use std::sync::Arc;

use super::Outputs;
use super::device_model::DeviceModel;
use super::precision::AutoPrecision;
use super::settings::OnNonFinite;
use super::weights::SharedWeights;
use super::workspace::Workspace;
use crate::backend::{Backend, DeviceSpan, HostStream, NonFinite};
use crate::error::Result;
use crate::ir::{Buffers, TensorDevice, View};
use crate::model::Network;
use crate::plan::Schedule;
use crate::report::{PlanReport, TracedDevice, TracedOp};

pub struct ReadyJob<B: Backend> {
    pub on: Arc<DeviceModel<B>>,
    pub place: TensorDevice,
    pub weights: Arc<SharedWeights<B>>,
    pub workspace: Workspace<B>,
    pub buffers: Buffers,
    /// The plan, for the host.
    pub report: PlanReport,
    pub schedule: Schedule,
    pub auto: AutoPrecision,
    /// Operations of a trace whose times are not written yet.
    pub traced: Vec<TracedOp>,
}

impl<B: Backend> ReadyJob<B> {
    pub fn network(&self) -> &Arc<Network> {
        &self.schedule.spec().network
    }

    /// The host's stream, if the call may return before its work is done: all its tensors are on this job's device.
    pub fn stream_for(&self, into: &Outputs, input: Option<View>) -> Option<HostStream> {
        let on_device = |view: &View| view.device() == self.place && self.place != TensorDevice::Cpu;
        into.stream.filter(|_| [input, Some(into.output), into.logvar].iter().flatten().all(on_device))
    }

    pub fn begin(&mut self, stream: Option<HostStream>) -> Result<()> {
        self.on.device.begin(&mut self.workspace.memory, stream)
    }

    /// The host's stream, if a call may leave its work there: not if `precision=auto` may learn from it, or if
    /// non-finite values are errors.
    pub fn left_on(&self, stream: Option<HostStream>) -> Option<HostStream> {
        let waits = self.on.settings.on_nonfinite == OnNonFinite::Fail || self.auto.waits(self.network().direction);
        stream.filter(|_| !waits)
    }

    /// Ends a call. Returns the non-finite values that it met; `None` where work on the host's stream may still run.
    pub fn finish(&mut self, stream: Option<HostStream>) -> Result<Option<NonFinite>> {
        let stream = self.left_on(stream);
        self.end(stream)?;
        Ok(stream.is_none().then(|| self.on.device.take_nonfinite(&mut self.workspace.memory)))
    }

    /// Ends a call without asking for non-finite values. Afterwards nothing touches the host's tensors, or only in the
    /// order of its stream.
    pub fn end(&mut self, stream: Option<HostStream>) -> Result<()> {
        self.on.device.finish(&mut self.workspace.memory, stream)?;
        if self.on.settings.trace.is_none() {
            return Ok(());
        }
        let spans = self.on.device.take_spans(&mut self.workspace.memory)?;
        self.write_trace(&spans);
        self.on.device.trace(&mut self.workspace.memory, None).map(|_| ())
    }

    /// Writes when all the operations ran that are not written yet.
    pub fn write_trace(&mut self, spans: &[DeviceSpan]) {
        let by = TracedDevice { address: Arc::as_ptr(&self.on.device).addr(), place: self.place };
        let ops = std::mem::take(&mut self.traced);
        self.on.settings.trace.iter().for_each(|trace| trace.write(&ops, spans, by));
    }
}
