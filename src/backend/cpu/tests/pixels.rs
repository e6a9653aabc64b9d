//! Loads and stores of host tensors of every type and layout; blends of tiles.

use super::*;
use crate::backend::tests::{plain_load, plain_store};
use crate::ir::{Affine, DType, Fades, Posterior, Shape, TensorDevice, View};

/// A host tensor and its memory.
struct HostTensor {
    data: Vec<u64>,
    shape: Shape,
    dtype: DType,
    strides: [i64; 5],
    first: i64,
}

impl HostTensor {
    /// `order` lists the axes from slowest to fastest. Axes in `reversed` run backwards. Rows are padded.
    fn new(shape: Shape, dtype: DType, order: [usize; 5], reversed: &[usize]) -> HostTensor {
        let mut strides = [0; 5];
        let (mut step, mut first) = (1i64, 0);
        for axis in order.into_iter().rev() {
            let dim = shape.dims()[axis] as i64;
            strides[axis] = step;
            if reversed.contains(&axis) {
                strides[axis] = -step;
                first += step * (dim - 1);
            }
            step *= dim + i64::from(axis == 4);
        }
        HostTensor { data: vec![0x5555_5555_5555_5555; step as usize], shape, dtype, strides, first }
    }

    fn address(&self, index: i64) -> *mut u8 {
        self.data
            .as_ptr()
            .cast_mut()
            .cast::<u8>()
            .wrapping_offset((self.first + index) as isize * self.dtype.bytes() as isize)
    }

    fn view(&self) -> View {
        View::checked("host", self.address(0), self.dtype, TensorDevice::Cpu, self.shape, Some(self.strides), true)
            .unwrap()
    }

    fn index(&self, at: [u64; 5]) -> i64 {
        at.iter().zip(self.strides).map(|(i, s)| *i as i64 * s).sum()
    }

    fn get(&self, at: [u64; 5]) -> f32 {
        let address = self.address(self.index(at));
        // SAFETY: an element of the test's memory.
        unsafe {
            match self.dtype {
                DType::U8 => f32::from(*address),
                DType::U16 => f32::from(*address.cast::<u16>()),
                DType::F16 => (*address.cast::<half::f16>()).to_f32(),
                DType::BF16 => (*address.cast::<half::bf16>()).to_f32(),
                DType::F32 => *address.cast::<f32>(),
            }
        }
    }

    fn set(&mut self, at: [u64; 5], value: f32) {
        let address = self.address(self.index(at));
        // SAFETY: an element of the test's memory.
        unsafe {
            match self.dtype {
                DType::U8 => *address = value as u8,
                DType::U16 => *address.cast::<u16>() = value as u16,
                DType::F16 => *address.cast::<half::f16>() = half::f16::from_f32(value),
                DType::BF16 => *address.cast::<half::bf16>() = half::bf16::from_f32(value),
                DType::F32 => *address.cast::<f32>() = value,
            }
        }
    }
}

const PRECISIONS: [Precision; 2] = [Precision::Fp32, Precision::Bf16];
const PLANAR: [usize; 5] = [0, 1, 2, 3, 4];
const INTERLEAVED: [usize; 5] = [0, 2, 3, 4, 1];

#[test]
fn loads_from_every_layout() {
    PRECISIONS.into_iter().for_each(loads_from_every_layout_in);
}

fn loads_from_every_layout_in(precision: Precision) {
    let cpu = cpu_in(precision, Instructions::Auto, 2);
    for dtype in DType::ALL {
        for (order, reversed) in [(PLANAR, &[][..]), (INTERLEAVED, &[]), (INTERLEAVED, &[3]), (PLANAR, &[1, 4])] {
            let mut host = HostTensor::new(Shape::new(2, 3, 2, 5, 7), dtype, order, reversed);
            for i in 0..2 * 3 * 2 * 5 * 7 {
                host.set([i / 210, i / 70 % 3, i / 35 % 2, i / 7 % 5, i % 7], (i * 7 % 251) as f32);
            }
            let view = host.view();
            for (top, left, height, width) in [(0, 0, 5, 7), (2, 3, 6, 9), (4, 6, 1, 1), (9, 9, 2, 2)] {
                let shape = FrameShape::new(height, width, 3);
                let mut arena = GuardedFrames::new(&cpu);
                let into = DeviceOffset(arena.reserve(cpu.frame_bytes(shape, 0)));
                let mut memory = arena.build();
                let map = Affine { mul: 0.5, add: -3.0 };
                let (batch, frame, channels, patch) = (1, 1, None, 1);
                let op = LoadTensor { from: &view, batch, frame, top, left, map, channels, patch, shape, into };
                cpu.load(&mut memory, &op, &Buffers::default(), &mut || false).unwrap();
                for (i, got) in read(&cpu, &memory, into.0, shape, 0).into_iter().enumerate() {
                    let i = i as u64;
                    let (y, x) = ((top + i / 3 / width).min(4), (left + i / 3 % width).min(6));
                    assert_eq!(got, rounded(precision, host.get([1, i % 3, 1, y, x]) * 0.5 - 3.0));
                }
            }
        }
    }
}

