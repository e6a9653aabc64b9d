//! Runs the operations of a job's schedule: resolves slots to offsets and hands each operation to the backend.
//!
//! Owns the mapping between host tensors and activations. Knows no plan search and no kernel.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::check::ends;
use super::device_model::DeviceModel;
use super::ready_job::ReadyJob;
use super::settings::{Latent, PixelRange};
use super::{Call, Control, Outputs, Progress};
use crate::backend::{Backend, DeviceFacts, DeviceSpan, RunArgs, Stop};
use crate::error::{Error, Result};
use crate::ir::{
    Affine, BlendOp, BlendTile, ChannelMaps, DType, Fades, LoadOp, LoadTensor, Offsets, Op, Posterior, StoreOp,
    StoreTensor, TensorKind, View,
};
use crate::model::{Direction, Network};
use crate::plan::{Next, ScheduleSpec, op_work, work};
use crate::report::{Trace, TracedOp};
use crate::reserve;

/// The authors' implementation clamps the log-variance to this range.
const LOGVAR_RANGE: (f32, f32) = (-30.0, 20.0);

/// Operations whose times a device may keep before they are written.
const MOST_TRACED: usize = 1024;

const UNCHANGED: Affine = Affine { mul: 1.0, add: 0.0 };

/// Host tensors of a call. Frame 0 of a tensor is frame `*_first` of the clip, clip 0 is `first_clip` of the batch.
#[derive(Clone, Copy, Default)]
pub struct HostTensors {
    pub input: Option<View>,
    pub input_first: u64,
    pub into: Option<Outputs>,
    pub output_first: u64,
    pub first_clip: u64,
}

/// A run that does not keep to its plan, with all that the plan was made from.
fn unplanned(why: &Error, spec: &ScheduleSpec) -> Error {
    let (node, batch, input, range) = (spec.network.direction.name(), spec.batch, spec.input, spec.cone.range);
    let (end, order, tiles) = (spec.end, spec.order, spec.grid.as_ref().map(|grid| grid.size));
    let job = format!("{node} of {batch} x {input:?}, {range:?}, {end:?}, {order:?}, {tiles:?}");
    Error::Internal(format!("{why}; please report this: {job}, {:?}", spec.policy))
}

/// What values go through between a host's tensor and activations.
struct Conversion<'a> {
    map: Affine,
    channels: Option<ChannelMaps<'a>>,
    patch: u64,
}

impl<B: Backend> ReadyJob<B> {
    /// Runs a whole call. A stream runs its operations one by one.
    pub fn run_call(&mut self, call: &Call, control: &mut Control) -> Result<()> {
        let (network, cone) = (Arc::clone(self.network()), Arc::clone(&self.schedule.spec().cone));
        let total = work(self.schedule.spec(), cone.first_input + call.input.shape().frames);
        let mut watch = Watch::new(control, network.direction.name(), u64::try_from(total).unwrap_or(u64::MAX));
        let tensors = HostTensors {
            input: Some(call.input),
            input_first: cone.first_input,
            into: Some(call.into),
            output_first: cone.range.first,
            first_clip: call.first_clip,
        };
        while self.schedule.prepare_next() == Next::Op {
            let work = self.schedule.front().map_or(0, |op| op_work(op, &network));
            self.run(&tensors, &mut || watch.stop())?;
            watch.advance(work)?;
        }
        Ok(())
    }

    /// Runs the operation in front of the schedule's queue, and takes it from there.
    pub fn run(&mut self, tensors: &HostTensors, stop: &mut Stop) -> Result<()> {
        let schedule = &self.schedule;
        let Some(op) = schedule.front() else { return Ok(()) };
        let op = op.relocate(&mut schedule.arenas()).map_err(|why| unplanned(&why, schedule.spec()))?;
        self.run_traced(&op, tensors, stop)?;
        self.schedule.done();
        Ok(())
    }

    fn run_traced(&mut self, op: &Op<Offsets>, tensors: &HostTensors, stop: &mut Stop) -> Result<()> {
        if !self.on.settings.trace.as_ref().is_some_and(Trace::is_open) {
            return self.operate(op, tensors, stop);
        }
        let (number, start) = (self.traced.len() as u64, Instant::now());
        self.traced.push(TracedOp::new(op, self.network()));
        let tells_times = self.on.device.trace(&mut self.workspace.memory, Some(number))?;
        let result = self.operate(op, tensors, stop);
        if !tells_times {
            self.write_trace(&[DeviceSpan { op: number, lane: "operations", start, end: Instant::now() }]);
        } else if self.traced.len() >= MOST_TRACED {
            let spans = self.on.device.take_spans(&mut self.workspace.memory)?;
            self.write_trace(&spans);
        }
        result
    }

    fn operate(&mut self, op: &Op<Offsets>, tensors: &HostTensors, stop: &mut Stop) -> Result<()> {
        match op {
            Op::Load(load) => self.load(load, tensors, stop),
            Op::Blend(blend) => self.blend(blend),
            Op::Store(store) => self.store(store, tensors),
            _ => {
                let args = RunArgs { weights: &self.weights.loaded.convs, buffers: self.buffers };
                self.on.device.run(&mut self.workspace.memory, op, &args, stop)
            }
        }
    }

