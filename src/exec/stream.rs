//! A clip of any length, pushed and pulled in pieces. Work is done in the pull; memory is what the plan says,
//! however long the clip.

use std::sync::Arc;

use super::check::{StreamCheck, TensorCheck};
use super::ready_job::ReadyJob;
use super::runner::{HostTensors, Watch};
use super::{Control, FrameStream, Outputs, Pull, nonfinite};
use crate::backend::{Backend, NonFinite};
use crate::error::{Error, Result};
use crate::ir::{Op, Shape, View};
use crate::plan::{Next, op_work};
use crate::report::PlanReport;
use crate::reserve;

pub struct Streaming<B: Backend> {
    job: ReadyJob<B>,
    check: StreamCheck,
    /// Output frames that the host has.
    pulled: u64,
    seen: NonFinite,
    /// Whether the host knows of values that are not finite.
    told: bool,
}

impl<B: Backend> Streaming<B> {
    pub fn new(job: ReadyJob<B>, input: Shape) -> Streaming<B> {
        let tensors = TensorCheck { network: Arc::clone(job.network()), places: vec![job.place] };
        let pulled = job.schedule.spec().cone.range.first;
        Streaming { job, check: StreamCheck::new(tensors, input), pulled, seen: NonFinite::default(), told: false }
    }

    /// Runs what the frames so far suffice for, until `into` is full.
    fn work(&mut self, into: &Outputs, control: &mut Control, written: &mut u64) -> Result<Pull> {
        let network = Arc::clone(self.job.network());
        let mut watch = Watch::new(control, network.direction.name(), 0);
        let (first, batch, room) = (self.pulled, self.check.frame.batch, into.output.shape().frames);
        let tensors = HostTensors { into: Some(*into), output_first: first, ..HostTensors::default() };
        loop {
            match self.job.schedule.prepare_next() {
                Next::Input if *written == 0 => return Ok(Pull::NeedsInput),
                Next::End if *written == 0 => return Ok(Pull::Ended),
                Next::Input | Next::End => return Ok(Pull::Written),
                Next::Op => {}
            }
            let (stores, work) = match self.job.schedule.front() {
                Some(Op::Store(store)) => (Some((store.batch, store.frame)), 0),
                op => (None, op.map_or(0, |op| op_work(op, &network))),
            };
            if stores.is_some_and(|(_, frame)| frame - first >= room) {
                return Ok(Pull::Written);
            }
            self.job.run(&tensors, &mut || watch.stop())?;
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
    fn plan(&self) -> PlanReport {
        self.job.report.clone()
    }

    fn push(&mut self, input: Option<&View>) -> Result<u64> {
        self.check.intact()?;
        reserve::check()?;
        let Some(view) = input else {
            if !std::mem::replace(&mut self.check.ended, true) {
                let frames = self.job.schedule.loaded();
                self.job.schedule.set_total(frames);
            }
            return Ok(0);
        };
        self.check.push(view)?;
        let (taken, input_first) = (self.job.schedule.room().min(view.shape().frames), self.job.schedule.loaded());
        let tensors = HostTensors { input: Some(*view), input_first, ..HostTensors::default() };
        for _ in 0..taken {
            self.job.schedule.load();
        }
        let mut loaded = Ok(());
        while let (Ok(()), Some(Op::Load(_))) = (&loaded, self.job.schedule.front()) {
            loaded = self.job.run(&tensors, &mut || false);
        }
        // Also after a failure: nothing may touch the host's tensor once the call has returned.
        let finished = self.job.end(None);
        // The schedule counts on frames that may not be there.
        self.check.broken = loaded.is_err() || finished.is_err();
        loaded.and(finished).map(|()| taken)
    }

    fn pull(&mut self, into: &Outputs, control: &mut Control, written: &mut u64) -> Result<Pull> {
        *written = 0;
        self.check.intact()?;
        self.check.pull(into)?;
        into.stream.map_or(Ok(()), |stream| self.job.on.device.check_stream(stream))?;
        let stream = self.job.stream_for(into, None);
        self.job.begin(stream)?;
        let result = self.work(into, control, written);
        self.pulled += *written;
        // Also after a failure: nothing may touch the host's tensors once the call has returned.
        let finished = self.job.finish(stream);
        // A cancelled operation runs again. How far a failed one came is unknown.
        let failed = result.as_ref().is_err_and(|error| *error != Error::Cancelled);
        self.check.broken = failed || finished.is_err();
        let known = finished?;
        let seen = known.unwrap_or_default();
        self.seen = NonFinite { loaded: self.seen.loaded | seen.loaded, stored: self.seen.stored | seen.stored };
        if failed {
            return result;
        }
        // A cancelled pull hands out frames too.
        let direction = self.job.network().direction;
        if self.job.auto.is_overflow(self.seen) {
            (*written, self.check.broken) = (0, true);
            return Err(nonfinite::overflowed_stream(direction));
        }
        if known.is_some() && result == Ok(Pull::Written) {
            self.job.auto.learn(direction, self.seen);
        }
        if !self.told && self.seen != NonFinite::default() {
            self.told = true;
            let told = nonfinite::report(self.seen, self.job.on.settings.on_nonfinite, direction, control);
            self.check.broken = told.is_err();
            told?;
        }
        result
    }
}
