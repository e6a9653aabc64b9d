//! A member that fails: the others do its part, with the same bits.

use std::cell::RefCell;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::sleep;
use std::time::Duration;

use super::*;
use crate::error::Error;
use crate::exec::ledger::Sharing;
use crate::exec::session::tests::{Tensors, opening, rounding};
use crate::exec::{Limit, LogLevel, LogSink, Outputs, PixelRange, PlanKind, Progress, open_one};
use crate::ir::{DType, TensorDevice, View};
use crate::model::checkpoint::testing::TemporaryFile;
use crate::model::{Checkpoint, Direction};
use crate::node;
use crate::report::Part;
use crate::testing::{golden, overflowing};

/// How many runs have begun, and ended well.
#[derive(Default)]
struct Runs {
    begun: AtomicU64,
    ended: AtomicU64,
    /// From which settings on the member refuses them, counted from 1; 0 for none.
    refuses: AtomicU64,
}

/// A real session that fails after so many progress calls of each run. It takes a while to end a run, as one does that
/// copies its output.
struct Failing {
    inner: Box<dyn DeviceSession>,
    after: u64,
    error: Error,
    runs: Arc<Runs>,
}

impl DeviceSession for Failing {
    fn place(&self) -> TensorDevice {
        self.inner.place()
    }
    fn plan_kind(&self) -> PlanKind {
        self.inner.plan_kind()
    }
    fn has_left_fp16(&self) -> bool {
        self.inner.has_left_fp16()
    }
    fn leave_fp16(&mut self) -> Result<()> {
        self.inner.leave_fp16()
    }
    fn share(&mut self, with: Sharing) {
        self.inner.share(with);
    }
}

impl Session for Failing {
    fn configure(&mut self, settings: Settings) -> Result<()> {
        match self.runs.refuses.load(Relaxed) {
            0 => self.inner.configure(settings),
            1 => Err(Error::Device("the GPU takes no settings".into())),
            left => {
                self.runs.refuses.store(left - 1, Relaxed);
                self.inner.configure(settings)
            }
        }
    }
    fn plan(&self, job: &JobShape, timelines: Timelines, cancel: &AtomicBool) -> Result<PlanReport> {
        self.inner.plan(job, timelines, cancel)
    }
    fn run(&mut self, call: &Call, control: &mut Control) -> Result<PlanReport> {
        self.runs.begun.fetch_add(1, Relaxed);
        // Its own flag: stopping this session stops no other.
        let (cancel, mut calls) = (AtomicBool::new(false), 0);
        let mut progress = |told: Progress| {
            calls += 1;
            control.progress.as_mut().is_some_and(|tell| tell(told)) || calls > self.after
        };
        let mut own = Control { cancel: &cancel, progress: Some(&mut progress), log: control.log };
        let report = self.inner.run(call, &mut own).map_err(|_| self.error.clone())?;
        sleep(Duration::from_millis(100));
        self.runs.ended.fetch_add(1, Relaxed);
        Ok(report)
    }
    fn open_stream(&mut self, job: &JobShape, control: &Control) -> Result<Box<dyn FrameStream>> {
        self.inner.open_stream(job, control)
    }
    fn ledger(&self) -> Arc<Ledger> {
        self.inner.ledger()
    }
    fn trim(&mut self, what: Trim) {
        self.inner.trim(what);
    }
}

/// Two members, of which the first fails.
fn fleet(after: u64, error: Error) -> (FleetSession, Arc<Runs>) {
    let checkpoint = Checkpoint::open(&golden("small")).unwrap();
    let runs = Arc::new(Runs::default());
    let failing = Failing { inner: member(&checkpoint), after, error, runs: Arc::clone(&runs) };
    let members: Vec<Box<dyn DeviceSession>> = vec![Box::new(failing), member(&checkpoint)];
    (FleetSession::new(members, &opening(&checkpoint, node::defaults())).unwrap(), runs)
}

