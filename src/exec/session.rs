//! A model on a device: the [`Session`] behind a handle.

mod costs;
mod ready;
mod restore;

use std::io::Read;
use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;

use self::costs::BackendCosts;
use self::ready::Asked;
use super::ledger::{Held, Ledger};
use super::runner::{Ends, Runner, Watch};
use super::settings::Settings;
use super::stream::Streaming;
use super::weights::{self, Key, Share};
use super::{Allocators, Control, Job, Session, Stream, Trim, check};
use crate::backend::{Backend, HostMemory, HostStream};
use crate::error::{Error, Result};
use crate::model::checkpoint::{FileIdentity, Fingerprint};
use crate::model::{Checkpoint, Config, Direction, Network};
use crate::plan::{Blueprint, Bytes, Plan, Wait, WeightBytes};
use crate::tensor::{ConvLayout, Place, Shape, View};

/// Makes the backend that some settings ask for.
pub type MakeBackend<B> = Box<dyn Fn(&Settings) -> Result<B> + Send>;

/// The device memory a call works in, kept for the next call.
pub struct Workspace<B: Backend> {
    pub memory: B::Memory,
    bytes: u64,
    /// The bytes, and what the device takes beside them to reach the host's memory.
    pub held: Held,
    host: HostMemory,
    _pinned: Held,
}

pub struct Engine<B: Backend> {
    device: String,
    place: Place,
    path: PathBuf,
    identity: FileIdentity,
    model: Arc<Fingerprint>,
    allocators: Allocators,
    make: MakeBackend<B>,
    backend: Arc<B>,
    settings: Settings,
    encoder: Side<B>,
    decoder: Side<B>,
    workspace: Option<Workspace<B>>,
    ledger: Arc<Ledger>,
    warnings: Vec<String>,
    /// The last plan, as hosts ask for it before they run it and a tight limit takes some looking.
    planned: Mutex<Option<(Asked, Blueprint)>>,
}

/// One direction of the model.
struct Side<B: Backend> {
    network: Arc<Network>,
    weights: Option<Share<B>>,
}

impl<B: Backend> Engine<B> {
    pub fn new(
        (device, place): (String, Place),
        path: PathBuf,
        checkpoint: &Checkpoint,
        allocators: Allocators,
        settings: Settings,
        make: MakeBackend<B>,
    ) -> Result<Engine<B>> {
        let side = |direction| Side { network: Arc::new(Network::new(checkpoint.config(), direction)), weights: None };
        let backend = Arc::new(make(&settings)?);
        let (encoder, decoder) = (side(Direction::Encode), side(Direction::Decode));
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
            warnings: Vec::new(),
            planned: Mutex::new(None),
        })
    }

    fn side(&self, direction: Direction) -> &Side<B> {
        match direction {
            Direction::Encode => &self.encoder,
            Direction::Decode => &self.decoder,
        }
    }

    fn side_mut(&mut self, direction: Direction) -> &mut Side<B> {
        match direction {
            Direction::Encode => &mut self.encoder,
            Direction::Decode => &mut self.decoder,
        }
    }

    fn costs(&self) -> BackendCosts<'_, B> {
        BackendCosts { backend: &self.backend, groups: self.encoder.network.config.groups }
    }

    /// `away`: of each layer, whether its weights are to wait in host memory.
    fn load_weights(&mut self, direction: Direction, away: &[bool], control: &Control) -> Result<()> {
        match &self.side(direction).weights {
            Some(share) if share.away() == away => return Ok(()),
            _ => self.side_mut(direction).weights = None,
        }
        self.tell_idle();
        let key = Key {
            file: self.identity.clone(),
            device: self.device.clone(),
            precision: self.backend.precision(),
            direction,
            away: away.to_vec(),
            allocators: self.allocators.clone(),
        };
        let network = Arc::clone(&self.side(direction).network);
        let what = (&*network, WeightBytes::new(&network, away, &self.costs()));
        let share = weights::share(&*self.backend, &key, &self.path, what, &self.ledger, control.cancel)?;
        if share.pageable {
            self.warnings.push(not_pinned(share.host_bytes()));
        }
        self.side_mut(direction).weights = Some(share);
        self.tell_idle();
        Ok(())
    }

    /// Weights that no stream needs.
    fn idle_weights(&self) -> impl Iterator<Item = &Share<B>> {
        [&self.encoder, &self.decoder]
            .into_iter()
            .filter_map(|side| side.weights.as_ref())
            .filter(|share| share.is_idle())
    }

    fn tell_idle(&self) {
        let workspace = self.workspace.as_ref().map_or(0, |kept| kept.held.bytes());
        self.ledger.set_idle(workspace + self.idle_weights().map(Share::bytes).sum::<u64>());
    }

    fn drive(&self, job: &Job, blueprint: &Blueprint, memory: &mut B::Memory, control: &mut Control) -> Result<()> {
        let side = self.side(job.direction);
        let weights = side.weights.as_ref().ok_or_else(|| Error::Internal("weights were not loaded".into()))?;
        let mut schedule = blueprint.job(&self.costs());
        let total = schedule.layout().work(job.input.shape().frames);
        let mut watch = Watch::new(control, stage_name(job.direction), total);
        let ends = Ends { input: Some(job.input), output: Some(job.output), logvar: job.logvar, ..Ends::default() };
        let mut runner = Runner {
            backend: &*self.backend,
            weights,
            memory,
            scratch: blueprint.scratch_offset(),
            bands: blueprint.bands(),
            staging: blueprint.staging(),
            settings: &self.settings,
            ends,
        };
        while schedule.wait() == Wait::No {
            runner.run(&mut schedule, &mut || watch.stop())?;
            let work = schedule.front().map_or(0, |step| step.work(&side.network));
            schedule.done();
            watch.advance(work)?;
        }
        Ok(())
    }
}

