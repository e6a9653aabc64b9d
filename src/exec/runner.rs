//! Runs the operations of a schedule: resolves slots to offsets and hands each operation to the backend.
//!
//! Owns the mapping between host tensors and activations. Knows no plan search and no kernel.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::settings::{Latent, PixelRange, Settings};
use super::trace::traced;
use super::{Control, Progress};
use crate::backend::{Backend, DeviceSpan, RunArgs, Stop};
use crate::error::{Error, Result};
use crate::ir::{
    Affine, BlendOp, BlendTile, Buffers, ChannelMaps, DType, Fades, LoadOp, LoadTensor, Offsets, Op, Posterior,
    StoreOp, StoreTensor, TensorDevice, View,
};
use crate::model::families::LatentMaps;
use crate::model::{Direction, Network};
use crate::plan::{Schedule, ScheduleSpec};
use crate::reserve;

/// The authors' implementation clamps the log-variance to this range.
const LOGVAR_RANGE: (f32, f32) = (-30.0, 20.0);

const UNCHANGED: Affine = Affine { mul: 1.0, add: 0.0 };

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

/// Everything that operations are run with.
pub struct Runner<'a, B: Backend> {
    pub backend: &'a B,
    pub place: TensorDevice,
    pub settings: &'a Settings,
    pub latents: &'a LatentMaps,
    /// By layer.
    pub weights: &'a [B::Conv],
    pub memory: &'a mut B::Memory,
    pub buffers: Buffers,
    pub tensors: HostTensors<'a>,
}

/// What values go through between a host's tensor and activations.
struct Conversion<'a> {
    map: Affine,
    channels: Option<ChannelMaps<'a>>,
    patch: u64,
}

impl<'a, B: Backend> Runner<'a, B> {
    /// Runs the operation in front of the schedule's queue, and takes it from there.
    pub fn run(&mut self, schedule: &mut Schedule, stop: &mut Stop) -> Result<()> {
        let Some(op) = schedule.front() else { return Ok(()) };
        let spec = schedule.spec();
        let op = op.relocate(&mut schedule.arenas()).map_err(|why| unplanned(&why, spec))?;
        self.run_traced(spec, &op, stop)?;
        schedule.done();
        Ok(())
    }

    fn run_traced(&mut self, spec: &ScheduleSpec, op: &Op<Offsets>, stop: &mut Stop) -> Result<()> {
        let Some(trace) = &self.settings.trace else { return self.operate(spec, op, stop) };
        let by = traced(self.backend, self.place);
        let Some(number) = trace.begin(op, &spec.network, by) else { return self.operate(spec, op, stop) };
        let start = Instant::now();
        let tells_times = self.backend.trace(self.memory, Some(number))?;
        let result = self.operate(spec, op, stop);
        if !tells_times {
            trace.write(&[DeviceSpan { op: number, lane: "operations", start, end: Instant::now() }], by);
        } else if trace.is_full(by) {
            trace.write(&self.backend.take_spans(self.memory)?, by);
        }
        result
    }

    fn operate(&mut self, spec: &ScheduleSpec, op: &Op<Offsets>, stop: &mut Stop) -> Result<()> {
        match op {
            Op::Load(load) => self.load(spec, load, stop),
            Op::Blend(blend) => self.blend(spec, blend),
            Op::Store(store) => self.store(spec, store),
            _ => {
                let args = RunArgs { weights: self.weights, buffers: self.buffers };
                self.backend.run(self.memory, op, &args, stop)
            }
        }
    }

    fn load(&mut self, spec: &ScheduleSpec, op: &LoadOp<Offsets>, stop: &mut Stop) -> Result<()> {
        let from = self.tensors.input.ok_or_else(|| Error::Internal("a load without an input tensor".into()))?;
        let region = spec.input_region(spec.tile_of(op.item));
        let Conversion { map, channels, patch } = self.of_input(&spec.network, from.dtype());
        let load = LoadTensor {
            from,
            batch: op.batch,
            frame: op.frame - self.tensors.input_first,
            top: region.top,
            left: region.left,
            map,
            channels,
            patch,
            shape: region.shape,
            into: op.into,
        };
        self.backend.load(self.memory, &load, &self.buffers, stop)
    }

