//! Runs single steps: looks up addresses and weights, and hands the operation to the backend.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::settings::{Latent, PixelRange, Settings};
use super::{Control, Progress};
use crate::backend::{
    Affine, AnewOp, AttentionOp, Backend, BandedFrame, BandedOp, Blend, BlendOp, CarryFrame, CarryOp, ConvFrame,
    ConvOp, Frame, FrameAt, HostFrame, LoadOp, NormOp, PastFrame, Posterior, Stop, StoreOp, Term, Terms,
};
use crate::error::{Error, Result};
use crate::exec::weights::Weights;
use crate::model::{Direction, LayerId};
use crate::plan::{Banded, Carrying, Fetched, Job, Layout, PastSlots, Pools, Slot, SlotAt, SlotPool, Step};
use crate::tensor::{At, DType, PastAt, View};

/// The range that the authors clamp the log-variance to.
const LOGVAR_RANGE: (f32, f32) = (-30.0, 20.0);

/// Host tensors of a call. Frame 0 of a tensor is frame `*_first` of the clip.
#[derive(Clone, Copy, Default)]
pub struct Ends<'a> {
    pub input: Option<&'a View>,
    pub input_first: u64,
    pub output: Option<&'a View>,
    pub logvar: Option<&'a View>,
    pub output_first: u64,
}

/// Everything that steps are run with.
pub struct Runner<'a, B: Backend> {
    pub backend: &'a B,
    pub weights: &'a Weights<B>,
    pub memory: &'a mut B::Memory,
    pub scratch: u64,
    pub bands: (u64, u64),
    /// Where frames pass through on their way in, and on their way out.
    pub staging: [u64; 2],
    pub settings: &'a Settings,
    pub ends: Ends<'a>,
}

/// Weights that a step computes with.
enum StepWeights<'a, C> {
    Stored(&'a C),
    Fetched(C),
}

impl<C> StepWeights<'_, C> {
    fn get(&self) -> &C {
        match self {
            StepWeights::Stored(weights) => weights,
            StepWeights::Fetched(weights) => weights,
        }
    }
}

impl<'a, B: Backend> Runner<'a, B> {
    /// Runs the step in front of the job's queue.
    pub fn run(&mut self, job: &mut Job, stop: &mut Stop) -> Result<()> {
        // Cloned out of the queue, where it stays until it is done: an interrupted step is run again.
        let Some(step) = job.front().cloned() else { return Ok(()) };
        let (layout, pools) = (job.layout(), job.pools());
        let pool = &pools.frames;
        match step {
            Step::Load { lane, batch, frame, into } => self.load(layout, pool, (lane, batch, frame), into, stop),
            Step::Fetch { layer, into } => {
                let weights = &self.weights.convs[layer];
                self.backend.fetch_weights(self.memory, weights, into.slabs, place(pool, into.slot)?)
            }
            Step::Conv { layer, weights, input, frames, sums } => {
                let frames = frames.iter().map(|frame| conv_frame(pool, frame)).collect::<Result<Vec<_>>>()?;
                let layer_facts = &layout.network.layers[layer];
                let op = ConvOp {
                    layout: &layer_facts.layout,
                    input,
                    frames: &frames,
                    statistics: layer_facts.statistics,
                    scratch: self.scratch,
                    sums: sums.try_map(|slot| place(pool, slot))?,
                };
                let weights = self.step_weights(layer, weights, pool)?;
                self.backend.conv(self.memory, weights.get(), &op, stop)
            }
            Step::Carrying(step) => self.carrying(layout, pool, &step, stop),
            Step::Banded(banded) => self.banded(layout, pools, &banded, stop),
            Step::Normalise { layer, weights, shape, frames } => {
                let frames = frames.iter().map(|(from, to)| Ok((place(pool, *from)?, place(pool, *to)?)));
                let frames = frames.collect::<Result<Vec<_>>>()?;
                let op = NormOp { layout: &layout.network.layers[layer].layout, shape, frames: &frames };
                let weights = self.step_weights(layer, weights, pool)?;
                self.backend.normalise(self.memory, weights.get(), &op, stop)
            }
            Step::Attention { shape, frames } => {
                let frames = frames.iter().map(|(from, to)| Ok((place(pool, *from)?, place(pool, *to)?)));
                let frames = frames.collect::<Result<Vec<_>>>()?;
                self.backend.attention(
                    self.memory,
                    &AttentionOp { shape, frames: &frames, scratch: self.scratch },
                    stop,
                )
            }
            Step::Blend { lane, from, into, clear } => self.blend(layout, pool, lane, (from, into), clear),
            Step::Store { batch, frame, from } => self.store(layout, pool, (batch, frame), from),
        }
    }

