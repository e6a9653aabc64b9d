//! A model on a device: the [`Session`] behind a handle with one device.

mod ready;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use once_cell::sync::OnceCell;
use parking_lot::Mutex;

use self::ready::Asked;
use super::check::TensorCheck;
use super::device_model::DeviceModel;
use super::ledger::{Held, Ledger, Sharing};
use super::precision::AutoPrecision;
use super::ready_job::ReadyJob;
use super::runner::Watch;
use super::search::Job;
use super::settings::{OnNonFinite, Settings};
use super::stream::Streaming;
use super::weights::{Loading, SharedWeights, WeightsKey};
use super::workspace::Workspace;
use super::{
    Allocators, Call, Control, DeviceSession, FrameStream, JobShape, Opening, PlanKind, Session, Timelines, Trim,
    nonfinite,
};
use crate::backend::{Backend, HostStream, NonFinite, Note};
use crate::error::{Error, Result};
use crate::ir::{DeviceProfile, TensorDevice};
use crate::model::Direction;
use crate::model::checkpoint::CheckpointFile;
use crate::plan::{Plan, Target, WeightBytes};
use crate::report::{self, Bytes, PlanLimits, PlanReport};

/// Makes the backend that some settings ask for.
pub type MakeBackend<B> = Box<dyn Fn(&Settings) -> Result<B> + Send>;

pub struct Engine<B: Backend> {
    place: TensorDevice,
    file: CheckpointFile,
    allocators: Allocators,
    make: MakeBackend<B>,
    /// Streams keep the one that they were opened with.
    on: Arc<DeviceModel<B>>,
    /// What `precision=auto` has come to.
    auto: AutoPrecision,
    /// By direction.
    weights: [Option<Arc<SharedWeights<B>>>; 2],
    /// All that it loaded and that are still used: streams keep some that it gave up.
    loaded: Vec<Weak<SharedWeights<B>>>,
    workspace: Option<Workspace<B>>,
    ledger: Arc<Ledger>,
    sharing: Sharing,
    /// The last plan: hosts ask for it before they run it, and a tight limit takes long to search.
    planned: Mutex<Option<(Asked, Plan)>>,
    /// With `autotune`, from the first plan on.
    tuned: OnceCell<DeviceProfile>,
    /// Of the backend and its rates. They wait for the next run, which has a log.
    notes: Mutex<Vec<Note>>,
}

impl<B: Backend> Engine<B> {
    pub fn open(place: TensorDevice, opening: &Opening, make: MakeBackend<B>) -> Result<Engine<B>> {
        let Opening { checkpoint, allocators, settings } = opening;
        let backend = Arc::new(make(settings)?);
        let (file, notes) = (checkpoint.file(), Mutex::new(backend.notes()));
        let ledger = Arc::new(Ledger::new(B::HOST_MEMORY));
        Ok(Engine {
            place,
            auto: AutoPrecision::default().with(settings, backend.precision()),
            on: Arc::new(DeviceModel::new(backend, &file, settings.clone())?),
            file,
            allocators: allocators.clone(),
            make,
            weights: [None, None],
            loaded: Vec::new(),
            workspace: None,
            sharing: Sharing::with_nobody(&ledger),
            ledger,
            planned: Mutex::new(None),
            tuned: OnceCell::new(),
            notes,
        })
    }

    fn report(&self, plan: &Plan) -> PlanReport {
        let why = if self.has_left_fp16() { ", because values overflow in fp16" } else { "" };
        PlanReport { arithmetic: format!("{}{why}", self.on.arithmetic()), ..plan.report() }
    }

    /// Computes as these settings ask for, by what is known of fp16. A failure changes nothing.
    fn adopt(&mut self, settings: Settings, auto: AutoPrecision) -> Result<()> {
        let backend_of = |own: &Settings, auto: AutoPrecision| (own.threads, own.instructions, auto.of(own));
        let changes_backend = backend_of(&settings, auto) != backend_of(&self.on.settings, self.auto);
        let backend = if changes_backend {
            Arc::new((self.make)(&Settings { precision: auto.of(&settings), ..settings.clone() })?)
        } else {
            Arc::clone(&self.on.device)
        };
        let on = DeviceModel::new(backend, &self.file, settings)?;
        let tuning_of = |settings: &Settings| (settings.autotune, settings.autotune_path.clone());
        if changes_backend || tuning_of(&on.settings) != tuning_of(&self.on.settings) {
            self.tuned = OnceCell::new();
        }
        if changes_backend {
            *self.notes.lock() = on.device.notes();
        }
        let cache_of = |on: &DeviceModel<B>| (on.settings.cache, on.latents.packing);
        if changes_backend || cache_of(&on) != cache_of(&self.on) {
            // Work of the last call may still run there, on the old backend.
            self.workspace = None;
            *self.planned.lock() = None;
        }
        if on.device.precision() != self.on.device.precision() {
            self.weights = [None, None];
        }
        self.auto = auto.with(&on.settings, on.device.precision());
        self.on = Arc::new(on);
        self.tell_idle();
        Ok(())
    }

