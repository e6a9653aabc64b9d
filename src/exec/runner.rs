//! Runs the operations of a schedule: resolves slots to offsets and hands each operation to the backend.
//!
//! Owns the mapping between host tensors and activations. Knows no plan search and no kernel.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::precision::AutoPrecision;
use super::settings::{Latent, PixelRange, Settings};
use super::trace::{self, traced};
use super::weights::SharedWeights;
use super::{Control, Progress};
use crate::backend::{Backend, RunArgs, Stop};
use crate::error::{Error, Result};
use crate::ir::{
    Affine, BlendOp, BlendTile, Buffers, ChannelMaps, DType, Fades, LoadOp, LoadTensor, Offsets, Op, Posterior,
    StoreOp, StoreTensor, TensorDevice, View,
};
use crate::model::Direction;
use crate::model::families::LatentMaps;
use crate::plan::{Schedule, ScheduleSpec};
use crate::reserve;

/// The authors' implementation clamps the log-variance to this range.
const LOGVAR_RANGE: (f32, f32) = (-30.0, 20.0);

/// Host tensors of a call. Frame 0 of a tensor is frame `*_first` of the clip, clip 0 is `first_clip` of the batch.
#[derive(Clone, Copy, Default)]
pub struct HostTensors<'a> {
    pub input: Option<&'a View>,
    pub input_first: u64,
    pub output: Option<&'a View>,
    pub logvar: Option<&'a View>,
    pub output_first: u64,
    pub first_clip: u64,
}

/// A run that does not keep to its plan, with all that the plan was made from.
fn unplanned(why: &Error, spec: &ScheduleSpec) -> Error {
    let (node, batch, input, range) = (spec.network.direction.name(), spec.batch, spec.input, spec.cone.range);
    let (policy, tiles) = (&spec.policy, spec.grid.as_ref().map(|grid| grid.size));
    let plan = format!("{policy:?}, {tiles:?}");
    Error::Internal(format!("{why}; please report this: {node} of {batch} x {input:?}, {range:?}, {plan}"))
}

/// What a call or a stream computes with, from its session.
pub struct Computing<B: Backend> {
    pub backend: Arc<B>,
    pub weights: Arc<SharedWeights<B>>,
    pub settings: Settings,
    pub latents: Arc<LatentMaps>,
    pub place: TensorDevice,
    pub auto: AutoPrecision,
    /// For the plan.
    pub arithmetic: String,
}

/// Everything that operations are run with.
pub struct Runner<'a, B: Backend> {
    pub with: &'a Computing<B>,
    pub memory: &'a mut B::Memory,
    pub buffers: Buffers,
    pub tensors: HostTensors<'a>,
}

