//! Images with activations of more than 2^31 elements, compared row by row with smaller ones. All input rows are equal,
//! so each result row, except near the edges, must equal the row one period above it, bit by bit. Rows near an edge are
//! compared with those of an image of half the height, where norms see nearly the same values.

use std::path::Path;

use crate::common::safetensors::{Folder, to_bytes};
use crate::common::weights::{Sizes, random_weights};
use crate::common::{Buffer, Random, Vae, run_info};
use crate::driver::Gpu;
use crate::open;
use video_vae::capi::*;

/// Wide at full resolution, for the elements; narrow below, for attention.
const CHANNELS: [usize; 5] = [64, 8, 8, 8, 8];
/// Pixels per latent pixel.
const SCALE: i64 = 16;
const COLUMNS: i64 = 375;
const ROWS: i64 = 450;
/// Latent rows that an edge affects: more than the number of convolutions.
const EDGE: usize = 32;

fn checkpoint(folder: &Folder) -> std::path::PathBuf {
    let config =
        Sizes { channels: CHANNELS.map(|c| c as u64).to_vec(), layers: 1, groups: 8, latent: 4, temporal_levels: 1 };
    folder.file("wide.safetensors", &to_bytes(&random_weights(&config.model(), 3), config.groups))
}

/// Runs images of one row per channel, repeated downwards.
struct LargeImage {
    vae: Vae,
    node: &'static str,
}

impl LargeImage {
    fn open(weights: &Path, node: &'static str) -> LargeImage {
        LargeImage { vae: open(weights), node }
    }

    /// The result for an image of `rows` latent rows: [channel][row][column].
    fn run(&self, rows: i64) -> Buffer {
        let latent = [1, 4, 1, rows, COLUMNS];
        let video = [1, 3, 1, rows * SCALE, COLUMNS * SCALE];
        let (from, to) = if self.node == "encode" { (video, latent) } else { (latent, video) };
        let [_, channels, _, _, width] = from;
        let row = Buffer::random(&mut Random(8), [1, channels, 1, 1, width]);
        let strides = [0, width, 0, 0, 1];
        let input = vvae_tensor { shape: from.as_ptr(), strides: strides.as_ptr(), ..row.tensor() };
        let plan = self.vae.plan(self.node, from).unwrap();
        assert_eq!(plan.0.exact, 1, "it fits without tiles:\n{}", plan.1);
        let output = Buffer::new(VVAE_DTYPE_F32, to);
        self.vae.run(self.node, &input, &output.tensor(), &run_info()).unwrap();
        output
    }
}

fn row(image: &Buffer, channel: usize, y: usize) -> &[f32] {
    let [_, _, _, rows, columns] = image.shape.map(|n| n as usize);
    &image.f32()[(channel * rows + y) * columns..][..columns]
}

fn check(node: &'static str) {
    let Some(_gpu) = Gpu::open() else { return };
    let elements = CHANNELS[0] as i64 * ROWS * COLUMNS * SCALE * SCALE;
    // Rows away from the edges are beyond 2^31 elements too.
    assert!(elements * (ROWS - 2 * EDGE as i64) / ROWS > 1 << 31);
    let folder = Folder::new(&format!("large-{node}"));
    let weights = checkpoint(&folder);
    let image = LargeImage::open(&weights, node);
    let (tall, half) = (image.run(ROWS), image.run(ROWS / 2));
    let period = if node == "encode" { 1 } else { SCALE as usize };
    let (edge, rows, half_rows) = (EDGE * period, tall.shape[3] as usize, half.shape[3] as usize);
    let (mut difference, mut size) = (0f64, 0f64);
    for channel in 0..tall.shape[1] as usize {
        for y in edge + period..rows - edge {
            let first = edge + (y - edge) % period;
            assert!(row(&tall, channel, y) == row(&tall, channel, first), "row {y} of {rows}, channel {channel}");
        }
        let edges = (0..edge).map(|y| (y, y)).chain((0..edge).map(|y| (rows - 1 - y, half_rows - 1 - y)));
        for (tall_row, half_row) in edges {
            for (a, b) in row(&tall, channel, tall_row).iter().zip(row(&half, channel, half_row)) {
                assert!(a.is_finite(), "row {tall_row}, channel {channel}");
                difference += f64::from(a - b).powi(2);
                size += f64::from(*b).powi(2);
            }
        }
    }
    let error = (difference / size).sqrt();
    println!("{node}: edges are {error:.1e} from those of an image of half the height");
    assert!(error < 0.1, "{error:.1e}");
    let varied = row(&tall, 0, rows / 2);
    assert!(varied.iter().any(|v| (v - varied[0]).abs() > 1e-3), "the result is not constant");
}

#[test]
fn frames_past_2_31_elements_decode() {
    check("decode");
}

#[test]
fn frames_past_2_31_elements_encode() {
    check("encode");
}
