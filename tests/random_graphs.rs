//! No part of the library knows a family: random graphs give the oracle's numbers, on every device, and the same bits
//! however the work is cut.

mod common;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use common::oracle::{Clip, evaluate};
use common::random_graph::random_model;
use common::safetensors::{Folder, to_bytes};
use common::weights::random_weights;
use common::{Random, devices};
use video_vae::internals::error::Error;
use video_vae::internals::exec::{
    self, Allocators, Call, ClipRange, Control, DeviceName, Extent, JobShape, OpenModel, Opening, Outputs, Pull,
};
use video_vae::internals::ir::{DType, Shape, TensorDevice, View};
use video_vae::internals::model::graph::NodeOp;
use video_vae::internals::model::{Checkpoint, Direction, Model};
use video_vae::internals::node;

/// Models of each kind of device. Kernels of a GPU take widths that are multiples of 16.
const MODELS: u64 = 40;

/// A tensor of floats with its memory.
struct Memory {
    values: Vec<f32>,
    shape: Shape,
}

impl Memory {
    fn new(shape: Shape) -> Memory {
        Memory { values: vec![f32::NAN; shape.dims().iter().product::<u64>() as usize], shape }
    }

    fn view(&mut self) -> View {
        let data = self.values.as_mut_ptr().cast();
        View::checked("tensor", data, DType::F32, TensorDevice::Cpu, self.shape, None, true).unwrap()
    }

    /// Some of its frames, in memory of their own. It has one clip.
    fn frames(&self, from: u64, count: u64) -> Memory {
        let plane = (self.shape.height * self.shape.width) as usize;
        let channels = self.values.chunks_exact(self.shape.frames as usize * plane);
        let part = |channel: &[f32]| channel[from as usize * plane..(from + count) as usize * plane].to_vec();
        Memory { values: channels.flat_map(part).collect(), shape: Shape { frames: count, ..self.shape } }
    }
}

/// One direction of a model, with an input.
struct Job<'a> {
    model: &'a Model,
    direction: Direction,
    input: Memory,
    output: Shape,
}

impl Job<'_> {
    fn new(model: &Model, direction: Direction, latents: u64, seed: u64) -> Job<'_> {
        let geometry = model.geometry;
        let (rows, columns) = (3, 2);
        let latent = Shape::new(1, geometry.latent_channels, latents, rows, columns);
        let (height, width) = (rows * geometry.space, columns * geometry.space);
        let video = Shape::new(1, geometry.pixel_channels, geometry.video_frames(latents), height, width);
        let (shape, output) = if direction == Direction::Encode { (video, latent) } else { (latent, video) };
        let (mut input, mut random) = (Memory::new(shape), Random(seed));
        input.values.fill_with(|| random.below(1 << 20) as f32 / (1 << 19) as f32 - 1.0);
        Job { model, direction, input, output }
    }

    fn run(&mut self, opened: &mut OpenModel, range: Option<ClipRange>) -> Result<Memory, Error> {
        let (mut input, mut shape) = (self.input.frames(0, self.input.shape.frames), self.output);
        if let Some(range) = range {
            let needed = exec::range_inputs(self.model, self.direction, range)?;
            input = self.input.frames(needed.start, needed.end - needed.start);
            shape.frames = range.count.unwrap();
        }
        let mut output = Memory::new(shape);
        let (from, to) = (input.view(), output.view());
        let call = Call {
            direction: self.direction,
            range,
            input: from,
            into: Outputs { output: to, logvar: None, stream: None },
            first_clip: 0,
        };
        opened.run(&call, &mut Control::new(&AtomicBool::new(false)))?;
        Ok(output)
    }

    /// Pushed a frame at a time.
    fn stream(&mut self, opened: &mut OpenModel) -> Vec<f32> {
        let cancel = AtomicBool::new(false);
        let extent = Extent::Stream { first: 0 };
        let start = JobShape { direction: self.direction, input: self.input.shape, extent };
        let mut stream = opened.open_stream(&start, &Control::new(&cancel)).unwrap();
        let (mut pushed, mut pulled) = (0, Vec::new());
        loop {
            if pushed < self.input.shape.frames {
                pushed += stream.push(Some(&self.input.frames(pushed, 1).view())).unwrap();
            } else {
                stream.push(None).unwrap();
            }
            loop {
                let mut one = Memory::new(Shape { frames: 1, ..self.output });
                let (mut written, view) = (0, one.view());
                let into = Outputs { output: view, logvar: None, stream: None };
                match stream.pull(&into, &mut Control::new(&cancel), &mut written).unwrap() {
                    Pull::Written => pulled.push(one.values),
                    Pull::NeedsInput => break,
                    Pull::Ended => return interleaved(&pulled, self.output.channels as usize),
                }
            }
        }
    }

    fn oracle(&self, weights: &common::safetensors::Tensors) -> Vec<f64> {
        let Shape { channels, frames, height, width, .. } = self.input.shape;
        let dims = [channels, frames, height, width].map(|d| d as usize);
        let clip = Clip { dims, values: self.input.values.iter().map(|v| f64::from(*v)).collect() };
        let mut found = evaluate(self.model.graph(self.direction), weights, clip).values;
        // An encoder also gives the log-variance.
        found.truncate(self.output.dims().iter().product::<u64>() as usize);
        found
    }
}