fn member(checkpoint: &Checkpoint) -> Box<dyn DeviceSession> {
    open_one(TensorDevice::Cpu, &opening(checkpoint, node::defaults())).unwrap()
}

const LATENT: [u64; 5] = [1, 16, 33, 2, 2];
const VIDEO: [u64; 5] = [1, 3, 129, 16, 16];

/// Progress and log of a call.
#[derive(Default)]
struct Heard {
    progress: Vec<(u64, u64)>,
    /// Runs of the first member, and how many had ended whenever the host was told of the end.
    runs: Arc<Runs>,
    ended: Vec<u64>,
    warnings: RefCell<Vec<String>>,
}

struct Warnings<'a>(&'a RefCell<Vec<String>>);

impl LogSink for Warnings<'_> {
    fn log(&self, level: LogLevel, message: fmt::Arguments) {
        if level == LogLevel::Warning {
            self.0.borrow_mut().push(message.to_string());
        }
    }
}

fn decode(session: &mut dyn Session, heard: &mut Heard) -> Result<(Vec<f32>, PlanReport)> {
    let mut latent: Vec<f32> = (0..16 * 33 * 4).map(|i| (i * 37 % 101) as f32 / 50.0 - 1.0).collect();
    let mut video = vec![f32::NAN; 3 * 129 * 256];
    let view = |data: &mut [f32], shape: [u64; 5]| {
        let data = data.as_mut_ptr().cast();
        View::checked("t", data, DType::F32, TensorDevice::Cpu, shape.into(), None, true).unwrap()
    };
    let (input, output) = (view(&mut latent, LATENT), view(&mut video, VIDEO));
    let direction = Direction::Decode;
    let call =
        Call { direction, range: None, input, into: Outputs { output, logvar: None, stream: None }, first_clip: 0 };
    let (cancel, log) = (AtomicBool::new(false), Warnings(&heard.warnings));
    let mut tell = |progress: Progress| {
        if progress.stage == "decode" {
            heard.progress.push((progress.done, progress.total));
            if progress.done == progress.total {
                heard.ended.push(heard.runs.ended.load(Relaxed));
            }
        }
        false
    };
    let mut control = Control { cancel: &cancel, progress: Some(&mut tell), log: &log };
    let report = session.run(&call, &mut control)?;
    Ok((video, report))
}

fn expected() -> Vec<f32> {
    let mut one = member(&Checkpoint::open(&golden("small")).unwrap());
    decode(&mut *one, &mut Heard::default()).unwrap().0
}

#[test]
fn the_others_take_the_part_of_a_device_that_is_lost() {
    let (mut session, runs) = fleet(25, Error::Device("the GPU is lost".into()));
    let expected = expected();
    let mut heard = Heard::default();
    let (video, report) = decode(&mut session, &mut heard).unwrap();
    assert!(video == expected, "the bits of one device");
    assert_eq!(heard.warnings.borrow().len(), 1, "{:?}", heard.warnings.borrow());
    assert!(heard.warnings.borrow()[0].contains("cpu failed") && heard.warnings.borrow()[0].contains("is lost"));
    assert!(heard.progress.is_sorted() && heard.progress.windows(2).all(|pair| pair[0].1 == pair[1].1));
    assert!(heard.progress.last().is_some_and(|(done, total)| done == total), "{:?}", heard.progress.last());
    let devices = report.division.unwrap().devices;
    assert!(devices[0].parts.is_empty() && devices[0].unused.is_some());
    let frames = devices[1].parts.iter().map(Part::frame_count).sum::<u64>();
    assert_eq!(frames, 129);
    // A lost device is not tried again.
    assert_eq!(runs.begun.load(Relaxed), 1);
    assert!(decode(&mut session, &mut Heard::default()).unwrap().0 == expected);
    assert_eq!(runs.begun.load(Relaxed), 1);
}

