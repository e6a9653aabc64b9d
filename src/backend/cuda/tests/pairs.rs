//! Pairs of frames that share products, against the CPU; and the bits of frames that are computed alone.

use super::*;
use crate::backend::cuda::launch::tiling::PAIRS;
use crate::testing::paired;

pub(super) const FRAMES: usize = 6;
/// Of the three taps of the CPU.
const SHORTCUT_SLAB: u64 = 3;

/// The slabs of pairs of the weights of three taps.
struct PairedWeights(RandomWeights, Window);

impl SlabSource for PairedWeights {
    fn slab(&mut self, slab: u64, into: &mut [f32]) {
        let recipes = paired(self.1);
        let Some(of) = recipes.slabs().get(slab as usize) else { return self.0.slab(SHORTCUT_SLAB, into) };
        let mut tap_weights = vec![0.0; into.len()];
        into.fill(0.0);
        for ((tap, _), factor) in of.products.iter().zip(&of.factors) {
            self.0.slab(*tap as u64, &mut tap_weights);
            into.iter_mut().zip(&tap_weights).for_each(|(sum, weight)| *sum += weight * *factor as f32);
        }
    }
    fn bias(&mut self, bias: u64, into: &mut [f32]) {
        self.0.bias(bias, into);
    }
    fn norm(&mut self, gamma: &mut [f32], beta: &mut [f32]) {
        self.0.norm(gamma, beta);
    }
}

/// A convolution of a clip, its frames divided among launches.
pub(super) struct ClipCase {
    pub layout: ConvLayout,
    pub input: FrameShape,
    /// Of the random input. Weights are divided by its root, so that neither they nor sums leave the range of f16.
    pub factor: f32,
    /// Mean and half the range of the biases.
    pub bias: (f32, f32),
}

impl ClipCase {
    /// Returns the output frames, and their bytes with their statistics.
    pub fn run<B: RawMemory>(&self, backend: &B, launches: &[Range<usize>]) -> (Vec<f32>, Vec<Vec<u8>>) {
        let (layout, input) = (&self.layout, self.input);
        let output = layout.window.output(input, layout.cout);
        let shortcut_shape = input.with_channels(layout.shortcut.unwrap_or(1));
        let (sizes, mut places) = (backend.sizes(), BlockPlaces::default());
        let bytes = |shape| sizes.frame_bytes(shape, layout.norm.groups());
        let mut take = |shape| places.frames(bytes(shape), FRAMES);
        let (inputs, shortcuts, residuals, outs) = (take(input), take(shortcut_shape), take(output), take(output));
        let staging =
            [input, output, shortcut_shape].map(|shape| sizes.staging_bytes(shape)).into_iter().max().unwrap();
        let scratch = sizes.conv_scratch(layout, input, FRAMES as u64);
        let mut job = KernelJob::new(backend, places, Room { scratch, staging, ..Room::default() });
        let mut random = Lcg(17);
        job.load_random_times(self.factor, &mut random, input, &inputs);
        job.load_random(&mut random, shortcut_shape, &shortcuts);
        job.load_random(&mut random, output, &residuals);
        let weight_bytes = FRAME_ALIGN + sizes.weight_bytes(layout);
        let store = backend.allocate_weights(weight_bytes, Residency::Device).unwrap();
        let mut plain = weights(&ConvLayout { slabs: 3, ..*layout }, 6);
        plain.scale /= self.factor.sqrt();
        plain.bias = self.bias;
        let conv = match layout.pairs.is_some() {
            true => crate::testing::prepare(
                backend,
                (&store, FRAME_ALIGN),
                layout,
                &mut PairedWeights(plain, layout.window),
            ),
            false => crate::testing::prepare(backend, (&store, FRAME_ALIGN), layout, &mut plain),
        };
        let weights = [conv.unwrap()];
        for launch in launches {
            let frames = launch.clone().map(|t| {
                // The CPU has three taps and no folded slabs.
                let first = |tap: usize| (t + tap).saturating_sub(2);
                let causal = (0..3).map(|tap| (inputs[first(tap)], tap as u8)).collect::<Vec<_>>();
                let recipe = paired(layout.window).recipe(t as u64);
                let paired = recipe.terms().iter().map(|term| (inputs[term.input as usize], term.slab));
                let mut terms = match layout.pairs {
                    Some(_) => paired.collect(),
                    None if layout.slabs == 1 => vec![(inputs[t], 0)],
                    None => causal,
                };
                if layout.shortcut.is_some() {
                    terms.push((shortcuts[t], layout.slabs as u8));
                }
                // Upsamplers have no residual.
                let residual = (t % 2 == 0 && layout.window != Window::Up).then_some(residuals[t]);
                frame(&terms, 0, residual, outs[t])
            });
            let frames = frames.collect();
            job.run(conv_op(layout, input, frames, true, PartialSums::NONE), &weights);
            job.finish();
        }
        let values = job.store(output, &outs);
        let bytes = job.read(&outs, bytes(output));
        (values, bytes)
    }
}

#[test]
fn pairs_match_the_cpu_and_frames_alone_have_the_same_bits() {
    let cpu = Cpu::new(CpuOptions::default()).unwrap();
    for gpu in gpus().iter().filter(|gpu| gpu.profile().pairs.is_some()) {
        for (height, width) in [(1, 1), (7, 5), (16, 16), (18, 34), (37, 53), (130, 200)] {
            let (same, up) = (Window::Same, Window::Up);
            for (cin, cout, window, shortcut) in [
                (8, 8, same, None),
                (16, 24, same, Some(24)),
                (64, 64, same, None),
                (72, 128, same, Some(80)),
                (128, 136, same, None),
                (8, 8, up, None),
                (24, 40, up, None),
                (64, 64, up, None),
                (128, 192, up, None),
            ] {
                if window == up && !gpu.profile().upsampler_pairs {
                    continue;
                }
                let base = ConvLayout { shortcut, biases: 1, ..layout(cin, cout, window, Prologue::None) };
                let input = FrameShape::new(height, width, cin);
                let slabs = paired(Window::Same).slabs().len() as u64;
                // Upsamplers read frames that are not normalised. Sums of two of these would be infinite in f16.
                let (factor, bias) = (if window == up { 4e4 } else { 1.0 }, (0.0, 1.0));
                let paired = ClipCase { layout: ConvLayout { pairs: Some(PAIRS), slabs, ..base }, input, factor, bias };
                let whole = std::slice::from_ref(&(0..FRAMES));
                let (expected, _) = ClipCase { layout: base, input, factor, bias }.run(&cpu, whole);
                let (found, bits) = paired.run(gpu, whole);
                let what = format!("{window:?} {cin} to {cout}, {height}x{width}");
                assert_close(std::slice::from_ref(gpu), 2e-3, &what, &expected, |_| found.clone());
                for launches in [&[0..1, 1..2, 2..3, 3..4, 4..5, 5..6][..], &[0..2, 2..4, 4..6], &[0..3, 3..6]] {
                    assert!(paired.run(gpu, launches).1 == bits, "{what} in {}: launches of {launches:?}", name(gpu));
                }
            }
        }
    }
}