    /// Never stopped: a blend adds to its output, so it must not run twice.
    fn blend(&mut self, spec: &ScheduleSpec, op: &BlendOp<Offsets>) -> Result<()> {
        let (Some(grid), Some(tile)) = (&spec.grid, spec.tile_of(op.item)) else {
            return Err(Error::Internal("a blend without tiles".into()));
        };
        let (row, column) = grid.position(tile);
        let region = spec.output_region(Some(tile));
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
        self.backend.blend(self.memory, &blend, &self.buffers)
    }

    /// Never stopped: the host must not get a frame twice.
    fn store(&mut self, spec: &ScheduleSpec, op: &StoreOp<Offsets>) -> Result<()> {
        let into = self.tensors.output.ok_or_else(|| Error::Internal("a store without an output tensor".into()))?;
        let frame = op.frame - self.tensors.output_first;
        if frame >= into.shape().frames {
            // Padding of the encoder's input comes out as frames that the host does not want.
            return Ok(());
        }
        let (network, weights) = (&spec.network, spec.grid.as_deref());
        let Conversion { map, channels, patch } = self.of_output(network, into.dtype());
        let logvar_channel = network.geometry.latent_channels;
        let is_sampled = network.direction == Direction::Encode && self.settings.posterior == Latent::Sample;
        let plain = StoreTensor {
            from: op.from,
            shape: network.output_shape(spec.input),
            channel: 0,
            divide: weights.map(|grid| Fades { rows: &grid.rows.weight, columns: &grid.columns.weight }),
            clamp: None,
            sample: is_sampled.then_some(Posterior { seed: self.settings.seed, logvar_channel }),
            map,
            channels,
            patch,
            into,
            batch: op.batch,
            frame,
            clip: self.tensors.first_clip + op.batch,
            clip_frame: op.frame,
        };
        self.backend.store(self.memory, &plain, &self.buffers)?;
        let Some(into) = self.tensors.logvar else { return Ok(()) };
        let same = channels.map_or(Vec::new(), |channels| vec![UNCHANGED; channels.maps.len()]);
        let logvar = StoreTensor {
            channel: logvar_channel,
            clamp: Some(LOGVAR_RANGE),
            sample: None,
            map: UNCHANGED,
            channels: channels.map(|channels| ChannelMaps { maps: &same, ..channels }),
            into,
            ..plain
        };
        self.backend.store(self.memory, &logvar, &self.buffers)
    }

    fn of_input(&self, network: &Network, dtype: DType) -> Conversion<'a> {
        match network.direction {
            Direction::Encode => Conversion::of_pixels(network, input_pixels(dtype, self.settings.pixel_range)),
            Direction::Decode => self.of_latents(Direction::Decode),
        }
    }

    fn of_output(&self, network: &Network, dtype: DType) -> Conversion<'a> {
        match network.direction {
            Direction::Encode => self.of_latents(Direction::Encode),
            Direction::Decode => Conversion::of_pixels(network, output_pixels(dtype, self.settings.pixel_range)),
        }
    }

    fn of_latents(&self, direction: Direction) -> Conversion<'a> {
        Conversion { map: self.latents.map(direction), channels: self.latents.channels(direction), patch: 1 }
    }
}

impl Conversion<'_> {
    fn of_pixels(network: &Network, map: Affine) -> Self {
        Conversion { map, channels: None, patch: network.geometry.patch }
    }
}

/// From the host's pixels to the model's -1..1.
fn input_pixels(dtype: DType, range: PixelRange) -> Affine {
    match (dtype.full_scale(), range) {
        (Some(full), _) => Affine { mul: 2.0 / full, add: -1.0 },
        (None, PixelRange::Unit) => Affine { mul: 2.0, add: -1.0 },
        (None, PixelRange::Signed) => UNCHANGED,
    }
}

/// From the model's -1..1 to the host's pixels.
fn output_pixels(dtype: DType, range: PixelRange) -> Affine {
    match (dtype.full_scale(), range) {
        (Some(full), _) => Affine { mul: full / 2.0, add: full / 2.0 },
        (None, PixelRange::Unit) => Affine { mul: 0.5, add: 0.5 },
        (None, PixelRange::Signed) => UNCHANGED,
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