/// Frames of a clip as one tensor [channel, frame, pixel].
fn interleaved(frames: &[Vec<f32>], channels: usize) -> Vec<f32> {
    let channel = |c: usize| frames.iter().flat_map(move |frame| frame.chunks(frame.len() / channels).nth(c).unwrap());
    (0..channels).flat_map(channel).copied().collect()
}

/// The model, unless the device has no kernel for a layer: then the error says so.
fn open(device: &str, path: &Path, model: &Arc<Model>) -> Option<OpenModel> {
    let place = match device.strip_prefix("cuda:") {
        None => TensorDevice::Cpu,
        Some(index) => TensorDevice::Cuda(index.parse().unwrap()),
    };
    let checkpoint = Checkpoint::open_as(path, Arc::clone(model)).unwrap();
    let (allocators, settings) = (Allocators::default(), node::defaults());
    match exec::open(&[DeviceName::Place(place)], Opening { checkpoint: &checkpoint, allocators, settings }, &()) {
        Err(Error::Device(why)) if place != TensorDevice::Cpu && why.contains("no kernel on the GPU does") => None,
        opened => Some(opened.unwrap()),
    }
}

fn configure(opened: &mut OpenModel, keys: &[(&str, &str)]) {
    let mut settings = opened.settings().clone();
    keys.iter().for_each(|(key, value)| node::configure(&mut settings, key, value).unwrap());
    opened.configure(settings).unwrap();
}

fn relative_error(found: &[f32], expected: &[f64]) -> f64 {
    let squares: f64 = found.iter().zip(expected).map(|(f, e)| (f64::from(*f) - e).powi(2)).sum();
    (squares / expected.iter().map(|e| e * e).sum::<f64>()).sqrt()
}

#[test]
fn random_graphs_match_the_oracle_and_keep_their_bits() {
    let folder = Folder::new("random-graphs");
    for device in devices() {
        let (width, most) = if device == "cpu" { (2, 1e-5) } else { (16, 4e-3) };
        let (mut tried, mut around) = (0, 0);
        for seed in 0..MODELS {
            let model = Arc::new(random_model(1000 + seed, width));
            let weights = random_weights(&model, seed);
            let path = folder.file(&format!("{seed}.safetensors"), &to_bytes(&weights, 1));
            let Some(mut opened) = open(&device, &path, &model) else { continue };
            tried += 1;
            let is_shortcut = |op: &NodeOp| matches!(op, NodeOp::FoldMean(_) | NodeOp::RepeatUnfold(_));
            let nodes = model.encoder.nodes().iter().chain(model.decoder.nodes());
            around += nodes.filter(|node| is_shortcut(&node.op)).count();
            for direction in Direction::ALL {
                let what = format!("{device}, seed {seed}, {}", direction.name());
                let mut job = Job::new(&model, direction, 1 + seed % 5, seed);
                let whole = job.run(&mut opened, None).unwrap();
                let error = relative_error(&whole.values, &job.oracle(&weights));
                assert!(error <= most, "{what}: relative error {error:.1e}");
                check_bits(&what, &mut job, &mut opened, &whole);
            }
        }
        assert!(tried >= MODELS / 4, "{device} computes {tried} of {MODELS} models");
        assert!(device != "cpu" || around > 5, "{around} shortcuts around levels");
    }
}

/// However the work is cut, the bits are those of the whole.
fn check_bits(what: &str, job: &mut Job, opened: &mut OpenModel, whole: &Memory) {
    for (slice, chunk) in [("1", "1"), ("2", "3")] {
        configure(opened, &[("slice_frames", slice), ("chunk_frames", chunk)]);
        assert!(job.run(opened, None).unwrap().values == whole.values, "{what}, {slice} {chunk}");
    }
    configure(opened, &[("slice_frames", "auto"), ("chunk_frames", "auto"), ("tiles", "never")]);
    assert!(job.stream(opened) == whole.values, "{what}, streamed");
    let frames = job.output.frames;
    for (first, count) in [(frames / 2, 1), (frames / 3, frames - frames / 3)] {
        let range = ClipRange { clip_frames: job.input.shape.frames, first, count: Some(count) };
        let part = job.run(opened, Some(range)).unwrap();
        assert!(part.values == whole.frames(first, count).values, "{what}, frames {first} to {}", first + count);
    }
    let shape = JobShape { direction: job.direction, input: job.input.shape, extent: Extent::Clip };
    let free = opened.plan(&shape, None, &AtomicBool::new(false)).unwrap().device_bytes;
    for percent in [90, 70, 50] {
        configure(opened, &[("memory_limit", &(free * percent / 100).to_string())]);
        match opened.plan(&shape, None, &AtomicBool::new(false)) {
            Ok(plan) => {
                assert!(plan.device_bytes <= free * percent / 100 && plan.exact, "{what}: {plan}");
                assert!(job.run(opened, None).unwrap().values == whole.values, "{what}, {percent} %: {plan}");
            }
            Err(why) => assert!(matches!(why, Error::Memory(_)), "{what}: {why}"),
        }
    }
    configure(opened, &[("memory_limit", "auto")]);
}
