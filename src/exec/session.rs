//! A model on a device: the [`Session`] behind a handle.

mod ready;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use once_cell::sync::OnceCell;
use parking_lot::Mutex;

use self::ready::Asked;
use super::latents::LatentMaps;
use super::ledger::{Ledger, Sharing};
use super::precision::AutoPrecision;
use super::runner::{Computing, HostTensors, Runner, Watch};
use super::search::Job;
use super::settings::{OnNonFinite, Settings};
use super::stream::Streaming;
use super::weights::{Loading, SharedWeights, WeightsKey};
use super::workspace::{Workspace, stream_for};
use super::{
    Allocators, Call, Control, DeviceSession, FrameStream, JobShape, NearLimits, PlanKind, Session, StreamStart, Trim,
    check, nonfinite,
};
use crate::backend::{Backend, DeviceFacts, NonFinite, Note, Precision};
use crate::error::{Error, Result, check_cancel};
use crate::ir::{CacheFormat, ConvLayout, DeviceProfile, FrameShape, Norm, Shape, TensorDevice};
use crate::model::checkpoint::FileIdentity;
use crate::model::{Checkpoint, Direction, Geometry, Model, Network};
use crate::plan::{Next, Plan, Target, WeightBytes, op_work, work};
use crate::report::{self, Bytes, PlanLimits, PlanReport};

/// Makes the backend that some settings ask for.
pub type MakeBackend<B> = Box<dyn Fn(&Settings) -> Result<B> + Send>;

pub struct Engine<B: Backend> {
    place: TensorDevice,
    model: Arc<Model>,
    /// The checkpoint, and what its file was when it was opened.
    path: PathBuf,
    file: FileIdentity,
    allocators: Allocators,
    make: MakeBackend<B>,
    backend: Arc<B>,
    settings: Settings,
    latents: Arc<LatentMaps>,
    /// What `precision=auto` has come to.
    auto: AutoPrecision,
    /// By direction.
    coders: [Coder<B>; 2],
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

/// The encoder or the decoder.
struct Coder<B: Backend> {
    network: Arc<Network>,
    weights: Option<Arc<SharedWeights<B>>>,
}

impl<B: Backend> Engine<B> {
    pub fn open(
        place: TensorDevice,
        checkpoint: &Checkpoint,
        allocators: Allocators,
        settings: Settings,
        make: MakeBackend<B>,
    ) -> Result<Engine<B>> {
        let backend = Arc::new(make(&settings)?);
        let notes = Mutex::new(backend.notes());
        let reopen = || Checkpoint::reopen(checkpoint.path(), checkpoint.identity(), checkpoint.model());
        let latents = latent_maps::<B>(&settings, checkpoint.model(), checkpoint.path(), reopen)?;
        let networks = networks(&*backend, checkpoint.model(), &settings, latents.packing)?;
        let coders = networks.map(|network| Coder { network, weights: None });
        Ok(Engine {
            place,
            model: Arc::clone(checkpoint.model()),
            file: checkpoint.identity().clone(),
            path: checkpoint.path().to_owned(),
            allocators,
            backend,
            make,
            settings,
            latents,
            auto: AutoPrecision::default(),
            coders,
            workspace: None,
            ledger: Arc::new(Ledger::new(B::HOST_MEMORY)),
            sharing: Sharing::default(),
            planned: Mutex::new(None),
            tuned: OnceCell::new(),
            notes,
        })
    }

    fn report(&self, plan: &Plan) -> PlanReport {
        PlanReport { arithmetic: self.told_arithmetic(), ..plan.report() }
    }

    /// What bits depend on, beside the input, for people.
    fn told_arithmetic(&self) -> String {
        let why = if self.has_left_fp16() { ", because values overflow in fp16" } else { "" };
        format!("{}{why}", self.arithmetic())
    }

    /// The same settings with the precision to compute in.
    fn effective(&self, settings: &Settings) -> Settings {
        Settings { precision: self.auto.of(settings), ..settings.clone() }
    }

