//! The launches, when they run: frames are copied to memory of the CPU backend, computed there, and copied back.

use std::ops::Range;

use half::{bf16, f16};

use super::memory::SharedBytes;
use super::weights::PlainWeights;
use super::{ALIGN, HostGpu, HostSizes};
use crate::backend::cpu::{Cpu, CpuMemory};
use crate::backend::gpu::{NormOf, RowSizes, TensorFrame, TensorPlace, U8Copy, U8Rows, output_rows};
use crate::backend::{Diagnosis, Execution, JobAllocation, NonFinite, Precision, RunArgs};
use crate::ir::{
    AddOp, AddedFrame, Affine, AttentionOp, BlendTile, Buffers, CacheFormat, ChannelMaps, ConvFrame, ConvLayout,
    ConvOp, DeviceOffset, Fades, FrameShape, LoadTensor, Offsets, Op, PartialSums, PinnedBytes, PoolOp, PooledFrame,
    Posterior, Prologue, Shape, Sizes, SplitColumns, StoreTensor, TensorDevice, Term, View, Window,
};

/// Rows beside a band that its frames have room for: whole squares of the CPU's convolutions.
const MARGIN: u64 = 4;

/// Frames in memory of the CPU, one after the other.
struct Frames {
    end: u64,
}

impl Frames {
    fn take(&mut self, bytes: u64) -> DeviceOffset {
        let start = self.end;
        self.end = (start + bytes).next_multiple_of(ALIGN);
        DeviceOffset(start)
    }
}

fn put(memory: &mut CpuMemory, at: DeviceOffset, bytes: &[u8]) {
    memory.bytes_mut()[at.0 as usize..][..bytes.len()].copy_from_slice(bytes);
}

fn take(memory: &mut CpuMemory, at: DeviceOffset, bytes: u64) -> &[u8] {
    &memory.bytes_mut()[at.0 as usize..][..bytes as usize]
}

fn read(block: &SharedBytes, offset: u64, bytes: u64) -> Vec<u8> {
    let mut found = vec![0; bytes as usize];
    block.read(offset, &mut found);
    found
}

/// CPU memory full of NaN.
fn memory(cpu: &Cpu, bytes: u64) -> CpuMemory {
    let mut memory = cpu.allocate(bytes, PinnedBytes::default()).expect("the CPU has room for small frames");
    memory.bytes_mut().fill(0xff);
    memory
}

/// A band of a convolution.
pub struct ConvWork {
    pub weights: PlainWeights,
    pub layout: ConvLayout,
    pub input: FrameShape,
    /// Where copies of the outputs go that statistics are made of.
    pub scratch: Option<u64>,
    pub frames: Vec<ConvFrame<Offsets>>,
    pub rows: Range<u64>,
    pub input_rows: Range<u64>,
    pub split: Option<(SplitColumns, Vec<(DeviceOffset, DeviceOffset)>)>,
    pub next_norm: Option<(Norm, Vec<DeviceOffset>)>,
    pub precision: Precision,
}

impl ConvWork {
    /// Rows of the frames that the CPU gets: the band's, and a margin. What a band must not read is NaN there.
    fn window(&self) -> Range<u64> {
        match self.layout.window {
            Window::Down => 0..self.input.height,
            _ => self.rows.start.saturating_sub(MARGIN)..(self.rows.end + MARGIN).min(self.input.height),
        }
    }

    /// The rows of an input that lie in `window`.
    fn input_frame(&self, block: &SharedBytes, frame: DeviceOffset, window: &Range<u64>) -> Vec<u8> {
        let row = HostSizes.row_bytes(self.input);
        let mut bytes = vec![0xff; ((window.end - window.start) * row) as usize];
        let host_part = |split: &(SplitColumns, Vec<(DeviceOffset, DeviceOffset)>)| {
            let host = split.1.iter().find(|(resident, _)| *resident == frame)?.1;
            Some((split.0, host))
        };
        let split = self.split.as_ref().and_then(host_part);
        for y in window.start.max(self.input_rows.start)..window.end.min(self.input_rows.end) {
            let (number, to) = (y - self.input_rows.start, ((y - window.start) * row) as usize);
            let into = &mut bytes[to..to + row as usize];
            let Some((columns, host)) = split else {
                block.read(frame.0 + number * row, into);
                continue;
            };
            let pixel = row / self.input.width;
            let (left, right) = into.split_at_mut((columns.split() * pixel) as usize);
            block.read(frame.0 + number * columns.resident_width() * pixel, left);
            let skipped = (columns.split() - columns.host().start) * pixel;
            block.read(host.0 + number * columns.host_width() * pixel + skipped, right);
        }
        bytes
    }

