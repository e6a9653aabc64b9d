//! Runs a plan on a backend: whole clips, streams, tiles, progress and cancel. Owns sessions, their memory and their
//! weights; must not know C.

mod check;
mod device_model;
mod fleet;
mod ledger;
mod nonfinite;
mod open_model;
mod precision;
mod ready_job;
mod runner;
mod search;
mod session;
mod settings;
mod stream;
mod weights;
mod workspace;

use fleet::FleetSession;
pub use ledger::Ledger;
use ledger::Sharing;
pub use open_model::OpenModel;
pub use settings::{Latent, Latents, Limit, OnNonFinite, PixelRange, Settings, Tiling};

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use crate::backend::cpu::{Cpu, CpuOptions};
use crate::backend::{self, Backend, DeviceAllocator, HostAllocator, HostStream};
use crate::error::{Error, Result};
use crate::ir::{DeviceProfile, Shape, TensorDevice, View};
use crate::model::{Checkpoint, Direction, Model, Network};
use crate::report::PlanReport;

/// How far a call has come, for the host's progress bar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    pub done: u64,
    /// 0 where the end is not known, as in a stream that is still being pushed.
    pub total: u64,
    /// What is being done: "plan", "load", "encode" or "decode".
    pub stage: &'static str,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogLevel {
    Debug,
    Info,
    Warning,
}

/// Where a call writes its log.
pub trait LogSink {
    fn log(&self, level: LogLevel, message: fmt::Arguments);
}

/// Nobody listens.
impl LogSink for () {
    fn log(&self, _: LogLevel, _: fmt::Arguments) {}
}

/// The host's side of a running call: two ways to stop it, both asked many times within a chunk of work, and its log.
pub struct Control<'a> {
    pub cancel: &'a AtomicBool,
    /// Called on the calling thread; `true` stops.
    pub progress: Option<&'a mut dyn FnMut(Progress) -> bool>,
    pub log: &'a dyn LogSink,
}

impl<'a> Control<'a> {
    /// Stopped by `cancel` alone, with a log that nobody reads.
    pub fn new(cancel: &'a AtomicBool) -> Control<'a> {
        Control { cancel, progress: None, log: &() }
    }

    fn warn(&self, message: fmt::Arguments) {
        self.log.log(LogLevel::Warning, message);
    }
}

/// Output frames of a clip: latent frames for encode, video frames for decode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClipRange {
    /// Input frames of the whole clip.
    pub clip_frames: u64,
    pub first: u64,
    /// `None`: to the end of the clip.
    pub count: Option<u64>,
}

/// Which frames of a clip come out.
#[derive(Debug, Clone, Copy)]
pub enum Extent {
    /// All of them.
    Clip,
    Range(ClipRange),
    /// All from frame `first` on, of a clip whose end is not known.
    Stream {
        first: u64,
    },
}

/// A job to be planned, or a stream to be opened, not checked yet.
#[derive(Debug, Clone, Copy)]
pub struct JobShape {
    pub direction: Direction,
    /// Of the whole clip that would go in: video for encode, latents for decode. The frames of a stream do not count,
    /// and a range names how many its clip has.
    pub input: Shape,
    pub extent: Extent,
}

/// The input frames that a range needs.
pub fn range_inputs(model: &Model, direction: Direction, range: ClipRange) -> Result<Range<u64>> {
    Ok(check::range(&Network::new(model, direction)?, range)?.inputs(range.clip_frames))
}

/// One call of encode or decode. Shapes, types and devices are checked by [`Session::run`].
#[derive(Clone, Copy)]
pub struct Call {
    pub direction: Direction,
    /// `None`: the whole clip. Otherwise the input is what the range needs.
    pub range: Option<ClipRange>,
    pub input: View,
    pub into: Outputs,
    /// The clip of the batch that the tensors begin with; 0 unless they are a part of it.
    pub first_clip: u64,
}

/// Where a call or a pull writes.
#[derive(Clone, Copy)]
pub struct Outputs {
    pub output: View,
    /// Where encode writes the log-variance, if the host wants it.
    pub logvar: Option<View>,
    /// The host's CUDA stream, for tensors on the device.
    pub stream: Option<HostStream>,
}

/// Bytes of memory a session holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// Device memory held now: weights, workspace and the state of streams. On the CPU this is host memory.
    pub now: u64,
    /// The most `now` has been.
    pub peak: u64,
    /// The part of `now` that is kept for the next call. `trim` frees it.
    pub reserved: u64,
    /// Pinned host memory: staging buffers, offloaded caches and weights. On the CPU the same as `now`.
    pub host: u64,
}

/// Where the timelines of a plan go, if somebody asks for them.
pub type Timelines<'a> = Option<&'a mut Vec<serde_json::Value>>;

/// What a trim frees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Trim {
    pub workspace: bool,
    pub weights: bool,
}

