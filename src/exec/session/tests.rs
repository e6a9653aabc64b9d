//! Whole sessions on a GPU in host memory, whose queues run in random order. Within every limit the bits are those of
//! a run with all memory, and a wait that is left out changes them.

use std::cell::RefCell;
use std::fmt;
use std::path::Path;

use super::*;
use crate::backend::gpu::tests::host::{HostGpu, WaitSite};
use crate::backend::{HostStream, Precision};
use crate::exec::settings::{Latents, Tiling};
use crate::exec::{Allocators, Extent, Limit, LogLevel, LogSink, Outputs, Progress, Pull};
use crate::ir::{Affine, CacheFormat, ChannelMaps, DType, View};
use crate::model::Checkpoint;
use crate::node;
use crate::testing::{golden, overflowing};

/// One direction of a model, and the shapes of its tensors. High enough for several bands.
#[derive(Clone, Copy)]
struct Case {
    model: &'static str,
    direction: Direction,
    input: [u64; 5],
    output: [u64; 5],
    cache: CacheFormat,
    host_limit: u64,
}

const CLIP: [[u64; 5]; 2] = [[1, 3, 9, 80, 24], [1, 16, 3, 10, 3]];
const STILL: [[u64; 5]; 2] = [[1, 3, 1, 144, 40], [1, 16, 1, 18, 5]];

const fn decode([output, input]: [[u64; 5]; 2], cache: CacheFormat) -> Case {
    Case { model: "small", direction: Direction::Decode, input, output, cache, host_limit: 1 << 30 }
}

const fn encode([input, output]: [[u64; 5]; 2], cache: CacheFormat) -> Case {
    Case { model: "small", direction: Direction::Encode, input, output, cache, host_limit: 1 << 30 }
}

/// What a run gave, and where it waited.
struct Ran {
    bits: Vec<u32>,
    bytes: u64,
    text: String,
    sites: Vec<WaitSite>,
}

pub(in crate::exec) fn opening(checkpoint: &Checkpoint, settings: Settings) -> Opening<'_> {
    Opening { checkpoint, allocators: Allocators::default(), settings }
}

/// `limit`: of device memory; `None` for all of it.
fn run(case: &Case, limit: Option<u64>, seed: u64, dropped: Option<WaitSite>) -> Result<Ran> {
    let mut settings = node::defaults();
    settings.memory_limit = vec![limit.map_or(Limit::Auto, Limit::Bytes)];
    settings.host_memory_limit = Limit::Bytes(case.host_limit);
    settings.cache = case.cache;
    settings.allow_tiles = false;
    let place = TensorDevice::Cuda(0);
    let make = Box::new(move |_: &Settings| HostGpu::new(seed, dropped));
    let checkpoint = Checkpoint::open(&golden(case.model))?;
    let mut engine = Engine::open(place, &opening(&checkpoint, settings), make)?;
    let count = |shape: [u64; 5]| shape.iter().product::<u64>() as usize;
    let mut input: Vec<f32> = (0..count(case.input)).map(|i| (i * 37 % 101) as f32 / 50.0 - 1.0).collect();
    let mut output = vec![0.0_f32; count(case.output)];
    let view = |data: &mut [f32], shape: [u64; 5]| {
        let data = data.as_mut_ptr().cast();
        View::checked("t", data, DType::F32, TensorDevice::Cpu, shape.into(), None, true).unwrap()
    };
    let from = view(&mut input, case.input);
    let into = Outputs { output: view(&mut output, case.output), logvar: None, stream: None };
    let (direction, cancel) = (case.direction, AtomicBool::new(false));
    let call = Call { direction, range: None, input: from, into, first_clip: 0 };
    let report = engine.run(&call, &mut Control::new(&cancel))?;
    assert_eq!((report.input, report.output), (case.input.into(), case.output.into()));
    let bits = output.iter().map(|value| value.to_bits()).collect();
    Ok(Ran { bits, bytes: report.device_bytes, text: report.to_string(), sites: engine.on.device.wait_sites() })
}

const CASES: [Case; 4] = [
    decode(CLIP, CacheFormat::Exact),
    encode(CLIP, CacheFormat::Exact),
    decode(STILL, CacheFormat::Exact),
    decode(CLIP, CacheFormat::U8),
];