    /// Rows of a frame of another shape, of which the first lies at `offset`.
    fn rows_frame(block: &SharedBytes, offset: u64, shape: FrameShape, [rows, window]: [&Range<u64>; 2]) -> Vec<u8> {
        let row = HostSizes.row_bytes(shape);
        let mut bytes = vec![0xff; ((window.end - window.start) * row) as usize];
        let to = ((rows.start - window.start) * row) as usize;
        block.read(offset, &mut bytes[to..to + ((rows.end - rows.start) * row) as usize]);
        bytes
    }

    pub fn run(self, cpu: &Cpu, block: &SharedBytes) {
        let (layout, window, by) =
            (ConvLayout { prologue: Prologue::None, ..self.layout }, self.window(), output_rows(&self.layout));
        let input = FrameShape { height: window.end - window.start, ..self.input };
        let (output, whole) = (layout.window.output(input, layout.cout), layout.window.output(self.input, layout.cout));
        let first_out = if layout.window == Window::Down { 0 } else { window.start * by };
        let out_rows = self.rows.start * by..self.rows.end * by;
        let out_window = first_out..first_out + output.height;
        let shortcut = whole.with_channels(layout.shortcut.unwrap_or(0));
        let (mut places, mut filled) = (Frames { end: 0 }, Vec::new());
        let mut fill = |bytes: Vec<u8>| {
            let at = places.take(bytes.len() as u64 + layout.norm.groups() * 8);
            filled.push((at, bytes));
            at
        };
        let mut frames = Vec::new();
        for frame in &self.frames {
            let terms = frame.terms.iter().map(|term| {
                let is_shortcut = u64::from(term.slab) == layout.slabs;
                let bytes = match is_shortcut {
                    true => Self::rows_frame(block, term.frame.0, shortcut, [&out_rows, &out_window]),
                    false => self.input_frame(block, term.frame, &window),
                };
                Term { frame: fill(bytes), slab: term.slab }
            });
            let terms = terms.collect();
            let row = HostSizes.row_bytes(whole);
            let residual = frame
                .residual
                .map(|at| fill(Self::rows_frame(block, at.0 + out_rows.start * row, whole, [&out_rows, &out_window])));
            let out = fill(vec![0; HostSizes.data_bytes(output) as usize]);
            frames.push(ConvFrame { terms, bias: frame.bias, residual, out });
        }
        let scratch = places.take(cpu.conv_scratch(&layout, input, frames.len() as u64)).0;
        let mut memory = memory(cpu, places.end);
        filled.iter().for_each(|(at, bytes)| put(&mut memory, *at, bytes));
        let outs: Vec<DeviceOffset> = frames.iter().map(|frame| frame.out).collect();
        let (statistics, partial_sums) = (false, PartialSums::NONE);
        let op = Op::Conv(ConvOp { layer: 0, layout, weights: None, input, frames, statistics, partial_sums });
        let args = RunArgs { weights: &[self.weights.packed(cpu)], buffers: Buffers { scratch, ..Buffers::default() } };
        cpu.run(&mut memory, &op, &args, &mut || false).expect("the CPU computes every layout");
        let row = HostSizes.row_bytes(whole);
        let bytes = (out_rows.end - out_rows.start) * row;
        for (number, (from, frame)) in outs.iter().zip(&self.frames).enumerate() {
            let from = DeviceOffset(from.0 + (out_rows.start - out_window.start) * row);
            let made = rounded(take(&mut memory, from, bytes), self.precision);
            let to = frame.out.0.wrapping_add(out_rows.start * row);
            block.write(to, &made);
            if let Some(scratch) = self.scratch {
                block.write(scratch + number as u64 * HostSizes.data_bytes(whole) + out_rows.start * row, &made);
            }
            if let Some((norm, statistics)) = &self.next_norm {
                norm.run(block, to, to, bytes / row * whole.width, statistics[number]);
            }
        }
    }
}

