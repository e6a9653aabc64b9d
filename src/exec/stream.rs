//! A clip of any length, pushed and pulled in pieces. Work is done in the pull; memory is what the plan says,
//! however long the clip.

mod save;

pub use save::{in_pieces, kept};

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::runner::{Ends, Runner, Watch};
use super::settings::Settings;
use super::weights::Share;
use super::workspace::{Workspace, stage_name, stream_for};
use super::{Control, FrameStream, Outputs, Pull, check};
use crate::backend::Backend;
use crate::error::{Error, Result};
use crate::model::checkpoint::Fingerprint;
use crate::plan::{Blueprint, Job, Plan, Step, Wait};
use crate::tensor::{Place, Shape, View};

pub struct Streaming<B: Backend> {
    backend: Arc<B>,
    weights: Share<B>,
    workspace: Workspace<B>,
    blueprint: Blueprint,
    job: Job,
    settings: Settings,
    place: Place,
    /// The shape that frames are pushed in.
    input: Shape,
    ended: bool,
    /// Whether frames that were pushed got lost.
    broken: bool,
    /// Output frames that the host has.
    pulled: u64,
    /// Of the checkpoint that the weights are from.
    model: Arc<Fingerprint>,
}

impl<B: Backend> Streaming<B> {
    pub fn new(
        backend: Arc<B>,
        weights: Share<B>,
        workspace: Workspace<B>,
        (blueprint, job): (Blueprint, Job),
        settings: Settings,
        (place, input): (Place, Shape),
        model: Arc<Fingerprint>,
    ) -> Streaming<B> {
        Streaming {
            // A restored job has stored what the host has.
            pulled: job.stored(),
            backend,
            weights,
            workspace,
            blueprint,
            job,
            settings,
            place,
            input,
            ended: false,
            broken: false,
            model,
        }
    }

    fn check_intact(&self) -> Result<()> {
        match self.broken {
            true => Err(Error::State("stream: a call failed, so frames are missing; open another stream".into())),
            false => Ok(()),
        }
    }

    /// Runs the steps that a call with these tensors can run.
    fn runner<'a>(&'a mut self, ends: Ends<'a>) -> (Runner<'a, B>, &'a mut Job) {
        let runner = Runner {
            backend: &*self.backend,
            weights: &self.weights,
            memory: &mut self.workspace.memory,
            scratch: self.blueprint.scratch_offset(),
            bands: self.blueprint.bands(),
            staging: self.blueprint.staging(),
            settings: &self.settings,
            ends,
        };
        (runner, &mut self.job)
    }
}

impl<B: Backend> FrameStream for Streaming<B> {
    fn plan(&self) -> Plan {
        self.blueprint.report()
    }

    fn push(&mut self, input: Option<&View>) -> Result<u64> {
        self.check_intact()?;
        let Some(view) = input else {
            if !self.ended {
                self.ended = true;
                let frames = self.job.loaded();
                self.job.set_total(frames);
            }
            return Ok(0);
        };
        if self.ended {
            return Err(Error::State(
                "frames: the clip was said to be complete; open another stream for the next".into(),
            ));
        }
        let network = Arc::clone(&self.job.layout().network);
        check::input(&network.config, network.direction, view, self.place)?;
        check::continues(network.direction, view.shape(), self.input)?;
        let taken = self.job.room().min(view.shape().frames);
        let ends = Ends { input: Some(view), input_first: self.job.loaded(), ..Ends::default() };
        let (mut runner, job) = self.runner(ends);
        for _ in 0..taken {
            job.load();
        }
        let mut loaded = Ok(());
        while let (Ok(()), Some(Step::Load { .. })) = (&loaded, job.front()) {
            loaded = runner.run(job, &mut || false);
            job.done();
        }
        // Also after a failure: nothing may touch the host's tensor once the call has returned.
        let finished = self.backend.finish(&mut self.workspace.memory, None);
        // The schedule counts on frames that may not be there.
        self.broken = loaded.is_err() || finished.is_err();
        loaded.and(finished).map(|()| taken)
    }

    fn pull(&mut self, into: &Outputs, control: &mut Control, written: &mut u64) -> Result<Pull> {
        *written = 0;
        self.check_intact()?;
        let Outputs { output, logvar, stream } = *into;
        let network = Arc::clone(&self.job.layout().network);
        check::output(&network.config, network.direction, self.input, output, self.place, false)?;
        if let Some(logvar) = logvar {
            check::logvar(&network.config, network.direction, self.input, logvar, self.place, output)?;
        }
        let stream = stream_for(stream, self.place, [Some(output), logvar]);
        self.backend.begin(&mut self.workspace.memory, stream)?;
        let mut watch = Watch::new(control, stage_name(network.direction), 0);
        let (first, batch) = (self.pulled, self.input.batch);
        let (mut runner, job) =
            self.runner(Ends { output: Some(output), logvar, output_first: first, ..Ends::default() });
        let result = loop {
            match job.wait() {
                Wait::Input if *written == 0 => break Ok(Pull::NeedsInput),
                Wait::End if *written == 0 => break Ok(Pull::Ended),
                Wait::Input | Wait::End => break Ok(Pull::Written),
                Wait::No => {}
            }
            let (stores, work) = match job.front() {
                Some(Step::Store { batch, frame, .. }) => (Some((*batch, *frame)), 0),
                step => (None, step.map_or(0, |step| step.work(&network))),
            };
            if stores.is_some_and(|(_, frame)| frame - first >= output.shape().frames) {
                break Ok(Pull::Written);
            }
            if let Err(error) = runner.run(job, &mut || watch.stop()) {
                break Err(error);
            }
            job.done();
            match stores {
                // The clips of a batch leave together, so the last one completes the frame.
                Some((clip, frame)) if clip + 1 == batch => *written = frame - first + 1,
                Some(_) => {}
                None => {
                    if let Err(error) = watch.advance(work) {
                        break Err(error);
                    }
                }
            }
        };
        self.pulled += *written;
        // Also after a failure: nothing may touch the host's tensors once the call has returned.
        let finished = self.backend.finish(&mut self.workspace.memory, stream);
        // A step that was stopped is run again; of one that failed nobody knows how far it came.
        let failed = result.as_ref().is_err_and(|error| *error != Error::Cancelled);
        self.broken = failed || finished.is_err();
        result.and_then(|pull| finished.map(|()| pull))
    }

    fn state_bytes(&mut self) -> Result<u64> {
        self.saved_bytes()
    }

    fn save(&mut self, into: &mut dyn Write, cancel: &AtomicBool) -> Result<()> {
        self.save_into(into, cancel)
    }
}