/// Models with shortcuts around levels: of video, with patches of pixels, and of images.
const AROUND_LEVELS: [Case; 4] = [
    Case { model: "families/wan22", ..decode([[1, 3, 9, 80, 48], [1, 48, 3, 5, 3]], CacheFormat::Exact) },
    Case { model: "families/wan22", ..encode([[1, 3, 9, 80, 48], [1, 48, 3, 5, 3]], CacheFormat::Exact) },
    Case { model: "families/qwen21", ..decode([[1, 4, 1, 144, 48], [1, 64, 1, 9, 3]], CacheFormat::Exact) },
    Case { model: "families/qwen21", ..encode([[1, 4, 1, 144, 48], [1, 64, 1, 9, 3]], CacheFormat::Exact) },
];

/// The run with all memory, and runs within less and less, down to the least.
fn within_limits(case: &Case, seed: u64, dropped: Option<WaitSite>) -> (Ran, Vec<Ran>) {
    let whole = run(case, None, 1, None).unwrap();
    let limits = [75, 60, 42, 30, 25].map(|percent| whole.bytes * percent / 100);
    let runs = limits.iter().filter_map(|limit| match run(case, Some(*limit), seed, dropped) {
        Ok(found) => Some(found),
        Err(Error::Memory(_)) => None,
        Err(why) => panic!("{why}"),
    });
    let runs = runs.collect();
    (whole, runs)
}

#[test]
fn every_limit_gives_the_bits_of_a_run_with_all_memory() {
    let mut texts = String::new();
    for (seed, case) in (2..).zip(CASES.iter().chain(&AROUND_LEVELS)) {
        let (whole, runs) = within_limits(case, seed, None);
        assert!(whole.bits.iter().all(|bits| f32::from_bits(*bits).is_finite()));
        assert!(!runs.is_empty(), "no limit of {} {:?}", case.model, case.direction);
        for found in runs {
            assert!(found.bits == whole.bits, "{:?}: {}", case.direction, found.text);
            texts += &found.text;
        }
    }
    for used in ["offloaded frames", "offloaded weights"] {
        assert!(texts.contains(used), "{used} in {texts}");
    }
}

/// Bands and staging have a test of their own in `backend/gpu`.
#[test]
fn a_wait_for_weights_that_is_left_out_changes_bits() {
    let case = &CASES[1];
    let right = run(case, None, 1, None).unwrap();
    let limit = Some(right.bytes * 42 / 100);
    let mut sites: Vec<WaitSite> = run(case, limit, 1, None).unwrap().sites;
    sites.retain(|site| site.0.ends_with("staging.rs"));
    let own: Vec<WaitSite> = run(&CASES[1], None, 1, None).unwrap().sites;
    sites.retain(|site| !own.contains(site));
    assert_eq!(sites.len(), 2, "before weights are fetched, and before they are used: {sites:?}");
    for site in sites {
        let shows = |seed: u64| run(case, limit, seed, Some(site)).unwrap().bits != right.bits;
        assert!((2..12).any(shows), "{site:?}");
    }
}

/// A handle with `precision=auto` on a GPU that rounds as fp16 does, and as bf16 where it is told to.
pub(in crate::exec) fn rounding(path: &Path) -> Engine<HostGpu> {
    let checkpoint = Checkpoint::open(path).unwrap();
    let make = Box::new(|settings: &Settings| HostGpu::new(1, None).map(|gpu| gpu.rounding(settings.on_gpu())));
    Engine::open(TensorDevice::Cuda(0), &opening(&checkpoint, node::defaults()), make).unwrap()
}

/// Tensors of a call, in f32.
pub(in crate::exec) struct Tensors {
    direction: Direction,
    input: (Vec<f32>, [u64; 5]),
    output: (Vec<f32>, [u64; 5]),
}

impl Tensors {
    pub fn new(direction: Direction, input: [u64; 5], output: [u64; 5]) -> Tensors {
        let count = |shape: [u64; 5]| shape.iter().product::<u64>() as usize;
        let values = (0..count(input)).map(|i| (i * 37 % 101) as f32 / 50.0 - 1.0).collect();
        Tensors { direction, input: (values, input), output: (vec![0.0; count(output)], output) }
    }

    fn view(tensor: &mut (Vec<f32>, [u64; 5])) -> View {
        Self::view_on(TensorDevice::Cpu, tensor)
    }

    fn view_on(device: TensorDevice, (data, shape): &mut (Vec<f32>, [u64; 5])) -> View {
        let data = data.as_mut_ptr().cast();
        View::checked("t", data, DType::F32, device, (*shape).into(), None, true).unwrap()
    }