/// Floats as a precision has them. What is too large for it becomes infinite.
fn rounded(floats: &[u8], precision: Precision) -> Vec<u8> {
    let round = |bytes: &[u8; 4]| {
        let value = f32::from_ne_bytes(*bytes);
        let value = match precision {
            Precision::Fp16 => f16::from_f32(value).to_f32(),
            Precision::Bf16 => bf16::from_f32(value).to_f32(),
            Precision::Fp32 => value,
        };
        value.to_ne_bytes()
    };
    floats.as_chunks().0.iter().flat_map(round).collect()
}

/// The norm before a layer, and SiLU if it has it.
pub struct Norm {
    weights: PlainWeights,
    layout: ConvLayout,
}

impl Norm {
    pub fn of(norm: &NormOf<HostGpu>) -> Norm {
        Norm { weights: norm.weights.clone(), layout: *norm.layout }
    }

    pub fn run(&self, block: &SharedBytes, from: u64, to: u64, pixels: u64, statistics: DeviceOffset) {
        let (channels, groups) = (self.layout.cin as usize, self.layout.norm.groups() as usize);
        let statistics = block.floats(statistics.0, 2 * groups as u64);
        let [gamma, beta] = self.weights.norm();
        let mut values = block.floats(from, pixels * channels as u64);
        for pixel in values.chunks_mut(channels) {
            let length = pixel.iter().map(|value| value * value).sum::<f32>().sqrt().max(1e-12);
            for (c, value) in pixel.iter_mut().enumerate() {
                let normal = match self.layout.norm {
                    crate::ir::Norm::Group { groups } => {
                        let group = c / (channels / groups as usize);
                        (*value - statistics[2 * group]) * (gamma[c] * statistics[2 * group + 1]) + beta[c]
                    }
                    crate::ir::Norm::Pixel => *value / length * gamma[c],
                };
                let silu = self.layout.prologue == Prologue::NormSilu;
                *value = if silu { normal / (1.0 + (-normal).exp()) } else { normal };
            }
        }
        block.write_floats(to, &values);
    }
}

/// Mean and reciprocal deviation of each group, of frames that lie in scratch.
pub fn statistics(block: &SharedBytes, shape: FrameShape, groups: u64, scratch: u64, into: &[DeviceOffset]) {
    let per_group = (shape.channels / groups) as usize;
    for (number, into) in into.iter().enumerate() {
        let values = block.floats(scratch + number as u64 * HostSizes.data_bytes(shape), shape.elements());
        let mut found = Vec::new();
        for group in 0..groups as usize {
            let of = || {
                let pixels = values.chunks(shape.channels as usize);
                pixels.flat_map(|pixel| &pixel[group * per_group..][..per_group]).map(|value| f64::from(*value))
            };
            let count = (shape.pixels() * per_group as u64) as f64;
            let mean = of().sum::<f64>() / count;
            let square = of().map(|value| (value - mean) * (value - mean)).sum::<f64>() / count;
            found.extend([mean as f32, (1.0 / (square + 1e-6).sqrt()) as f32]);
        }
        block.write_floats(into.0, &found);
    }
}

/// Rows between f32 and 8 bits with a scale for each block of channels.
pub fn copy_u8(block: &SharedBytes, copy: U8Copy, U8Rows { part, width, rows }: U8Rows, from: u64, to: u64) {
    let (channels, size) = (part.channels, CacheFormat::block(part.channels));
    let (stored, exact) = (HostSizes.u8_row_bytes(part), width * channels * 4);
    let elements = part.width * channels;
    for row in 0..rows {
        let (codes, scales) = match copy {
            U8Copy::Restore => {
                let codes = read(block, from + row * stored, elements);
                (codes, block.floats(from + row * stored + elements, elements / size))
            }
            U8Copy::Store | U8Copy::Round => to_u8(&block.floats(from + row * exact, elements), size as usize),
        };
        if copy == U8Copy::Store {
            block.write(to + row * stored, &codes);
            block.write_floats(to + row * stored + elements, &scales);
            continue;
        }
        let restored = codes.iter().enumerate().map(|(i, code)| f32::from(*code as i8) * scales[i / size as usize]);
        block.write_floats(to + row * exact, &restored.collect::<Vec<f32>>());
    }
}

