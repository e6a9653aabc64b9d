//! Small operations go to the GPU as graphs, with the same results.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use super::*;
use crate::backend::cuda::launch::testing::{LAUNCHED, OFF};
use crate::exec::{self, Allocators, Call, Control, DeviceName, Outputs, Pull, Session};
use crate::ir::Shape;
use crate::model::Direction;
use crate::node;

fn checkpoint(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

fn open(weights: &Path, keys: &[(&str, &str)]) -> Box<dyn Session> {
    let mut settings = node::defaults();
    keys.iter().for_each(|(key, value)| node::configure(&mut settings, key, value).unwrap());
    exec::open(DeviceName::Cuda(0), weights, Allocators::default(), settings).unwrap()
}

/// A clip of latents, and room for its frames.
struct LatentClip {
    latent: Vec<f32>,
    frames: Vec<f32>,
    latents: [u64; 4],
    pixels: [u64; 4],
}

impl LatentClip {
    fn new(frames: u64, rows: u64, columns: u64) -> LatentClip {
        let (latents, pixels) = ([16, frames, rows, columns], [3, 4 * frames - 3, 8 * rows, 8 * columns]);
        let latent = SeededRandom(12).values(latents.iter().product(), 1.0);
        LatentClip { latent, frames: vec![f32::NAN; pixels.iter().product::<u64>() as usize], latents, pixels }
    }

    fn decode(&mut self, session: &mut dyn Session) -> Vec<f32> {
        self.run(session);
        self.frames.clone()
    }

    fn run(&mut self, session: &mut dyn Session) {
        let (input, output) = (view(&self.latent, self.latents), view(&self.frames, self.pixels));
        let job = Call {
            direction: Direction::Decode,
            range: None,
            input: &input,
            output: &output,
            logvar: None,
            stream: None,
        };
        let cancel = AtomicBool::new(false);
        session.run(&job, &mut Control::new(&cancel)).unwrap();
    }

    /// Pushes one latent at a time, and pulls all frames there are.
    fn stream(&mut self, session: &mut dyn Session) -> Vec<f32> {
        let ([channels, count, rows, columns], cancel) = (self.latents, AtomicBool::new(false));
        let plane = (rows * columns) as usize;
        let shape = Shape::new(1, channels, 0, rows, columns);
        let control = Control::new(&cancel);
        let mut stream = session.open_stream(Direction::Decode, shape, 0, &control).unwrap();
        let (mut pushed, mut pulled) = (0, 0);
        let pixels = (self.pixels[2] * self.pixels[3]) as usize;
        let room = vec![f32::NAN; 3 * pixels];
        let into = view(&room, [3, 1, self.pixels[2], self.pixels[3]]);
        loop {
            let outputs = Outputs { output: &into, logvar: None, stream: None };
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

fn no_gpu() -> bool {
    gpus().is_empty()
}

#[test]
fn graphs_of_a_small_clip_change_no_bits() {
    if no_gpu() {
        return;
    }
    for (model, precision) in [("small", "fp16"), ("medium", "fp16"), ("small", "bf16"), ("small", "fp32")] {
        let weights = checkpoint(&format!("tests/golden/{model}.safetensors"));
        let mut session = open(&weights, &[("slice_frames", "1"), ("precision", precision)]);
        let mut clip = LatentClip::new(9, 5, 4);
        OFF.set(true);
        LAUNCHED.set(0);
        let plain = clip.decode(&mut *session);
        assert_eq!(LAUNCHED.get(), 0, "none without collecting");
        OFF.set(false);
        for run in 0..4 {
            LAUNCHED.set(0);
            assert!(clip.decode(&mut *session) == plain, "{model}, run {run}");
            println!("{model}, run {run}: {} graphs", LAUNCHED.get());
            assert!(LAUNCHED.get() > 5, "slices are alike, so all but the first use graphs: {}", LAUNCHED.get());
        }
        LAUNCHED.set(0);
        assert!(clip.stream(&mut *session) == plain, "{model}, streamed");
        println!("{model}, streamed: {} graphs", LAUNCHED.get());
        assert!(LAUNCHED.get() > 5, "streamed: {}", LAUNCHED.get());
    }
}

#[test]
fn graphs_are_not_used_for_large_frames() {
    if no_gpu() {
        return;
    }
    let mut session = open(&checkpoint("tests/golden/small.safetensors"), &[]);
    let mut clip = LatentClip::new(2, 192, 192);
    LAUNCHED.set(0);
    let (first, again) = (clip.decode(&mut *session), clip.decode(&mut *session));
    assert!(first == again);
    // What is left are the few operations at the size of the latent.
    println!("{} graphs", LAUNCHED.get());
    assert!(LAUNCHED.get() < 10, "{}", LAUNCHED.get());
}

/// Where graphs pay. VIDEO_VAE_WEIGHTS names the checkpoint; `vvae bench --random` leaves one of the real size in the
/// temporary folder.
#[test]
#[ignore = "a measurement"]
fn graphs_time_against_plain_launches() {
    if no_gpu() {
        return;
    }
    let named = std::env::var_os("VIDEO_VAE_WEIGHTS").map(PathBuf::from);
    let weights = named.unwrap_or_else(|| checkpoint("host-examples/assets/demo.safetensors"));
    println!("{}\nlatents     pixels   plain ms  graphs ms    gain   graphs of a run", weights.display());
    for latents in [1, 5, 17] {
        for side in [8, 16, 32, 64] {
            let mut session = open(&weights, &[]);
            let mut clip = LatentClip::new(latents, side, side);
            let mut measure = |off: bool| {
                OFF.set(off);
                (0..3).for_each(|_| clip.run(&mut *session));
                LAUNCHED.set(0);
                let mut times: Vec<f64> = (0..9)
                    .map(|_| {
                        let started = Instant::now();
                        clip.run(&mut *session);
                        started.elapsed().as_secs_f64() * 1e3
                    })
                    .collect();
                times.sort_by(f64::total_cmp);
                (times[4], LAUNCHED.get() / 9)
            };
            // Both in turn, and twice, as the card's clock changes with time.
            let [(a, _), (b, graphs), (c, _), (d, _)] = [true, false, true, false].map(&mut measure);
            let (plain, collected) = (a.min(c), b.min(d));
            let gain = (plain / collected - 1.0) * 100.0;
            let pixels = format!("{0}x{0}", 8 * side);
            println!("{latents:>7} {pixels:>10} {plain:>10.3} {collected:>10.3} {gain:>6.1} % {graphs:>10}");
        }
    }
    OFF.set(false);
}
