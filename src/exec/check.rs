//! Do the tensors of a call fit the model, the device and each other? Every answer says what would be right.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::exec::{Call, ClipRange, Extent, JobShape, Outputs, Settings};
use crate::ir::{AXES, Shape, TensorDevice, TensorKind, View, share_bytes};
use crate::model::{Cone, Direction, FrameRange, Network};

/// What goes in and what comes out.
pub fn ends(direction: Direction) -> (TensorKind, TensorKind) {
    match direction {
        Direction::Encode => (TensorKind::Video, TensorKind::Latent),
        Direction::Decode => (TensorKind::Latent, TensorKind::Video),
    }
}

fn refuse<T>(why: String) -> Result<T> {
    Err(Error::Tensor(why))
}

/// Frames of a clip that is passed as a whole, at most.
const MOST_CLIP_FRAMES: u64 = 1 << 32;

/// Checks the shape of an input on its own. The frames of a stream do not count.
fn input_shape(network: &Network, shape: Shape, extent: Extent) -> Result<()> {
    let (name, dims, geometry) = (ends(network.direction).0.name(), shape.dims(), &network.geometry);
    let (channels, fits, scale) = match network.direction {
        Direction::Encode => (geometry.pixel_channels, network.is_video(shape.channels), 1),
        Direction::Decode => {
            let channels = geometry.packed_channels();
            (channels, shape.channels == channels, geometry.packed_space())
        }
    };
    let counts = |axis: &usize| *axis != 2 || !matches!(extent, Extent::Stream { .. });
    if let Some(axis) = (0..5).filter(counts).find(|axis| dims[*axis] == 0) {
        return refuse(format!("{name}: shape {shape} is empty: {} is 0", AXES[axis]));
    }
    if !fits {
        let found = shape.channels;
        let may_be_opaque = network.direction == Direction::Encode && channels == 4 && network.is_video(3);
        let opaque = if may_be_opaque { ", or 3 without alpha" } else { "" };
        return refuse(format!("{name}: C is {found}, but this model's {name} has {channels} channels{opaque}"));
    }
    // Far beyond any image, and small enough that no product of sizes can overflow.
    let frames = if matches!(extent, Extent::Clip) { MOST_CLIP_FRAMES } else { MOST_RANGE_FRAMES };
    let most = [1 << 16, 1 << 16, frames, (1 << 17) / scale, (1 << 17) / scale];
    if let Some(axis) = (0..5).filter(counts).find(|axis| dims[*axis] > most[*axis]) {
        return refuse(format!("{name}: {} is {}; the most is {}", AXES[axis], dims[axis], most[axis]));
    }
    // All clips of a stream are under way at the same time.
    const MOST_STREAMED: u64 = 256;
    if matches!(extent, Extent::Stream { .. }) && shape.batch > MOST_STREAMED {
        return refuse(format!("{name}: B is {}; a stream takes {MOST_STREAMED} clips at a time at most", shape.batch));
    }
    Ok(())
}

/// The last frame that a stream may begin with. Frames behind it can be counted at every rate.
const MOST_FRAMES: u64 = 1 << 40;

/// Input frames of a clip that a range is of. A stream on several devices comes in ranges, and may begin with any of
/// the frames above.
const MOST_RANGE_FRAMES: u64 = 16 * MOST_FRAMES;

/// Checks that a range lies in its clip. Returns what it depends on.
pub fn range(network: &Network, range: ClipRange) -> Result<Cone> {
    let ClipRange { clip_frames, first, count } = range;
    let (input, output) = ends(network.direction);
    let (input, output) = (input.name(), output.name());
    if clip_frames == 0 || clip_frames > MOST_RANGE_FRAMES {
        return Err(Error::Argument(format!(
            "clip_frames: {clip_frames}, but a clip has from 1 to {MOST_RANGE_FRAMES} {input} frames"
        )));
    }
    if count == Some(0) {
        return Err(Error::Argument("count: 0 frames are no range; the least is 1".into()));
    }
    let outputs = network.output_frames(clip_frames);
    let end = count.map(|count| first.saturating_add(count));
    if first >= outputs || end.is_some_and(|end| end > outputs) {
        let last = end.map_or(first, |end| end - 1);
        let clip = format!("{clip_frames} {input} frames make {outputs} {output} frames, 0 to {}", outputs - 1);
        return Err(Error::Argument(format!("first: frames {first} to {last} are not all in the clip; its {clip}")));
    }
    Ok(Cone::new(network, FrameRange { first, end }))
}

/// Checks a job that is to be planned. Returns what its output depends on.
pub fn job(network: &Network, job: &JobShape) -> Result<Cone> {
    input_shape(network, job.input, job.extent)?;
    match job.extent {
        Extent::Clip => Ok(Cone::new(network, FrameRange::WHOLE)),
        Extent::Range(asked) => range(network, asked),
        Extent::Stream { first } if first > MOST_FRAMES => Err(Error::Argument(format!(
            "first: {first} is more than the last frame that a stream may begin with, {MOST_FRAMES}"
        ))),
        Extent::Stream { first } => Ok(Cone::new(network, FrameRange { first, end: None })),
    }
}