fn to_u8(values: &[f32], block: usize) -> (Vec<u8>, Vec<f32>) {
    let scale = |values: &[f32]| values.iter().fold(1e-8_f32, |most, value| most.max(value.abs())) / 127.0;
    let scales: Vec<f32> = values.chunks(block).map(scale).collect();
    let code = |(i, value): (usize, &f32)| (value / scales[i / block]).round() as i8 as u8;
    (values.iter().enumerate().map(code).collect(), scales)
}

pub fn attention(cpu: &Cpu, block: &SharedBytes, op: &AttentionOp<Offsets>) {
    let projected = HostSizes.data_bytes(op.shape.with_channels(3 * op.shape.channels));
    let bytes = HostSizes.data_bytes(op.shape);
    for (from, to) in &op.frames {
        let mut places = Frames { end: 0 };
        let frames = (places.take(projected), places.take(bytes));
        let scratch = places.take(cpu.attention_scratch(op.shape, 1)).0;
        let mut memory = memory(cpu, places.end);
        put(&mut memory, frames.0, &read(block, from.0, projected));
        let op = Op::Attention(AttentionOp { shape: op.shape, frames: vec![frames] });
        let args = RunArgs { weights: &[], buffers: Buffers { scratch, ..Buffers::default() } };
        cpu.run(&mut memory, &op, &args, &mut || false).expect("the CPU attends to every shape");
        block.write(to.0, take(&mut memory, frames.1, bytes));
    }
}

/// The frames of an operation on whole frames, in memory of the CPU: all are brought there, and `outputs` back.
fn on_cpu(
    cpu: &Cpu,
    block: &SharedBytes,
    frames: &[(DeviceOffset, FrameShape)],
    outputs: &[DeviceOffset],
    op: impl FnOnce(&dyn Fn(DeviceOffset) -> DeviceOffset) -> Op<Offsets>,
) {
    let mut places = Frames { end: 0 };
    let mut at: Vec<(DeviceOffset, FrameShape, DeviceOffset)> = Vec::new();
    for (frame, shape) in frames {
        if at.iter().all(|(known, ..)| known != frame) {
            at.push((*frame, *shape, places.take(HostSizes.data_bytes(*shape))));
        }
    }
    let mut memory = memory(cpu, places.end);
    at.iter().for_each(|(frame, shape, to)| put(&mut memory, *to, &read(block, frame.0, HostSizes.data_bytes(*shape))));
    let place =
        |frame: DeviceOffset| at.iter().find(|(known, ..)| *known == frame).expect("a frame of the operation").2;
    let args = RunArgs { weights: &[], buffers: Buffers::default() };
    cpu.run(&mut memory, &op(&place), &args, &mut || false).expect("the CPU has the operation");
    for (frame, shape, from) in at.iter().filter(|(frame, ..)| outputs.contains(frame)) {
        block.write(frame.0, take(&mut memory, *from, HostSizes.data_bytes(*shape)));
    }
}

pub fn pool(cpu: &Cpu, block: &SharedBytes, op: &PoolOp<Offsets>) {
    let shapes = |frame: &PooledFrame<Offsets>| [(frame.from, op.input), (frame.into, op.output())];
    let frames: Vec<_> = op.frames.iter().flat_map(shapes).collect();
    let outputs: Vec<_> = op.frames.iter().map(|frame| frame.into).collect();
    on_cpu(cpu, block, &frames, &outputs, |at| {
        let moved = |frame: &PooledFrame<Offsets>| PooledFrame { from: at(frame.from), into: at(frame.into), ..*frame };
        Op::Pool(PoolOp { frames: op.frames.iter().map(moved).collect(), ..op.clone() })
    });
}

pub fn add(cpu: &Cpu, block: &SharedBytes, op: &AddOp<Offsets>) {
    let shapes =
        |frame: &AddedFrame<Offsets>| [(frame.x, op.shape), (frame.addend, op.addend()), (frame.out, op.shape)];
    let frames: Vec<_> = op.frames.iter().flat_map(shapes).collect();
    let outputs: Vec<_> = op.frames.iter().map(|frame| frame.out).collect();
    on_cpu(cpu, block, &frames, &outputs, |at| {
        let moved = |frame: &AddedFrame<Offsets>| AddedFrame {
            x: at(frame.x),
            addend: at(frame.addend),
            out: at(frame.out),
            ..*frame
        };
        Op::Add(AddOp { frames: op.frames.iter().map(moved).collect(), ..op.clone() })
    });
}

