//! A planned job with its weights and its memory, as a call or a stream runs it. Must not know how it was planned.

use std::sync::Arc;

use super::precision::AutoPrecision;
use super::runner::{HostTensors, Runner, Watch};
use super::settings::{OnNonFinite, Settings};
use super::trace::traced;
use super::weights::SharedWeights;
use super::workspace::Workspace;
use super::{Call, Control};
use crate::backend::{Backend, HostStream, NonFinite};
use crate::error::Result;
use crate::ir::{TensorDevice, View};
use crate::model::families::LatentMaps;
use crate::model::{Direction, Network};
use crate::plan::{Next, Plan, Schedule, op_work, work};
use crate::report::PlanReport;

pub struct ReadyJob<B: Backend> {
    pub backend: Arc<B>,
    pub place: TensorDevice,
    pub settings: Settings,
    pub latents: Arc<LatentMaps>,
    pub weights: Arc<SharedWeights<B>>,
    pub workspace: Workspace<B>,
    pub plan: Plan,
    /// The plan, for the host.
    pub report: PlanReport,
    pub schedule: Schedule,
    pub auto: AutoPrecision,
}

impl<B: Backend> ReadyJob<B> {
    pub fn network(&self) -> &Arc<Network> {
        &self.schedule.spec().network
    }

    pub fn direction(&self) -> Direction {
        self.network().direction
    }

    /// A runner for a call with these tensors, and the schedule whose operations it runs.
    pub fn runner<'a>(&'a mut self, tensors: HostTensors<'a>) -> (Runner<'a, B>, &'a mut Schedule) {
        let runner = Runner {
            backend: &*self.backend,
            place: self.place,
            settings: &self.settings,
            latents: &self.latents,
            weights: &self.weights.loaded.convs,
            memory: &mut self.workspace.memory,
            buffers: self.plan.buffers(),
            tensors,
        };
        (runner, &mut self.schedule)
    }

    /// The host's stream, if the call may return before its work is done: all its tensors are on this job's device.
    pub fn stream_for(&self, stream: Option<HostStream>, tensors: &[Option<&View>]) -> Option<HostStream> {
        let on_device = |view: &&View| view.device() == self.place && self.place != TensorDevice::Cpu;
        stream.filter(|_| tensors.iter().flatten().all(on_device))
    }

    pub fn begin(&mut self, stream: Option<HostStream>) -> Result<()> {
        self.backend.begin(&mut self.workspace.memory, stream)
    }

    /// Runs a whole call. Streams drive their own runner: see `exec/stream.rs`.
    pub fn drive(&mut self, call: &Call, control: &mut Control) -> Result<()> {
        let (network, cone) = (Arc::clone(self.network()), Arc::clone(&self.schedule.spec().cone));
        let total = work(self.schedule.spec(), cone.first_input + call.input.shape().frames);
        let mut watch = Watch::new(control, network.direction.name(), u64::try_from(total).unwrap_or(u64::MAX));
        let (mut runner, schedule) = self.runner(HostTensors {
            input: Some(call.input),
            input_first: cone.first_input,
            output: Some(call.output),
            logvar: call.logvar,
            output_first: cone.range.first,
            first_clip: call.first_clip,
        });
        while schedule.prepare_next() == Next::Op {
            let work = schedule.front().map_or(0, |op| op_work(op, &network));
            runner.run(schedule, &mut || watch.stop())?;
            watch.advance(work)?;
        }
        Ok(())
    }

    /// Ends a call. Returns the non-finite values that it met; `None` where work on the host's stream may still run.
    /// That work is waited for only if `precision=auto` may learn from it, or if such values are errors.
    pub fn finish(&mut self, stream: Option<HostStream>) -> Result<Option<NonFinite>> {
        let waits = self.settings.on_nonfinite == OnNonFinite::Fail
            || self.auto.waits(self.direction(), &self.settings, self.backend.precision());
        let stream = stream.filter(|_| !waits);
        self.end(stream)?;
        Ok(stream.is_none().then(|| self.backend.take_nonfinite(&mut self.workspace.memory)))
    }

    /// Ends a call without asking for non-finite values. Afterwards nothing touches the host's tensors, or only in the
    /// order of its stream.
    pub fn end(&mut self, stream: Option<HostStream>) -> Result<()> {
        self.backend.finish(&mut self.workspace.memory, stream)?;
        let Some(trace) = &self.settings.trace else { return Ok(()) };
        trace.write(&self.backend.take_spans(&mut self.workspace.memory)?, traced(&*self.backend, self.place));
        self.backend.trace(&mut self.workspace.memory, None).map(|_| ())
    }
}