impl<B: Backend> Runner<'_, B> {
    /// Runs the operation in front of the schedule's queue.
    pub fn run(&mut self, schedule: &mut Schedule, stop: &mut Stop) -> Result<()> {
        let Some(op) = schedule.front() else { return Ok(()) };
        let spec = schedule.spec();
        let op = op.relocate(&mut schedule.arenas()).map_err(|why| unplanned(&why, spec))?;
        let Some(trace) = &self.with.settings.trace else { return self.operate(spec, &op, stop) };
        let Some(running) = trace.begin(&op, &spec.network) else { return self.operate(spec, &op, stop) };
        let tells_times = self.with.backend.trace(self.memory, Some(running.number))?;
        let result = self.operate(spec, &op, stop);
        if !tells_times {
            trace.end(&running, traced(&*self.with.backend, self.with.place));
        } else if trace.wait_for(running) {
            trace::collect(Some(trace), &*self.with.backend, self.memory, self.with.place, false)?;
        }
        result
    }

    fn operate(&mut self, spec: &ScheduleSpec, op: &Op<Offsets>, stop: &mut Stop) -> Result<()> {
        match op {
            Op::Load(load) => self.load(spec, load, stop),
            Op::Blend(blend) => self.blend(spec, blend),
            Op::Store(store) => self.store(spec, store),
            _ => {
                let args = RunArgs { weights: &self.with.weights.convs, buffers: self.buffers };
                self.with.backend.run(self.memory, op, &args, stop)
            }
        }
    }

    fn load(&mut self, spec: &ScheduleSpec, op: &LoadOp<Offsets>, stop: &mut Stop) -> Result<()> {
        let from = self.tensors.input.ok_or_else(|| Error::Internal("a load without an input tensor".into()))?;
        let region = spec.regions(spec.tile_of(op.item)).0;
        let load = LoadTensor {
            from,
            batch: op.batch,
            frame: op.frame - self.tensors.input_first,
            top: region.top,
            left: region.left,
            map: self.input_map(spec.network.direction, from.dtype()),
            channels: self
                .with
                .latents
                .channels(Direction::Decode)
                .filter(|_| spec.network.direction == Direction::Decode),
            patch: match spec.network.direction {
                Direction::Encode => spec.network.geometry.patch,
                Direction::Decode => 1,
            },
            shape: region.shape,
            into: op.into,
        };
        self.with.backend.load(self.memory, &load, &self.buffers, stop)
    }

    /// Never stopped: a blend adds to its output, so it must not run twice.
    fn blend(&mut self, spec: &ScheduleSpec, op: &BlendOp<Offsets>) -> Result<()> {
        let (Some(grid), Some(tile)) = (&spec.grid, spec.tile_of(op.item)) else {
            return Err(Error::Internal("a blend without tiles".into()));
        };
        let (row, column) = grid.position(tile);
        let region = spec.regions(Some(tile)).1;
        let blend = BlendTile {
            from: op.from,
            from_shape: region.shape,
            into: op.into,
            into_shape: spec.network.output_shape(spec.input),
            top: region.top,
            left: region.left,
            fades: Fades { rows: &grid.rows.fades[row], columns: &grid.columns.fades[column] },
            clear: op.clear,
        };
        self.with.backend.blend(self.memory, &blend, &self.buffers)
    }

    /// Never stopped: the host must not get a frame twice.
    fn store(&mut self, spec: &ScheduleSpec, op: &StoreOp<Offsets>) -> Result<()> {
        let into = self.tensors.output.ok_or_else(|| Error::Internal("a store without an output tensor".into()))?;
        let frame = op.frame - self.tensors.output_first;
        if frame >= into.shape().frames {
            // Padding of the encoder's input comes out as frames that the host does not want.
            return Ok(());
        }
        let (network, settings) = (&spec.network, &self.with.settings);
        let latent = network.geometry.latent_channels;
        let weights = spec.grid.as_deref();
        let plain = StoreTensor {
            from: op.from,
            shape: network.output_shape(spec.input),
            channel: 0,
            divide: weights.map(|grid| Fades { rows: &grid.rows.weight, columns: &grid.columns.weight }),
            clamp: None,
            sample: None,
            map: Affine { mul: 1.0, add: 0.0 },
            channels: None,
            patch: 1,
            into,
            batch: op.batch,
            frame,
            clip: self.tensors.first_clip + op.batch,
            clip_frame: op.frame,
        };
        match network.direction {
            Direction::Decode => {
                let map = output_pixels(into.dtype(), settings.pixel_range);
                self.with.backend.store(
                    self.memory,
                    &StoreTensor { map, patch: network.geometry.patch, ..plain },
                    &self.buffers,
                )
            }
            Direction::Encode => {
                let sample = (settings.posterior == Latent::Sample)
                    .then_some(Posterior { seed: settings.seed, logvar_channel: latent });
                let (map, channels) =
                    (self.with.latents.map(Direction::Encode), self.with.latents.channels(Direction::Encode));
                self.with.backend.store(self.memory, &StoreTensor { map, channels, sample, ..plain }, &self.buffers)?;
                let Some(into) = self.tensors.logvar else { return Ok(()) };
                let same = channels.map_or(Vec::new(), |channels| vec![plain.map; channels.maps.len()]);
                let channels = channels.map(|channels| ChannelMaps { maps: &same, ..channels });
                let logvar = StoreTensor { channel: latent, clamp: Some(LOGVAR_RANGE), into, channels, ..plain };
                self.with.backend.store(self.memory, &logvar, &self.buffers)
            }
        }
    }

    fn input_map(&self, direction: Direction, dtype: DType) -> Affine {
        match direction {
            Direction::Encode => input_pixels(dtype, self.with.settings.pixel_range),
            Direction::Decode => self.with.latents.map(direction),
        }
    }
}

/// From the host's pixels to the model's -1..1.
fn input_pixels(dtype: DType, range: PixelRange) -> Affine {
    match (dtype.full_scale(), range) {
        (Some(full), _) => Affine { mul: 2.0 / full, add: -1.0 },
        (None, PixelRange::Unit) => Affine { mul: 2.0, add: -1.0 },
        (None, PixelRange::Signed) => Affine { mul: 1.0, add: 0.0 },
    }
}

/// From the model's -1..1 to the host's pixels.
fn output_pixels(dtype: DType, range: PixelRange) -> Affine {
    match (dtype.full_scale(), range) {
        (Some(full), _) => Affine { mul: full / 2.0, add: full / 2.0 },
        (None, PixelRange::Unit) => Affine { mul: 0.5, add: 0.5 },
        (None, PixelRange::Signed) => Affine { mul: 1.0, add: 0.0 },
    }
}

/// Reports progress of a call to the host, and asks whether to stop.
pub struct Watch<'a, 'c> {
    control: &'a mut Control<'c>,
    progress: Progress,
    told: Instant,
}

impl<'a, 'c> Watch<'a, 'c> {
    /// How often the host is called during one operation.
    const PULSE: Duration = Duration::from_millis(100);

    pub fn new(control: &'a mut Control<'c>, stage: &'static str, total: u64) -> Watch<'a, 'c> {
        Watch { control, progress: Progress { done: 0, total, stage }, told: Instant::now() }
    }

    /// Whether the host wants to stop. Cheap enough to be asked all the time.
    pub fn stop(&mut self) -> bool {
        self.cancelled() || (self.told.elapsed() >= Self::PULSE && self.tell())
    }

    /// Work was done; tells the host.
    pub fn advance(&mut self, work: u64) -> Result<()> {
        self.progress.done = self.progress.done.saturating_add(work);
        reserve::check()?;
        if self.cancelled() || self.tell() { Err(Error::Cancelled) } else { Ok(()) }
    }

    fn cancelled(&self) -> bool {
        self.control.cancel.load(Ordering::Relaxed)
    }

    fn tell(&mut self) -> bool {
        self.told = Instant::now();
        let progress = self.progress;
        let stop = self.control.progress.as_mut().is_some_and(|told| told(progress));
        if stop {
            // Other threads of this call read the flag too.
            self.control.cancel.store(true, Ordering::Relaxed);
        }
        stop
    }
}
