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
use self::members::{Fleet, refuse_stream};
use super::check;
use super::ledger::Ledger;
use super::settings::Settings;
use super::{Call, Control, DeviceSession, Extent, FrameStream, JobShape, Opening, Session, Timelines, Trim};
use crate::error::Result;
use crate::report::PlanReport;

/// The session of a list of devices. Its streams share the fleet, with settings of their own.
pub struct FleetSession {
    fleet: Arc<Mutex<Fleet>>,
    settings: Settings,
}

impl FleetSession {
    pub fn new(members: Vec<Box<dyn DeviceSession>>, opening: &Opening) -> Result<FleetSession> {
        let fleet = Arc::new(Mutex::new(Fleet::new(members, opening)?));
        Ok(FleetSession { fleet, settings: opening.settings.clone() })
    }
}

impl Session for FleetSession {
    fn configure(&mut self, settings: Settings) -> Result<()> {
        drop(Fleet::locked(&self.fleet, &settings)?);
        self.settings = settings;
        Ok(())
    }

    fn plan(&self, job: &JobShape, timelines: Timelines, cancel: &AtomicBool) -> Result<PlanReport> {
        let mut fleet = Fleet::locked(&self.fleet, &self.settings)?;
        check::job(fleet.network(job.direction), job)?;
        let range = match job.extent {
            Extent::Clip => None,
            Extent::Range(range) => Some(range),
            Extent::Stream { first } => {
                let round = stream::round(&fleet, job)?;
                return stream::plan(&mut fleet, &round, first, timelines, cancel);
            }
        };
        let job = FleetJob::new(fleet.network(job.direction), job.input, range, None);
        fleet.plan(&job, timelines, cancel)
    }

    fn run(&mut self, call: &Call, control: &mut Control) -> Result<PlanReport> {
        let mut fleet = Fleet::locked(&self.fleet, &self.settings)?;
        fleet.check(call.direction).call(call)?;
        refuse_stream(&call.into)?;
        let (input, frames) = (call.input.shape(), call.into.output.shape().frames);
        let job = FleetJob::new(fleet.network(call.direction), input, call.range, Some(frames));
        let had_left = fleet.has_left_fp16();
        let report = fleet.run(&job, call, control)?;
        // Parts in two precisions do not have the bits of one. The repetition begins with bf16 on all members.
        if fleet.has_left_fp16() && !had_left { fleet.run(&job, call, control) } else { Ok(report) }
    }

    fn open_stream(&mut self, job: &JobShape, control: &Control) -> Result<Box<dyn FrameStream>> {
        Ok(Box::new(stream::open(&self.fleet, self.settings.clone(), job, control.cancel)?))
    }

    fn ledger(&self) -> Arc<Ledger> {
        Arc::clone(&self.fleet.lock().ledger)
    }

    fn trim(&mut self, what: Trim) {
        self.fleet.lock().members.iter_mut().for_each(|member| member.session.trim(what));
    }
}
