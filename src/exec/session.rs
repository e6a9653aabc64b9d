//! A model on a device: the [`Session`] behind a handle.

mod ready;
mod restore;

use std::io::Read;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use self::ready::{Asked, Job};
use super::ledger::{Ledger, Sharing};
use super::runner::{HostTensors, Runner, Watch};
use super::settings::{OnNonFinite, Settings};
use super::stream::Streaming;
use super::trace::{self, traced};
use super::weights::{self, SharedWeights, WeightsKey};
use super::workspace::{Workspace, stream_for};
use super::{Allocators, Call, ClipRange, Control, DeviceSession, FrameStream, Session, Trim, check, nonfinite};
use crate::backend::Backend;
use crate::error::{Error, Result};
use crate::ir::{ConvLayout, Shape, TensorDevice};
use crate::model::checkpoint::{FileIdentity, Fingerprint};
use crate::model::{Checkpoint, Cone, Config, Direction, FrameRange, Network};
use crate::plan::{Bytes, Next, Plan, PlanReport, Schedule, Target, WeightBytes, op_work, work};

/// Makes the backend that some settings ask for.
pub type MakeBackend<B> = Box<dyn Fn(&Settings) -> Result<B> + Send>;

pub struct Engine<B: Backend> {
    device: String,
    place: TensorDevice,
    path: PathBuf,
    identity: FileIdentity,
    model: Arc<Fingerprint>,
    allocators: Allocators,
    make: MakeBackend<B>,
    backend: Arc<B>,
    settings: Settings,
    encoder: Coder<B>,
    decoder: Coder<B>,
    workspace: Option<Workspace<B>>,
    ledger: Arc<Ledger>,
    sharing: Sharing,
    /// The last plan: hosts ask for it before they run it, and a tight limit takes long to search.
    planned: Mutex<Option<(Asked, Plan)>>,
}

/// The encoder or the decoder.
struct Coder<B: Backend> {
    network: Arc<Network>,
    weights: Option<SharedWeights<B>>,
}

impl<B: Backend> Engine<B> {
    pub fn new(
        (device, place): (String, TensorDevice),
        path: PathBuf,
        checkpoint: &Checkpoint,
        allocators: Allocators,
        settings: Settings,
        make: MakeBackend<B>,
    ) -> Result<Engine<B>> {
        let coder =
            |direction| Coder { network: Arc::new(Network::new(checkpoint.config(), direction)), weights: None };
        let backend = Arc::new(make(&settings)?);
        let (encoder, decoder) = (coder(Direction::Encode), coder(Direction::Decode));
        check_network(&*backend, &encoder.network)?;
        check_network(&*backend, &decoder.network)?;
        Ok(Engine {
            device,
            place,
            model: Arc::new(Fingerprint::new(path.clone(), checkpoint.identity().clone())),
            path,
            identity: checkpoint.identity().clone(),
            allocators,
            backend,
            make,
            settings,
            encoder,
            decoder,
            workspace: None,
            ledger: Arc::new(Ledger::new(B::HOST_MEMORY)),
            sharing: Sharing::default(),
            planned: Mutex::new(None),
        })
    }

    fn coder(&self, direction: Direction) -> &Coder<B> {
        match direction {
            Direction::Encode => &self.encoder,
            Direction::Decode => &self.decoder,
        }
    }

    fn coder_mut(&mut self, direction: Direction) -> &mut Coder<B> {
        match direction {
            Direction::Encode => &mut self.encoder,
            Direction::Decode => &mut self.decoder,
        }
    }

    /// The whole of a clip of this shape, or a range of it with the input that the range needs.
    fn job(&self, direction: Direction, clip: Shape, range: Option<ClipRange>) -> Result<Job> {
        let network = &self.coder(direction).network;
        let Some(range) = range else {
            return Ok(Job { direction, input: clip, cone: Arc::new(Cone::new(network, FrameRange::WHOLE)) });
        };
        let cone = check::range(network, range)?;
        let inputs = cone.inputs(range.clip_frames);
        let input = Shape { frames: inputs.end - inputs.start, ..clip };
        Ok(Job { direction, input, cone: Arc::new(cone) })
    }