    /// Computes with another backend or other networks from now on.
    fn adopt(&mut self, backend: Arc<B>, networks: [Arc<Network>; 2]) {
        // Work of the last call may still run there, on the old backend.
        self.workspace = None;
        if backend.precision() != self.backend.precision() {
            self.drop_weights();
        }
        self.backend = backend;
        self.coders.iter_mut().zip(networks).for_each(|(coder, network)| coder.network = network);
        *self.planned.lock() = None;
        self.tell_idle();
    }

    fn coder(&self, direction: Direction) -> &Coder<B> {
        &self.coders[direction as usize]
    }

    fn coder_mut(&mut self, direction: Direction) -> &mut Coder<B> {
        &mut self.coders[direction as usize]
    }

    /// The device, as the planner sees it. With `autotune` it may be measured first; only `cancel` makes that fail.
    fn target(&self, cancel: &AtomicBool) -> Result<Target<'_>> {
        let (mut profile, groups) = (self.profile(cancel)?, self.coders[0].network.norm.groups());
        profile.rates = self.settings.rates.or(profile.rates);
        Ok(Target::new(profile, self.backend.sizes(), groups))
    }

    fn profile(&self, cancel: &AtomicBool) -> Result<DeviceProfile> {
        if !self.settings.autotune {
            return Ok(self.backend.profile());
        }
        let path = self.settings.autotune_path.as_deref();
        let tune = || self.backend.tuned_profile(path, &mut || cancel.load(Ordering::Relaxed));
        let tuned = self.tuned.get_or_try_init(|| {
            let (profile, notes) = tune()?;
            self.notes.lock().extend(notes);
            Ok(profile)
        })?;
        Ok(*tuned)
    }

    /// `offloaded`: per layer, whether its weights stay in host memory.
    fn load_weights(&mut self, direction: Direction, offloaded: &[bool], control: &Control) -> Result<()> {
        match &self.coder(direction).weights {
            Some(share) if share.offloaded() == offloaded => return Ok(()),
            _ => self.coder_mut(direction).weights = None,
        }
        self.tell_idle();
        let key = WeightsKey {
            file: self.file.clone(),
            place: self.place,
            precision: self.backend.precision(),
            arithmetic: self.backend.arithmetic(),
            direction,
            offloaded: offloaded.to_vec(),
            allocators: self.allocators.clone(),
        };
        let network = Arc::clone(&self.coder(direction).network);
        let loading = Loading {
            backend: &*self.backend,
            bytes: WeightBytes::new(&network, offloaded, &self.target(control.cancel)?),
            key,
            path: &self.path,
            model: &self.model,
            network: &network,
            ledger: &self.ledger,
            cancel: control.cancel,
        };
        let share = self.with_threads(|| loading.share())?;
        if share.pageable {
            warn_not_pinned(control, share.host_bytes());
        }
        self.coder_mut(direction).weights = Some(share);
        self.tell_idle();
        Ok(())
    }

    /// Weights that no stream needs.
    fn idle_weights(&self) -> impl Iterator<Item = &Arc<SharedWeights<B>>> {
        self.coders.iter().filter_map(|coder| coder.weights.as_ref()).filter(|share| share.is_idle())
    }

    fn drop_weights(&mut self) {
        self.coders.iter_mut().for_each(|coder| coder.weights = None);
    }

    fn tell_idle(&self) {
        let workspace = self.workspace.as_ref().map_or(0, |kept| kept.held.bytes());
        self.ledger.set_idle(workspace + self.idle_weights().map(|share| share.bytes()).sum::<u64>());
    }

