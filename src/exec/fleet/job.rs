//! What a call asks of a fleet, and the calls that its parts are. Knows tensors and ranges; must not know members.

use std::ops::Range;
use std::sync::Arc;

use crate::exec::{Call, ClipRange, Extent, JobShape, Outputs};
use crate::ir::{Shape, View};
use crate::model::{Cone, FrameRange, Network};
use crate::report::{Part, PlanReport};

/// Frames over which the work of a cut is compared with that of no cut: whole latent frames.
const COMPARED_FRAMES: u64 = 64;

/// So many members are planned one by one within a second.
const FEW_MEMBERS: usize = 8;

/// A clip, or a range of it.
pub struct FleetJob {
    pub network: Arc<Network>,
    /// Of the whole clip's input.
    pub clip: Shape,
    /// All of it.
    pub whole: Part,
    is_range: bool,
    frame_work: f64,
}

/// A part, and its member's plan for it.
#[derive(Clone)]
pub struct PlannedPart {
    pub part: Part,
    pub plan: PlanReport,
}

impl FleetJob {
    /// `input`: the shape of the clip; `frames`: how many come out, if the host says.
    pub fn new(network: &Arc<Network>, input: Shape, range: Option<ClipRange>, frames: Option<u64>) -> FleetJob {
        let clip = ClipRange { clip_frames: input.frames, first: 0, count: None };
        let ClipRange { clip_frames, first, count } = range.unwrap_or(clip);
        let all = || network.output_frames(clip_frames).saturating_sub(first);
        let frames = frames.or(count).unwrap_or_else(all);
        let whole = Part { clips: 0..input.batch, frames: first..first + frames };
        let mut job = FleetJob {
            network: Arc::clone(network),
            clip: Shape { frames: clip_frames, ..input },
            is_range: range.is_some(),
            frame_work: 1.0,
            whole,
        };
        let work = |frames| job.work(&(0..frames));
        job.frame_work = (work(2 * COMPARED_FRAMES + 1) - work(COMPARED_FRAMES + 1)) / COMPARED_FRAMES as f64;
        job
    }

    /// What these frames of the clip depend on.
    pub fn cone(&self, frames: &Range<u64>) -> Cone {
        Cone::new(&self.network, FrameRange { first: frames.start, end: Some(frames.end) })
    }

    fn work(&self, frames: &Range<u64>) -> f64 {
        let cone = self.cone(frames);
        let frame = self.network.input_frame(self.clip);
        cone.work(&self.network, frame, cone.inputs(u64::MAX).end) as f64
    }

    /// What it costs to begin with a frame of the clip, in frames' worth of work.
    pub fn cut_cost(&self, frame: u64) -> f64 {
        match frame {
            0 => 0.0,
            first => (self.work(&(first..first + COMPARED_FRAMES)) / self.frame_work - COMPARED_FRAMES as f64).max(0.0),
        }
    }

    /// The work of a part in frames, cuts included.
    pub fn cost(&self, part: &Part) -> f64 {
        part.cost(&|frame| self.cut_cost(frame))
    }

    /// The range that a part is; `None` for whole clips.
    pub fn range(&self, part: &Part) -> Option<ClipRange> {
        let (clip_frames, first, count) = (self.clip.frames, part.frames.start, Some(part.frame_count()));
        let is_clip = !self.is_range && part.frames == self.whole.frames;
        (!is_clip).then_some(ClipRange { clip_frames, first, count })
    }

    /// The same, of its output frames.
    pub fn frame_range(&self, part: &Part) -> FrameRange {
        let range = FrameRange { first: part.frames.start, end: Some(part.frames.end) };
        self.range(part).map_or(FrameRange::WHOLE, |_| range)
    }

    /// The step of cuts among so many members. With many, cuts fall where parts are alike, so that one plan is that of
    /// most: a few frames more or less for a member cost less than a plan for each.
    pub fn cut_step(&self, members: usize) -> u64 {
        if members > FEW_MEMBERS { Cone::period(&self.network) } else { 1 }
    }

    /// Whether two parts have the same plan, but for the numbers of their frames.
    pub fn is_alike(&self, a: &Part, b: &Part) -> bool {
        let cone = |part: &Part| self.cone(&part.frames);
        self.shape(a).input == self.shape(b).input
            && self.range(a).is_none() == self.range(b).is_none()
            && cone(a).is_shift_of(&cone(b), &self.network)
    }

    /// What a part is to the session of its member.
    pub fn shape(&self, part: &Part) -> JobShape {
        let inputs = self.inputs(part);
        let input = Shape { batch: part.clip_count(), frames: inputs.end - inputs.start, ..self.clip };
        let extent = self.range(part).map_or(Extent::Clip, Extent::Range);
        JobShape { direction: self.network.direction, input, extent }
    }

    /// The shape that the host passes in.
    pub fn input_shape(&self) -> Shape {
        self.shape(&self.whole).input
    }

    /// The input frames of a part.
    fn inputs(&self, part: &Part) -> Range<u64> {
        match self.range(part) {
            None => 0..self.clip.frames,
            Some(_) => self.cone(&part.frames).inputs(self.clip.frames),
        }
    }

    /// The call that a part of a whole call is.
    pub fn call(&self, part: &Part, whole: &Call) -> Call {
        let first = self.whole.frames.start;
        let frames = part.frames.start - first..part.frames.end - first;
        // The host's tensor begins with the first input of all.
        let (inputs, origin) = (self.inputs(part), self.inputs(&self.whole).start);
        let output = |view: View| view.clips(part.clips.clone()).frames(frames.clone());
        Call {
            range: self.range(part),
            input: whole.input.clips(part.clips.clone()).frames(inputs.start - origin..inputs.end - origin),
            into: Outputs { output: output(whole.into.output), logvar: whole.into.logvar.map(output), ..whole.into },
            first_clip: part.clips.start,
            ..*whole
        }
    }
}