/// Computes with a model on one device, or on several that divide the work.
pub trait Session: Send {
    /// Takes effect with the next call; open streams keep the settings they were opened with.
    fn configure(&mut self, settings: Settings) -> Result<()>;
    /// `timelines`: gets the plan as a [timeline](crate::report::timeline) for each device that has a part.
    fn plan(&self, job: &JobShape, timelines: Timelines, cancel: &AtomicBool) -> Result<PlanReport>;
    /// Returns the plan that it ran by.
    fn run(&mut self, call: &Call, control: &mut Control) -> Result<PlanReport>;
    /// `job`: of a stream.
    fn open_stream(&mut self, job: &JobShape, control: &Control) -> Result<Box<dyn FrameStream>>;
    /// After a stream of it is closed.
    fn stream_closed(&mut self) {}
    /// What it holds, in figures that can be read while a call runs.
    fn ledger(&self) -> Arc<Ledger>;
    fn trim(&mut self, what: Trim);
}

/// A session on one device.
trait DeviceSession: Session {
    fn place(&self) -> TensorDevice;
    /// What its plans depend on, beside the job.
    fn plan_kind(&self) -> PlanKind;
    /// Whether `precision=auto` has become bf16.
    fn has_left_fp16(&self) -> bool;
    /// Makes `precision=auto` bf16 if it is fp16.
    fn leave_fp16(&mut self) -> Result<()>;
    /// Says whom it shares memory with.
    fn share(&mut self, with: Sharing);
}

/// Sessions of one kind have the same plan for a job.
#[derive(Debug, PartialEq)]
struct PlanKind {
    /// What its bits depend on, beside the input.
    arithmetic: String,
    profile: DeviceProfile,
    settings: Settings,
    /// Where the device's rates may be measured.
    tuned: Option<TensorDevice>,
    /// Of device and host memory, rounded: other programs take and free a little meanwhile.
    limits: [u64; 2],
}

/// What became of a pull.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pull {
    /// Frames were written, from the front.
    Written,
    /// Nothing can be written until more is pushed.
    NeedsInput,
    /// Everything has been pulled.
    Ended,
}

/// A clip of any length, in pieces.
pub trait FrameStream: Send {
    /// What it works by.
    fn plan(&self) -> PlanReport;
    /// Takes frames from the front and says how many. Fewer than offered, perhaps none: pull, then push the rest.
    /// `None` says that the clip is complete.
    fn push(&mut self, input: Option<&View>) -> Result<u64>;
    /// Works until `output` is full or more input is needed. `written` is the number of frames written, also when the
    /// call was cancelled; the next pull goes on from there.
    fn pull(&mut self, into: &Outputs, control: &mut Control, written: &mut u64) -> Result<Pull>;
}

/// An entry of a list of devices, as the host names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceName {
    /// The best there is.
    Auto,
    Place(TensorDevice),
    /// Every CUDA device that can be used.
    AllCuda,
}

/// Where memory comes from, on whatever device.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Allocators {
    pub host: HostAllocator,
    pub device: DeviceAllocator,
}

/// What is opened, and what with.
pub struct Opening<'a> {
    pub checkpoint: &'a Checkpoint,
    pub allocators: Allocators,
    pub settings: Settings,
}

/// Opens a checkpoint on one device, or on several that divide the work. The first call that needs weights loads them;
/// other sessions of the same file on the same device share them. `log` is told which devices `auto` passes over.
pub fn open(devices: &[DeviceName], opening: Opening, log: &dyn LogSink) -> Result<OpenModel> {
    let open = |place: TensorDevice| open_one(place, &opening);
    let sessions: Vec<Box<dyn DeviceSession>> = match devices {
        [DeviceName::Auto] => vec![first_that_opens(&backend::auto_devices(), open, log)?],
        _ => places(devices)?.into_iter().map(open).collect::<Result<_>>()?,
    };
    let places = sessions.iter().map(|session| session.place()).collect();
    let session: Box<dyn Session> = match <[_; 1]>::try_from(sessions) {
        Ok([only]) => only,
        Err(several) => Box::new(FleetSession::new(several, &opening)?),
    };
    Ok(OpenModel::new(opening, places, session))
}

/// A session on the first of these devices that can be opened. Why the last one cannot is the error.
fn first_that_opens<S>(
    places: &[TensorDevice],
    open: impl Fn(TensorDevice) -> Result<S>,
    log: &dyn LogSink,
) -> Result<S> {
    let Some((last, others)) = places.split_last() else {
        return Err(Error::Internal("auto means no device".into()));
    };
    for place in others {
        match open(*place) {
            Ok(opened) => return Ok(opened),
            Err(why) => log.log(LogLevel::Warning, format_args!("auto passes over {place}: {why}")),
        }
    }
    open(*last)
}