    /// The device, as the planner sees it.
    fn target(&self) -> Target<'_> {
        let (mut profile, groups) = (self.backend.profile(), self.encoder.network.config.groups);
        profile.rates = self.settings.rates.or(profile.rates);
        Target::new(profile, self.backend.sizes(), groups)
    }

    /// `offloaded`: per layer, whether its weights stay in host memory.
    fn load_weights(&mut self, direction: Direction, offloaded: &[bool], control: &Control) -> Result<()> {
        match &self.coder(direction).weights {
            Some(share) if share.offloaded() == offloaded => return Ok(()),
            _ => self.coder_mut(direction).weights = None,
        }
        self.tell_idle();
        let key = WeightsKey {
            file: self.identity.clone(),
            device: self.device.clone(),
            precision: self.backend.precision(),
            direction,
            offloaded: offloaded.to_vec(),
            allocators: self.allocators.clone(),
        };
        let network = Arc::clone(&self.coder(direction).network);
        let what = (&*network, WeightBytes::new(&network, offloaded, &self.target()));
        let share = weights::share(&*self.backend, &key, &self.path, what, &self.ledger, control.cancel)?;
        if share.pageable {
            warn_not_pinned(control, share.host_bytes());
        }
        self.coder_mut(direction).weights = Some(share);
        self.tell_idle();
        Ok(())
    }

    /// Weights that no stream needs.
    fn idle_weights(&self) -> impl Iterator<Item = &SharedWeights<B>> {
        [&self.encoder, &self.decoder]
            .into_iter()
            .filter_map(|coder| coder.weights.as_ref())
            .filter(|share| share.is_idle())
    }

    fn tell_idle(&self) {
        let workspace = self.workspace.as_ref().map_or(0, |kept| kept.held.bytes());
        self.ledger.set_idle(workspace + self.idle_weights().map(SharedWeights::bytes).sum::<u64>());
    }

    fn drive(&self, call: &Call, plan: &Plan, memory: &mut B::Memory, control: &mut Control) -> Result<()> {
        let coder = self.coder(call.direction);
        let weights = coder.weights.as_ref().ok_or_else(|| Error::Internal("weights were not loaded".into()))?;
        let mut schedule = plan.schedule(&self.target());
        let cone = Arc::clone(&schedule.spec().cone);
        let end = cone.first_input() + call.input.shape().frames;
        let total = u64::try_from(work(schedule.spec(), end)).unwrap_or(u64::MAX);
        let mut watch = Watch::new(control, call.direction.name(), total);
        let tensors = HostTensors {
            input: Some(call.input),
            input_first: cone.first_input(),
            output: Some(call.output),
            logvar: call.logvar,
            output_first: cone.range().first,
            first_clip: call.first_clip,
        };
        let mut runner = Runner {
            backend: &*self.backend,
            weights,
            memory,
            buffers: plan.buffers(),
            settings: &self.settings,
            tensors,
            place: self.place,
        };
        if self.settings.on_nonfinite == OnNonFinite::Fail && call.input.device() != TensorDevice::Cpu {
            schedule.prepare_next();
            if let Some((clip, frame)) = runner.first_nonfinite(&mut schedule, &mut || watch.stop())? {
                return Err(nonfinite::refused(
                    call.input,
                    call.direction,
                    call.first_clip + clip,
                    cone.first_input() + frame,
                ));
            }
        }
        while schedule.prepare_next() == Next::Op {
            runner.run(&mut schedule, &mut || watch.stop())?;
            let work = schedule.front().map_or(0, |op| op_work(op, &coder.network));
            schedule.done();
            watch.advance(work)?;
        }
        Ok(())
    }

    /// A stream that continues `schedule`, with the weights that are loaded.
    fn streaming(
        &self,
        plan: Plan,
        schedule: Schedule,
        workspace: Workspace<B>,
        settings: Settings,
        input: Shape,
    ) -> Result<Box<dyn FrameStream>> {
        let weights = self.coder(schedule.spec().network.direction).weights.clone();
        let weights = weights.ok_or_else(|| Error::Internal("weights were not loaded".into()))?;
        let (backend, model) = (Arc::clone(&self.backend), Arc::clone(&self.model));
        let stream =
            Streaming::new(backend, weights, workspace, (plan, schedule), settings, (self.place, input), model);
        self.tell_idle();
        Ok(Box::new(stream))
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

/// Whether a backend can run a network. Checked early, so that no run fails half-way.
fn check_network<B: Backend>(backend: &B, network: &Network) -> Result<()> {
    let layouts: Vec<ConvLayout> = network.layers.iter().map(|layer| layer.layout).collect();
    backend.check_layers(&layouts, &network.attention_channels())
}

impl<B: Backend> DeviceSession for Engine<B> {
    fn device(&self) -> &str {
        &self.device
    }

    fn place(&self) -> TensorDevice {
        self.place
    }

    fn arithmetic(&self) -> String {
        format!("{} in {}", self.backend.arithmetic(), self.backend.precision().name())
    }

    fn share(&mut self, with: Sharing) {
        self.sharing = with;
    }
}

impl<B: Backend> Session for Engine<B> {
    fn config(&self) -> &Config {
        &self.encoder.network.config
    }

    fn devices(&self) -> Vec<String> {
        vec![self.device.clone()]
    }

    fn settings(&self) -> &Settings {
        &self.settings
    }

    fn configure(&mut self, settings: Settings) -> Result<()> {
        check::limits(&settings, 1)?;
        let backend_of = |settings: &Settings| (settings.threads, settings.instructions, settings.precision);
        if backend_of(&settings) != backend_of(&self.settings) {
            let backend = Arc::new((self.make)(&settings)?);
            check_network(&*backend, &self.encoder.network)?;
            check_network(&*backend, &self.decoder.network)?;
            // Work of the last call may still run there, on the old backend.
            self.workspace = None;
            if backend.precision() != self.backend.precision() {
                self.encoder.weights = None;
                self.decoder.weights = None;
            }
            self.backend = backend;
            self.tell_idle();
        }
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
        check::input_shape(self.config(), direction, input, range.is_none())?;
        Ok(self.find_plan(&self.job(direction, input, range)?, self.limit(), cancel)?.report())
    }

    fn timelines(
        &self,
        direction: Direction,
        input: Shape,
        range: Option<ClipRange>,
        cancel: &AtomicBool,
    ) -> Result<Vec<serde_json::Value>> {
        check::input_shape(self.config(), direction, input, range.is_none())?;
        let limits = (self.limit(), self.host_limit());
        let plan = self.find_plan(&self.job(direction, input, range)?, limits.0, cancel)?;
        let timeline = plan.timeline(limits, &self.target().with_cancel(cancel));
        if cancel.load(Ordering::Relaxed) { Err(Error::Cancelled) } else { Ok(vec![timeline.json(&self.device)]) }
    }

    fn run(&mut self, call: &Call, control: &mut Control) -> Result<PlanReport> {
        let (place, direction) = (self.place, call.direction);
        let cone = Arc::new(check::call(&self.coder(direction).network, call, &[place])?);
        let job = Job { direction, input: call.input.shape(), cone };
        call.stream.map_or(Ok(()), |stream| self.backend.check_stream(stream))?;
        let policy = self.settings.on_nonfinite;
        if policy == OnNonFinite::Fail && call.input.device() == TensorDevice::Cpu {
            nonfinite::refuse(call.input, direction, job.cone.first_input(), control.cancel)?;
        }
        Watch::new(control, "plan", 0).advance(0)?;
        let plan = self.find_plan(&job, self.limit(), control.cancel)?;
        Watch::new(control, "load", 0).advance(0)?;
        let (plan, mut workspace) = self.make_ready(&job, plan, control)?;
        let stream = stream_for(call.stream, place, [Some(call.input), Some(call.output), call.logvar]);
        // An earlier call on the host's stream may have found them after it returned.
        let earlier = self.backend.take_nonfinite(&mut workspace.memory);
        nonfinite::report(earlier, OnNonFinite::Propagate, direction, control)?;
        let begun = self.backend.begin(&mut workspace.memory, stream);
        let result = begun.and_then(|()| self.drive(call, &plan, &mut workspace.memory, control));
        // Also after a failure: nothing may touch the host's tensors once the call has returned.
        let finished = nonfinite::finish(&*self.backend, &mut workspace.memory, stream, policy);
        let by = traced(&*self.backend, place);
        let finished = finished.and_then(|seen| {
            trace::collect(self.settings.trace.as_ref(), &*self.backend, &mut workspace.memory, by, true).map(|()| seen)
        });
        if finished.is_ok() {
            self.workspace = Some(workspace);
        }
        self.tell_idle();
        nonfinite::report(result.and(finished)?, policy, direction, control)?;
        Ok(plan.report())
    }

    fn open_stream(
        &mut self,
        direction: Direction,
        input: Shape,
        first: u64,
        control: &Control,
    ) -> Result<Box<dyn FrameStream>> {
        let input = Shape { frames: 0, ..input };
        check::input_shape(self.config(), direction, input, true)?;
        let cone = Arc::new(check::first_frame(&self.coder(direction).network, first)?);
        let job = Job { direction, input, cone };
        let plan = self.find_plan(&job, self.limit(), control.cancel)?;
        let (plan, workspace) = self.make_ready(&job, plan, control)?;
        let schedule = plan.schedule(&self.target());
        self.streaming(plan, schedule, workspace, self.settings.clone(), input)
    }

    fn restore_stream(
        &mut self,
        state: &mut dyn Read,
        bytes: u64,
        control: &Control,
    ) -> Result<(Direction, Box<dyn FrameStream>)> {
        self.restore(state, bytes, control)
    }

    fn ledger(&self) -> Arc<Ledger> {
        Arc::clone(&self.ledger)
    }

    fn trim(&mut self, what: Trim) {
        if what.workspace {
            self.workspace = None;
        }
        if what.weights {
            self.encoder.weights = None;
            self.decoder.weights = None;
        }
        self.tell_idle();
    }
}