    /// The device, as the planner sees it. With `autotune` it may be measured first; only `cancel` makes that fail.
    fn target<'a>(&'a self, cancel: &'a AtomicBool) -> Result<Target<'a>> {
        if !self.on.settings.autotune {
            return Ok(self.on.target(self.on.device.profile(), cancel));
        }
        let path = self.on.settings.autotune_path.as_deref();
        let tuned = self.tuned.get_or_try_init(|| {
            let (profile, notes) = self.on.device.tuned_profile(path, &mut || cancel.load(Ordering::Relaxed))?;
            self.notes.lock().extend(notes);
            Ok(profile)
        })?;
        Ok(self.on.target(*tuned, cancel))
    }

    /// Unless they are there. `offloaded`: per layer, whether its weights stay in host memory.
    fn load_weights(&mut self, direction: Direction, offloaded: &[bool], control: &Control) -> Result<()> {
        if self.weights[direction as usize].is_some() {
            return Ok(());
        }
        let key = WeightsKey {
            file: self.file.identity.clone(),
            place: self.place,
            arithmetic: self.on.arithmetic(),
            direction,
            offloaded: offloaded.to_vec(),
            allocators: self.allocators.clone(),
        };
        self.loaded.retain(|share| share.strong_count() > 0);
        if let Some(share) = self.loaded.iter().filter_map(Weak::upgrade).find(|share| share.key == key) {
            self.weights[direction as usize] = Some(share);
            return Ok(());
        }
        let loading = Loading {
            on: &self.on,
            bytes: WeightBytes::new(self.on.network(direction), offloaded, &self.target(control.cancel)?),
            key,
            file: &self.file,
            ledger: &self.ledger,
            cancel: control.cancel,
        };
        let share = loading.share()?;
        if share.loaded.pageable {
            warn_not_pinned(control, share.held.host);
        }
        self.loaded.push(Arc::downgrade(&share));
        self.weights[direction as usize] = Some(share);
        self.tell_idle();
        Ok(())
    }

    /// What is kept for the next call: the workspace, and weights that no stream needs.
    fn idle(&self) -> impl Iterator<Item = &Held> {
        let weights = self.weights.iter().flatten().filter(|share| Arc::strong_count(share) == 1);
        self.workspace.iter().map(|kept| &kept.held).chain(weights.map(|share| &share.held))
    }

    fn tell_idle(&self) {
        self.ledger.set_idle(self.idle().map(|held| held.device).sum());
    }

    /// Ends an earlier call whose work may still run on the host's stream, unless the job's work may be left there too.
    /// What that call met is not this job's.
    fn end_earlier(&self, ready: &mut ReadyJob<B>, stream: Option<HostStream>, control: &Control) -> Result<()> {
        let ended = if ready.left_on(stream).is_none() { ready.end(None) } else { Ok(()) };
        let earlier = self.on.device.take_nonfinite(&mut ready.workspace.memory);
        ended.and(nonfinite::report(earlier, OnNonFinite::Propagate, ready.network().direction, control))
    }