    /// A call with tensors on the device, on a stream of the host's. Its work runs later.
    fn queue(&mut self, session: &mut dyn Session) -> Result<PlanReport> {
        let [input, output] = [&mut self.input, &mut self.output].map(|t| Self::view_on(TensorDevice::Cuda(0), t));
        let into = Outputs { output, logvar: None, stream: Some(HostStream(std::ptr::null_mut())) };
        let call = Call { direction: self.direction, range: None, input, into, first_clip: 0 };
        session.run(&call, &mut Control::new(&AtomicBool::new(false)))
    }

    /// A stream from a frame on, with all of the input. Its output, and how many frames it has.
    pub fn stream_from(&mut self, first: u64, session: &mut dyn Session) -> (Vec<f32>, u64) {
        let (direction, extent) = (self.direction, Extent::Stream { first });
        let job = JobShape { direction, input: self.input.1.into(), extent };
        let mut stream = session.open_stream(&job, &Control::new(&AtomicBool::new(false))).unwrap();
        self.output.0.fill(0.0);
        let (ended, frames) = self.feed(&mut *stream, true);
        assert_eq!(ended, Ok(Pull::Ended));
        (self.output.0.clone(), frames)
    }

    /// What came out, its plan, and the warnings.
    pub fn run(&mut self, session: &mut dyn Session) -> Result<(Vec<f32>, PlanReport, Vec<String>)> {
        let (from, output, direction) = (Self::view(&mut self.input), Self::view(&mut self.output), self.direction);
        let into = Outputs { output, logvar: None, stream: None };
        let call = Call { direction, range: None, input: from, into, first_clip: 0 };
        let (cancel, warnings) = (AtomicBool::new(false), Warnings::default());
        let mut control = Control { log: &warnings, ..Control::new(&cancel) };
        let report = session.run(&call, &mut control)?;
        Ok((self.output.0.clone(), report, warnings.0.into_inner()))
    }

    /// A stream that gets all of the input. How it ends, and how many frames came out.
    pub fn stream(&mut self, session: &mut dyn Session) -> (Result<Pull>, u64) {
        let cancel = AtomicBool::new(false);
        let extent = Extent::Stream { first: 0 };
        let job = JobShape { direction: self.direction, input: self.input.1.into(), extent };
        let mut stream = session.open_stream(&job, &Control::new(&cancel)).unwrap();
        self.feed(&mut *stream, true)
    }

    /// Pushes all of the input into a stream, and its end if that `ends` it. Pulls until it waits for more, is at its end
    /// or fails. The output has the frames from the first on, as far as it has room.
    pub fn feed(&mut self, stream: &mut dyn FrameStream, ends: bool) -> (Result<Pull>, u64) {
        let (cancel, mut frames, mut pushed) = (AtomicBool::new(false), 0, 0);
        let (from, into) = (Self::view(&mut self.input), Self::view(&mut self.output));
        loop {
            if pushed < from.shape().frames {
                pushed += stream.push(Some(&from.frames(pushed..from.shape().frames))).unwrap();
            }
            if ends && pushed == from.shape().frames {
                stream.push(None).unwrap();
            }
            let mut written = 0;
            let (at, room) = (frames, into.shape().frames);
            let output = if at < room { into.frames(at..room) } else { into };
            let outputs = Outputs { output, logvar: None, stream: None };
            let pulled = stream.pull(&outputs, &mut Control::new(&cancel), &mut written);
            frames += written;
            match pulled {
                Ok(Pull::Written) => {}
                Ok(Pull::NeedsInput) if pushed < from.shape().frames => {}
                ended => return (ended, frames),
            }
        }
    }
}

#[derive(Default)]
struct Warnings(RefCell<Vec<String>>);

impl LogSink for Warnings {
    fn log(&self, level: LogLevel, message: fmt::Arguments) {
        if level == LogLevel::Warning {
            self.0.borrow_mut().push(message.to_string());
        }
    }
}