/// Checks that the input of a range has the frames that it needs: `count` from `first` on.
fn range_input(direction: Direction, found: u64, count: u64, first: u64) -> Result<()> {
    if found == count {
        return Ok(());
    }
    let (name, last) = (ends(direction).0.name(), first + count - 1);
    refuse(format!("{name}: T is {found}, expected {count}: the range needs frames {first} to {last} of the clip"))
}

fn place(name: &str, view: &View, places: &[TensorDevice]) -> Result<()> {
    let found = view.device();
    if places.contains(&found) || found == TensorDevice::Cpu {
        return Ok(());
    }
    let places: Vec<_> = places.iter().map(TensorDevice::to_string).collect();
    refuse(format!(
        "{name}: the tensor is on {found}, but this handle works on {}; pass host memory",
        places.join(" and ")
    ))
}

fn dtype(kind: TensorKind, name: &str, view: &View) -> Result<()> {
    if kind.dtypes().contains(&view.dtype()) {
        return Ok(());
    }
    let accepted: Vec<_> = kind.dtypes().iter().map(|dtype| dtype.name()).collect();
    let (found, kind, accepted) = (view.dtype().name(), kind.name(), accepted.join(", "));
    refuse(format!("{name}: dtype is {found}; {kind}s must be one of {accepted}"))
}

/// Checks the length of an axis. It may be less than `all` by less than a `step`.
fn length(name: &str, axis: usize, found: u64, all: u64, step: u64) -> Result<()> {
    let least = all + 1 - step.min(all);
    if (least..=all).contains(&found) {
        return Ok(());
    }
    let accepted = if least == all { format!("{all}") } else { format!("{least} to {all}") };
    refuse(format!("{name}: {} is {found}, expected {accepted}", AXES[axis]))
}

/// Checks that two tensors, each with the name of its argument, have memory of their own.
fn disjoint(named: (&str, &View), other: (&str, &View)) -> Result<()> {
    if share_bytes(named.1, other.1) {
        let names = format!("{} and {}", named.0, other.0);
        return refuse(format!("{names}: the tensors share memory; an output needs memory of its own"));
    }
    Ok(())
}

/// Checks that there is a limit for each of so many devices, or one for all.
pub fn limits(settings: &Settings, devices: usize) -> Result<()> {
    match settings.memory_limit.len() {
        count if count == 1 || count == devices => Ok(()),
        count => Err(Error::Argument(format!(
            "memory_limit: {count} values, but this handle has {devices} device{}; give one value, or one for each \
             device",
            if devices == 1 { "" } else { "s" }
        ))),
    }
}

/// What the tensors of a call or a stream are checked against.
pub struct TensorCheck {
    pub network: Arc<Network>,
    /// The devices that reach them.
    pub places: Vec<TensorDevice>,
}

impl TensorCheck {
    /// Checks everything about a call but its memory. Returns what its output depends on.
    pub fn call(&self, call: &Call) -> Result<Cone> {
        let (shape, is_whole) = (call.input.shape(), call.range.is_none());
        self.input(&call.input)?;
        self.outputs(shape, &call.into, is_whole)?;
        // After the shapes: a wrong shape reaches into memory that the tensor does not have.
        let (from, to) = ends(self.network.direction);
        disjoint((to.name(), &call.into.output), (from.name(), &call.input))?;
        call.into.logvar.map_or(Ok(()), |view| disjoint(("logvar", &view), (from.name(), &call.input)))?;
        let Some(asked) = call.range else { return Ok(Cone::new(&self.network, FrameRange::WHOLE)) };
        let cone = range(&self.network, asked)?;
        let inputs = cone.inputs(asked.clip_frames);
        range_input(self.network.direction, shape.frames, inputs.end - inputs.start, inputs.start)?;
        Ok(cone)
    }

    /// Checks the input of a call or of a push.
    fn input(&self, view: &View) -> Result<()> {
        let kind = ends(self.network.direction).0;
        place(kind.name(), view, &self.places)?;
        dtype(kind, kind.name(), view)?;
        input_shape(&self.network, view.shape(), Extent::Clip)
    }

    /// Checks outputs against the shape of what goes in. Unless the clip `is_whole`, any number of frames is fine.
    fn outputs(&self, input: Shape, into: &Outputs, is_whole: bool) -> Result<()> {
        let (name, view) = (ends(self.network.direction).1.name(), &into.output);
        self.output(name, input, view, is_whole)?;
        let Some(logvar) = &into.logvar else { return Ok(()) };
        if self.network.direction == Direction::Decode {
            return Err(Error::Argument("logvar: only encode has a log-variance; leave it null for decode".into()));
        }
        // It has the shape of the latent.
        self.output("logvar", input, logvar, false)?;
        length("logvar", 2, logvar.shape().frames, view.shape().frames, 1)?;
        disjoint(("logvar", logvar), (name, view))
    }

