//! Frames of more than 2^31 elements through every kernel. All input rows are equal, so the output is known from a
//! frame of a few rows: a convolution reads no further than its window.

use super::*;

const WIDTH: u64 = 4096;
const CHANNELS: u64 = 64;
/// 64 x 4096 x 8192 is 2^31; so the last 512 rows lie beyond.
const TALL: u64 = 8192 + 512;
const SHORT: u64 = 64;
/// Rows that an edge reaches, generously.
const EDGE: u64 = 32;

/// Frames of several gigabytes, so one test at a time.
static ALONE: Mutex<()> = Mutex::new(());

/// A tensor on the device with a row stride of 0: [channels][columns] values.
struct RepeatedRows {
    block: DeviceBlock,
    channels: u64,
    columns: u64,
}

impl RepeatedRows {
    fn new(cuda: &Cuda, channels: u64, columns: u64) -> RepeatedRows {
        let values = Lcg(17).fill((channels * columns) as usize);
        let block = DeviceBlock::new(cuda.context(), cuda.allocator, channels * columns * 4).unwrap();
        let _current = cuda.context().enter().unwrap();
        block.write(cuda.launcher.queue.stream(), 0, &values).unwrap();
        RepeatedRows { block, channels, columns }
    }

    fn view(&self, height: u64) -> View {
        let data = std::ptr::without_provenance_mut(self.block.at(0, 4).unwrap() as usize);
        let (shape, strides) = ([1, self.channels, 1, height, self.columns], [0, self.columns as i64, 0, 0, 1]);
        View::checked("rows", data, DType::F32, TensorDevice::Cuda(0), shape.into(), Some(strides), false).unwrap()
    }
}

/// Channels from `channel` on of a frame: [channel][row][column].
fn store(job: &mut KernelJob<Cuda>, from: DeviceOffset, shape: FrameShape, channel: u64, count: u64) -> Vec<f32> {
    let values = vec![f32::NAN; (count * shape.pixels()) as usize];
    let into = view(&values, [count, 1, shape.height, shape.width]);
    let op = StoreTensor { channel, ..plain_store(from, shape, &into, 0) };
    job.backend.store(&mut job.memory, &op, &job.buffers).unwrap();
    job.finish();
    values
}