    /// A layer's weights: where they were fetched to, or on the device anyway.
    fn step_weights(
        &mut self,
        layer: LayerId,
        at: Option<Fetched>,
        pool: &SlotPool,
    ) -> Result<StepWeights<'a, B::Conv>> {
        let stored = &self.weights.convs[layer];
        let Some(Fetched { slot, slabs }) = at else { return Ok(StepWeights::Stored(stored)) };
        let fetched = self.backend.fetched_weights(self.memory, stored, slabs, place(pool, slot)?)?;
        Ok(StepWeights::Fetched(fetched))
    }

    fn load(
        &mut self,
        layout: &Layout,
        pool: &SlotPool,
        (lane, batch, frame): (usize, u64, u64),
        into: Slot,
        stop: &mut Stop,
    ) -> Result<()> {
        let from = self.ends.input.ok_or_else(|| Error::Internal("a step loads, but there is no input".into()))?;
        let region = layout.regions(layout.tile_of(lane)).0;
        let op = LoadOp {
            from,
            batch,
            frame: frame - self.ends.input_first,
            top: region.top,
            left: region.left,
            map: self.input_map(layout.network.direction, from.dtype()),
            shape: region.shape,
            into: place(pool, into)?,
            staging: self.staging[0],
        };
        self.backend.load(self.memory, &op, stop)
    }

    fn carrying(&mut self, layout: &Layout, pool: &SlotPool, step: &Carrying, stop: &mut Stop) -> Result<()> {
        let frames = step.frames.iter().map(|frame| {
            let (input, out) = (place(pool, frame.input)?, place(pool, frame.out)?);
            Ok(CarryFrame { input, slabs: frame.slabs, bias: frame.bias, out })
        });
        let frames = frames.collect::<Result<Vec<_>>>()?;
        let carry = |slot: Option<Slot>| slot.map(|slot| place(pool, slot)).transpose();
        let op = CarryOp {
            layout: &layout.network.layers[step.layer].layout,
            input: step.input,
            frames: &frames,
            before: carry(step.before)?,
            after: carry(step.after)?,
        };
        self.backend.conv_carrying(self.memory, &self.weights.convs[step.layer], &op, stop)
    }

    fn banded(&mut self, layout: &Layout, pools: &Pools, step: &Banded, stop: &mut Stop) -> Result<()> {
        let past = step.past.iter().map(|past| past_at(pools, *past)).collect::<Result<Vec<_>>>()?;
        let fresh = step.fresh.iter().map(|at| frame_at(pools, *at)).collect::<Result<Vec<_>>>()?;
        let keep = step.keep.iter().map(|(i, to)| Ok((*i, past_at(pools, *to)?))).collect::<Result<Vec<_>>>()?;
        let keep_statistics = step.keep_statistics.iter().map(|(i, slot)| Ok((*i, place(&pools.frames, *slot)?)));
        let keep_statistics = keep_statistics.collect::<Result<Vec<_>>>()?;
        let frames = step.frames.iter().map(|frame| banded_frame(pools, frame)).collect::<Result<Vec<_>>>()?;
        let layer = &layout.network.layers[step.layer];
        let anew_frames = step.anew.iter().flat_map(|anew| &anew.frames);
        let anew_frames =
            anew_frames.map(|(inputs, bias)| Ok((terms(&pools.frames, inputs)?, *bias))).collect::<Result<Vec<_>>>()?;
        let weights = self.step_weights(step.layer, step.weights, &pools.frames)?;
        let op = BandedOp {
            weights: weights.get(),
            layout: &layer.layout,
            input: step.input,
            past: &past,
            fresh: &fresh,
            keep: &keep,
            columns: step.columns,
            keep_statistics: &keep_statistics,
            frames: &frames,
            anew: step.anew.as_ref().map(|anew| AnewOp {
                weights: &self.weights.convs[anew.layer],
                layout: &layout.network.layers[anew.layer].layout,
                input: anew.input,
                frames: &anew_frames,
            }),
            statistics: layer.statistics,
            scratch: self.scratch,
            bands: self.bands,
        };
        self.backend.banded(self.memory, &op, stop)
    }

    /// Never interrupted: a blend adds to what is there, so it must not be run again.
    fn blend(
        &mut self,
        layout: &Layout,
        pool: &SlotPool,
        lane: usize,
        (from, into): (Slot, Slot),
        clear: bool,
    ) -> Result<()> {
        let (Some(grid), Some(tile)) = (&layout.grid, layout.tile_of(lane)) else {
            return Err(Error::Internal("a step blends, but there are no tiles".into()));
        };
        let (row, column) = grid.position(tile);
        let region = layout.regions(Some(tile)).1;
        let op = BlendOp {
            from: place(pool, from)?,
            from_shape: region.shape,
            into: place(pool, into)?,
            into_shape: layout.network.output_shape(layout.input),
            top: region.top,
            left: region.left,
            fade: Blend { rows: &grid.rows.fades[row], columns: &grid.columns.fades[column] },
            clear,
            scratch: self.scratch,
        };
        self.backend.blend(self.memory, &op, &mut || false)
    }

    /// A store is never interrupted: a frame that the host was given must not be given again.
    fn store(&mut self, layout: &Layout, pool: &SlotPool, (batch, clip_frame): (u64, u64), from: Slot) -> Result<()> {
        let into = self.ends.output.ok_or_else(|| Error::Internal("a step stores, but there is no output".into()))?;
        let frame = clip_frame - self.ends.output_first;
        if frame >= into.shape().frames {
            // What the encoder was padded with comes out as frames that the host does not want.
            return Ok(());
        }
        let (network, settings) = (&layout.network, self.settings);
        let latent = network.config.latent;
        let sums = layout.grid.as_deref().map(|grid| Blend { rows: &grid.rows.weight, columns: &grid.columns.weight });
        let op = StoreOp {
            from: place(pool, from)?,
            shape: network.output_shape(layout.input),
            channel: 0,
            divide: sums,
            clamp: None,
            sample: None,
            map: Affine { mul: 1.0, add: 0.0 },
            into,
            batch,
            frame,
            clip_frame,
            scratch: self.scratch,
            staging: self.staging[1],
        };
        let never = &mut || false;
        match network.direction {
            Direction::Decode => {
                let map = output_pixels(into.dtype(), settings.pixel_range);
                self.backend.store(self.memory, &StoreOp { map, ..op }, never)
            }
            Direction::Encode => {
                let sample = (settings.posterior == Latent::Sample)
                    .then_some(Posterior { seed: settings.seed, logvar_channel: latent });
                let map = Affine { mul: settings.scaling_factor, add: 0.0 };
                self.backend.store(self.memory, &StoreOp { map, sample, ..op }, never)?;
                match self.ends.logvar {
                    Some(into) => {
                        let logvar = StoreOp { channel: latent, clamp: Some(LOGVAR_RANGE), into, ..op };
                        self.backend.store(self.memory, &logvar, never)
                    }
                    None => Ok(()),
                }
            }
        }
    }

    fn input_map(&self, direction: Direction, dtype: DType) -> Affine {
        match direction {
            Direction::Encode => input_pixels(dtype, self.settings.pixel_range),
            Direction::Decode => Affine { mul: 1.0 / self.settings.scaling_factor, add: 0.0 },
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

fn place(pool: &SlotPool, slot: Slot) -> Result<Frame> {
    let offset = pool.offset(slot);
    offset
        .map(Frame)
        .ok_or_else(|| Error::Internal("the run needs more memory than its plan; please report this".into()))
}

fn terms(pool: &SlotPool, inputs: &[(Slot, u8)]) -> Result<Terms> {
    let mut terms = Terms::new();
    for (slot, slab) in inputs {
        terms.push(Term { frame: place(pool, *slot)?, slab: *slab });
    }
    Ok(terms)
}

fn conv_frame(pool: &SlotPool, frame: &crate::plan::ConvFrame) -> Result<ConvFrame> {
    let terms = terms(pool, &frame.terms)?;
    let residual = frame.residual.map(|slot| place(pool, slot)).transpose()?;
    Ok(ConvFrame { terms, bias: frame.bias, residual, out: place(pool, frame.out)? })
}

fn frame_at(pools: &Pools, at: SlotAt) -> Result<FrameAt> {
    Ok(match at {
        At::Device(slot) => At::Device(place(&pools.frames, slot)?),
        At::Host { frame, statistics } => {
            At::Host { frame: HostFrame(place(&pools.past, frame)?.0), statistics: place(&pools.frames, statistics)? }
        }
        At::Anew { index, statistics } => At::Anew { index, statistics: place(&pools.frames, statistics)? },
    })
}

fn past_at(pools: &Pools, past: PastSlots) -> Result<PastFrame> {
    Ok(PastAt {
        near: past.near.map(|slot| place(&pools.frames, slot)).transpose()?,
        far: past.far.map(|slot| Ok(HostFrame(place(&pools.past, slot)?.0))).transpose()?,
    })
}

fn banded_frame(pools: &Pools, frame: &crate::plan::BandedFrame) -> Result<BandedFrame> {
    Ok(BandedFrame {
        terms: frame.terms.clone(),
        shortcut: frame.shortcut.map(|(at, slab)| Ok((frame_at(pools, at)?, slab))).transpose()?,
        bias: frame.bias,
        residual: frame.residual.map(|slot| place(&pools.frames, slot)).transpose()?,
        out: frame_at(pools, frame.out)?,
    })
}

/// Watches a call for its host: asks whether to stop, tells how far it is.
pub struct Watch<'a, 'c> {
    control: &'a mut Control<'c>,
    progress: Progress,
    told: Instant,
}

impl<'a, 'c> Watch<'a, 'c> {
    /// Within a step the host hears from us this often.
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
        self.progress.done += work;
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
            // Whoever else looks at the flag during this call sees it too.
            self.control.cancel.store(true, Ordering::Relaxed);
        }
        stop
    }
}