#[test]
fn the_host_is_told_of_the_end_once_all_parts_are_written() {
    let (mut session, runs) = fleet(u64::MAX, Error::Internal("a run that should not fail".into()));
    let mut heard = Heard { runs, ..Heard::default() };
    decode(&mut session, &mut heard).unwrap();
    assert_eq!(heard.ended, [1]);
}

#[test]
fn a_device_that_ran_out_of_memory_is_tried_again() {
    let (mut session, runs) = fleet(2, Error::Memory("no memory left".into()));
    let expected = expected();
    for run in 1..=2 {
        assert!(decode(&mut session, &mut Heard::default()).unwrap().0 == expected);
        assert_eq!(runs.begun.load(Relaxed), run);
    }
}

#[test]
fn a_failure_that_no_device_can_make_good_ends_the_call() {
    let (mut session, _) = fleet(3, Error::Checkpoint("the file has changed".into()));
    let failed = decode(&mut session, &mut Heard::default()).map(|_| ()).unwrap_err();
    assert_eq!(failed, Error::Checkpoint("the file has changed".into()));
}

/// Two members that round as fp16 does. The first has a checkpoint that overflows in a tensor, the second has not.
struct RoundingFleet {
    session: FleetSession,
    /// Of the second member.
    runs: Arc<Runs>,
    _file: TemporaryFile,
}

fn rounding_fleet(tensor: &str) -> RoundingFleet {
    let (file, runs) = (overflowing("small", tensor), Arc::new(Runs::default()));
    let error = Error::Internal("a run that should not fail".into());
    let second =
        Failing { inner: Box::new(rounding(&golden("small"))), after: u64::MAX, error, runs: Arc::clone(&runs) };
    let members: Vec<Box<dyn DeviceSession>> = vec![Box::new(rounding(&file.0)), Box::new(second)];
    // So little that a stream has several rounds.
    let settings = Settings { host_memory_limit: Limit::Bytes(200 << 10), ..node::defaults() };
    let checkpoint = Checkpoint::open(&file.0).unwrap();
    let session = FleetSession::new(members, &opening(&checkpoint, settings)).unwrap();
    RoundingFleet { session, runs, _file: file }
}

fn arithmetics(session: &FleetSession) -> Vec<String> {
    session.fleet.lock().members.iter().map(|member| member.session.plan_kind().arithmetic).collect()
}

const DECODER: &str = "decoder.up_blocks.2.resnets.0.conv2.weight";
const ENCODER: &str = "encoder.down_blocks.1.resnets.0.conv2.weight";

#[test]
fn all_members_repeat_a_call_that_overflows_on_one() {
    let RoundingFleet { mut session, runs, _file } = rounding_fleet(DECODER);
    let mut decode = Tensors::new(Direction::Decode, LATENT, VIDEO);
    let (video, report, warnings) = decode.run(&mut session).unwrap();
    assert!(video.iter().all(|value| value.is_finite()));
    assert!(arithmetics(&session).iter().all(|kind| kind.ends_with("bf16")), "{:?}", arithmetics(&session));
    assert_eq!(runs.begun.load(Relaxed), 2, "its part of the call, in fp16 and in bf16");
    assert!(report.to_string().contains("bf16, because values overflow in fp16"), "{report}");
    assert!(warnings.iter().any(|text| text.contains("repeated in bf16")), "{warnings:?}");
    let (_, _, warnings) = decode.run(&mut session).unwrap();
    assert!(runs.begun.load(Relaxed) == 3 && warnings.is_empty(), "{warnings:?}");
}

#[test]
fn a_stream_of_several_members_has_frames_of_one_precision() {
    let RoundingFleet { mut session, _file, .. } = rounding_fleet(DECODER);
    let mut decode = Tensors::new(Direction::Decode, LATENT, VIDEO);
    let (ended, frames) = decode.stream(&mut session);
    let Err(Error::Tensor(why)) = ended else { panic!("{ended:?}") };
    assert!(why.contains("precision=bf16") && frames == 0, "{frames} frames, {why}");
    // The next one begins with bf16 on all members.
    let (ended, frames) = decode.stream(&mut session);
    assert!(ended.is_ok() && frames > 0, "{ended:?}");
    assert!(arithmetics(&session).iter().all(|kind| kind.ends_with("bf16")), "{:?}", arithmetics(&session));
}

