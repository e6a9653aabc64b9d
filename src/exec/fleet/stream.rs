//! A clip of any length on several devices, in rounds: a round is a range that is divided like a clip. Holds the input
//! of the next round and the output of the last one in host memory.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use parking_lot::Mutex;

use super::frames::Frames;
use super::job::FleetJob;
use super::members::{Fleet, refuse_stream};
use crate::backend::{copy_tensor, host_memory};
use crate::error::{Error, Result};
use crate::exec::check::StreamCheck;
use crate::exec::ledger::Held;
use crate::exec::settings::{Limit, Settings};
use crate::exec::{
    Call, ClipRange, Control, FrameStream, JobShape, Outputs, Progress, Pull, Timelines, check, nonfinite,
};
use crate::ir::{Shape, View};
use crate::model::{Cone, Direction, FrameRange, Network};
use crate::report::{Bytes, DeviceDivision, PlanReport};

/// The share of a round's work that cuts may be, if memory allows.
const CUT_SHARE: f64 = 0.15;
/// Of free host memory, what the frames of a stream may take where the host sets no limit.
const FREE_SHARE: u64 = 4;
/// A frame so far into a clip that what comes before does not matter.
const FAR: u64 = 1 << 20;
/// Frames of a clip that has no end.
const LONGEST: u64 = 1 << 32;

pub struct FleetStream {
    fleet: Arc<Mutex<Fleet>>,
    settings: Settings,
    network: Arc<Network>,
    check: StreamCheck,
    /// Output frames of a round.
    round: u64,
    /// The first output frame that no round has made.
    next: u64,
    /// Input frames from the first that the next round needs on, up to `loaded`.
    inputs: Option<Frames>,
    loaded: u64,
    /// What the last round made and the host has not pulled: frames, and of encode also their log-variances.
    outputs: Vec<Frames>,
    plan: PlanReport,
    held: Held,
    /// Whether `precision=auto` had become bf16 when it was opened.
    had_left_fp16: bool,
}

pub fn open(fleet: &Arc<Mutex<Fleet>>, settings: Settings, job: &JobShape, cancel: &AtomicBool) -> Result<FleetStream> {
    let mut locked = Fleet::locked(fleet, &settings)?;
    let tensors = locked.check(job.direction);
    let cone = check::job(&tensors.network, job)?;
    let (round, first) = (round(&locked, job)?, cone.range.first);
    let plan = plan(&mut locked, &round, first, None, cancel)?;
    Ok(FleetStream {
        settings,
        fleet: Arc::clone(fleet),
        network: Arc::clone(&tensors.network),
        check: StreamCheck::new(tensors, job.input),
        round: round.whole.frame_count(),
        next: first,
        inputs: None,
        loaded: cone.first_input,
        outputs: Vec::new(),
        held: locked.ledger.hold(0, 0),
        had_left_fp16: locked.has_left_fp16(),
        plan,
    })
}

/// The plan of a stream, from frame `first` on: that of a round far into the clip.
pub fn plan(
    fleet: &mut Fleet,
    round: &FleetJob,
    first: u64,
    timelines: Timelines,
    cancel: &AtomicBool,
) -> Result<PlanReport> {
    let mut plan = fleet.plan(round, timelines, cancel)?;
    // Frames of a round count from its first.
    let parts =
        plan.division.iter_mut().flat_map(|division| &mut division.devices).flat_map(|device| &mut device.parts);
    parts.for_each(|part| part.frames = part.frames.start - FAR..part.frames.end - FAR);
    Ok(of_stream(plan, first, round.whole.frame_count()))
}

/// A round of a stream, far into the clip.
pub fn round(fleet: &Fleet, stream: &JobShape) -> Result<FleetJob> {
    let job = |count| {
        let range = ClipRange { clip_frames: LONGEST, first: FAR, count: Some(count) };
        FleetJob::new(fleet.network(stream.direction), stream.input, Some(range), None)
    };
    Ok(job(round_frames(fleet, &job(1))?))
}

/// A round's plan as that of its stream.
fn of_stream(plan: PlanReport, first: u64, round: u64) -> PlanReport {
    PlanReport {
        range: FrameRange { first, end: None },
        input: Shape { frames: 0, ..plan.input },
        output: Shape { frames: 0, ..plan.output },
        seconds: 0.0,
        division: plan.division.map(|division| DeviceDivision { round: Some(round), ..division }),
        ..plan
    }
}