/// What a host is told where the system allows no more pinned memory.
fn not_pinned(bytes: u64) -> String {
    format!(
        "{} of host memory could not be pinned, so this takes longer than planned; lower host_memory_limit or raise the \
         system's limit of locked memory",
        Bytes(bytes)
    )
}

/// Whether a backend can run a network: better said now than in the middle of a run.
fn check_network<B: Backend>(backend: &B, network: &Network) -> Result<()> {
    let layouts: Vec<ConvLayout> = network.layers.iter().map(|layer| layer.layout).collect();
    backend.check_layers(&layouts, &network.attention_channels())
}

pub fn allocate<B: Backend>(backend: &B, ledger: &Arc<Ledger>, blueprint: &Blueprint) -> Result<Workspace<B>> {
    let host = blueprint.pinned();
    let memory = backend.allocate(blueprint.workspace_bytes(), host)?;
    let held = ledger.hold(blueprint.workspace_bytes() + blueprint.mapping_bytes());
    Ok(Workspace { memory, bytes: blueprint.workspace_bytes(), held, host, _pinned: ledger.hold_pinned(host.bytes()) })
}

/// The host's stream, if the work can be left to it: where all tensors are on the device. The rest is done when we return.
pub fn stream_for<const N: usize>(
    stream: Option<HostStream>,
    place: Place,
    tensors: [Option<&View>; N],
) -> Option<HostStream> {
    let on_device = |view: &View| view.place() == place && place != Place::Cpu;
    stream.filter(|_| tensors.into_iter().flatten().all(on_device))
}

pub fn stage_name(direction: Direction) -> &'static str {
    match direction {
        Direction::Encode => "encode",
        Direction::Decode => "decode",
    }
}

impl<B: Backend> Session for Engine<B> {
    fn config(&self) -> &Config {
        &self.encoder.network.config
    }

    fn settings(&self) -> &Settings {
        &self.settings
    }

    fn configure(&mut self, settings: Settings) -> Result<()> {
        let backend_of = |settings: &Settings| (settings.threads, settings.instructions, settings.precision);
        if backend_of(&settings) != backend_of(&self.settings) {
            let backend = Arc::new((self.make)(&settings)?);
            check_network(&*backend, &self.encoder.network)?;
            check_network(&*backend, &self.decoder.network)?;
            // What the last call left under way, it left to the old backend.
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

    fn plan(&self, direction: Direction, input: Shape) -> Result<Plan> {
        check::input_shape(self.config(), direction, input, true)?;
        Ok(self.blueprint(direction, input, self.limit())?.report())
    }

    fn run(&mut self, job: &Job, control: &mut Control) -> Result<()> {
        let (config, place, direction) = (self.config(), self.place, job.direction);
        let shape = job.input.shape();
        check::input(config, direction, job.input, place)?;
        check::output(config, direction, shape, job.output, place, true)?;
        if let Some(logvar) = job.logvar {
            check::logvar(config, direction, shape, logvar, place, job.output)?;
        }
        Watch::new(control, "load", 0).advance(0)?;
        let (blueprint, mut workspace) = self.make_ready(direction, shape, control)?;
        let stream = stream_for(job.stream, place, [Some(job.input), Some(job.output), job.logvar]);
        let begun = self.backend.begin(&mut workspace.memory, stream);
        let result = begun.and_then(|()| self.drive(job, &blueprint, &mut workspace.memory, control));
        // Also after a failure: nothing may touch the host's tensors once the call has returned.
        let finished = self.backend.finish(&mut workspace.memory, stream);
        if finished.is_ok() {
            self.workspace = Some(workspace);
        }
        self.tell_idle();
        result.and(finished)
    }

    fn open_stream(&mut self, direction: Direction, input: Shape, control: &Control) -> Result<Box<dyn Stream>> {
        let input = Shape { frames: 0, ..input };
        check::input_shape(self.config(), direction, input, true)?;
        let (blueprint, workspace) = self.make_ready(direction, input, control)?;
        let side = self.side(direction);
        let weights = side.weights.clone().ok_or_else(|| Error::Internal("weights were not loaded".into()))?;
        self.tell_idle();
        let job = blueprint.job(&self.costs());
        Ok(Box::new(Streaming::new(
            Arc::clone(&self.backend),
            weights,
            workspace,
            (blueprint.scratch_offset(), blueprint.bands(), blueprint.staging()),
            job,
            self.settings.clone(),
            (self.place, input),
            Arc::clone(&self.model),
        )))
    }

    fn restore_stream(
        &mut self,
        state: &mut dyn Read,
        bytes: u64,
        control: &Control,
    ) -> Result<(Direction, Box<dyn Stream>)> {
        self.restore(state, bytes, control)
    }

    fn ledger(&self) -> Arc<Ledger> {
        Arc::clone(&self.ledger)
    }

    fn take_warnings(&mut self) -> Vec<String> {
        std::mem::take(&mut self.warnings)
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