    /// Runs a call. Returns what it met as far as that is known: a call on a host's stream may still be running.
    fn run_once(&mut self, call: &Call, control: &mut Control) -> Result<(Plan, NonFinite)> {
        let (place, direction) = (self.place, call.direction);
        let cone = Arc::new(check::call(&self.coder(direction).network, call, &[place])?);
        let job = Job { direction, input: call.input.shape(), cone };
        call.stream.map_or(Ok(()), |stream| self.backend.check_stream(stream))?;
        Watch::new(control, "plan", 0).advance(0)?;
        let plan = self.find_plan(&job, self.limit(), control.cancel)?;
        Watch::new(control, "load", 0).advance(0)?;
        let (plan, mut workspace) = self.make_ready(&job, plan, control)?;
        let stream = stream_for(call.stream, place, [Some(call.input), Some(call.output), call.logvar]);
        // An earlier call on the host's stream may have found them after it returned.
        let earlier = self.backend.take_nonfinite(&mut workspace.memory);
        nonfinite::report(earlier, OnNonFinite::Propagate, direction, control)?;
        let was_pageable = self.backend.is_pageable(&workspace.memory);
        let begun = self.backend.begin(&mut workspace.memory, stream);
        let result = begun.and_then(|()| self.drive(call, &plan, &mut workspace.memory, control));
        // The first call of `precision=auto` waits, to learn whether fp16 holds.
        let end = stream.filter(|_| !self.auto.waits(direction, &self.settings, self.backend.precision()));
        // Also after a failure: nothing may touch the host's tensors once the call has returned.
        let finished = workspace.finish(&*self.backend, end, &self.settings, place);
        // Large blocks are pinned while the job runs.
        if self.backend.is_pageable(&workspace.memory) && !was_pageable {
            warn_not_pinned(control, workspace.host.offloaded);
        }
        if finished.is_ok() {
            self.workspace = Some(workspace);
        }
        self.tell_idle();
        let seen = result.and(finished)?;
        if end.is_none() {
            self.auto.learn(direction, seen);
        }
        Ok((plan, seen))
    }

    fn computing(&self, direction: Direction) -> Result<Computing<B>> {
        let weights = self.coder(direction).weights.clone();
        Ok(Computing {
            backend: Arc::clone(&self.backend),
            weights: weights.ok_or_else(|| Error::Internal("weights were not loaded".into()))?,
            settings: self.settings.clone(),
            latents: Arc::clone(&self.latents),
            place: self.place,
            auto: self.auto,
            arithmetic: self.told_arithmetic(),
        })
    }