/// Output frames of a round, which `one` is a frame of: enough that cuts cost little, as far as host memory allows.
fn round_frames(fleet: &Fleet, one: &FleetJob) -> Result<u64> {
    // Every clip of a batch is cut, and every member's share of a clip.
    let cuts = (fleet.members.len() as u64).div_ceil(one.clip.batch);
    let wanted = cuts as f64 * one.cut_cost(FAR) * (1.0 - CUT_SHARE) / CUT_SHARE;
    let step = match one.network.direction {
        Direction::Encode => 1,
        Direction::Decode => one.network.geometry.time,
    };
    let limit = match fleet.settings.host_memory_limit {
        Limit::Bytes(bytes) => bytes,
        other => other.bytes(host_memory().available, 0) / FREE_SHARE,
    };
    // Steps are whole latent frames, so each takes as much as the one before.
    let [first, second] = [step, 2 * step].map(|frames| round_bytes(one, frames));
    if first > limit {
        return Err(Error::Memory(format!(
            "host_memory_limit: {} is too little for {} on several devices; the shortest round takes {} ({first} \
             bytes). Raise host_memory_limit, or use one device",
            Bytes(limit),
            Shape { frames: 0, ..one.clip }.described(),
            Bytes(first)
        )));
    }
    let fits = 1 + (limit - first) / (second - first);
    Ok(fits.min((wanted / step as f64).ceil().max(1.0) as u64) * step)
}

/// Host memory for the input and output of a round, in the widest type. Log-variances are as large as latents.
fn round_bytes(one: &FleetJob, frames: u64) -> u64 {
    let (network, clip) = (&one.network, one.clip);
    let inputs = one.cone(&(FAR..FAR + frames)).inputs(u64::MAX);
    let output = network.output_shape(network.input_frame(clip)).elements();
    let input_frame = clip.height * clip.width * clip.channels;
    4 * clip.batch * ((inputs.end - inputs.start) * input_frame + frames * output)
}

impl FleetStream {
    /// The input frames of the next round.
    fn needed(&self) -> Range<u64> {
        let range = FrameRange { first: self.next, end: Some(self.next + self.round) };
        Cone::new(&self.network, range).inputs(u64::MAX)
    }

    /// Counts the frames that are held.
    fn count_held(&mut self) {
        let bytes = self.outputs.iter().chain(&self.inputs).map(Frames::bytes).sum();
        self.held = self.fleet.lock().ledger.hold(0, bytes);
    }

    /// Output frames of the next round; 0 at the end. `None`: more input is needed.
    fn ready(&self) -> Option<u64> {
        if self.loaded >= self.needed().end {
            return Some(self.round);
        }
        let pushed = self.inputs.as_ref().map_or(0, Frames::count) > 0;
        let all = if pushed { self.network.output_frames(self.loaded) } else { 0 };
        self.check.ended.then(|| all.saturating_sub(self.next).min(self.round))
    }

    /// Runs a round of `count` frames, with outputs like those of a pull.
    fn run_round(&mut self, count: u64, into: &Outputs, control: &mut Control) -> Result<()> {
        let mut outputs = vec![Frames::of(count, &into.output)?];
        if self.network.direction == Direction::Encode {
            outputs.push(Frames::of(count, &into.logvar.unwrap_or(into.output))?);
        }
        let range = ClipRange { clip_frames: self.loaded, first: self.next, count: Some(count) };
        let job = FleetJob::new(&self.network, self.check.frame, Some(range), None);
        let Some(input) = &self.inputs else { return Err(Error::Internal("a round without input".into())) };
        let call = Call {
            direction: self.network.direction,
            range: Some(range),
            input: input.view(0..job.input_shape().frames)?,
            into: Outputs {
                output: outputs[0].all()?,
                logvar: outputs.get(1).map(Frames::all).transpose()?,
                stream: None,
            },
            first_clip: 0,
        };
        let mut fleet = Fleet::locked(&self.fleet, &self.settings)?;
        self.check_precision(&fleet)?;
        let plan = fleet.run(&job, &call, control)?;
        self.check_precision(&fleet)?;
        drop(fleet);
        self.plan = of_stream(plan, self.plan.range.first, self.round);
        let first_input = self.needed().start;
        self.next += count;
        self.outputs = outputs;
        let passed = self.needed().start - first_input;
        if let Some(input) = &mut self.inputs {
            input.drop_front(passed.min(input.count()))?;
        }
        self.count_held();
        Ok(())
    }

