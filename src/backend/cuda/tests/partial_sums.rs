//! Partial sums from one launch to the next, in place of a frame that both read.

use super::*;

/// Output f of a convolution that halves the frames sees inputs 2 f - 2, 2 f - 1 and 2 f.
const INPUTS: usize = 5;
const OUTPUTS: usize = 3;

/// The output frames with their statistics, each range in a launch of its own. Between launches the frame that both
/// read is lost.
pub fn run(gpu: &Cuda, layout: &ConvLayout, input: FrameShape, launches: &[Range<usize>]) -> Vec<Vec<u8>> {
    let output = layout.window.output(input, layout.cout);
    let (sizes, mut places) = (gpu.sizes(), BlockPlaces::default());
    let [in_bytes, out_bytes] = [input, output].map(|shape| sizes.frame_bytes(shape, layout.norm.groups()));
    let (inputs, outs) = (places.frames(in_bytes, INPUTS), places.frames(out_bytes, OUTPUTS));
    let sums = places.frames(sizes.partial_sums(layout, input, 1).unwrap().bytes, 2);
    let (scratch, staging) = (sizes.conv_scratch(layout, input, OUTPUTS as u64), sizes.staging_bytes(input));
    let mut job = KernelJob::new(gpu, places, Room { scratch, staging, ..Room::default() });
    job.load_random(&mut Lcg(7), input, &inputs);
    let weights = [prepare(gpu, layout, 6)];
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
        job.run(conv_op(layout, input, frames, true, partial_sums), &weights);
        job.finish();
        job.write(seen_again, &vec![0xff; in_bytes as usize]);
    }
    job.read(&outs, gpu.launcher.sizes.data_bytes(output) + layout.norm.groups() * 8)
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
