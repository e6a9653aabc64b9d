//! What tests of several backends share: a job with memory of its own, convolutions in bands, and pixels.

pub mod bands;
pub mod pixels;

use super::cpu::Cpu;
use super::{Backend, Residency, RunArgs};
use crate::ir::{
    Affine, BandBuffers, Buffers, ConvFrame, ConvLayout, DType, DeviceOffset, FrameShape, LoadTensor, Norm, Offsets,
    Op, PinnedBytes, Prologue, StoreTensor, TensorDevice, Term, View, Window,
};
use crate::testing::{Lcg, SlabSource};

/// Frames of every backend may begin here.
const ALIGN: u64 = 256;

/// A job's memory as bytes.
pub trait RawMemory: Backend {
    /// Fills memory with NaN, so that reads of unwritten memory show.
    fn poison(&self, memory: &mut Self::Memory, bytes: u64);
    /// After all work that is queued.
    fn read(&self, memory: &Self::Memory, from: DeviceOffset, into: &mut [u8]);
}

impl RawMemory for Cpu {
    fn poison(&self, _: &mut Self::Memory, _: u64) {}

    fn read(&self, memory: &Self::Memory, from: DeviceOffset, into: &mut [u8]) {
        memory.read(from, into);
    }
}

pub struct RandomWeights {
    pub seed: u64,
    pub scale: f32,
    /// Mean and half the range of the biases.
    pub bias: (f32, f32),
    pub norm: Norm,
}

impl SlabSource for RandomWeights {
    fn slab(&mut self, slab: u64, into: &mut [f32]) {
        let mut random = Lcg(self.seed ^ slab << 32);
        into.iter_mut().for_each(|w| *w = random.next() * self.scale);
    }
    fn bias(&mut self, bias: u64, into: &mut [f32]) {
        let mut random = Lcg(self.seed ^ bias << 40);
        into.iter_mut().for_each(|b| *b = self.bias.0 + self.bias.1 * random.next());
    }
    fn norm(&mut self, gamma: &mut [f32], beta: &mut [f32]) {
        let mut random = Lcg(self.seed ^ 7);
        // A norm of pixels makes channels of a length of 1, and has no bias.
        let (factor, bias) = match self.norm {
            Norm::Group { .. } => (1.0, 0.3),
            Norm::Pixel => ((gamma.len() as f32).sqrt(), 0.0),
        };
        gamma.iter_mut().for_each(|g| *g = factor * (1.0 + random.next() * 0.3));
        beta.iter_mut().for_each(|b| *b = random.next() * bias);
    }
}

pub fn weights(layout: &ConvLayout, seed: u64) -> RandomWeights {
    let fan_in = layout.cin * layout.window.side() * layout.window.side() * layout.slabs.min(3);
    RandomWeights { seed, scale: (3.0 / fan_in as f32).sqrt(), bias: (0.0, 1.0), norm: layout.norm }
}

/// Random weights, not at the beginning of their block.
pub fn prepare<B: Backend>(backend: &B, layout: &ConvLayout, seed: u64) -> B::Conv {
    let bytes = ALIGN + backend.sizes().weight_bytes(layout);
    let store = backend.allocate_weights(bytes, Residency::Device).unwrap();
    crate::testing::prepare(backend, (&store, ALIGN), layout, &mut weights(layout, seed)).unwrap()
}

pub fn layout(cin: u64, cout: u64, window: Window, prologue: Prologue) -> ConvLayout {
    ConvLayout {
        cin,
        cout,
        window,
        prologue,
        slabs: 3,
        shortcut: None,
        biases: 2,
        norm: Norm::Group { groups: if cin.is_multiple_of(8) && cout.is_multiple_of(8) { 8 } else { 1 } },
        pairs: None,
        first_frame_slab: None,
    }
}

/// Offsets in a block, one after the other.
#[derive(Default)]
pub struct BlockPlaces {
    pub end: u64,
}

impl BlockPlaces {
    pub fn take(&mut self, bytes: u64) -> DeviceOffset {
        let start = self.end.next_multiple_of(ALIGN);
        self.end = start + bytes;
        DeviceOffset(start)
    }

    pub fn frames(&mut self, bytes: u64, count: usize) -> Vec<DeviceOffset> {
        (0..count).map(|_| self.take(bytes)).collect()
    }
}

/// Bytes that a job has besides its frames.
#[derive(Default)]
pub struct Room {
    pub scratch: u64,
    /// Of the largest frame of a host tensor.
    pub staging: u64,
    pub bands: u64,
    /// In host memory.
    pub offloaded: u64,
}

/// A backend and memory on it that was poisoned.
pub struct KernelJob<'a, B: RawMemory> {
    pub backend: &'a B,
    pub memory: B::Memory,
    pub buffers: Buffers,
}