/// Pixels of patches have the channels of the definition, and come back as they were. The image ends within a patch.
#[test]
fn patches_are_channels_of_activations() {
    for precision in PRECISIONS {
        let cpu = cpu_in(precision, Instructions::Auto, 2);
        let shape = FrameShape::new(3, 4, 12);
        let mut host = HostTensor::new(Shape::new(1, 3, 1, 5, 7), DType::F32, PLANAR, &[]);
        (0..3 * 5 * 7).for_each(|i| host.set([0, i / 35, 0, i / 7 % 5, i % 7], i as f32));
        let mut arena = GuardedFrames::new(&cpu);
        let into = DeviceOffset(arena.reserve(cpu.frame_bytes(shape, 0)));
        let mut memory = arena.build();
        let (view, back) = (host.view(), HostTensor::new(host.shape, DType::F32, INTERLEAVED, &[]));
        let load = LoadTensor { patch: 2, ..plain_load(&view, 0, shape, into) };
        cpu.load(&mut memory, &load, &Buffers::default(), &mut || false).unwrap();
        for (i, found) in (0..).zip(read(&cpu, &memory, into.0, shape, 0)) {
            let (channel, x, y) = (i % 12, i / 12 % 4, i / 48);
            let (c, column, row) = (channel / 4, channel / 2 % 2, channel % 2);
            assert_eq!(found, host.get([0, c, 0, (2 * y + row).min(4), (2 * x + column).min(6)]));
        }
        let view = back.view();
        let store = StoreTensor { patch: 2, ..plain_store(into, shape, &view, 0) };
        cpu.store(&mut memory, &store, &Buffers::default()).unwrap();
        for i in 0..3 * 5 * 7 {
            let at = [0, i / 35, 0, i / 7 % 5, i % 7];
            assert_eq!(back.get(at), host.get(at));
        }
    }
}

#[test]
fn stores_into_every_layout() {
    PRECISIONS.into_iter().for_each(stores_into_every_layout_in);
}