/// Models, tensors whose layer overflows in fp16, and a decode: in a residual block, and at the end only.
const OVERFLOWS: [(&str, &str, [[u64; 5]; 2]); 4] = [
    ("small", "decoder.up_blocks.2.resnets.0.conv2.weight", [[1, 16, 3, 3, 2], [1, 3, 9, 24, 16]]),
    ("small", "decoder.conv_out.weight", [[1, 16, 3, 3, 2], [1, 3, 9, 24, 16]]),
    ("families/flux", "decoder.up.2.block.1.conv2.weight", [[2, 16, 1, 3, 2], [2, 3, 1, 24, 16]]),
    ("families/flux", "decoder.conv_out.weight", [[2, 16, 1, 3, 2], [2, 3, 1, 24, 16]]),
];

#[test]
fn a_call_that_overflows_in_fp16_is_repeated_in_bf16_and_the_handle_stays_with_it() {
    for (model, tensor, [latent, video]) in OVERFLOWS {
        let file = overflowing(model, tensor);
        let mut decode = Tensors::new(Direction::Decode, latent, video);
        let job = JobShape { direction: Direction::Decode, input: latent.into(), extent: Extent::Clip };
        let mut asked = rounding(&file.0);
        let bf16 = Settings { precision: Some(Precision::Bf16), ..node::defaults() };
        asked.configure(bf16).unwrap();
        let (expected, _, warnings) = decode.run(&mut asked).unwrap();
        assert!(expected.iter().all(|value| value.is_finite()) && warnings.is_empty(), "{tensor}: {warnings:?}");

        let mut auto = rounding(&file.0);
        let planned = |auto: &Engine<HostGpu>| auto.plan(&job, None, &AtomicBool::new(false)).unwrap().to_string();
        assert!(planned(&auto).contains("fp16"), "{}", planned(&auto));
        let (found, report, warnings) = decode.run(&mut auto).unwrap();
        assert!(found == expected, "{tensor}: the bits of precision=bf16");
        assert!(warnings.len() == 1 && warnings[0].contains("repeated in bf16"), "{tensor}: {warnings:?}");
        for text in [report.to_string(), planned(&auto)] {
            assert!(text.contains("bf16, because values overflow in fp16"), "{tensor}: {text}");
        }
        let (again, _, warnings) = decode.run(&mut auto).unwrap();
        assert!(again == expected && warnings.is_empty(), "{tensor}: {warnings:?}");
        auto.configure(node::defaults()).unwrap();
        assert!(auto.has_left_fp16(), "{tensor}: also after it is configured");
    }
}

#[test]
fn a_handle_that_is_told_fp16_keeps_it() {
    let (model, tensor, [latent, video]) = OVERFLOWS[0];
    let file = overflowing(model, tensor);
    let mut told = rounding(&file.0);
    told.configure(Settings { precision: Some(Precision::Fp16), ..node::defaults() }).unwrap();
    let (found, _, warnings) = Tensors::new(Direction::Decode, latent, video).run(&mut told).unwrap();
    assert!(found.iter().all(|value| !value.is_finite()));
    assert!(warnings.len() == 1 && warnings[0].contains("try bf16"), "{warnings:?}");
}

#[test]
fn a_stream_that_overflows_in_fp16_ends_before_the_frame_is_handed_out() {
    for (model, tensor, [latent, video]) in OVERFLOWS {
        let file = overflowing(model, tensor);
        let mut decode = Tensors::new(Direction::Decode, latent, video);
        let mut handle = rounding(&file.0);
        let (ended, frames) = decode.stream(&mut handle);
        let Err(Error::Tensor(why)) = ended else { panic!("{tensor}: {ended:?}") };
        assert!(why.contains("overflow in fp16") && why.contains("precision=bf16"), "{why}");
        assert_eq!(frames, 0, "{tensor}");
        handle.configure(Settings { precision: Some(Precision::Bf16), ..node::defaults() }).unwrap();
        let (ended, frames) = decode.stream(&mut handle);
        assert!(ended.is_ok() && frames > 0, "{tensor}: {ended:?}");
    }
}

/// What became of a pull.
struct Pulled {
    ended: Result<Pull>,
    frames: u64,
    was_cancelled: bool,
}

/// The first pull of a stream, cancelled after so many progress calls.
fn cancelled_pull(tensors: &mut Tensors, handle: &mut dyn Session, calls: u64) -> Pulled {
    let (cancel, extent) = (AtomicBool::new(false), Extent::Stream { first: 0 });
    let job = JobShape { direction: tensors.direction, input: tensors.input.1.into(), extent };
    let mut stream = handle.open_stream(&job, &Control::new(&cancel)).unwrap();
    stream.push(Some(&Tensors::view(&mut tensors.input))).unwrap();
    let outputs = Outputs { output: Tensors::view(&mut tensors.output), logvar: None, stream: None };
    let (mut heard, mut frames) = (0, 0);
    let mut progress = |_| {
        heard += 1;
        heard > calls
    };
    let mut control = Control { progress: Some(&mut progress), ..Control::new(&cancel) };
    let ended = stream.pull(&outputs, &mut control, &mut frames);
    Pulled { ended, frames, was_cancelled: cancel.load(Ordering::Relaxed) }
}

