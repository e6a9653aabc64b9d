//! Several devices behind one handle: a session that divides its work among members, one session for each device.
//! Nothing below a member knows of the others.

mod assign;
mod divide;
mod frames;
mod job;
mod member;
mod members;
mod run;
mod stream;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use parking_lot::Mutex;

use self::job::{FleetJob, Tensors};
use self::member::Member;
use self::members::{Fleet, refuse_stream};
use super::check::{self, TensorCheck};
use super::ledger::{Ledger, Sharing};
use super::settings::Settings;
use super::{Call, Control, DeviceSession, Extent, FrameStream, JobShape, Session, Trim};
use crate::error::{Error, Result};
use crate::ir::TensorDevice;
use crate::model::Model;
use crate::report::PlanReport;

/// The session of a list of devices.
pub struct FleetSession {
    model: Arc<Model>,
    ledger: Arc<Ledger>,
    /// Shared with its streams.
    fleet: Arc<Mutex<Fleet>>,
}

impl FleetSession {
    pub fn new(mut sessions: Vec<Box<dyn DeviceSession>>, settings: Settings) -> Result<FleetSession> {
        let ledgers: Vec<_> = sessions.iter().map(|session| session.ledger()).collect();
        let places: Vec<_> = sessions.iter().map(|session| session.place()).collect();
        let ledger = Arc::new(Ledger::sum(ledgers.clone()));
        for session in &mut sessions {
            let same = places.iter().zip(&ledgers).filter(|(place, _)| **place == session.place());
            let device = same.map(|(_, ledger)| Arc::clone(ledger)).collect();
            session.share(Sharing { device, handle: Arc::clone(&ledger) });
        }
        let Some(model) = sessions.first().map(|session| Arc::clone(session.model())) else {
            return Err(Error::Internal("a fleet without devices".into()));
        };
        let fleet = Fleet::new(sessions.into_iter().map(Member::new).collect(), &model, settings)?;
        Ok(FleetSession { model, ledger, fleet: Arc::new(Mutex::new(fleet)) })
    }
}

/// What is to be planned; of a stream a round.
fn asked(fleet: &Fleet, job: &JobShape) -> Result<FleetJob> {
    let network = fleet.network(job.direction);
    check::job(network, job)?;
    match job.extent {
        Extent::Clip => Ok(FleetJob::new(network, job.input, None, None)),
        Extent::Range(range) => Ok(FleetJob::new(network, job.input, Some(range), None)),
        Extent::Stream { .. } => stream::round(fleet, network, job.input),
    }
}

impl Session for FleetSession {
    fn model(&self) -> &Arc<Model> {
        &self.model
    }

    fn devices(&self) -> Vec<TensorDevice> {
        self.fleet.lock().places()
    }

    fn settings(&self) -> Settings {
        self.fleet.lock().settings.clone()
    }

    fn configure(&mut self, settings: Settings) -> Result<()> {
        self.fleet.lock().apply(&settings)
    }

    fn plan(&self, job: &JobShape, cancel: &AtomicBool) -> Result<PlanReport> {
        let mut fleet = self.fleet.lock();
        let asked = asked(&fleet, job)?;
        match job.extent {
            Extent::Stream { first } => stream::plan(&mut fleet, &asked, first, cancel),
            Extent::Clip | Extent::Range(_) => fleet.plan(&asked, cancel),
        }
    }

    fn timelines(&self, job: &JobShape, cancel: &AtomicBool) -> Result<Vec<serde_json::Value>> {
        let mut fleet = self.fleet.lock();
        let asked = asked(&fleet, job)?;
        fleet.timelines(&asked, cancel)
    }

    fn run(&mut self, call: &Call, control: &mut Control) -> Result<PlanReport> {
        let mut fleet = self.fleet.lock();
        let network = Arc::clone(fleet.network(call.direction));
        TensorCheck { network: Arc::clone(&network), places: fleet.places() }.call(call)?;
        refuse_stream(call.stream.is_some())?;
        let job = FleetJob::new(&network, call.input.shape(), call.range, Some(call.output.shape().frames));
        let tensors = Tensors { input: *call.input, output: *call.output, logvar: call.logvar.copied() };
        let had_left = fleet.has_left_fp16();
        let report = fleet.run(&job, &tensors, control)?;
        // Parts in two precisions do not have the bits of one. The repetition begins with bf16 on all members.
        if fleet.has_left_fp16() && !had_left { fleet.run(&job, &tensors, control) } else { Ok(report) }
    }

    fn open_stream(&mut self, job: &JobShape, control: &Control) -> Result<Box<dyn FrameStream>> {
        Ok(Box::new(stream::open(&self.fleet, &self.ledger, job, control.cancel)?))
    }

    fn ledger(&self) -> Arc<Ledger> {
        Arc::clone(&self.ledger)
    }

    fn trim(&mut self, what: Trim) {
        self.fleet.lock().members.iter_mut().for_each(|member| member.session.trim(what));
    }
}