    /// Fails if some member has left fp16 since the stream was opened: its frames would be of two precisions.
    fn check_precision(&self, fleet: &Fleet) -> Result<()> {
        if fleet.has_left_fp16() != self.had_left_fp16 {
            return Err(nonfinite::overflowed_stream(self.network.direction));
        }
        Ok(())
    }

    /// Moves frames that were made to the host, from its frame `at` on. Returns how many.
    fn hand_over(&mut self, into: &Outputs, at: u64) -> Result<u64> {
        let Some(made) = self.outputs.first() else { return Ok(0) };
        let count = made.count().min(into.output.shape().frames - at);
        let pairs = self.outputs.iter().zip([Some(into.output), into.logvar]);
        for (frames, to) in pairs.filter_map(|(frames, to)| Some((frames, to?))) {
            if !frames.is_like(&to) {
                return Err(Error::Tensor(format!(
                    "out: {} x {} of {}, but the frames that wait are {}; a stream on several devices keeps the size \
                     and type of a pull for a round",
                    to.shape().width,
                    to.shape().height,
                    to.dtype().name(),
                    frames.describe()
                )));
            }
            copy_tensor(&frames.view(0..count)?, &to.frames(at..at + count))?;
        }
        let is_last = count == made.count();
        self.outputs.iter_mut().try_for_each(|frames| frames.drop_front(count))?;
        if is_last {
            self.outputs.clear();
            self.count_held();
        }
        Ok(count)
    }

    fn pull_all(&mut self, into: &Outputs, control: &mut Control, written: &mut u64) -> Result<Pull> {
        let (stage, mut before) = (self.network.direction.name(), 0);
        loop {
            *written += self.hand_over(into, *written)?;
            if *written == into.output.shape().frames {
                return Ok(Pull::Written);
            }
            match self.ready() {
                None | Some(0) if *written > 0 => return Ok(Pull::Written),
                None => return Ok(Pull::NeedsInput),
                Some(0) => return Ok(Pull::Ended),
                Some(count) => {
                    // Of a stream nobody knows the total, and rounds add up.
                    let (mut done, cancel, log) = (before, control.cancel, control.log);
                    let mut tell = |progress: Progress| {
                        done = before + if progress.stage == stage { progress.done } else { 0 };
                        control.progress.as_mut().is_some_and(|told| told(Progress { done, total: 0, stage }))
                    };
                    let ran = self.run_round(count, into, &mut Control { cancel, progress: Some(&mut tell), log });
                    self.check.broken = ran.as_ref().is_err_and(|error| *error != Error::Cancelled);
                    ran?;
                    before = done;
                }
            }
        }
    }
}

impl FrameStream for FleetStream {
    fn plan(&self) -> PlanReport {
        self.plan.clone()
    }

    fn push(&mut self, input: Option<&View>) -> Result<u64> {
        self.check.intact()?;
        let Some(view) = input else {
            self.check.ended = true;
            return Ok(0);
        };
        self.check.push(view)?;
        let needed = self.needed();
        let frames = self.inputs.get_or_insert_with(|| Frames::like(view));
        if !frames.is_like(view) {
            return Err(Error::Tensor(format!(
                "frames: dtype is {}, but this stream began with {}; a stream on several devices keeps its type",
                view.dtype().name(),
                frames.describe()
            )));
        }
        let taken = (needed.end - self.loaded).min(view.shape().frames);
        if taken > 0 {
            frames.reserve(needed.end - needed.start)?;
            frames.append(&view.frames(0..taken))?;
            self.loaded += taken;
            self.count_held();
        }
        Ok(taken)
    }

    fn pull(&mut self, into: &Outputs, control: &mut Control, written: &mut u64) -> Result<Pull> {
        *written = 0;
        self.check.intact()?;
        refuse_stream(into)?;
        self.check.pull(into)?;
        let pulled = self.pull_all(into, control, written);
        // A tensor that does not fit the frames that wait loses none of them.
        self.check.broken |= pulled.as_ref().is_err_and(|error| !matches!(error, Error::Cancelled | Error::Tensor(_)));
        pulled
    }
}