    fn output(&self, name: &str, input: Shape, view: &View, is_whole: bool) -> Result<()> {
        let (network, found) = (&self.network, view.shape());
        place(name, view, &self.places)?;
        dtype(ends(network.direction).1, name, view)?;
        // What encode padded may be cropped.
        let (geometry, space) = (&network.geometry, network.geometry.packed_space());
        let (is_video, steps) = match network.direction {
            Direction::Encode => (false, [1; 5]),
            Direction::Decode => (network.is_video(found.channels), [1, 1, geometry.time, space, space]),
        };
        let (found, all) = (found.dims(), network.output(input).dims());
        let counts = |axis: &usize| !(is_video && *axis == 1 || !is_whole && *axis == 2);
        (0..5).filter(counts).try_for_each(|axis| length(name, axis, found[axis], all[axis], steps[axis]))
    }
}

/// What every stream checks before it works: that it can go on, and that tensors continue it.
pub struct StreamCheck {
    tensors: TensorCheck,
    /// The shape of a frame that is pushed.
    pub frame: Shape,
    /// Whether the clip was said to be complete.
    pub ended: bool,
    /// Whether frames that were pushed got lost.
    pub broken: bool,
}

impl StreamCheck {
    pub fn new(tensors: TensorCheck, input: Shape) -> StreamCheck {
        StreamCheck { tensors, frame: Shape { frames: 1, ..input }, ended: false, broken: false }
    }

    pub fn intact(&self) -> Result<()> {
        if self.broken {
            return Err(Error::State("stream: a call failed, so frames are missing; open another stream".into()));
        }
        Ok(())
    }

    /// Checks frames that are pushed.
    pub fn push(&self, view: &View) -> Result<()> {
        if self.ended {
            return Err(Error::State(
                "frames: the clip was said to be complete; open another stream for the next".into(),
            ));
        }
        self.tensors.input(view)?;
        let (pushed, opened) = (view.shape().dims(), self.frame.dims());
        let name = ends(self.tensors.network.direction).0.name();
        [0, 1, 3, 4].into_iter().try_for_each(|axis| length(name, axis, pushed[axis], opened[axis], 1))
    }

    /// Checks where a pull writes.
    pub fn pull(&self, into: &Outputs) -> Result<()> {
        self.tensors.outputs(self.frame, into, false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::DType;
    use crate::model::families::seedvr2::Sizes;
    use crate::testing;

    fn network(direction: Direction) -> Network {
        let sizes = Sizes { channels: vec![16; 4], layers: 1, groups: 16, latent: 16, temporal_levels: 2 };
        testing::network(&sizes, direction)
    }

    /// Checks a tensor that a whole input of this shape is to become.
    fn check(direction: Direction, input: Shape, into: &View) -> Result<()> {
        let check = TensorCheck { network: Arc::new(network(direction)), places: vec![TensorDevice::Cpu] };
        check.outputs(input, &Outputs { output: *into, logvar: None, stream: None }, true)
    }

    fn view(shape: [u64; 5], dtype: DType) -> View {
        View::checked("t", std::ptr::without_provenance_mut(64), dtype, TensorDevice::Cpu, shape.into(), None, true)
            .unwrap()
    }

    fn decode(out: [u64; 5]) -> Result<()> {
        let input = Shape::new(1, 16, 3, 4, 5);
        check(Direction::Decode, input, &view(out, DType::U8))
    }

    #[test]
    fn decode_crops_to_the_size_the_host_gives() {
        for fits in [[1, 3, 9, 32, 40], [1, 3, 6, 25, 33]] {
            assert_eq!(decode(fits), Ok(()));
        }
        for (wrong, says) in [
            ([1, 3, 10, 32, 40], "T is 10, expected 6 to 9"),
            ([1, 3, 5, 32, 40], "T is 5, expected 6 to 9"),
            ([1, 3, 9, 24, 40], "H is 24, expected 25 to 32"),
            ([1, 3, 9, 32, 41], "W is 41, expected 33 to 40"),
            ([1, 1, 9, 32, 40], "C is 1, expected 3"),
        ] {
            assert!(decode(wrong).unwrap_err().to_string().contains(says), "{:?}", decode(wrong));
        }
    }

    #[test]
    fn a_single_latent_is_a_single_frame() {
        let input = Shape::new(1, 16, 1, 4, 5);
        let check = |t| check(Direction::Decode, input, &view([1, 3, t, 32, 40], DType::F32));
        assert_eq!(check(1), Ok(()));
        assert!(check(2).unwrap_err().to_string().contains("T is 2, expected 1"));
    }

    #[test]
    fn encode_takes_any_size_and_says_which_latent_it_makes() {
        let input = Shape::new(2, 3, 7, 33, 8);
        let check = |out| check(Direction::Encode, input, &view(out, DType::F16));
        assert_eq!(check([2, 16, 3, 5, 1]), Ok(()));
        assert!(check([2, 16, 2, 5, 1]).unwrap_err().to_string().contains("latent: T is 2, expected 3"));
        assert!(check([1, 16, 3, 5, 1]).unwrap_err().to_string().contains("B is 1, expected 2"));
    }
}
