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

use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use parking_lot::Mutex;

use self::job::{FleetJob, Tensors};
use self::member::Member;
use self::members::{Fleet, refuse_stream};
use super::ledger::{Ledger, Sharing};
use super::settings::{OnNonFinite, Settings};
use super::{Call, ClipRange, Control, DeviceSession, FrameStream, Session, Trim, check, nonfinite};
use crate::error::{Error, Result};
use crate::ir::{Shape, TensorDevice};
use crate::model::{Config, Direction};
use crate::plan::PlanReport;

/// The session of a list of devices.
pub struct FleetSession {
    config: Config,
    settings: Settings,
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
            session.share(Sharing { device, handle: Some(Arc::clone(&ledger)) });
        }
        let Some(config) = sessions.first().map(|session| session.config().clone()) else {
            return Err(Error::Internal("a fleet without devices".into()));
        };
        let fleet = Fleet::new(sessions.into_iter().map(Member::new).collect(), &config, settings.clone())?;
        Ok(FleetSession { config, settings, ledger, fleet: Arc::new(Mutex::new(fleet)) })
    }
}

impl Session for FleetSession {
    fn config(&self) -> &Config {
        &self.config
    }

    fn devices(&self) -> Vec<String> {
        self.fleet.lock().members.iter().map(|member| member.session.device().to_owned()).collect()
    }

    fn settings(&self) -> &Settings {
        &self.settings
    }

    fn configure(&mut self, settings: Settings) -> Result<()> {
        self.fleet.lock().apply(&settings)?;
        self.settings = settings;
        Ok(())
    }

    fn plan(
        &self,
        direction: Direction,
        input: Shape,
        range: Option<ClipRange>,
        cancel: &AtomicBool,
    ) -> Result<PlanReport> {
        check::input_shape(&self.config, direction, input, range.is_none())?;
        let mut fleet = self.fleet.lock();
        let network = Arc::clone(fleet.network(direction));
        if let Some(range) = range {
            check::range(&network, range)?;
        }
        if input.frames == 0 {
            return stream::plan(&mut fleet, &network, input, 0, cancel);
        }
        fleet.plan(&FleetJob::new(&network, input, range, None), cancel)
    }

    fn timelines(
        &self,
        direction: Direction,
        input: Shape,
        range: Option<ClipRange>,
        cancel: &AtomicBool,
    ) -> Result<Vec<serde_json::Value>> {
        check::input_shape(&self.config, direction, input, range.is_none())?;
        let mut fleet = self.fleet.lock();
        let network = Arc::clone(fleet.network(direction));
        if let Some(range) = range {
            check::range(&network, range)?;
        }
        let job = match input.frames {
            0 => stream::round(&fleet, &network, input)?,
            _ => FleetJob::new(&network, input, range, None),
        };
        fleet.timelines(&job, cancel)
    }

    fn run(&mut self, call: &Call, control: &mut Control) -> Result<PlanReport> {
        let mut fleet = self.fleet.lock();
        let network = Arc::clone(fleet.network(call.direction));
        let cone = check::call(&network, call, &fleet.places())?;
        refuse_stream(call.stream.is_some())?;
        if self.settings.on_nonfinite == OnNonFinite::Fail && call.input.device() == TensorDevice::Cpu {
            nonfinite::refuse(call.input, call.direction, cone.first_input(), control.cancel)?;
        }
        let job = FleetJob::new(&network, call.input.shape(), call.range, Some(call.output.shape().frames));
        let tensors = Tensors { input: *call.input, output: *call.output, logvar: call.logvar.copied() };
        fleet.run(&job, &tensors, control)
    }

    fn open_stream(
        &mut self,
        direction: Direction,
        input: Shape,
        first: u64,
        control: &Control,
    ) -> Result<Box<dyn FrameStream>> {
        let input = Shape { frames: 0, ..input };
        check::input_shape(&self.config, direction, input, true)?;
        Ok(Box::new(stream::open(&self.fleet, &self.ledger, (direction, input, first), control.cancel)?))
    }

    fn restore_stream(
        &mut self,
        state: &mut dyn Read,
        bytes: u64,
        control: &Control,
    ) -> Result<(Direction, Box<dyn FrameStream>)> {
        self.fleet.lock().members[0].session.restore_stream(state, bytes, control)
    }

    fn ledger(&self) -> Arc<Ledger> {
        Arc::clone(&self.ledger)
    }

    fn trim(&mut self, what: Trim) {
        self.fleet.lock().members.iter_mut().for_each(|member| member.session.trim(what));
    }
}
