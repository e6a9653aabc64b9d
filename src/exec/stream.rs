//! A clip of any length, pushed and pulled in pieces. Work is done in the pull; memory is what the plan says,
//! however long the clip.

use std::sync::Arc;

use super::check::StreamCheck;
use super::runner::{Computing, HostTensors, Runner, Watch};
use super::workspace::{Workspace, stream_for};
use super::{Control, FrameStream, Outputs, Pull, nonfinite};
use crate::backend::{Backend, NonFinite};
use crate::error::{Error, Result};
use crate::ir::{Op, Shape, View};
use crate::model::Direction;
use crate::plan::{Next, Plan, Schedule, op_work};
use crate::report::PlanReport;
use crate::reserve;

pub struct Streaming<B: Backend> {
    computing: Computing<B>,
    workspace: Workspace<B>,
    plan: Plan,
    schedule: Schedule,
    check: StreamCheck,
    /// Output frames that the host has.
    pulled: u64,
    seen: NonFinite,
    /// Whether the host knows of values that are not finite.
    told: bool,
}

impl<B: Backend> Streaming<B> {
    pub fn new(
        computing: Computing<B>,
        workspace: Workspace<B>,
        plan: Plan,
        schedule: Schedule,
        input: Shape,
    ) -> Streaming<B> {
        let check = StreamCheck::new(Arc::clone(&schedule.spec().network), input, vec![computing.place]);
        let pulled = schedule.spec().cone.range.first;
        Streaming { computing, workspace, plan, schedule, check, pulled, seen: NonFinite::default(), told: false }
    }

    /// Runs the steps that a call with these tensors can run.
    fn runner<'a>(&'a mut self, tensors: HostTensors<'a>) -> (Runner<'a, B>, &'a mut Schedule) {
        let (memory, buffers) = (&mut self.workspace.memory, self.plan.buffers());
        (Runner { with: &self.computing, memory, buffers, tensors }, &mut self.schedule)
    }

    /// Runs what the frames so far suffice for, until `into` is full.
    fn work(&mut self, into: &Outputs, control: &mut Control, written: &mut u64) -> Result<Pull> {
        let network = Arc::clone(&self.schedule.spec().network);
        let mut watch = Watch::new(control, network.direction.name(), 0);
        let (first, batch, room) = (self.pulled, self.check.input.batch, into.output.shape().frames);
        let (output, logvar) = (Some(into.output), into.logvar);
        let (mut runner, schedule) =
            self.runner(HostTensors { output, logvar, output_first: first, ..HostTensors::default() });
        loop {
            match schedule.prepare_next() {
                Next::Input if *written == 0 => return Ok(Pull::NeedsInput),
                Next::End if *written == 0 => return Ok(Pull::Ended),
                Next::Input | Next::End => return Ok(Pull::Written),
                Next::Op => {}
            }
            let (stores, work) = match schedule.front() {
                Some(Op::Store(store)) => (Some((store.batch, store.frame)), 0),
                op => (None, op.map_or(0, |op| op_work(op, &network))),
            };
            if stores.is_some_and(|(_, frame)| frame - first >= room) {
                return Ok(Pull::Written);
            }
            runner.run(schedule, &mut || watch.stop())?;
            schedule.done();
            match stores {
                // The clips of a batch leave together, so the last one completes the frame.
                Some((clip, frame)) if clip + 1 == batch => *written = frame - first + 1,
                Some(_) => {}
                None => watch.advance(work)?,
            }
        }
    }
}

impl<B: Backend> FrameStream for Streaming<B> {
    fn direction(&self) -> Direction {
        self.schedule.spec().network.direction
    }

    fn plan(&self) -> PlanReport {
        PlanReport { arithmetic: self.computing.arithmetic.clone(), ..self.plan.report() }
    }

    fn push(&mut self, input: Option<&View>) -> Result<u64> {
        self.check.intact()?;
        reserve::check()?;
        let Some(view) = input else {
            if !std::mem::replace(&mut self.check.ended, true) {
                let frames = self.schedule.loaded();
                self.schedule.set_total(frames);
            }
            return Ok(0);
        };
        self.check.push(view)?;
        let taken = self.schedule.room().min(view.shape().frames);
        let tensors = HostTensors { input: Some(view), input_first: self.schedule.loaded(), ..HostTensors::default() };
        let (mut runner, schedule) = self.runner(tensors);
        for _ in 0..taken {
            schedule.load();
        }
        let mut loaded = Ok(());
        while let (Ok(()), Some(Op::Load(_))) = (&loaded, schedule.front()) {
            loaded = runner.run(schedule, &mut || false);
            schedule.done();
        }
        // Also after a failure: nothing may touch the host's tensor once the call has returned.
        let finished = self.computing.backend.finish(&mut self.workspace.memory, None);
        let finished = finished.and_then(|()| {
            self.workspace.collect_trace(&*self.computing.backend, &self.computing.settings, self.computing.place)
        });
        // The schedule counts on frames that may not be there.
        self.check.broken = loaded.is_err() || finished.is_err();
        loaded.and(finished).map(|()| taken)
    }

    fn pull(&mut self, into: &Outputs, control: &mut Control, written: &mut u64) -> Result<Pull> {
        *written = 0;
        self.check.intact()?;
        self.check.pull(into)?;
        let Outputs { output, logvar, stream } = *into;
        stream.map_or(Ok(()), |stream| self.computing.backend.check_stream(stream))?;
        let stream = stream_for(stream, self.computing.place, [Some(output), logvar]);
        self.computing.backend.begin(&mut self.workspace.memory, stream)?;
        let result = self.work(into, control, written);
        self.pulled += *written;
        // Also after a failure: nothing may touch the host's tensors once the call has returned.
        let direction = self.direction();
        let Computing { backend, settings, place, auto, .. } = &mut self.computing;
        let stream = stream.filter(|_| !auto.waits(direction, settings, backend.precision()));
        let finished = self.workspace.finish(&**backend, stream, settings, *place);
        // A cancelled operation runs again. How far a failed one came is unknown.
        let failed = result.as_ref().is_err_and(|error| *error != Error::Cancelled);
        self.check.broken = failed || finished.is_err();
        let seen = finished?;
        self.seen.loaded |= seen.loaded;
        self.seen.stored |= seen.stored;
        let pull = result?;
        if auto.is_overflow(settings, backend.precision(), self.seen) {
            (*written, self.check.broken) = (0, true);
            return Err(nonfinite::overflowed_stream(direction));
        }
        if stream.is_none() && matches!(pull, Pull::Written) {
            auto.learn(direction, self.seen);
        }
        if !self.told && self.seen != NonFinite::default() {
            self.told = true;
            let told = nonfinite::report(self.seen, self.computing.settings.on_nonfinite, self.direction(), control);
            self.check.broken = told.is_err();
            told?;
        }
        Ok(pull)
    }
}