    /// Runs a call. Returns the plan, and what it met as far as that is known: a call on a host's stream may still be
    /// running.
    fn run_once(&mut self, call: &Call, control: &mut Control) -> Result<(PlanReport, NonFinite)> {
        let direction = call.direction;
        let check = TensorCheck { network: Arc::clone(self.on.network(direction)), places: vec![self.place] };
        let cone = Arc::new(check.call(call)?);
        let job = Job { direction, input: call.input.shape(), cone };
        call.into.stream.map_or(Ok(()), |stream| self.on.device.check_stream(stream))?;
        Watch::new(control, "plan", 0).advance(0)?;
        let plan = self.find_plan(&job, self.limits(), control.cancel)?;
        Watch::new(control, "load", 0).advance(0)?;
        let mut ready = self.make_ready(&job, plan, control)?;
        let stream = ready.stream_for(&call.into, Some(call.input));
        let ended = self.end_earlier(&mut ready, stream, control);
        let result = ended.and_then(|()| ready.begin(stream)).and_then(|()| ready.run_call(call, control));
        // Also after a failure: nothing may touch the host's tensors once the call has returned.
        let finished = ready.finish(stream);
        if finished.is_ok() {
            self.workspace = Some(ready.workspace);
        }
        // They are idle from now on.
        drop(ready.weights);
        self.tell_idle();
        let known = match result {
            // A failure counts more than a cancel.
            Err(Error::Cancelled) => finished.and(Err(Error::Cancelled)),
            result => result.and(finished),
        }?;
        if let Some(seen) = known {
            self.auto.learn(direction, seen);
        }
        Ok((ready.report, known.unwrap_or_default()))
    }
}

/// For host memory that the system did not allow to be pinned.
fn warn_not_pinned(control: &Control, bytes: u64) {
    control.warn(format_args!(
        "{} of host memory could not be pinned, so this takes longer than planned; lower host_memory_limit or raise \
         the system's limit of locked memory",
        Bytes(bytes)
    ));
}

impl<B: Backend> DeviceSession for Engine<B> {
    fn place(&self) -> TensorDevice {
        self.place
    }

    fn plan_kind(&self) -> PlanKind {
        let PlanLimits { device, host } = self.limits();
        PlanKind {
            arithmetic: self.on.arithmetic(),
            profile: self.on.device.profile(),
            settings: self.on.settings.clone(),
            tuned: self.on.settings.autotune.then_some(self.place),
            limits: [device, host].map(|bytes| bytes - bytes % (bytes / 128).next_power_of_two()),
        }
    }

    fn has_left_fp16(&self) -> bool {
        self.on.settings.precision.is_none() && self.auto.overflows
    }

    fn leave_fp16(&mut self) -> Result<()> {
        if !self.auto.is_open {
            return Ok(());
        }
        let mut auto = self.auto;
        auto.overflows = true;
        self.adopt(self.on.settings.clone(), auto)
    }

    fn share(&mut self, with: Sharing) {
        self.sharing = with;
    }
}

impl<B: Backend> Session for Engine<B> {
    fn configure(&mut self, settings: Settings) -> Result<()> {
        self.adopt(settings, self.auto)
    }

    fn plan(&self, job: &JobShape, timelines: Timelines, cancel: &AtomicBool) -> Result<PlanReport> {
        let (job, limits) = (Job::new(self.on.network(job.direction), job)?, self.limits());
        let plan = self.find_plan(&job, limits, cancel)?;
        let report = self.report(&plan);
        if let Some(timelines) = timelines {
            let target = self.target(cancel)?;
            timelines.push(report::timeline(&plan, &report, &self.place.to_string(), limits, &target)?);
        }
        Ok(report)
    }

    fn run(&mut self, call: &Call, control: &mut Control) -> Result<PlanReport> {
        let (mut report, mut seen) = self.run_once(call, control)?;
        if self.auto.is_overflow(seen) {
            control.warn(format_args!(
                "{}: values overflow in fp16, so this call is repeated in bf16, and the handle stays with it; set \
                 precision to bf16 to begin with it",
                call.direction.name()
            ));
            self.leave_fp16()?;
            (report, seen) = self.run_once(call, control)?;
        }
        nonfinite::report(seen, self.on.settings.on_nonfinite, call.direction, control)?;
        Ok(report)
    }

    fn open_stream(&mut self, job: &JobShape, control: &Control) -> Result<Box<dyn FrameStream>> {
        let job = Job::new(self.on.network(job.direction), job)?;
        let plan = self.find_plan(&job, self.limits(), control.cancel)?;
        let mut ready = self.make_ready(&job, plan, control)?;
        self.end_earlier(&mut ready, None, control)?;
        Ok(Box::new(Streaming::new(ready, job.input)))
    }

    fn stream_closed(&mut self) {
        self.tell_idle();
    }

    fn ledger(&self) -> Arc<Ledger> {
        Arc::clone(&self.ledger)
    }

    fn trim(&mut self, what: Trim) {
        if what.workspace {
            self.workspace = None;
        }
        if what.weights {
            self.weights = [None, None];
        }
        self.tell_idle();
    }
}

#[cfg(test)]
pub(super) mod tests;