#[test]
fn a_stream_ends_if_its_members_have_left_fp16_meanwhile() {
    let RoundingFleet { mut session, _file, .. } = rounding_fleet(ENCODER);
    let (mut decode, cancel) = (Tensors::new(Direction::Decode, LATENT, VIDEO), AtomicBool::new(false));
    let control = Control::new(&cancel);
    let (direction, extent) = (Direction::Decode, Extent::Stream { first: 0 });
    let mut stream = session.open_stream(&JobShape { direction, input: LATENT.into(), extent }, &control).unwrap();
    let (waits, frames) = decode.feed(&mut *stream, false);
    assert!(waits.is_ok() && frames > 0, "the decoder does not overflow: {waits:?}");
    Tensors::new(Direction::Encode, VIDEO, LATENT).run(&mut session).unwrap();
    let (ended, frames) = decode.feed(&mut *stream, true);
    let Err(Error::Tensor(why)) = ended else { panic!("{ended:?}") };
    assert!(why.contains("precision=bf16") && frames == 0, "{frames} frames, {why}");
}

#[test]
fn a_stream_leaves_its_settings_to_nobody() {
    let (mut session, runs) = fleet(u64::MAX, Error::Internal("a run that should not fail".into()));
    let (control, direction) = (AtomicBool::new(false), Direction::Decode);
    let job = JobShape { direction, input: LATENT.into(), extent: Extent::Stream { first: 0 } };
    let mut stream = session.open_stream(&job, &Control::new(&control)).unwrap();
    session.configure(Settings { pixel_range: PixelRange::Unit, ..node::defaults() }).unwrap();
    // The first member takes those of the stream, and no others.
    runs.refuses.store(2, Relaxed);
    let (ended, frames) = Tensors::new(direction, LATENT, VIDEO).feed(&mut *stream, true);
    assert!(ended.is_ok() && frames == 129, "{ended:?}");
    let refused = decode(&mut session, &mut Heard::default()).map(|_| ()).unwrap_err();
    assert!(refused.to_string().contains("takes no settings"), "{refused}");
    runs.refuses.store(0, Relaxed);
    let (found, _) = decode(&mut session, &mut Heard::default()).unwrap();
    assert!(found.iter().zip(&expected()).all(|(unit, signed)| (2.0 * unit - 1.0 - signed).abs() < 1e-4));
}

#[test]
fn settings_that_a_member_refuses_change_nothing() {
    let (mut session, runs) = fleet(u64::MAX, Error::Internal("a run that should not fail".into()));
    let (expected, _) = decode(&mut session, &mut Heard::default()).unwrap();
    // The first member takes them.
    session.fleet.lock().members.swap(0, 1);
    runs.refuses.store(1, Relaxed);
    session.configure(Settings { pixel_range: PixelRange::Unit, ..node::defaults() }).unwrap_err();
    runs.refuses.store(0, Relaxed);
    assert!(decode(&mut session, &mut Heard::default()).unwrap().0 == expected);
}

/// Behind more frames than a clip that is passed whole can have.
#[test]
fn a_stream_may_begin_anywhere() {
    for (direction, input, output) in [(Direction::Decode, LATENT, VIDEO), (Direction::Encode, VIDEO, LATENT)] {
        let (mut session, _) = fleet(u64::MAX, Error::Internal("a run that should not fail".into()));
        let mut one = member(&Checkpoint::open(&golden("small")).unwrap());
        let mut tensors = Tensors::new(direction, input, output);
        let first = 1 << 36;
        let (expected, frames) = tensors.stream_from(first, &mut *one);
        assert!(frames > 0 && expected.iter().all(|value| value.is_finite()));
        assert!(tensors.stream_from(first, &mut session) == (expected, frames), "{direction:?}");
    }
}