    fn load(&mut self, op: &LoadOp<Offsets>, tensors: &HostTensors, stop: &mut Stop) -> Result<()> {
        let spec = self.schedule.spec();
        let from = tensors.input.ok_or_else(|| Error::Internal("a load without an input tensor".into()))?;
        let region = spec.input_region(spec.tile_of(op.item));
        let kind = ends(spec.network.direction).0;
        let Conversion { map, channels, patch } = self.on.conversion(&spec.network, kind, from.dtype());
        let load = LoadTensor {
            from: &from,
            batch: op.batch,
            frame: op.frame - tensors.input_first,
            top: region.top,
            left: region.left,
            map,
            channels,
            patch,
            shape: region.shape,
            into: op.into,
        };
        self.on.device.load(&mut self.workspace.memory, &load, &self.buffers, stop)
    }

    /// Never stopped: a blend adds to its output, so it must not run twice.
    fn blend(&mut self, op: &BlendOp<Offsets>) -> Result<()> {
        let spec = self.schedule.spec();
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
        self.on.device.blend(&mut self.workspace.memory, &blend, &self.buffers)
    }

    /// Never stopped: the host must not get a frame twice.
    fn store(&mut self, op: &StoreOp<Offsets>, tensors: &HostTensors) -> Result<()> {
        let spec = self.schedule.spec();
        let outputs = tensors.into.ok_or_else(|| Error::Internal("a store without an output tensor".into()))?;
        let into = outputs.output;
        let frame = op.frame - tensors.output_first;
        if frame >= into.shape().frames {
            // Padding of the encoder's input comes out as frames that the host does not want.
            return Ok(());
        }
        let (network, weights) = (&spec.network, spec.grid.as_deref());
        let kind = ends(network.direction).1;
        let Conversion { map, channels, patch } = self.on.conversion(network, kind, into.dtype());
        let logvar_channel = network.geometry.latent_channels;
        let is_sampled = network.direction == Direction::Encode && self.on.settings.posterior == Latent::Sample;
        let plain = StoreTensor {
            from: op.from,
            shape: network.output_shape(spec.input),
            channel: 0,
            divide: weights.map(|grid| Fades { rows: &grid.rows.weight, columns: &grid.columns.weight }),
            clamp: None,
            sample: is_sampled.then_some(Posterior { seed: self.on.settings.seed, logvar_channel }),
            map,
            channels,
            patch,
            into: &into,
            batch: op.batch,
            frame,
            clip: tensors.first_clip + op.batch,
            clip_frame: op.frame,
        };
        self.on.device.store(&mut self.workspace.memory, &plain, &self.buffers)?;
        let Some(into) = outputs.logvar else { return Ok(()) };
        let same = channels.map_or(Vec::new(), |channels| vec![UNCHANGED; channels.maps.len()]);
        let logvar = StoreTensor {
            channel: logvar_channel,
            clamp: Some(LOGVAR_RANGE),
            sample: None,
            map: UNCHANGED,
            channels: channels.map(|channels| ChannelMaps { maps: &same, ..channels }),
            into: &into,
            ..plain
        };
        self.on.device.store(&mut self.workspace.memory, &logvar, &self.buffers)
    }
}

impl<D: DeviceFacts> DeviceModel<D> {
    /// What values of a host's tensor of this kind and type go through.
    fn conversion(&self, network: &Network, kind: TensorKind, dtype: DType) -> Conversion<'_> {
        let (direction, latents) = (network.direction, &self.latents);
        match kind {
            TensorKind::Latent => {
                Conversion { map: latents.map(direction), channels: latents.channels(direction), patch: 1 }
            }
            TensorKind::Video => {
                let map = pixels(direction, dtype, self.settings.pixel_range);
                Conversion { map, channels: None, patch: network.geometry.patch }
            }
        }
    }
}

/// Between the host's pixels and the model's -1..1.
fn pixels(direction: Direction, dtype: DType, range: PixelRange) -> Affine {
    let full = match (dtype.full_scale(), range) {
        (Some(full), _) => full,
        (None, PixelRange::Unit) => 1.0,
        (None, PixelRange::Signed) => return UNCHANGED,
    };
    match direction {
        Direction::Encode => Affine { mul: 2.0 / full, add: -1.0 },
        Direction::Decode => Affine { mul: full / 2.0, add: full / 2.0 },
    }
}

/// Reports progress of a call to the host, and asks whether to stop.
pub struct Watch<'a, 'c> {
    pub control: &'a mut Control<'c>,
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
        self.reach(self.progress.done.saturating_add(work))
    }

    /// So much work is done in all, if it was not more; tells the host.
    pub fn reach(&mut self, done: u64) -> Result<()> {
        self.progress.done = self.progress.done.max(done);
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