#[test]
fn a_cancelled_pull_hides_no_frame_that_overflowed() {
    let (model, tensor, _) = OVERFLOWS[1];
    let file = overflowing(model, tensor);
    let mut decode = Tensors::new(Direction::Decode, [1, 16, 5, 3, 2], [1, 3, 17, 24, 16]);
    let [mut auto, mut fails] = [0; 2].map(|_| rounding(&file.0));
    let fp16 = Settings { precision: Some(Precision::Fp16), ..node::defaults() };
    fails.configure(Settings { on_nonfinite: OnNonFinite::Fail, ..fp16 }).unwrap();
    let (mut before_frames, mut behind_frames) = (0, 0);
    for calls in 0.. {
        let pulled = cancelled_pull(&mut decode, &mut auto, calls);
        assert_eq!(pulled.frames, 0, "after {calls} calls: {:?}", pulled.ended);
        let pulled = cancelled_pull(&mut decode, &mut fails, calls);
        if !pulled.was_cancelled {
            break;
        }
        match pulled.ended {
            Err(Error::Cancelled) => before_frames += 1,
            Err(Error::Tensor(why)) if why.contains("nonfinite=error") => behind_frames += 1,
            other => panic!("after {calls} calls: {other:?}"),
        }
        assert_eq!(behind_frames > 0, pulled.frames > 0, "after {calls} calls");
    }
    assert!(before_frames > 0 && behind_frames > 0, "{before_frames} without frames, {behind_frames} behind some");
}

#[test]
fn what_a_queued_call_met_is_not_charged_to_the_next() {
    let (latent, video) = ([1, 16, 3, 3, 2], [1, 3, 9, 24, 16]);
    let fp32 = Settings { precision: Some(Precision::Fp32), ..node::defaults() };
    let mut handle = rounding(&golden("small"));
    handle.configure(fp32.clone()).unwrap();
    let mut queued = Tensors::new(Direction::Decode, latent, video);
    queued.input.0[0] = f32::NAN;
    queued.queue(&mut handle).unwrap();
    assert!(queued.output.0.iter().all(|value| *value == 0.0), "its work runs later");
    handle.configure(Settings { on_nonfinite: OnNonFinite::Fail, ..fp32 }).unwrap();
    let (found, _, warnings) = Tensors::new(Direction::Decode, latent, video).run(&mut handle).unwrap();
    assert!(found.iter().all(|value| value.is_finite()));
    assert!(warnings.len() == 1 && warnings[0].contains("NaN or infinite"), "of the queued call: {warnings:?}");
    assert!(queued.output.0.iter().all(|value| value.is_nan()), "its work ran");
}

/// A stream takes the memory of a queued call if it needs as much.
#[test]
fn what_a_queued_call_met_is_not_charged_to_a_stream() {
    let (latent, video) = ([1, 16, 40, 3, 2], [1, 3, 157, 24, 16]);
    let fp32 = Settings { precision: Some(Precision::Fp32), slice_frames: Some(1), ..node::defaults() };
    let mut handle = rounding(&golden("small"));
    handle.configure(fp32.clone()).unwrap();
    let mut queued = Tensors::new(Direction::Decode, latent, video);
    queued.input.0[0] = f32::NAN;
    queued.queue(&mut handle).unwrap();
    let kept = handle.workspace.as_ref().unwrap().bytes;
    handle.configure(Settings { on_nonfinite: OnNonFinite::Fail, ..fp32 }).unwrap();
    let (ended, frames) = Tensors::new(Direction::Decode, latent, video).stream(&mut handle);
    assert_eq!((ended, frames), (Ok(Pull::Ended), 157));
    assert!(queued.output.0.iter().any(|value| value.is_nan()), "its work ran");
    let stream = JobShape { direction: Direction::Decode, input: latent.into(), extent: Extent::Stream { first: 0 } };
    let planned = handle.plan(&stream, None, &AtomicBool::new(false)).unwrap().workspace_bytes;
    assert_eq!(planned, kept, "the stream had the call's memory");
}