impl<'a, B: RawMemory> KernelJob<'a, B> {
    pub fn new(backend: &'a B, mut places: BlockPlaces, room: Room) -> KernelJob<'a, B> {
        let Room { scratch, staging, bands, offloaded } = room;
        let buffers = Buffers {
            scratch: places.take(scratch).0,
            bands: BandBuffers { offset: places.take(bands).0, bytes: bands },
            staging: [0; 2].map(|_| places.take(staging).0),
        };
        let host = PinnedBytes { load: 2 * staging, store: 2 * staging, offloaded };
        let mut memory = backend.allocate(places.end, host).unwrap();
        backend.poison(&mut memory, places.end);
        KernelJob { backend, memory, buffers }
    }

    pub fn load(&mut self, op: &LoadTensor) {
        self.backend.load(&mut self.memory, op, &self.buffers, &mut never()).unwrap();
    }

    /// Loads frames of random values.
    pub fn load_random(&mut self, random: &mut Lcg, shape: FrameShape, frames: &[DeviceOffset]) {
        self.load_random_times(1.0, random, shape, frames);
    }

    pub fn load_random_times(&mut self, factor: f32, random: &mut Lcg, shape: FrameShape, frames: &[DeviceOffset]) {
        let mut values = random.fill(shape.elements() as usize * frames.len());
        values.iter_mut().for_each(|value| *value *= factor);
        let from = view(&values, dims(shape, frames));
        (0..).zip(frames).for_each(|(t, into)| self.load(&plain_load(&from, t, shape, *into)));
        self.finish();
    }

    /// Runs an operation. Its layers are numbered as in `weights`.
    pub fn run(&mut self, op: Op<Offsets>, weights: &[B::Conv]) {
        let args = RunArgs { weights, buffers: self.buffers };
        self.backend.run(&mut self.memory, &op, &args, &mut never()).unwrap();
    }

    /// [channel][frame][row][column]
    pub fn store(&mut self, shape: FrameShape, frames: &[DeviceOffset]) -> Vec<f32> {
        let values = vec![f32::NAN; shape.elements() as usize * frames.len()];
        let into = view(&values, dims(shape, frames));
        for (t, from) in (0..).zip(frames) {
            self.backend.store(&mut self.memory, &plain_store(*from, shape, &into, t), &self.buffers).unwrap();
        }
        self.finish();
        values
    }

    pub fn finish(&mut self) {
        self.backend.finish(&mut self.memory, None).unwrap();
    }

    /// So many bytes of each frame.
    pub fn read(&mut self, frames: &[DeviceOffset], bytes: u64) -> Vec<Vec<u8>> {
        self.finish();
        let read = |frame: &DeviceOffset| {
            let mut content = vec![0; bytes as usize];
            self.backend.read(&self.memory, *frame, &mut content);
            content
        };
        frames.iter().map(read).collect()
    }
}

pub fn dims(shape: FrameShape, frames: &[DeviceOffset]) -> [u64; 4] {
    [shape.channels, frames.len() as u64, shape.height, shape.width]
}

pub fn view(values: &[f32], [c, t, h, w]: [u64; 4]) -> View {
    let data = values.as_ptr().cast_mut().cast();
    View::checked("test", data, DType::F32, TensorDevice::Cpu, [1, c, t, h, w].into(), None, false).unwrap()
}

pub fn never() -> impl FnMut() -> bool {
    || false
}

pub const SAME: Affine = Affine { mul: 1.0, add: 0.0 };

/// A frame of a tensor as it is into a frame of activations.
pub fn plain_load(from: &View, frame: u64, shape: FrameShape, into: DeviceOffset) -> LoadTensor<'_> {
    LoadTensor { from, batch: 0, frame, top: 0, left: 0, map: SAME, channels: None, patch: 1, shape, into }
}

/// A frame of activations as it is into a frame of a tensor.
pub fn plain_store(from: DeviceOffset, shape: FrameShape, into: &View, frame: u64) -> StoreTensor<'_> {
    StoreTensor {
        from,
        shape,
        channel: 0,
        divide: None,
        clamp: None,
        sample: None,
        map: SAME,
        channels: None,
        patch: 1,
        into,
        batch: 0,
        frame,
        clip: 0,
        clip_frame: frame,
    }
}

pub fn as_terms(terms: &[(DeviceOffset, u8)]) -> Vec<Term<Offsets>> {
    terms.iter().map(|(frame, slab)| Term { frame: *frame, slab: *slab }).collect()
}

pub fn frame(
    terms: &[(DeviceOffset, u8)],
    bias: u8,
    residual: Option<DeviceOffset>,
    out: DeviceOffset,
) -> ConvFrame<Offsets> {
    ConvFrame { terms: as_terms(terms), bias, residual, out }
}

pub fn relative_error(found: &[f32], right: &[f32]) -> f64 {
    let squares = |sum: f64, value: f64| sum + value * value;
    let difference = found.iter().zip(right).map(|(f, r)| f64::from(*f) - f64::from(*r)).fold(0.0, squares);
    (difference / right.iter().map(|r| f64::from(*r)).fold(0.0, squares)).sqrt()
}