/// A tensor of the one frame that is staged.
fn view(of: &TensorFrame, bytes: &mut [u8]) -> View {
    let shape = Shape::new(1, of.channels, 1, of.rows, of.columns);
    let strides = [0, of.by_channel, 0, of.by_row, of.by_column];
    let data = bytes.as_mut_ptr();
    View::checked("staged", data, of.dtype, TensorDevice::Cpu, shape, Some(strides), false).expect("a compact frame")
}

/// Bytes that are aligned for every element.
fn aligned(bytes: &[u8]) -> Vec<u64> {
    let mut words = vec![0; bytes.len().div_ceil(8)];
    // SAFETY: as many bytes, and every word may be any bytes.
    unsafe { bytes.as_ptr().copy_to(words.as_mut_ptr().cast(), bytes.len()) };
    words
}

fn as_bytes(words: &mut [u64]) -> &mut [u8] {
    // SAFETY: as many bytes, and every byte may be any value.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), size_of_val(words)) }
}

/// Bytes from a tensor's first element to its last.
fn span(of: &TensorFrame) -> u64 {
    let axes = [(of.channels, of.by_channel), (of.rows, of.by_row), (of.columns, of.by_column)];
    let last: u64 = axes.iter().map(|(count, step)| (count - 1) * step.unsigned_abs()).sum();
    (last + 1) * of.dtype.bytes()
}

/// A tensor that is staged, or the host's own.
fn read_tensor(block: &SharedBytes, of: &TensorFrame) -> Vec<u8> {
    match of.at {
        TensorPlace::Staged(at) => read(block, at, span(of)),
        TensorPlace::Address(at) => {
            let mut bytes = vec![0; span(of) as usize];
            // SAFETY: the tests' tensors have strides upwards and outlive their calls.
            unsafe { (at as *const u8).copy_to(bytes.as_mut_ptr(), bytes.len()) };
            bytes
        }
    }
}

fn write_tensor(block: &SharedBytes, of: &TensorFrame, bytes: &[u8]) {
    match of.at {
        TensorPlace::Staged(at) => block.write(at, bytes),
        // SAFETY: as above.
        TensorPlace::Address(at) => unsafe { (at as *mut u8).copy_from(bytes.as_ptr(), bytes.len()) },
    }
}

/// Maps that outlive their call.
struct OwnedMaps {
    side: u64,
    maps: Vec<Affine>,
}

impl OwnedMaps {
    fn new(of: ChannelMaps) -> OwnedMaps {
        OwnedMaps { side: of.side, maps: of.maps.to_vec() }
    }

    fn get(&self) -> ChannelMaps<'_> {
        ChannelMaps { side: self.side, maps: &self.maps }
    }
}

/// A load that outlives its call.
pub struct OwnedLoad {
    /// Row and column of the activations within the first pixel that is staged.
    within: [u64; 2],
    map: Affine,
    channels: Option<OwnedMaps>,
    patch: u64,
    shape: FrameShape,
    into: DeviceOffset,
}

impl OwnedLoad {
    pub fn new(op: &LoadTensor) -> OwnedLoad {
        let LoadTensor { map, patch, shape, into, .. } = *op;
        OwnedLoad { within: op.within_packed(), map, channels: op.channels.map(OwnedMaps::new), patch, shape, into }
    }

    pub fn run(self, cpu: &Cpu, block: &SharedBytes, from: &TensorFrame) -> NonFinite {
        let mut words = aligned(&read_tensor(block, from));
        let tensor = view(from, as_bytes(&mut words));
        let bytes = HostSizes.data_bytes(self.shape);
        let mut memory = memory(cpu, bytes.next_multiple_of(ALIGN));
        let [top, left] = self.within;
        let op = LoadTensor {
            from: &tensor,
            batch: 0,
            frame: 0,
            top,
            left,
            map: self.map,
            channels: self.channels.as_ref().map(OwnedMaps::get),
            patch: self.patch,
            shape: self.shape,
            into: DeviceOffset(0),
        };
        cpu.load(&mut memory, &op, &Buffers::default(), &mut || false).expect("the CPU loads every tensor");
        block.write(self.into.0, take(&mut memory, DeviceOffset(0), bytes));
        cpu.take_nonfinite(&mut memory)
    }
}

