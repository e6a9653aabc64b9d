//! How alike two clips are.

use crate::tensor::Frames;

pub struct Quality {
    /// Over all pixels of all frames, in dB; infinite if they are equal.
    pub psnr: f64,
    /// The mean over frames of the structural similarity of luma (Wang et al. 2004: Gaussian window of 11 pixels with
    /// a deviation of 1.5, constants 0.01 and 0.03).
    pub ssim: f64,
}

pub fn compare(a: &Frames, b: &Frames) -> Quality {
    let wide = |frame: &[u8]| frame.iter().map(|value| f32::from(*value)).collect::<Vec<_>>();
    let frames: Vec<_> = (0..a.count()).map(|i| of_frame(&wide(a.frame(i)), &wide(b.frame(i)), a.kind.width)).collect();
    mean(&frames)
}

/// Of one frame of interleaved RGB, from 0 to 255: the mean squared error, and the structural similarity.
pub fn of_frame(a: &[f32], b: &[f32], width: usize) -> (f64, f64) {
    let squares: f64 = a.iter().zip(b).map(|(x, y)| f64::from(x - y).powi(2)).sum();
    (squares / a.len() as f64, ssim(&luma(a), &luma(b), width))
}

pub fn psnr(mean_square: f64) -> f64 {
    10.0 * (255.0f64.powi(2) / mean_square).log10()
}

/// Of a clip, from those of its frames.
pub fn mean(frames: &[(f64, f64)]) -> Quality {
    let count = frames.len() as f64;
    let [square, ssim] =
        [|f: &(f64, f64)| f.0, |f: &(f64, f64)| f.1].map(|of| frames.iter().map(of).sum::<f64>() / count);
    Quality { psnr: psnr(square), ssim }
}

fn luma(rgb: &[f32]) -> Vec<f32> {
    rgb.chunks_exact(3).map(|p| 0.299 * p[0] + 0.587 * p[1] + 0.114 * p[2]).collect()
}

fn ssim(a: &[f32], b: &[f32], width: usize) -> f64 {
    let product = |x: &[f32], y: &[f32]| x.iter().zip(y).map(|(x, y)| x * y).collect::<Vec<_>>();
    let [ma, mb, aa, bb, ab] =
        [a.to_vec(), b.to_vec(), product(a, a), product(b, b), product(a, b)].map(|plane| blur(&plane, width));
    let (c1, c2) = ((0.01f32 * 255.0).powi(2), (0.03f32 * 255.0).powi(2));
    let at = |i: usize| {
        let (va, vb, covariance) = (aa[i] - ma[i] * ma[i], bb[i] - mb[i] * mb[i], ab[i] - ma[i] * mb[i]);
        let means = (2.0 * ma[i] * mb[i] + c1) / (ma[i] * ma[i] + mb[i] * mb[i] + c1);
        f64::from(means * (2.0 * covariance + c2) / (va + vb + c2))
    };
    (0..a.len()).map(at).sum::<f64>() / a.len() as f64
}

/// Both directions in turn; beyond the border stands the border.
fn blur(plane: &[f32], width: usize) -> Vec<f32> {
    let mut taps: [f32; 11] = std::array::from_fn(|i| (-(i as f32 - 5.0).powi(2) / (2.0 * 1.5f32.powi(2))).exp());
    let sum: f32 = taps.iter().sum();
    taps.iter_mut().for_each(|tap| *tap /= sum);
    let height = plane.len() / width;
    let along = |from: &[f32], at: &dyn Fn(usize, usize) -> usize| {
        (0..from.len())
            .map(|i| taps.iter().enumerate().map(|(k, tap)| tap * from[at(i, k)]).sum())
            .collect::<Vec<f32>>()
    };
    let shift = |i: usize, k: usize, count: usize| (i + k).saturating_sub(5).min(count - 1);
    let rows = along(plane, &|i, k| i / width * width + shift(i % width, k, width));
    along(&rows, &|i, k| shift(i / width, k, height) * width + i % width)
}