#[test]
fn a_cancel_hides_no_device_error() {
    let mut handle = rounding(&golden("small"));
    let mut decode = Tensors::new(Direction::Decode, [1, 16, 3, 3, 2], [1, 3, 9, 24, 16]);
    let (input, output) = (Tensors::view(&mut decode.input), Tensors::view(&mut decode.output));
    let into = Outputs { output, logvar: None, stream: None };
    let call = Call { direction: Direction::Decode, range: None, input, into, first_clip: 0 };
    let (model, cancel) = (Arc::clone(&handle.on), AtomicBool::new(false));
    let mut lose = |progress: Progress| {
        let computes = progress.stage == "decode";
        model.device.is_lost.store(computes, Ordering::Relaxed);
        computes
    };
    let mut control = Control { progress: Some(&mut lose), ..Control::new(&cancel) };
    assert_eq!(handle.run(&call, &mut control), Err(Error::Device("the device is lost".into())));
}

#[test]
fn a_limit_of_host_memory_that_no_plan_keeps_is_named() {
    let refused = run(&Case { host_limit: 0, ..CASES[0] }, None, 1, None).err().unwrap().to_string();
    assert!(refused.contains("needs more host memory than host_memory_limit allows"), "{refused}");
}

/// A tensor's value at (channel, row, column) of its first frame.
fn value((values, shape): &(Vec<f32>, [u64; 5]), [channel, row, column]: [u64; 3]) -> f32 {
    let [_, _, frames, height, width] = *shape;
    values[((channel * frames * height + row) * width + column) as usize]
}

/// Also where tiles begin within packed pixels: every third row and column of latent.
#[test]
fn latents_of_the_diffusion_model_are_raw_ones_scaled_and_packed() {
    for (model, video, raw, given) in [
        ("families/flux2", [1, 3, 1, 64, 96], [1, 32, 1, 8, 12], [1, 128, 1, 4, 6]),
        ("families/wan21", [1, 3, 1, 64, 96], [1, 16, 1, 8, 12], [1, 16, 1, 8, 12]),
    ] {
        let checkpoint = Checkpoint::open(&golden(model)).unwrap();
        let open = |latents, enabled| {
            let tiling = [Tiling { enabled, size: 40, overlap: 16 }; 2];
            let settings = Settings { latents, tiling, ..node::defaults() };
            let make = Box::new(|_: &Settings| HostGpu::new(4, None));
            Engine::open(TensorDevice::Cuda(0), &opening(&checkpoint, settings), make).unwrap()
        };
        for tiled in [false, true] {
            let [mut of_raw, mut of_model] = [Latents::Raw, Latents::Model].map(|latents| open(latents, tiled));
            let run = |direction, input, output, engine: &mut Engine<HostGpu>| {
                let mut tensors = Tensors::new(direction, input, output);
                tensors.run(engine).unwrap();
                tensors
            };
            let raw_latent = run(Direction::Encode, video, raw, &mut of_raw).output;
            let model_latent = run(Direction::Encode, video, given, &mut of_model).output;
            let decoded = run(Direction::Decode, given, video, &mut of_model);
            let mut unpacked = Tensors::new(Direction::Decode, raw, video);
            let [out, back] = [Direction::Encode, Direction::Decode].map(|direction| {
                let ChannelMaps { side, maps } = of_model.on.latents.channels(direction).unwrap();
                (side, maps.to_vec())
            });
            let side = out.0;
            for at in 0..raw.iter().product::<u64>() {
                let place = [at / (raw[3] * raw[4]), at / raw[4] % raw[3], at % raw[4]];
                let [c, y, x] = place;
                let packed = [(c * side + y % side) * side + x % side, y / side, x / side];
                let scaled = |map: Affine, value: f32| value * map.mul + map.add;
                let expected = scaled(out.1[packed[0] as usize], value(&raw_latent, place));
                assert_eq!(value(&model_latent, packed), expected, "{model}, tiled: {tiled}, {place:?}");
                unpacked.input.0[at as usize] = scaled(back.1[packed[0] as usize], value(&decoded.input, packed));
            }
            unpacked.run(&mut of_raw).unwrap();
            assert!(unpacked.output.0 == decoded.output.0, "{model}, tiled: {tiled}");
        }
    }
}
