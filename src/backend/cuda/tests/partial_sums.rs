//! Partial sums from one launch to the next, in place of a frame that both read.

use super::*;

/// Output f of a convolution that halves the frames sees inputs 2 f - 2, 2 f - 1 and 2 f.
const INPUTS: usize = 5;
const OUTPUTS: usize = 3;

/// The output frames with their statistics, each range in a launch of its own. Between launches the frame that both
/// read is lost.
fn run(gpu: &Cuda, layout: &ConvLayout, input: FrameShape, launches: &[Range<usize>]) -> Vec<Vec<u8>> {
    let output = layout.window.output(input, layout.cout);
    let sizes = gpu.sizes();
    let [in_bytes, out_bytes] = [input, output].map(|shape| sizes.frame_bytes(shape, layout.groups));
    let sums_bytes = sizes.partial_sums(layout, input, 1).unwrap().bytes;
    let mut end = 0;
    let mut take = |bytes: u64, count: usize| {
        let frames: Vec<DeviceOffset> = (0..count as u64).map(|i| DeviceOffset(end + i * bytes)).collect();
        end += bytes * count as u64;
        frames
    };
    let (inputs, outs, sums) = (take(in_bytes, INPUTS), take(out_bytes, OUTPUTS), take(sums_bytes, 2));
    let scratch = end;
    let staging = scratch + sizes.conv_scratch(layout, input, OUTPUTS as u64).next_multiple_of(FRAME_ALIGN);
    let load_bytes = sizes.staging_bytes(input);
    let host = PinnedBytes { load: 2 * load_bytes, store: 0, offloaded: 0 };
    let mut memory = gpu.allocate(staging + load_bytes, host).unwrap();
    gpu.poison(&mut memory, staging + load_bytes);
    let values = SeededRandom(7).values(input.elements() * INPUTS as u64, 1.0);
    let from = view(&values, [input.channels, INPUTS as u64, input.height, input.width]);
    let buffers = Buffers { scratch, staging: [staging; 2], ..Buffers::default() };
    for (frame, into) in (0..).zip(&inputs) {
        gpu.load(&mut memory, &plain_load(&from, frame, input, *into), &buffers, &mut never()).unwrap();
    }
    let prepared = prepare(gpu, layout, 6);
    for (i, launch) in launches.iter().enumerate() {
        let frames = launch.clone().map(|f| {
            let terms: &[(usize, u8)] = match f {
                0 => &[(0, 3)],
                _ => &[(2 * f - 2, 0), (2 * f - 1, 1), (2 * f, 2)],
            };
            let summed = usize::from(i > 0 && f == launch.start);
            let terms: Vec<(DeviceOffset, u8)> = terms[summed..].iter().map(|(t, slab)| (inputs[*t], *slab)).collect();
            frame(&terms, 0, None, outs[f])
        });
        let frames = frames.collect();
        let seen_again = inputs[2 * launch.end - 2];
        let after = PartialSumsOut { pending: vec![as_terms(&[(seen_again, 0)])], into: sums[i % 2] };
        let partial_sums =
            PartialSums { before: (i > 0).then(|| sums[1 - i % 2]), after: (launch.end < OUTPUTS).then_some(after) };
        run_op(gpu, &mut memory, conv_op(layout, input, frames, true, partial_sums), &prepared, scratch);
        gpu.finish(&mut memory, None).unwrap();
        gpu.write(&mut memory, PersistedRegion::Device(seen_again), &vec![0xff; in_bytes as usize]).unwrap();
    }
    let made = gpu.launcher.sizes.data_bytes(output) + layout.groups * 8;
    let read = |out: &DeviceOffset| {
        let mut bytes = vec![0; made as usize];
        gpu.read(&mut memory, PersistedRegion::Device(*out), &mut bytes).unwrap();
        bytes
    };
    outs.iter().map(read).collect()
}

#[test]
fn partial_sums_between_launches_change_no_bits() {
    for gpu in gpus() {
        for (cin, cout) in [(8, 8), (12, 20), (64, 64), (72, 128), (128, 136)] {
            // The last has several tiles for each multiprocessor.
            for (height, width) in [(2, 6), (16, 16), (18, 34), (38, 54), (262, 262)] {
                let layout = ConvLayout { slabs: 4, biases: 1, ..layout(cin, cout, Window::Down, Prologue::None) };
                let input = FrameShape::new(height, width, cin);
                let at_once = run(&gpu, &layout, input, std::slice::from_ref(&(0..3)));
                for launches in [&[0..1, 1..3][..], &[0..2, 2..3], &[0..1, 1..2, 2..3]] {
                    let what = format!("{cin} to {cout}, {height}x{width} in {}", name(&gpu));
                    assert!(run(&gpu, &layout, input, launches) == at_once, "{what}: launches of {launches:?}");
                }
            }
        }
    }
}