type OwnedFades = (Vec<f32>, Vec<f32>);

fn fades(of: &OwnedFades) -> Fades<'_> {
    Fades { rows: &of.0, columns: &of.1 }
}

/// A store that outlives its call.
pub struct OwnedStore {
    from: DeviceOffset,
    shape: FrameShape,
    channel: u64,
    divide: Option<OwnedFades>,
    clamp: Option<(f32, f32)>,
    sample: Option<Posterior>,
    map: Affine,
    channels: Option<OwnedMaps>,
    patch: u64,
    clip: u64,
    clip_frame: u64,
}

impl OwnedStore {
    pub fn new(op: &StoreTensor) -> OwnedStore {
        let StoreTensor { from, shape, channel, clamp, sample, map, patch, clip, clip_frame, .. } = *op;
        let divide = op.divide.map(|fades| (fades.rows.to_vec(), fades.columns.to_vec()));
        let channels = op.channels.map(OwnedMaps::new);
        OwnedStore { from, shape, channel, divide, clamp, sample, map, channels, patch, clip, clip_frame }
    }

    pub fn run(self, cpu: &Cpu, block: &SharedBytes, into: &TensorFrame) -> NonFinite {
        let bytes = HostSizes.data_bytes(self.shape);
        let mut memory = memory(cpu, bytes.next_multiple_of(ALIGN));
        put(&mut memory, DeviceOffset(0), &read(block, self.from.0, bytes));
        let mut words = aligned(&read_tensor(block, into));
        let tensor = view(into, as_bytes(&mut words));
        let op = StoreTensor {
            from: DeviceOffset(0),
            shape: self.shape,
            channel: self.channel,
            divide: self.divide.as_ref().map(fades),
            clamp: self.clamp,
            sample: self.sample,
            map: self.map,
            channels: self.channels.as_ref().map(OwnedMaps::get),
            patch: self.patch,
            into: &tensor,
            batch: 0,
            frame: 0,
            clip: self.clip,
            clip_frame: self.clip_frame,
        };
        cpu.store(&mut memory, &op, &Buffers::default()).expect("the CPU stores every tensor");
        write_tensor(block, into, &as_bytes(&mut words)[..span(into) as usize]);
        cpu.take_nonfinite(&mut memory)
    }
}

/// A blend that outlives its call.
pub struct OwnedBlend {
    from: (DeviceOffset, FrameShape),
    into: (DeviceOffset, FrameShape),
    top: u64,
    left: u64,
    fades: OwnedFades,
    clear: bool,
}

impl OwnedBlend {
    pub fn new(op: &BlendTile) -> OwnedBlend {
        OwnedBlend {
            from: (op.from, op.from_shape),
            into: (op.into, op.into_shape),
            top: op.top,
            left: op.left,
            fades: (op.fades.rows.to_vec(), op.fades.columns.to_vec()),
            clear: op.clear,
        }
    }

    pub fn run(self, cpu: &Cpu, block: &SharedBytes) {
        let ((from_at, from_shape), (into_at, into_shape)) = (self.from, self.into);
        let (tile, whole) = (HostSizes.data_bytes(from_shape), HostSizes.data_bytes(into_shape));
        let mut places = Frames { end: 0 };
        let (from, into) = (places.take(tile), places.take(whole));
        let mut memory = memory(cpu, places.end);
        put(&mut memory, from, &read(block, from_at.0, tile));
        put(&mut memory, into, &read(block, into_at.0, whole));
        let (top, left, clear) = (self.top, self.left, self.clear);
        let op = BlendTile { from, from_shape, into, into_shape, top, left, fades: fades(&self.fades), clear };
        cpu.blend(&mut memory, &op, &Buffers::default()).expect("the CPU blends every tile");
        block.write(into_at.0, take(&mut memory, into, whole));
    }
}