/// One still image from pixels through every convolution; with `groups`, through norms and back to pixels too.
fn through(cuda: &Cuda, height: u64, groups: Option<u64>) -> Vec<f32> {
    let (pixels, wide) = (FrameShape::new(height, WIDTH, 3), FrameShape::new(height, WIDTH, CHANNELS));
    let small = FrameShape::new(height / 2, WIDTH / 2, CHANNELS);
    let count = groups.unwrap_or(16);
    let layout = |cin, cout, window, prologue| ConvLayout {
        slabs: 1,
        biases: 1,
        norm: Norm::Group { groups: count },
        ..super::layout(cin, cout, window, prologue)
    };
    let same = layout(CHANNELS, CHANNELS, Window::Same, Prologue::None);
    let enter = layout(3, CHANNELS, Window::Same, Prologue::None);
    let down = ConvLayout { window: Window::Down, ..same };
    let up = ConvLayout { window: Window::Up, ..same };
    let mixed = ConvLayout { shortcut: Some(CHANNELS), ..same };
    let normed = ConvLayout { prologue: Prologue::NormSilu, ..same };
    let leave = layout(CHANNELS, 3, Window::Same, Prologue::NormSilu);

    let sizes = cuda.sizes();
    let bytes = |shape| sizes.frame_bytes(shape, count);
    let mut places = BlockPlaces::default();
    let [first, last] = [0; 2].map(|_| places.take(bytes(pixels)));
    let [a, b, d, e] = [0; 4].map(|_| places.take(bytes(wide)));
    let c = places.take(bytes(small));
    let work = [(&enter, pixels), (&same, wide), (&down, wide), (&up, small), (&mixed, wide), (&leave, wide)];
    let scratch = work.map(|(layout, input)| sizes.conv_scratch(layout, input, 1)).into_iter().max().unwrap();
    let room = Room { scratch, staging: sizes.staging_bytes(pixels), ..Room::default() };
    let mut job = KernelJob::new(cuda, places, room);
    job.load(&plain_load(&RepeatedRows::new(cuda, 3, WIDTH).view(height), 0, pixels, first));
    let mut conv = |layout: &ConvLayout, input, terms: &[(DeviceOffset, u8)], residual, out, statistics| {
        let weights = [prepare(cuda, layout, 4)];
        let terms = match layout.prologue {
            Prologue::NormSilu if layout.cout > 3 => {
                job.run(normalise_op(layout, input, vec![(terms[0].0, a)]), &weights);
                &[(a, 0)]
            }
            _ => terms,
        };
        let frames = vec![frame(terms, 0, residual, out)];
        job.run(conv_op(layout, input, frames, statistics, PartialSums::NONE), &weights);
        job.finish();
    };
    conv(&enter, pixels, &[(first, 0)], None, a, false);
    conv(&same, wide, &[(a, 0)], Some(a), b, false);
    conv(&down, wide, &[(b, 0)], None, c, false);
    conv(&up, small, &[(c, 0)], None, d, false);
    conv(&mixed, wide, &[(b, 0), (d, 1)], None, e, groups.is_some());
    if groups.is_none() {
        return store(&mut job, e, wide, 0, 3);
    }
    conv(&normed, wide, &[(e, 0)], None, b, true);
    conv(&leave, wide, &[(b, 0)], None, last, false);
    store(&mut job, last, pixels, 0, 3)
}

fn row(values: &[f32], height: u64, channel: u64, y: u64) -> &[f32] {
    &values[((channel * height + y) * WIDTH) as usize..][..WIDTH as usize]
}

#[test]
fn conv_reaches_past_2_31_elements() {
    let _alone = ALONE.lock();
    for cuda in &gpus() {
        let which = name(cuda);
        let (tall, short) = (through(cuda, TALL, None), through(cuda, SHORT, None));
        for channel in 0..3 {
            for y in 0..TALL {
                let like = match y {
                    _ if y < EDGE => y,
                    _ if y >= TALL - EDGE => y + SHORT - TALL,
                    // The upsampler has two kinds of rows.
                    _ => EDGE + y % 2,
                };
                let (found, right) = (row(&tall, TALL, channel, y), row(&short, SHORT, channel, like));
                assert!(found == right, "{which}: row {y}, channel {channel}");
            }
        }
        assert!(row(&short, SHORT, 0, EDGE).iter().any(|v| v.abs() > 0.01), "there is something to see");
    }
}

/// `conv_out` counts its input in units of 16 bytes: 2^31 of them are 32 GiB.
#[test]
fn conv_out_reaches_past_2_31_units() {
    const BEYOND: u64 = 512;
    let _alone = ALONE.lock();
    let layout = ConvLayout {
        slabs: 1,
        biases: 1,
        norm: Norm::Group { groups: 1 },
        ..layout(128, 3, Window::Same, Prologue::NormSilu)
    };
    for cuda in &gpus() {
        let sizes = cuda.launcher.sizes;
        let last_rows = |height: u64| {
            let (shape, output) = (FrameShape::new(height, WIDTH, 128), FrameShape::new(height, WIDTH, 3));
            let mut places = BlockPlaces::default();
            let [input, out] = [shape, output].map(|shape| places.take(sizes.frame_bytes(shape, 1)));
            let mut job = KernelJob::new(cuda, places, Room::default());
            job.load(&plain_load(&RepeatedRows::new(cuda, 128, WIDTH).view(height), 0, shape, input));
            // The same for every height: mean 0, deviation 1.
            let statistics = [0.0f32, 1.0].map(f32::to_le_bytes).concat();
            job.write(DeviceOffset(input.0 + sizes.data_bytes(shape)), &statistics);
            let (weights, frames) = ([prepare(cuda, &layout, 4)], vec![frame(&[(input, 0)], 0, None, out)]);
            job.run(conv_op(&layout, shape, frames, false, PartialSums::NONE), &weights);
            let row = WIDTH * 3 * sizes.element();
            job.read(&[DeviceOffset(out.0 + (height - SHORT) * row)], SHORT * row)
        };
        let tall = (32 << 30) / sizes.row_bytes(FrameShape::new(1, WIDTH, 128)) + BEYOND;
        if cuda.free_bytes() < 36 << 30 {
            println!("skipped: 36 GiB are needed");
            continue;
        }
        assert!(last_rows(tall) == last_rows(2 * SHORT), "{}", name(cuda));
    }
}

