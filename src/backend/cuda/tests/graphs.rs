//! Small operations go to the GPU as graphs, with the same results.

use std::sync::atomic::AtomicBool;

use super::*;
use crate::backend::cuda::launch::testing::{LAUNCHED, OFF};
use crate::exec::{self, Allocators, Call, Control, DeviceName, Extent, JobShape, OpenModel, Opening, Outputs, Pull};
use crate::ir::Shape;
use crate::model::Checkpoint;
use crate::model::Direction;
use crate::node;
use crate::testing::golden;

pub fn open(model: &str, keys: &[(&str, &str)]) -> OpenModel {
    let mut settings = node::defaults();
    keys.iter().for_each(|(key, value)| node::configure(&mut settings, key, value).unwrap());
    let (checkpoint, allocators) = (Checkpoint::open(&golden(model)).unwrap(), Allocators::default());
    let opening = Opening { checkpoint: &checkpoint, allocators, settings };
    exec::open(&[DeviceName::Place(TensorDevice::Cuda(0))], opening, &()).unwrap()
}

/// A clip of latents, and room for its frames.
pub struct LatentClip {
    latent: Vec<f32>,
    frames: Vec<f32>,
    latents: [u64; 4],
    pixels: [u64; 4],
}

impl LatentClip {
    pub fn new(frames: u64, rows: u64, columns: u64) -> LatentClip {
        let (latents, pixels) = ([16, frames, rows, columns], [3, 4 * frames - 3, 8 * rows, 8 * columns]);
        let latent = Lcg(12).fill(latents.iter().product::<u64>() as usize);
        LatentClip { latent, frames: vec![f32::NAN; pixels.iter().product::<u64>() as usize], latents, pixels }
    }

    pub fn decode(&mut self, model: &mut OpenModel) -> Vec<f32> {
        let (input, output) = (view(&self.latent, self.latents), view(&self.frames, self.pixels));
        let job = Call {
            direction: Direction::Decode,
            range: None,
            input,
            into: Outputs { output, logvar: None, stream: None },
            first_clip: 0,
        };
        let cancel = AtomicBool::new(false);
        model.run(&job, &mut Control::new(&cancel)).unwrap();
        self.frames.clone()
    }

    /// Pushes one latent at a time, and pulls all frames there are.
    fn stream(&mut self, model: &mut OpenModel) -> Vec<f32> {
        let ([channels, count, rows, columns], cancel) = (self.latents, AtomicBool::new(false));
        let plane = (rows * columns) as usize;
        let shape = Shape::new(1, channels, 0, rows, columns);
        let control = Control::new(&cancel);
        let start = JobShape { direction: Direction::Decode, input: shape, extent: Extent::Stream { first: 0 } };
        let mut stream = model.open_stream(&start, &control).unwrap();
        let (mut pushed, mut pulled) = (0, 0);
        let pixels = (self.pixels[2] * self.pixels[3]) as usize;
        let room = vec![f32::NAN; 3 * pixels];
        let into = view(&room, [3, 1, self.pixels[2], self.pixels[3]]);
        loop {
            let outputs = Outputs { output: into, logvar: None, stream: None };
            let mut written = 0;
            let control = &mut Control::new(&cancel);
            match stream.pull(&outputs, control, &mut written).unwrap() {
                Pull::Written => {
                    for c in 0..3 {
                        let at = (c * self.pixels[1] as usize + pulled) * pixels;
                        self.frames[at..at + pixels].copy_from_slice(&room[c * pixels..][..pixels]);
                    }
                    pulled += 1;
                }
                Pull::NeedsInput if pushed == count as usize => drop(stream.push(None).unwrap()),
                Pull::NeedsInput => {
                    let one: Vec<f32> = (0..channels as usize)
                        .flat_map(|c| &self.latent[(c * count as usize + pushed) * plane..][..plane])
                        .copied()
                        .collect();
                    pushed += stream.push(Some(&view(&one, [channels, 1, rows, columns]))).unwrap() as usize;
                }
                Pull::Ended => break,
            }
        }
        assert_eq!(pulled as u64, self.pixels[1]);
        self.frames.clone()
    }
}

#[test]
fn graphs_of_a_small_clip_change_no_bits() {
    if gpus().is_empty() {
        return;
    }
    for (model, precision) in [("small", "fp16"), ("medium", "fp16"), ("small", "bf16"), ("small", "fp32")] {
        let mut session = open(model, &[("slice_frames", "1"), ("precision", precision)]);
        let mut clip = LatentClip::new(9, 5, 4);
        OFF.set(true);
        LAUNCHED.set(0);
        let plain = clip.decode(&mut session);
        assert_eq!(LAUNCHED.get(), 0, "none without collecting");
        OFF.set(false);
        for run in 0..4 {
            LAUNCHED.set(0);
            assert!(clip.decode(&mut session) == plain, "{model}, run {run}");
            println!("{model}, run {run}: {} graphs", LAUNCHED.get());
            assert!(LAUNCHED.get() > 5, "slices are alike, so all but the first use graphs: {}", LAUNCHED.get());
        }
        LAUNCHED.set(0);
        assert!(clip.stream(&mut session) == plain, "{model}, streamed");
        println!("{model}, streamed: {} graphs", LAUNCHED.get());
        assert!(LAUNCHED.get() > 5, "streamed: {}", LAUNCHED.get());
    }
}

#[test]
fn graphs_are_not_used_for_large_frames() {
    if gpus().is_empty() {
        return;
    }
    let mut session = open("small", &[]);
    let mut clip = LatentClip::new(2, 192, 192);
    LAUNCHED.set(0);
    let (first, again) = (clip.decode(&mut session), clip.decode(&mut session));
    assert!(first == again);
    // What is left are the few operations at the size of the latent.
    println!("{} graphs", LAUNCHED.get());
    assert!(LAUNCHED.get() < 10, "{}", LAUNCHED.get());
}
