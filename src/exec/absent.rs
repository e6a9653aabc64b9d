//! Plans for a device that is not here. Owns the settings meanwhile; must not run anything.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::device_model::DeviceModel;
use super::ledger::Ledger;
use super::search::{HOST_MARGIN, Job, MARGIN};
use super::{Call, Control, FrameStream, JobShape, Limit, Session, Settings, Timelines, Trim, check};
use crate::backend::{AbsentDevice, DeviceFacts, Precision, host_memory};
use crate::error::{Error, Result, check_cancel};
use crate::ir::TensorDevice;
use crate::model::checkpoint::CheckpointFile;
use crate::model::{Checkpoint, Model};
use crate::report::{self, PlanLimits, PlanReport};

/// A session, and the device that it plans for while `device_like` names one.
pub struct PlanningSession {
    own: Box<dyn Session>,
    file: CheckpointFile,
    absent: Option<AbsentPlans>,
}

impl PlanningSession {
    pub fn new(own: Box<dyn Session>, checkpoint: &Checkpoint) -> PlanningSession {
        PlanningSession { own, file: checkpoint.file(), absent: None }
    }

    fn refuse_to_run(&self) -> Result<()> {
        match &self.absent {
            Some(AbsentPlans { on, .. }) => Err(Error::Argument(format!(
                "device_like: {} is planned for and is not here; set device_like to none to run",
                on.device.key
            ))),
            None => Ok(()),
        }
    }
}

impl Session for PlanningSession {
    fn model(&self) -> &Arc<Model> {
        self.own.model()
    }

    fn devices(&self) -> Vec<TensorDevice> {
        self.own.devices()
    }

    fn settings(&self) -> Settings {
        self.absent.as_ref().map_or_else(|| self.own.settings(), |absent| absent.settings.clone())
    }

    fn configure(&mut self, settings: Settings) -> Result<()> {
        let Some(key) = settings.device_like else {
            self.own.configure(settings)?;
            self.absent = None;
            return Ok(());
        };
        check::limits(&settings, self.own.devices().len())?;
        let device = AbsentDevice::new(key, settings.precision.unwrap_or(Precision::Fp16))?;
        let on = DeviceModel::new(Arc::new(device), &self.file, &settings)?;
        self.absent = Some(AbsentPlans { settings, on });
        Ok(())
    }

    fn plan(&self, job: &JobShape, timelines: Timelines, cancel: &AtomicBool) -> Result<PlanReport> {
        match &self.absent {
            Some(absent) => absent.plan(job, timelines, cancel),
            None => self.own.plan(job, timelines, cancel),
        }
    }

    fn run(&mut self, call: &Call, control: &mut Control) -> Result<PlanReport> {
        self.refuse_to_run()?;
        self.own.run(call, control)
    }

    fn open_stream(&mut self, job: &JobShape, control: &Control) -> Result<Box<dyn FrameStream>> {
        self.refuse_to_run()?;
        self.own.open_stream(job, control)
    }

    fn ledger(&self) -> Arc<Ledger> {
        self.own.ledger()
    }

    fn trim(&mut self, what: Trim) {
        self.own.trim(what);
    }
}

/// What plans for an absent device need.
struct AbsentPlans {
    settings: Settings,
    on: DeviceModel<AbsentDevice>,
}

impl AbsentPlans {
    fn plan(&self, job: &JobShape, timelines: Timelines, cancel: &AtomicBool) -> Result<PlanReport> {
        let AbsentPlans { settings, on } = self;
        let limit = settings.memory_limit.first().copied().unwrap_or(Limit::Auto);
        // All of the device's memory is free, and this machine's is what the host has.
        let limits = PlanLimits {
            device: limit.bytes(on.device.memory_bytes, MARGIN),
            host: settings.host_memory_limit.bytes(host_memory().available, HOST_MARGIN),
        };
        let (network, target) = (on.network(job.direction), on.target(on.device.profile(), settings, cancel));
        let request = Job::new(network, job)?.request(network, settings, limits, 0);
        let plan = on.plan(&request, settings, &target, cancel)?;
        let report = PlanReport { arithmetic: on.arithmetic(), absent: Some(on.device.name), ..plan.report() };
        if let Some(timelines) = timelines {
            timelines.push(report::timeline(&plan, &report, on.device.key, limits, &target));
            check_cancel(cancel)?;
        }
        Ok(report)
    }
}