/// Statistics see the whole frame, so rows are compared with rows of the same frame, and the edges loosely with those
/// of a frame of half the height.
#[test]
fn norms_reach_past_2_31_elements() {
    let _alone = ALONE.lock();
    for cuda in &gpus() {
        let which = name(cuda);
        // Groups of 4 channels have their statistics from the convolution, smaller ones from a pass of their own.
        for groups in [16, 32] {
            let (tall, half) = (through(cuda, TALL, Some(groups)), through(cuda, TALL / 2, Some(groups)));
            let (mut found, mut right) = (Vec::new(), Vec::new());
            for channel in 0..3 {
                for y in EDGE..TALL - EDGE {
                    let same = row(&tall, TALL, channel, y) == row(&tall, TALL, channel, EDGE + y % 2);
                    assert!(same, "{which}, {groups} groups: row {y}, channel {channel}");
                }
                for y in (0..EDGE).chain(TALL - EDGE..TALL) {
                    found.extend_from_slice(row(&tall, TALL, channel, y));
                    let like = if y < EDGE { y } else { y - TALL / 2 };
                    right.extend_from_slice(row(&half, TALL / 2, channel, like));
                }
            }
            let error = relative_error(&found, &right);
            assert!(error < 2e-2, "{which}, {groups} groups: {error:.1e}");
        }
    }
}

/// A mixture of keys that all occur equally often is that of one of each.
#[test]
#[ignore = "takes minutes on the fastest GPU"]
fn attention_reaches_past_2_31_elements() {
    let (width, channels) = (1408, 512);
    let _alone = ALONE.lock();
    for cuda in &gpus() {
        let which = name(cuda);
        let attend = |height: u64| {
            let shape = FrameShape::new(height, width, channels);
            let wide = shape.with_channels(3 * channels);
            let (sizes, mut places) = (cuda.sizes(), BlockPlaces::default());
            let (from, to) = (places.take(sizes.frame_bytes(wide, 1)), places.take(sizes.frame_bytes(shape, 1)));
            let (scratch, staging) = (sizes.attention_scratch(shape, 1), sizes.staging_bytes(shape.with_channels(8)));
            let mut job = KernelJob::new(cuda, places, Room { scratch, staging, ..Room::default() });
            job.load(&plain_load(&RepeatedRows::new(cuda, wide.channels, width).view(height), 0, wide, from));
            job.run(Op::Attention(AttentionOp { shape, frames: vec![(from, to)] }), &[]);
            store(&mut job, to, shape, channels - 8, 8)
        };
        let height = 1024;
        assert!(3 * channels * width * height > 1 << 31);
        let (tall, one) = (attend(height), attend(1));
        for (channel, right) in one.chunks_exact(width as usize).enumerate() {
            for y in 0..height as usize {
                let found = &tall[(channel * height as usize + y) * width as usize..][..width as usize];
                let error = relative_error(found, right);
                assert!(error < 1e-2, "{which}: row {y}, channel {channel}: {error:.1e}");
            }
        }
    }
}
