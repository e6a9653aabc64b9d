//! A model that is open on its devices, or planned for on one that is not here. Owns the settings; must not run
//! anything itself.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::device_model::DeviceModel;
use super::ledger::Ledger;
use super::search::Job;
use super::settings::HOST_MARGIN;
use super::{Call, Control, FrameStream, JobShape, Opening, Session, Settings, Timelines, Trim, check};
use crate::backend::{AbsentDevice, DeviceFacts, host_memory};
use crate::error::{Error, Result};
use crate::ir::TensorDevice;
use crate::model::Model;
use crate::model::checkpoint::CheckpointFile;
use crate::report::{self, PlanLimits, PlanReport};

/// What a handle of the C ABI stands for.
pub struct OpenModel {
    file: CheckpointFile,
    pub devices: Vec<TensorDevice>,
    session: Box<dyn Session>,
    settings: Settings,
    /// The device that is planned for while `device_like` names one.
    absent: Option<DeviceModel<AbsentDevice>>,
}

impl OpenModel {
    /// `session`: of these devices, opened with the same.
    pub fn new(opening: Opening, devices: Vec<TensorDevice>, session: Box<dyn Session>) -> OpenModel {
        let Opening { checkpoint, settings, .. } = opening;
        OpenModel { file: checkpoint.file(), devices, session, settings, absent: None }
    }

    pub fn model(&self) -> &Arc<Model> {
        &self.file.model
    }

    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// What it holds, in figures that can be read while a call runs.
    pub fn ledger(&self) -> Arc<Ledger> {
        self.session.ledger()
    }

    /// Takes effect with the next call. Open streams keep their settings. A failure changes nothing.
    pub fn configure(&mut self, settings: Settings) -> Result<()> {
        check::limits(&settings, self.devices.len())?;
        self.absent = match settings.device_like {
            Some(key) => {
                let device = AbsentDevice::new(key, settings.on_gpu())?;
                Some(DeviceModel::new(Arc::new(device), &self.file, settings.clone())?)
            }
            None => {
                self.session.configure(settings.clone())?;
                None
            }
        };
        self.settings = settings;
        Ok(())
    }

    /// `timelines`: gets the plan as a [timeline](crate::report::timeline) for each device that has a part.
    pub fn plan(&self, job: &JobShape, timelines: Timelines, cancel: &AtomicBool) -> Result<PlanReport> {
        match &self.absent {
            Some(absent) => absent.report(job, timelines, cancel),
            None => self.session.plan(job, timelines, cancel),
        }
    }

    /// Returns the plan that it ran by.
    pub fn run(&mut self, call: &Call, control: &mut Control) -> Result<PlanReport> {
        self.running()?.run(call, control)
    }

    /// `job`: of a stream.
    pub fn open_stream(&mut self, job: &JobShape, control: &Control) -> Result<Box<dyn FrameStream>> {
        self.running()?.open_stream(job, control)
    }

    /// After a stream of it is closed.
    pub fn stream_closed(&mut self) {
        self.session.stream_closed();
    }

    pub fn trim(&mut self, what: Trim) {
        self.session.trim(what);
    }

    /// The session, unless it is another device that is planned for.
    fn running(&mut self) -> Result<&mut dyn Session> {
        match &self.absent {
            Some(absent) => Err(Error::Argument(format!(
                "device_like: {} is planned for and is not here; set device_like to none to run",
                absent.device.key
            ))),
            None => Ok(&mut *self.session),
        }
    }
}

impl DeviceModel<AbsentDevice> {
    /// All of the device's memory is free, and this machine's is what the host has.
    fn report(&self, job: &JobShape, timelines: Timelines, cancel: &AtomicBool) -> Result<PlanReport> {
        let limits = PlanLimits {
            device: self.settings.device_bytes(self.device.free_bytes()),
            host: self.settings.host_memory_limit.bytes(host_memory().available, HOST_MARGIN),
        };
        let target = self.target(self.device.profile(), cancel);
        let plan = self.plan(&Job::new(self.network(job.direction), job)?, limits, 0, &target)?;
        let report = PlanReport { arithmetic: self.arithmetic(), absent: Some(self.device.name), ..plan.report() };
        if let Some(timelines) = timelines {
            timelines.push(report::timeline(&plan, &report, self.device.key, limits, &target)?);
        }
        Ok(report)
    }
}