    fn drive(&self, call: &Call, plan: &Plan, memory: &mut B::Memory, control: &mut Control) -> Result<()> {
        let computing = self.computing(call.direction)?;
        let mut schedule = plan.schedule(&self.target(control.cancel)?);
        let cone = Arc::clone(&schedule.spec().cone);
        let end = cone.first_input + call.input.shape().frames;
        let total = u64::try_from(work(schedule.spec(), end)).unwrap_or(u64::MAX);
        let mut watch = Watch::new(control, call.direction.name(), total);
        let tensors = HostTensors {
            input: Some(call.input),
            input_first: cone.first_input,
            output: Some(call.output),
            logvar: call.logvar,
            output_first: cone.range.first,
            first_clip: call.first_clip,
        };
        let mut runner = Runner { with: &computing, memory, buffers: plan.buffers(), tensors };
        while schedule.prepare_next() == Next::Op {
            runner.run(&mut schedule, &mut || watch.stop())?;
            let work = schedule.front().map_or(0, |op| op_work(op, &self.coder(call.direction).network));
            schedule.done();
            watch.advance(work)?;
        }
        Ok(())
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

/// The latents that the settings ask for. Fails if the backend has no kernels for them.
pub(super) fn latent_maps<B: DeviceFacts>(
    settings: &Settings,
    model: &Model,
    path: &Path,
    open: impl FnOnce() -> Result<Checkpoint>,
) -> Result<Arc<LatentMaps>> {
    let maps = LatentMaps::new(settings, model, path, open)?;
    match maps.channels(Direction::Encode) {
        Some(_) if !B::MAPS_CHANNELS => Err(Error::Argument(
            "latents: this model's have a scale for each channel, which Vulkan has no kernel for; set latents to raw, or \
             use device \"cpu\" or CUDA"
                .into(),
        )),
        _ => Ok(Arc::new(maps)),
    }
}

/// Encoder and decoder in the form that the backend computes. Fails if it cannot.
pub(super) fn networks<B: DeviceFacts>(
    backend: &B,
    model: &Model,
    settings: &Settings,
    packing: u64,
) -> Result<[Arc<Network>; 2]> {
    let cache = settings.cache;
    if cache == CacheFormat::U8 && backend.sizes().u8_frame_bytes(FrameShape::new(1, 1, 8)).is_none() {
        return Err(Error::Argument("cache: u8 needs a GPU; set cache to exact on the CPU".into()));
    }
    let network = |direction: Direction| -> Result<Arc<Network>> {
        let mut network = Network::new(model, direction)?.for_device(backend.profile().paired_layers());
        if cache == CacheFormat::U8 && network.norm == Norm::Pixel {
            let why = "cache: u8 is for models with norms of groups; this one has norms of pixels: set cache to exact";
            return Err(Error::Argument(why.into()));
        }
        (network.geometry.packing, network.adds_alpha) = (packing, B::ADDS_ALPHA);
        Ok(Arc::new(match cache {
            CacheFormat::Exact => network,
            CacheFormat::U8 => network.with_u8_caches(),
        }))
    };
    let networks = [network(Direction::Encode)?, network(Direction::Decode)?];
    for network in &networks {
        let layouts: Vec<ConvLayout> = network.layers.iter().map(|layer| layer.layout).collect();
        backend.check_layers(&layouts, &network.attention_channels())?;
        let goes_around = network.layers.iter().any(|layer| layer.level.is_some());
        let missing = match network.geometry.patch {
            _ if goes_around && !B::POOLS => "shortcuts around levels",
            2.. if !B::PATCHES => "patches of pixels",
            _ => continue,
        };
        let text = format!("no kernel on the GPU does {missing}; use device \"cpu\" for this checkpoint");
        return Err(Error::Device(text));
    }
    Ok(networks)
}

impl<B: Backend> DeviceSession for Engine<B> {
    fn place(&self) -> TensorDevice {
        self.place
    }

    fn arithmetic(&self) -> String {
        format!("{} in {}", self.backend.arithmetic(), self.backend.precision().name())
    }

    fn plan_kind(&self) -> PlanKind {
        PlanKind {
            arithmetic: self.arithmetic(),
            profile: self.backend.profile(),
            settings: self.settings.clone(),
            tuned: self.settings.autotune.then_some(self.place),
            limits: NearLimits(PlanLimits { device: self.limit(), host: self.host_limit() }),
        }
    }

    fn geometry(&self) -> Geometry {
        self.coders[0].network.geometry
    }

    fn has_left_fp16(&self) -> bool {
        self.settings.precision.is_none() && self.auto.overflows
    }

    fn may_leave_fp16(&self) -> bool {
        self.auto.is_open(&self.settings, self.backend.precision())
    }

    fn leave_fp16(&mut self) -> Result<()> {
        let settings = Settings { precision: Some(Precision::Bf16), ..self.settings.clone() };
        let backend = Arc::new((self.make)(&settings)?);
        let networks = networks(&*backend, &self.model, &settings, self.latents.packing)?;
        self.auto.overflows = true;
        self.adopt(backend, networks);
        self.tuned = OnceCell::new();
        Ok(())
    }

    fn share(&mut self, with: Sharing) {
        self.sharing = with;
    }
}

impl<B: Backend> Session for Engine<B> {
    fn model(&self) -> &Arc<Model> {
        &self.model
    }

    fn devices(&self) -> Vec<TensorDevice> {
        vec![self.place]
    }

    fn settings(&self) -> &Settings {
        &self.settings
    }

    fn configure(&mut self, settings: Settings) -> Result<()> {
        check::limits(&settings, 1)?;
        let backend_of = |settings: &Settings| (settings.threads, settings.instructions, settings.precision);
        let changes_backend = backend_of(&settings) != backend_of(&self.settings);
        let reopen = || Checkpoint::reopen(&self.path, &self.file, &self.model);
        let latents = latent_maps::<B>(&settings, &self.model, &self.path, reopen)?;
        if changes_backend || settings.cache != self.settings.cache || latents.packing != self.latents.packing {
            let mut backend = Arc::clone(&self.backend);
            if changes_backend {
                backend = Arc::new((self.make)(&self.effective(&settings))?);
            }
            let networks = networks(&*backend, &self.model, &settings, latents.packing)?;
            if changes_backend {
                *self.notes.lock() = backend.notes();
            }
            self.adopt(backend, networks);
        }
        self.latents = latents;
        let tuning_of = |settings: &Settings| (settings.autotune, settings.autotune_path.clone());
        if changes_backend || tuning_of(&settings) != tuning_of(&self.settings) {
            self.tuned = OnceCell::new();
        }
        self.settings = settings;
        Ok(())
    }

    fn plan(&self, job: &JobShape, cancel: &AtomicBool) -> Result<PlanReport> {
        let job = Job::new(&self.coder(job.direction).network, job)?;
        Ok(self.report(&self.find_plan(&job, self.limit(), cancel)?))
    }

    fn timelines(&self, job: &JobShape, cancel: &AtomicBool) -> Result<Vec<serde_json::Value>> {
        let limits = PlanLimits { device: self.limit(), host: self.host_limit() };
        let job = Job::new(&self.coder(job.direction).network, job)?;
        let plan = self.find_plan(&job, limits.device, cancel)?;
        let target = self.target(cancel)?.with_cancel(cancel);
        let timeline = report::timeline(&plan, &self.report(&plan), &self.place.to_string(), limits, &target);
        check_cancel(cancel)?;
        Ok(vec![timeline])
    }

    fn run(&mut self, call: &Call, control: &mut Control) -> Result<PlanReport> {
        let (mut plan, mut seen) = self.run_once(call, control)?;
        if self.auto.is_overflow(&self.settings, self.backend.precision(), seen) {
            control.warn(format_args!(
                "{}: values overflow in fp16, so this call is repeated in bf16, and the handle stays with it; set \
                 precision to bf16 to begin with it",
                call.direction.name()
            ));
            self.leave_fp16()?;
            (plan, seen) = self.run_once(call, control)?;
        }
        nonfinite::report(seen, self.settings.on_nonfinite, call.direction, control)?;
        Ok(self.report(&plan))
    }

    fn open_stream(&mut self, start: StreamStart, control: &Control) -> Result<Box<dyn FrameStream>> {
        let StreamStart { direction, first, .. } = start;
        let (input, network) = (Shape { frames: 0, ..start.input }, &self.coder(direction).network);
        check::input_shape(network, input, true)?;
        let cone = Arc::new(check::first_frame(network, first)?);
        let job = Job { direction, input, cone };
        let plan = self.find_plan(&job, self.limit(), control.cancel)?;
        let (plan, workspace) = self.make_ready(&job, plan, control)?;
        let schedule = plan.schedule(&self.target(control.cancel)?);
        let stream = Streaming::new(self.computing(direction)?, workspace, plan, schedule, input);
        self.tell_idle();
        Ok(Box::new(stream))
    }

    fn ledger(&self) -> Arc<Ledger> {
        Arc::clone(&self.ledger)
    }

    fn trim(&mut self, what: Trim) {
        if what.workspace {
            self.workspace = None;
            self.backend.keep_host_bytes(0, 0);
        }
        if what.weights {
            self.drop_weights();
        }
        self.tell_idle();
    }
}

#[cfg(test)]
pub(super) mod tests;
