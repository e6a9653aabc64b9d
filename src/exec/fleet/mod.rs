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

use self::job::FleetJob;
use self::member::Member;
use self::members::{Fleet, refuse_stream};
use super::check::{self, TensorCheck};
use super::ledger::{Ledger, Sharing};
use super::settings::Settings;
use super::{Call, Control, DeviceSession, Extent, FrameStream, JobShape, Session, Timelines, Trim};
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

    fn plan(&self, job: &JobShape, timelines: Timelines, cancel: &AtomicBool) -> Result<PlanReport> {
        let mut fleet = self.fleet.lock();
        let network = Arc::clone(fleet.network(job.direction));
        check::job(&network, job)?;
        let range = match job.extent {
            Extent::Clip => None,
            Extent::Range(range) => Some(range),
            Extent::Stream { first } => {
                let round = stream::round(&fleet, &network, job.input)?;
                return stream::plan(&mut fleet, &round, first, timelines, cancel);
            }
        };
        fleet.plan(&FleetJob::new(&network, job.input, range, None), timelines, cancel)
    }

    fn run(&mut self, call: &Call, control: &mut Control) -> Result<PlanReport> {
        let mut fleet = self.fleet.lock();
        let network = Arc::clone(fleet.network(call.direction));
        TensorCheck { network: Arc::clone(&network), places: fleet.places() }.call(call)?;
        refuse_stream(call.stream.is_some())?;
        let job = FleetJob::new(&network, call.input.shape(), call.range, Some(call.output.shape().frames));
        let had_left = fleet.has_left_fp16();
        let report = fleet.run(&job, call, control)?;
        // Parts in two precisions do not have the bits of one. The repetition begins with bf16 on all members.
        if fleet.has_left_fp16() && !had_left { fleet.run(&job, call, control) } else { Ok(report) }
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