fn stores_into_every_layout_in(precision: Precision) {
    let cpu = cpu_in(precision, Instructions::Auto, 2);
    let shape = FrameShape::new(6, 8, 7);
    let data = Lcg(3).fill(shape.elements() as usize);
    let mut data: Vec<f32> = data.into_iter().map(|v| rounded(precision, v)).collect();
    data[7] = f32::NAN;
    let rows: Vec<f32> = (0..6).map(|y| y as f32 * 0.4).collect();
    let columns: Vec<f32> = (0..8).map(|x| 1.0 + x as f32).collect();
    for dtype in DType::ALL {
        for (order, reversed) in [(PLANAR, &[][..]), (INTERLEAVED, &[]), (INTERLEAVED, &[3]), (PLANAR, &[1, 4])] {
            for divide in [None, Some(Fades { rows: &rows, columns: &columns })] {
                for sample in [None, Some(Posterior { seed: 99, logvar_channel: 4 })] {
                    let host = HostTensor::new(Shape::new(2, 3, 2, 5, 7), dtype, order, reversed);
                    let view = host.view();
                    let mut arena = GuardedFrames::new(&cpu);
                    let from = arena.frame(shape, 0, &data);
                    let mut memory = arena.build();
                    let map = Affine { mul: 150.0, add: 127.5 };
                    let clamp = Some((-0.9, 0.8));
                    let (batch, frame, clip, clip_frame) = (1, 1, 5, 12);
                    let op = StoreTensor {
                        from,
                        shape,
                        channel: 1,
                        divide,
                        clamp,
                        sample,
                        map,
                        channels: None,
                        patch: 1,
                        into: &view,
                        batch,
                        frame,
                        clip,
                        clip_frame,
                    };
                    cpu.store(&mut memory, &op, &Buffers::default()).unwrap();
                    for i in 0..3 * 5 * 7u64 {
                        let (c, y, x) = (i % 3, i / 3 / 7, i / 3 % 7);
                        let pixel = (y * 8 + x) as usize * 7;
                        let share = divide.map_or(1.0, |by| (by.rows[y as usize] * by.columns[x as usize]).max(1e-6));
                        let mut v = data[pixel + 1 + c as usize] / share;
                        v = if v.is_nan() { v } else { v.clamp(-0.9, 0.8) };
                        if sample.is_some() {
                            let logvar = data[pixel + 4 + c as usize] / share;
                            let place = noise::SamplePosition { batch: clip, frame: clip_frame, channel: c, y, x };
                            v += (0.5 * logvar.clamp(-30.0, 20.0)).exp() * noise::normal(99, place);
                        }
                        let v = v * 150.0 + 127.5;
                        let got = host.get([1, c, 1, y, x]);
                        let expected = match dtype {
                            DType::U8 if v.is_nan() => 0.0,
                            DType::U16 if v.is_nan() => 0.0,
                            DType::U8 => v.round_ties_even().clamp(0.0, 255.0),
                            DType::U16 => v.round_ties_even().clamp(0.0, 65535.0),
                            DType::F16 => half::f16::from_f32(v).to_f32(),
                            DType::BF16 => half::bf16::from_f32(v).to_f32(),
                            DType::F32 => v,
                        };
                        assert!(got == expected || (got.is_nan() && expected.is_nan()), "{dtype:?}: {got} {expected}");
                    }
                    let untouched = HostTensor::new(Shape::new(2, 3, 2, 5, 7), dtype, order, reversed);
                    assert_eq!(host.get([0, 0, 1, 0, 0]).to_bits(), untouched.get([0, 0, 1, 0, 0]).to_bits());
                }
            }
        }
    }
}

#[test]
fn tiles_blend_into_frames() {
    PRECISIONS.into_iter().for_each(tiles_blend_into_frames_in);
}

fn tiles_blend_into_frames_in(precision: Precision) {
    let cpu = cpu_in(precision, Instructions::Auto, 2);
    let (tile, whole) = (FrameShape::new(3, 4, 5), FrameShape::new(7, 9, 5));
    let data = Lcg(3).fill(tile.elements() as usize);
    let data: Vec<f32> = data.into_iter().map(|v| rounded(precision, v)).collect();
    let (rows, columns) = ([0.25, 1.0, 0.5], [0.1, 0.6, 1.0, 0.3]);
    let mut arena = GuardedFrames::new(&cpu);
    let from = arena.frame(tile, 0, &data);
    let into = DeviceOffset(arena.reserve(cpu.frame_bytes(whole, 0)));
    let mut memory = arena.build();
    let fades = Fades { rows: &rows, columns: &columns };
    let mut expected = vec![0.0f32; whole.elements() as usize];
    for (top, left, clear) in [(4, 5, true), (3, 2, false), (0, 0, false)] {
        let op = BlendTile { from, from_shape: tile, into, into_shape: whole, top, left, fades, clear };
        cpu.blend(&mut memory, &op, &Buffers::default()).unwrap();
        for (i, v) in data.iter().enumerate() {
            let (y, x, c) = (i / 20, i / 5 % 4, i % 5);
            let sum = &mut expected[((top as usize + y) * 9 + left as usize + x) * 5 + c];
            *sum = rounded(precision, *sum + v * (rows[y] * columns[x]));
        }
    }
    assert_eq!(read(&cpu, &memory, into.0, whole, 0), expected);
    let op = BlendTile { from, from_shape: tile, into, into_shape: whole, top: 5, left: 0, fades, clear: false };
    assert!(cpu.blend(&mut memory, &op, &Buffers::default()).is_err());
}