/// The devices that a list names.
fn places(devices: &[DeviceName]) -> Result<Vec<TensorDevice>> {
    let named = |device: &DeviceName| match *device {
        DeviceName::Auto => backend::auto_devices().into_iter().take(1).collect(),
        DeviceName::Place(place) => vec![place],
        DeviceName::AllCuda => backend::cuda_devices().into_iter().map(|device| device.place).collect(),
    };
    let places: Vec<_> = devices.iter().flat_map(named).collect();
    if places.is_empty() {
        return Err(Error::Device("device: \"cuda:*\", but there is no CUDA device that can be used here".into()));
    }
    Ok(places)
}

/// A session on one device, whose backend `make` makes.
fn session_of<B: Backend + 'static>(
    place: TensorDevice,
    opening: &Opening,
    make: impl Fn(&Settings) -> Result<B> + Send + 'static,
) -> Result<Box<dyn DeviceSession>> {
    Ok(Box::new(session::Engine::open(place, opening, Box::new(make))?))
}

fn open_one(place: TensorDevice, opening: &Opening) -> Result<Box<dyn DeviceSession>> {
    let allocators = opening.allocators.clone();
    match place {
        #[cfg(feature = "cuda")]
        TensorDevice::Cuda(index) => {
            let named = |why: Error| Error::Device(format!("device: {place} cannot be used: {why}"));
            backend::cuda::ready().map_err(named)?;
            session_of(place, opening, move |settings| {
                backend::cuda::Cuda::new(index, settings.on_gpu(), allocators.device)
            })
        }
        #[cfg(feature = "vulkan")]
        TensorDevice::Vulkan(index) => session_of(place, opening, move |settings| {
            backend::vulkan::Vulkan::new(index, settings.on_gpu(), allocators.device)
                .map_err(|why| why.map_device(|text| format!("device: {place} cannot be used: {text}")))
        }),
        TensorDevice::Cpu => session_of(place, opening, move |settings| {
            Cpu::new(CpuOptions {
                threads: settings.threads.map(|n| n as usize),
                instructions: settings.instructions,
                precision: settings.precision,
                allocator: allocators.host,
            })
        }),
        #[cfg(not(all(feature = "cuda", feature = "vulkan")))]
        _ => Err(Error::Device(format!("device: there is no {place}; this library was built without support for it"))),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::ffi::c_void;
    use std::ptr::null_mut;

    use super::*;
    use crate::backend::Callbacks;
    use crate::node;
    use crate::testing::golden;

    #[derive(Default)]
    struct Lines(RefCell<Vec<String>>);

    impl LogSink for Lines {
        fn log(&self, _: LogLevel, message: fmt::Arguments) {
            self.0.borrow_mut().push(message.to_string());
        }
    }

    #[test]
    fn a_device_that_cannot_be_opened_is_passed_over_and_named() {
        let places = [TensorDevice::Vulkan(1), TensorDevice::Cpu];
        let failing = |failing: &'static [TensorDevice]| {
            move |place| match failing.contains(&place) {
                false => Ok(place),
                true => Err(Error::Device(format!("{place} is broken"))),
            }
        };
        let lines = Lines::default();
        assert_eq!(first_that_opens(&places, failing(&[]), &lines), Ok(TensorDevice::Vulkan(1)));
        assert!(lines.0.borrow().is_empty());
        assert_eq!(first_that_opens(&places, failing(&[TensorDevice::Vulkan(1)]), &lines), Ok(TensorDevice::Cpu));
        assert_eq!(*lines.0.borrow(), ["auto passes over vulkan:1: vulkan:1 is broken"]);
        let none = failing(&[TensorDevice::Vulkan(1), TensorDevice::Cpu]);
        assert_eq!(first_that_opens(&places, none, &lines), Err(Error::Device("cpu is broken".into())));
    }

    unsafe extern "C" fn take(_: *mut c_void, _: i32, _: u64) -> *mut c_void {
        null_mut()
    }

    unsafe extern "C" fn give_back(_: *mut c_void, _: i32, _: *mut c_void, _: u64) {}

    /// Devices of Vulkan take no memory from a host.
    #[test]
    fn a_host_that_gives_device_memory_gets_the_cpu() {
        let device = DeviceAllocator::Host(Callbacks { alloc: take, free: give_back, user: null_mut() });
        let allocators = Allocators { device, ..Allocators::default() };
        let checkpoint = Checkpoint::open(&golden("small")).unwrap();
        let opening = Opening { checkpoint: &checkpoint, allocators, settings: node::defaults() };
        let open = |place| open_one(place, &opening);
        let lines = Lines::default();
        let session = first_that_opens(&[TensorDevice::Vulkan(0), TensorDevice::Cpu], open, &lines).unwrap();
        assert_eq!((session.place(), lines.0.borrow().len()), (TensorDevice::Cpu, 1));
        assert!(lines.0.borrow()[0].contains("vulkan:0"), "{:?}", lines.0.borrow());
    }
}
